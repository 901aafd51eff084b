"""Rules of the paces, by a clock that the test turns; and that actor and learner keep to theirs."""

import threading
import time

import pytest

pytest.importorskip("jax")

from longhaul import config as config_lib
from longhaul import pacing
from tests.memory_link import Run, make_config, writers_closed  # noqa: F401 (a fixture)


def eventually(condition, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "did not come to hold in time"
        time.sleep(0.02)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def events_within(pace, clock, seconds, each=1, step_s=0.01):
    """Events that a worker makes in that time, which takes every one that is due."""
    made = 0
    for _ in range(round(seconds / step_s)):
        while pace.delay_s() == 0:
            pace.count(each)
            made += each
        clock.now_s += step_s
    return made


@pytest.mark.parametrize("rate, each", [(50.0, 1), (50.0, 8), (3.0, 4)])
def test_the_rate_is_kept_however_many_events_come_at_once(rate, each):
    clock = Clock()
    assert events_within(pacing.Pace(rate, clock=clock), clock, 40.0, each) == pytest.approx(40 * rate, abs=each + 1)


def test_no_rate_never_waits():
    clock = Clock()
    pace = pacing.Pace(0.0, clock=clock)
    pace.count(10**9)
    assert pace.delay_s() == 0.0


def test_the_delay_is_what_is_left_of_the_events_time():
    clock = Clock()
    pace = pacing.Pace(4.0, clock=clock)
    assert pace.delay_s() == 0.0
    pace.count(2)
    assert pace.delay_s() == pytest.approx(0.5)
    clock.now_s += 0.2
    assert pace.delay_s() == pytest.approx(0.3)


def test_a_short_stall_is_caught_up_on():
    clock = Clock()
    pace = pacing.Pace(10.0, clock=clock)
    events_within(pace, clock, 5.0)
    clock.now_s += 0.5
    assert events_within(pace, clock, 5.0) == pytest.approx(10 * 5.5, abs=2)


def test_of_a_long_stall_only_the_slack_is_caught_up_on():
    clock = Clock()
    pace = pacing.Pace(10.0, slack_s=1.0, clock=clock)
    events_within(pace, clock, 5.0)
    clock.now_s += 60.0
    assert events_within(pace, clock, 5.0) == pytest.approx(10 * 6.0, abs=2)


def test_a_set_stop_event_ends_a_wait():
    pace = pacing.Pace(1e-6)
    pace.count(1)
    stop = threading.Event()
    stop.set()
    assert not pace.wait(stop, 1e6)


def test_the_transfers_pace_is_that_of_its_field():
    config = config_lib.default()
    config.link.experiences_per_s = 8.0
    pace = pacing.transfer_pace(config)
    pace.count(80)
    assert 9.0 < pace.delay_s() <= 10.0


@pytest.mark.parametrize("field", ["learner.updates_per_s", "link.experiences_per_s"])
def test_a_learner_ahead_of_its_pace_takes_no_batch_and_is_not_idle(tmp_path, field):
    config = make_config(**{field: 1e-6, "metrics.period_s": 0.01, "learner.minibatches_per_pull": 2})
    run = Run(tmp_path, config, start=False)
    thread = threading.Thread(target=run.learner.run)
    thread.start()
    eventually(lambda: len(run.link.acks) == 1)
    eventually(lambda: len(run.lines) > 5)
    run.stop.set()
    thread.join(60.0)
    assert run.link.handed_out == 1
    assert run.learner.updates == 2
    assert run.lines[-2]["idle_share"] == 0


def test_an_actor_ahead_of_its_pace_takes_no_step_and_goes_on_reporting():
    pytest.importorskip("gymnasium")
    import test_actor

    from longhaul import actor as actor_lib

    config = test_actor._config(num_envs=2)
    config.actor.steps_per_s = 1e-6
    config.metrics.period_s = 0.01
    stop, metrics = threading.Event(), test_actor.Metrics()
    actor = actor_lib.Actor(config, 0, test_actor.Site(stop, 100), metrics, stop, test_actor.Recorder)
    thread = threading.Thread(target=actor.run)
    thread.start()
    eventually(lambda: len(metrics.lines) > 3)
    stop.set()
    thread.join(60.0)
    assert metrics.lines[-1][0] == 2
