"""The oracle environment: each observation says which environment, episode and step it is, each reward follows from it.

An environment's `identity` is the first draw of its random generator after a seeded reset, so it is known from the
seed and the same in every process and vectorisation. Episode k has `lengths[k % len(lengths)]` steps and ends as
`ends[k % len(ends)]` says: "terminated", "truncated" or "both".

Registered as fakes:Oracle-v0 (vector), fakes:OracleImage-v0 (a small uint8 image), and others below.
"""

import os
import time
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

IDENTITIES = 2**20
LENGTHS = (7, 3, 1, 12, 5)
ENDS = ("terminated", "truncated", "both")
IMAGE_SHAPE = (4, 6)


class Place(NamedTuple):
    """Where an observation is from."""

    identity: int
    episode: int
    step: int


def oracle_reward(place: Place) -> float:
    """Reward for the step that leads to `place`; dyadic, so that sums in any order are exact."""
    return (place.identity % 64) / 8 + place.episode * 4.0 - place.step / 16


def encode_vector(place: Place) -> np.ndarray:
    return np.array([*place, oracle_reward(place)], np.float32)


def decode_vector(row: np.ndarray) -> Place:
    return Place(*(int(x) for x in row[:3]))


def encode_image(place: Place) -> np.ndarray:
    image = np.zeros(IMAGE_SHAPE, np.uint8)
    image.reshape(-1)[:12] = np.frombuffer(np.array(place, "<i4").tobytes(), np.uint8)
    return image


def decode_image(row: np.ndarray) -> Place:
    return Place(*np.frombuffer(row.reshape(-1)[:12].tobytes(), "<i4").tolist())


def identity_of(seed: int) -> int:
    """The identity of an oracle that was reset with the seed."""
    generator, _ = gymnasium.utils.seeding.np_random(seed)
    return int(generator.integers(IDENTITIES))


class Oracle(gymnasium.Env):
    """See the module. Fails as asked: `fail_at` lists (episode, step) pairs at which
    step() raises; `fail_share` is the share of steps that raise; `fail_resets` makes every reset raise; while
    `die_file` exists, step 2 removes it and ends the process; step `hang_at` does not return; `reward_form` is "float",
    "array" (shape (1,)) or "vector" (shape (2,)); `start` is the first action's number, and a wrong action fails.
    """

    def __init__(
        self,
        image: bool = False,
        lengths: tuple[int, ...] = LENGTHS,
        ends: tuple[str, ...] = ENDS,
        start: int = 0,
        fail_at: tuple[tuple[int, int], ...] = (),
        fail_share: float = 0.0,
        fail_resets: bool = False,
        die_file: str = "",
        hang_at: int = -1,
        reward_form: str = "float",
    ):
        self._image = image
        self._lengths, self._ends = tuple(lengths), tuple(ends)
        self._fail_at = {tuple(pair) for pair in fail_at}
        self._fail_share, self._fail_resets, self._die_file = fail_share, fail_resets, die_file
        self._hang_at, self._reward_form = hang_at, reward_form
        if image:
            self.observation_space = spaces.Box(0, 255, IMAGE_SHAPE, np.uint8)
        else:
            self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(3, start=start)
        self._place = Place(0, -1, 0)
        self._buffer = np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def _observe(self) -> np.ndarray:
        # The same array each time, as some simulators do: whoever keeps a reference sees it change.
        self._buffer[...] = encode_image(self._place) if self._image else encode_vector(self._place)
        return self._buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fail_resets:
            raise ConnectionError("the oracle is not there")
        identity = self._place.identity if seed is None else int(self.np_random.integers(IDENTITIES))
        episode = 0 if seed is not None else self._place.episode + 1
        self._place = Place(identity, episode, 0)
        return self._observe(), {"noise": np.zeros(2)}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is no action of {self.action_space}"
        identity, episode, step = self._place
        if (episode, step) in self._fail_at or self.np_random.random() < self._fail_share:
            raise ConnectionError(f"the oracle fell silent in episode {episode}, step {step}")
        if self._die_file and os.path.exists(self._die_file) and step == 2:
            os.unlink(self._die_file)
            os._exit(3)
        if step == self._hang_at:
            time.sleep(600)
        self._place = Place(identity, episode, step + 1)
        ended = step + 1 >= self._lengths[episode % len(self._lengths)]
        end = self._ends[episode % len(self._ends)] if ended else ""
        reward: Any = oracle_reward(self._place)
        if self._reward_form == "array":
            reward = np.array([reward])
        elif self._reward_form == "vector":
            reward = np.array([reward, reward])
        return self._observe(), reward, end in ("terminated", "both"), np.bool_(end in ("truncated", "both")), {"x": 1}


class Spaces(gymnasium.Env):
    """An environment of given spaces, whose observations are drawn from them."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, reward: Any = 1.0):
        self.observation_space = observation_space
        self.action_space = action_space
        self._reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), self._reward, False, False, {}


def dict_env() -> Spaces:
    """Keys given out of order, and members of unlike dtypes."""
    inner = spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)))
    return Spaces(
        spaces.Dict({"z": spaces.Box(0, 9, (2, 2), np.float64), "a": spaces.MultiBinary(2), "m": inner}),
        spaces.Discrete(2),
    )


def tuple_env() -> Spaces:
    return Spaces(spaces.Tuple((spaces.Box(0, 1, (3,), np.float32), spaces.Discrete(2))), spaces.Discrete(2))


def endless_env() -> Spaces:
    return Spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))


def typed_env(dtype: str = "float32", low: float = 0, high: float = 1) -> Spaces:
    return Spaces(spaces.Box(low, high, (3,), np.dtype(dtype).type), spaces.Discrete(2))


def reward_env(reward: Any) -> Spaces:
    return Spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), reward)


def text_env() -> Spaces:
    return Spaces(spaces.Text(5), spaces.Discrete(2))


def sequence_env() -> Spaces:
    return Spaces(spaces.Dict({"s": spaces.Sequence(spaces.Discrete(2))}), spaces.Discrete(2))


def continuous_env() -> Spaces:
    return Spaces(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32))


def lying_env() -> Spaces:
    """Says uint8, gives floats."""
    env = Spaces(spaces.Box(0, 1, (3,), np.float64), spaces.Discrete(2))
    honest = env.observation_space
    env.reset = lambda **_: (honest.sample(), {})  # type: ignore[method-assign]
    env.observation_space = spaces.Box(0, 255, (3,), np.uint8)
    return env


for _name, _entry in {
    "Oracle-v0": Oracle,
    "Dict-v0": dict_env,
    "Tuple-v0": tuple_env,
    "Endless-v0": endless_env,
    "Typed-v0": typed_env,
    "Reward-v0": reward_env,
    "Text-v0": text_env,
    "Sequence-v0": sequence_env,
    "Continuous-v0": continuous_env,
    "Lying-v0": lying_env,
}.items():
    gymnasium.register(_name, _entry)
gymnasium.register("OracleImage-v0", Oracle, kwargs={"image": True})
