"""Heads and noisy layers: their formulas in numpy, and their noise's moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.heads import NOISE, Head, NoisyDense
from tests.strict_jax import strict  # noqa: F401 (a fixture)


def test_a_noisy_layer_begins_as_the_source_says():
    params = NoisyDense(50, 0.5).init(jax.random.PRNGKey(0), jnp.zeros((1, 16), jnp.float32))["params"]
    bound = 1 / 4
    for name in ("kernel", "bias"):
        assert np.abs(params[name]).max() <= bound < 1.1 * np.abs(params[name]).max()
        assert abs(float(params[name].mean())) < 0.1
    np.testing.assert_allclose(params["kernel_sigma"], 0.5 * bound)
    np.testing.assert_allclose(params["bias_sigma"], 0.5 * bound)


def test_noise_of_each_row_is_factorised_zero_in_the_mean_and_as_wide_as_sigma():
    layer, x = NoisyDense(3, 0.5), np.array([1.0, -2.0, 0.5, 0.0], np.float32)
    params = layer.init(jax.random.PRNGKey(0), x[None])
    rows = jnp.asarray(np.tile(x, (40_000, 1)))
    mean = np.asarray(layer.apply(params, x[None]))[0]
    np.testing.assert_allclose(mean, x @ params["params"]["kernel"] + params["params"]["bias"], rtol=1e-5)
    y = np.asarray(layer.apply(params, rows, rngs={NOISE: jax.random.PRNGKey(1)}))
    np.testing.assert_allclose(y.mean(0), mean, atol=0.02)
    # f(e)^2 = |e|, whose mean is sqrt(2/pi) =: m. With S = s = 1/4 the variance is s^2 m (m |x|^2 + 1).
    m = np.sqrt(2 / np.pi)
    np.testing.assert_allclose(y.var(0), (1 / 16) * m * (m * (x**2).sum() + 1), rtol=0.05)


@pytest.mark.parametrize("width", [0, 5])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("noisy_sigma", [0.0, 0.5])
def test_a_head_gives_outputs_per_action_centred_number_by_number(width, dueling, noisy_sigma):
    head, features = Head(3, width, dueling, noisy_sigma), np.random.default_rng(0).standard_normal((4, 7))
    features = features.astype(np.float32)
    params = head.init(jax.random.PRNGKey(0), features)
    outputs = np.asarray(head.apply(params, features))
    layers = {
        name: features @ np.asarray(leaf["kernel"]) + np.asarray(leaf["bias"])
        for name, leaf in params["params"].items()
    }
    shape = (4, -1, width) if width else (4, -1)
    if dueling:
        value, advantage = layers["value"].reshape(shape), layers["advantage"].reshape(shape)
        expected = value + advantage - advantage.mean(1, keepdims=True)
    else:
        expected = layers["q"].reshape(shape)
    assert outputs.shape == ((4, 3, width) if width else (4, 3))
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    assert ("kernel_sigma" in params["params"]["value" if dueling else "q"]) == (noisy_sigma > 0)
