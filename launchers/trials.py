"""The runs of a comparison: one side of one seed each, a `launchers.local` of its own, measured and kept.

A run that has ended has its figures in its summary.json, and is not made again; one that was interrupted is begun anew.
"""

import dataclasses
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launchers import comparison, threads
from launchers.progress import RunFigures
from longhaul import workers
from longhaul.errors import ConfigError, WorkerFailed
from longhaul.metrics import write_atomically

_SOURCES = Path(__file__).resolve().parent.parent
_LOOK_S = 0.5
_SAY_PERIOD_S = 10.0
# `local` ends its own processes within 18 s.
GRACE_S = 25.0
_REPLAY_OF = {"existing": "learner", "proposed": "buffer"}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
      folder: its own.
      side: "existing" or "proposed".
      seed: config.seed.
      seconds: from the first update on.
      link: as local's --link has it.
      link_rate_bytes_per_s: towards the learner; 0: unlimited.
      num_actors: of the configuration.
      words: the rest of local's command line, the configuration first.
    """

    folder: Path
    side: str
    seed: int
    seconds: float
    link: str
    link_rate_bytes_per_s: float
    num_actors: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.folder.parent.parent.name}, {self.side}, seed {self.seed}"

    def argv(self) -> list[str]:
        """Returns the command."""
        return [
            *(sys.executable, "-m", "launchers.local"),
            *self.words,
            f"--config.seed={self.seed}",
            f"--replay={_REPLAY_OF[self.side]}",
            f"--link={self.link}",
            f"--seconds={self.seconds}",
            f"--workdir={self.folder}",
        ]

    def plan(self) -> dict[str, Any]:
        """Returns what makes this run what it is; kept beside its figures."""
        return {"side": self.side, "seed": self.seed, "seconds": self.seconds, "link": self.link, "words": self.words}


def environment() -> dict[str, str]:
    """Returns the variables of a child that runs these sources, wherever it is started."""
    path = os.pathsep.join(filter(None, [str(_SOURCES), os.environ.get("PYTHONPATH", "")]))
    return threads.environment("local") | {"PYTHONPATH": path}


def finished(trial: Trial) -> dict[str, Any] | None:
    """Returns the figures of a run that has ended, None if it must be made.

    Raises:
      ConfigError: the folder holds a run of other settings.
    """
    try:
        summary = json.loads((trial.folder / "summary.json").read_text())
        figures, plan = summary["figures"], summary["plan"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if plan != json.loads(json.dumps(trial.plan())):
        names = [name for name, value in json.loads(json.dumps(trial.plan())).items() if plan.get(name) != value]
        raise ConfigError(
            f"{trial.folder} holds a run with other settings ({', '.join(names)}): give another --workdir, or the "
            "settings that it was begun with"
        )
    return figures


def make(trials: Sequence[Trial], signals: workers.StopSignals) -> bool:
    """Makes runs at the same time and keeps their figures; those that have ended before are left as they are.

    Returns:
      False if it was interrupted.

    Raises:
      ConfigError: a folder holds a run of other settings.
      WorkerFailed: a run has failed; names it, its reason and its log.
    """
    missing = [trial for trial in trials if finished(trial) is None]
    if not missing:
        return True
    for trial in missing:
        if trial.folder.exists():
            shutil.rmtree(trial.folder)
        trial.folder.mkdir(parents=True)
    logs = missing[0].folder.parent.parent / "logs"
    with workers.Supervisor(logs, grace_s=GRACE_S, hurry=signals.hurry) as children:
        env = environment()
        for trial in missing:
            children.start(_child(trial), trial.argv(), env, may_finish=True)
        if not _follow(missing, children, signals.stop):
            return False
    for trial in missing:
        _keep(trial)
    return True


def _child(trial: Trial) -> str:
    return f"{trial.side}-seed{trial.seed}"


def _follow(trials: Sequence[Trial], children: workers.Supervisor, stop: threading.Event) -> bool:
    """Shows progress until all have ended; False if interrupted."""
    began_s = said_s = time.time()
    link_roles = {"existing": "forwarder", "proposed": "learner"}
    figures = {t.name: RunFigures(t.folder, t.num_actors, began_s, link_roles[t.side]) for t in trials}
    while not stop.wait(_LOOK_S):
        children.check()
        if all(children.status(_child(trial)) == 0 for trial in trials):
            return True
        if time.time() - said_s >= _SAY_PERIOD_S:
            said_s = time.time()
            for trial in trials:
                figures[trial.name].update()
                print(_line(trial, figures[trial.name], said_s - began_s), flush=True)
    return False


def _line(trial: Trial, figures: RunFigures, elapsed_s: float) -> str:
    loss = figures.of("learner", "loss")
    arrival = figures.of_link("arrival_priority")
    return (
        f"{trial.name}: {elapsed_s:.0f} s, {figures.updates:,} updates, {figures.env_steps:,} environment steps, "
        f"return {comparison.number(figures.evaluated_return)}, loss {comparison.number(loss)}, "
        f"priority at arrival {comparison.number(arrival)}"
    )


def _keep(trial: Trial) -> None:
    """Measures an ended run and adds its figures to its summary."""
    path = trial.folder / "summary.json"
    try:
        summary = json.loads(path.read_text())
        from_s = float(summary["trained_from_time_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkerFailed(f"{trial.name} ended without a first update; see {trial.folder}/logs") from error
    summary["figures"] = comparison.measure(
        trial.folder, _REPLAY_OF[trial.side], trial.num_actors, from_s, trial.seconds, trial.link_rate_bytes_per_s
    )
    summary["plan"] = trial.plan()
    write_atomically(path, json.dumps(summary, indent=1) + "\n")
    shutil.rmtree(trial.folder / "probe", ignore_errors=True)
