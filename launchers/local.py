"""A whole run on one machine: buffer node, actors, learner and evaluator, each a process of its own.

  python -m launchers.local --config=configs/cartpole.py --link=rtt_ms=50,rate_mbit=20 [--replay=learner]

With --replay=learner it runs the existing approach instead, for comparison: the buffer node forwards experience in
order of arrival, and prioritized replay stands beside the learner, in a second buffer node with a folder `cloud`.

With --deterministic it runs one actor and the learner in lock-step instead, in one process and without a link: twice
the same command on one machine gives the same metrics/losses.csv to the last bit.

Shows progress, ends by itself when the evaluation reaches config.evaluation.target_return or the learner has made
config.learner.max_updates updates, and leaves figures, logs, checkpoints, a summary and a plot in the run's folder.
"""

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict

from launchers import command_line, deterministic, emulated_link, link_flags, threads
from launchers.progress import Progress, RunFigures
from longhaul import workers
from longhaul.errors import ConfigError
from longhaul.metrics import MetricsWriter, write_atomically
from longhaul.relay import Relay

_SOURCES = Path(__file__).resolve().parent.parent
_LEARNER_PYTHON = _SOURCES / ".venv-learner" / "bin" / "python"
# From the learner's end to the evaluation of the weights it published last.
_LAST_EVALUATION_DEADLINE_S = 120.0
_LOOK_S = 0.2
_LINK_PERIOD_S = 1.0  # between lines of metrics/link.jsonl
# The children have their grace first; then the summary and the plot.
_GRACE_S = workers.GRACE_S + 3.0

_LINK = flags.DEFINE_string(
    "link",
    None,
    "emulate a link between learner and gateway: rtt_ms=50,rate_mbit=20[,up_mbit=..][,outage_at_s=..,outage_s=..]; "
    "plain loopback if not given",
)
_REPLAY = flags.DEFINE_enum(
    "replay", "buffer", ["buffer", "learner"], "where prioritized replay stands: at the site, or beside the learner"
)
_SECONDS = flags.DEFINE_float(
    "seconds", 0.0, "end so many seconds after the first update; 0 ends by target or max_updates only", lower_bound=0.0
)
_LEARNER_PYTHON_FLAG = flags.DEFINE_string(
    "learner_python",
    None,
    "interpreter for the learner; .venv-learner's where `make env-learner` built it, else this one",
)
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "one actor and the learner in lock-step, in one process: the same losses to the last bit"
)
flags.adopt_module_key_flags(command_line)
flags.adopt_module_key_flags(link_flags)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> int:
    link = emulated_link.parse_link(_LINK.value)
    if _DETERMINISTIC.value:
        if _LEARNER_PYTHON_FLAG.value:
            raise ConfigError("--deterministic: there is one process, so leave --learner_python out")
        deterministic.prepare(config, _REPLAY.value, link, _SECONDS.value, link_flags.BUDGET.value)
    workdir = command_line.workdir_or_new()
    if _DETERMINISTIC.value:
        deterministic.check_new(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        command_line.write_config(config, workdir)
    except OSError as error:
        raise ConfigError(f"--workdir={workdir} can't be used: {error.strerror}") from error
    print(f"run folder: {workdir}", flush=True)
    run = _Run(config, workdir)
    outcome = "failed"
    try:
        if _DETERMINISTIC.value:
            outcome = deterministic.run(config, workdir, signals)
        else:
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
        self._at_learner = _REPLAY.value == "learner"
        link_role = "forwarder" if self._at_learner else "learner"
        self._figures = RunFigures(workdir, config.actor.num_actors, self._started_s, link_role)
        self._trained_from_s: float | None = None  # time.time() of the first update
        self._relay_bytes = (0, 0)

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
        with emulated_link.reach(("127.0.0.1", port), link) as (across, relay):
            order = "arrival" if self._at_learner else "priority"
            self._start(children, "buffer", "buffer", f"--port={port}", f"--order={order}", outlives_others=True)
            to_site = [f"--gateway={across}", *link_flags.arguments()]
            to_replay = self._start_replay_at_learner(children, to_site) if self._at_learner else to_site
            self._start(children, "learner", "learner", *to_replay, python=_learner_python(), may_finish=True)
            for index in range(self._config.actor.num_actors):
                self._start(children, f"actor_{index}", "actor", f"--gateway={gateway}", f"--actor_index={index}")
            self._start(children, "evaluator", "evaluate", f"--gateway={gateway}", "--watch")
            plan = emulated_link.OutagePlan(link, relay, _SECONDS.value)
            try:
                return self._follow(children, signals, relay, plan)
            finally:
                for name in children.stop():  # while the link still stands
                    print(f"{name} did not stop in time and was killed; see {self._workdir}/logs/{name}.log")

    def _start_replay_at_learner(self, children: workers.Supervisor, to_site: list[str]) -> list[str]:
        """Starts the second buffer node and what fills it; returns the learner's words."""
        address = f"127.0.0.1:{_free_port()}"
        cloud = self._workdir / "cloud"
        port = f"--port={address.rpartition(':')[2]}"
        self._start(children, "cloud_buffer", "buffer", port, workdir=cloud, outlives_others=True)
        self._start(children, "forwarder", "forward", *to_site, f"--cloud_gateway={address}")
        # What the learner draws does not cross the link here: cap and score are the forwarder's, reuse saves nothing.
        return [
            f"--gateway={address}",
            "--config.link.experiences_per_s=0.0",
            "--config.metrics.score_transfers=False",
            "--config.learner.reuse=0.0",
        ]

    def _start(self, children: workers.Supervisor, name: str, role: str, *arguments: str, **options: Any) -> None:
        python = options.pop("python", sys.executable)
        workdir = options.pop("workdir", self._workdir)
        env = threads.environment(role)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SOURCES), os.environ.get("PYTHONPATH", "")]))
        forwarded = command_line.config_arguments(sys.argv)
        argv = [python, "-m", f"launchers.{role}", *forwarded, f"--workdir={workdir}", *arguments]
        children.start(name, argv, env, **options)

    def _follow(
        self,
        children: workers.Supervisor,
        signals: workers.StopSignals,
        relay: Relay | None,
        plan: emulated_link.OutagePlan,
    ) -> str:
        target = self._config.evaluation.target_return
        deadline = None
        with (
            Progress(f"longhaul: {self._workdir}") as progress,
            MetricsWriter(self._workdir if relay else None, "link", tensorboard=False) as link_metrics,
        ):
            metered_s = 0.0
            while not signals.stop.wait(_LOOK_S):
                children.check()
                self._figures.update()
                now_s = time.time()
                progress.show(self._figures, now_s - self._started_s)
                if relay is not None and now_s - metered_s >= _LINK_PERIOD_S:
                    metered_s = now_s
                    self._meter(relay, link_metrics)
                if self._trained_from_s is None and self._figures.updates:
                    self._trained_from_s = now_s
                trained_s = now_s - self._trained_from_s if self._trained_from_s else 0.0
                plan.follow(trained_s)
                if _SECONDS.value and trained_s >= _SECONDS.value:
                    if relay is not None:
                        self._meter(relay, link_metrics)
                    return "finished"
                reached = self._figures.evaluated_return
                if reached is not None and reached >= target:
                    return "solved"
                if children.status("learner") == 0:
                    deadline = deadline or time.monotonic() + _LAST_EVALUATION_DEADLINE_S
                    if self._newest_weights_evaluated() or time.monotonic() > deadline:
                        return "finished" if target == float("inf") else "target missed"
        return "interrupted"

    def _meter(self, relay: Relay, metrics: MetricsWriter) -> None:
        """Writes what has crossed the emulated link so far, as the link itself counts it."""
        self._relay_bytes = (relay.bytes_down, relay.bytes_up)
        figures: dict[str, float] = {"down_bytes": relay.bytes_down, "up_bytes": relay.bytes_up}
        metrics.write(int(time.time() - self._started_s), figures)

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
            "replay": _REPLAY.value,
            "trained_from_time_s": self._trained_from_s,
            "ended_time_s": time.time(),
            "samples": figures.of_link("link_samples"),
            "link_received_bytes": figures.of_link("link_received_bytes"),
            "link_sent_bytes": figures.of_link("link_sent_bytes"),
            "link_bytes_per_sample": figures.bytes_per_sample,
            "rtt_s": figures.of_link("rtt_s"),
            "link": None if link is None else dataclasses.asdict(link),
            "relay_down_bytes": self._relay_bytes[0],
            "relay_up_bytes": self._relay_bytes[1],
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
