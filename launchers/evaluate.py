"""Plays episodes greedily with fixed seeds and reports their returns.

  python -m launchers.evaluate --config=configs/cartpole.py --checkpoint=runs/mine
  python -m launchers.evaluate --config=configs/cartpole.py --weights=runs/mine/best_weights.bin
  python -m launchers.evaluate --config=configs/cartpole.py --gateway=127.0.0.1:7720 [--watch --workdir=runs/mine]

Prints one JSON object on the last line. With --watch it follows the run's weights instead, evaluates the newest ones
time after time, writes metrics/evaluator.jsonl and keeps the best weights so far as best_weights.bin; there it also
scores them on the transitions that actors hold out (config.actor.probe_share).
"""

import json
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags, logging
from ml_collections import config_dict

from launchers import command_line, connection
from longhaul import workers
from longhaul.errors import ConfigError, MismatchError, Stopped
from longhaul.metrics import MetricsWriter, write_atomically
from longhaul.types import ExperienceSpec, Snapshot

if TYPE_CHECKING:
    from longhaul.site_client import SiteClient

BEST_WEIGHTS = "best_weights.bin"
# Between looks for newer weights; they come by themselves, this only reads a variable.
_LOOK_S = 0.1

_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "a run's folder: its newest checkpoint; or one checkpoint's folder"
)
_WEIGHTS = flags.DEFINE_string("weights", None, "a file of packed weights, such as a run's best_weights.bin")
_WATCH = flags.DEFINE_bool("watch", False, "with --gateway: evaluate the newest weights until stopped")
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(connection)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> None:
    sources = [f"--{flag.name}" for flag in (_CHECKPOINT, _WEIGHTS, connection.GATEWAY) if flag.present]
    if len(sources) != 1:
        raise ConfigError(
            f"give one of --checkpoint, --weights and --gateway, not {' and '.join(sources) or 'none of them'}"
        )
    at_gateway = connection.GATEWAY.present
    if _WATCH.value and not at_gateway:
        raise ConfigError(f"--watch follows a running site, so it needs --gateway, not {sources[0]}")
    from longhaul import env

    spec = env.make_spec(config)
    if at_gateway:
        _evaluate_site(config, spec, signals.stop)
        return
    payload = (
        _read_checkpoint(Path(_CHECKPOINT.value)) if _CHECKPOINT.value else _read_weights(Path(_WEIGHTS.value or ""))
    )
    print(json.dumps(_evaluate(config, spec, payload, signals.stop)))


def _read_checkpoint(path: Path) -> bytes:
    from longhaul import checkpoints

    one = path / "weights.lhw"
    if one.is_file():
        return one.read_bytes()
    newest = checkpoints.latest_weights(path.parent if path.name == "checkpoints" else path)
    if newest is None:
        raise ConfigError(f"--checkpoint={path} holds no whole checkpoint; give a run's folder")
    return newest[1]


def _read_weights(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--weights={path} can't be read: {error.strerror}") from error


def _evaluate_site(config: config_dict.ConfigDict, spec: ExperienceSpec, stop: threading.Event) -> None:
    from longhaul.site_client import SiteClient

    address, credentials = connection.to_gateway("reader")
    site = SiteClient(address, "reader", stop, credentials)
    try:
        different = site.announce(None).spec.differences(spec)
        if different:
            raise MismatchError(
                f"--gateway={address} holds another experience than --config makes: {'; '.join(different)}"
            )
        site.start()
        if _WATCH.value:
            _watch(config, spec, site, stop)
        else:
            snapshot = _newer_weights(site, None, stop)
            print(json.dumps(_evaluate(config, spec, snapshot.payload, stop) | {"weights_version": snapshot.version}))
    finally:
        site.close()


def _watch(config: config_dict.ConfigDict, spec: ExperienceSpec, site: "SiteClient", stop: threading.Event) -> None:
    workdir = command_line.workdir()
    metrics = MetricsWriter(workdir, "evaluator", config.metrics.tensorboard)
    snapshot, best = None, -math.inf
    probe = None
    if config.actor.probe_share and workdir is not None:
        from longhaul import evaluation

        probe = evaluation.ProbeScores(config, spec, workdir)
    try:
        while not stop.is_set():
            snapshot = _newer_weights(site, snapshot, stop)
            began_s = time.monotonic()
            figures = _evaluate(config, spec, snapshot.payload, stop)
            figures |= {"weights_version": snapshot.version, "evaluation_s": time.monotonic() - began_s}
            if probe is not None:
                figures |= probe.measure(snapshot.payload)
            logging.info("weights %d: mean return %.1f", snapshot.version, figures["return_mean"])
            if figures["return_mean"] > best:
                best = figures["return_mean"]
                if workdir is not None:
                    write_atomically(workdir / BEST_WEIGHTS, snapshot.payload)
            # After the weights, so that whoever reads the figure finds them.
            metrics.write(snapshot.version, figures)
            stop.wait(max(0.0, config.evaluation.period_s - (time.monotonic() - began_s)))
    finally:
        metrics.close()


def _newer_weights(site: "SiteClient", known: Snapshot | None, stop: threading.Event) -> Snapshot:
    while not stop.wait(_LOOK_S):
        snapshot = site.newest_weights()
        if snapshot is not None and (
            known is None or (snapshot.epoch, snapshot.version) > (known.epoch, known.version)
        ):
            return snapshot
    raise Stopped("stopped while waiting for weights")


def _evaluate(
    config: config_dict.ConfigDict, spec: ExperienceSpec, payload: bytes, stop: threading.Event
) -> dict[str, float]:
    from longhaul import evaluation

    return evaluation.evaluate(config, spec, payload, stop).figures()


if __name__ == "__main__":
    command_line.run(main, "evaluate")
