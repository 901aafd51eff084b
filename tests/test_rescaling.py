"""R2D2's h and its inverse: the source's formulas, in floats, numpy and jax alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.rescaling import rescale, unscale
from tests.strict_jax import strict  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    "x, h",
    [
        # sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, by hand
        (0.0, 0.0),
        (3.0, 1.003),
        (-3.0, -1.003),
        (8.0, 2.008),
        (99.0, 9.099),
        (-9999.0, -108.999),
    ],
)
def test_h_by_hand_and_its_inverse(x, h):
    assert rescale(x) == pytest.approx(h, rel=1e-12)
    assert unscale(h) == pytest.approx(x, rel=1e-12, abs=1e-15)


def test_the_inverse_is_the_sources_formula():
    epsilon, x = 1e-3, np.linspace(-50.0, 50.0, 201)
    root = np.sqrt(1 + 4 * epsilon * (np.abs(x) + 1 + epsilon))
    np.testing.assert_allclose(unscale(x), np.sign(x) * (((root - 1) / (2 * epsilon)) ** 2 - 1), rtol=1e-9, atol=1e-9)


def test_float32_comes_back_near_zero_and_far_away():
    x = np.concatenate([np.logspace(-6, 6, 25), -np.logspace(-6, 6, 25), [0.0]]).astype(np.float32)
    np.testing.assert_allclose(unscale(rescale(x)), x, rtol=3e-6)
    on_device = jax.jit(lambda x: unscale(rescale(x)))(jnp.asarray(x))
    assert on_device.dtype == jnp.float32
    np.testing.assert_allclose(on_device, x, rtol=3e-6)
