"""Q-values of the newest weights, for acting and for evaluation: one compiled call of a fixed batch shape.

With distributions they are the means. Noisy layers are noisy where a noise seed is given, afresh at each call and apart
for each observation: actors explore by it, evaluation goes without.
"""

import functools
from typing import Any

import jax
import numpy as np
from ml_collections import config_dict

from longhaul import codec, networks
from longhaul.errors import Corruption
from longhaul.heads import NOISE
from longhaul.types import ExperienceSpec, Params

_ACTORS = 2  # of the run's keys; 1 is the learner's (dqn.init_state)


@functools.lru_cache(maxsize=8)
def _compiled(network: Any, noisy: bool) -> Any:
    """One jitted function per network, so that evaluating again does not compile again.

    It is `(params, stacks) -> q_values`; with noise `(params, stacks, key, number of the call) -> q_values`.
    """

    def apply_noisy(params: Params, stacks: jax.Array, key: jax.Array, calls: jax.Array) -> jax.Array:
        return network.apply(params, stacks, rngs={NOISE: jax.random.fold_in(key, calls)})

    return jax.jit(apply_noisy if noisy else network.apply)


@functools.lru_cache(maxsize=8)
def _first_params(network: Any, spec: ExperienceSpec, seed: int) -> Params:
    """Random weights, kept for the same reason: making them compiles too."""
    return networks.init_params(network, spec, seed)


class Policy:
    """The Q-network with the weights last adopted; its own random ones (version 0) before that.

    Args:
      spec: of the experience.
      config: whole configuration.
      batch: observations per call, B; one shape, so compiled once.
      noise_seed: of noisy layers, apart for each actor; None for no noise. Not read without config.agent.noisy_sigma.
    """

    def __init__(self, spec: ExperienceSpec, config: config_dict.ConfigDict, batch: int, noise_seed: int | None = None):
        network = networks.make_network(spec, config)
        self._noise_key: jax.Array | None = None
        if noise_seed is not None and config.agent.noisy_sigma > 0:
            actors = jax.random.fold_in(jax.random.PRNGKey(config.seed), _ACTORS)
            self._noise_key = jax.random.fold_in(actors, noise_seed)
        self._calls = 0
        self._apply = _compiled(network, self._noise_key is not None)
        self._params = _first_params(network, spec, config.seed)
        self._shapes = {name: leaf.shape for name, leaf in networks.flatten_params(self._params).items()}
        self._input_shape = (batch, spec.stack, *spec.row_shape)

    @property
    def params(self) -> Params:
        """The weights last adopted, on the device."""
        return self._params

    def q_values(self, stacks: np.ndarray) -> np.ndarray:
        """Returns float32 [B, num_actions] for stacked rows [B, stack, *row_shape] of the row dtype."""
        return np.asarray(self.begin(stacks))

    def begin(self, stacks: np.ndarray) -> jax.Array:
        """Begins to value stacked rows; returns what np.asarray waits for, and makes the values of `q_values` from.

        `stacks` must stay as they are until then: XLA may read them in place.
        """
        assert stacks.shape == self._input_shape, (stacks.shape, self._input_shape)
        noise: tuple[Any, ...] = ()
        if self._noise_key is not None:
            noise = self._noise_key, np.uint32(self._calls % 2**32)
            self._calls += 1
        return self._apply(self._params, stacks, *noise)

    def adopt(self, payload: bytes) -> None:
        """Acts on packed weights from now on; on an error the ones before stay.

        Raises:
          Corruption: the bytes don't unpack, the weights are another network's, or some are not finite.
        """
        flat = codec.unpack_weights(payload)
        shapes = {name: leaf.shape for name, leaf in flat.items()}
        if shapes != self._shapes:
            odd = sorted(set(shapes.items()) ^ set(self._shapes.items()))[0]
            raise Corruption(f"weights of another network: {odd[0]} has shape {odd[1]} at one end only")
        for name, leaf in flat.items():
            if not np.isfinite(leaf).all():
                raise Corruption(f"weights {name} are not finite")
        self._params = jax.device_put(networks.unflatten_params(flat))
