"""Prioritized replay in this process, for runs that must come out the same twice: one thread, one seeded generator.

Reverb chooses with a generator of its own that nobody can seed, in threads that race. The rules here are a site's
(buffer.py): an item is drawn with probability p^alpha / sum of p^alpha, apart from all others, the oldest leaves when
the table is full, and at most `samples_per_insert` samples are drawn per item inserted. Only there is no room for
either side to run ahead: a draw waits for its inserts, and config.replay.error_buffer plays no part.

The sums of p^alpha stand in a binary tree, as in "Prioritized Experience Replay" (Schaul et al. 2016, appendix B.2.1).
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from longhaul import codec
from longhaul.errors import LonghaulError
from longhaul.initial_priority import InitialPriority
from longhaul.types import DrawnSamples, ExperienceSpec, NStepTransition

_LARGEST = float(np.finfo(np.float32).max)


class SumTree:
    """Weights by slot, and which slot a point of their sum falls into.

    Invariant, once mended: sums[i] = sums[2i] + sums[2i + 1] for each inner node i, the root being 1. Sums are added up
    anew from their two parts and never changed by a difference, so that no error of rounding builds up.

    Args:
      size: slots, from 0; all weigh 0 at first.
    """

    def __init__(self, size: int):
        self._depth = (size - 1).bit_length()
        self._leaves = 1 << self._depth
        self._sums = np.zeros(2 * self._leaves)
        self._stale: list[np.ndarray] = []  # slots whose weights the inner nodes do not show yet

    def set(self, slots: np.ndarray, weights: np.ndarray) -> None:
        """Sets weights, float64 [N], not negative; of a slot named twice the last one holds."""
        self._sums[self._leaves + slots] = weights
        self._stale.append(slots)

    def weights(self, slots: np.ndarray) -> np.ndarray:
        """Returns float64 [N]."""
        return self._sums[self._leaves + slots]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        self._mend()
        return float(self._sums[1])

    def find(self, points: np.ndarray) -> np.ndarray:
        """Returns for each point, float64 [N] in [0, total), its slot in the line of weights; never one of weight 0.

        The total must be more than 0.
        """
        self._mend()
        nodes = np.ones(len(points), np.int64)
        for _ in range(self._depth):
            nodes *= 2
            left = self._sums[nodes]
            # The second test is for a point that rounding has put at the very end of a sum.
            right = (points >= left) & (self._sums[nodes + 1] > 0)
            points = np.where(right, points - left, points)
            nodes += right
        return nodes - self._leaves

    def _mend(self) -> None:
        if not self._stale:
            return
        nodes = np.concatenate(self._stale) + self._leaves
        self._stale.clear()
        for _ in range(self._depth):
            nodes = np.unique(nodes >> 1)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]


class SeededReplay:
    """Rows and transitions of one actor; a `types.TransitionWriter` at one end, draws at the other. For one thread.

    Args:
      spec: of the experience.
      replay: config.replay.
      num_streams: environment streams of the actor.
      keep_rows: newest rows of a stream that a transition to come may refer to.
      seed: of the draws, as numpy's default_rng takes it.

    Attributes:
      inserts: transitions ever.
      samples: drawn ever.
      counters: written_items and refused_priorities, as `inserter.Inserter` has them.
    """

    def __init__(self, spec: ExperienceSpec, replay: Any, num_streams: int, keep_rows: int, seed: int | list[int]):
        self._spec = spec
        self._capacity, self._min_size = int(replay.capacity), int(replay.min_size)
        self._exponent, self._ratio = float(replay.priority_exponent), float(replay.samples_per_insert)
        self._rng = np.random.default_rng(seed)
        self._tree = SumTree(self._capacity)
        self._initial_priority = InitialPriority(replay)
        # By slot; the item of key k, counted from 0, stands in slot k % capacity.
        self._row_ids = np.zeros((self._capacity, 2 * spec.stack), np.int64)
        self._actions = np.zeros(self._capacity, np.int32)
        self._returns = np.zeros(self._capacity, np.float32)
        self._discounts = np.zeros(self._capacity, np.float32)
        self._priorities = np.zeros(self._capacity)
        self._versions = np.zeros(self._capacity, np.int64)
        self._packer = codec.CellPacker()
        self._cells: dict[int, bytes] = {}
        self._holds: dict[int, int] = {}  # row id -> items and streams that hold on to it
        self._keep_rows = keep_rows
        self._newest: list[deque[int]] = [deque() for _ in range(num_streams)]
        self.inserts = 0
        self.samples = 0
        self.counters = {"written_items": 0, "refused_priorities": 0}

    def __len__(self) -> int:
        return min(self.inserts, self._capacity)

    @property
    def may_draw(self) -> bool:
        """Whether the items inserted so far allow one more draw, of any size."""
        allowed = self._ratio * (self.inserts - self._min_size)
        return len(self) >= self._min_size and (not self._ratio or self.samples <= allowed)

    # ---- the actor's end

    def add_row(self, stream: int, row_id: int, row: np.ndarray) -> None:
        """Makes a row, [*row_shape] of the row dtype, available to the stream's transitions; copied.

        Raises:
          LonghaulError: the row's size is not the spec's.
        """
        data = np.ascontiguousarray(row).tobytes()
        if len(data) != self._spec.row_bytes:
            raise LonghaulError(f"a row of {len(data)} bytes can't be stored, the spec says {self._spec.row_bytes}")
        self._cells[row_id] = self._packer.pack(row_id, data)
        self._holds[row_id] = 1
        newest = self._newest[stream]
        newest.append(row_id)
        if len(newest) > self._keep_rows:
            self._let_go([newest.popleft()])

    def add_transition(self, stream: int, transition: NStepTransition, policy_version: int, priority: float) -> bool:
        """Puts one transition into the table, in the oldest one's place where that is full.

        Returns:
          False if it is refused, and counted: a priority, return or discount that is not finite or is negative.

        Raises:
          LonghaulError: it refers to a row that is not held.
        """
        t = transition
        if not (0.0 <= priority <= _LARGEST and abs(t.n_step_return) <= _LARGEST and 0.0 <= t.discount <= _LARGEST):
            self.counters["refused_priorities"] += 1
            return False
        row_ids = t.obs_ids + t.next_ids
        if missing := set(row_ids).difference(self._holds):
            raise LonghaulError(f"row {min(missing)} is not among the {self._keep_rows} newest rows of its stream")
        for row_id in row_ids:
            self._holds[row_id] += 1
        slot = self.inserts % self._capacity
        if self.inserts >= self._capacity:
            self._let_go(self._row_ids[slot].tolist())
        self._row_ids[slot] = row_ids
        self._actions[slot], self._returns[slot], self._discounts[slot] = t.action, t.n_step_return, t.discount
        self._versions[slot] = policy_version
        self._set(np.array([slot]), self._initial_priority.of(np.array([priority])))
        self.inserts += 1
        self.counters["written_items"] += 1
        return True

    def close(self) -> None:
        """Nothing to let go of."""

    # ---- the learner's end

    def draw(self, count: int) -> DrawnSamples:
        """Draws transitions by priority, each apart from the others; all alike where every priority is 0.

        Raises:
          LonghaulError: the table is empty.
        """
        if not len(self):
            raise LonghaulError("a draw from an empty replay")
        points, total = self._rng.random(count), self._tree.total
        if total > 0:
            slots = self._tree.find(points * total)
            probabilities = self._tree.weights(slots) / total
        else:
            slots = (points * len(self)).astype(np.int64)
            probabilities = np.full(count, 1.0 / len(self))
        self.samples += count
        newest = self.inserts - 1
        return DrawnSamples(
            keys=(newest - (newest - slots) % self._capacity).astype(np.uint64),
            row_ids=self._row_ids[slots],
            actions=self._actions[slots],
            returns=self._returns[slots],
            discounts=self._discounts[slots],
            probabilities=probabilities,
            priorities=self._priorities[slots],
            policy_versions=self._versions[slots],
            table_size=len(self),
            drawn_time_s=time.monotonic(),
        )

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities by key, uint64 [N] and float64 [N]; keys no longer in the table are passed over."""
        self._initial_priority.note(priorities)
        held = keys.astype(np.int64) >= self.inserts - self._capacity
        self._set(keys[held].astype(np.int64) % self._capacity, priorities[held])

    def rows(self, row_ids: list[int]) -> np.ndarray:
        """Returns a new array [N, *row_shape] of the row dtype."""
        data = codec.unpack_cells([self._cells[row_id] for row_id in row_ids], self._spec.row_bytes)
        return np.frombuffer(data, self._spec.row_dtype).reshape(len(row_ids), *self._spec.row_shape)

    @property
    def held_rows(self) -> int:
        """Rows that are held."""
        return len(self._cells)

    def _set(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._priorities[slots] = priorities
        self._tree.set(slots, priorities**self._exponent)

    def _let_go(self, row_ids: Iterable[int]) -> None:
        for row_id in row_ids:
            if holds := self._holds[row_id] - 1:
                self._holds[row_id] = holds
            else:
                del self._holds[row_id], self._cells[row_id]
