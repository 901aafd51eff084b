"""Q-networks over stacked rows, and their weights as flat dicts.

The convolutional networks are those of "Human-level control through deep reinforcement learning" (Mnih et al. 2015)
and, for small images, of "MinAtar" (Young & Tian 2019); the dueling head is that of "Dueling Network Architectures for
Deep Reinforcement Learning" (Wang et al. 2016). A module takes rows as replay holds them: scaling of uint8 is its
business and nobody else's, so that actor, learner and evaluation can't differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from ml_collections import config_dict

from longhaul.errors import ConfigError
from longhaul.types import ExperienceSpec, Params

# (channels, kernel side, stride) of the Nature network's convolutions.
NATURE_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
# The smallest side that leaves one pixel after them.
NATURE_MIN_SIDE = 36
# Channels and kernel side of MinAtar's one convolution, of stride 1.
MINATAR_CHANNELS, MINATAR_KERNEL = 16, 3

_KEY_SEPARATOR = "/"


def to_float(rows: jax.Array) -> jax.Array:
    """Returns rows as float32: uint8 scaled from 0..255 to 0..1, any other dtype by value (bool as 0 and 1)."""
    if rows.dtype == jnp.uint8:
        return rows.astype(jnp.float32) * jnp.float32(1 / 255)
    return rows.astype(jnp.float32)


def to_image(rows: jax.Array) -> jax.Array:
    """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> float32 [B, H, W, stack] or [B, H, W, C*stack]."""
    x = jnp.moveaxis(to_float(rows), 1, -1)
    return x.reshape(*x.shape[:3], -1)


class QHead(nn.Module):
    """Action values from features, plain or dueling.

    The dueling head is V + A - mean(A) (Wang et al. 2016, equation 9).

    Attributes:
      num_actions: width of the output.
      dueling: whether value and advantage are estimated apart.
    """

    num_actions: int
    dueling: bool

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """float32 [B, d] -> float32 [B, num_actions]."""
        if not self.dueling:
            return nn.Dense(self.num_actions, name="q")(features)
        advantage = nn.Dense(self.num_actions, name="advantage")(features)
        value = nn.Dense(1, name="value")(features)
        value = jnp.broadcast_to(value, advantage.shape)
        centre = jnp.broadcast_to(jnp.mean(advantage, axis=-1, keepdims=True), advantage.shape)
        return value + advantage - centre


class MLP(nn.Module):
    """Fully connected network over flattened rows.

    Attributes:
      hidden: widths of the hidden layers.
      num_actions: width of the output.
      dueling: see `QHead`.
    """

    hidden: tuple[int, ...]
    num_actions: int
    dueling: bool

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, *row_shape] of the row dtype -> float32 [B, num_actions]."""
        x = to_float(rows).reshape(rows.shape[0], -1)
        for i, width in enumerate(self.hidden):
            x = nn.relu(nn.Dense(width, name=f"dense_{i}")(x))
        return QHead(self.num_actions, self.dueling, name="head")(x)


class NatureCNN(nn.Module):
    """The convolutional network of Mnih et al. 2015; the stack becomes channels.

    Attributes:
      dense: width of the layer after the convolutions (512 in the paper).
      num_actions: width of the output.
      dueling: see `QHead`.
    """

    dense: int
    num_actions: int
    dueling: bool

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> float32 [B, num_actions]."""
        x = to_image(rows)
        for i, (channels, kernel, stride) in enumerate(NATURE_CONVOLUTIONS):
            x = nn.Conv(channels, (kernel, kernel), (stride, stride), padding="VALID", name=f"conv_{i}")(x)
            x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.dense, name="dense")(x))
        return QHead(self.num_actions, self.dueling, name="head")(x)


class MinAtarCNN(nn.Module):
    """The network of Young & Tian 2019 for 10x10 images: 16 filters of 3x3 and one dense layer.

    Attributes:
      dense: width of the layer after the convolution (128 in the paper).
      num_actions: width of the output.
      dueling: see `QHead`.
    """

    dense: int
    num_actions: int
    dueling: bool

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        """[B, stack, H, W] or [B, stack, H, W, C] of the row dtype -> float32 [B, num_actions]."""
        x = to_image(rows)
        x = nn.relu(nn.Conv(MINATAR_CHANNELS, (MINATAR_KERNEL, MINATAR_KERNEL), padding="VALID", name="conv")(x))
        x = nn.relu(nn.Dense(self.dense, name="dense")(x.reshape(x.shape[0], -1)))
        return QHead(self.num_actions, self.dueling, name="head")(x)


def make_network(spec: ExperienceSpec, config: config_dict.ConfigDict) -> nn.Module:
    """Chooses and builds the network for the rows of `spec`.

    `auto` takes the MLP for rows of one axis; for two (H, W) or three (H, W, C) the Nature CNN, or MinAtar's where a
    side is too short for the Nature convolutions.

    Raises:
      ConfigError: the rows fit no network, or not the one asked for.
    """
    shape, name = tuple(spec.row_shape), config.agent.network
    dtype = np.dtype(spec.row_dtype)
    if dtype.kind not in "buif" or dtype.itemsize > 4:
        raise ConfigError(
            f"config.agent.network has no network for rows of dtype {dtype.name} (shape {shape}): "
            "let the environment give uint8, bool or float32"
        )
    if name == "auto":
        image = "minatar" if len(shape) > 1 and min(shape[:2]) < NATURE_MIN_SIDE else "nature"
        name = {1: "mlp", 2: image, 3: image}.get(len(shape), "")
    if not shape or not name or 0 in shape:
        raise ConfigError(
            f"config.agent.network={config.agent.network!r} has no network for rows of shape {shape}: vectors (d,) "
            "and images (H, W) or (H, W, C) are known"
        )
    hidden = tuple(int(width) for width in config.agent.hidden)
    if name == "mlp":
        return MLP(hidden, spec.num_actions, config.agent.dueling)
    kind, min_side = {"nature": (NatureCNN, NATURE_MIN_SIDE), "minatar": (MinAtarCNN, MINATAR_KERNEL)}[name]
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"config.agent.network={name!r} needs images (H, W) or (H, W, C), and rows have shape {shape}: use 'mlp'"
        )
    if min(shape[:2]) < min_side:
        raise ConfigError(
            f"config.agent.network={config.agent.network!r} needs images of at least {min_side}x{min_side} pixels for "
            f"its convolutions, and rows have shape {shape}: use 'auto', 'mlp' or larger images"
        )
    return kind(hidden[-1], spec.num_actions, config.agent.dueling)


def init_params(network: nn.Module, spec: ExperienceSpec, seed: int) -> Params:
    """Returns fresh weights, the same for the same seed; `network.apply(params, rows)` takes them as they are."""
    rows = jnp.zeros((1, spec.stack, *spec.row_shape), np.dtype(spec.row_dtype))
    return jax.jit(network.init)(jax.random.PRNGKey(seed), rows)


def flatten_params(params: Params) -> dict[str, np.ndarray]:
    """Returns {'/'-joined path: float32 array}, arrays on the host that share nothing with the device."""
    flat = traverse_util.flatten_dict(params, sep=_KEY_SEPARATOR)
    return {path: np.array(leaf) for path, leaf in flat.items()}


def unflatten_params(flat: dict[str, np.ndarray]) -> Params:
    """Inverse of `flatten_params`; the leaves stay the arrays that were given."""
    return traverse_util.unflatten_dict(flat, sep=_KEY_SEPARATOR)
