"""How many threads each role's libraries may use, and which device: the one place where that is said.

NumPy's BLAS, XLA, TensorFlow and OpenCV each make a pool as large as the host. A site runs many actors on one host, so
theirs are held to one thread each: sixteen actors are then sixteen busy threads, not sixteen pools. Actors and the
evaluator also stay off the accelerator, which is the learner's. The learner keeps its libraries' own defaults.

A value that the user's environment sets already wins, but for the device: JAX_PLATFORMS is meant for the learner.
"""

import os

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENCV_FOR_THREADS_NUM": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "NPROC": "1",  # XLA's own pool
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR", "PYTHONUNBUFFERED": "1"}

_DEFAULTS: dict[str, dict[str, str]] = {
    "actor": _QUIET | _ONE_THREAD,
    "evaluate": _QUIET | _ONE_THREAD,
    "forward": _QUIET | _ONE_THREAD,
    # The gateway's Python and Reverb's own threads do the work here; TensorFlow only hands samples over.
    "buffer": _QUIET | {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "2"},
    "learner": _QUIET,
    "local": _QUIET,
    "compare": _QUIET,
}
_FORCED: dict[str, dict[str, str]] = {role: {"JAX_PLATFORMS": "cpu"} for role in ("actor", "evaluate", "forward")}


def environment(role: str) -> dict[str, str]:
    """Returns the variables to set for a process of that role, on top of the present environment."""
    wanted = {name: value for name, value in _DEFAULTS[role].items() if name not in os.environ}
    return wanted | _FORCED.get(role, {})


def bound_this_process(role: str) -> None:
    """Sets the role's variables here; to be called before the libraries that read them are imported."""
    os.environ.update(environment(role))
