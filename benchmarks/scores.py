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
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections import config_dict

from benchmarks import peer_sb3
from launchers import command_line, emulated_link, threads, trials
from launchers.comparison import interval, number, span
from longhaul import workers
from longhaul.errors import ConfigError, WorkerFailed
from longhaul.metrics import read_jsonl, write_atomically

EPISODES_NEEDED = 20  # of an evaluation that is to show the target
_SOURCES = Path(__file__).resolve().parent.parent
_LOOK_S = 1.0
_SAY_PERIOD_S = 15.0

_SEEDS = flags.DEFINE_integer("seeds", 3, "runs, seeds from config.seed on", lower_bound=1)
_AT_STEPS = flags.DEFINE_list("at_steps", [], "environment steps to give the return at, such as 20000,50000")
_SECONDS = flags.DEFINE_float("seconds", 0.0, "a run's length from its first update on; 0: no limit", lower_bound=0.0)
_TARGET = flags.DEFINE_float("target", None, "return to reach; config.evaluation.target_return if not given")
_LINK = flags.DEFINE_string("link", None, "a link to train across, as `launchers.local` takes it")
_PEER = flags.DEFINE_string("peer", None, "interpreter that has Stable-Baselines3: train its DQN on the same seeds")
flags.adopt_module_key_flags(command_line)


# ---- figures


class Point(NamedTuple):
    """One evaluation.

    Attributes:
      env_steps, updates: made when its weights were taken up.
      return_mean: over its episodes.
      episodes: how many.
      trained_s: from the run's start until its weights were taken up.
      shown_s: from the run's start until it had ended.
    """

    env_steps: float
    updates: float
    return_mean: float
    episodes: int
    trained_s: float
    shown_s: float


class Curve(NamedTuple):
    """One run: its first update, in seconds from its start (NaN: none), and its evaluations in order."""

    first_update_s: float
    points: list[Point]

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON."""
        first = self.first_update_s if math.isfinite(self.first_update_s) else None
        return {"first_update_s": first, "points": [list(point) for point in self.points]}


def curve_of(plain: dict[str, Any]) -> Curve:
    """Returns what `plain` was made of."""
    first = plain["first_update_s"]
    return Curve(math.nan if first is None else float(first), [Point(*point) for point in plain["points"]])


def read_run(workdir: Path, num_actors: int, started_s: float, first_update_time_s: float | None) -> Curve:
    """Reads a run of ours.

    Args:
      workdir: its folder.
      num_actors: its actor processes.
      started_s: time.time() at its start.
      first_update_time_s: time.time() of its first update, None if there was none.
    """
    actors = [read_jsonl(workdir, f"actor_{index}") for index in range(num_actors)]
    learner = read_jsonl(workdir, "learner")
    points = []
    for line in read_jsonl(workdir, "evaluator"):
        if line.get("return_mean") is None:
            continue
        taken_s = line["time_s"] - line["evaluation_s"]
        points.append(
            Point(
                env_steps=sum(_at(lines, "env_steps", taken_s) for lines in actors),
                updates=_at(learner, "updates", taken_s),
                return_mean=line["return_mean"],
                episodes=line["episodes"],
                trained_s=taken_s - started_s,
                shown_s=line["time_s"] - started_s,
            )
        )
    return Curve(math.nan if first_update_time_s is None else first_update_time_s - started_s, points)


def read_peer(workdir: Path) -> Curve:
    """Reads a run of benchmarks/peer_sb3.py."""
    lines = read_jsonl(workdir, "evaluator")
    names = ("env_steps", "updates", "return_mean", "episodes", "train_s", "wall_s")
    first = next((line["first_update_s"] for line in lines if line["first_update_s"] is not None), math.nan)
    return Curve(first, [Point(*(line[name] for name in names)) for line in lines])


def _at(lines: list[dict[str, Any]], field: str, time_s: float) -> float:
    """Returns a growing count at a time, in a line between its lines; 0 before the first."""
    known = np.array([(line["time_s"], line[field]) for line in lines if line.get(field) is not None], np.float64)
    return float(np.interp(time_s, known[:, 0], known[:, 1], left=0.0)) if len(known) else 0.0


def return_at(curve: Curve, env_steps: float) -> float:
    """Returns the return at a number of environment steps; NaN before the first evaluation and after the last."""
    if not curve.points:
        return math.nan
    steps, returns = zip(*((point.env_steps, point.return_mean) for point in curve.points))
    return float(np.interp(env_steps, steps, returns, left=math.nan, right=math.nan))


def reaching(curve: Curve, target: float) -> Point | None:
    """Returns the first evaluation of enough episodes that reaches the target, or None."""
    enough = (point for point in curve.points if point.episodes >= EPISODES_NEEDED)
    return next((point for point in enough if point.return_mean >= target), None)


def is_over(curve: Curve, last_step: int, target: float | None) -> bool:
    """Returns whether a run has shown all that is asked: its return at last_step and, if there is one, the target."""
    past = bool(curve.points) and curve.points[-1].env_steps >= last_step
    reached = target is not None and reaching(curve, target) is not None
    return past and reached if target is not None else past and last_step > 0


def rows(curves: Sequence[Curve], at_steps: Sequence[int], target: float | None) -> dict[str, list[float]]:
    """Returns the table's rows: figures by name, seed by seed; NaN where a seed has none."""
    found = {f"return at {steps:,} steps": [return_at(curve, steps) for curve in curves] for steps in at_steps}
    found["return of the last evaluation"] = [c.points[-1].return_mean if c.points else math.nan for c in curves]
    found["return at best"] = [max((p.return_mean for p in c.points), default=math.nan) for c in curves]
    if target is not None:
        reached = [(curve, reaching(curve, target)) for curve in curves]
        where = f"to {target:g}"
        found |= {
            f"s {where}, trained": [p.trained_s if p else math.nan for _, p in reached],
            f"s {where}, trained, from the first update": [
                p.trained_s - c.first_update_s if p else math.nan for c, p in reached
            ],
            f"s {where}, shown": [p.shown_s if p else math.nan for _, p in reached],
            f"updates {where}": [p.updates if p else math.nan for _, p in reached],
            f"environment steps {where}": [p.env_steps if p else math.nan for _, p in reached],
        }
    return found


def table(by_side: dict[str, dict[str, list[float]]]) -> list[str]:
    """Returns the lines of the table: a figure's mean with its interval, and of how many seeds, for each side."""
    names = list(next(iter(by_side.values())))
    cells = [["", *by_side]] + [[name, *(_cell(found[name]) for found in by_side.values())] for name in names]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]


def _cell(values: Sequence[float]) -> str:
    known = sum(math.isfinite(value) for value in values)
    if not known:
        return f"- (0 of {len(values)} seeds)"
    found = interval(values)
    return f"{number(found.mean)} ({span(found)}; {known} of {len(values)} seeds)"


def statistics(found: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the rows as JSON: by figure its mean, half of its 95% interval, and the seeds' values; null for none."""

    def one(values: list[float]) -> dict[str, Any]:
        mean, half = interval(values)
        return {"mean": _plain(mean), "half": _plain(half), "seeds": [_plain(value) for value in values]}

    return {name: one(values) for name, values in found.items()}


def _plain(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None


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
        env = threads.environment("local")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SOURCES), os.environ.get("PYTHONPATH", "")]))
        children.start(run.name, [*run.words, f"--workdir={run.folder}"], env, may_finish=True)
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
