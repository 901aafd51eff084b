"""How fast a site may draw without its own queues making priorities old.

A learner that waits for batches asks for all that the site's processors can do. Then draws, packing and applying
wait for each other, and little more gets through than a little below that, all of it older. So draws are spaced out,
until what a batch spends at the site, from its draw to its sending and from its Ack to its priorities' being applied,
is no more than its share of the time between two draws, or so little that it is no queue. What waits for a budget waits
at the site too, so draws are spaced out to what that lets through; what waits in a link that is full is not seen here.
Where the learner is slower nothing is held back: then there are no such queues.
"""

import statistics
from collections import deque

_MOST_PERIODS = 1.5  # at the site; half of one more is left for the learner
_NO_QUEUE_S = 0.01  # threads hand a batch on in some milliseconds even where none waits for another
_SLOWER, _FASTER = 1.03, 0.99
_RETURN = 0.2  # the power of what is left of the allowed time: after a slow spell it goes back sooner
_LOOK_DRAWS = 16  # between changes
_LOOKS_BACK = 32  # draws


class DrawPace:
    """The least time between two draws. For one thread, but for `served`.

    Attributes:
      period_s: that time; 0 holds nothing back.
    """

    def __init__(self) -> None:
        self.period_s = 0.0
        self._draws_s: deque[float] = deque(maxlen=_LOOKS_BACK + 1)
        self._at_site_s: deque[float] = deque(maxlen=_LOOKS_BACK)
        self._drawn = 0

    def wait_s(self, now_s: float) -> float:
        """Returns how long the next draw must still wait."""
        return max(0.0, self._draws_s[-1] + self.period_s - now_s) if self._draws_s else 0.0

    def drawn(self, now_s: float) -> None:
        """Notes that a draw begins."""
        self._draws_s.append(now_s)
        self._drawn += 1
        if self._drawn % _LOOK_DRAWS or not self._at_site_s:
            return
        period_s = (now_s - self._draws_s[0]) / (len(self._draws_s) - 1)
        allowed_s = max(_MOST_PERIODS * period_s, _NO_QUEUE_S)
        used = statistics.median(list(self._at_site_s)) / allowed_s
        if used > 1:
            self.period_s = _SLOWER * max(self.period_s, period_s)
        else:
            self.period_s *= min(_FASTER, used**_RETURN)

    def served(self, at_site_s: float) -> None:
        """Notes how long a batch was at the site."""
        self._at_site_s.append(at_site_s)
