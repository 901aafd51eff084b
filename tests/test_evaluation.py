"""Greedy evaluation: seeds, caps, raw returns, and errors."""

import math
import threading

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import fakes

from longhaul import codec, env, evaluation, networks
from longhaul import config as config_lib
from longhaul.errors import Corruption, Stopped, WorkerFailed


def _config(env_id="fakes:Oracle-v0", episodes=5, max_steps=100, **kwargs):
    config = config_lib.default()
    config.env.id = env_id
    for name, value in kwargs.items():
        config.env.kwargs[name] = value
    config.evaluation.update({"episodes": episodes, "max_steps": max_steps, "seed": 70})
    config.agent.update({"hidden": (8,), "network": "mlp"})
    return config


def _payload(config, value=None):
    spec = env.make_spec(config)
    flat = networks.flatten_params(networks.init_params(networks.make_network(spec, config), spec, 0))
    if value is not None:
        flat = {name: np.full_like(leaf, value) for name, leaf in flat.items()}
    return codec.pack_weights(flat, "float32")


def _evaluate(config, payload=None):
    return evaluation.evaluate(config, env.make_spec(config), payload or _payload(config), threading.Event())


@pytest.mark.parametrize("episodes", [1, 5, 45])
def test_each_episode_is_one_of_its_own_seed(episodes):
    result = _evaluate(_config(episodes=episodes))
    # A seeded reset begins the oracle's first episode, whatever its lane played before.
    places = [[fakes.Place(fakes.identity_of(70 + e), 0, t + 1) for t in range(7)] for e in range(episodes)]
    assert result.returns.tolist() == [sum(map(fakes.oracle_reward, steps)) for steps in places]
    assert result.lengths.tolist() == [7] * episodes
    assert not result.capped.any()
    assert result.mean_return == result.returns.mean()


def test_play_that_never_ends_is_cut_and_reported_as_capped():
    result = _evaluate(_config("fakes:Endless-v0", max_steps=30))
    assert result.lengths.tolist() == [30] * 5
    assert result.capped.all()


def test_an_end_at_the_cap_is_an_end():
    assert not _evaluate(_config(max_steps=7)).capped.any()


def test_the_best_valued_action_is_taken():
    # CartPole falls fast under one constant action: all-zero weights always take index 0.
    config = _config("CartPole-v1", episodes=20, max_steps=500)
    result = _evaluate(config, _payload(config, 0.0))
    assert result.lengths.max() < 12
    assert result.returns.tolist() == result.lengths.tolist()


@pytest.mark.parametrize("start", [1, -1])
def test_actions_are_offset_in_evaluation_too(start):
    assert _evaluate(_config(start=start)).lengths.tolist() == [7] * 5  # the oracle refuses actions not its own


def test_weights_that_are_not_finite_or_do_not_fit_are_refused():
    config = _config()
    with pytest.raises(Corruption, match="not finite"):
        _evaluate(config, _payload(config, math.nan))
    other = _config("CartPole-v1")
    with pytest.raises(Corruption, match="another network"):
        _evaluate(config, _payload(other))


def test_an_environment_that_fails_is_named_with_its_episode():
    with pytest.raises(WorkerFailed, match=r"episode 0.*the oracle fell silent"):
        _evaluate(_config(episodes=2, fail_at=((0, 3),)))


def test_the_stop_event_ends_it():
    config, stop = _config("fakes:Endless-v0", max_steps=10**9), threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Stopped):
        evaluation.evaluate(config, env.make_spec(config), _payload(config), stop)


def test_atari_games_are_whole_and_their_returns_raw():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    config = _config("ALE/Alien-v5", episodes=2, max_steps=60)
    config.env.stack = 4
    config.env.atari.update({"preprocess": True, "episodic_life": True, "clip_rewards": True})
    flat = codec.unpack_weights(_payload(config, 0.0))
    flat["params/head/advantage/bias"][3] = 1.0  # always to the right, where there are dots
    result = _evaluate(config, codec.pack_weights(flat, "float32"))
    assert result.returns.min() >= 10  # a dot pays ten
    assert result.lengths.shape == (2,)
