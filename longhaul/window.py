"""How many batches should be in flight: just enough to hide the link, retuned while running.

By Little's law a learner that consumes r batches a second over a path that takes T seconds from a credit's leaving
to its batch's arrival keeps r*T batches in flight; one more covers the batch being trained on. More would not be
faster, only drawn earlier, on older priorities.

T is known in parts only: the round trip and both ends' work are measured, what waits in their queues is not. So where
both ends wait for each other, the learner for batches and the gateway for credits, the window is tried one larger, and
kept so if more gets through; where either end has no time to wait, it shrinks back to what is measured.

A window is a whole number, the link is not: batches that the rounding brings too early would wait at the learner,
growing old. So each credit tells the gateway how long to hold the next draw back, just so long that batches still
arrive a little before they are needed.
"""

import math
import threading
import time
from collections import deque

LARGEST_HOLD_S = 1.0
_HORIZON_S = 3.0  # rates are over the last seconds
_FIRST = 2
_WAITING_SHARE = 0.05  # of the time: an end that waits more could do more
_GAIN = 1.02  # a larger window must let this much more through to be kept
_REST_RETUNES = 10  # after a try that did not help
_HOLD_STEP = 0.5  # of the time that all batches of a period had to spare
_LEAST_SPARE_S = 0.004  # kept for jitter
_SPARE_SHARE = 0.15  # likewise, of the time between batches


class Window:
    """The window's size and what it is derived from. Thread-safe.

    Args:
      largest: cap, in batches.

    Attributes:
      size: of the window, in batches.
      hold_s: how long the gateway should wait from a credit to its draw.
    """

    def __init__(self, largest: int):
        self._largest = largest
        self._lock = threading.Lock()
        self._consumed: deque[float] = deque()
        self._service_s: deque[float] = deque(maxlen=32)
        self._waited_s = 0.0  # the learner, since `figures`
        self._since_s = time.monotonic()
        self._learner_waited_s = 0.0  # both ends, since `retune`
        self._gateway_waited_s = 0.0
        self._retuned_s = time.monotonic()
        self._extra = 0  # beyond what is measured
        self._rate_before_try = 0.0
        self._rest = 0
        self._least_spare_s = math.inf  # since `retune`
        self.hold_s = 0.0
        self.size = min(_FIRST, largest)

    def consumed(self, now_s: float) -> None:
        """Notes that a batch was trained on."""
        with self._lock:
            self._consumed.append(now_s)
            while len(self._consumed) > 2 and self._consumed[0] < now_s - _HORIZON_S:
                self._consumed.popleft()

    def arrived(self, service_s: float, credit_wait_s: float = 0.0) -> None:
        """Notes how long both ends worked on a batch, from its credit to its delivery, the path left out.

        Args:
          service_s: that time.
          credit_wait_s: how long the gateway waited for the credit.
        """
        with self._lock:
            self._service_s.append(service_s)
            self._gateway_waited_s += credit_wait_s

    def taken(self, spare_s: float) -> None:
        """Notes how long a batch had been there when the learner came for it."""
        with self._lock:
            self._least_spare_s = min(self._least_spare_s, spare_s)

    def starved(self, waited_s: float) -> None:
        """Notes that the learner had to wait for a batch."""
        with self._lock:
            self._waited_s += waited_s
            self._learner_waited_s += waited_s
            self._least_spare_s = min(self._least_spare_s, -waited_s)

    def retune(self, rtt_s: float, now_s: float | None = None) -> None:
        """Sets the size from the round-trip time and what was noted since the last call."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            elapsed_s = max(now_s - self._retuned_s, 1e-3)
            both_wait = min(self._learner_waited_s, self._gateway_waited_s) > _WAITING_SHARE * elapsed_s
            self._learner_waited_s, self._gateway_waited_s, self._retuned_s = 0.0, 0.0, now_s
            if len(self._consumed) < 2 or not self._service_s:
                return
            span_s = max(self._consumed[-1] - self._consumed[0], 1e-3)
            rate = (len(self._consumed) - 1) / span_s
            self._try_extra(both_wait, rate)
            turnaround_s = rtt_s + sorted(self._service_s)[len(self._service_s) // 2]
            wanted = math.ceil(turnaround_s * rate) + 1 + self._extra
            # Growth is bounded, since a rate measured over a burst says too much.
            self.size = min(wanted, 2 * self.size, self._largest)
            self._set_hold(1.0 / rate)

    def _set_hold(self, period_s: float) -> None:
        spare_s, self._least_spare_s = self._least_spare_s, math.inf
        if spare_s == math.inf:
            return
        excess_s = spare_s - max(_LEAST_SPARE_S, _SPARE_SHARE * period_s)
        # Slowly to more, at once to less.
        step = _HOLD_STEP if excess_s > 0 else 1.0
        # Rounding brings a batch too early by at most two periods.
        self.hold_s = min(max(0.0, self.hold_s + step * excess_s), 2.0 * period_s, LARGEST_HOLD_S)

    def _try_extra(self, both_wait: bool, rate: float) -> None:
        """Moves the part of the window that is found by trying."""
        if not both_wait:
            self._extra = max(0, self._extra - 1)
            self._rate_before_try = 0.0
        elif self._rest > 0:
            self._rest -= 1
        elif self._rate_before_try and rate < _GAIN * self._rate_before_try:
            self._extra = max(0, self._extra - 1)
            self._rate_before_try = 0.0
            self._rest = _REST_RETUNES
        elif self.size < self._largest:
            self._extra += 1
            self._rate_before_try = rate

    def figures(self) -> dict[str, float]:
        """Returns window and the share of time since the last call that the learner waited for batches."""
        with self._lock:
            now_s = time.monotonic()
            share = min(1.0, self._waited_s / max(now_s - self._since_s, 1e-9))
            self._waited_s, self._since_s = 0.0, now_s
            return {"window": self.size, "waiting_share": share, "hold_s": self.hold_s}
