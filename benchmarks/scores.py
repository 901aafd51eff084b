"""What a task is trained to over several seeds: the return at fixed environment steps, and the time to a target.

  python -m benchmarks.scores --config=configs/cartpole.py --seeds=3 --at_steps=20000,50000,100000 [--link=...]
      [--seconds=300] [--target=475] [--peer=build/peer/bin/python] [--workdir=runs/scores]

Each seed is a `launchers.local` of its own, one after the other, so that each has the machine to itself. A run ends
when it is past the last of --at_steps and has reached the target, else after --seconds, else with the learner's
max_updates. --peer trains the same seeds with Stable-Baselines3's DQN (see benchmarks/peer_sb3.py for how its
environment is built, and for its hyperparameters). Started again with the same --workdir and flags it reuses the runs
that have ended.

Returns are means over config.evaluation.episodes greedy episodes with the same seeds for all. A return at an
environment step lies on the straight line between the evaluations before and after it; where a run has none on one
side there is no return. A run's steps are those of all its actors together. An evaluation counts for the steps,
updates and seconds at which its weights were taken up.

The target is reached by the first evaluation of at least 20 episodes whose mean is no less. Its time is said twice:
"trained" is when those weights were taken up, the peer's evaluations before then not counted (ours run beside the
training, in a process of their own, and take their part of the machine from it); "shown" is when that evaluation had
ended, all evaluations counted. Both count from the start of the run's process, and "trained" from its first update too.

Means over seeds carry Student's 95% interval. Seeds that did not get there are left out of a mean; how many did is
said beside it. A table, then one JSON object on the last line.
"""

import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict

from benchmarks import peer_sb3
from benchmarks.curves import EPISODES_NEEDED, Curve, curve_of, is_over, read_peer, read_run, rows, statistics, table
from launchers import command_line, emulated_link, trials
from launchers.comparison import number
from longhaul import workers
from longhaul.errors import ConfigError, WorkerFailed
from longhaul.metrics import write_atomically

_LOOK_S = 1.0
_SAY_PERIOD_S = 15.0

_SEEDS = flags.DEFINE_integer("seeds", 3, "runs, seeds from config.seed on", lower_bound=1)
_AT_STEPS = flags.DEFINE_list("at_steps", [], "environment steps to give the return at, such as 20000,50000")
_SECONDS = flags.DEFINE_float("seconds", 0.0, "a run's length from its first update on; 0: no limit", lower_bound=0.0)
_TARGET = flags.DEFINE_float("target", None, "return to reach; config.evaluation.target_return if not given")
_LINK = flags.DEFINE_string("link", None, "a link to train across, as `launchers.local` takes it")
_PEER = flags.DEFINE_string("peer", None, "interpreter that has Stable-Baselines3: train its DQN on the same seeds")
flags.adopt_module_key_flags(command_line)


# ---- runs


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed of one side.

    Attributes:
      folder: its own.
      side: "longhaul" or "peer".
      seed: of the run.
      num_actors: of the configuration; of no meaning for the peer.
      last_step: environment steps to go past.
      target: return to reach; None: none.
      words: the command, without the folder.
    """

    folder: Path
    side: str
    seed: int
    num_actors: int
    last_step: int
    target: float | None
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.side}-seed{self.seed}"

    def plan(self) -> dict[str, Any]:
        """Returns what makes this run what it is; kept beside its figures."""
        return {"at_steps": self.last_step, "target": self.target, "words": self.words}

    def read(self, started_s: float, first_update_time_s: float | None) -> Curve:
        """Returns what its files say."""
        if self.side == "peer":
            return read_peer(self.folder)
        return read_run(self.folder, self.num_actors, started_s, first_update_time_s)


def make(run: Run, signals: workers.StopSignals) -> Curve | None:
    """Makes a run, unless it has ended before, and keeps its figures in its summary.json.

    Returns:
      None if it was interrupted.

    Raises:
      ConfigError: the folder holds a run of other settings.
      WorkerFailed: the run has failed; names it, its reason and its log.
    """
    known = trials.finished(run)  # type: ignore[arg-type]  # it looks at folder and plan alone
    if known is not None:
        return curve_of(known)
    if run.folder.exists():
        shutil.rmtree(run.folder)
    run.folder.mkdir(parents=True)
    started_s = time.time()
    with workers.Supervisor(run.folder.parent / "logs", trials.GRACE_S, signals.hurry) as children:
        words = [*run.words, f"--workdir={run.folder}"]
        children.start(run.name, words, trials.environment(), may_finish=True)
        if not _follow(run, children, signals, started_s):
            return None
    summary = _summary(run)
    curve = run.read(started_s, summary.get("trained_from_time_s"))
    if not curve.points:
        raise WorkerFailed(f"{run.name} ended without an evaluation; see {run.folder.parent}/logs/{run.name}.log")
    summary |= {"figures": curve.plain(), "plan": run.plan()}
    write_atomically(run.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return curve


def _follow(run: Run, children: workers.Supervisor, signals: workers.StopSignals, started_s: float) -> bool:
    """Shows progress until the run has ended or shown all that is asked; False if interrupted."""
    said_s = started_s
    while not signals.stop.wait(_LOOK_S):
        children.check()
        if children.status(run.name) == 0:
            return True
        curve = run.read(started_s, None)
        if is_over(curve, run.last_step, run.target):
            return True
        if time.time() - said_s >= _SAY_PERIOD_S:
            said_s = time.time()
            newest = curve.points[-1] if curve.points else None
            reached = f"{newest.env_steps:,.0f} steps, return {number(newest.return_mean)}" if newest else "starting"
            print(f"{run.name}: {said_s - started_s:.0f} s, {reached}", flush=True)
    return False


def _summary(run: Run) -> dict[str, Any]:
    """Returns the summary that `local` has left; the peer leaves none."""
    try:
        return json.loads((run.folder / "summary.json").read_text())
    except (OSError, ValueError):
        return {}


def _our_run(config: config_dict.ConfigDict, folder: Path, seed: int, last_step: int, target: float | None) -> Run:
    words = [
        *(sys.executable, "-m", "launchers.local"),
        *command_line.config_arguments(sys.argv),
        f"--config.seed={seed}",
        "--config.evaluation.target_return=inf",  # the run's end is ours to say
        f"--seconds={_SECONDS.value}",
        *([f"--link={_LINK.value}"] if _LINK.value else []),
    ]
    actors = config.actor.num_actors
    return Run(folder / f"longhaul-seed{seed}", "longhaul", seed, actors, last_step, target, tuple(words))


def _peers_run(config: config_dict.ConfigDict, folder: Path, seed: int, last_step: int, target: float | None) -> Run:
    words = [
        *(str(_PEER.value), "-m", "benchmarks.peer_sb3"),
        f"--task={config.env.id}",
        f"--seed={seed}",
        f"--steps={max(last_step, peer_sb3.TASKS[config.env.id].steps if target is not None else 0)}",
        f"--seconds={_SECONDS.value}",
        f"--episodes={config.evaluation.episodes}",
        f"--evaluation_seed={config.evaluation.seed}",
        f"--max_steps={config.evaluation.max_steps}",
    ]
    return Run(folder / f"peer-seed{seed}", "peer", seed, 0, last_step, target, tuple(words))


# ---- the command


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> int:
    emulated_link.parse_link(_LINK.value)
    at_steps = parse_steps(_AT_STEPS.value)
    target = _target(config)
    if _PEER.value:
        check_peer(_PEER.value, config.env.id)
    folder = command_line.workdir()
    folder = folder or command_line.workdir_or_new().with_name(f"scores-{command_line.workdir_or_new().name}")
    print(f"scores' folder: {folder}", flush=True)
    last_step = max(at_steps, default=0)
    curves: dict[str, list[Curve]] = {}
    for seed in range(config.seed, config.seed + _SEEDS.value):
        for make_run in (_our_run, _peers_run) if _PEER.value else (_our_run,):
            run = make_run(config, folder, seed, last_step, target)
            curve = make(run, signals)
            if curve is None:
                print(f"interrupted; the same command with --workdir={folder} goes on from here", flush=True)
                return 0
            curves.setdefault(run.side, []).append(curve)
    by_side = {side: rows(found, at_steps, target) for side, found in curves.items()}
    print("\n".join(table(by_side)))
    figures = {side: statistics(found) for side, found in by_side.items()}
    facts = {
        "task": config.env.id,
        "config": str(command_line.config_path()),
        "command": "python -m benchmarks.scores " + " ".join(sys.argv[1:]),
        "episodes": config.evaluation.episodes,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps({**facts, **figures}), flush=True)
    return 0


def parse_steps(words: Sequence[str]) -> list[int]:
    """Returns the environment steps in --at_steps, in order.

    Raises:
      ConfigError: one is no positive whole number.
    """
    for word in words:
        if not word.isdigit() or not int(word):
            raise ConfigError(f"--at_steps: {word!r} must be a whole number above 0; give such as 20000,50000,100000")
    return sorted(int(word) for word in words)


def _target(config: config_dict.ConfigDict) -> float | None:
    target = config.evaluation.target_return if _TARGET.value is None else _TARGET.value
    if not math.isfinite(target):
        return None
    if config.evaluation.episodes < EPISODES_NEEDED:
        raise ConfigError(
            f"config.evaluation.episodes is {config.evaluation.episodes}, and must be at least {EPISODES_NEEDED} "
            f"for a target ({target:g}) to be shown; raise it"
        )
    return float(target)


def check_peer(python: str, task: str) -> None:
    """Checks that the peer can be run on a task.

    Raises:
      ConfigError: it can't; says what to mend.
    """
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        raise ConfigError(f"--peer={python} is no interpreter; benchmarks/peer_sb3.py says how to build one")
    if task not in peer_sb3.TASKS:
        raise ConfigError(
            f"--peer: there are no hyperparameters for config.env.id={task!r}; there are for "
            f"{', '.join(peer_sb3.TASKS)}: leave --peer out, or add them in benchmarks/peer_sb3.py"
        )


if __name__ == "__main__":
    command_line.run(main, "compare", trials.GRACE_S + 5.0)
