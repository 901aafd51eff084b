"""Says in one line what to install where Reverb can't work: its binary fits one TensorFlow, and few Pythons.

python -m launchers.reverb_check
"""

import os
import sys
from importlib import metadata

from longhaul.errors import ConfigError
from longhaul.workers import print_reason

REVERB = "0.14.0"
TENSORFLOW = "2.15."
_MEND = "build the environment again with `make clean env`"


def check_versions() -> None:
    """Looks at what is installed, without loading it.

    Raises:
      ConfigError: Reverb, or a TensorFlow that fits it, is not installed.
    """
    reverb = _version("dm-reverb")
    tensorflow = _version("tensorflow-cpu") or _version("tensorflow")
    if reverb is None:
        raise ConfigError(f"dm-reverb {REVERB} is not installed in {sys.prefix}; {_MEND}, and use .venv/bin/python")
    if tensorflow is None or not tensorflow.startswith(TENSORFLOW):
        found = f"TensorFlow {tensorflow}" if tensorflow else "no TensorFlow"
        raise ConfigError(
            f"dm-reverb {reverb} needs tensorflow-cpu {TENSORFLOW}x, and {found} is installed in {sys.prefix}; {_MEND}"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        check_versions()
        import longhaul.buffer  # noqa: F401 (loads Reverb, which loads TensorFlow)
    except ConfigError as error:
        print_reason(str(error))
        return 2
    except Exception as error:  # a binary that does not fit fails in many ways
        print_reason(f"Reverb does not load: {type(error).__name__}: {error}; {_MEND}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
