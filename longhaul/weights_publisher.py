"""The learner's weights on their way out: copied on the device, checked, packed and handed to the link."""

import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict

from longhaul import codec, networks
from longhaul.background import NewestOnly
from longhaul.types import Params, Snapshot


class WeightsPublisher:
    """Packs weights and hands them to the link, in a thread of its own: a big network takes a while to compress.

    Args:
      link: a LinkClient.
      config: `link` is read.
      epoch: of this learner.
      version: last one published before; the next is one more.

    Attributes:
      version: last one published.
      refused: weights not published because they are not finite.
      not_before_s: time.monotonic() from which the byte budget allows the next.
    """

    def __init__(self, link: Any, config: config_dict.ConfigDict, epoch: int, version: int):
        self._link = link
        self._dtype = config.link.weights_dtype
        self._budget_bytes_per_s = float(config.link.weights_budget_bytes_per_s)
        self._epoch = epoch
        self.version = version
        self.refused = 0
        self.not_before_s = 0.0
        # Copied on the device, in its order: the learner goes on donating its own, and this one is read at leisure.
        self._copy = jax.jit(_copy_and_check)
        self._worker: NewestOnly[tuple[Params, jax.Array]] = NewestOnly("weights-publisher", self._publish)

    def submit(self, params: Params) -> None:
        """Publishes these weights unless newer ones overtake them; they may be donated afterwards."""
        self._worker.submit(self._copy(params))

    def check(self) -> None:
        """Raises the thread's error, if it had one."""
        self._worker.check()

    def close(self, timeout_s: float) -> None:
        """Publishes what waits, and ends."""
        self._worker.close(timeout_s)

    def _publish(self, copied: tuple[Params, jax.Array]) -> None:
        params, finite = jax.device_get(copied)
        if not finite:
            self.refused += 1
            logging.error("weights are not finite and were not published (%d times so far)", self.refused)
            return
        payload = codec.pack_weights(networks.flatten_params(params), self._dtype)
        self._link.publish(Snapshot(self._epoch, self.version + 1, payload))
        self.version += 1
        if self._budget_bytes_per_s > 0:
            self.not_before_s = time.monotonic() + len(payload) / self._budget_bytes_per_s


def _copy_and_check(params: Params) -> tuple[Params, jax.Array]:
    leaves = jax.tree_util.tree_leaves(params)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
    return jax.tree_util.tree_map(jnp.copy, params), finite
