"""Q-learning's mathematics against tables worked by hand, and the update step against its rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import dqn, networks
from longhaul.config import default
from longhaul.distributions import SoftPolicy
from longhaul.rescaling import rescale, unscale
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SPEC = ExperienceSpec("Test-v0", (2,), "float32", stack=1, num_actions=2, n_step=1, gamma=0.5)
CACHE = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [2, -1], [-1, 3]], np.float32)
BATCH = 4


def f32(*values):
    return jnp.array(values, jnp.float32)


def scalar(value):
    return jnp.float32(value)


# ---- prioritized replay


@pytest.mark.parametrize(
    "probabilities, beta, weights",
    [
        # N = 4: (4 * P)^-1 = 0.5, 1, 2, 2; over the largest:
        ((0.5, 0.25, 0.125, 0.125), 1.0, (0.25, 0.5, 1.0, 1.0)),
        ((0.5, 0.25, 0.125, 0.125), 0.5, (0.5, 0.5**0.5, 1.0, 1.0)),
        ((0.5, 0.25, 0.125, 0.125), 0.0, (1.0, 1.0, 1.0, 1.0)),
        ((0.1, 0.1), 1.0, (1.0, 1.0)),
    ],
)
def test_importance_weights_by_hand(probabilities, beta, weights):
    np.testing.assert_allclose(dqn.importance_weights(f32(*probabilities), scalar(beta)), weights, rtol=1e-6)


def test_importance_weights_are_the_formula_whatever_the_table_holds():
    rng = np.random.default_rng(0)
    p = rng.uniform(1e-7, 1e-3, 64)
    for table_size in (1_000, 1_000_000):
        raw = (table_size * p) ** -0.7
        np.testing.assert_allclose(
            dqn.importance_weights(jnp.array(p, jnp.float32), scalar(0.7)), raw / raw.max(), rtol=1e-4
        )


def test_zero_tiny_and_nonsense_probabilities_give_finite_weights_and_leave_the_others_alone():
    p = f32(0.5, 0.25, 0.0, 1e-45, np.nan, np.inf, -0.1)
    np.testing.assert_allclose(dqn.importance_weights(p, scalar(1.0)), (0.5, 1, 1, 1, 1, 1, 1))
    np.testing.assert_array_equal(dqn.importance_weights(f32(0, 0, 0), scalar(1.0)), (1, 1, 1))
    smallest_known = dqn.importance_weights(f32(1e-37, 1.0), scalar(1.0))
    assert np.isfinite(smallest_known).all() and smallest_known[0] == 1


@pytest.mark.parametrize("updates, beta", [(0, 0.4), (50, 0.7), (100, 1.0), (1_000_000, 1.0)])
def test_beta_goes_in_a_line_and_stays(updates, beta):
    np.testing.assert_allclose(dqn.linear_beta(jnp.int32(updates), 0.4, 1.0, 100), beta, rtol=1e-6)


def test_priorities_are_of_the_raw_error_and_a_non_finite_one_gets_the_smallest():
    errors = f32(0.0, 2.5, -2.5, np.nan, np.inf, -np.inf)
    np.testing.assert_allclose(dqn.priorities(errors, 0.01), (0.01, 2.51, 2.51, 0.01, 0.01, 0.01), rtol=1e-6)


# ---- the Munchausen term


@pytest.mark.parametrize(
    "scaled_logs, action, bonus",
    [((-0.5, -0.25), 0, -0.45), ((-0.5, -0.25), 1, -0.225), ((-7.0, 0.0), 0, -0.9), ((-7.0, 0.0), 1, 0.0)],
)
def test_the_munchausen_bonus_by_hand(scaled_logs, action, bonus):
    policy = SoftPolicy(f32(0.5, 0.5), f32(*scaled_logs))
    np.testing.assert_allclose(dqn.munchausen_bonus(policy, jnp.int32(action), 0.9, -1.0), bonus, rtol=1e-6)


# ---- the target network


def test_a_periodic_target_is_due_each_period_and_a_polyak_target_always():
    assert [bool(dqn.target_is_due(jnp.int32(i), 3, 0.0)) for i in range(1, 7)] == [False, False, True] * 2
    assert all(bool(dqn.target_is_due(jnp.int32(i), 3, 0.1)) for i in range(1, 7))


def test_a_polyak_target_goes_tau_of_the_way():
    moved = dqn.moved_target({"w": f32(1.0, 3.0)}, {"w": f32(0.0, -1.0)}, 0.25)
    np.testing.assert_allclose(moved["w"], (0.25, 0.0))
    copied = dqn.moved_target({"w": f32(1.0, 3.0)}, {"w": f32(0.0, -1.0)}, 0.0)
    np.testing.assert_allclose(copied["w"], (1.0, 3.0))


# ---- the whole update


class Harness:
    """An update step with its state and a minibatch whose probabilities, returns and discounts can be set."""

    def __init__(self, **settings):
        self.config, self.network, self.state, self.update = self._built(**settings)
        self.minibatch = dqn.Minibatch(
            slots=jnp.array([[0, 1], [2, 3], [3, 4], [4, 5]], jnp.int32),
            actions=jnp.array([0, 1, 1, 0], jnp.int32),
            returns=f32(1, -1, 0.5, 2),
            discounts=f32(0.5, 0.5, 0, 0.5),
            probabilities=f32(0.1, 0.2, 0.4, 0.1),
        )

    @staticmethod
    @functools.cache
    def _built(**settings):
        """The same for all with the same settings, so that it compiles once; nothing in it ever changes."""
        config = default()
        config.agent.hidden = (8,)
        config.update_from_flattened_dict(settings)
        network = networks.make_network(SPEC, config)
        optimizer = dqn.make_optimizer(config)
        state = dqn.init_state(networks.init_params(network, SPEC, 0), optimizer, 0)
        return config, network, state, jax.jit(dqn.make_update(network, optimizer, config))

    def step(self, cache=CACHE, **columns):
        before = self.state
        minibatch = self.minibatch._replace(**columns)
        self.state, priorities, metrics = self.update(before, jnp.array(cache), minibatch)
        return before, np.asarray(priorities), {name: float(x) for name, x in metrics.items()}

    def loss(self, target_params):
        """The loss alone, not compiled: for one look that is faster than compiling the update."""
        state, minibatch, ones = self.state, self.minibatch, jnp.ones(BATCH, jnp.float32)
        key = state.rng if self.config.agent.noisy_sigma > 0 else None
        rows = jnp.array(CACHE)[minibatch.slots]
        return float(
            dqn.make_loss(self.network, self.config)(state.params, target_params, rows, minibatch, ones, key)[0]
        )

    def q(self, params, slots):
        return np.asarray(self.network.apply(params, jnp.array(CACHE[slots][:, None])))


def unlike(harness):
    """Weights of a target network that prefers other actions than the online one, so that double learning matters."""
    slots = np.asarray(harness.minibatch.slots)[:, 1]
    preferred = harness.q(harness.state.params, slots).argmax(1)
    candidates = (networks.init_params(harness.network, SPEC, seed) for seed in range(1, 50))
    return next(params for params in candidates if (harness.q(params, slots).argmax(1) != preferred).any())


def same(a, b):
    leaves = zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b))
    return all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.parametrize("double", [True, False])
def test_an_update_agrees_with_numpy_in_errors_loss_weights_and_priorities(double):
    h = Harness(**{"agent.double": double, "replay.beta_start": 0.5, "replay.priority_epsilon": 0.125})
    other = unlike(h)
    h.state = h.state._replace(target_params=other)
    before, priorities, metrics = h.step()
    slots = np.asarray(h.minibatch.slots)
    q_tm1, q_t, selector = h.q(before.params, slots[:, 0]), h.q(other, slots[:, 1]), h.q(before.params, slots[:, 1])
    best = (selector if double else q_t).argmax(1)
    assert (selector.argmax(1) != q_t.argmax(1)).any()
    target = np.asarray(h.minibatch.returns) + np.asarray(h.minibatch.discounts) * q_t[np.arange(BATCH), best]
    errors = target - q_tm1[np.arange(BATCH), np.asarray(h.minibatch.actions)]
    huber = np.where(np.abs(errors) <= 1, errors**2 / 2, np.abs(errors) - 0.5)
    weights = (np.array([0.1, 0.2, 0.4, 0.1]) / 0.1) ** -0.5
    np.testing.assert_allclose(priorities, np.abs(errors) + 0.125, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], (weights * huber).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_unweighted"], huber.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mean_abs_td"], np.abs(errors).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mean_q"], q_tm1.mean(), rtol=1e-4, atol=1e-6)
    assert metrics["beta"] == 0.5 and metrics["applied"] == 1


def test_priorities_do_not_feed_on_importance_weights():
    one, other = Harness(), Harness()
    _, priorities, metrics = one.step()
    _, with_other_weights, other_metrics = other.step(probabilities=f32(0.4, 0.1, 0.01, 0.1))
    np.testing.assert_array_equal(priorities, with_other_weights)
    assert metrics["loss"] != other_metrics["loss"]
    assert metrics["loss_unweighted"] == other_metrics["loss_unweighted"]


C51 = {"agent.distribution": "c51", "agent.atoms": 21}
QR = {"agent.distribution": "qr", "agent.atoms": 8}
MUNCHAUSEN = {"agent.munchausen_alpha": 0.9}
NOISY = {"agent.noisy_sigma": 0.5}


@pytest.mark.parametrize(
    "base, field, value",
    [
        ({}, "agent.huber_delta", 0.0),
        ({}, "agent.double", False),
        ({}, "agent.distribution", "c51"),
        ({}, "agent.distribution", "qr"),
        ({}, "agent.noisy_sigma", 0.5),
        ({}, "agent.munchausen_alpha", 0.9),
        ({}, "agent.reward_scale", 0.5),
        ({}, "agent.value_rescaling", True),
        (QR, "agent.atoms", 9),
        (QR, "agent.huber_delta", 0.1),
        (QR, "agent.double", False),
        (QR, "agent.munchausen_alpha", 0.9),
        (QR, "agent.value_rescaling", True),
        (C51, "agent.atoms", 22),
        (C51, "agent.v_min", -5.0),
        (C51, "agent.v_max", 5.0),
        (C51, "agent.double", False),
        (C51, "agent.munchausen_alpha", 0.9),
        (C51, "agent.value_rescaling", True),
        (NOISY, "agent.noisy_sigma", 0.25),
        (MUNCHAUSEN, "agent.munchausen_temperature", 0.5),
        (MUNCHAUSEN, "agent.munchausen_clip", -0.001),
        (MUNCHAUSEN, "agent.value_rescaling", True),
    ],
)
def test_a_setting_changes_the_loss(base, field, value):
    one, other = (harness.loss(unlike(harness)) for harness in (Harness(**base), Harness(**base | {field: value})))
    assert one != other


def numpy_soft_policy(q, temperature):
    logits = (q - q.max(1, keepdims=True)) / temperature
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return np.exp(logs), temperature * logs


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_a_munchausen_update_agrees_with_numpy_and_double_plays_no_part(rescaled, double):
    settings = {"agent.munchausen_temperature": 0.3, "agent.value_rescaling": rescaled, "agent.double": double}
    h = Harness(**MUNCHAUSEN, **settings, **{"agent.reward_scale": 0.5, "replay.priority_epsilon": 0.125})
    other = unlike(h)
    h.state = h.state._replace(target_params=other)
    before, priorities, _ = h.step()
    slots, actions = np.asarray(h.minibatch.slots), np.asarray(h.minibatch.actions)
    of_returns, of_values = (rescale, unscale) if rescaled else (lambda x: x, lambda x: x)
    q_t, target_q_tm1 = of_values(h.q(other, slots[:, 1])), of_values(h.q(other, slots[:, 0]))
    (pi, logs_t), (_, logs_tm1) = numpy_soft_policy(q_t, 0.3), numpy_soft_policy(target_q_tm1, 0.3)
    bonus = 0.9 * np.clip(logs_tm1[np.arange(BATCH), actions], -1, 0)
    returns = 0.5 * np.asarray(h.minibatch.returns) + bonus
    target = of_returns(returns + np.asarray(h.minibatch.discounts) * (pi * (q_t - logs_t)).sum(1))
    errors = target - h.q(before.params, slots[:, 0])[np.arange(BATCH), actions]
    np.testing.assert_allclose(priorities, np.abs(errors) + 0.125, rtol=1e-4)


@pytest.mark.parametrize("settings", [C51, QR], ids=["c51", "qr"])
def test_a_distributions_priority_is_the_difference_of_means(settings):
    h = Harness(**settings, **{"replay.priority_epsilon": 0.125})
    before, priorities, metrics = h.step(discounts=f32(0, 0, 0, 0))
    slots, actions = np.asarray(h.minibatch.slots), np.asarray(h.minibatch.actions)
    errors = np.asarray(h.minibatch.returns) - h.q(before.params, slots[:, 0])[np.arange(BATCH), actions]
    np.testing.assert_allclose(priorities, np.abs(errors) + 0.125, rtol=1e-4)
    np.testing.assert_allclose(metrics["mean_abs_td"], np.abs(errors).mean(), rtol=1e-4)


def test_double_learning_of_distributions_takes_the_online_networks_action():
    h = Harness(**QR, **{"replay.priority_epsilon": 0.125})
    other = unlike(h)
    h.state = h.state._replace(target_params=other)
    before, priorities, _ = h.step()
    slots, actions = np.asarray(h.minibatch.slots), np.asarray(h.minibatch.actions)
    q_tm1, q_t, selector = h.q(before.params, slots[:, 0]), h.q(other, slots[:, 1]), h.q(before.params, slots[:, 1])
    assert (selector.argmax(1) != q_t.argmax(1)).any()
    target = np.asarray(h.minibatch.returns) + np.asarray(h.minibatch.discounts) * q_t[range(BATCH), selector.argmax(1)]
    np.testing.assert_allclose(priorities, np.abs(target - q_tm1[range(BATCH), actions]) + 0.125, rtol=1e-4)


def test_noise_is_drawn_anew_at_each_update_and_apart_for_each_network():
    h = Harness(**NOISY, **{"learner.learning_rate": 1e-9})
    losses = {h.step()[2]["loss"] for _ in range(4)}
    assert len(losses) == 4
    again = Harness(**NOISY, **{"learner.learning_rate": 1e-9})
    assert again.step()[2]["loss"] in losses
    # The same state at both ends, one action at most to choose from, discount 1 and no reward: the error is the
    # difference of two draws of noise, and would be zero if they were one.
    slots = jnp.array([[0, 0], [2, 2], [3, 3], [4, 4]], jnp.int32)
    _, _, metrics = h.step(slots=slots, returns=f32(0, 0, 0, 0), discounts=f32(1, 1, 1, 1))
    assert metrics["mean_abs_td"] > 1e-3


def primitives_of(harness):
    """Names of all primitives of an update's program, inner programs' too."""
    found = set()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            found.add(equation.primitive.name)
            for inner in jax.tree_util.tree_leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(harness.update)(harness.state, jnp.array(CACHE), harness.minibatch).jaxpr)
    return found


def test_options_that_are_off_leave_nothing_in_the_program():
    # Noise draws random bits, distributions and Munchausen have exponentials; Adam and beta have neither.
    needed_by_options = {"random_bits", "threefry2x32", "exp", "log", "erf_inv"}
    assert not primitives_of(Harness()) & needed_by_options
    assert primitives_of(Harness(**NOISY)) & {"random_bits", "threefry2x32"}
    for settings in (C51, MUNCHAUSEN):
        assert {"exp", "log"} <= primitives_of(Harness(**settings))


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("distribution", [{}, C51, QR], ids=["none", "c51", "qr"])
def test_all_options_together_fit_a_minibatch(distribution, dueling):
    settings = {"agent.value_rescaling": True, "agent.dueling": dueling, "agent.reward_scale": 2.0}
    h = Harness(**distribution, **MUNCHAUSEN, **NOISY, **settings, **{"learner.learning_rate": 1e-2})
    terms = [h.step(discounts=f32(0, 0, 0, 0))[2] for _ in range(200)]
    assert all(figures["applied"] for figures in terms)
    first, last = (np.mean([figures["mean_abs_td"] for figures in part]) for part in (terms[:20], terms[-20:]))
    assert last < 0.5 * first


def test_clipping_bounds_the_gradient_that_adam_sees_and_zero_means_none():
    _, _, unclipped = (h := Harness(**{"learner.max_grad_norm": 0.0})).step()
    _, _, clipped = (c := Harness(**{"learner.max_grad_norm": 0.01})).step()
    assert unclipped["grad_norm"] == clipped["grad_norm"] > 0.01
    first_moment = [np.asarray(x) for x in jax.tree_util.tree_leaves(c.state.opt_state[1][0].mu)]
    # After one step Adam's first moment is a tenth of the gradient.
    np.testing.assert_allclose(np.sqrt(sum((x**2).sum() for x in first_moment)), 0.001, rtol=1e-4)
    assert not same(h.state.opt_state, c.state.opt_state)


def test_the_periodic_target_moves_on_the_period_only():
    h = Harness(**{"learner.target_period_updates": 3})
    moved = []
    for _ in range(6):
        before, _, metrics = h.step()
        moved.append(metrics["target_moved"])
        assert same(h.state.target_params, h.state.params if metrics["target_moved"] else before.target_params)
    assert moved == [0, 0, 1, 0, 0, 1]


def test_the_polyak_target_overrides_the_period():
    h = Harness(**{"learner.target_tau": 0.5, "learner.target_period_updates": 1000})
    before, _, metrics = h.step()
    assert metrics["target_moved"] == 1
    for old, new, online in zip(
        *map(jax.tree_util.tree_leaves, (before.params, h.state.target_params, h.state.params))
    ):
        np.testing.assert_allclose(new, (old + online) / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("column, value", [("returns", np.nan), ("returns", np.inf), ("discounts", np.nan)])
def test_a_non_finite_update_changes_counters_only_and_gives_harmless_priorities(column, value):
    h = Harness(**{"learner.target_period_updates": 1})
    h.step()
    poisoned = getattr(h.minibatch, column).at[1].set(value)
    before, priorities, metrics = h.step(**{column: poisoned})
    assert metrics["applied"] == 0 and metrics["target_moved"] == 0
    assert same(h.state._replace(updates=0, skipped=0), before._replace(updates=0, skipped=0))
    assert int(h.state.updates) == 2 and int(h.state.skipped) == 1
    assert np.isfinite(priorities).all() and (priorities > 0).all()
    assert priorities[1] == priorities.min() == np.float32(1e-3)
    _, _, healthy = h.step()
    assert healthy["applied"] == 1 and not same(h.state.params, before.params)


def test_a_finite_loss_with_an_infinite_gradient_is_skipped_too():
    h = Harness(**{"agent.huber_delta": 0.0})
    # Errors near 1e15 have squares that a float32 holds; the gradient's squared norm, near 1e60, it does not.
    before, priorities, metrics = h.step(cache=CACHE * np.float32(1e15))
    assert np.isfinite(metrics["loss"]) and metrics["applied"] == 0
    assert same(h.state.params, before.params) and np.isfinite(priorities).all()


def test_a_skipped_update_does_not_swallow_the_targets_copy():
    h = Harness(**{"learner.target_period_updates": 2})
    h.step()
    h.step(returns=f32(np.nan, 0, 0, 0))
    assert h.step()[2]["target_moved"] == 1


def test_beta_follows_the_updates():
    h = Harness(**{"replay.beta_start": 0.0, "replay.beta_end": 1.0, "replay.beta_updates": 4})
    assert [h.step()[2]["beta"] for _ in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]


def test_training_on_one_minibatch_fits_it():
    h = Harness(**{"learner.learning_rate": 1e-2})
    losses = [h.step(discounts=f32(0, 0, 0, 0))[2]["loss"] for _ in range(300)]
    assert losses[-1] < 0.01 * losses[0]
