"""JAX at its strictest, for tests that import `strict`: no silent promotion of dtypes or ranks."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
