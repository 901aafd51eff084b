"""A run's progress as its processes write it: read from metrics/*.jsonl, shown on a terminal or as plain lines."""

import math
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from longhaul.metrics import MetricsTail

# Where the output is a file or a pipe: one line each so many seconds.
PLAIN_PERIOD_S = 5.0


class RunFigures:
    """The newest figures of every role of a run.

    Args:
      workdir: the run's folder.
      num_actors: actor processes of the run.
      since_s: time.time() at the run's start; a folder used again holds older lines, which are passed over.
      link_role: the role at the learner's end of the link.
    """

    def __init__(self, workdir: Path, num_actors: int, since_s: float, link_role: str = "learner"):
        self._since_s = since_s
        self._link_role = link_role
        roles = ["learner", "forwarder", "gateway", "evaluator", *(f"actor_{i}" for i in range(num_actors))]
        self._tails = {role: MetricsTail(workdir, role) for role in roles}
        self.newest: dict[str, dict[str, Any]] = {role: {} for role in roles}
        self.best_return: float | None = None
        self.evaluations = 0

    def update(self) -> None:
        """Reads what was written since the last call."""
        for role, tail in self._tails.items():
            for line in tail.read_new():
                if line.get("time_s", 0.0) < self._since_s:
                    continue
                # A role may write some figures more seldom than others: the newest value of each is kept.
                self.newest[role].update(line)
                if role == "evaluator" and line.get("return_mean") is not None:
                    self.evaluations += 1
                    known = -math.inf if self.best_return is None else self.best_return
                    self.best_return = max(line["return_mean"], known)

    def of(self, role: str, name: str) -> float | None:
        """Returns one role's newest figure, or None if there is none yet."""
        return self.newest[role].get(name)

    def of_link(self, name: str) -> float | None:
        """Returns the newest figure of the link's end at the learner."""
        return self.of(self._link_role, name)

    def over_actors(self, name: str) -> list[float]:
        """Returns the newest value of a figure of every actor that has it."""
        found = [figures.get(name) for role, figures in self.newest.items() if role.startswith("actor_")]
        return [value for value in found if value is not None]

    @property
    def updates(self) -> int:
        return int(self.of("learner", "updates") or 0)

    @property
    def env_steps(self) -> int:
        return int(sum(self.over_actors("env_steps")))

    @property
    def bytes_per_sample(self) -> float | None:
        """Bytes received across the link over samples, since the run's start; None before the first sample."""
        samples, received = self.of_link("link_samples"), self.of_link("link_received_bytes")
        return received / samples if samples and received is not None else None

    @property
    def evaluated_return(self) -> float | None:
        """Mean return of the newest greedy evaluation."""
        return self.of("evaluator", "return_mean")

    @property
    def explored_return(self) -> float | None:
        """Mean of the actors' recent returns, exploration included."""
        values = self.over_actors("episode_return")
        return sum(values) / len(values) if values else None


def shown_figures(figures: RunFigures, elapsed_s: float) -> dict[str, str]:
    """Returns what progress shows, as texts by title, in order."""
    rtt_s = figures.of_link("rtt_s")
    return {
        "time": f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}",
        "updates": f"{figures.updates:,}",
        "env steps": f"{figures.env_steps:,}",
        "return (greedy)": _number(figures.evaluated_return),
        "return (actors)": _number(figures.explored_return),
        "loss": _number(figures.of("learner", "loss")),
        "samples/s": _number(figures.of("learner", "samples_per_s")),
        "link": _bytes_per_s(figures.of_link("link_received_bytes_per_s")),
        "window": _number(figures.of_link("window")),
        "RTT": "-" if not rtt_s else f"{1000 * rtt_s:.0f} ms",
    }


class Progress:
    """Shows figures while a run goes on; a context manager.

    On a terminal, one table that renews itself; elsewhere a plain line every PLAIN_PERIOD_S.
    """

    def __init__(self, title: str):
        self._console = Console(file=sys.stdout)
        self._title = title
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._printed_s = -PLAIN_PERIOD_S

    def show(self, figures: RunFigures, elapsed_s: float) -> None:
        """Renews the table, or prints a line if one is due."""
        shown = shown_figures(figures, elapsed_s)
        if not figures.env_steps:
            shown = {"time": shown["time"], "starting": "processes load their libraries"}
        if self._live is not None:
            self._live.update(self._table(shown))
        elif time.monotonic() - self._printed_s >= PLAIN_PERIOD_S:
            self._printed_s = time.monotonic()
            print("  ".join(f"{title} {text}" for title, text in shown.items()), flush=True)

    def _table(self, shown: dict[str, str]) -> Table:
        table = Table(title=self._title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        items = list(shown.items())
        half = (len(items) + 1) // 2
        for left, right in zip(items[:half], [*items[half:], ("", "")][:half]):
            table.add_row(f"[dim]{left[0]}[/]", left[1], f"[dim]{right[0]}[/]", right[1])
        return table

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _bytes_per_s(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}/s"
        value /= 1000
    return f"{value:.3g} GB/s"
