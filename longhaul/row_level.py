"""Chooses zstd's level for the rows of batches: as few bytes as the site's CPU can spare.

The share of time that goes into compressing says what both CPU and link allow. Where the link is the slow part,
batches are far apart, the share is small and the level rises until it is worth its time; where the gateway itself is
the slow part, the share is large and the level falls.
"""

import time

from longhaul import codec

_LEVELS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 15)
_FIRST = 3
_SPARE_SHARE = 0.05  # of a core: less than this, and the next level is tried
_LARGEST_SHARE = 0.15
_JUDGED_BATCHES = 16


class RowLevel:
    """The level in use, and the compressor that measures itself.

    Args:
      fixed: the user's choice; 0 adapts.
    """

    def __init__(self, fixed: int):
        self._fixed = fixed
        self._index = _LEVELS.index(_FIRST)
        self._spent_s = 0.0
        self._batches = 0
        self._since_s = time.monotonic()

    @property
    def level(self) -> int:
        """zstd's level for the next batch."""
        return self._fixed or _LEVELS[self._index]

    def compress(self, rows: bytes) -> bytes:
        """Compresses the new rows of one batch."""
        began_s = time.thread_time()
        packed = codec.compress(rows, self.level)
        self.note(time.thread_time() - began_s, time.monotonic())
        return packed

    def note(self, spent_s: float, now_s: float) -> None:
        """Takes a batch's CPU time into account, and moves the level after every few batches."""
        self._spent_s += spent_s
        self._batches += 1
        if self._batches < _JUDGED_BATCHES:
            return
        share = self._spent_s / max(now_s - self._since_s, 1e-9)
        if share > _LARGEST_SHARE and self._index > 0:
            self._index -= 1
        elif share < _SPARE_SHARE and self._index < len(_LEVELS) - 1:
            self._index += 1
        self._spent_s, self._batches, self._since_s = 0.0, 0, now_s
