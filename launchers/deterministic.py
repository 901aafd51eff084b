"""What `local --deterministic` does: a run in this process and one thread, whose losses come out the same twice.

Leaves the figures of every update in metrics/losses.csv, to be compared with `cmp`, and says the checksums of that file
and of the weights.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path

import numpy as np
from absl import logging
from ml_collections import config_dict

from launchers.emulated_link import EmulatedLink
from longhaul import workers
from longhaul.errors import ConfigError, Stopped
from longhaul.metrics import MetricsWriter, jsonl_path, write_atomically
from longhaul.types import ExperienceSpec, Snapshot

# Sums whose parts are shared out to threads, or whose algorithm is chosen by a race, may round otherwise next time.
_XLA_FLAGS = ("--xla_cpu_multi_thread_eigen=false", "--xla_gpu_deterministic_ops=true")
_LOSSES = "losses.csv"


def prepare(
    config: config_dict.ConfigDict, replay: str, link: EmulatedLink | None, seconds: float, link_budget: float
) -> None:
    """Checks that nothing asked for goes by a clock or a process of its own, and makes the run's actors one.

    Args:
      config: whole configuration; `actor.num_actors` is changed.
      replay: where it stands, the flag.
      link: the link asked for.
      seconds: the run's length asked for, 0 for none.
      link_budget: bytes/s asked for, 0 for no limit.

    Raises:
      ConfigError: something can't go with --deterministic, by name.
    """
    limited = link is not None and any((link.rtt_s, link.rate_bytes_per_s, link.up_rate_bytes_per_s, link.outage_s))
    for refused, text in (
        (limited, "--link delays by a clock: leave it out"),
        (bool(link_budget), "--link_budget delays by a clock: leave it out"),
        (replay != "buffer", f"--replay={replay} needs processes that race: leave it out"),
        (bool(seconds), "--seconds ends a run by a clock: set --config.learner.max_updates instead"),
        (
            config.env.vectorization == "async",
            "config.env.vectorization is 'async', whose processes can hang and be replaced: set it to 'sync'",
        ),
        (
            config.actor.steps_per_s > 0,
            "config.actor.steps_per_s keeps to a clock: set it to 0; config.replay.samples_per_insert sets the ratio",
        ),
        (
            config.link.weights_budget_bytes_per_s > 0,
            "config.link.weights_budget_bytes_per_s publishes by a clock: set it to 0",
        ),
    ):
        if refused:
            raise ConfigError(f"--deterministic: {text}")
    if config.actor.num_actors != 1:
        logging.info("--deterministic: one actor instead of config.actor.num_actors (%d)", config.actor.num_actors)
        config.actor.num_actors = 1


def check_new(workdir: Path) -> None:
    """Raises ConfigError if the folder holds a run: what its actor had seen is lost, so none can be gone on with."""
    if jsonl_path(workdir, "learner").exists() or (workdir / "checkpoints").exists():
        raise ConfigError(f"--workdir={workdir} holds a run, and --deterministic begins anew: give an empty folder")


def run(config: config_dict.ConfigDict, workdir: Path, signals: workers.StopSignals) -> str:
    """Trains and evaluates; returns "solved", "finished", "target missed" or "interrupted".

    To be called before JAX is first used.

    Args:
      config: as `prepare` left it.
      workdir: the run's folder, new.
      signals: of this process.
    """
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS]).strip()
    from longhaul import checkpoints, env, lockstep

    path = workdir / "metrics" / _LOSSES
    with contextlib.ExitStack() as closing:
        learner, actor, evaluator = (
            closing.enter_context(MetricsWriter(workdir, role, config.metrics.tensorboard))
            for role in ("learner", "actor_0", "evaluator")
        )
        losses = closing.enter_context(lockstep.LossFile(path))
        judge = _Judge(config, env.make_spec(config), workdir, evaluator, signals)
        newest = lockstep.train(config, workdir, losses, learner, actor, signals.stop, judge)
        if not (signals.stop.is_set() or judge.solved):
            with contextlib.suppress(Stopped):
                judge.evaluate(newest)
    print(f"losses of every update: {path}, sha256 {_checksum(path.read_bytes())}")
    saved = checkpoints.latest_weights(workdir)
    if saved is not None:
        print(f"weights in the last checkpoint: sha256 {_checksum(saved[1])}", flush=True)
    if judge.solved:
        return "solved"
    if signals.stop.is_set():
        return "interrupted"
    return "finished" if config.evaluation.target_return == float("inf") else "target missed"


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class _Judge:
    """Evaluates weights greedily; content once config.evaluation.target_return is reached.

    Attributes:
      solved: whether it has been.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        spec: ExperienceSpec,
        workdir: Path,
        metrics: MetricsWriter,
        signals: workers.StopSignals,
    ):
        self._config, self._spec, self._workdir = config, spec, workdir
        self._metrics, self._signals = metrics, signals
        self._best = -np.inf
        self.solved = False

    def __call__(self, snapshot: Snapshot) -> bool:
        self.evaluate(snapshot)
        return self.solved

    def evaluate(self, snapshot: Snapshot) -> None:
        """Plays the episodes, writes a line of figures, and keeps the best weights.

        Raises:
          Stopped: by a signal.
        """
        from launchers.evaluate import BEST_WEIGHTS
        from longhaul import evaluation

        began_s = time.monotonic()
        result = evaluation.evaluate(self._config, self._spec, snapshot.payload, self._signals.stop)
        mean = result.mean_return
        if mean > self._best:
            self._best = mean
            write_atomically(self._workdir / BEST_WEIGHTS, snapshot.payload)
        seconds = {"weights_version": snapshot.version, "evaluation_s": time.monotonic() - began_s}
        self._metrics.write(snapshot.version, result.figures() | seconds)
        print(f"weights {snapshot.version}: mean return {mean:.1f}", flush=True)
        self.solved = mean >= self._config.evaluation.target_return
