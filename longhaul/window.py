"""How many batches should be in flight: just enough to hide the link, retuned while running.

By Little's law a learner that consumes r batches a second over a path that takes T seconds from a credit's leaving
to its batch's arrival keeps r*T batches in flight; one more covers the batch being trained on. More would not be
faster, only drawn earlier, on older priorities. While the learner starves its rate is what the window lets
through, so the window grows by itself until either the learner or the link is busy.
"""

import math
import threading
import time
from collections import deque

_HORIZON_S = 5.0  # rates are over the last seconds
_FIRST = 2


class Window:
    """The window's size and what it is derived from. Thread-safe.

    Args:
      largest: cap, in batches.
    """

    def __init__(self, largest: int):
        self._largest = largest
        self._lock = threading.Lock()
        self._consumed: deque[float] = deque()
        self._service_s: deque[float] = deque(maxlen=32)
        self._waited_s = 0.0
        self._since_s = time.monotonic()
        self.size = min(_FIRST, largest)

    def consumed(self, now_s: float) -> None:
        """Notes that a batch was trained on."""
        with self._lock:
            self._consumed.append(now_s)
            while self._consumed[0] < now_s - _HORIZON_S:
                self._consumed.popleft()

    def arrived(self, service_s: float) -> None:
        """Notes how long both ends worked on a batch, from its credit to its delivery, the path left out."""
        with self._lock:
            self._service_s.append(service_s)

    def starved(self, waited_s: float) -> None:
        """Notes that the learner had to wait for a batch."""
        with self._lock:
            self._waited_s += waited_s

    def retune(self, rtt_s: float) -> None:
        """Sets the size from the round-trip time and what was noted."""
        with self._lock:
            if len(self._consumed) < 2 or not self._service_s:
                return
            span_s = max(self._consumed[-1] - self._consumed[0], 1e-3)
            rate = (len(self._consumed) - 1) / span_s
            turnaround_s = rtt_s + sorted(self._service_s)[len(self._service_s) // 2]
            wanted = math.ceil(turnaround_s * rate) + 1
            # Growth is bounded, since a rate measured over a burst says too much.
            self.size = min(wanted, 2 * self.size, self._largest)

    def figures(self) -> dict[str, float]:
        """Returns window and the share of time since the last call that the learner waited for batches."""
        with self._lock:
            now_s = time.monotonic()
            share = min(1.0, self._waited_s / max(now_s - self._since_s, 1e-9))
            self._waited_s, self._since_s = 0.0, now_s
            return {"window": self.size, "waiting_share": share}
