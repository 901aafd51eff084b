"""A run as the course of its evaluations: read from its files, its return at environment steps, its way to a target."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launchers.comparison import interval, number, span
from longhaul.metrics import read_jsonl

EPISODES_NEEDED = 20  # of an evaluation that is to show the target


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
