"""What all commands share: --config and --workdir, help, checked settings, logging and the exit status."""

import ast
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging
from ml_collections import config_dict, config_flags

from launchers import threads
from longhaul import config as config_lib
from longhaul import workers
from longhaul.errors import ConfigError
from longhaul.metrics import write_atomically

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "the task's file, such as configs/cartpole.py; --config.KEY=VALUE changes one of its fields"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "the run's folder: figures, logs, checkpoints")

_HELP_FLAGS = {"help", "helpshort", "helpfull", "h", "?"}
# Libraries whose lines below a warning say nothing about a run.
_QUIET_PACKAGES = ("jax", "orbax", "matplotlib", "tensorflow")

Main = Callable[[config_dict.ConfigDict, workers.StopSignals], int | None]


def run(main: Main, role: str, grace_s: float = workers.GRACE_S) -> NoReturn:
    """Parses the command line, calls main(config, signals), and exits with its status.

    Args:
      main: gets the checked configuration and the process's stop signals.
      role: names the process's entry in launchers/threads.py.
      grace_s: time from a stop signal to the forced end.
    """
    threads.bound_this_process(role)
    _help_if_asked()
    _set_up_logging()

    def work(signals: workers.StopSignals) -> int | None:
        return main(_parse_config(sys.argv), signals)

    workers.end_process(workers.run_worker(work, grace_s))


def run_without_config(main: Callable[[workers.StopSignals], int | None]) -> NoReturn:
    """Parses the command line of a command that has no --config, calls main(signals), and exits with its status."""
    _help_if_asked()
    _set_up_logging()

    def work(signals: workers.StopSignals) -> int | None:
        _parse_flags(sys.argv)
        return main(signals)

    workers.end_process(workers.run_worker(work))


def workdir() -> Path | None:
    """Returns --workdir, or None where it was not given."""
    return Path(_WORKDIR.value) if _WORKDIR.value else None


def workdir_or_new() -> Path:
    """Returns --workdir, or else a new folder runs/<config's name>-<time>."""
    if _WORKDIR.value:
        return Path(_WORKDIR.value)
    return Path("runs") / f"{config_path().stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def config_path() -> Path:
    """Returns the task's file, without the argument that may follow it after a colon."""
    return Path(config_flags.get_config_filename(flags.FLAGS["config"]).split(":")[0])


def config_arguments(argv: list[str]) -> list[str]:
    """Returns the words of a command line that make its configuration, as they are, for another command.

    Args:
      argv: a command line, the program's name first.
    """
    words, found = argv[1:], []
    for i, word in enumerate(words):
        name = word.lstrip("-")
        if not word.startswith("-") or not (
            name.split("=")[0] == "config" or name.startswith(("config.", "noconfig."))
        ):
            continue
        found.append(word)
        if "=" not in word and i + 1 < len(words) and not words[i + 1].startswith("-"):
            found.append(words[i + 1])
    return found


def write_config(config: config_dict.ConfigDict, folder: Path) -> None:
    """Writes the configuration as it was resolved to `config.json`; infinity is the text "inf"."""
    write_atomically(folder / "config.json", json.dumps(_plain(config.to_dict()), indent=2, allow_nan=False) + "\n")


def parse_address(text: str, flag: str) -> tuple[str, int]:
    """Splits host:port.

    Raises:
      ConfigError: it is something else; names the flag.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--{flag} is {text!r}, and must be HOST:PORT, such as 127.0.0.1:7720")
    return host, int(port)


def _help_if_asked() -> None:
    if any(word.lstrip("-") in _HELP_FLAGS for word in sys.argv[1:] if word.startswith("-")):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)


def _parse_flags(argv: list[str]) -> None:
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # a mistake inside the user's file, or a field that does not exist
        raise ConfigError(f"--config: {type(error).__name__}: {_readable(error)}") from error
    if len(rest) > 1:
        raise ConfigError(f"the command line's word {rest[1]!r} means nothing; flags start with --")


def _parse_config(argv: list[str]) -> config_dict.ConfigDict:
    _parse_flags(argv)
    config = _CONFIG.value
    if config is None:
        raise ConfigError("--config is missing; give the task's file, such as --config=configs/cartpole.py")
    if not config_path().is_file():
        raise ConfigError(f"--config: there is no file {config_path()}")
    config_lib.validate(config)
    return config


def _readable(error: Exception) -> str:
    """Returns an error's text; a KeyError's, and those made of one, come as a quoted literal."""
    text = str(error)
    with contextlib.suppress(ValueError, SyntaxError):
        text = str(ast.literal_eval(text))
    return text


def _set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    absl_logging.set_verbosity(absl_logging.INFO)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_says_something)


def _says_something(record: logging.LogRecord) -> bool:
    # By the file that logged: orbax logs under absl's name, as we do.
    quiet = any(f"/site-packages/{package}/" in record.pathname for package in _QUIET_PACKAGES)
    return record.levelno >= logging.WARNING or not quiet


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
