"""JAX at its strictest, for tests that import `strict`: no silent promotion of dtypes or ranks.

Programs are kept on disk for the session: many tests build the same learner anew, and compiling is most of their time.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterator

import jax
import pytest

_programs = tempfile.mkdtemp(prefix="longhaul-tests-jax-")
atexit.register(shutil.rmtree, _programs, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _programs)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
