"""n-step accumulation against a reference that looks every window up in the whole episode."""

import math

import numpy as np
import pytest

from longhaul.nstep import NStepAccumulator
from longhaul.types import NStepTransition

GAMMA = 0.9


def _run(accumulator, rewards, terminated, truncated, first_id=0):
    """One episode; row ids count up, actions are row ids modulo 7."""
    accumulator.start(first_id)
    per_step = []
    for t, reward in enumerate(rewards):
        last = t == len(rewards) - 1
        per_step.append(
            accumulator.step((first_id + t) % 7, reward, last and terminated, last and truncated, first_id + t + 1)
        )
    return per_step


def _joined(per_step):
    return [transition for transitions in per_step for transition in transitions]


def _reference(n_step, stack, rewards, terminated, first_id=0):
    length = len(rewards)

    def ids(t):
        return tuple(first_id + max(0, t - stack + 1 + place) for place in range(stack))

    found = []
    for t in range(length):
        k = min(n_step, length - t)
        total = sum(GAMMA**i * rewards[t + i] for i in range(k))
        bootstraps = not (terminated and t + k == length)
        found.append(NStepTransition(ids(t), ids(t + k), (first_id + t) % 7, total, GAMMA**k if bootstraps else 0.0))
    return found


def _assert_same(transitions, expected):
    assert [t._replace(n_step_return=0, discount=0) for t in transitions] == [
        t._replace(n_step_return=0, discount=0) for t in expected
    ]
    np.testing.assert_allclose([t.n_step_return for t in transitions], [t.n_step_return for t in expected], rtol=1e-14)
    np.testing.assert_allclose([t.discount for t in transitions], [t.discount for t in expected], rtol=1e-14)


@pytest.mark.parametrize("ends", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_every_step_is_the_first_of_one_transition_and_windows_end_with_the_episode(n_step, stack, ends):
    rng = np.random.default_rng(0)
    accumulator = NStepAccumulator(n_step, GAMMA, stack)
    first_id = 100
    for length in (1, 2, 3, 4, 5, 6, 11, 1):
        rewards = rng.normal(size=length).tolist()
        per_step = _run(accumulator, rewards, *ends, first_id)
        _assert_same(_joined(per_step), _reference(n_step, stack, rewards, ends[0], first_id))
        first_id += 1000


def test_a_transition_comes_with_the_step_that_completes_it():
    counts = [len(x) for x in _run(NStepAccumulator(3, GAMMA, 1), [1.0] * 6, True, False)]
    assert counts == [0, 0, 1, 1, 1, 3]


def test_short_tails_are_discounted_by_the_steps_they_sum():
    tails = _run(NStepAccumulator(5, GAMMA, 1), [1.0] * 3, False, True)[-1]
    assert [t.discount for t in tails] == pytest.approx([GAMMA**3, GAMMA**2, GAMMA])
    assert [t.n_step_return for t in tails] == pytest.approx([1 + GAMMA + GAMMA**2, 1 + GAMMA, 1.0])
    assert {t.next_ids for t in tails} == {(3,)}


def test_termination_wins_over_truncation():
    assert [t.discount for t in _run(NStepAccumulator(3, GAMMA, 1), [1.0, 1.0], True, True)[-1]] == [0.0, 0.0]


def test_stacks_repeat_the_first_row_and_never_reach_into_another_episode():
    accumulator = NStepAccumulator(1, GAMMA, 4)
    _run(accumulator, [0.0] * 3, False, True, first_id=0)
    second = _joined(_run(accumulator, [0.0] * 2, False, True, first_id=50))
    assert [t.obs_ids for t in second] == [(50, 50, 50, 50), (50, 50, 50, 51)]
    assert [t.next_ids for t in second] == [(50, 50, 50, 51), (50, 50, 51, 52)]


def test_an_abandoned_tail_leaves_nothing_to_the_next_episode():
    accumulator = NStepAccumulator(3, GAMMA, 2)
    accumulator.start(0)
    accumulator.step(1, 1e9, False, False, 1)
    accumulator.step(1, 1e9, False, False, 2)
    accumulator.abandon()
    assert not accumulator.in_episode
    rewards = [1.0, 2.0]
    _assert_same(_joined(_run(accumulator, rewards, False, True, 70)), _reference(3, 2, rewards, False, 70))


def test_a_bad_reward_spoils_only_the_windows_that_hold_it():
    rewards = [1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0]
    transitions = _joined(_run(NStepAccumulator(3, GAMMA, 1), rewards, False, True))
    assert [math.isnan(t.n_step_return) for t in transitions] == [False, True, True, True] + [False] * 4


def test_steps_outside_an_episode_and_starts_inside_one_are_errors():
    accumulator = NStepAccumulator(3, GAMMA, 1)
    with pytest.raises(RuntimeError, match="outside an episode"):
        accumulator.step(0, 0.0, False, False, 1)
    accumulator.start(0)
    with pytest.raises(RuntimeError, match="in the middle"):
        accumulator.start(1)
    accumulator.step(0, 0.0, True, False, 1)
    with pytest.raises(RuntimeError, match="outside an episode"):
        accumulator.step(0, 0.0, False, False, 2)
