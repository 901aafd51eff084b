"""Q-learning's mathematics against tables worked by hand, and the update step against its rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import dqn, networks
from longhaul.config import default
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SPEC = ExperienceSpec("Test-v0", (2,), "float32", stack=1, num_actions=2, n_step=1, gamma=0.5)
CACHE = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [2, -1], [-1, 3]], np.float32)
BATCH = 4


def f32(*values):
    return jnp.array(values, jnp.float32)


def scalar(value):
    return jnp.float32(value)


# ---- targets and errors


@pytest.mark.parametrize(
    "q_t, selector, r, discount, plain, double",
    [
        # the selector picks action 1, worth 1; the target network alone would pick action 0, worth 4
        ((4.0, 1.0), (0.0, 2.0), 1.0, 0.5, 3.0, 1.5),
        # both pick the same
        ((4.0, 1.0), (3.0, 2.0), 1.0, 0.5, 3.0, 3.0),
        # termination: no bootstrap
        ((4.0, 1.0), (0.0, 2.0), -2.0, 0.0, -2.0, -2.0),
        # three steps summed at gamma 0.9: r is the n-step return, the discount 0.729
        ((10.0, 20.0, 0.0), (1.0, 0.0, 0.0), 2.71, 0.729, 17.29, 10.0),
        # negative values, first of equals
        ((-3.0, -1.0), (5.0, 5.0), 0.0, 1.0, -1.0, -3.0),
    ],
)
def test_targets_by_hand(q_t, selector, r, discount, plain, double):
    args = scalar(r), scalar(discount)
    np.testing.assert_allclose(dqn.q_target(f32(*q_t), *args), plain, rtol=1e-6)
    np.testing.assert_allclose(dqn.double_q_target(f32(*q_t), f32(*selector), *args), double, rtol=1e-6)


def test_targets_are_not_differentiated_through():
    grad = jax.grad(
        lambda q: dqn.q_target(q, scalar(1), scalar(0.5)) + dqn.double_q_target(q, q, scalar(1), scalar(0.5))
    )
    np.testing.assert_array_equal(grad(f32(1, 2)), [0, 0])


def test_td_error_is_target_minus_the_value_of_the_action_taken():
    assert dqn.td_error(f32(1.0, 5.0), jnp.int32(1), scalar(3.5)) == -1.5
    assert dqn.td_error(f32(1.0, 5.0), jnp.int32(0), scalar(3.5)) == 2.5


@pytest.mark.parametrize(
    "delta, errors, losses, slopes",
    [
        (1.0, (0.0, 0.5, -0.5, 1.0, 3.0, -3.0), (0.0, 0.125, 0.125, 0.5, 2.5, 2.5), (0.0, 0.5, -0.5, 1.0, 1.0, -1.0)),
        (2.0, (1.0, 2.0, -4.0), (0.5, 2.0, 6.0), (1.0, 2.0, -2.0)),
        (0.0, (0.0, 0.5, -3.0), (0.0, 0.125, 4.5), (0.0, 0.5, -3.0)),
    ],
)
def test_huber_by_hand_and_delta_zero_is_half_the_square(delta, errors, losses, slopes):
    np.testing.assert_allclose(dqn.huber_loss(f32(*errors), delta), losses)
    slope = jax.vmap(jax.grad(lambda e: dqn.huber_loss(e, delta)))(f32(*errors))
    np.testing.assert_allclose(slope, slopes)


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
        config = default()
        config.agent.hidden = (8,)
        config.update_from_flattened_dict(settings)
        self.network = networks.make_network(SPEC, config)
        optimizer = dqn.make_optimizer(config)
        self.state = dqn.init_state(networks.init_params(self.network, SPEC, 0), optimizer, 0)
        self.update = jax.jit(dqn.make_update(self.network, optimizer, config))
        self.minibatch = dqn.Minibatch(
            slots=jnp.array([[0, 1], [2, 3], [3, 4], [4, 5]], jnp.int32),
            actions=jnp.array([0, 1, 1, 0], jnp.int32),
            returns=f32(1, -1, 0.5, 2),
            discounts=f32(0.5, 0.5, 0, 0.5),
            probabilities=f32(0.1, 0.2, 0.4, 0.1),
        )

    def step(self, cache=CACHE, **columns):
        before = self.state
        minibatch = self.minibatch._replace(**columns)
        self.state, priorities, metrics = self.update(before, jnp.array(cache), minibatch)
        return before, np.asarray(priorities), {name: float(x) for name, x in metrics.items()}

    def q(self, params, slots):
        return np.asarray(self.network.apply(params, jnp.array(CACHE[slots][:, None])))


def same(a, b):
    leaves = zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b))
    return all(np.array_equal(x, y) for x, y in leaves)


@pytest.mark.parametrize("double", [True, False])
def test_an_update_agrees_with_numpy_in_errors_loss_weights_and_priorities(double):
    h = Harness(**{"agent.double": double, "replay.beta_start": 0.5, "replay.priority_epsilon": 0.125})
    # A target network unlike the online one, so that the two rules differ.
    other = networks.init_params(h.network, SPEC, 7)
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


@pytest.mark.parametrize("field, value", [("agent.huber_delta", 0.0), ("agent.double", False)])
def test_a_setting_changes_the_loss(field, value):
    losses = []
    for harness in (Harness(), Harness(**{field: value})):
        harness.state = harness.state._replace(target_params=networks.init_params(harness.network, SPEC, 7))
        losses.append(harness.step()[2]["loss"])
    assert losses[0] != losses[1]


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
