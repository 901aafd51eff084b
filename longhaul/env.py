"""One environment as actors and evaluation see it: single rows of a plain dtype, actions as indices from 0.

Any gymnasium id or "module:Id" (Towers et al. 2024). The rules, all checked when the environment is made:

* Observations: a Box is a row as it is; a Dict or Tuple is flattened to one vector by gymnasium's own rule (a Dict's
  keys in the order of its space, a Discrete member one-hot). Anything else is refused.
* Row dtype: uint8, bool and float32 stay what they are; float64 and float16 become float32 (a narrowing is warned of
  once); other integers become float32, exact up to 2^24. Values are never scaled here. Booleans are one byte each, 0 or
  1, all the way to the network, which scales uint8 alone. An observation whose dtype can't be its space's (floats in a
  uint8 space) is an error of the environment.
* Actions: a Discrete of any start, as indices 0..n-1.
* Rewards: one number in any clothing (int, bool, numpy scalar, shape (1,)); a larger array is an error.

Atari preprocessing follows "Revisiting the Arcade Learning Environment" (Machado et al. 2018) through gymnasium's
AtariPreprocessing: frame skip with the maximum over the last two frames, grey, resized, no-op starts. Sticky actions
are the environment's own setting (`repeat_action_probability` in config.env.kwargs; 0.25 for ALE's v5 ids).
"""

import importlib
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from absl import logging
from gymnasium import spaces
from ml_collections import config_dict

from longhaul.errors import ConfigError
from longhaul.types import ExperienceSpec

# What an episode's last info holds: the sum of its raw rewards, and its length in agent steps.
EPISODE_RETURN = "episode_return"
EPISODE_LENGTH = "episode_length"


class RowLayout(NamedTuple):
    """How observations become rows.

    Attributes:
      shape: of one row.
      dtype: of one row, uint8, bool or float32.
      source: the observation space.
      flatten: whether gymnasium's flattening is applied.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: spaces.Space
    flatten: bool


def row_layout(space: spaces.Space, env_id: str) -> RowLayout:
    """Chooses the layout for an observation space.

    Raises:
      ConfigError: the space can't be rows; it is named.
    """
    refusal = (
        f"config.env.id is {env_id!r}, whose observation space is {space}: only Box, and Dict or Tuple of spaces that "
        "gymnasium can flatten, can be stored; wrap the environment"
    )
    flatten = isinstance(space, spaces.Dict | spaces.Tuple)
    if flatten and not space.is_np_flattenable:
        raise ConfigError(refusal)
    box = spaces.flatten_space(space) if flatten else space
    if not isinstance(box, spaces.Box) or 0 in box.shape or box.dtype.kind not in "fiub":
        raise ConfigError(refusal)
    dtype = np.dtype(box.dtype if box.dtype in (np.uint8, np.bool_) else np.float32)
    if box.dtype == np.float64:
        logging.log_first_n(logging.WARNING, "observations of %s are float64 and are narrowed to float32", 1, env_id)
    return RowLayout(box.shape or (1,), dtype, space, flatten)


def to_row(layout: RowLayout, observation: Any) -> np.ndarray:
    """Returns an observation as a row, always a copy: environments may reuse their buffers.

    Raises:
      ValueError: shape or dtype do not fit the observation space.
    """
    if layout.flatten:
        observation = spaces.flatten(layout.source, observation)
    array = np.asarray(observation)
    if array.dtype == layout.dtype and array.shape == layout.shape:
        return array.copy()
    if array.dtype != layout.dtype and not np.can_cast(array.dtype, layout.dtype, "same_kind"):
        raise ValueError(f"observation of dtype {array.dtype} does not fit its space, {layout.source}")
    if array.shape != layout.shape and (array.size != 1 or layout.shape != (1,)):
        raise ValueError(f"observation of shape {array.shape} does not fit its space, {layout.source}")
    return np.array(array, layout.dtype).reshape(layout.shape)


def to_reward(reward: Any) -> float:
    """Returns a reward as one float.

    Raises:
      ValueError: it is not one number.
    """
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "fiub":
        raise ValueError(f"reward {reward!r} is not one number")
    return float(array.reshape(())[()])


class EpisodeRecord(gymnasium.Wrapper):
    """Rewards as plain floats, and the raw return and length of an episode in its last info."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._return = 0.0
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._return, self._length = 0.0, 0
        observation, _ = self.env.reset(seed=seed, options=options)
        return observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        if type(reward) is not float:
            reward = to_reward(reward)
        self._return += reward
        self._length += 1
        if terminated or truncated:
            return (
                observation,
                reward,
                bool(terminated),
                bool(truncated),
                {
                    EPISODE_RETURN: self._return,
                    EPISODE_LENGTH: self._length,
                },
            )
        return observation, reward, False, False, {}


class RowEnv(gymnasium.Wrapper):
    """Outermost: observations to rows, action indices to actions, rewards clipped to their sign if asked."""

    def __init__(self, env: gymnasium.Env, env_id: str, clip_rewards: bool):
        super().__init__(env)
        if not isinstance(env.action_space, spaces.Discrete):
            raise ConfigError(
                f"config.env.id is {env_id!r}, whose action space is {env.action_space}: only Discrete can be learned"
            )
        self._layout = row_layout(env.observation_space, env_id)
        # Of the space's own dtype, as gymnasium's vector environments have it: its check of a Python int is slow.
        self._start = env.action_space.dtype.type(env.action_space.start)  # type: ignore[union-attr]
        self._clip_rewards = clip_rewards
        low, high = {"uint8": (0, 255), "bool": (0, 1)}.get(self._layout.dtype.name, (-np.inf, np.inf))
        self.observation_space = spaces.Box(low, high, self._layout.shape, self._layout.dtype.type)
        self.action_space = spaces.Discrete(int(env.action_space.n))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return to_row(self._layout, observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(self._start + action)
        if self._clip_rewards:
            # Zero and NaN stay what they are: hiding a NaN is not clipping's business.
            reward = 1.0 if reward > 0 else -1.0 if reward < 0 else reward  # type: ignore[operator]
        return to_row(self._layout, observation), float(reward), terminated, truncated, info


def _register_atari() -> None:
    import ale_py

    gymnasium.register_envs(ale_py)


def _register_minatar() -> None:
    from longhaul import minatar  # for the same reason only where asked for: the package is a site's choice

    minatar.register()


def _find_spec(env_id: str) -> Any:
    """Returns gymnasium's spec of an id, after importing what registers it."""
    module, separator, name = env_id.rpartition(":")
    try:
        if separator:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        reason = str(error)
    except ImportError as error:
        raise ConfigError(
            f"config.env.id is {env_id!r}, and module {module!r} can't be imported: {error}; install it, or add its "
            "folder to PYTHONPATH"
        ) from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"config.env.id is {env_id!r}: {error}") from error
    hint = "write 'module:Id' if a module of yours registers it"
    family, register = ("MinAtar", _register_minatar) if name.startswith("MinAtar/") else ("Atari", _register_atari)
    try:
        register()
        return gymnasium.spec(name)
    except ImportError as error:
        if name.startswith(("ALE/", "MinAtar/")):
            hint = f"{family} needs {error.name}: pip install 'longhaul[{family.lower()}]'"
    except gymnasium.error.UnregisteredEnv as error:
        reason = str(error)
    raise ConfigError(f"config.env.id is {env_id!r}: {reason.rstrip('. ')}; {hint}")


def _make_base(config: config_dict.ConfigDict) -> gymnasium.Env:
    """Makes the environment as registered, without our own wrappers."""
    settings = config.env
    spec = _find_spec(settings.id)
    kwargs = settings.kwargs.to_dict()
    is_ale = str(spec.entry_point).startswith("ale_py")
    if settings.atari.preprocess and is_ale:
        if kwargs.setdefault("frameskip", 1) != 1:
            raise ConfigError(
                f"config.env.kwargs.frameskip is {kwargs['frameskip']}, and must be 1 with "
                "config.env.atari.preprocess: use config.env.atari.frame_skip"
            )
        # The preprocessing reads the grey screen itself, after two of four frames. What ALE returns for each is thrown
        # away, and its default, the screen in colour, takes a fifth of a frame's time.
        kwargs.setdefault("obs_type", "ram")
    # With preprocessing the cap counts agent steps, so it goes on top of it instead.
    limit = settings.max_episode_steps if not settings.atari.preprocess else 0
    try:
        # The checker warns about what to_row and to_reward settle.
        env = gymnasium.make(spec, max_episode_steps=limit or None, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"config.env.id is {settings.id!r} with kwargs {kwargs}, which can't be made: {text}"
        ) from error
    if str(spec.entry_point).startswith("minatar"):
        from longhaul import minatar

        return minatar.FreshStart(env)
    return env


def make_env(config: config_dict.ConfigDict, evaluation: bool = False) -> gymnasium.Env:
    """Makes one environment of the configured task.

    Args:
      config: whole configuration.
      evaluation: raw rewards and whole games: no reward clipping, no episodic life.

    Returns:
      An environment whose observations are rows (a Box of the row dtype), whose actions are indices (a Discrete from
      0), whose rewards are floats, and whose infos are empty but for an episode's last: EPISODE_RETURN (raw, a whole
      game even under episodic life) and EPISODE_LENGTH.

    Raises:
      ConfigError: unknown id, missing package, arguments it does not take, or spaces that can't be used.
    """
    env, atari = _make_base(config), config.env.atari
    clip_rewards = False
    if atari.preprocess:
        from longhaul import atari as atari_wrappers  # needs ale-py and OpenCV, so only where asked for

        env = atari_wrappers.preprocess(env, config)
        if config.env.max_episode_steps:
            env = gymnasium.wrappers.TimeLimit(env, config.env.max_episode_steps)
        clip_rewards = atari.clip_rewards and not evaluation
    env = EpisodeRecord(env)
    if atari.preprocess and atari.episodic_life and not evaluation:
        env = atari_wrappers.EpisodicLife(env)
    return RowEnv(env, config.env.id, clip_rewards)


def make_spec(config: config_dict.ConfigDict) -> ExperienceSpec:
    """Returns what one experience of the configured task looks like; makes one environment to see.

    Raises:
      ConfigError: as `make_env`.
    """
    env = make_env(config)
    try:
        return ExperienceSpec(
            env_id=config.env.id,
            row_shape=tuple(int(side) for side in env.observation_space.shape or ()),
            row_dtype=np.dtype(env.observation_space.dtype).name,
            stack=config.env.stack,
            num_actions=int(env.action_space.n),  # type: ignore[attr-defined]
            n_step=config.agent.n_step,
            gamma=float(config.agent.gamma),
        )
    finally:
        env.close()
