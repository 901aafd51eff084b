"""The gateway's mirror of the learner's device cache: which row is in which slot.

The gateway alone decides what the learner's cache holds; the learner writes new rows where it is told and
otherwise only reads. Least recently used rows leave first. A journal of the batches that may not have arrived
lets the mirror go back to the last one that did, so that the cache survives an outage.
"""

from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from longhaul.errors import ConfigError


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
        self._slot_of: OrderedDict[int, int] = OrderedDict()
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
        distinct, first_places, inverse = np.unique(row_ids, return_index=True, return_inverse=True)
        if len(distinct) > self.capacity:
            raise ConfigError(f"a batch of {len(distinct)} rows does not fit a row cache of {self.capacity}")
        slot_of = self._slot_of
        ids = distinct.tolist()
        slots = [slot_of.get(row_id, -1) for row_id in ids]
        missing: list[int] = []
        touch = slot_of.move_to_end
        # Every row the batch needs becomes the most recent before any slot is taken away.
        for place, slot in enumerate(slots):
            if slot >= 0:
                touch(ids[place])
            else:
                missing.append(place)
        entries: list[tuple[int, int, int | None]] = []
        for place in missing:
            slot, evicted = self._take_slot()
            slot_of[ids[place]] = slot
            slots[place] = slot
            entries.append((slot, ids[place], evicted))
        self._journal.append((sequence, entries))
        found = np.array(slots, np.int32)
        return Placement(
            slots=found[inverse.reshape(row_ids.shape)],
            new_slots=found[missing],
            new_places=first_places[missing],
        )

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

    def _take_slot(self) -> tuple[int, int | None]:
        if self._freed:
            return self._freed.pop(), None
        if self._unused < self.capacity:
            self._unused += 1
            return self._unused - 1, None
        evicted, slot = self._slot_of.popitem(last=False)
        return slot, evicted
