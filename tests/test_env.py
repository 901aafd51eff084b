"""Environments as rows: ids, spaces, dtypes, rewards and Atari preprocessing."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium

from longhaul import config as config_lib
from longhaul import env as env_lib
from longhaul.errors import ConfigError


def _config(env_id, **env):
    config = config_lib.default()
    config.env.id = env_id
    kwargs = env.pop("kwargs", {})
    config.env.update(env)
    for name, value in kwargs.items():
        config.env.kwargs[name] = value
    return config


def _atari(env_id="ALE/Breakout-v5", max_episode_steps=0, kwargs=None, **atari):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    config = _config(env_id, max_episode_steps=max_episode_steps, kwargs=kwargs or {"repeat_action_probability": 0.0})
    config.env.atari.update({"preprocess": True} | atari)
    return config


def test_a_vector_task_gives_float32_rows():
    spec = env_lib.make_spec(_config("CartPole-v1", stack=2))
    assert (spec.row_shape, spec.row_dtype, spec.num_actions, spec.stack) == ((4,), "float32", 2, 2)


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("CartPoel-v1", "Did you mean"),
        ("CartPole-v99", "v1"),
        ("no_such_module:Env-v0", "no_such_module"),
        ("Typed-v9", "module:Id"),
        ("bad id", "Malformed"),
    ],
)
def test_an_unknown_id_is_refused_in_one_line_with_a_hint(env_id, hint):
    with pytest.raises(ConfigError, match=hint) as caught:
        env_lib.make_spec(_config(env_id))
    assert "config.env.id" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_that_the_environment_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="gravitas"):
        env_lib.make_spec(_config("CartPole-v1", kwargs={"gravitas": 3}))


def test_kwargs_reach_the_environment():
    env = env_lib.make_env(_config("CartPole-v1", kwargs={"sutton_barto_reward": True}))
    env.reset(seed=0)
    assert env.step(0)[1] == 0.0


@pytest.mark.parametrize("env_id", ["fakes:Text-v0", "fakes:Sequence-v0", "fakes:Continuous-v0", "FrozenLake-v1"])
def test_unsupported_spaces_are_refused_by_name(env_id):
    with pytest.raises(ConfigError, match=r"space is (Text|Dict|Box|Discrete)"):
        env_lib.make_spec(_config(env_id))


@pytest.mark.parametrize(
    ("dtype", "high", "row_dtype"),
    [
        ("uint8", 255, "uint8"),
        ("float32", 1, "float32"),
        ("float32", 255, "float32"),
        ("float64", 1, "float32"),
        ("float16", 1, "float32"),
        ("int64", 1000, "float32"),
        ("int8", 100, "float32"),
        ("uint16", 65535, "float32"),
        ("bool", 1, "bool"),
    ],
)
def test_row_dtypes_follow_the_rule_and_values_are_not_scaled(dtype, high, row_dtype):
    config = _config("fakes:Typed-v0", kwargs={"dtype": dtype, "high": high})
    env = env_lib.make_env(config)
    assert env_lib.make_spec(config).row_dtype == row_dtype
    row, _ = env.reset(seed=3)
    env.unwrapped.observation_space.seed(3)
    assert row.dtype == row_dtype
    np.testing.assert_array_equal(row, env.unwrapped.observation_space.sample().astype(row_dtype))


def test_an_observation_that_contradicts_its_space_is_an_error():
    with pytest.raises(ValueError, match="float64 does not fit"):
        env_lib.make_env(_config("fakes:Lying-v0")).reset(seed=0)


@pytest.mark.parametrize("reward", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), np.array([2.0]), True, np.True_])
def test_any_one_number_is_a_reward(reward):
    env = env_lib.make_env(_config("fakes:Reward-v0", kwargs={"reward": reward}))
    env.reset(seed=0)
    got = env.step(0)[1]
    assert type(got) is float
    assert got == float(np.asarray(reward).reshape(()))


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), np.array([]), None, "1"])
def test_anything_else_is_not_a_reward(reward):
    with pytest.raises(ValueError, match="not one number"):
        env_lib.to_reward(reward)


@pytest.mark.parametrize("start", [0, 1, -1])
def test_actions_are_indices_whatever_the_start(start):
    config = _config("fakes:Oracle-v0", kwargs={"start": start})
    env = env_lib.make_env(config)
    env.reset(seed=0)
    assert env_lib.make_spec(config).num_actions == 3
    for action in (0, 1, np.int64(2)):  # the oracle asserts that its space contains them
        env.step(action)
    with pytest.raises(AssertionError):
        env.step(3)


def test_dict_observations_are_flattened_in_the_order_of_their_space():
    config = _config("fakes:Dict-v0")
    env = env_lib.make_env(config)
    assert env_lib.make_spec(config).row_shape == (2 + 3 + 2 + 4,)
    row, _ = env.reset(seed=5)
    env.unwrapped.observation_space.seed(5)
    sample = env.unwrapped.observation_space.sample()
    number, box = sample["m"]
    expected = [*sample["a"], *np.eye(3)[number - 1], *box, *sample["z"].reshape(-1)]
    np.testing.assert_array_equal(row, np.array(expected, np.float32))


def test_rows_are_copies_of_buffers_that_an_environment_reuses():
    env = env_lib.make_env(_config("fakes:Oracle-v0"))
    first, _ = env.reset(seed=0)
    kept = first.copy()
    env.step(0)
    np.testing.assert_array_equal(first, kept)


def test_max_episode_steps_truncates():
    env = env_lib.make_env(_config("fakes:Endless-v0", max_episode_steps=5))
    env.reset(seed=0)
    steps = [env.step(0) for _ in range(5)]
    assert [s[3] for s in steps] == [False] * 4 + [True]
    assert steps[-1][4] == {env_lib.EPISODE_RETURN: 5.0, env_lib.EPISODE_LENGTH: 5}


def test_atari_rows_are_single_grey_frames():
    spec = env_lib.make_spec(_atari())
    assert (spec.row_shape, spec.row_dtype, spec.num_actions) == ((84, 84), "uint8", 4)
    env = env_lib.make_env(_atari())
    row, _ = env.reset(seed=0)
    assert row.shape == (84, 84)
    assert row.dtype == np.uint8
    assert row.max() > 50


@pytest.mark.parametrize("obs_type", [None, "rgb", "grayscale"])
def test_atari_rows_are_those_of_gymnasiums_preprocessing_whatever_ale_itself_returns(obs_type):
    given = {"obs_type": obs_type} if obs_type else {}
    env = env_lib.make_env(_atari(kwargs={"repeat_action_probability": 0.0} | given))
    assert env.spec.kwargs["obs_type"] == (obs_type or "ram")  # not the screen in colour, for every frame, unasked
    reference = gymnasium.wrappers.AtariPreprocessing(
        gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    )
    np.testing.assert_array_equal(env.reset(seed=3)[0], reference.reset(seed=3)[0])
    actions = np.random.default_rng(0).integers(4, size=300)
    for action in actions:
        row, reward, terminated, truncated, _ = env.step(action)
        expected_row, expected_reward, *expected_end, _ = reference.step(action)
        np.testing.assert_array_equal(row, expected_row)
        assert (reward, terminated, truncated) == (np.sign(expected_reward), *expected_end)
        if terminated:
            env.reset(seed=4)
            reference.reset(seed=4)


def test_atari_skips_frames_once():
    env = env_lib.make_env(_atari(noop_max=0))
    env.reset(seed=0)
    before = env.unwrapped.ale.getEpisodeFrameNumber()
    env.step(0)
    assert env.unwrapped.ale.getEpisodeFrameNumber() - before == 4
    with pytest.raises(ConfigError, match="frame_skip"):
        env_lib.make_env(_atari(kwargs={"frameskip": 4}))


def test_atari_cap_counts_agent_steps_and_shows_the_true_last_frame():
    env = env_lib.make_env(_atari(max_episode_steps=6))
    env.reset(seed=0)
    assert [env.step(1)[3] for _ in range(6)] == [False] * 5 + [True]
    # ALE's own cap falls into the middle of a frame skip: the row is the screen as it is then.
    env = env_lib.make_env(_atari(noop_max=0, kwargs={"max_num_frames_per_episode": 30}))
    env.reset(seed=0)
    rows, truncated = [], False
    while not truncated:
        row, _, _, truncated, _ = env.step(1)
        rows.append(row)
    screen = env.unwrapped.ale.getScreenGrayscale()
    import cv2

    np.testing.assert_array_equal(rows[-1], cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA))
    assert not np.array_equal(rows[-1], rows[-2])


def _play(env, steps, seed=0):
    """Fires now and then and moves; returns the steps' (reward, terminated, truncated, info)."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    found = []
    for _ in range(steps):
        _, *rest = env.step(int(rng.integers(4)))
        found.append(rest)
        if rest[1] or rest[2]:
            env.reset()
    return found


def test_a_lost_life_ends_an_episode_for_learning_only_and_the_game_goes_on():
    found = _play(env_lib.make_env(_atari(episodic_life=True, clip_rewards=False)), 600)
    ends = [step for step in found if step[1]]
    games = [step for step in ends if step[3]]
    assert len(ends) >= 5 * len(games) >= 5
    # The first game's return is the sum over all its lives, up to its own end.
    until = found.index(games[0])
    assert games[0][3][env_lib.EPISODE_RETURN] == sum(step[0] for step in found[: until + 1])
    whole = _play(env_lib.make_env(_atari(episodic_life=False)), 600)
    assert all(step[3] for step in whole if step[1])


def test_rewards_are_clipped_for_learning_and_never_in_evaluation_or_reports():
    # Boxing for some time: the opponent hits too, so rewards of both signs come; Alien pays tens of points.
    config = _atari("ALE/Alien-v5")
    learning = _play(env_lib.make_env(config), 300)
    evaluation = _play(env_lib.make_env(config, evaluation=True), 300)
    unclipped = _play(env_lib.make_env(_atari("ALE/Alien-v5", clip_rewards=False)), 300)
    assert {step[0] for step in learning} == {0.0, 1.0}
    assert max(step[0] for step in evaluation) >= 10
    assert [step[0] for step in evaluation] == [step[0] for step in unclipped]
    assert [np.sign(step[0]) for step in evaluation] == [step[0] for step in learning]


def _minatar(game="Breakout-v1", **kwargs):
    pytest.importorskip("minatar")
    return _config(f"MinAtar/{game}", kwargs=kwargs)


@pytest.mark.parametrize(
    ("game", "channels", "actions"),
    [("Asterix-v1", 4, 5), ("Breakout-v1", 4, 3), ("Freeway-v1", 7, 3), ("SpaceInvaders-v0", 6, 6)],
)
def test_minatar_rows_are_small_images_of_booleans(game, channels, actions):
    config = _minatar(game)
    spec = env_lib.make_spec(config)
    assert (spec.row_shape, spec.row_dtype, spec.num_actions) == ((10, 10, channels), "bool", actions)
    assert spec.row_bytes == 100 * channels
    env = env_lib.make_env(config)
    row, _ = env.reset(seed=0)
    np.testing.assert_array_equal(row, env.unwrapped.game.state())
    assert row.any() and not row.all()


def test_a_minatar_episode_follows_from_its_seed_alone():
    # Every action is repeated: the first one of an episode would be the last one of the episode before.
    env = env_lib.make_env(_minatar(sticky_action_prob=1.0))
    env.reset(seed=1)
    env.unwrapped.game.last_action = env.unwrapped.action_set[2]
    after_another, _ = env.reset(seed=0)
    step = env.step(1)[0]
    fresh = env_lib.make_env(_minatar(sticky_action_prob=1.0))
    np.testing.assert_array_equal(after_another, fresh.reset(seed=0)[0])
    np.testing.assert_array_equal(step, fresh.step(1)[0])


def test_minatar_says_nothing_on_the_console_and_sets_up_no_logging():
    pytest.importorskip("minatar")
    program = (
        "import logging; from longhaul import config, env; c = config.default(); c.env.id = 'MinAtar/Breakout-v1'; "
        "env.make_env(c); print(logging.getLogger().handlers, logging.getLogger().filters)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "Cannot import" not in ran.stderr
    assert ran.stdout.strip() == "[] []"


def test_an_unknown_minatar_game_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"config\.env\.id is 'MinAtar/Pong-v1'.*"):
        env_lib.make_spec(_minatar("Pong-v1"))


def test_preprocessing_something_else_than_atari_is_refused():
    config = _config("CartPole-v1")
    config.env.atari.preprocess = True
    with pytest.raises(ConfigError, match="is not an ALE game"):
        env_lib.make_env(config)
