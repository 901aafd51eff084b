"""The learner's local devices: which they are, what each of them holds, and whether that fits.

With more than one, each minibatch is split over them along its batch axis and everything else is replicated: the update
is the same program, written for the whole minibatch, and XLA partitions it and sums the gradients between devices.
"""

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import config_dict

from longhaul import codec
from longhaul.errors import ConfigError
from longhaul.networks import QNetwork, init_params
from longhaul.types import ExperienceSpec

_BATCH_AXIS = "batch"
# Scalars of a transition on its way to the device: action, return, discount, probability.
_SCALARS = 4
_WORD_BYTES = 4


def make_mesh(config: config_dict.ConfigDict) -> Mesh | None:
    """Returns the devices that config.learner.devices asks for; None for one, which needs no partitioning.

    Raises:
      ConfigError: there are fewer, or a minibatch does not divide among them.
    """
    asked, local, batch_size = int(config.learner.devices), jax.local_devices(), int(config.learner.batch_size)
    if asked > len(local):
        raise ConfigError(
            f"config.learner.devices is {asked}, and this process sees {len(local)} ({local[0].platform}): ask for at "
            f"most {len(local)}, or 0 for all there are"
        )
    count = asked or len(local)
    if batch_size % count:
        above = -(-batch_size // count) * count
        nearest = f"{above - count} or {above}" if above > count else f"{above}"
        raise ConfigError(
            f"config.learner.batch_size is {batch_size}, and does not divide among {count} devices "
            f"(config.learner.devices is {asked}): make it {nearest}, or use fewer devices"
        )
    return Mesh(np.array(local[:count]), (_BATCH_AXIS,)) if count > 1 else None


def replicated(mesh: Mesh | None) -> NamedSharding | None:
    """Returns where a whole copy lies on each device; None, jax's own choice, without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def split_packed(mesh: Mesh) -> NamedSharding:
    """Returns where packed batches [K, B, columns] lie: each device has its share of every minibatch."""
    return NamedSharding(mesh, PartitionSpec(None, _BATCH_AXIS))


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Returns a tree of arrays with a copy on each device, safe to donate; without a mesh the very tree given."""
    if mesh is None:
        return tree
    return jax.jit(lambda t: jax.tree_util.tree_map(jnp.copy, t), out_shardings=replicated(mesh))(tree)


class Memory(NamedTuple):
    """Bytes on each device; layers' outputs within an update, which XLA plans, are not counted.

    Attributes:
      weights: of the online network.
      optimizer: its moments.
      target: the target network.
      copies: gradients, weights on their way to the link, and a state on its way to a checkpoint.
      cache: rows.
      batches: two batches as they cross, new rows of one, and a minibatch's rows as they lie and as float32.
    """

    weights: int
    optimizer: int
    target: int
    copies: int
    cache: int
    batches: int


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(tree))


def weights_shapes(network: QNetwork, spec: ExperienceSpec) -> Any:
    """Returns the weights' shapes and dtypes; allocates nothing."""
    return jax.eval_shape(lambda: init_params(network, spec, 0))


def check_weights_size(shapes: Any) -> None:
    """Refuses a network whose weights no gateway would take.

    Raises:
      ConfigError: they are too large.
    """
    size = sum(leaf.size for leaf in jax.tree_util.tree_leaves(shapes)) * _WORD_BYTES
    if size > codec.MAX_WEIGHTS_BYTES:
        raise ConfigError(
            f"the network's weights are {size} bytes, and at most {codec.MAX_WEIGHTS_BYTES} are sent: make "
            "config.agent.hidden smaller"
        )


def measure(
    params: Any,
    optimizer: optax.GradientTransformation,
    spec: ExperienceSpec,
    config: config_dict.ConfigDict,
    cache_rows: int,
    count: int,
) -> Memory:
    """Returns what the learner is going to hold on each device, from shapes alone.

    Args:
      params: weights, or their shapes and dtypes.
      optimizer: of the learner.
      spec: of the experience.
      config: `learner` is read.
      cache_rows: the cache's capacity.
      count: devices.
    """
    minibatches, share = int(config.learner.minibatches_per_pull), int(config.learner.batch_size) // count
    rows_each = 2 * spec.stack  # of a transition
    packed = minibatches * share * (rows_each + _SCALARS) * _WORD_BYTES
    # New rows go to every device, whoever's share refers to them.
    new_rows = minibatches * share * count * rows_each * spec.row_bytes
    as_float = int(np.prod(spec.row_shape)) * _WORD_BYTES
    weights, moments = _bytes(params), _bytes(jax.eval_shape(optimizer.init, params))
    return Memory(
        weights=weights,
        optimizer=moments,
        target=weights,
        copies=2 * weights + (2 * weights + moments),
        cache=cache_rows * spec.row_bytes,
        batches=2 * packed + new_rows + share * rows_each * (spec.row_bytes + as_float),
    )


def announce(memory: Memory, cache_rows: int, mesh: Mesh | None, config: config_dict.ConfigDict) -> None:
    """Logs the learner's memory in one line, before any of it is allocated.

    Raises:
      ConfigError: the device says how much it has, and this is more.
    """
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
    each = f"each of {len(devices)} x " if len(devices) > 1 else ""
    parts = ", ".join(
        f"{name} {_mib(size)}" + (f" ({cache_rows:,} rows)" if name == "cache" else "")
        for name, size in memory._asdict().items()
    )
    total = sum(memory)
    logging.info("learner's memory on %s%s: %s, in all %s", each, devices[0].device_kind, parts, _mib(total))
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)  # no statistics of a CPU's
        if not 0 < limit < total:
            continue
        left = limit - (total - memory.cache)
        mend = (
            f"lower config.learner.cache_bytes to {left} or less (the cache takes {memory.cache} now)"
            if left > 0
            else "no config.learner.cache_bytes is small enough: make config.agent.hidden or batch_size smaller"
        )
        raise ConfigError(f"the learner needs {total} bytes on {device}, which has {limit}: {mend}")


def _mib(size: int) -> str:
    """Says bytes in MiB, whole ones from a hundred on."""
    mib = size / 2**20
    return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.1f} MiB"
