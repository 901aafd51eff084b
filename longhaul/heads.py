"""From features to what is said of each action: plain or dueling, scalar or a distribution, noisy or not.

Sources: the dueling head, "Dueling Network Architectures for Deep Reinforcement Learning" (Wang et al. 2016), for
distributions as in Rainbow (Hessel et al. 2018); noisy layers, "Noisy Networks for Exploration" (Fortunato et al.
2018).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

# Types that layers may compute in; parameters are float32 in either.
COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
NOISE = "noise"  # flax's name of the random stream that noisy layers draw from


def narrow_dot_general(x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any) -> jax.Array:
    """lax.dot_general of factors rounded to bfloat16, summed and returned in float32.

    A layer whose result were rounded too would tell values of 100 apart by halves only: for what values come out of.
    """
    options["preferred_element_type"] = jnp.float32
    return jax.lax.dot_general(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), dimensions, **options)


def _signed_root(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


class NoisyDense(nn.Module):
    """A dense layer with factorised Gaussian noise on its weights (Fortunato et al. 2018, section 3).

    y = (W + S * f(e_out) f(e_in)^T) x + b + s * f(e_out), f(e) = sign(e) sqrt(|e|); W and b start uniform within
    1/sqrt(d), S and s at sigma/sqrt(d). Each row of a batch has noise of its own, where the source shares one draw: the
    streams of an actor then explore apart, and the learner's gradient has less variance. Without a random stream named
    NOISE (`network.apply(params, rows)`) the noise is zero.

    Attributes:
      features: width of the output.
      sigma: initial noise, 0.5 in the source.
      dtype: of the products' factors; the rest is float32.
    """

    features: int
    sigma: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 or `dtype` [B, d] -> float32 [B, features]."""
        x = x.astype(jnp.float32)
        width, bound = x.shape[-1], x.shape[-1] ** -0.5

        def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
            if self.dtype == jnp.float32:
                return jnp.dot(x, kernel)
            return narrow_dot_general(x, kernel, (((1,), (0,)), ((), ())))

        def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        sigma = nn.initializers.constant(self.sigma * bound)
        kernel = self.param("kernel", uniform, (width, self.features))
        bias = self.param("bias", uniform, (self.features,))
        kernel_sigma = self.param("kernel_sigma", sigma, (width, self.features))
        bias_sigma = self.param("bias_sigma", sigma, (self.features,))
        y = dot(x, kernel)
        y = y + jnp.broadcast_to(bias, y.shape)
        if not self.has_rng(NOISE):
            return y
        in_key, out_key = jax.random.split(self.make_rng(NOISE))
        noise_in = _signed_root(jax.random.normal(in_key, x.shape, jnp.float32))
        noise_out = _signed_root(jax.random.normal(out_key, y.shape, jnp.float32))
        return y + noise_out * (dot(x * noise_in, kernel_sigma) + jnp.broadcast_to(bias_sigma, y.shape))


def dense(features: int, noisy_sigma: float, name: str, dtype: Any = jnp.float32) -> Any:
    """Returns a dense layer that computes in `dtype`, noisy if `noisy_sigma` is more than 0.

    A plain layer's outputs are of `dtype`, a noisy one's float32.
    """
    if noisy_sigma > 0:
        return NoisyDense(features, noisy_sigma, dtype, name=name)
    return nn.Dense(features, dtype=dtype, name=name)


class Head(nn.Module):
    """Outputs from features: [B, num_actions], or with a width [B, num_actions, width].

    The dueling head is V + A - mean(A) (Wang et al. 2016, equation 9), number by number of a distribution's outputs.

    Attributes:
      num_actions: A.
      width: numbers per action of a distribution; 0: one value.
      dueling: whether value and advantage are estimated apart.
      noisy_sigma: see `dense`.
      dtype: of the products' factors; sums and outputs are float32.
    """

    num_actions: int
    width: int
    dueling: bool
    noisy_sigma: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """float32 or `dtype` [B, d] -> float32 [B, num_actions] or [B, num_actions, width]."""
        if not self.dueling:
            return self._per_action(features, self.num_actions, "q")
        advantage = self._per_action(features, self.num_actions, "advantage")
        value = jnp.broadcast_to(self._per_action(features, 1, "value"), advantage.shape)
        centre = jnp.broadcast_to(jnp.mean(advantage, axis=1, keepdims=True), advantage.shape)
        return value + advantage - centre

    def _per_action(self, features: jax.Array, count: int, name: str) -> jax.Array:
        outputs = count * (self.width or 1)
        if self.noisy_sigma > 0:
            y = NoisyDense(outputs, self.noisy_sigma, self.dtype, name=name)(features)
        else:
            dot = None if self.dtype == jnp.float32 else narrow_dot_general
            y = nn.Dense(outputs, dtype=jnp.float32, dot_general=dot, name=name)(features)
        return y.reshape(y.shape[0], count, self.width) if self.width else y
