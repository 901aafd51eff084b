"""From stacked rows to features: the networks' lower parts, ours and users' own.

A torso takes rows as replay holds them: scaling of uint8 is its business and nobody else's, so that actor, learner and
evaluation can't differ. Ours are constructed as `Torso(hidden, noisy_sigma, dtype)`, with config.agent.hidden: a
convolutional one takes the last width for its dense layer. Users' own are constructed as `Class(hidden=...)`, see
`load_torso`.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from longhaul.errors import ConfigError
from longhaul.heads import dense
from longhaul.types import ExperienceSpec

# (channels, kernel side, stride) of the Nature network's convolutions.
NATURE_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
# A CPU takes a batch's images in portions: of so many at least, and so many portions at most.
PORTION, PORTIONS = 8, 32
# Channels of the IMPALA network's sections.
IMPALA_CHANNELS = (16, 32, 32)
# Channels and kernel side of MinAtar's one convolution, of stride 1.
MINATAR_CHANNELS, MINATAR_KERNEL = 16, 3


def to_float(rows: jax.Array) -> jax.Array:
    """Returns rows as float32: uint8 scaled from 0..255 to 0..1, any other dtype by value (bool as 0 and 1)."""
    if rows.dtype == jnp.uint8:
        return rows.astype(jnp.float32) * jnp.float32(1 / 255)
    return rows.astype(jnp.float32)


def to_image(rows: jax.Array) -> jax.Array:
    """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> float32 [B, H, W, stack] or [B, H, W, C*stack]."""
    x = jnp.moveaxis(to_float(rows), 1, -1)
    return x.reshape(*x.shape[:3], -1)


class MLP(nn.Module):
    """Fully connected layers over flattened rows.

    Attributes:
      hidden: their widths.
      noisy_sigma: see `heads.dense`.
      dtype: that its layers compute in.
    """

    hidden: tuple[int, ...]
    noisy_sigma: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, *row_shape] of the row dtype -> [B, hidden[-1]], float32 or `dtype`."""
        x = to_float(rows).reshape(rows.shape[0], -1)
        for i, width in enumerate(self.hidden):
            x = nn.relu(dense(width, self.noisy_sigma, f"dense_{i}", self.dtype)(x))
        return x


def convolve_in_blocks(
    lhs: jax.Array, rhs: jax.Array, window_strides: Sequence[int], padding: Any, **options: Any
) -> jax.Array:
    """A convolution without padding whose kernel's sides are multiples of its stride, in the form that a CPU likes.

    There blocks of stride x stride pixels become channels, and the convolution one of stride 1 over blocks ("space to
    depth"): the same products, added up in another order. 8 images valued by the Nature network on one core take 2.4 ms
    and not 3.5 under jaxlib 0.4.34, the actors'. Elsewhere than on a CPU it is `lax.conv_general_dilated`. Given to
    `nn.Conv` as its `conv_general_dilated`.

    Args:
      lhs: [B, H, W, C].
      rhs: [kernel, kernel, C, features].
      window_strides: the stride, twice.
      padding: "VALID".
      **options: the others of `lax.conv_general_dilated`, handed on.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.conv_general_dilated(lhs, rhs, window_strides, padding, **options)
    blocks = _blocks(lhs, window_strides[0])
    kernel = _blocks(rhs.transpose(3, 0, 1, 2), window_strides[0]).transpose(1, 2, 3, 0)
    return jax.lax.conv_general_dilated(blocks, kernel, (1, 1), padding, **options)


def in_portions(function: Callable[[jax.Array], jax.Array], images: jax.Array) -> jax.Array:
    """Returns `function(images)`, of a function of each image apart; on a CPU worked out for a few images at a time.

    jaxlib 0.10.2 runs the gradients of a convolution nearly on one thread, but those of several side by side. On 2
    cores the Nature network's update takes 30 to 33 ms so and 40 to 43 of the whole batch at batch 32, 61 to 66
    and 86 at 64, 0.42 s and 1.72 s at 512. More and smaller portions compile for longer.

    Args:
      function: [n, ...] -> [n, ...], for any n.
      images: [B, ...].
    """
    portion = max(PORTION, math.ceil(len(images) / PORTIONS))
    if jax.default_backend() != "cpu" or len(images) <= portion:
        return function(images)
    return jnp.concatenate([function(images[i : i + portion]) for i in range(0, len(images), portion)])


def _blocks(x: jax.Array, side: int) -> jax.Array:
    """[B, H, W, C] -> [B, H // side, W // side, side * side * C]; what is beyond the last whole block is left out."""
    batch, height, width, channels = x.shape
    height, width = height // side, width // side
    x = x[:, : height * side, : width * side].reshape(batch, height, side, width, side, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, side * side * channels)


class NatureCNN(nn.Module):
    """The convolutional network of "Human-level control through deep reinforcement learning" (Mnih et al. 2015).

    Attributes:
      hidden: the last is the dense layer's width, 512 in the paper.
      noisy_sigma: of that layer, see `heads.dense`.
      dtype: that its layers compute in.
    """

    hidden: tuple[int, ...]
    noisy_sigma: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> [B, hidden[-1]], float32 or `dtype`."""
        convolutions = [
            nn.Conv(
                channels,
                (kernel, kernel),
                (stride, stride),
                padding="VALID",
                dtype=self.dtype,
                conv_general_dilated=convolve_in_blocks,
                name=f"conv_{i}",
            )
            for i, (channels, kernel, stride) in enumerate(NATURE_CONVOLUTIONS)
        ]

        def convolve(x: jax.Array) -> jax.Array:
            for convolution in convolutions:
                x = nn.relu(convolution(x))
            return x

        x = in_portions(convolve, to_image(rows))
        return nn.relu(dense(self.hidden[-1], self.noisy_sigma, "dense", self.dtype)(x.reshape(x.shape[0], -1)))


class MinAtarCNN(nn.Module):
    """The network of "MinAtar" (Young & Tian 2019) for 10x10 images: 16 filters of 3x3 and one dense layer.

    Attributes:
      hidden: the last is the dense layer's width, 128 in the paper.
      noisy_sigma: of that layer, see `heads.dense`.
      dtype: that its layers compute in.
    """

    hidden: tuple[int, ...]
    noisy_sigma: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> [B, hidden[-1]], float32 or `dtype`."""
        x = to_image(rows)
        x = nn.relu(
            nn.Conv(MINATAR_CHANNELS, (MINATAR_KERNEL, MINATAR_KERNEL), padding="VALID", dtype=self.dtype, name="conv")(
                x
            )
        )
        return nn.relu(dense(self.hidden[-1], self.noisy_sigma, "dense", self.dtype)(x.reshape(x.shape[0], -1)))


class ImpalaResNet(nn.Module):
    """The deep network of "IMPALA" (Espeholt et al. 2018, figure 3, right), without its recurrent core.

    Three sections: a convolution, a maximum pool of stride 2, two residual blocks of two convolutions; all 3x3.

    Attributes:
      hidden: the last is the dense layer's width, 256 in the paper.
      noisy_sigma: of that layer, see `heads.dense`.
      dtype: that its layers compute in.
    """

    hidden: tuple[int, ...]
    noisy_sigma: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> [B, hidden[-1]], float32 or `dtype`."""
        x = to_image(rows)
        for i, channels in enumerate(IMPALA_CHANNELS):
            x = nn.Conv(channels, (3, 3), dtype=self.dtype, name=f"conv_{i}")(x)
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for block in ("a", "b"):
                y = nn.Conv(channels, (3, 3), dtype=self.dtype, name=f"conv_{i}{block}_0")(nn.relu(x))
                x = x + nn.Conv(channels, (3, 3), dtype=self.dtype, name=f"conv_{i}{block}_1")(nn.relu(y))
        return nn.relu(
            dense(self.hidden[-1], self.noisy_sigma, "dense", self.dtype)(nn.relu(x).reshape(x.shape[0], -1))
        )


# Name -> class, and for images the smallest side that its convolutions take.
TORSOS: dict[str, tuple[Any, int]] = {
    "mlp": (MLP, 0),
    "nature": (NatureCNN, 36),
    "impala": (ImpalaResNet, 1),
    "minatar": (MinAtarCNN, MINATAR_KERNEL),
}


def choose(row_shape: tuple[int, ...], name: str) -> str:
    """Returns the torso for rows of a shape; `name` unless that is "auto".

    `auto` takes the MLP for rows of one axis; for two (H, W) or three (H, W, C) the Nature CNN, or MinAtar's where a
    side is too short for the Nature convolutions.

    Raises:
      ConfigError: the rows fit no torso, or not the one asked for.
    """
    if not 1 <= len(row_shape) <= 3 or 0 in row_shape:
        raise ConfigError(
            f"config.agent.network={name!r} has no network for rows of shape {row_shape}: vectors (d,) and images "
            "(H, W) or (H, W, C) are known; name one of yours as 'module:Class'"
        )
    if name == "auto":
        large = len(row_shape) > 1 and min(row_shape[:2]) >= TORSOS["nature"][1]
        name = "nature" if large else "mlp" if len(row_shape) == 1 else "minatar"
    min_side = TORSOS[name][1]
    if min_side and len(row_shape) == 1:
        raise ConfigError(
            f"config.agent.network={name!r} needs images (H, W) or (H, W, C), and rows have shape {row_shape}: "
            "use 'mlp'"
        )
    if min_side and min(row_shape[:2]) < min_side:
        raise ConfigError(
            f"config.agent.network={name!r} needs images of at least {min_side}x{min_side} pixels for its "
            f"convolutions, and rows have shape {row_shape}: use 'auto', 'mlp' or larger images"
        )
    return name


def load_torso(path: str, hidden: tuple[int, ...], spec: ExperienceSpec, dtype: Any = jnp.float32) -> nn.Module:
    """Makes a user's own torso, named by config.agent.network as "module:Class".

    The class is a Flax module (flax.linen) with one field, `hidden: tuple[int, ...]` (config.agent.hidden, to be used
    as it likes). It is called with rows [B, stack, *row_shape] of the row dtype and returns features, float32 [B, d].
    The head is ours, so that every option of config.agent works with it. With config.agent.compute_dtype="bfloat16" it
    needs a second field `dtype`, given as `Class(hidden=..., dtype=jnp.bfloat16)`, to compute in, and may return
    features of that dtype. The learner, the actors and evaluation must
    all be able to import the module.

    Raises:
      ConfigError: it can't be imported, constructed or called so, or returns something else.
    """
    said = f"config.agent.network is {path!r}"
    module, _, name = path.partition(":")
    try:
        torso_class = getattr(importlib.import_module(module), name)
        takes_dtype = "dtype" in getattr(torso_class, "__dataclass_fields__", {})
        torso = torso_class(hidden=hidden, dtype=dtype) if takes_dtype else torso_class(hidden=hidden)
    except ImportError as error:
        raise ConfigError(
            f"{said}, and module {module!r} can't be imported: {error}; install it, or add its folder to PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{said}, and module {module!r} has no {name!r}") from error
    except TypeError as error:
        raise ConfigError(f"{said}, which can't be made as {name}(hidden={hidden}): {error}") from error
    if not isinstance(torso, nn.Module):
        raise ConfigError(f"{said}, which is no Flax module: derive {name} from flax.linen.Module")
    if dtype != jnp.float32 and not takes_dtype:
        raise ConfigError(
            f"config.agent.compute_dtype is {jnp.dtype(dtype).name!r}, and {path} has no field to be told so: give it "
            "`dtype: Any = jnp.float32` and let its layers compute in that, or use 'float32'"
        )
    rows = jax.ShapeDtypeStruct((2, spec.stack, *spec.row_shape), np.dtype(spec.row_dtype))
    try:
        features, variables = jax.eval_shape(torso.init_with_output, jax.random.PRNGKey(0), rows)
    except Exception as error:  # whatever a user's code raises
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{said}, which fails on rows {np.dtype(spec.row_dtype).name}{list(rows.shape)}: "
            f"{type(error).__name__}: {first_line}"
        ) from error
    if getattr(features, "ndim", 0) != 2 or features.shape[0] != 2 or features.dtype not in (jnp.float32, dtype):
        got = f"{features.dtype}{list(features.shape)}" if hasattr(features, "dtype") else type(features).__name__
        raise ConfigError(f"{said}, which returns {got} for rows {list(rows.shape)}, and must return float32 [2, d]")
    leaves = jax.tree_util.tree_leaves(variables)
    if set(variables) - {"params"} or any(leaf.dtype != jnp.float32 for leaf in leaves):
        raise ConfigError(f"{said}, which has other variables than float32 parameters (found: {sorted(variables)})")
    return torso
