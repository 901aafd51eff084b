"""The standard Atari 2600 preprocessing, as wrappers: frames, no-op starts, and a life as an episode.

Sources: "Human-level control through deep reinforcement learning" (Mnih et al. 2015) and "Revisiting the Arcade
Learning Environment" (Machado et al. 2018). Frames are single; stacking them is the actor's business.
"""

import contextlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing
from ml_collections import config_dict

from longhaul.errors import ConfigError


class AtariFrames(AtariPreprocessing):
    """Gymnasium's preprocessing to grey frames, of whatever ALE returns, and with the true last frame at a truncation.

    The base class leaves its loop before it reads the screen when an episode ends in the middle of a frame skip. After
    a termination nobody looks at that frame, but a truncated episode bootstraps from it.
    """

    def __init__(self, env: gymnasium.Env, **settings: Any):
        super().__init__(env, grayscale_obs=True, **settings)
        # The base class takes their shape from the observations, which need not be screens.
        self.obs_buffer = [np.empty(self.ale.getScreenDims(), np.uint8) for _ in range(2)]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if truncated and not terminated:
            self.ale.getScreenGrayscale(self.obs_buffer[0])
            self.obs_buffer[1].fill(0)
            observation = self._get_obs()
        return observation, reward, terminated, truncated, info


class EpisodicLife(gymnasium.Wrapper):
    """A lost life ends the episode for learning; the game itself goes on (Mnih et al. 2015).

    Unlike AtariPreprocessing's `terminal_on_life_loss`, a reset after a lost life does not start a new game, or all
    but the first life's states would never be seen: it takes one no-op instead.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._ale = env.unwrapped.ale  # type: ignore[attr-defined]
        self._lives = 0
        self._game_goes_on = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        over = True
        info: dict[str, Any] = {}
        if self._game_goes_on and seed is None:
            observation, _, terminated, truncated, _ = self.env.step(0)
            over = terminated or truncated
        if over:
            observation, info = self.env.reset(seed=seed, options=options)
        self._lives, self._game_goes_on = self._ale.lives(), False
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives = self._ale.lives()
        if 0 < lives < self._lives and not (terminated or truncated):
            terminated = self._game_goes_on = True
        self._lives = lives
        return observation, reward, terminated, truncated, info


def preprocess(env: gymnasium.Env, config: config_dict.ConfigDict) -> gymnasium.Env:
    """Wraps an ALE environment of frame skip 1 into one of 84x84 grey uint8 frames, or what config.env.atari says.

    Raises:
      ConfigError: not an Atari environment, or OpenCV is missing.
    """
    atari = config.env.atari
    if not hasattr(env.unwrapped, "ale"):
        raise ConfigError(
            f"config.env.atari.preprocess is set, but config.env.id ({config.env.id!r}) is not an ALE game"
        )
    with contextlib.suppress(ImportError):
        import cv2

        cv2.setNumThreads(1)  # an 84x84 resize gains nothing from threads, and every actor would start a pool
    try:
        return AtariFrames(env, noop_max=atari.noop_max, frame_skip=atari.frame_skip, screen_size=atari.screen_size)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigError("config.env.atari.preprocess needs OpenCV: pip install 'longhaul[atari]'") from error
