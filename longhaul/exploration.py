"""Shares of random actions: Ape-X's ladder over the site's streams, or one line down for all of them."""

import numpy as np
from ml_collections import config_dict


def epsilon_ladder(index: int, count: int, epsilon: float, alpha: float) -> float:
    """Returns the share of random actions of stream `index` out of `count`: epsilon^(1 + index*alpha/(count-1)).

    Horgan et al. 2018, section 4; a site of one stream gets epsilon itself.
    """
    return float(epsilon) ** (1.0 + index * alpha / (count - 1) if count > 1 else 1.0)


class Exploration:
    """The epsilons of one actor's streams.

    With config.actor.epsilon_decay_steps they fall in a line from 1 to config.actor.epsilon over that many environment
    steps of the actor (Mnih et al. 2015), from the start again when it is restarted; else they are the ladder's.

    Args:
      config: whole configuration.
      actor_index: from 0; its streams follow those of the actors before it.
    """

    def __init__(self, config: config_dict.ConfigDict, actor_index: int):
        actor, count = config.actor, config.env.num_envs
        self._decay_steps, self._end = int(actor.epsilon_decay_steps), float(actor.epsilon)
        first, total = actor_index * count, actor.num_actors * count
        self._ladder = np.array(
            [epsilon_ladder(first + i, total, actor.epsilon, actor.epsilon_alpha) for i in range(count)]
        )

    def epsilons(self, env_steps: int) -> np.ndarray:
        """Returns float64 [num_envs] after `env_steps` steps of the actor."""
        if not self._decay_steps:
            return self._ladder
        share = min(env_steps / self._decay_steps, 1.0)
        return np.full(len(self._ladder), 1.0 + share * (self._end - 1.0))
