"""How fast one actor process steps its environments, against the same environments stepped bare.

  python -m benchmarks.actor [--tasks=cartpole,breakout] [--seconds=5] [--rounds=3]

An actor does all of its work: policy, exploration, n-step transitions, first priorities, rows and items written to a
buffer node, which runs as a process of its own. Bare are gymnasium's own environments (for Atari with gymnasium's own
preprocessing) in its SyncVectorEnv, with random actions drawn beforehand. Rounds of both alternate, so that whatever
else the machine does meets both. The last line is one JSON object: per task environment steps/s of both (the median
of the rounds), their ratio, and what the actor's process dropped (0: the replay took all).
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launchers import threads

threads.bound_this_process("actor")  # before the libraries that read it

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
from ml_collections import config_dict  # noqa: E402

from configs import breakout, cartpole  # noqa: E402
from longhaul.actor import Actor  # noqa: E402
from longhaul.site_client import SiteClient  # noqa: E402

_WARM_S = 2.0
_READY_S = 60.0
TASKS = {"cartpole": cartpole, "breakout": breakout}
# Without a ratio: no learner comes that the actor should wait for.
_CHANGES = {"env.num_envs": 8, "actor.num_actors": 1, "metrics.period_s": 0.25, "replay.samples_per_insert": 0.0}


def make_config(task: str) -> config_dict.ConfigDict:
    """Returns the task's configuration, one actor of eight environments."""
    config = TASKS[task].get_config()
    config.update_from_flattened_dict(_CHANGES)
    return config


class _Lines:
    """Stands for a MetricsWriter: keeps the figures of the time after the warm-up, and ends the actor after it."""

    def __init__(self, seconds: float, stop: threading.Event):
        self._seconds = seconds
        self._stop = stop
        self._began_s = 0.0
        self.lines: list[tuple[float, dict[str, float]]] = []

    def write(self, step: int, figures: dict[str, Any]) -> None:
        now_s = time.monotonic()
        self._began_s = self._began_s or now_s
        if now_s - self._began_s < _WARM_S or self._stop.is_set():
            return
        self.lines.append((now_s, figures))
        if now_s - self.lines[0][0] >= self._seconds:
            self._stop.set()


@contextlib.contextmanager
def buffer_node(task: str) -> Iterator[str]:
    """Runs a buffer node in a process of its own; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launchers.buffer", f"--config={TASKS[task].__file__}", "--port=0"]
        command += [f"--workdir={folder}", *(f"--config.{name}={value}" for name, value in _CHANGES.items())]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as node:
            try:
                yield _address(Path(folder, "gateway.json"), node)
            finally:
                node.send_signal(signal.SIGTERM)


def _address(path: Path, node: "subprocess.Popen[bytes]") -> str:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s and node.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(path.read_text())["address"])
        time.sleep(0.1)
    raise SystemExit("the buffer node did not begin to serve")


def act(config: config_dict.ConfigDict, address: str, seconds: float) -> dict[str, float]:
    """Runs an actor; returns its steps/s after the warm-up, and what it dropped."""
    stop = threading.Event()
    site = SiteClient(address, "actor", stop)
    lines = _Lines(seconds, stop)
    try:
        Actor(config, 0, site, lines, stop).run()  # type: ignore[arg-type]
    finally:
        site.close()
    (first_s, first), (last_s, last) = lines.lines[0], lines.lines[-1]
    return {
        "steps_per_s": (last["env_steps"] - first["env_steps"]) / (last_s - first_s),
        "dropped": last["dropped_items"] - first["dropped_items"],
    }


def _bare_env(config: config_dict.ConfigDict) -> gymnasium.Env:
    if config.env.id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    env = gymnasium.make(config.env.id, **config.env.kwargs.to_dict())
    if config.env.atari.preprocess:
        atari = config.env.atari
        env = gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=atari.noop_max, frame_skip=atari.frame_skip, screen_size=atari.screen_size
        )
    return env


def step_bare(config: config_dict.ConfigDict, seconds: float) -> float:
    """Returns the steps/s of the bare environments."""
    count = config.env.num_envs
    envs = gymnasium.vector.SyncVectorEnv([lambda: _bare_env(config)] * count, copy=False)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, envs.single_action_space.n, (4096, count))  # type: ignore[attr-defined]
    rounds = 0
    began_s = time.monotonic()
    while time.monotonic() - began_s < seconds:
        envs.step(actions[rounds % len(actions)])
        rounds += 1
    elapsed_s = time.monotonic() - began_s
    envs.close()
    return rounds * count / elapsed_s


def measure(task: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Returns one task's figures."""
    config = make_config(task)
    acted, bare = [], []
    with buffer_node(task) as address:
        for _ in range(rounds):
            bare.append(step_bare(config, seconds))
            acted.append(act(config, address, seconds))
    actor_rate = statistics.median(run["steps_per_s"] for run in acted)
    bare_rate = statistics.median(bare)
    return {
        "actor_steps_per_s": actor_rate,
        "bare_steps_per_s": bare_rate,
        "ratio": actor_rate / bare_rate,
        "dropped": sum(run["dropped"] for run in acted),
        "rounds": [round(run["steps_per_s"] / rate, 3) for run, rate in zip(acted, bare)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cartpole,breakout")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tasks = arguments.tasks.split(",")
    for task in tasks:
        if task not in TASKS:
            parser.error(f"--tasks: there is no {task!r}; there are {', '.join(TASKS)}")
    print(json.dumps({task: measure(task, arguments.seconds, arguments.rounds) for task in tasks}), flush=True)
    os._exit(0)  # Reverb's threads do not always let an interpreter end


if __name__ == "__main__":
    main()
