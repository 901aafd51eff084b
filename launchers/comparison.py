"""The figures of a comparison: what one run's files say, statistics over seeds, and the verdict on each claim.

Times count from a run's first update, which is where both sides begin to train. "Last quarter" is the last quarter of
the run from there on, where the loss has converged. Means over seeds carry Student's 95% interval; ratios are of the
two sides of one seed, then averaged.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from longhaul.metrics import read_jsonl

SIDES = ("existing", "proposed")
BINS = 40  # of a run's length, for curves
LAST_SHARE = 0.25
PRIORITY_RATIO_NEEDED = 3.92
LOSS_RATIO_NEEDED = 0.26

Lines = list[dict[str, Any]]

# Figures that are one figure over another of the same run, both under the same network: they compare, whatever the two
# sides' networks have learned. The probe is the site's whole stream. What is sent gains the first over it; draws on
# priorities that are never out of date would gain the second.
_QUOTIENTS = {
    "arrival_gain": ("arrival_priority", "probe_priority"),
    "fresh_gain": ("probe_priority_drawn", "probe_priority"),
}


class Interval(NamedTuple):
    """A mean over seeds and half the width of its 95% interval; infinite for one seed, NaN for none."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of the finite values with Student's 95% interval."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Interval(math.nan, math.nan)
    mean = float(np.mean(finite))
    if len(finite) == 1:
        return Interval(mean, math.inf)
    factor = float(special.stdtrit(len(finite) - 1, 0.975))  # Student's t
    return Interval(mean, factor * float(np.std(finite, ddof=1)) / math.sqrt(len(finite)))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Returns the ratio seed by seed; a seed whose denominator is 0 is left out."""
    pairs = zip(numerators, denominators)
    return interval([a / b for a, b in pairs if b and math.isfinite(a) and math.isfinite(b)])


# ---- one run


@dataclasses.dataclass(frozen=True)
class _Figure:
    """Where a figure comes from: role's lines, their field, and the field that weighs them (None: all alike)."""

    role: str
    field: str
    weight: str | None = None


def _figures_of(link_role: str) -> dict[str, _Figure]:
    return {
        "loss": _Figure("learner", "loss", "updates_per_s"),
        "loss_unweighted": _Figure("learner", "loss_unweighted", "updates_per_s"),
        "probe_loss": _Figure("evaluator", "probe_loss"),
        "probe_priority": _Figure("evaluator", "probe_priority"),
        "probe_priority_drawn": _Figure("evaluator", "probe_priority_drawn"),
        "arrival_priority": _Figure(link_role, "arrival_priority", "arrival_draws"),
        "arrival_priority_first": _Figure(link_role, "arrival_priority_first", "arrival_first_crossings"),
        "return": _Figure("evaluator", "return_mean"),
        "idle_share": _Figure("learner", "idle_share"),
        "sample_age_s": _Figure("learner", "sample_age_s", "updates_per_s"),
        "versions_behind": _Figure("learner", "versions_behind", "updates_per_s"),
        "updates_per_s": _Figure("learner", "updates_per_s"),
    }


def measure(workdir: Path, replay: str, num_actors: int, from_s: float, seconds: float, rate: float) -> dict[str, Any]:
    """Returns the figures of one run, as plain JSON.

    Args:
      workdir: the run's folder.
      replay: "buffer" or "learner".
      num_actors: actor processes of the run.
      from_s: time.time() of the first update.
      seconds: length from there on.
      rate: bytes/s of the link towards the learner, for the share of it that is used; 0: unlimited.

    Returns:
      {"all": {name: mean}, "last": {name: mean}, "totals": {name: number}, "curves": {name: [BINS numbers or None]}}.
    """
    link_role = "forwarder" if replay == "learner" else "learner"
    roles = {role: read_jsonl(workdir, role) for role in ("learner", "forwarder", "evaluator", "link", "gateway")}
    actors = [read_jsonl(workdir, f"actor_{i}") for i in range(num_actors)]
    for line in roles["learner"]:
        if line.get("policy_version") is not None and line.get("weights_version") is not None:
            line["versions_behind"] = line["weights_version"] - line["policy_version"]
    end_s = from_s + seconds
    figures = _figures_of(link_role)
    found: dict[str, Any] = {}
    for name, begin_s in (("all", from_s), ("last", end_s - LAST_SHARE * seconds)):
        means = {key: _mean(roles[f.role], f, begin_s, end_s) for key, f in figures.items()}
        means |= _rates(roles, actors, link_role, begin_s, end_s, rate)
        found[name] = {key: _plain(value) for key, value in means.items()}
    found["totals"] = _totals(roles, actors, link_role, from_s, end_s)
    edges = np.linspace(from_s, end_s, BINS + 1)
    curves = {
        key: [_mean(roles[f.role], f, begin, end) for begin, end in itertools.pairwise(edges)]
        for key, f in figures.items()
    }
    middle = (edges[:-1] + edges[1:]) / 2
    curves["time_s"] = (middle - from_s).tolist()
    curves["env_steps"] = [float(sum(_grown(lines, "env_steps", from_s, t) for lines in actors)) for t in middle]
    down = np.array([_at(roles["link"], "down_bytes", t) for t in edges])
    curves["down_bytes"] = [_at(roles["link"], "down_bytes", t) - float(down[0]) for t in middle]
    curves["down_bytes_per_s"] = (np.diff(down) / np.diff(edges)).tolist()
    found["curves"] = {key: [_plain(value) for value in values] for key, values in curves.items()}
    return found


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _mean(lines: Lines, figure: _Figure, begin_s: float, end_s: float) -> float:
    total, weights = 0.0, 0.0
    for line in lines:
        value = line.get(figure.field)
        weight = line.get(figure.weight) if figure.weight else 1.0
        if begin_s <= line["time_s"] < end_s and value is not None and weight:
            total += value * weight
            weights += weight
    return total / weights if weights else math.nan


def _at(lines: Lines, field: str, time_s: float) -> float:
    """Returns a growing count at a time, between its lines; 0 without any, and where lines do not know it yet."""
    points = [(line["time_s"], line.get(field) or 0) for line in lines]
    return _interpolate(np.array([time_s]), points).item() if points else 0.0


def _interpolate(x: np.ndarray, points: Sequence[tuple[float, float]]) -> np.ndarray:
    known = np.array(points, np.float64)
    return np.interp(x, known[:, 0], known[:, 1])


def _grown(lines: Lines, field: str, begin_s: float, end_s: float) -> float:
    return _at(lines, field, end_s) - _at(lines, field, begin_s)


def _rates(
    roles: dict[str, Lines], actors: list[Lines], link_role: str, begin_s: float, end_s: float, rate: float
) -> dict[str, float]:
    seconds = end_s - begin_s
    down = _grown(roles["link"], "down_bytes", begin_s, end_s)
    crossed = _grown(roles[link_role], "link_samples", begin_s, end_s)
    return {
        "env_steps_per_s": sum(_grown(lines, "env_steps", begin_s, end_s) for lines in actors) / seconds,
        "experiences_per_s": crossed / seconds,
        "down_bytes_per_s": down / seconds,
        "up_bytes_per_s": _grown(roles["link"], "up_bytes", begin_s, end_s) / seconds,
        "bytes_per_experience": down / crossed if crossed else math.nan,
        "link_use": down / seconds / rate if rate else math.nan,
        "dropped_per_s": _grown(roles["gateway"], "spool_dropped", begin_s, end_s) / seconds,
    }


def _totals(
    roles: dict[str, Lines], actors: list[Lines], link_role: str, begin_s: float, end_s: float
) -> dict[str, float]:
    def grown(role: str, field: str) -> float:
        return round(_grown(roles[role], field, begin_s, end_s))

    first = [line.get("arrival_first_crossings") or 0 for line in roles[link_role] if line["time_s"] >= begin_s]
    kinds = sorted({key for line in roles[link_role] for key in line if key.startswith(("received_", "sent_"))})
    return {
        "updates": grown("learner", "updates"),
        "env_steps": round(sum(_grown(lines, "env_steps", begin_s, end_s) for lines in actors)),
        "experiences": grown(link_role, "link_samples"),
        "first_crossings": sum(first),
        "down_bytes": grown("link", "down_bytes"),
        "up_bytes": grown("link", "up_bytes"),
        "dropped": grown("gateway", "spool_dropped"),
        "outages": grown(link_role, "outages"),
        **{kind: grown(link_role, kind) for kind in kinds if kind.endswith("_bytes")},
    }


# ---- over seeds


class Pair(NamedTuple):
    """The two runs of one seed, as `measure` has them."""

    existing: dict[str, Any]
    proposed: dict[str, Any]


def values(pairs: Sequence[Pair], side: str, window: str, name: str) -> list[float]:
    """Returns one figure of one side, seed by seed; NaN where it is missing."""
    if name in _QUOTIENTS:
        above, below = (values(pairs, side, window, part) for part in _QUOTIENTS[name])
        return [a / b if b else math.nan for a, b in zip(above, below)]
    found = (getattr(pair, side)[window].get(name) for pair in pairs)
    return [math.nan if value is None else float(value) for value in found]


def figure_ratio(pairs: Sequence[Pair], window: str, name: str) -> Interval:
    """Returns proposed over existing."""
    return ratio(values(pairs, "proposed", window, name), values(pairs, "existing", window, name))


def return_by_bytes(pair: Pair, points: int = 10) -> np.ndarray:
    """Returns proposed minus existing greedy return at equal bytes across the link, [points].

    The bytes are those from the site to the learner since the first update, at equal steps up to what both have used.
    Before a side's first evaluation its first one counts.
    """
    sides = []
    for run in pair:
        curves = run["curves"]
        known = [(b, r) for b, r in zip(curves["down_bytes"], curves["return"]) if r is not None and b is not None]
        sides.append(known or [(0.0, math.nan)])
    largest = min(side[-1][0] for side in sides)
    grid = largest * (np.arange(points) + 1) / points
    existing, proposed = (_interpolate(grid, side) for side in sides)
    return proposed - existing


# ---- claims


class Verdict(NamedTuple):
    """What became of one claim.

    Attributes:
      claim: what was to be shown.
      holds: whether the mean over seeds shows it; None: nothing was measured.
      text: the statement, with the figure, its interval and what was needed.
    """

    claim: str
    holds: bool | None
    text: str


def verdicts(measured: dict[tuple[str, str], list[Pair]]) -> list[Verdict]:
    """Judges the paper's claims.

    Args:
      measured: the pairs of every (setting, budget).
    """
    found = []
    for (setting, budget), pairs in measured.items():
        if setting != "a":
            continue
        where = f"setting a, equal {budget}/s"
        for name, what in (("arrival_priority", "all draws"), ("arrival_priority_first", "first crossings")):
            claim = (
                f"Average priority of transferred experiences ({what}) at least {PRIORITY_RATIO_NEEDED} times the "
                f"existing approach's, last quarter, {where}"
            )
            verdict = _judge(claim, figure_ratio(pairs, "last", name), PRIORITY_RATIO_NEEDED, at_least=True)
            found.append(verdict._replace(text=verdict.text + _attainable(pairs)))
        claim = f"Training loss at most {LOSS_RATIO_NEEDED:.0%} of the existing approach's, last quarter, {where}"
        found.append(_judge(claim, figure_ratio(pairs, "last", "loss"), LOSS_RATIO_NEEDED, at_least=False))
    for (setting, budget), pairs in measured.items():
        if budget == "bytes":
            found.append(_judge_return(setting, pairs))
    return found


def _judge(claim: str, found: Interval, needed: float, at_least: bool) -> Verdict:
    if not math.isfinite(found.mean):
        return Verdict(claim, None, "not measured")
    holds = found.mean >= needed if at_least else found.mean <= needed
    return Verdict(
        claim, holds, _statement(holds, found, f"{'at least' if at_least else 'at most'} {needed:g}", needed)
    )


def _attainable(pairs: list[Pair]) -> str:
    """Returns what draws on priorities that are never out of date would have given, in words."""
    found = interval(values(pairs, "proposed", "last", "fresh_gain"))
    if not math.isfinite(found.mean):
        return ""
    return (
        f"; draws from the site's newest stream on priorities never out of date would give {number(found.mean)} "
        f"({span(found)}) times its mean"
    )


def _statement(holds: bool, found: Interval, needed: str, limit: float) -> str:
    text = f"{'holds' if holds else 'does not hold'}: {number(found.mean)} ({span(found)}), needed {needed}"
    if math.isfinite(found.half) and found.low < limit < found.high:
        text += "; the interval reaches to both sides of it"
    return text


def _judge_return(setting: str, pairs: list[Pair]) -> Verdict:
    claim = f"Return at equal bytes never worse, setting {setting}"
    differences = np.array([return_by_bytes(pair) for pair in pairs])
    found = interval(differences.mean(axis=1).tolist())
    if not math.isfinite(found.mean):
        return Verdict(claim, None, "not measured")
    points = [interval(column.tolist()) for column in differences.T]
    worst = min(range(len(points)), key=lambda i: points[i].mean)
    surely = sum(point.high < 0 for point in points)
    holds = found.mean >= 0 and not surely
    text = _statement(holds, found, "a mean difference of at least 0 and no point surely below it", 0.0)
    text += (
        f"; the difference at its worst is {number(points[worst].mean)} ({span(points[worst])}), at "
        f"{(worst + 1) / len(points):.0%} of the bytes; surely worse at {surely} of {len(points)} points"
    )
    return Verdict(claim, holds, text)


def number(value: float | None) -> str:
    """Returns a figure for reading: four digits, or a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and (abs(value) >= 1e10 or abs(value) < 1e-3):
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def span(found: Interval) -> str:
    """Returns an interval for reading."""
    if not math.isfinite(found.half):
        return "one seed, no interval"
    return f"95%: {number(found.low)} to {number(found.high)}"
