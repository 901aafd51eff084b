"""The policy: values of the newest weights, with noise for actors alone, and means of distributions."""

import numpy as np
import pytest

from longhaul import codec, dqn, networks
from longhaul.config import default
from longhaul.policy import Policy
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SPEC = ExperienceSpec("Test-v0", (3,), "float32", stack=2, num_actions=4, n_step=1, gamma=0.9)
STACKS = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)


def make_policy(noise_seed=None, **agent):
    config = default()
    config.agent.hidden = (16,)
    config.agent.update(agent)
    return Policy(SPEC, config, len(STACKS), noise_seed), networks.make_network(SPEC, config)


@pytest.mark.parametrize("distribution", ["none", "c51", "qr"])
def test_values_are_those_of_the_weights_adopted(distribution):
    policy, network = make_policy(distribution=distribution)
    params = networks.init_params(network, SPEC, 7)
    before = policy.q_values(STACKS)
    policy.adopt(codec.pack_weights(networks.flatten_params(params), "float32"))
    np.testing.assert_allclose(policy.q_values(STACKS), network.apply(params, STACKS), rtol=1e-5, atol=1e-6)
    assert before.shape == (5, 4) and not np.allclose(policy.q_values(STACKS), before)


def test_noise_differs_from_call_to_call_actor_to_actor_and_stream_to_stream():
    one, _ = make_policy(0, noisy_sigma=0.5)
    other, _ = make_policy(1, noisy_sigma=0.5)
    again, _ = make_policy(0, noisy_sigma=0.5)
    alike = np.broadcast_to(STACKS[:1], STACKS.shape).copy()
    first, second = one.q_values(alike), one.q_values(alike)
    assert (first != second).any() and (first != other.q_values(alike)).any()
    np.testing.assert_array_equal(again.q_values(alike), first)
    assert (first[1:] != first[0]).any(axis=1).all()


def test_no_actors_noise_is_the_learners():
    keys = [make_policy(noise_seed=index, noisy_sigma=0.5)[0]._noise_key for index in range(3)]
    config = default()
    learners = dqn.init_state({"w": np.zeros(1)}, dqn.make_optimizer(config), config.seed).rng
    assert not any(np.array_equal(key, learners) for key in keys)


def test_without_a_noise_seed_or_noisy_layers_there_is_no_noise():
    evaluation, _ = make_policy(None, noisy_sigma=0.5)
    np.testing.assert_array_equal(evaluation.q_values(STACKS), evaluation.q_values(STACKS))
    plain, _ = make_policy(3)
    np.testing.assert_array_equal(plain.q_values(STACKS), plain.q_values(STACKS))


def test_noise_has_the_spread_of_its_weights():
    policy, network = make_policy(0, noisy_sigma=0.5)
    quiet, _ = make_policy(None, noisy_sigma=0.5)
    flat = networks.flatten_params(networks.init_params(network, SPEC, 0))
    silent = {name: leaf * 0 if name.endswith("sigma") else leaf for name, leaf in flat.items()}
    for each in (policy, quiet):
        each.adopt(codec.pack_weights(silent, "float32"))
    np.testing.assert_allclose(policy.q_values(STACKS), quiet.q_values(STACKS), rtol=1e-5, atol=1e-6)
