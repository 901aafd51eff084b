"""The actor under the options of learning: its first priorities against the learner's own loss, its noise, its line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnasium")

from longhaul import dqn, networks
from longhaul.policy import Policy
from tests.test_actor import MODES, _config, _run


def _learners_priorities(config, writer):
    """What the learner's loss makes of all stored transitions, with the actor's network at both ends."""
    spec = writer.spec
    network = networks.make_network(spec, config)
    params = networks.init_params(network, spec, config.seed)
    transitions = [transition for _, transition, _, _ in writer.transitions]
    rows = np.stack([writer.stacks(each.obs_ids + each.next_ids) for each in transitions])
    actions = jnp.array([each.action for each in transitions], jnp.int32)
    returns = jnp.array([each.n_step_return for each in transitions], jnp.float32)
    discounts = jnp.array([each.discount for each in transitions], jnp.float32)
    unused = jnp.zeros(0, jnp.float32)
    minibatch = dqn.Minibatch(unused, actions, returns, discounts, unused)
    _, aux = jax.jit(dqn.make_loss(network, config))(params, params, rows, minibatch, jnp.ones_like(returns))
    return np.asarray(dqn.priorities(aux.errors, config.replay.priority_epsilon))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "agent",
    [
        {"distribution": "c51", "v_min": -1e3, "v_max": 1e3},
        {"distribution": "qr", "atoms": 5, "munchausen_alpha": 0.9, "munchausen_temperature": 3.0},
        {"value_rescaling": True, "reward_scale": 0.5},
        {"munchausen_alpha": 0.9, "munchausen_temperature": 3.0, "value_rescaling": True},
    ],
    ids=["c51", "qr-munchausen", "rescaling", "munchausen-rescaling"],
)
def test_first_priorities_are_those_of_the_learners_target(agent, mode):
    config = _config(stack=2, mode=mode)
    config.agent.update(agent)
    writer = _run(config).writer
    assert len(writer.transitions) > 100
    found = [priority for _, _, _, priority in writer.transitions]
    np.testing.assert_allclose(found, _learners_priorities(config, writer), rtol=2e-3, atol=2e-2)


def test_noisy_layers_explore_without_random_actions():
    config = _config(epsilon=0.0)
    config.agent.noisy_sigma = 0.5
    writer = _run(config).writer
    quiet = Policy(writer.spec, config, 1)
    acted = [each.action for _, each, _, _ in writer.transitions]
    greedy = [int(quiet.q_values(writer.stacks(each.obs_ids)[None]).argmax()) for _, each, _, _ in writer.transitions]
    assert acted != greedy
    config.agent.noisy_sigma = 0.0
    writer = _run(config).writer
    quiet = Policy(writer.spec, config, 1)
    for _, each, _, _ in writer.transitions:
        assert each.action == quiet.q_values(writer.stacks(each.obs_ids)[None]).argmax()


def test_epsilon_falls_with_the_actors_own_steps():
    config = _config(num_envs=2, epsilon=0.1)
    config.actor.epsilon_decay_steps = 100
    early, late = (_run(config, acts=acts).metrics.lines[-1] for acts in (20, 100))
    assert early[1]["epsilon_max"] == early[1]["epsilon_min"] == pytest.approx(1 - 0.9 * early[0] / 100)
    assert 0 < early[0] < 100 < late[0] and late[1]["epsilon_max"] == pytest.approx(0.1)
