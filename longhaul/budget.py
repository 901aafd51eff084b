"""A cap on bytes per second, kept over every few seconds and not only on average.

A token bucket (Turner 1986) that may be overdrawn by one message: what is urgent is spent at once, what can wait
waits until the overdraft is paid back. Messages are counted as gRPC makes them; a share of the rate is left for what
HTTP/2, TLS and TCP add.
"""

import threading
import time

from longhaul.errors import Stopped

_BURST_S = 0.2  # seconds of the rate that may be saved up: 2% of any ten seconds
_FRAMING_SHARE = 0.03
_SMALLEST_PART_BYTES = 4096


class Budget:
    """Bytes per second of one direction, shared by all that is sent in it. Thread-safe.

    Args:
      bytes_per_s: on the wire; 0 is no limit.
    """

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s = bytes_per_s
        self._rate = bytes_per_s * (1 - _FRAMING_SHARE)
        self._balance = self._rate * _BURST_S
        self._counted_s = time.monotonic()
        self._lock = threading.Lock()

    def part_bytes(self, largest: int) -> int:
        """Returns how large one message should be at most, so that it overdraws by a tenth of a second only."""
        if not self.bytes_per_s:
            return largest
        return max(_SMALLEST_PART_BYTES, min(largest, int(self._rate * 0.1)))

    def spend(self, size: int) -> float:
        """Counts an urgent message of `size` bytes that does not wait; returns the seconds others must now wait."""
        if not self.bytes_per_s:
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            self._balance = min(self._rate * _BURST_S, self._balance + (now_s - self._counted_s) * self._rate)
            self._counted_s = now_s
            self._balance -= size
            return max(0.0, -self._balance / self._rate)

    def take(self, size: int, stop: threading.Event) -> None:
        """Waits until nothing is overdrawn, then counts a message of `size` bytes.

        Raises:
          Stopped: the stop event was set meanwhile.
        """
        while (wait_s := self.spend(0)) > 0:
            if stop.wait(min(wait_s + 1e-3, 0.5)):
                raise Stopped("waiting for the link's budget was stopped")
        self.spend(size)
