"""A transition as the packed record in which it travels from an actor to the buffer node and lies in the replay."""

import struct

import numpy as np

from longhaul.errors import Corruption
from longhaul.types import NStepTransition

MOST_TRANSITIONS = 256  # of one message


def step_dtype(stack: int) -> np.dtype:
    """Returns the record that an item of the replay is."""
    return np.dtype(
        [
            ("action", "<i4"),
            ("n_step_return", "<f4"),
            ("discount", "<f4"),
            ("policy_version", "<i8"),
            ("row_ids", "<i8", (2 * stack,)),
        ]
    )


def record_dtype(stack: int) -> np.dtype:
    """Returns the record that travels: an item, and its first priority."""
    return np.dtype([("step", step_dtype(stack)), ("priority", "<f8")])


class RecordPacker:
    """Packs transitions one by one: numpy takes five times as long.

    Args:
      stack: rows per observation.
    """

    def __init__(self, stack: int):
        self._struct = struct.Struct(f"<iffq{2 * stack}qd")  # record_dtype's fields

    def pack(self, transition: NStepTransition, policy_version: int, priority: float) -> bytes:
        """Returns the record; return and discount must be finite as float32."""
        t = transition
        return self._struct.pack(
            t.action, t.n_step_return, t.discount, policy_version, *t.obs_ids, *t.next_ids, priority
        )


def unpack_records(data: bytes, stack: int, num_actions: int) -> np.ndarray:
    """Returns the records of `record_dtype` [N]; a view of the data.

    Raises:
      Corruption: the data are no records, or a record's figures can't be those of a transition.
    """
    dtype = record_dtype(stack)
    if len(data) % dtype.itemsize:
        raise Corruption(f"{len(data)} bytes of transitions are no records of {dtype.itemsize}")
    records = np.frombuffer(data, dtype)
    steps, priorities = records["step"], records["priority"]
    if not (np.isfinite(steps["n_step_return"]).all() and np.isfinite(steps["discount"]).all()):
        raise Corruption("a transition's return or discount is not finite")
    # Reverb takes an infinite priority, and then samples NaN for ever.
    if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
        raise Corruption("a transition's priority is not finite or is negative")
    if not ((steps["action"] >= 0) & (steps["action"] < num_actions)).all():
        raise Corruption(f"a transition's action is none of {num_actions}")
    return records
