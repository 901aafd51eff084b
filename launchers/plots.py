"""Plots of a finished run, from its metrics/*.jsonl: return over time and environment steps, loss over updates."""

from pathlib import Path
from typing import Any

from longhaul.metrics import read_jsonl

_RETURN_COLOUR = "#1f77b4"
_ACTORS_COLOUR = "#9ecae1"
_LOSS_COLOUR = "#d95f02"


def plot_run(workdir: Path, title: str, num_actors: int, target_return: float | None) -> Path:
    """Draws return against time and loss against updates into `plots/run.png`.

    Args:
      workdir: the run's folder.
      title: the figure's head.
      num_actors: actor processes of the run.
      target_return: drawn as a line; None draws none.

    Returns:
      The picture's path.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    evaluator, learner = read_jsonl(workdir, "evaluator"), read_jsonl(workdir, "learner")
    actors = [line for i in range(num_actors) for line in read_jsonl(workdir, f"actor_{i}")]
    start_s = min((line["time_s"] for line in [*evaluator, *learner, *actors]), default=0.0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    figure.suptitle(title)

    _scatter(left, _pairs(actors, "time_s", "episode_return", start_s))
    x, y = _pairs(evaluator, "time_s", "return_mean", start_s)
    left.plot(x, y, "o-", color=_RETURN_COLOUR, markersize=3, label="greedy evaluation (mean)")
    low, high = (_pairs(evaluator, "time_s", name, start_s)[1] for name in ("return_min", "return_max"))
    if len(low) == len(high) == len(x):
        left.fill_between(x, low, high, color=_RETURN_COLOUR, alpha=0.15, linewidth=0, label="worst to best episode")
    if target_return is not None:
        left.axhline(target_return, color="grey", linewidth=1, linestyle="--", label="target")
    left.set(xlabel="time (s)", ylabel="return per episode")
    left.legend(loc="best", fontsize="small", frameon=False)

    right.plot(*_pairs(learner, "updates", "loss", 0.0), color=_LOSS_COLOUR, linewidth=1)
    right.set(xlabel="updates", ylabel="loss of the minibatches")
    if any(line.get("loss") for line in learner):
        right.set_yscale("log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)

    path = workdir / "plots" / "run.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _scatter(axes: Any, pairs: tuple[list[float], list[float]]) -> None:
    axes.plot(*pairs, ".", color=_ACTORS_COLOUR, markersize=3, label="actors (exploring)")


def _pairs(lines: list[dict[str, Any]], x: str, y: str, x_start: float) -> tuple[list[float], list[float]]:
    found = [(line[x] - x_start, line[y]) for line in lines if line.get(x) is not None and line.get(y) is not None]
    return [a for a, _ in found], [b for _, b in found]
