"""Keeps something to a rate: an actor's environment steps, a learner's updates, a link's transitions."""

import threading
import time
from collections.abc import Callable

from ml_collections import config_dict

_SLACK_S = 1.0


class Pace:
    """Says when the next event is due.

    What was missed in a short stall is caught up on; of a longer one only the last `slack_s` are, so that a stall of
    any length is followed by a burst of at most rate * slack_s events beyond the rate.

    Args:
      rate_per_s: events per second; 0 is no limit.
      slack_s: how much of a stall may be caught up on.
      clock: seconds, for tests.
    """

    def __init__(self, rate_per_s: float, slack_s: float = _SLACK_S, clock: Callable[[], float] = time.monotonic):
        self._period_s = 1.0 / rate_per_s if rate_per_s else 0.0
        self._slack_s = slack_s
        self._clock = clock
        self._due_s = clock()

    def delay_s(self) -> float:
        """Returns how long to wait until the next event is due; 0 if it is."""
        return max(0.0, self._due_s - self._clock()) if self._period_s else 0.0

    def count(self, events: int) -> None:
        """Notes that so many events happen now."""
        if self._period_s:
            self._due_s = max(self._due_s, self._clock() - self._slack_s) + events * self._period_s

    def wait(self, stop: threading.Event, at_most_s: float) -> bool:
        """Waits until the next event is due, or stop is set, or for that time; returns whether it is due."""
        if (delay_s := self.delay_s()) > 0:
            stop.wait(min(delay_s, at_most_s))
        return not self.delay_s()


def transfer_pace(config: config_dict.ConfigDict) -> Pace:
    """Returns the pace of transitions across the link, config.link.experiences_per_s, for whoever takes them."""
    return Pace(float(config.link.experiences_per_s))
