"""Several environments stepped together, each an endless stream of episodes with one event interface.

Built on gymnasium's SyncVectorEnv and AsyncVectorEnv. Their three autoreset modes differ in when the next episode's
first observation comes, and in whether a step exists whose action is ignored:

* next_step: the call after an end resets; its action is ignored and its reward means nothing;
* same_step: the call that ends an episode also resets; the last observation is in infos["final_obs"];
* disabled: nothing is reset before reset(options={"reset_mask": ...}), which is called here at once.

`Streams.step` says per stream what was experience (`valid`), and where an episode began (`started`), so that a
caller that follows these two never sees a reset as experience, and stores the same transitions in all modes.

Failures. An exception in an environment breaks its episode off (`failed`), and a fresh environment with a new seed
begins another; the other streams go on. A process that dies or hangs (async only) does so for all streams, since
gymnasium's pipes can't be mended singly. Failures with fewer than GOOD_STEPS steps between them are consecutive: each
waits twice as long as the one before, and more than config.actor.max_env_failures of them end the actor.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from absl import logging
from gymnasium import vector
from ml_collections import config_dict

from longhaul import env as env_lib
from longhaul.errors import Stopped, WorkerFailed

GOOD_STEPS = 10  # that make a stream's failures before them history
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
STEP_TIMEOUT_S = 120.0  # of an environment in a process of its own; one in ours can't be timed
CLOSE_TIMEOUT_S = 5.0
_FAILURES, _ERROR = "failures", "error"
# What gymnasium's pipes raise when a process is gone or silent; an environment's own errors stay in GuardedEnv.
_PROCESS_ERRORS = (OSError, EOFError, multiprocessing.TimeoutError)
_SEED_RANGE = 2**31  # so that environments may hand a seed on to a C int


class Events(NamedTuple):
    """What one step brought to each of S streams. Arrays are only good until the next call.

    Attributes:
      valid: bool [S], the action was taken in a running episode: the four below are experience.
      rewards: float64 [S].
      terminated: bool [S].
      truncated: bool [S].
      next_rows: [S, *row_shape], after the action; at an end the episode's true last.
      failed: bool [S], the running episode broke off: its last steps lead nowhere.
      started: bool [S], an episode begins, after whatever the others say.
      first_rows: [S, *row_shape], its first row.
      episodes: (raw return, length in steps) of each episode that ended whole.
    """

    valid: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_rows: np.ndarray
    failed: np.ndarray
    started: np.ndarray
    first_rows: np.ndarray
    episodes: list[tuple[float, int]]


def stream_seed(seed: int, index: int) -> int:
    """Returns the environment seed of the site's stream `index`; distinct for all streams of a run.

    Args:
      seed: config.seed.
      index: actor_index * num_envs + stream.
    """
    base = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])
    return (base + index) % _SEED_RANGE


def _later_seed(seed: int, count: int) -> int:
    """Returns the seed after `count` failures, so that none replays what led to it."""
    return int(np.random.SeedSequence([seed, count]).generate_state(1)[0]) % _SEED_RANGE


def backoff_s(failures: int) -> float:
    """Returns the wait after that many consecutive failures."""
    return min(FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 20), MAX_BACKOFF_S)


class GuardedEnv(gymnasium.Env):
    """An environment whose exceptions become truncations that say so in their info, and that is then made anew."""

    def __init__(self, config: config_dict.ConfigDict, parent_pid: int):
        if os.getpid() != parent_pid:
            # Ctrl-C reaches the whole group; the actor closes its environments itself.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._config = config
        self._env: gymnasium.Env | None = env_lib.make_env(config)
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space
        self._blank = np.zeros(self.observation_space.shape or (), self.observation_space.dtype)
        self._seed = 0
        self._failures = 0  # consecutive
        self._total_failures = 0
        self._good_steps = 0
        self._info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._seed = seed
        try:
            if self._env is None:
                self._env = env_lib.make_env(self._config)
                seed = _later_seed(self._seed, self._total_failures)
            return self._env.reset(seed=seed)[0], {}
        except Exception as error:
            self._fail(error)
            return self._blank, self._info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._env is None:  # a reset that failed; this truncation asks for another
            return self._blank, 0.0, False, True, {_FAILURES: 0, _ERROR: ""}
        try:
            result = self._env.step(action)
        except Exception as error:
            self._fail(error)
            return self._blank, 0.0, False, True, self._info
        self._good_steps += 1
        if self._good_steps == GOOD_STEPS:
            self._failures = 0
        return result  # type: ignore[return-value]

    def close(self) -> None:
        environment, self._env = self._env, None
        if environment is not None:
            with contextlib.suppress(Exception):
                environment.close()

    def _fail(self, error: Exception) -> None:
        self.close()
        self._failures += 1
        self._total_failures += 1
        self._good_steps = 0
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._info = {_FAILURES: self._failures, _ERROR: text}


def _close(vectorised: vector.VectorEnv) -> None:
    """Closes within about twice CLOSE_TIMEOUT_S, by force if need be: gymnasium's own waits have no deadline."""
    closer = threading.Thread(target=_close_quietly, args=(vectorised,), name="close-envs", daemon=True)
    closer.start()
    closer.join(CLOSE_TIMEOUT_S)
    _kill(vectorised)


def _close_quietly(vectorised: vector.VectorEnv) -> None:
    with contextlib.suppress(Exception):
        vectorised.close()


def _kill(vectorised: vector.VectorEnv) -> None:
    vectorised.closed = True  # nothing is left for its destructor
    for process in getattr(vectorised, "processes", ()):
        if process.is_alive():
            process.kill()
            process.join(CLOSE_TIMEOUT_S)


class Streams:
    """The environment streams of one actor.

    Usage:
      streams = Streams(config, actor_index, stop)
      events = streams.start()
      while ...: events = streams.step(actions)
      streams.close()

    Args:
      config: whole configuration.
      actor_index: from 0; with the stream's number it decides the seeds.
      stop: ends the waits after failures.
      first: stream of the actor's that these begin with.
      count: S; None: the actor's, config.env.num_envs.

    Attributes:
      num_streams: S.
      total_failures: environment failures so far.

    Raises:
      ConfigError: the environment can't be made or its spaces can't be used.
      WorkerFailed: environments keep failing.
      Stopped: while waiting.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        actor_index: int,
        stop: threading.Event,
        first: int = 0,
        count: int | None = None,
    ):
        self._config = config
        self._stop = stop
        self._mode = config.env.autoreset_mode
        self.num_streams = config.env.num_envs if count is None else count
        first += actor_index * config.env.num_envs
        self._seeds = [stream_seed(config.seed, first + i) for i in range(self.num_streams)]
        self.total_failures = 0
        self._process_failures = 0  # consecutive
        self._good_steps = 0
        self._none = np.zeros(self.num_streams, bool)
        self._none.flags.writeable = False  # handed out in events
        self._zeros = np.zeros(self.num_streams)
        self._running = self._none
        self._to_reset = self._none  # by the next call, in mode next_step
        self._vector: vector.VectorEnv | None = None

    def start(self) -> Events:
        """Makes the environments and begins an episode in each stream; where that fails, `started` is False."""
        rows, started = self._open()
        return self._beginning(rows, self._none, started)

    def step(self, actions: np.ndarray) -> Events:
        """Takes one action in each stream.

        Args:
          actions: int [S], indices from 0; ignored where no episode runs.
        """
        try:
            rows, rewards, terminated, truncated, infos = self._step_vector(actions)
            self._good_steps += 1
            if self._good_steps == GOOD_STEPS:
                self._process_failures = 0
            ended = terminated | truncated
            if infos or ended.any() or self._to_reset.any() or not self._running.all():
                return self._after_ends(rows, rewards, terminated, truncated, ended, infos)
            none = self._none
            return Events(self._running, rewards, terminated, truncated, rows, none, none, rows, [])
        except _PROCESS_ERRORS as error:
            failed = self._running
            self._process_failed(error)
            rows, started = self._open()
            return self._beginning(rows, failed, started)

    def close(self) -> None:
        """Closes the environments, those in processes by force after CLOSE_TIMEOUT_S."""
        vectorised, self._vector = self._vector, None
        if vectorised is not None:
            _close(vectorised)

    def _after_ends(
        self,
        rows: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        ended: np.ndarray,
        infos: dict[str, Any],
    ) -> Events:
        """Sorts out a step in which an episode ended or began, by the mode."""
        running, to_reset = self._running, self._to_reset
        next_rows = rows
        step_infos, reset_infos = infos, infos
        if self._mode == "same_step":
            step_infos = infos.get("final_info", {})
            if ended.any():
                next_rows = rows.copy()
                for stream in np.flatnonzero(ended):
                    next_rows[stream] = infos["final_obs"][stream]
            began = ended
        elif self._mode == "disabled":
            began = ended
            if ended.any():
                next_rows = rows.copy()
                rows, reset_infos = self._reset_where(ended)
        else:
            began = to_reset
            self._to_reset = ended
        broken = self._check_failures(step_infos)
        if self._mode == "next_step":
            started = began & ~broken  # one info for both: this call was either a reset or a step
        else:
            started = began & ~self._check_failures(reset_infos)
        self._running = (running & ~ended) | started
        return Events(
            valid=running & ~broken,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            next_rows=next_rows,
            failed=running & broken,
            started=started,
            first_rows=rows,
            episodes=_episodes(step_infos),
        )

    def _beginning(self, rows: np.ndarray, failed: np.ndarray, started: np.ndarray) -> Events:
        none = self._none
        self._running = started
        # A stream whose reset failed is truncated by its next step, in every mode.
        self._to_reset = none
        return Events(none, self._zeros, none, none, rows, failed, started, rows, [])

    def _open(self) -> tuple[np.ndarray, np.ndarray]:
        """Makes and resets the vector environment until it works; returns the rows and where they begin an episode."""
        while True:
            vectorised = None
            try:
                vectorised = self._vector = self._make_vector()
                seeds = [_later_seed(s, self.total_failures) if self.total_failures else s for s in self._seeds]
                rows, infos = vectorised.reset(seed=seeds)  # type: ignore[arg-type]  # its stub knows no lists
                return rows, ~self._check_failures(infos)
            except _PROCESS_ERRORS as error:
                self._process_failed(error)

    def _make_vector(self) -> vector.VectorEnv:
        make = functools.partial(GuardedEnv, self._config, os.getpid())
        makers = [make] * self.num_streams
        mode = vector.AutoresetMode[self._mode.upper()]
        if self._config.env.vectorization == "sync":
            return vector.SyncVectorEnv(makers, copy=False, autoreset_mode=mode)
        # Not forked: JAX and Reverb have threads, which a fork would leave locked.
        return vector.AsyncVectorEnv(makers, copy=False, context="spawn", autoreset_mode=mode)

    def _step_vector(self, actions: np.ndarray) -> tuple[Any, ...]:
        assert self._vector is not None, "start() first"
        if isinstance(self._vector, vector.AsyncVectorEnv):
            self._vector.step_async(actions)
            return self._vector.step_wait(STEP_TIMEOUT_S)
        return self._vector.step(actions)

    def _reset_where(self, mask: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        assert self._vector is not None
        options = {"reset_mask": mask.copy()}
        if isinstance(self._vector, vector.AsyncVectorEnv):
            self._vector.reset_async(options=options)
            return self._vector.reset_wait(STEP_TIMEOUT_S)
        return self._vector.reset(options=options)

    def _check_failures(self, infos: dict[str, Any]) -> np.ndarray:
        """Returns where an environment failed, after waiting as the worst of them asks."""
        failed = infos.get("_" + _FAILURES)
        if failed is None:
            return self._none
        counts = infos[_FAILURES]
        for stream in np.flatnonzero(counts):
            self.total_failures += 1
            self._pace(int(counts[stream]), f"stream {stream}: {infos[_ERROR][stream]}")
        return failed

    def _process_failed(self, error: BaseException) -> None:
        vectorised, self._vector = self._vector, None
        if vectorised is not None:
            _kill(vectorised)
        self.total_failures += 1
        self._process_failures += 1
        self._good_steps = 0
        what = "did not answer in time" if isinstance(error, multiprocessing.TimeoutError) else "ended"
        self._pace(self._process_failures, f"an environment's process {what} ({type(error).__name__})")

    def _pace(self, failures: int, what: str) -> None:
        """Waits after a failure.

        Raises:
          WorkerFailed: there are too many.
          Stopped: the stop event was set meanwhile.
        """
        limit = self._config.actor.max_env_failures
        if failures > limit:
            raise WorkerFailed(
                f"environment {self._config.env.id} failed {failures} times in a row "
                f"(config.actor.max_env_failures is {limit}); the last: {what}"
            )
        wait_s = backoff_s(failures)
        logging.warning("environment %s failed (%d in a row), a fresh one in %.1f s: %s",
                        self._config.env.id, failures, wait_s, what)  # fmt: skip
        if self._stop.wait(wait_s):
            raise Stopped("stopped while waiting to make a fresh environment")


def _episodes(infos: dict[str, Any]) -> list[tuple[float, int]]:
    """Returns (raw return, length) of the episodes that ended in this step."""
    ended = infos.get("_" + env_lib.EPISODE_RETURN)
    if ended is None:
        return []
    returns, lengths = infos[env_lib.EPISODE_RETURN], infos[env_lib.EPISODE_LENGTH]
    return [(float(returns[i]), int(lengths[i])) for i in np.flatnonzero(ended)]
