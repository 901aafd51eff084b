"""The report of a comparison: plots, tables and the verdict on each claim, in one HTML file that needs nothing else."""

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launchers.comparison import Interval, Pair, figure_ratio, interval, number, span, values, verdicts

_COLOURS = {"existing": "#d95f02", "proposed": "#1f77b4"}
_NAMES = {"existing": "existing (replay at the learner)", "proposed": "proposed (replay at the site)"}

# figure -> its title in the table
FIGURES = {
    "loss": "training loss",
    "loss_unweighted": "training loss, without importance weights",
    "probe_loss": "loss on the probe",
    "probe_priority": "priority on the probe",
    "arrival_priority": "priority at arrival, all draws",
    "arrival_priority_first": "priority at arrival, first crossings",
    "arrival_gain": "priority at arrival, all draws, over the priority on the probe",
    "fresh_gain": "the same, were the probe drawn on priorities never out of date",
    "return": "greedy return",
    "experiences_per_s": "experiences across the link, 1/s",
    "down_bytes_per_s": "bytes/s towards the learner",
    "up_bytes_per_s": "bytes/s towards the site (priorities, weights)",
    "bytes_per_experience": "bytes per experience",
    "link_use": "share of the link's rate that is used",
    "idle_share": "share of time that the learner waits for experience",
    "sample_age_s": "age of a sample's priority when trained on, s",
    "versions_behind": "published versions between the weights that acted and the learner's",
    "updates_per_s": "updates/s",
    "env_steps_per_s": "environment steps/s",
    "dropped_per_s": "experiences dropped at the site's queue, 1/s",
}
_SWEPT = ("return", "probe_loss", "loss", "loss_unweighted", "arrival_priority", "arrival_priority_first")
_PLOTS = (
    ("time_s", "return", "time (s)", "greedy return"),
    ("env_steps", "return", "environment steps since the first update", "greedy return"),
    ("down_bytes", "return", "bytes across the link", "greedy return"),
    ("time_s", "loss", "time (s)", "training loss"),
    ("time_s", "probe_loss", "time (s)", "loss on the probe"),
    ("time_s", "arrival_priority", "time (s)", "priority at arrival"),
    ("time_s", "down_bytes_per_s", "time (s)", "link, bytes/s"),
    ("time_s", "idle_share", "time (s)", "learner's idle share"),
)
_LOGARITHMIC = {"loss", "probe_loss", "arrival_priority"}

DIFFERENCES = (
    "Where prioritized replay stands: at the site (proposed), or beside the learner (existing). Both are the same "
    "Reverb table with the same exponents and capacity, filled by the same writer.",
    "What crosses the link: draws by priority, an experience as often as it is drawn, its rows once while the "
    "learner's cache holds them (proposed); every experience once, in order of arrival, with the actor's first "
    "priority in place of a sampling probability (existing). The codec, the row cache and its mirror, the "
    "messages and the flow control are the same.",
    "What happens to experience that the link can't carry: it stays in replay and may be drawn later (proposed); "
    "it waits in a queue of config.replay.spool transitions at the site, of which the oldest is dropped "
    "(existing). Newest-first dropping would age what crosses, to this side's disadvantage.",
    "What goes back to the site besides weights: the priorities of each batch, 4 bytes a draw (proposed); a bare "
    "acknowledgement (existing).",
    "How old a priority is when it is drawn on: a round trip and the time in flight (proposed); none of it, since "
    "replay is on the learner's host (existing).",
    "What is trained on through an outage: what the learner's row cache holds, at most config.learner.outage_draws "
    "transitions for each that has crossed (proposed); the replay beside the learner (existing).",
    "What is trained on besides the draws that cross, config.learner.reuse times as much: what the learner's row cache "
    "holds, by the priorities that training there gave last (proposed); the replay beside the learner (existing).",
    "How many transitions cross in one message: a learner's batch (proposed); at least 256 (existing), for those that "
    "follow each other share rows, and a queue has no freshness to lose.",
    "The first experience is trained on earlier where it need not cross first. Time, steps and bytes count from the "
    "first update.",
    "Processes on the machine: the existing approach runs two more (the forwarder and the second buffer node), "
    "whose work takes CPU that the pacing of actors and learner leaves free.",
)

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: 3px 10px; border-bottom: 1px solid #ddd; }
td { text-align: right; white-space: nowrap; } td:first-child, th { text-align: left; } img { width: 100%; }
.holds { color: #19692c; } .fails { color: #a11; } small { color: #666; } code { background: #f4f4f4; }
"""


def write(
    workdir: Path,
    title: str,
    measured: dict[tuple[str, str], list[Pair]],
    swept: dict[tuple[str, str], dict[str, list[Pair]]],
    facts: dict[str, Any],
) -> Path:
    """Writes plots/<setting>-<budget>.png and report.html; returns the latter's path.

    Args:
      workdir: the comparison's folder.
      title: the report's head.
      measured: pairs of runs, one a seed, by (setting, budget).
      swept: the same by the swept field's value; empty without a sweep.
      facts: settings as they were resolved, by what they are of; nested once.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", "<h2>Claims</h2>", _claims(measured)]
    for (setting, budget), pairs in measured.items():
        picture = workdir / "plots" / f"{setting}-{budget}.png"
        plot(picture, f"setting {setting}, equal {budget}/s", pairs)
        encoded = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f"<h2>Setting {html.escape(setting)}, equal {budget}/s (seeds: {len(pairs)})</h2>")
        parts.append(f'<img alt="plots of setting {setting}" src="data:image/png;base64,{encoded}">')
        parts.append(_table(pairs))
        parts.append(_totals(pairs))
        if by_value := swept.get((setting, budget)):
            parts.append(_sweep(by_value))
    parts.append("<h2>What differs between the sides</h2><ul>")
    parts.extend(f"<li>{html.escape(text)}</li>" for text in DIFFERENCES)
    parts.append("</ul><h2>Settings</h2>" + _facts(facts))
    page = "\n".join(parts)
    path = workdir / "report.html"
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{page}\n</body></html>\n"
    )
    return path


def _claims(measured: dict[tuple[str, str], list[Pair]]) -> str:
    rows = []
    for verdict in verdicts(measured):
        kind = {True: "holds", False: "fails", None: ""}[verdict.holds]
        text = html.escape(verdict.text)
        rows.append(f'<li>{html.escape(verdict.claim)}: <b class="{kind}">{text}</b></li>')
    return f"<ul>{''.join(rows) or '<li>none of the settings that the claims are about was run</li>'}</ul>"


def cell(found: Interval) -> str:
    """Returns a mean with its interval for a table."""
    if not math.isfinite(found.mean):
        return "-"
    half = f" <small>± {number(found.half)}</small>" if math.isfinite(found.half) else ""
    return number(found.mean) + half


def _table(pairs: Sequence[Pair]) -> str:
    head = "".join(
        f"<th>{window}, {what}</th>"
        for window in ("whole run", "last quarter")
        for what in ("existing", "proposed", "ratio")
    )
    rows = []
    for name, title in FIGURES.items():
        cells = []
        for window in ("all", "last"):
            for side in ("existing", "proposed"):
                cells.append(cell(interval(values(pairs, side, window, name))))
            cells.append(cell(figure_ratio(pairs, window, name)))
        rows.append(f"<tr><td>{html.escape(title)}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    return (
        f"<table><tr><th>figure</th>{head}</tr>{''.join(rows)}</table><small>Means over seeds ± half of Student's 95% "
        "interval; ratios are proposed over existing, seed by seed.</small>"
    )


def _totals(pairs: Sequence[Pair]) -> str:
    names = list(dict.fromkeys(name for pair in pairs for run in pair for name in run["totals"]))
    rows = []
    for name in names:
        cells = []
        for side in ("existing", "proposed"):
            cells.append(cell(interval(values(pairs, side, "totals", name))))
        rows.append(f"<tr><td>{name.replace('_', ' ')}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    return f"<table><tr><th>in all, per run</th><th>existing</th><th>proposed</th></tr>{''.join(rows)}</table>"


def _sweep(by_value: dict[str, list[Pair]]) -> str:
    head = "".join(f"<th>{html.escape(FIGURES[name])}, {side}</th>" for name in _SWEPT for side in _COLOURS)
    rows = []
    for value, pairs in by_value.items():
        cells = [cell(interval(values(pairs, side, "last", name))) for name in _SWEPT for side in _COLOURS]
        rows.append(f"<tr><td>{html.escape(value)}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    return f"<h3>Sweep, last quarter</h3><table><tr><th>value</th>{head}</tr>{''.join(rows)}</table>"


def _facts(facts: dict[str, Any]) -> str:
    rows = []
    for name, value in facts.items():
        inner = value if isinstance(value, dict) else {"": value}
        for key, leaf in inner.items():
            label = f"{name} {key}".strip()
            rows.append(f"<tr><td>{html.escape(label)}</td><td><code>{html.escape(str(leaf))}</code></td></tr>")
    return f"<table>{''.join(rows)}</table>"


def plot(path: Path, title: str, pairs: Sequence[Pair]) -> None:
    """Draws every curve's mean over seeds, and the span of the seeds around it, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, grid = plt.subplots(2, 4, figsize=(18, 8), layout="constrained")
    figure.suptitle(title)
    for axes, (x, y, x_title, y_title) in zip(grid.flat, _PLOTS):
        for side in _COLOURS:
            _curve(axes, [getattr(pair, side)["curves"] for pair in pairs], x, y, side)
        axes.set(xlabel=x_title, ylabel=y_title)
        if y in _LOGARITHMIC and any(line.get_ydata().size for line in axes.lines):
            axes.set_yscale("log", nonpositive="mask")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    grid.flat[0].legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _curve(axes: Any, runs: list[dict[str, list[float | None]]], x: str, y: str, side: str) -> None:
    known = []
    for curves in runs:
        points = [(a, b) for a, b in zip(curves[x], curves[y]) if a is not None and b is not None]
        if points:
            known.append(np.array(points).T)
    if not known:
        return
    grid = np.linspace(max(points[0][0] for points in known), min(points[0][-1] for points in known), 100)
    lines = np.array([np.interp(grid, *points) for points in known])
    axes.plot(grid, lines.mean(axis=0), color=_COLOURS[side], label=_NAMES[side], linewidth=1.5)
    axes.fill_between(grid, lines.min(axis=0), lines.max(axis=0), color=_COLOURS[side], alpha=0.2, linewidth=0)


def statistics(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Returns every figure's mean, and half of its 95% interval, of both sides and of their ratio, as plain JSON."""

    def plain(found: Interval) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in found._asdict().items()}

    return {
        "seeds": len(pairs),
        **{
            window: {
                name: {side: plain(interval(values(pairs, side, window, name))) for side in _COLOURS}
                | {"ratio": plain(figure_ratio(pairs, window, name))}
                for name in FIGURES
            }
            for window in ("all", "last")
        },
    }


def lines(measured: dict[tuple[str, str], list[Pair]]) -> list[str]:
    """Returns the report in short, for the terminal."""
    found = []
    for (setting, budget), pairs in measured.items():
        found.append(f"setting {setting}, equal {budget}/s, last quarter, existing | proposed | ratio:")
        for name, title in FIGURES.items():
            existing, proposed = (interval(values(pairs, side, "last", name)) for side in ("existing", "proposed"))
            times = figure_ratio(pairs, "last", name)
            found.append(
                f"  {title}: {number(existing.mean)} | {number(proposed.mean)} | {number(times.mean)} ({span(times)})"
            )
    found.extend(f"{verdict.claim}: {verdict.text}" for verdict in verdicts(measured))
    return found
