"""Chooses zstd's level for the rows of batches: as few bytes as the site's CPU can spare.

The gateway's own waiting says what both CPU and link allow. While it waits for credits, the link or the learner is the
slow part, and the level rises until compressing takes its share of the time; while it never waits, it is the slow
part itself, and the level falls.
"""

import time

from longhaul import codec

_LEVELS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 15)
_FIRST = 3
_SPARE_WAITING = 0.5  # of the time spent waiting for credits: more than this, and the next level is tried
_LEAST_WAITING = 0.2  # less, and the level falls
_LARGEST_SHARE = 0.15  # of a core for compressing
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
        self._waited_s = 0.0
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
        self._spent_s += time.thread_time() - began_s
        return packed

    def note(self, spent_s: float, waited_s: float, now_s: float) -> None:
        """Takes a batch into account, and moves the level after every few.

        Args:
          spent_s: CPU time of compressing, besides what `compress` has measured itself.
          waited_s: for its credit.
          now_s: time.monotonic().
        """
        self._spent_s += spent_s
        self._waited_s += waited_s
        self._batches += 1
        if self._batches < _JUDGED_BATCHES:
            return
        elapsed_s = max(now_s - self._since_s, 1e-9)
        share, waiting = self._spent_s / elapsed_s, self._waited_s / elapsed_s
        if (share > _LARGEST_SHARE or waiting < _LEAST_WAITING) and self._index > 0:
            self._index -= 1
        elif share < _LARGEST_SHARE / 2 and waiting > _SPARE_WAITING and self._index < len(_LEVELS) - 1:
            self._index += 1
        self._spent_s = self._waited_s = 0.0
        self._batches, self._since_s = 0, now_s
