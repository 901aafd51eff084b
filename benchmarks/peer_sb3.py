"""Stable-Baselines3's DQN on the same tasks, to compare `benchmarks.scores` with; in an environment of its own.

  python3.11 -m venv build/peer && build/peer/bin/pip install stable-baselines3 "gymnasium[box2d]" minatar
  build/peer/bin/python -m benchmarks.peer_sb3 --task=CartPole-v1 --seed=1 --workdir=runs/peer [--steps=50000]
  build/peer/bin/python -m benchmarks.peer_sb3 --updates_only --batch=64,512 [--threads=1]

The first command builds it (PyTorch; its CPU build suffices). This file imports nothing of the project.

The second trains. Every so many environment steps it plays the greedy policy, on episodes seeded as the project seeds
its own (evaluation_seed + e), side by side and each cut at --max_steps, and adds a line to metrics/evaluator.jsonl:
env_steps, updates, return_mean and episodes as the project has them, `train_s`, seconds since the program began in
which it did not evaluate, and `wall_s`, all of its seconds up to the evaluation's end. `time_s` is when the line was
written. A last line of standard output sums it up in one JSON object.

The third times DQN.train alone, forward, backward, Adam and the sampling from its own replay, with a 256x256 MLP on
transitions of CartPole's shape that are in the replay already. One JSON object on the last line.

Hyperparameters: RL Baselines3 Zoo's DQN for the task (hyperparams/dqn.yml at commit 22e3ff2), which keeps its networks
at 256x256; MinAtar's are those of its own DQN (Young & Tian 2019; examples/dqn.py), whose 16 filters of 3x3 and 128
units stand before the values. What is not given there is Stable-Baselines3's default. Two differences from MinAtar's:
exploration falls from the first step on, not from step 5,000, and an episode never repeats the last one's action.
"""

import time

_BEGAN_S = time.time()  # before the libraries are loaded, which a run's time includes

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

MAX_LANES = 32  # evaluation's environments side by side, as the project has it


@dataclasses.dataclass(frozen=True)
class Task:
    """How a task is trained.

    Attributes:
      steps: environment steps of a run that is not told.
      explore_steps: steps over which epsilon falls from 1 to its end: the Zoo's exploration_fraction of its
        n_timesteps, kept in steps so that a longer run explores alike.
      evaluate_every: environment steps between evaluations.
      settings: of stable_baselines3.DQN.
      minatar: whether rows are MinAtar's, and the network its convolution.
    """

    steps: int
    explore_steps: int
    evaluate_every: int
    settings: dict[str, Any]
    minatar: bool = False


_ZOO_CARTPOLE = dict(
    learning_rate=2.3e-3,
    batch_size=64,
    buffer_size=100_000,
    learning_starts=1_000,
    gamma=0.99,
    target_update_interval=10,
    train_freq=256,
    gradient_steps=128,
    exploration_final_eps=0.04,
)
# The Zoo has the same for Acrobot-v1 and LunarLander-v3.
_ZOO_LANDER = dict(
    learning_rate=6.3e-4,
    batch_size=128,
    buffer_size=50_000,
    learning_starts=0,
    gamma=0.99,
    target_update_interval=250,
    train_freq=4,
    gradient_steps=-1,
    exploration_final_eps=0.1,
)
_MINATAR = dict(
    learning_rate=2.5e-4,
    batch_size=32,
    buffer_size=100_000,
    learning_starts=5_000,
    gamma=0.99,
    target_update_interval=1_000,
    train_freq=1,
    gradient_steps=1,
    exploration_final_eps=0.1,
    max_grad_norm=math.inf,
)
TASKS = {
    "CartPole-v1": Task(50_000, 8_000, 1_000, _ZOO_CARTPOLE),
    "Acrobot-v1": Task(100_000, 12_000, 2_000, _ZOO_LANDER),
    "LunarLander-v3": Task(100_000, 12_000, 2_000, _ZOO_LANDER),
    "MinAtar/Breakout-v1": Task(5_000_000, 100_000, 10_000, _MINATAR, minatar=True),
}


# ---- environments and networks


def make_env(task: str) -> Any:
    """Returns the task's environment; MinAtar's rows come channels first, uint8 [C, 10, 10], for PyTorch.

    MinAtar repeats the last action with probability 0.1, across a reset too; it is forgotten there, since an episode
    would else depend on the one before it, whatever its seed.
    """
    import gymnasium
    import numpy as np

    if not TASKS[task].minatar:
        return gymnasium.make(task)
    from minatar import gym as games

    if task not in gymnasium.registry:
        games.register_envs()

    class Rows(gymnasium.ObservationWrapper):
        def __init__(self, env: Any):
            super().__init__(env)
            height, width, channels = env.observation_space.shape
            self.observation_space = gymnasium.spaces.Box(0, 1, (channels, height, width), np.uint8)

        def observation(self, observation: Any) -> Any:
            return np.moveaxis(observation, -1, 0).astype(np.uint8)

        def reset(self, **words: Any) -> Any:
            self.unwrapped.game.last_action = 0
            return super().reset(**words)

    return Rows(gymnasium.make(task, disable_env_checker=True))


def _policy_settings(task: Task) -> dict[str, Any]:
    if not task.minatar:
        return {"net_arch": [256, 256]}
    import torch
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Features(BaseFeaturesExtractor):
        """uint8 or float [B, C, 10, 10] -> float32 [B, 128]."""

        def __init__(self, space: Any):
            super().__init__(space, 128)
            channels, height, width = space.shape
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(channels, 16, 3),
                torch.nn.ReLU(),
                torch.nn.Flatten(),
                torch.nn.Linear(16 * (height - 2) * (width - 2), 128),
                torch.nn.ReLU(),
            )

        def forward(self, rows: Any) -> Any:
            return self.layers(rows.float())

    return {
        "net_arch": [],
        "features_extractor_class": Features,
        "normalize_images": False,
        "optimizer_class": torch.optim.RMSprop,
        "optimizer_kwargs": {"alpha": 0.95, "momentum": 0.95, "eps": 0.01, "centered": True},
    }


# ---- training


def evaluate(predict: Callable[[Any], Any], make: Callable[[], Any], episodes: int, seed: int, cap: int) -> list[float]:
    """Plays whole episodes, episode e from the seed `seed + e`, side by side.

    Args:
      predict: rows [lanes, ...] -> actions [lanes].
      make: makes an environment.
      episodes: how many.
      seed: of the first.
      cap: steps after which an episode is cut.

    Returns:
      The episodes' sums of rewards, in the order of their seeds.
    """
    import numpy as np

    envs = [make() for _ in range(min(episodes, MAX_LANES))]
    returns, lengths = [0.0] * episodes, [0] * episodes
    waiting = iter(range(episodes))
    playing: dict[int, int] = {}  # lane -> episode
    rows: list[Any] = [None] * len(envs)

    def begin(lane: int) -> None:
        playing.pop(lane, None)
        episode = next(waiting, None)
        if episode is not None:
            playing[lane] = episode
            rows[lane] = envs[lane].reset(seed=seed + episode)[0]

    for lane in range(len(envs)):
        begin(lane)
    while playing:
        lanes = list(playing)
        for lane, action in zip(lanes, predict(np.stack([rows[lane] for lane in lanes]))):
            episode = playing[lane]
            rows[lane], reward, terminated, truncated, _ = envs[lane].step(int(action))
            returns[episode] += float(reward)
            lengths[episode] += 1
            if terminated or truncated or lengths[episode] >= cap:
                begin(lane)
    for env in envs:
        env.close()
    return returns


class _Schedule:
    """Called after each environment step: evaluates when it is due, and ends the run by returning False."""

    def __init__(self, arguments: argparse.Namespace, steps: int):
        self._arguments = arguments
        self._steps = steps
        self._task = TASKS[arguments.task]
        self._evaluated = -1
        self._evaluating_s = 0.0
        self.first_update_s: float | None = None  # of train_s
        self.line: dict[str, Any] = {}
        self._path = Path(arguments.workdir, "metrics", "evaluator.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def _train_s(self) -> float:
        return time.time() - _BEGAN_S - self._evaluating_s

    def __call__(self, model: Any) -> bool:
        env_steps, updates = model.num_timesteps, model._n_updates
        if updates and self.first_update_s is None:
            self.first_update_s = self._train_s()
        spent_s = self._train_s() - (self.first_update_s if self.first_update_s is not None else math.inf)
        over = env_steps >= self._steps or (bool(self._arguments.seconds) and spent_s >= self._arguments.seconds)
        if over or env_steps // self._task.evaluate_every > self._evaluated:
            self._evaluated = env_steps // self._task.evaluate_every
            self._evaluate(model, env_steps, updates)
        return not over

    def _evaluate(self, model: Any, env_steps: int, updates: int) -> None:
        import numpy as np

        train_s, began_s = self._train_s(), time.time()
        returns = evaluate(
            lambda rows: model.predict(rows, deterministic=True)[0],
            lambda: make_env(self._arguments.task),
            self._arguments.episodes,
            self._arguments.evaluation_seed,
            self._arguments.max_steps,
        )
        evaluation_s = time.time() - began_s
        self._evaluating_s += evaluation_s
        self.line = {
            "time_s": round(time.time(), 3),
            "step": env_steps,
            "episodes": len(returns),
            "return_mean": float(np.mean(returns)),
            "return_std": float(np.std(returns)),
            "env_steps": env_steps,
            "updates": updates,
            "train_s": round(train_s, 3),
            "wall_s": round(time.time() - _BEGAN_S, 3),
            "evaluation_s": round(evaluation_s, 3),
            "first_update_s": self.first_update_s,
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(self.line) + "\n")


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed; returns the last evaluation's line."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback

    task = TASKS[arguments.task]
    steps = arguments.steps or task.steps
    schedule = _Schedule(arguments, steps)

    class Callback(BaseCallback):
        def _on_step(self) -> bool:
            return schedule(self.model)

    model = DQN(
        "MlpPolicy",
        make_env(arguments.task),
        seed=arguments.seed,
        device="cpu",
        exploration_fraction=min(1.0, task.explore_steps / steps),
        policy_kwargs=_policy_settings(task),
        **task.settings,
    )
    schedule(model)
    model.learn(steps, callback=Callback())
    return schedule.line


# ---- updates alone


def time_updates(batch: int, seconds: float) -> float:
    """Returns updates per second of DQN.train at a batch size, its replay filled before."""
    import gymnasium
    import numpy as np
    from stable_baselines3 import DQN
    from stable_baselines3.common.logger import Logger

    model = DQN(
        "MlpPolicy",
        gymnasium.make("CartPole-v1"),
        buffer_size=10_000,
        batch_size=batch,
        device="cpu",
        seed=0,
        policy_kwargs={"net_arch": [256, 256]},
    )
    model.set_logger(Logger(None, []))
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        row, following = rng.standard_normal((2, 1, 4)).astype(np.float32)
        model.replay_buffer.add(row, following, rng.integers(0, 2, (1, 1)), np.ones(1), np.zeros(1), [{}])
    model.train(50, batch)
    updates, began_s = 0, time.monotonic()
    while time.monotonic() - began_s < seconds:
        model.train(20, batch)
        updates += 20
    return updates / (time.monotonic() - began_s)


def _batches(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be batch sizes with commas between, such as 64,512")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="CartPole-v1")
    parser.add_argument("--workdir", help="the run's folder, a new one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="environment steps; 0: as the task's source has it")
    parser.add_argument("--seconds", type=float, default=0.0, help="of training from the first update on; 0: no limit")
    parser.add_argument("--episodes", type=int, default=20, help="of an evaluation")
    parser.add_argument("--evaluation_seed", type=int, default=10_000)
    parser.add_argument("--max_steps", type=int, default=27_000, help="of an episode evaluated")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: its own choice")
    parser.add_argument("--updates_only", action="store_true", help="time the update alone")
    parser.add_argument("--batch", type=_batches, default=[64, 512], help="batch sizes to time")
    parser.add_argument("--time_s", type=float, default=5.0, help="of each timing of the update")
    arguments = parser.parse_args()
    if not arguments.updates_only and not arguments.workdir:
        parser.error("--workdir is missing: a run's figures go there")
    try:
        import stable_baselines3
        import torch
    except ImportError as error:
        parser.error(f"{sys.executable} has no {error.name}; see --help for how its environment is built")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    facts = {
        "stable_baselines3": stable_baselines3.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if arguments.updates_only:
        rates = {str(batch): round(time_updates(batch, arguments.time_s), 1) for batch in arguments.batch}
        print(json.dumps({**facts, "updates_per_s": rates}), flush=True)
    else:
        print(json.dumps({**facts, "task": arguments.task, **train(arguments)}), flush=True)


if __name__ == "__main__":
    main()
