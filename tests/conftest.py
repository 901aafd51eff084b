"""Settings of JAX for the tests and for the processes they start.

Nearly all of the tests' time was compiling programs that then run for moments. So programs are optimised little, and
kept on disk for the session: many tests build the same learner, or start the same processes, anew.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # before jax is imported, which reads it then

import jax

_programs = Path(tempfile.mkdtemp(prefix="longhaul-tests-jax-"))
atexit.register(shutil.rmtree, _programs, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", str(_programs / "own"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Other processes have a folder apart: jax does not write its files atomically, so one of them may read half of one. It
# then warns and compiles, and here a warning would be an error.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_programs / "others")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
