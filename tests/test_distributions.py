"""Scalar, categorical and quantile values: targets, projections and losses against tables worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import distributions as dist
from longhaul.config import default
from longhaul.rescaling import rescale, unscale
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SCALAR = dist.Scalar(False, 1.0)
FIVE = dist.Categorical(False, 5, -2.0, 2.0)  # atoms -2 -1 0 1 2
PAIR = dist.Quantile(False, 2, 1.0)  # at 1/4 and 3/4


def f32(values):
    return jnp.array(values, jnp.float32)


def logits_of(*probabilities):
    return jnp.log(f32(probabilities) + 1e-30)


def greedy(form, outputs, action, r, discount):
    return np.asarray(form.greedy_target(f32(outputs), jnp.int32(action), f32(r), f32(discount)))


@pytest.mark.parametrize(
    "delta, errors, losses, slopes",
    [
        (1.0, (0.0, 0.5, -0.5, 1.0, 3.0, -3.0), (0.0, 0.125, 0.125, 0.5, 2.5, 2.5), (0.0, 0.5, -0.5, 1.0, 1.0, -1.0)),
        (2.0, (1.0, 2.0, -4.0), (0.5, 2.0, 6.0), (1.0, 2.0, -2.0)),
        (0.0, (0.0, 0.5, -3.0), (0.0, 0.125, 4.5), (0.0, 0.5, -3.0)),
    ],
)
def test_huber_by_hand_and_delta_zero_is_half_the_square(delta, errors, losses, slopes):
    np.testing.assert_allclose(dist.huber_loss(f32(errors), delta), losses)
    slope = jax.vmap(jax.grad(lambda e: dist.huber_loss(e, delta)))(f32(errors))
    np.testing.assert_allclose(slope, slopes)


@pytest.mark.parametrize(
    "q_t, action, r, discount, target",
    [
        ((4.0, 1.0), 0, 1.0, 0.5, 3.0),
        ((4.0, 1.0), 1, 1.0, 0.5, 1.5),
        # termination: no bootstrap
        ((4.0, 1.0), 0, -2.0, 0.0, -2.0),
        # three steps summed at gamma 0.9: r is the n-step return, the discount 0.729
        ((10.0, 20.0, 0.0), 1, 2.71, 0.729, 17.29),
    ],
)
def test_scalar_targets_by_hand(q_t, action, r, discount, target):
    np.testing.assert_allclose(greedy(SCALAR, q_t, action, r, discount), target, rtol=1e-6)


def test_a_soft_policy_by_hand():
    # exp(0), exp(log 3): probabilities 1/4 and 3/4 at temperature 2, whose logs count twice.
    policy = dist.soft_policy(f32((1.0, 1.0 + 2 * np.log(3))), 2.0)
    np.testing.assert_allclose(policy.probabilities, (0.25, 0.75), rtol=1e-6)
    np.testing.assert_allclose(policy.scaled_logs, (2 * np.log(0.25), 2 * np.log(0.75)), rtol=1e-6)
    # A temperature near zero and values far apart: nothing overflows.
    sharp = dist.soft_policy(f32((0.0, 1000.0)), 0.01)
    np.testing.assert_allclose(sharp.probabilities, (0.0, 1.0))
    np.testing.assert_allclose(sharp.scaled_logs, (-1000.0, 0.0), rtol=1e-6)


def test_the_scalar_soft_target_is_the_log_sum_of_exponentials():
    q_t, temperature = f32((1.0, 2.0, -1.0)), 0.5
    policy = dist.soft_policy(q_t, temperature)
    soft_value = temperature * np.log(np.exp(np.array([1.0, 2.0, -1.0]) / temperature).sum())
    target = SCALAR.soft_target(q_t, policy, f32(0.25), f32(0.9))
    np.testing.assert_allclose(target, 0.25 + 0.9 * soft_value, rtol=1e-6)


# ---- C51


@pytest.mark.parametrize(
    "atoms, masses, expected",
    [
        # on the atoms, between them, halfway
        ((-2, -1, 0, 1, 2), (0.1, 0.2, 0.3, 0.4, 0.0), (0.1, 0.2, 0.3, 0.4, 0.0)),
        ((0.25,), (1.0,), (0.0, 0.0, 0.75, 0.25, 0.0)),
        ((-1.5, 0.5), (0.4, 0.6), (0.2, 0.2, 0.3, 0.3, 0.0)),
        # beyond the ends, all of it goes to the last atom
        ((-7.0, 3.0), (0.25, 0.75), (0.25, 0.0, 0.0, 0.0, 0.75)),
    ],
)
def test_projection_by_hand(atoms, masses, expected):
    np.testing.assert_allclose(FIVE.project(f32(atoms), f32(masses)), expected, atol=1e-6)


def test_a_projection_within_the_support_keeps_mass_and_mean():
    rng = np.random.default_rng(0)
    form = dist.Categorical(False, 51, -10.0, 10.0)
    atoms, masses = rng.uniform(-10, 10, 40), rng.dirichlet(np.ones(40))
    projected = np.asarray(form.project(f32(atoms), f32(masses)))
    assert projected.min() >= 0
    np.testing.assert_allclose(projected.sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(form.mean(f32(projected)), (atoms * masses).sum(), atol=1e-5)


def test_categorical_values_and_target_by_hand():
    outputs = jnp.stack([logits_of(0.5, 0, 0, 0, 0.5), logits_of(0, 0, 0.5, 0.5, 0)])
    np.testing.assert_allclose(FIVE.values(outputs), (0.0, 0.5), atol=1e-6)
    np.testing.assert_allclose(FIVE.values(outputs[None]), [(0.0, 0.5)], atol=1e-6)
    # r = 1, discount 1/2: atoms 0 and 1 of action 1 become 1 and 1.5.
    target = greedy(FIVE, outputs, 1, 1.0, 0.5)
    np.testing.assert_allclose(target, (0, 0, 0, 0.75, 0.25), atol=1e-6)
    np.testing.assert_allclose(FIVE.mean(f32(target)), 1.25, rtol=1e-6)
    # Termination: all mass at the return.
    np.testing.assert_allclose(greedy(FIVE, outputs, 1, -1.0, 0.0), (0, 1, 0, 0, 0), atol=1e-6)


def test_the_categorical_soft_target_is_a_mixture():
    outputs = jnp.stack([logits_of(0, 0, 1, 0, 0), logits_of(0, 0, 0, 1, 0)])
    policy = dist.SoftPolicy(f32((0.25, 0.75)), f32((-1.0, 0.0)))
    # With discount 1/2: action 0 gives (0 + 1)/2 = 0.5 with mass 1/4, action 1 gives (1 - 0)/2 = 0.5 with mass 3/4.
    target = FIVE.soft_target(outputs, policy, f32(0.0), f32(0.5))
    np.testing.assert_allclose(target, (0, 0, 0.5, 0.5, 0), atol=1e-6)


def test_the_cross_entropy_by_hand():
    chosen, target = logits_of(0.5, 0.25, 0.25, 1e-9, 1e-9), f32((1.0, 0, 0, 0, 0))
    np.testing.assert_allclose(FIVE.loss(chosen, target), np.log(2), rtol=1e-5)
    slope = jax.grad(lambda x: FIVE.loss(x, target))(chosen)
    np.testing.assert_allclose(slope, (-0.5, 0.25, 0.25, 0, 0), atol=1e-5)


# ---- QR-DQN


def test_quantile_values_and_target_by_hand():
    outputs = ((1.0, 3.0), (0.0, 10.0))
    np.testing.assert_allclose(PAIR.values(f32(outputs)), (2.0, 5.0))
    target = greedy(PAIR, outputs, 0, 1.0, 0.5)
    np.testing.assert_allclose(target, (1.5, 2.5))
    np.testing.assert_allclose(PAIR.mean(f32(target)), 2.0)


def test_the_quantile_soft_target_mixes_quantile_by_quantile():
    policy = dist.SoftPolicy(f32((0.25, 0.75)), f32((-2.0, -1.0)))
    # 0.25 (1 + 2) + 0.75 (0 + 1) = 1.5, and 0.25 (3 + 2) + 0.75 (10 + 1) = 9.5
    target = PAIR.soft_target(f32(((1.0, 3.0), (0.0, 10.0))), policy, f32(1.0), f32(0.5))
    np.testing.assert_allclose(target, (1.75, 5.75), rtol=1e-6)


@pytest.mark.parametrize(
    "kappa, chosen, target, loss",
    [
        # Errors of quantile 1/4: 1 and 3, of quantile 3/4: -1 and 1; Huber's: 0.5 2.5, 0.5 0.5.
        # |1/4|: (0.5 + 2.5)/4/2; |3/4 - 1| and |3/4|: (0.5/4 + 0.5 * 3/4)/2
        (1.0, (0.0, 2.0), (1.0, 3.0), 0.375 + 0.25),
        # kappa 0: |u| instead
        (0.0, (0.0, 2.0), (1.0, 3.0), (1 + 3) / 4 / 2 + (0.25 + 0.75) / 2),
        # kappa 2: u^2/2/2 up to 2, |u| - 1 beyond
        (2.0, (0.0, 2.0), (1.0, 3.0), (0.25 + 2.0) / 4 / 2 + (0.25 * 0.25 + 0.25 * 0.75) / 2),
    ],
)
def test_the_quantile_loss_by_hand(kappa, chosen, target, loss):
    np.testing.assert_allclose(dist.Quantile(False, 2, kappa).loss(f32(chosen), f32(target)), loss, rtol=1e-6)


def test_the_plain_quantile_loss_is_least_at_the_quantiles():
    rng = np.random.default_rng(0)
    returns, form = np.sort(rng.standard_normal(400)), dist.Quantile(False, 4, 0.0)
    slope = jax.jit(jax.grad(form.loss))
    quantiles = f32(np.zeros(4))
    for step in range(2000):
        quantiles = quantiles - jnp.float32(0.2 / (1 + step / 100)) * slope(quantiles, f32(returns))
    np.testing.assert_allclose(quantiles, np.quantile(returns, (0.125, 0.375, 0.625, 0.875)), atol=0.03)


# ---- all of them


@pytest.mark.parametrize(
    "form",
    [dist.Scalar(True, 1.0), dist.Categorical(True, 201, -20.0, 20.0), dist.Quantile(True, 8, 1.0)],
    ids=["none", "c51", "qr"],
)
def test_rescaled_targets_are_h_of_the_return_of_unscaled_atoms(form):
    # A sure return of 100, whatever the form, on the scale of h.
    value = rescale(100.0)
    if isinstance(form, dist.Categorical):
        outputs = jnp.log(form.project(f32((value,)), f32((1.0,))) + 1e-30)[None]
    else:
        outputs = jnp.full((1, form.width) if form.width else (1,), value, jnp.float32)
    target = form.greedy_target(outputs, jnp.int32(0), f32(3.0), f32(0.5))
    np.testing.assert_allclose(unscale(float(form.mean(target))), 53.0, rtol=0.01 if form.width == 201 else 1e-5)
    policy = dist.SoftPolicy(f32((1.0,)), f32((-2.0,)))
    target = form.soft_target(outputs, policy, f32(3.0), f32(0.5))
    np.testing.assert_allclose(unscale(float(form.mean(target))), 54.0, rtol=0.01 if form.width == 201 else 1e-5)


@pytest.mark.parametrize(
    "name, width, kind", [("none", 0, dist.Scalar), ("c51", 21, dist.Categorical), ("qr", 21, dist.Quantile)]
)
def test_the_setting_chooses_the_form(name, width, kind):
    config = default()
    config.agent.update(distribution=name, atoms=21, value_rescaling=True, v_min=-3.0, v_max=5.0, huber_delta=0.5)
    form = dist.make_distribution(config)
    assert isinstance(form, kind) and form.width == width and form.rescaled
    if name == "c51":
        assert (form.support[0], form.support[-1]) == (-3.0, 5.0)
    else:
        assert form.huber_delta == 0.5
