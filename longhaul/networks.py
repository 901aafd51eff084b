"""Q-networks over stacked rows, and their weights as flat dicts.

A network is a torso (torsos.py, or a user's own) and a head (heads.py); what the head's numbers mean is told by a
distribution (distributions.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from ml_collections import config_dict

from longhaul import torsos
from longhaul.distributions import Distribution, make_distribution
from longhaul.errors import ConfigError
from longhaul.heads import COMPUTE_DTYPES, Head
from longhaul.types import ExperienceSpec, Params

_KEY_SEPARATOR = "/"


class QNetwork(nn.Module):
    """A torso and a head.

    Attributes:
      torso: rows [B, stack, *row_shape] of the row dtype -> features [B, d], float32 or the compute dtype.
      head: features -> outputs.
      distribution: what the outputs mean.
    """

    torso: nn.Module
    head: Head
    distribution: Distribution

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Returns the actions' values, float32 [B, num_actions]; with distributions, the means."""
        return self.distribution.values(self.outputs(rows))

    def outputs(self, rows: jax.Array) -> jax.Array:
        """Returns what the head says, float32 [B, num_actions] or [B, num_actions, N]."""
        return self.head(self.torso(rows))


def make_network(spec: ExperienceSpec, config: config_dict.ConfigDict) -> QNetwork:
    """Chooses and builds the network for the rows of `spec`.

    Raises:
      ConfigError: the rows fit no network, or not the one asked for; a user's own torso can't be used.
    """
    shape, name, agent = tuple(spec.row_shape), config.agent.network, config.agent
    dtype = np.dtype(spec.row_dtype)
    if dtype.kind not in "buif" or dtype.itemsize > 4:
        raise ConfigError(
            f"config.agent.network has no network for rows of dtype {dtype.name} (shape {shape}): "
            "let the environment give uint8, bool or float32"
        )
    hidden, sigma = tuple(int(width) for width in agent.hidden), float(agent.noisy_sigma)
    compute_dtype = COMPUTE_DTYPES[agent.compute_dtype]
    torso: nn.Module
    if ":" in name:
        torso = torsos.load_torso(name, hidden, spec, compute_dtype)
    else:
        torso = torsos.TORSOS[torsos.choose(shape, name)][0](hidden, sigma, compute_dtype)
    distribution = make_distribution(config)
    head = Head(spec.num_actions, distribution.width, bool(agent.dueling), sigma, compute_dtype)
    return QNetwork(torso, head, distribution)


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
