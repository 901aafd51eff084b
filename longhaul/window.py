"""How many batches should be in flight: just enough to hide the link, retuned while running.

By Little's law a learner that consumes r batches a second over a path that takes T seconds from a credit's leaving
to its batch's arrival keeps r*T batches in flight; one more covers the batch being trained on. More would not be
faster, only drawn earlier, on older priorities.

T is known in parts only: the round trip and both ends' work are measured; what waits in queues, or behind a packet that
is sent again, is not. So where both ends wait for each other, the learner for batches and the gateway for credits, the
window is tried larger, and kept so if more gets through: surely more, or a little more and nothing older, since a batch
too many waits for a whole period somewhere and one that fills a gap does not. Where either end has had no time to wait
for long, the window shrinks back to what is measured.

A window is a whole number, the link is not: batches that the rounding brings too early would wait at the learner,
growing old. So each credit tells the gateway how long to hold the next draw back, just so long that batches still
arrive a little before they are needed.
"""

import math
import statistics
import threading
import time
from collections import deque

LARGEST_HOLD_S = 1.0
_HORIZON_S = 2.0  # rates are over the last seconds
_FIRST = 2
_WAITING_SHARE = 0.05  # of the time: an end that waits more could do more
# A window that is too small lets through more in proportion to what is added to it, one that is not, nothing more: so
# much of that proportion must be seen for an addition to be kept, over the best that was seen before ...
_GAIN_SHARE = 0.5
_YOUNG_GAIN_SHARE = 0.2  # ... and so much, over the median, of one that makes batches older ...
_WAIT_SHARE = 0.5  # ... by less than so much of its own periods
_STEP_DIVISOR = 8  # a try adds one batch to small windows, an eighth to large ones, twice that after one that was kept
_TRY_RETUNES = 3  # before a try is judged: rates look back over the horizon
_REST_RETUNES = 10  # after a try that did not help
_CALM_RETUNES = 20  # without need before it is given back; until then the hold keeps priorities fresh
_HOLD_STEP = 0.25  # of the time that all batches of a period had to spare
_LEAST_SPARE_S = 0.004  # kept for jitter
_SPARE_SHARE = 0.2  # likewise, of the time between batches
_LATE_SHARE = 0.2  # of the batches may come later than that: a path that stalls once in a while must not cost freshness
_MOST_NOTES = 4096  # between two retunes; in an outage there are none
_WAIT_RETUNES = 5  # over which waiting is looked at: likewise


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
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WAIT_RETUNES)  # likewise, as shares of the time
        self._retuned_s = time.monotonic()
        self._extra = 0  # beyond what is measured
        self._rate_needed = 0.0  # for the try to be kept
        self._rate_needed_young = 0.0  # likewise, if batches are not much older than before
        self._age_before_s = 0.0
        self._new_ages_s: deque[float] = deque(maxlen=_MOST_NOTES)  # since `retune`
        self._ages_s: deque[float] = deque(maxlen=_REST_RETUNES)  # their medians
        self._rates: deque[float] = deque(maxlen=_REST_RETUNES)
        self._step = 0
        self._trying = 0
        self._rest = 0
        self._calm = 0
        self._spares: deque[float] = deque(maxlen=_MOST_NOTES)  # since `retune`
        self._spares_before: list[float] = []  # of the retune before
        self.hold_s = 0.0
        self.size = min(_FIRST, largest)

    def consumed(self, now_s: float) -> None:
        """Notes that a batch was trained on."""
        with self._lock:
            self._consumed.append(now_s)
            while len(self._consumed) > 2 and self._consumed[0] < now_s - _HORIZON_S:
                self._consumed.popleft()

    def arrived(self, service_s: float, credit_wait_s: float = 0.0, age_s: float = 0.0) -> None:
        """Notes how long both ends worked on a batch, from its draw to its delivery, the path left out.

        Args:
          service_s: that time.
          credit_wait_s: how long the gateway waited for the credit.
          age_s: of the batch whose Ack the gateway had last, from its draw to its priorities' being applied.
        """
        with self._lock:
            self._new_ages_s.append(age_s)
            self._service_s.append(service_s)
            self._gateway_waited_s += credit_wait_s

    def taken(self, spare_s: float) -> None:
        """Notes how long a batch had been there when the learner came for it."""
        with self._lock:
            self._spares.append(spare_s)

    def starved(self, waited_s: float) -> None:
        """Notes that the learner had to wait for a batch."""
        with self._lock:
            self._waited_s += waited_s
            self._learner_waited_s += waited_s
            self._spares.append(-waited_s)

    def retune(self, rtt_s: float, now_s: float | None = None) -> None:
        """Sets the size from the round-trip time and what was noted since the last call."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            elapsed_s = max(now_s - self._retuned_s, 1e-3)
            self._waits.append((self._learner_waited_s / elapsed_s, self._gateway_waited_s / elapsed_s))
            # Medians: a path that stalls once in a while is not helped by a larger window.
            learner_waits, gateway_waits = (statistics.median(shares) for shares in zip(*self._waits))
            both_wait = min(learner_waits, gateway_waits) > _WAITING_SHARE
            self._learner_waited_s, self._gateway_waited_s, self._retuned_s = 0.0, 0.0, now_s
            if len(self._consumed) < 2 or not self._service_s:
                return
            span_s = max(self._consumed[-1] - self._consumed[0], 1e-3)
            rate = (len(self._consumed) - 1) / span_s
            self._try_extra(both_wait, rate)
            turnaround_s = rtt_s + sorted(self._service_s)[len(self._service_s) // 2]
            busy = 1.0 - min(1.0, learner_waits)
            wanted = math.ceil(turnaround_s * rate + busy) + self._extra
            before = self.size
            # Growth is bounded, since a rate measured over a burst says too much.
            self.size = min(wanted, 2 * self.size, self._largest)
            if not both_wait:
                # One batch more or less in flight must not change when batches come.
                self.hold_s = max(0.0, self.hold_s + (self.size - before) / rate)
            self._set_hold(1.0 / rate)

    def _set_hold(self, period_s: float) -> None:
        spares = sorted([*self._spares, *self._spares_before])
        self._spares_before = list(self._spares)
        self._spares.clear()
        if not spares:
            return
        excess_s = spares[int(_LATE_SHARE * len(spares))] - max(_LEAST_SPARE_S, _SPARE_SHARE * period_s)
        if excess_s < 0:
            self._spares_before = []  # they have had their effect
        # Slowly to more, at once to less.
        step = _HOLD_STEP if excess_s > 0 else 1.0
        # Rounding brings a batch too early by at most two periods, what was found by trying by as many more.
        most_s = min((2 + self._extra) * period_s, LARGEST_HOLD_S)
        self.hold_s = min(max(0.0, self.hold_s + step * excess_s), most_s)

    def _try_extra(self, both_wait: bool, rate: float) -> None:
        """Moves the part of the window that is found by trying."""
        self._rates.append(rate)
        self._ages_s.append(statistics.median(self._new_ages_s or [0.0]))
        self._new_ages_s.clear()
        self._calm = 0 if both_wait else self._calm + 1
        if self._trying > 0:
            self._trying -= 1
            older = self._ages_s[-1] > self._age_before_s + _WAIT_SHARE * self._step / rate
            needed = self._rate_needed if older else self._rate_needed_young
            if self._trying == 0 and rate < needed:
                self._extra = max(0, self._extra - self._step)
                self._step = 0
                self._rest = _REST_RETUNES
        elif self._rest > 0:
            self._rest -= 1
        elif both_wait and self.size < self._largest:
            self._step = max(1, self.size // _STEP_DIVISOR, min(2 * self._step, self.size // 2))
            self._extra += self._step
            # Not the rate of a stall, beside which anything looks good.
            share = self._step / self.size
            self._rate_needed = (1.0 + _GAIN_SHARE * share) * max(self._rates)
            self._rate_needed_young = (1.0 + _YOUNG_GAIN_SHARE * share) * statistics.median(self._rates)
            self._age_before_s = statistics.median(self._ages_s)
            self._trying = _TRY_RETUNES
        elif self._calm >= _CALM_RETUNES:
            self._extra = max(0, self._extra - 1)
            self._calm, self._step = 0, 0

    def figures(self) -> dict[str, float]:
        """Returns window and the share of time since the last call that the learner waited for batches."""
        with self._lock:
            now_s = time.monotonic()
            share = min(1.0, self._waited_s / max(now_s - self._since_s, 1e-9))
            self._waited_s, self._since_s = 0.0, now_s
            return {"window": self.size, "waiting_share": share, "hold_s": self.hold_s}
