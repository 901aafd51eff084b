"""Torsos as users write them, good and bad: see test_networks.py."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class Good(nn.Module):
    """One layer over the newest row."""

    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, rows):
        newest = rows[:, -1].astype(jnp.float32).reshape(rows.shape[0], -1)
        return nn.relu(nn.Dense(self.hidden[0], name="own")(newest))


class Unbatched(Good):
    """Forgets the batch."""

    @nn.compact
    def __call__(self, rows):
        return nn.Dense(self.hidden[0])(rows.reshape(-1))


class Half(Good):
    """Another dtype."""

    @nn.compact
    def __call__(self, rows):
        return rows.reshape(rows.shape[0], -1).astype(jnp.float16)


class Normalised(Good):
    """Has running statistics, which nothing would keep."""

    @nn.compact
    def __call__(self, rows):
        return nn.BatchNorm(use_running_average=True)(rows.reshape(rows.shape[0], -1).astype(jnp.float32))


class Images(Good):
    """Only takes images."""

    @nn.compact
    def __call__(self, rows):
        batch, _, height, width = rows.shape
        return rows.reshape(batch, height * width).astype(jnp.float32)


class NoField(nn.Module):
    """Can't be made with hidden."""


def not_a_module(hidden):
    return hidden


class Narrow(Good):
    """Computes in the dtype that it is told, and says so."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, rows):
        newest = rows[:, -1].reshape(rows.shape[0], -1)
        return nn.relu(nn.Dense(self.hidden[0], dtype=self.dtype, name="own")(newest))
