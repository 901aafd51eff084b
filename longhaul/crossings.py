"""Which transitions cross the link for the first time, for whoever asks (Open.mark_first)."""

from collections import OrderedDict

import numpy as np


class Crossings:
    """Remembers the newest keys that have crossed. Not thread-safe.

    Args:
      capacity: keys remembered at most; an item that replay no longer holds is not drawn again.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._keys: OrderedDict[int, None] = OrderedDict()

    def mark(self, keys: np.ndarray) -> np.ndarray:
        """Notes that items cross, uint64 [N]; returns bool [N], whether each is the first time (once per key)."""
        first = np.zeros(len(keys), np.bool_)
        for place, key in enumerate(keys.tolist()):
            if key not in self._keys:
                first[place] = True
                self._keys[key] = None
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return first

    def undo(self, keys: np.ndarray) -> None:
        """Forgets items that were marked and did not arrive."""
        for key in keys.tolist():
            self._keys.pop(key, None)
