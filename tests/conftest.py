"""Settings of JAX for the tests and for all processes they start; in the environment, and before anything imports it.

Nearly all of the tests' time was compiling programs that then run for moments. So programs are optimised little, and
kept on disk for the session: many tests build the same learner, or start the same processes, anew.
"""

import atexit
import os
import shutil
import tempfile

_programs = tempfile.mkdtemp(prefix="longhaul-tests-jax-")
atexit.register(shutil.rmtree, _programs, ignore_errors=True)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# For processes that tests start. The tests' own process has another folder (strict_jax.py): jax does not write entries
# atomically, and what it warns of when it reads half of one would be an error there.
os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
