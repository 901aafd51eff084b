"""Plain records shared by all parts: what an experience is, what a batch is, what a snapshot is."""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import numpy as np

# A row id is `incarnation << ROW_COUNTER_BITS | counter`: 30 random bits drawn once per actor
# process, then a counter. Two of 100 actors collide with probability 5e-6.
ROW_COUNTER_BITS = 33
ROW_INCARNATION_BITS = 30

# Rows at most that a gateway has the learner check at a time.
AUDITED_ROWS = 32


@dataclasses.dataclass(frozen=True)
class ExperienceSpec:
    """What one experience looks like; both ends of the link must hold the same.

    Attributes:
      env_id: gymnasium id the actors run, for messages only.
      row_shape: shape of one row, an observation as the environment gave it, unstacked.
      row_dtype: numpy name of the row's dtype.
      stack: rows per observation as the network sees it, oldest first.
      num_actions: size of the discrete action space; actions are indices 0..num_actions-1.
      n_step: rewards summed in one transition at most.
      gamma: discount per step.
    """

    env_id: str
    row_shape: tuple[int, ...]
    row_dtype: str
    stack: int
    num_actions: int
    n_step: int
    gamma: float

    @functools.cached_property
    def row_bytes(self) -> int:
        """Size of one row in bytes, uncompressed."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * np.dtype(self.row_dtype).itemsize

    @property
    def rows_per_item(self) -> int:
        """Distinct rows that one transition can refer to at most."""
        return self.stack + min(self.stack, self.n_step)

    def differences(self, other: "ExperienceSpec") -> list[str]:
        """Returns one 'field: mine != other's' text for each field that differs; env_id is not compared."""
        found = []
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name != "env_id" and mine != theirs:
                found.append(f"{field.name}: {mine} != {theirs}")
        return found


class NStepTransition(NamedTuple):
    """One n-step transition of one environment stream, rows by id.

    Attributes:
      obs_ids: `stack` row ids, oldest first; rows before the episode's first repeat the first.
      next_ids: `stack` row ids of the state that the return bootstraps from.
      action: action index taken at the observation.
      n_step_return: sum of gamma^i * reward over the k steps really taken.
      discount: gamma^k, or 0 after termination.
    """

    obs_ids: tuple[int, ...]
    next_ids: tuple[int, ...]
    action: int
    n_step_return: float
    discount: float


class TransitionWriter(Protocol):
    """What whoever makes transitions asks of `inserter.Inserter`; see there."""

    counters: dict[str, int]

    def add_row(self, stream: int, row_id: int, row: np.ndarray) -> None: ...

    def add_transition(
        self, stream: int, transition: NStepTransition, policy_version: int, priority: float
    ) -> bool: ...

    def close(self) -> None: ...


class DrawnSamples(NamedTuple):
    """Transitions drawn from the replay table, in the order drawn. N is their number.

    Attributes:
      keys: uint64 [N], Reverb item keys.
      row_ids: int64 [N, 2*stack], observation rows then next observation rows.
      actions: int32 [N].
      returns: float32 [N].
      discounts: float32 [N].
      probabilities: float64 [N], each item's sampling probability when drawn.
      priorities: float64 [N], each item's priority when drawn, before the exponent.
      policy_versions: int64 [N], version of the weights that acted.
      table_size: items in the table at the draw.
      drawn_time_s: time.monotonic() at which the samples were chosen, in the mean.
    """

    keys: np.ndarray
    row_ids: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray
    probabilities: np.ndarray
    priorities: np.ndarray
    policy_versions: np.ndarray
    table_size: int
    drawn_time_s: float


class Batch(NamedTuple):
    """What the link client hands to the learner: K minibatches of B transitions by cache slot, and the rows it lacks.

    Attributes:
      sequence: position in the stream, from 1.
      slots: int32 [K, B, 2*stack], cache slots of the observation rows, then of the next observation rows.
      actions: int32 [K, B].
      returns: float32 [K, B].
      discounts: float32 [K, B].
      probabilities: float32 [K, B]; where the site forwards in order of arrival, the priorities that the actors gave.
      table_size: items in the replay table when drawn.
      new_slots: int32 [M], slots to fill before training on this batch.
      new_rows: [M, *row_shape] of the row dtype, their contents.
      received_time_s: time.monotonic() at arrival.
      audit_slots: int32 [A], slots of this batch to be looked at once its rows are in place; mostly none.
      audit_crc32: CRC-32 of what those slots must hold, in order.
      stats: figures from the site (inserts, samples, mean policy version ...).
      first_crossings: bool [K, B], whether each transition crosses the link for the first time; empty unless asked for.
    """

    sequence: int
    slots: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray
    probabilities: np.ndarray
    table_size: int
    new_slots: np.ndarray
    new_rows: np.ndarray
    received_time_s: float
    audit_slots: np.ndarray
    audit_crc32: int
    stats: dict[str, float]
    first_crossings: np.ndarray = np.zeros(0, np.bool_)


class Snapshot(NamedTuple):
    """Weights of one version as they travel: opaque bytes that `codec.unpack_weights` opens.

    Attributes:
      epoch: grows with each start of a learner, so that a restarted one wins.
      version: grows with each publication of one learner; (epoch, version) orders snapshots.
      payload: packed weights.
    """

    epoch: int
    version: int
    payload: bytes


# A tree of weights: nested dicts with arrays as leaves.
Params = dict[str, Any]
