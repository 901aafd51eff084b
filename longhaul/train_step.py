"""From a batch off the link to one call on the device: its checks, its packing, and the jitted step over K minibatches.

A batch crosses to the device as one int32 array, floats by their bits, and comes back as one float32 array: at a
thousand updates a second each further array would cost more than the numbers in it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longhaul import devices
from longhaul.dqn import METRICS, Minibatch, TrainState, Update
from longhaul.errors import Corruption, MismatchError
from longhaul.types import Batch, ExperienceSpec

# Columns of a packed transition after its slots.
SCALARS = ("actions", "returns", "discounts", "probabilities")

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

TrainStep = Callable[[TrainState, jax.Array, np.ndarray], tuple[TrainState, jax.Array]]


class BatchShape(NamedTuple):
    """What every batch must look like.

    Attributes:
      minibatches: K.
      batch_size: B.
      cache_rows: slots are below it.
    """

    minibatches: int
    batch_size: int
    cache_rows: int


def check_batch(batch: Batch, spec: ExperienceSpec, shape: BatchShape) -> None:
    """Checks shapes, dtypes and ranges, before anything of a batch is used; a silent broadcast would train on nonsense.

    Returns and discounts may be non-finite: the update they would spoil is left out and counted.

    Raises:
      MismatchError: a column's shape or dtype is not what was asked for.
      Corruption: a slot or an action is out of range.
    """
    lead = (shape.minibatches, shape.batch_size)
    expected = (
        ("slots", _INT32, (*lead, 2 * spec.stack)),
        ("actions", _INT32, lead),
        ("returns", _FLOAT32, lead),
        ("discounts", _FLOAT32, lead),
        ("probabilities", _FLOAT32, lead),
        ("new_slots", _INT32, batch.new_slots.shape[:1]),
        ("new_rows", np.dtype(spec.row_dtype), (*batch.new_slots.shape[:1], *spec.row_shape)),
    )
    for name, dtype, wanted in expected:
        column = getattr(batch, name)
        if column.dtype != dtype or column.shape != wanted:
            raise MismatchError(
                f"batch {batch.sequence}: {name} is {column.dtype.name}{list(column.shape)}, and must be "
                f"{dtype.name}{list(wanted)}"
            )
    for name, limit in (("slots", shape.cache_rows), ("actions", spec.num_actions)):
        # Seen without its sign a negative number is larger than any limit: one pass tests both ends.
        if getattr(batch, name).view(np.uint32).max() >= limit:
            raise Corruption(f"batch {batch.sequence}: {name} are not all from 0 to {limit - 1}")


def pack_batch(batch: Batch) -> np.ndarray:
    """Returns int32 [K, B, 2*stack + 4]: slots, then the scalars by their bits.

    The array is new: the batch's own may be used again by who made them. (On a CPU, jax may go on reading a numpy array
    that it was given, google/jax issue 37830; nobody else holds this one.)
    """
    columns = batch.slots.shape[-1]
    packed = np.empty((*batch.slots.shape[:-1], columns + len(SCALARS)), np.int32)
    packed[..., :columns] = batch.slots
    for i, name in enumerate(SCALARS):
        packed[..., columns + i] = getattr(batch, name).view(np.int32)
    return packed


def unpack(packed: jax.Array) -> Minibatch:
    """Undoes `pack_batch` on the device; int32 [..., 2*stack + 4]."""
    slots, *scalars = jnp.split(packed, [packed.shape[-1] - 4 + i for i in range(4)], axis=-1)
    actions, *floats = (scalar.squeeze(-1) for scalar in scalars)
    return Minibatch(slots, actions, *(jax.lax.bitcast_convert_type(x, jnp.float32) for x in floats))


def make_train_step(update: Update, mesh: Mesh | None = None) -> TrainStep:
    """Returns the jitted `(state, cache, packed batch) -> (state, report)`; the state is donated, the cache only read.

    With a mesh each of its devices takes its share of every minibatch; state, cache and report are whole on each.

    Minibatches follow each other, the second trained from where the first has got to. The report is float32
    [K*B + K*F]: the priorities, then for each minibatch the F figures of `dqn.METRICS`.
    """

    def train_step(state: TrainState, cache: jax.Array, packed: jax.Array) -> tuple[TrainState, jax.Array]:
        def one(state: TrainState, minibatch: Minibatch) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
            state, priorities, metrics = update(state, cache, minibatch)
            return state, (priorities, jnp.stack([metrics[name] for name in METRICS]))

        follow = _one_by_one if cache.ndim > 2 and jax.default_backend() == "cpu" else jax.lax.scan
        state, (priorities, figures) = follow(one, state, unpack(packed))
        return state, jnp.concatenate([priorities.reshape(-1), figures.reshape(-1)])

    if mesh is None:
        return jax.jit(train_step, donate_argnums=0)
    whole = devices.replicated(mesh)
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(whole, whole, devices.split_packed(mesh)),
        out_shardings=(whole, whole),
    )


def _one_by_one(
    step: Callable[..., Any], state: TrainState, minibatches: Minibatch
) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
    """Does what lax.scan does, without a loop in the program: for images on a CPU.

    XLA's CPU convolutions run unoptimised inside a loop, be it of one turn: the Nature CNN's update at batch 32 takes
    0.19 s there and 0.03 s outside (jax 0.10.2, 2 cores). The MLP is faster inside.
    """
    outputs = []
    for k in range(minibatches.actions.shape[0]):
        state, output = step(state, Minibatch(*(column[k] for column in minibatches)))
        outputs.append(output)
    return state, jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *outputs)


def split_report(report: np.ndarray, shape: BatchShape) -> tuple[np.ndarray, np.ndarray]:
    """Returns priorities float32 [K, B] and figures float32 [K, F]."""
    count = shape.minibatches * shape.batch_size
    return report[:count].reshape(shape.minibatches, shape.batch_size), report[count:].reshape(shape.minibatches, -1)
