"""Environment streams: one event interface over gymnasium's three autoreset modes, sync and async, through failures."""

import threading

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import fakes

from longhaul import config as config_lib
from longhaul import streams as streams_lib
from longhaul.errors import Stopped, WorkerFailed

MODES = config_lib.AUTORESET_MODES


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(streams_lib, "FIRST_BACKOFF_S", 0.001)


def _config(env_id="fakes:Oracle-v0", mode="next_step", num_envs=3, vectorization="sync", **kwargs):
    config = config_lib.default()
    config.env.update({"id": env_id, "autoreset_mode": mode, "num_envs": num_envs, "vectorization": vectorization})
    for name, value in kwargs.items():
        config.env.kwargs[name] = value
    return config


def _episodes(config, calls, actor_index=0, stop=None):
    """Follows the events as documented; returns per stream the list of episodes [(rows, steps, how it ended)]."""
    streams = streams_lib.Streams(config, actor_index, stop or threading.Event())
    done = [[] for _ in range(streams.num_streams)]
    current = [None] * streams.num_streams
    reported = []
    try:
        for call in range(calls + 1):
            events = streams.step(np.full(streams.num_streams, call % 3)) if call else streams.start()
            reported += events.episodes
            for s in range(streams.num_streams):
                if events.valid[s]:
                    rows, steps = current[s]
                    rows.append(events.next_rows[s].copy())
                    end = bool(events.terminated[s]), bool(events.truncated[s])
                    steps.append((float(events.rewards[s]), *end))
                    if any(end):
                        done[s].append((rows, steps, "end"))
                        current[s] = None
                if events.failed[s]:
                    done[s].append((*current[s], "failed"))
                    current[s] = None
                if events.started[s]:
                    assert current[s] is None
                    current[s] = [events.first_rows[s].copy()], []
    finally:
        streams.close()
    return done, reported, streams


def _check_whole(episode, decode=fakes.decode_vector):
    """An ended episode holds all its steps, in order, from one oracle, with the rewards that belong to them."""
    rows, steps, how = episode
    places = [decode(row) for row in rows]
    identity, number, _ = places[0]
    length = fakes.LENGTHS[number % len(fakes.LENGTHS)]
    assert places == [fakes.Place(identity, number, t) for t in range(len(places))]
    assert [step[0] for step in steps] == [fakes.oracle_reward(place) for place in places[1:]]
    assert not any(step[1] or step[2] for step in steps[:-1])
    if how == "end":
        assert len(steps) == length
        end = fakes.ENDS[number % len(fakes.ENDS)]
        assert steps[-1][1:] == (end in ("terminated", "both"), end in ("truncated", "both"))
    return identity, number


@pytest.mark.parametrize("env_id", ["fakes:Oracle-v0", "fakes:OracleImage-v0"])
@pytest.mark.parametrize("mode", MODES)
def test_every_episode_comes_whole_and_in_order_in_every_mode(mode, env_id):
    decode = fakes.decode_image if "Image" in env_id else fakes.decode_vector
    done, reported, _ = _episodes(_config(env_id, mode), 60)
    for stream, episodes in enumerate(done):
        assert len(episodes) > 5
        identity = fakes.identity_of(streams_lib.stream_seed(1, stream))
        assert [_check_whole(e, decode) for e in episodes] == [(identity, k) for k in range(len(episodes))]
    expected = [(sum(s[0] for s in steps), len(steps)) for episodes in done for _, steps, _ in episodes]
    assert sorted(reported) == sorted(expected)


def test_reported_lengths_are_exact_after_the_first_episode_in_every_mode():
    for mode in MODES:
        _, reported, _ = _episodes(_config(mode=mode, lengths=(3,)), 40)
        assert len(reported) > 20
        assert {length for _, length in reported} == {3}


@pytest.mark.parametrize("mode", MODES)
def test_async_and_sync_give_the_same_events(mode):
    sync, async_ = (_episodes(_config(mode=mode, vectorization=v), 25)[0] for v in ("sync", "async"))
    for episodes, others in zip(sync, async_):
        assert len(episodes) == len(others) > 2
        for (rows, steps, how), (other_rows, other_steps, other_how) in zip(episodes, others):
            np.testing.assert_array_equal(rows, other_rows)
            assert (steps, how) == (other_steps, other_how)


@pytest.mark.parametrize("env_id", ["fakes:Dict-v0", "fakes:Tuple-v0"])
def test_composed_observations_are_the_same_rows_sync_and_async(env_id):
    rows = []
    for vectorization in ("sync", "async"):
        streams = streams_lib.Streams(_config(env_id, vectorization=vectorization), 0, threading.Event())
        rows.append(
            [streams.start().first_rows.copy()] + [streams.step(np.zeros(3, int)).next_rows.copy() for _ in range(3)]
        )
        streams.close()
    np.testing.assert_array_equal(*rows)


def test_seeds_are_distinct_over_a_site_and_reproducible():
    for seed in (0, 1, 2**40):
        seeds = {streams_lib.stream_seed(seed, index) for index in range(200)}
        assert len(seeds) == 200
        assert all(0 <= s < 2**31 for s in seeds)
    assert streams_lib.stream_seed(0, 0) != streams_lib.stream_seed(1, 0)
    first, second = (_episodes(_config(), 10, actor_index=1)[0] for _ in range(2))
    assert [[e[1] for e in s] for s in first] == [[e[1] for e in s] for s in second]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_raises_breaks_off_its_own_episode_only(mode, vectorization):
    # The second step of episode 3 raises, in each fresh environment again.
    config = _config(mode=mode, vectorization=vectorization, num_envs=2, fail_at=((3, 1),))
    done, _, streams = _episodes(config, 60)
    assert streams.total_failures > 4
    for episodes in done:
        checked = [(_check_whole(e), e[2]) for e in episodes]
        assert [number for (_, number), _ in checked[:8]] == [0, 1, 2, 3] * 2
        assert [how for _, how in checked[:8]] == ["end", "end", "end", "failed"] * 2
        identities = [identity for (identity, _), _ in checked]
        assert identities[0] == identities[3] != identities[4]  # a fresh environment has a fresh seed


def test_rare_failures_never_end_the_actor():
    done, _, streams = _episodes(_config(fail_share=0.02, num_envs=2), 1500)
    assert streams.total_failures > 20
    for episodes in done:
        for episode in episodes:
            _check_whole(episode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", [{"fail_share": 1.0}, {"fail_resets": True}])
def test_an_environment_that_always_fails_ends_in_one_clear_line(mode, failure):
    config = _config(mode=mode, num_envs=1, **failure)
    with pytest.raises(WorkerFailed, match=r"failed 6 times in a row .*ConnectionError: the oracle") as caught:
        _episodes(config, 100)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_dies_is_replaced_and_bridges_nothing(mode, tmp_path):
    marker = tmp_path / "die"
    marker.touch()
    config = _config(mode=mode, vectorization="async", num_envs=2, die_file=str(marker))
    done, _, streams = _episodes(config, 25)
    assert streams.total_failures == 1
    for episodes in done:
        checked = [(_check_whole(e), e[2]) for e in episodes]
        assert checked[0][1] == "failed"
        assert [number for (_, number), _ in checked[1:]] == list(range(len(checked) - 1))
        assert checked[0][0][0] != checked[1][0][0]


def test_a_process_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr(streams_lib, "STEP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(streams_lib, "CLOSE_TIMEOUT_S", 0.5)
    config = _config(vectorization="async", num_envs=1, hang_at=2)
    config.actor.max_env_failures = 1
    with pytest.raises(WorkerFailed, match="did not answer in time"):
        _episodes(config, 20)


def test_the_stop_event_ends_the_wait_after_a_failure(monkeypatch):
    monkeypatch.setattr(streams_lib, "FIRST_BACKOFF_S", 60.0)
    monkeypatch.setattr(streams_lib, "MAX_BACKOFF_S", 60.0)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(Stopped):
        _episodes(_config(fail_share=1.0), 10, stop=stop)


def test_backoff_doubles_up_to_a_bound():
    assert streams_lib.backoff_s(3) == 4 * streams_lib.backoff_s(1)
    assert streams_lib.backoff_s(10_000) == streams_lib.MAX_BACKOFF_S
