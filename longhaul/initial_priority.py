"""The priority that a transition enters the replay with, as config.replay.initial_priority says."""

import threading
from typing import Any

import numpy as np


class InitialPriority:
    """Decides it; for one replay. The methods may be called from several threads.

    "td_error": the actor's own (Horgan et al. 2018, section 3). "max": the highest that the learner has given any
    transition so far, 1 before the first, so that each is soon drawn once (Schaul et al. 2016, algorithm 1).

    Args:
      replay: config.replay.
    """

    def __init__(self, replay: Any):
        self._highest = 1.0 if replay.initial_priority == "max" else None
        self._lock = threading.Lock()

    def of(self, given: np.ndarray) -> np.ndarray:
        """Returns the priorities float64 [N] of new transitions, from those that their actors gave them."""
        return given if self._highest is None else np.full(len(given), self._highest)

    def note(self, priorities: np.ndarray) -> None:
        """Takes note of what the learner gave, float64 [N], finite."""
        if self._highest is not None:
            with self._lock:
                self._highest = max(self._highest, float(priorities.max(initial=0.0)))
