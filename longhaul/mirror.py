"""The gateway's mirror of the learner's device cache: which row is in which slot.

The gateway alone decides what the learner's cache holds; the learner writes new rows where it is told and
otherwise only reads. Least recently used rows leave first. A journal of the batches that may not have arrived
lets the mirror go back to the last one that did, so that the cache survives an outage.
"""

import itertools
from collections import deque
from typing import NamedTuple

import numpy as np

from longhaul.errors import ConfigError

_SORTED_PARTS = 16  # a cache's slots are put in order of use a part at a time
_LEAST_SORTED = 256


class Placement(NamedTuple):
    """Where the rows of one batch are.

    Attributes:
      slots: int32, the shape of the row ids asked for.
      new_slots: int32 [M], slots to be filled.
      new_places: int64 [M], for each, one flat place in the row ids where that row stands.
    """

    slots: np.ndarray
    new_slots: np.ndarray
    new_places: np.ndarray


class Mirror:
    """Maps row ids to cache slots, least recently used out.

    Invariant: after the learner has applied batches 1..s in order, slot `slot_of[r]` of its cache holds row r
    for every r in the mirror as it was when batch s was placed.

    Args:
      capacity: slots of the cache.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ConfigError(f"a row cache of {capacity} rows holds nothing; raise config.learner.cache_bytes")
        self.capacity = capacity
        self._slot_of: dict[int, int] = {}
        self._row_at = np.zeros(capacity, np.int64)
        self._used = np.zeros(capacity, np.int64)  # number of the batch that last needed a slot's row
        self._batches = 0
        self._oldest: deque[tuple[int, int]] = deque()  # (slot, when it was last used by then), the next to leave
        self._unused = 0  # slots from here on were never filled
        self._freed: list[int] = []  # slots given back by a rollback
        self._journal: deque[tuple[int, list[tuple[int, int, int | None]]]] = deque()

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot(self, row_id: int) -> int | None:
        """Returns the slot of a row, None if the cache lacks it; does not count as use."""
        return self._slot_of.get(row_id)

    def place(self, sequence: int, row_ids: np.ndarray) -> Placement:
        """Finds or makes a slot for every row of a batch. No row of the batch evicts another of it.

        Args:
          sequence: of the batch; greater than any before.
          row_ids: int64, any shape.

        Raises:
          ConfigError: the batch has more distinct rows than the cache has slots; the mirror is unchanged.
        """
        flat = row_ids.reshape(-1)
        if flat.size > self.capacity and (count := len(np.unique(flat))) > self.capacity:
            raise ConfigError(f"a batch of {count} rows does not fit a row cache of {self.capacity}")
        slot_of = self._slot_of
        slots = np.array(list(map(slot_of.get, flat.tolist(), itertools.repeat(-1))), np.int32)
        lacking = np.flatnonzero(slots < 0)
        missing, first_places, inverse = np.unique(flat[lacking], return_index=True, return_inverse=True)
        # Every row the batch needs becomes the most recent before any slot is taken away.
        self._batches += 1
        self._used[slots[slots >= 0]] = self._batches
        entries: list[tuple[int, int, int | None]] = []
        for row_id in missing.tolist():
            slot, evicted = self._take_slot()
            self._used[slot] = self._batches
            slot_of[row_id] = slot
            entries.append((slot, row_id, evicted))
        new_slots = np.array([slot for slot, _, _ in entries], np.int32)
        self._row_at[new_slots] = missing
        slots[lacking] = new_slots[inverse]
        self._journal.append((sequence, entries))
        return Placement(slots.reshape(row_ids.shape), new_slots, lacking[first_places])

    def confirm(self, sequence: int) -> None:
        """Says that the learner has applied all batches up to `sequence`: they can't be rolled back any more."""
        while self._journal and self._journal[0][0] <= sequence:
            self._journal.popleft()

    def roll_back(self, sequence: int) -> None:
        """Undoes the batches after `sequence`, none of which the learner has applied."""
        while self._journal and self._journal[-1][0] > sequence:
            _, entries = self._journal.pop()
            for slot, row_id, evicted in reversed(entries):
                del self._slot_of[row_id]
                if evicted is None:
                    self._freed.append(slot)
                else:
                    self._slot_of[evicted] = slot
                    self._row_at[slot] = evicted

    def _take_slot(self) -> tuple[int, int | None]:
        if self._freed:
            return self._freed.pop(), None
        if self._unused < self.capacity:
            self._unused += 1
            return self._unused - 1, None
        while True:
            if not self._oldest:
                # A part of the slots at a time, since to keep all in order costs at every use of a row.
                count = min(self.capacity, max(_LEAST_SORTED, self.capacity // _SORTED_PARTS))
                oldest = np.argpartition(self._used, count - 1)[:count]
                oldest = oldest[np.argsort(self._used[oldest], kind="stable")]
                self._oldest.extend(zip(oldest.tolist(), self._used[oldest].tolist()))
            slot, used = self._oldest.popleft()
            if self._used[slot] == used:  # else it has been needed since
                evicted = int(self._row_at[slot])
                del self._slot_of[evicted]
                return slot, evicted
