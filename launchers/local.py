"""A whole run on one machine: buffer node, actors, learner and evaluator, each a process of its own.

  python -m launchers.local --config=configs/cartpole.py --link=rtt_ms=50,rate_mbit=20

Shows progress, ends by itself when the evaluation reaches config.evaluation.target_return or the learner has made
config.learner.max_updates updates, and leaves figures, logs, checkpoints, a summary and a plot in the run's folder.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict

from launchers import command_line, emulated_link, link_flags, threads
from launchers.progress import Progress, RunFigures
from longhaul import workers
from longhaul.errors import ConfigError
from longhaul.metrics import write_atomically

_SOURCES = Path(__file__).resolve().parent.parent
_LEARNER_PYTHON = _SOURCES / ".venv-learner" / "bin" / "python"
# From the learner's end to the evaluation of the weights it published last.
_LAST_EVALUATION_DEADLINE_S = 120.0
_LOOK_S = 0.2
# The children have their grace first; then the summary and the plot.
_GRACE_S = workers.GRACE_S + 3.0

_LINK = flags.DEFINE_string(
    "link", None, "emulate a link between learner and gateway: rtt_ms=50,rate_mbit=20; plain loopback if not given"
)
_LEARNER_PYTHON_FLAG = flags.DEFINE_string(
    "learner_python",
    None,
    "interpreter for the learner; .venv-learner's where `make env-learner` built it, else this one",
)
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(link_flags)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> int:
    link = emulated_link.parse_link(_LINK.value)
    workdir = command_line.workdir_or_new()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        command_line.write_config(config, workdir)
    except OSError as error:
        raise ConfigError(f"--workdir={workdir} can't be used: {error.strerror}") from error
    print(f"run folder: {workdir}", flush=True)
    run = _Run(config, workdir)
    outcome = "failed"
    try:
        with workers.Supervisor(workdir / "logs", hurry=signals.hurry) as children:
            outcome = run.go(children, link, signals)
    finally:
        summary = run.summarise(outcome, link)
    if outcome != "interrupted" or not signals.hurry.is_set():
        run.plot()
    _print_end(summary, workdir)
    if outcome == "target missed":
        limit, target = config.learner.max_updates, config.evaluation.target_return
        workers.print_reason(
            f"the mean return is {summary['return_mean']} after config.learner.max_updates ({limit}), "
            f"below config.evaluation.target_return ({target:g})"
        )
        return 1
    return 0


class _Run:
    """One run: its processes while they go, its figures, and what is left of it."""

    def __init__(self, config: config_dict.ConfigDict, workdir: Path):
        self._config = config
        self._workdir = workdir
        self._started_s = time.time()
        self._figures = RunFigures(workdir, config.actor.num_actors, self._started_s)

    def go(
        self, children: workers.Supervisor, link: emulated_link.EmulatedLink | None, signals: workers.StopSignals
    ) -> str:
        """Runs to its end; returns "solved", "finished", "target missed" or "interrupted".

        Raises:
          WorkerFailed: a process of the run has failed.
        """
        # All processes load their libraries at the same time, so the address is chosen before the gateway listens.
        port = _free_port()
        gateway = f"127.0.0.1:{port}"
        with emulated_link.reach(("127.0.0.1", port), link) as across:
            self._start(children, "buffer", "buffer", f"--port={port}", outlives_others=True)
            to_site = [f"--gateway={across}", *link_flags.arguments()]
            self._start(children, "learner", "learner", *to_site, python=_learner_python(), may_finish=True)
            for index in range(self._config.actor.num_actors):
                self._start(children, f"actor_{index}", "actor", f"--gateway={gateway}", f"--actor_index={index}")
            self._start(children, "evaluator", "evaluate", f"--gateway={gateway}", "--watch")
            try:
                return self._follow(children, signals)
            finally:
                for name in children.stop():  # while the link still stands
                    print(f"{name} did not stop in time and was killed; see {self._workdir}/logs/{name}.log")

    def _start(self, children: workers.Supervisor, name: str, role: str, *arguments: str, **options: Any) -> None:
        python = options.pop("python", sys.executable)
        env = threads.environment(role)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SOURCES), os.environ.get("PYTHONPATH", "")]))
        forwarded = command_line.config_arguments(sys.argv)
        argv = [python, "-m", f"launchers.{role}", *forwarded, f"--workdir={self._workdir}", *arguments]
        children.start(name, argv, env, **options)

    def _follow(self, children: workers.Supervisor, signals: workers.StopSignals) -> str:
        target = self._config.evaluation.target_return
        deadline = None
        with Progress(f"longhaul: {self._workdir}") as progress:
            while not signals.stop.wait(_LOOK_S):
                children.check()
                self._figures.update()
                progress.show(self._figures, time.time() - self._started_s)
                reached = self._figures.evaluated_return
                if reached is not None and reached >= target:
                    return "solved"
                if children.status("learner") == 0:
                    deadline = deadline or time.monotonic() + _LAST_EVALUATION_DEADLINE_S
                    if self._newest_weights_evaluated() or time.monotonic() > deadline:
                        return "finished" if target == float("inf") else "target missed"
        return "interrupted"

    def _newest_weights_evaluated(self) -> bool:
        published = self._figures.of("learner", "weights_version")
        evaluated = self._figures.of("evaluator", "weights_version")
        return evaluated is not None and (published is None or evaluated >= published)

    def summarise(self, outcome: str, link: emulated_link.EmulatedLink | None) -> dict[str, Any]:
        """Writes summary.json and returns it."""
        figures = self._figures
        figures.update()
        summary = {
            "outcome": outcome,
            "solved": outcome == "solved",
            "seconds": round(time.time() - self._started_s, 1),
            "updates": figures.updates,
            "env_steps": figures.env_steps,
            "return_mean": figures.evaluated_return,
            "return_best": figures.best_return,
            "evaluations": figures.evaluations,
            "episodes": self._config.evaluation.episodes,
            "samples": figures.of("learner", "link_samples"),
            "link_received_bytes": figures.of("learner", "link_received_bytes"),
            "link_sent_bytes": figures.of("learner", "link_sent_bytes"),
            "link_bytes_per_sample": figures.bytes_per_sample,
            "rtt_s": figures.of("learner", "rtt_s"),
            "link": None if link is None else {"rtt_s": link.rtt_s, "rate_bytes_per_s": link.rate_bytes_per_s},
            "config": str(command_line.config_path()),
        }
        write_atomically(self._workdir / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def plot(self) -> None:
        """Draws the run's plot; says where it is, or why there is none."""
        from launchers.plots import plot_run

        target = self._config.evaluation.target_return
        plot_run(
            self._workdir,
            command_line.config_path().stem,
            self._config.actor.num_actors,
            target if target < float("inf") else None,
        )


def _free_port() -> int:
    """Returns a port that nothing listens on now; were it taken before the gateway starts, the run fails by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _learner_python() -> str:
    if _LEARNER_PYTHON_FLAG.value:
        return _LEARNER_PYTHON_FLAG.value
    return str(_LEARNER_PYTHON) if os.access(_LEARNER_PYTHON, os.X_OK) else sys.executable


def _print_end(summary: dict[str, Any], workdir: Path) -> None:
    score = "no evaluation yet" if summary["return_mean"] is None else f"mean return {summary['return_mean']:.1f}"
    print(
        f"{summary['outcome']}: {score} over {summary['episodes']} greedy episodes, {summary['seconds']:.0f} s, "
        f"{summary['updates']:,} updates, {summary['env_steps']:,} environment steps"
    )
    print(f"summary: {workdir}/summary.json")
    print(f"plot: {workdir}/plots/run.png", flush=True)


if __name__ == "__main__":
    command_line.run(main, "local", _GRACE_S)
