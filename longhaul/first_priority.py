"""The first priority of a transition, from what an actor knows: its own Q-values (Horgan et al. 2018, section 3).

|target - Q(s_t, a_t)| + epsilon, with the learner's target as far as an actor can know it: its one network is both
online and target network, and of a distribution it knows the mean. With rescaling, the Munchausen term and C51's
bounds the target is theirs (dqn.py, distributions.py), in numpy: a call of the device would cost more than the numbers.
"""

from typing import NamedTuple

import numpy as np
from ml_collections import config_dict

from longhaul.rescaling import rescale, unscale


class Acted(NamedTuple):
    """What must be kept of a step until its transition's priority is known.

    Attributes:
      q_value: Q(s_t, a_t).
      bonus: what the Munchausen term adds to the return.
    """

    q_value: float
    bonus: float


class FirstPriority:
    """Reckons first priorities.

    Args:
      config: whole configuration.
    """

    def __init__(self, config: config_dict.ConfigDict):
        agent = config.agent
        self._epsilon = float(config.replay.priority_epsilon)
        self._reward_scale = float(agent.reward_scale)
        self._rescaled = bool(agent.value_rescaling)
        self._alpha, self._temperature = float(agent.munchausen_alpha), float(agent.munchausen_temperature)
        self._clip = float(agent.munchausen_clip)
        self._bounds = (float(agent.v_min), float(agent.v_max)) if agent.distribution == "c51" else None

    def acted(self, q_values: np.ndarray, actions: np.ndarray) -> list[Acted]:
        """Returns what to keep of a step of B streams; float32 [B, A], int [B]."""
        streams = np.arange(len(actions))
        bonuses = [0.0] * len(actions)
        if self._alpha > 0:
            logs = self._scaled_logs(self._unscaled(q_values))[streams, actions]
            bonuses = (self._alpha * np.clip(logs, self._clip, 0.0)).tolist()
        return [Acted(*pair) for pair in zip(q_values[streams, actions].tolist(), bonuses)]

    def state_values(self, q_values: np.ndarray) -> list[float]:
        """Returns what states are worth to a return that bootstraps from them, B floats from float32 [B, A].

        The greatest value, unscaled; under Munchausen sum_a pi(a) (Q(a) - temperature log pi(a)), which is
        temperature * log sum_a exp(Q(a) / temperature).
        """
        best = q_values.max(axis=1)
        if self._alpha > 0:
            values = self._unscaled(q_values)
            # The log of a softmax's largest probability is the largest value less the log of the sum of exponentials.
            return (values.max(axis=1) - self._scaled_logs(values).max(axis=1)).tolist()
        return self._unscaled(best).tolist()

    def priority(self, acted: Acted, n_step_return: float, discount: float, state_value: float) -> float:
        """Returns the priority of a transition; `state_value` is not read where the discount is 0."""
        target = self._reward_scale * n_step_return + acted.bonus
        if discount:
            target += discount * state_value
        if self._rescaled:
            target = rescale(target)
        if self._bounds is not None:
            target = min(max(target, self._bounds[0]), self._bounds[1])
        return abs(target - acted.q_value) + self._epsilon

    def _unscaled(self, values: np.ndarray) -> np.ndarray:
        return unscale(values) if self._rescaled else values

    def _scaled_logs(self, values: np.ndarray) -> np.ndarray:
        """Returns temperature * log softmax(values / temperature), [B, A]."""
        logits = (values - values.max(axis=1, keepdims=True)) / self._temperature
        return self._temperature * (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
