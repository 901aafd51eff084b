"""Epsilons: Ape-X's ladder by hand, and the line down."""

import numpy as np
import pytest

from longhaul.config import default
from longhaul.exploration import Exploration, epsilon_ladder


def make(actor_index=0, num_envs=4, **actor):
    config = default()
    config.env.num_envs = num_envs
    config.actor.update(actor)
    return Exploration(config, actor_index)


def test_the_ladder_is_that_of_ape_x():
    # 0.4^(1 + 7 i/(N-1)), worked by hand for N = 8: exponents 1, 2, ... 8.
    ladder = [epsilon_ladder(i, 8, 0.4, 7.0) for i in range(8)]
    assert ladder == pytest.approx([0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536])
    assert epsilon_ladder(0, 1, 0.4, 7.0) == 0.4
    assert epsilon_ladder(3, 8, 0.4, 0.0) == 0.4
    assert epsilon_ladder(0, 8, 0.0, 7.0) == 0.0


def test_the_ladder_goes_on_from_actor_to_actor_and_never_changes():
    both = np.concatenate([make(0).epsilons(0), make(1).epsilons(10**6)])
    np.testing.assert_allclose(both, [epsilon_ladder(i, 8, 0.4, 7.0) for i in range(8)])


@pytest.mark.parametrize("env_steps, epsilon", [(0, 1.0), (250, 0.775), (500, 0.55), (1000, 0.1), (10**9, 0.1)])
def test_the_line_goes_down_from_1_for_all_streams_and_stays(env_steps, epsilon):
    exploration = make(1, num_envs=2, epsilon=0.1, epsilon_decay_steps=1000)
    np.testing.assert_allclose(exploration.epsilons(env_steps), [epsilon] * 2)
