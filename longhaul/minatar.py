"""The MinAtar games ("MinAtar: An Atari-Inspired Testbed for Thorough and Reproducible Reinforcement Learning
Experiments", Young & Tian 2019): rows of 10x10xC booleans, C objects of the game, one step a frame.

Ids are MinAtar/Breakout-v1 and the like: v1 offers a game's own actions, v0 the same six for all. The package asks for
seaborn and pandas, which it needs for drawing alone; it is locked and used without them.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import gymnasium


@contextlib.contextmanager
def _without_root_warnings() -> Iterator[None]:
    """Drops what is logged on the root logger itself: on import the package says there that it can't draw.

    The handler that does nothing keeps such a message from setting up logging for the whole process.
    """
    root, handler = logging.getLogger(), logging.NullHandler()

    def refuse(_: logging.LogRecord) -> bool:
        return False

    root.addHandler(handler)
    root.addFilter(refuse)
    try:
        yield
    finally:
        root.removeFilter(refuse)
        root.removeHandler(handler)


def register() -> None:
    """Registers the games with gymnasium, unless they are.

    Raises:
      ImportError: the package is not installed.
    """
    with _without_root_warnings():
        from minatar import gym as games  # imports matplotlib's pyplot, so only where a game is asked for

    if "MinAtar/Breakout-v1" not in gymnasium.registry:
        games.register_envs()


class FreshStart(gymnasium.Wrapper):
    """Forgets an episode's last action at the next one's start.

    The games repeat the last action with probability 0.1, across a reset too: an episode would then depend on the one
    before it, whatever its seed.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
