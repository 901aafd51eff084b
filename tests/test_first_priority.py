"""First priorities: by hand, and the same as the learner's where one network is both online and target network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import dqn, networks
from longhaul.config import default
from longhaul.first_priority import Acted, FirstPriority
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SPEC = ExperienceSpec("Test-v0", (3,), "float32", stack=1, num_actions=4, n_step=1, gamma=0.9)
COUNT = 6


def make_config(**agent):
    config = default()
    config.agent.hidden = (16,)
    config.replay.priority_epsilon = 0.125
    config.agent.update(agent)
    return config


def test_the_plain_priority_by_hand():
    reckoned = FirstPriority(make_config())
    q_values = np.array([[1.0, 3.0], [2.0, 0.5]], np.float32)
    assert reckoned.acted(q_values, np.array([0, 1])) == [Acted(1.0, 0.0), Acted(0.5, 0.0)]
    assert reckoned.state_values(q_values) == [3.0, 2.0]
    assert reckoned.priority(Acted(1.0, 0.0), 0.5, 0.5, 3.0) == 1.0 + 0.125
    assert reckoned.priority(Acted(1.0, 0.0), 0.5, 0.0, float("nan")) == 0.5 + 0.125


def test_reward_scale_and_rescaling_by_hand():
    reckoned = FirstPriority(make_config(reward_scale=2.0, value_rescaling=True))
    # h(2 * 1 + 0.5 * 12) = h(8) = 2.008
    assert reckoned.priority(Acted(1.008, 0.0), 1.0, 0.5, 12.0) == pytest.approx(1.125)


def test_c51_cannot_say_more_than_its_bounds():
    reckoned = FirstPriority(make_config(distribution="c51", v_max=2.0, v_min=-1.0))
    assert reckoned.priority(Acted(1.5, 0.0), 100.0, 0.0, 0.0) == 0.5 + 0.125
    assert reckoned.priority(Acted(-0.5, 0.0), -100.0, 0.0, 0.0) == 0.5 + 0.125


@pytest.mark.parametrize(
    "agent",
    [
        {},
        {"distribution": "qr", "atoms": 5},
        {"distribution": "c51", "v_min": -30.0, "v_max": 30.0},
        {"value_rescaling": True, "reward_scale": 3.0},
        {"munchausen_alpha": 0.9, "munchausen_temperature": 0.2},
        {"munchausen_alpha": 0.9, "munchausen_temperature": 0.2, "munchausen_clip": -0.05, "value_rescaling": True},
        {"munchausen_alpha": 0.5, "munchausen_temperature": 0.3, "distribution": "qr", "atoms": 5},
        {"munchausen_alpha": 0.5, "munchausen_temperature": 0.3, "distribution": "c51", "v_min": -30.0, "v_max": 30.0},
    ],
)
def test_with_one_network_at_both_ends_the_actors_priorities_are_the_learners(agent):
    config = make_config(**agent)
    network = networks.make_network(SPEC, config)
    params = networks.init_params(network, SPEC, 0)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((COUNT, 2, 3)).astype(np.float32)
    actions = rng.integers(4, size=COUNT).astype(np.int32)
    returns = rng.standard_normal(COUNT).astype(np.float32)
    discounts = np.array([0.9, 0.0, 0.5, 0.9, 0.9, 0.0], np.float32)
    minibatch = dqn.Minibatch(*map(jnp.asarray, (np.zeros(0), actions, returns, discounts, np.zeros(0))))
    weights = jnp.ones(COUNT, jnp.float32)
    loss = jax.jit(dqn.make_loss(network, config))
    _, aux = loss(params, params, jnp.asarray(rows), minibatch, weights)
    expected = dqn.priorities(aux.errors, config.replay.priority_epsilon)

    reckoned = FirstPriority(config)
    q_tm1, q_t = (np.asarray(network.apply(params, rows[:, i : i + 1])) for i in (0, 1))
    columns = zip(reckoned.acted(q_tm1, actions), returns.tolist(), discounts.tolist(), reckoned.state_values(q_t))
    np.testing.assert_allclose([reckoned.priority(*each) for each in columns], expected, rtol=1e-3)
