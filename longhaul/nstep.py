"""n-step transitions of one environment stream, from row ids and rewards alone.

The return of k steps is R = r_1 + gamma r_2 + ... + gamma^(k-1) r_k, and the transition bootstraps with
`discount` from the state after them: R + discount * Q(s_k). As "Rainbow: Combining Improvements in Deep
Reinforcement Learning" (Hessel et al. 2018) and Ape-X (Horgan et al. 2018) have it, k is n wherever the episode
lasts that long. At an episode's end each shorter tail is a transition too, with the k that it really sums:

* termination: discount 0, whether or not the episode is truncated in the same step;
* truncation: discount gamma^k, from the episode's true last observation.

Nothing of one episode is ever part of another's transition. Each window sums its own rewards in double precision,
so a reward that is not finite spoils only the windows that contain it.
"""

from collections import deque

from longhaul.types import NStepTransition


class NStepAccumulator:
    """Collects one stream's steps and returns the transitions that each step completes, oldest first.

    Usage:
      accumulator.start(row_id)
      transitions = accumulator.step(action, reward, terminated, truncated, next_row_id)  # until an end
      accumulator.start(row_id)  # the next episode

    Every step comes back as the first of exactly one transition, in order, unless `abandon` lets go of it.

    Args:
      n_step: rewards summed at most.
      gamma: discount per step.
      stack: row ids per observation; before the episode's first row they repeat it.
    """

    def __init__(self, n_step: int, gamma: float, stack: int):
        self._n_step = n_step
        self._stack = stack
        self._powers = [float(gamma) ** k for k in range(n_step + 1)]
        self._obs_ids: tuple[int, ...] = ()
        # [observation's row ids, action, return so far, rewards in it], oldest first.
        self._windows: deque[list] = deque()

    @property
    def in_episode(self) -> bool:
        """Whether an episode has been started and has not ended."""
        return bool(self._obs_ids)

    def start(self, row_id: int) -> None:
        """Begins an episode whose first observation is the row.

        Raises:
          RuntimeError: the episode before it has neither ended nor been abandoned.
        """
        if self._obs_ids:
            raise RuntimeError("start() in the middle of an episode: step() to its end or abandon() it first")
        self._obs_ids = (row_id,) * self._stack

    def step(
        self, action: int, reward: float, terminated: bool, truncated: bool, next_row_id: int
    ) -> list[NStepTransition]:
        """Adds one step.

        Args:
          action: index taken at the newest row.
          reward: received for it.
          terminated: the step reached a terminal state; wins over `truncated`.
          truncated: the episode was cut off after this step.
          next_row_id: the observation after it; at an end the true last one, not the next episode's first.

        Raises:
          RuntimeError: no episode has been started.
        """
        obs_ids = self._obs_ids
        if not obs_ids:
            raise RuntimeError("step() outside an episode: start() one first")
        windows, powers = self._windows, self._powers
        windows.append([obs_ids, action, 0.0, 0])
        for window in windows:
            window[2] += powers[window[3]] * reward
            window[3] += 1
        self._obs_ids = next_ids = (*obs_ids[1:], next_row_id)
        if not (terminated or truncated):
            if len(windows) < self._n_step:
                return []
            ids, first_action, total, count = windows.popleft()
            return [NStepTransition(ids, next_ids, first_action, total, powers[count])]
        complete = [
            NStepTransition(ids, next_ids, first_action, total, 0.0 if terminated else powers[count])
            for ids, first_action, total, count in windows
        ]
        self.abandon()
        return complete

    def abandon(self) -> None:
        """Lets go of the episode and of its steps that no transition holds yet."""
        self._windows.clear()
        self._obs_ids = ()
