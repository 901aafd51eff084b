"""Greedy evaluation: whole episodes under the policy that takes the best-valued action, on raw rewards.

Episode e is reset with seed config.evaluation.seed + e, so that evaluations of one run compare like with like. Lanes
run side by side for the policy's sake, each taking the next episode when its own ends. An episode that reaches
config.evaluation.max_steps is cut and reported as capped: greedy play need never end.
"""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from ml_collections import config_dict

from longhaul import env as env_lib
from longhaul import probe, scoring
from longhaul.errors import Stopped, WorkerFailed
from longhaul.policy import Policy
from longhaul.types import ExperienceSpec

MAX_LANES = 32  # environments side by side
PROBE_TRANSITIONS = 1024


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results by episode, in the order of their seeds.

    Attributes:
      returns: float64 [episodes], sums of raw rewards over whole episodes (whole games for Atari).
      lengths: int64 [episodes], agent steps.
      capped: bool [episodes], cut at config.evaluation.max_steps.
    """

    returns: np.ndarray
    lengths: np.ndarray
    capped: np.ndarray

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return float(self.returns.mean())

    def figures(self) -> dict[str, float]:
        """Returns what metrics say of it."""
        return {
            "episodes": len(self.returns),
            "return_mean": self.mean_return,
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "capped": int(np.sum(self.capped)),
        }


def evaluate(config: config_dict.ConfigDict, spec: ExperienceSpec, payload: bytes, stop: threading.Event) -> Evaluation:
    """Plays config.evaluation.episodes episodes greedily with packed weights.

    Args:
      config: whole configuration.
      spec: of the experience the weights were trained on.
      payload: a snapshot's, as `codec.pack_weights` made it.
      stop: looked at before each step.

    Raises:
      Corruption: the payload is damaged, not finite or another network's.
      WorkerFailed: the environment raised an error.
      Stopped: the stop event was set.
    """
    episodes = config.evaluation.episodes
    lanes = min(episodes, MAX_LANES)
    policy = Policy(spec, config, lanes)
    policy.adopt(payload)
    envs: list[gymnasium.Env] = []
    try:
        envs.extend(env_lib.make_env(config, evaluation=True) for _ in range(lanes))
        return _play(config, spec, policy, envs, stop)
    finally:
        for environment in envs:
            environment.close()


def _play(
    config: config_dict.ConfigDict,
    spec: ExperienceSpec,
    policy: Policy,
    envs: list[gymnasium.Env],
    stop: threading.Event,
) -> Evaluation:
    episodes, max_steps = config.evaluation.episodes, config.evaluation.max_steps
    returns = np.zeros(episodes)
    lengths = np.zeros(episodes, np.int64)
    capped = np.zeros(episodes, bool)
    stacks = np.zeros((len(envs), spec.stack, *spec.row_shape), spec.row_dtype)
    playing: dict[int, int] = {}  # lane -> episode
    waiting = iter(range(episodes))

    def begin(lane: int) -> None:
        """Puts the next episode, if any, into a lane."""
        playing.pop(lane, None)
        for episode in waiting:
            playing[lane] = episode
            stacks[lane] = _call(envs[lane].reset, episode, seed=config.evaluation.seed + episode)[0]
            return

    for lane in range(len(envs)):
        begin(lane)
    while playing:
        if stop.is_set():
            raise Stopped(f"evaluation was stopped with {len(playing)} episodes running")
        actions = policy.q_values(stacks).argmax(axis=1).tolist()
        for lane, episode in list(playing.items()):
            row, reward, terminated, truncated, _ = _call(envs[lane].step, episode, actions[lane])
            returns[episode] += reward
            lengths[episode] += 1
            capped[episode] = lengths[episode] >= max_steps and not (terminated or truncated)
            if terminated or truncated or capped[episode]:
                begin(lane)
            else:
                stacks[lane, :-1] = stacks[lane, 1:]
                stacks[lane, -1] = row
    return Evaluation(returns, lengths, capped)


def _call(function: Any, episode: int, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise WorkerFailed(f"evaluation: the environment failed in episode {episode}: {error!r}") from error


class ProbeScores:
    """Loss and priorities of the newest held-out transitions of the whole site, which nothing has been trained on.

    See probe.py for what they are.

    Args:
      config: whole configuration.
      spec: of the experience.
      workdir: the run's folder.
    """

    def __init__(self, config: config_dict.ConfigDict, spec: ExperienceSpec, workdir: Path):
        self._workdir = workdir
        self._policy = Policy(spec, config, 1)
        self._scorer = scoring.Scorer(spec, config)
        self._exponent = float(config.replay.priority_exponent)

    def measure(self, payload: bytes) -> dict[str, float]:
        """Returns the figures below; none while too few are held out.

        probe_loss: the mean loss, without importance weights.
        probe_priority: the mean priority, p.
        probe_priority_drawn: the mean priority of draws by it, sum p^(1 + alpha) / sum p^alpha. Over probe_priority it
          is what prioritized replay of this stream can gain in priority if no priority ever were out of date.

        Args:
          payload: a snapshot's, as `codec.pack_weights` made it.

        Raises:
          Corruption: the payload is damaged, not finite or another network's.
          OSError: a held-out file can't be read.
        """
        held_out = probe.newest(self._workdir, PROBE_TRANSITIONS)
        if held_out is None:
            return {}
        self._policy.adopt(payload)
        priorities, losses = (x.astype(np.float64) for x in self._scorer.score(self._policy.params, *held_out))
        chances = priorities**self._exponent
        return {
            "probe_loss": float(losses.mean()),
            "probe_priority": float(priorities.mean()),
            "probe_priority_drawn": float((chances * priorities).sum() / chances.sum()),
        }
