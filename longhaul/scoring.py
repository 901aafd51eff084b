"""Loss and priority of transitions under given weights, without training: one function for whoever compares.

The learner and the forwarder score what has crossed the link with it, the evaluator the probe. The network is both
online and target network, since only the newest one is known everywhere: double Q-learning's target is then
r + discount * max_a q(s_t, a).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from longhaul import dqn, networks, train_step
from longhaul.types import ExperienceSpec, Params

ScoreRows = Callable[[Params, jax.Array, dqn.Minibatch], tuple[jax.Array, jax.Array]]


def make_score(spec: ExperienceSpec, config: config_dict.ConfigDict) -> ScoreRows:
    """Returns `(params, rows, minibatch) -> (priorities, losses)`, to be jitted.

    Rows are [N, 2*stack, *row_shape]; the minibatch's slots and probabilities are not read. Priorities are float32
    [N], |TD error| + config.replay.priority_epsilon; losses float32 [N], the learner's, without importance weights.
    """
    loss = dqn.make_loss(networks.make_network(spec, config), config)
    epsilon = float(config.replay.priority_epsilon)

    def score(params: Params, rows: jax.Array, minibatch: dqn.Minibatch) -> tuple[jax.Array, jax.Array]:
        weights = jnp.ones(minibatch.returns.shape, jnp.float32)
        _, aux = loss(params, params, rows, minibatch, weights)
        return dqn.priorities(aux.errors, epsilon), aux.losses

    return score


def make_batch_score(spec: ExperienceSpec, config: config_dict.ConfigDict) -> Any:
    """Returns the jitted `(params, cache, packed batch) -> priorities`, float32 [K*B].

    The cache is [capacity, *row_shape]; the packed batch int32 [K, B, 2*stack + 4], see `train_step.pack_batch`.
    """
    score = make_score(spec, config)

    def batch_score(params: Params, cache: jax.Array, packed: jax.Array) -> jax.Array:
        minibatch = train_step.unpack(packed.reshape(-1, packed.shape[-1]))
        return score(params, cache.at[minibatch.slots].get(mode="promise_in_bounds"), minibatch)[0]

    return jax.jit(batch_score)


class Scorer:
    """Scores rows at hand, N transitions at a time; one N, so compiled once.

    Args:
      spec: of the experience.
      config: whole configuration.
    """

    def __init__(self, spec: ExperienceSpec, config: config_dict.ConfigDict):
        self._score: Any = jax.jit(make_score(spec, config))

    def score(
        self, params: Params, rows: np.ndarray, actions: np.ndarray, returns: np.ndarray, discounts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns priorities and losses, float32 [N] each.

        Args:
          params: the network's.
          rows: [N, 2*stack, *row_shape] of the row dtype.
          actions: int32 [N].
          returns: float32 [N].
          discounts: float32 [N].
        """
        unused = np.zeros(0, np.float32)
        minibatch: Any = dqn.Minibatch
        found = self._score(params, rows, minibatch(unused, actions, returns, discounts, unused))
        return np.asarray(found[0]), np.asarray(found[1])


class ArrivalTally:
    """The mean priority of what has crossed the link since the last line of metrics: all of it, and first crossings."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._sum, self._count = 0.0, 0
        self._first_sum, self._first_count = 0.0, 0

    def add(self, priorities: np.ndarray, first_crossings: np.ndarray) -> None:
        """Adds a batch: float32 [N], and bool, N in all, whether each crosses for the first time (empty: unknown)."""
        self._sum += float(priorities.sum(dtype=np.float64))
        self._count += priorities.size
        if first_crossings.size:
            first = priorities[first_crossings.reshape(-1)]
            self._first_sum += float(first.sum(dtype=np.float64))
            self._first_count += first.size

    def read(self) -> dict[str, float]:
        """Returns means and numbers, and begins anew; a mean of nothing is NaN."""
        figures = {
            "arrival_priority": self._sum / self._count if self._count else np.nan,
            "arrival_draws": self._count,
            "arrival_priority_first": self._first_sum / self._first_count if self._first_count else np.nan,
            "arrival_first_crossings": self._first_count,
        }
        self._begin()
        return figures
