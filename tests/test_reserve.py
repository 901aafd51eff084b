"""What is held is what the cache still holds, drawn by the last priorities; in outages it is drawn only so often."""

import numpy as np
import pytest

from longhaul.reserve import Allowance, Reserve
from longhaul.train_step import SCALARS

STACK = 2
_PROBABILITY = 2 * STACK + SCALARS.index("probabilities")


def _packed(slots, action=0):
    """Returns one minibatch of transitions with the given slots."""
    slots = np.asarray(slots, np.int32)
    packed = np.zeros((1, len(slots), 2 * STACK + len(SCALARS)), np.int32)
    packed[0, :, : 2 * STACK] = slots
    packed[0, :, 2 * STACK + SCALARS.index("actions")] = action
    return packed


def _slots(first: int, count: int) -> np.ndarray:
    """Returns the slots of consecutive transitions: rows i, i+1, then i+1, i+2."""
    i = np.arange(first, first + count)[:, None]
    return i + np.array([0, 1, 1, 2])


def _priorities(*values):
    return np.array([values], np.float32)


def _reserve(exponent=1.0, cache_rows=100):
    return Reserve(cache_rows, STACK, exponent, seed=0)


def _shares(reserve, batch):
    packed, _ = reserve.draw(1, batch)
    begins, counts = np.unique(packed[0, :, 0], return_counts=True)
    return dict(zip(begins.tolist(), (counts / batch).tolist())), packed


@pytest.mark.parametrize("exponent, share", [(1.0, 0.75), (0.5, 3**0.5 / (1 + 3**0.5)), (0.0, 0.5)])
def test_draws_are_in_proportion_to_the_priority_to_its_exponent_and_say_their_probability(exponent, share):
    reserve = _reserve(exponent=exponent)
    stamp = reserve.rows_written(np.arange(20, dtype=np.int32))
    reserve.add(_packed(_slots(4, 2)), _priorities(1.0, 3.0), stamp)
    shares, packed = _shares(reserve, 40_000)
    assert shares == pytest.approx({4: 1 - share, 5: share}, abs=0.01)
    probabilities = packed[0, :, _PROBABILITY].view(np.float32)
    np.testing.assert_allclose(probabilities, np.where(packed[0, :, 0] == 5, share, 1 - share), rtol=1e-6)


def test_a_transition_comes_back_as_it_was_packed():
    reserve = _reserve()
    stamp = reserve.rows_written(np.arange(20, dtype=np.int32))
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, _packed(_slots(0, 8)).shape).astype(np.int32)
    packed[..., : 2 * STACK] = _slots(0, 8)
    reserve.add(packed, np.ones((1, 8), np.float32), stamp)
    drawn, places = reserve.draw(2, 8)
    assert drawn.shape == (2, 8, packed.shape[-1]) and places.shape == (16,)
    columns = [column for column in range(packed.shape[-1]) if column != _PROBABILITY]
    for transition in drawn.reshape(16, -1):
        np.testing.assert_array_equal(transition[columns], packed[0, transition[0]][columns])


def test_what_has_lost_any_of_its_rows_is_never_drawn():
    reserve = _reserve()
    stamp = reserve.rows_written(np.arange(50, dtype=np.int32))
    reserve.add(_packed(_slots(0, 40)), np.ones((1, 40), np.float32), stamp)
    assert len(reserve) == 40
    reserve.rows_written(np.array([10, 30], np.int32))
    gone = {8, 9, 10, 28, 29, 30}
    assert set(_shares(reserve, 4_000)[0]) == set(range(40)) - gone


def test_rows_of_the_next_batch_count_though_this_one_is_added_after_they_were_written():
    reserve = _reserve()
    first = reserve.rows_written(np.arange(10, dtype=np.int32))
    second = reserve.rows_written(np.array([2], np.int32))
    reserve.add(_packed(_slots(0, 4)), np.ones((1, 4), np.float32), first)  # refers to the row that was in slot 2
    assert len(reserve) == 1
    reserve.add(_packed(_slots(0, 4)), np.ones((1, 4), np.float32), second)
    assert len(reserve) == 4


def test_a_transition_drawn_again_is_held_once_with_its_last_priority():
    reserve = _reserve()
    stamp = reserve.rows_written(np.arange(10, dtype=np.int32))
    reserve.add(_packed(_slots(0, 2)), _priorities(1.0, 1.0), stamp)
    reserve.add(_packed(_slots(1, 1)), _priorities(9.0), stamp)
    assert len(reserve) == 2
    assert _shares(reserve, 20_000)[0] == pytest.approx({0: 0.1, 1: 0.9}, abs=0.01)


def test_priorities_of_what_was_drawn_count_for_the_next_draw():
    reserve = _reserve()
    stamp = reserve.rows_written(np.arange(10, dtype=np.int32))
    reserve.add(_packed(_slots(0, 2)), _priorities(1.0, 1.0), stamp)
    packed, places = reserve.draw(1, 1_000)
    reserve.update(places, np.where(packed[..., 0] == 0, 3.0, 1.0).astype(np.float32))
    assert _shares(reserve, 20_000)[0] == pytest.approx({0: 0.75, 1: 0.25}, abs=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0])
def test_what_has_no_sound_priority_is_not_drawn(bad):
    reserve = _reserve()
    stamp = reserve.rows_written(np.arange(10, dtype=np.int32))
    reserve.add(_packed(_slots(0, 3)), _priorities(bad, 1.0, bad), stamp)
    assert set(_shares(reserve, 1_000)[0]) == {1}
    reserve.add(_packed(_slots(0, 3)), _priorities(bad, bad, bad), stamp)
    assert reserve.draw(1, 4) is None


def test_draws_in_outages_are_bounded_by_what_crossed_and_by_what_is_held():
    allowance = Allowance(4.0)
    held = 10

    def taken():
        count = 0
        while allowance.take(8, held):
            count += 8
        return count

    allowance.earn(10)
    assert taken() == 40  # four for each of ten
    for _ in range(5):  # crossed fifty times, and still ten
        allowance.earn(10)
    assert taken() == 40
    allowance.earn(2)
    assert taken() == 8  # a link that comes and goes does not begin anew
    assert not Allowance(0.0).take(8, held)


def test_it_is_empty_at_first_and_once_forgotten():
    reserve = _reserve()
    assert len(reserve) == 0 and reserve.draw(1, 1) is None
    stamp = reserve.rows_written(np.arange(10, dtype=np.int32))
    reserve.add(_packed(_slots(0, 2)), _priorities(1.0, 1.0), stamp)
    reserve.forget()
    assert len(reserve) == 0 and reserve.draw(1, 1) is None
    reserve.add(_packed(_slots(0, 2)), _priorities(1.0, 1.0), stamp)  # was being trained on meanwhile
    assert len(reserve) == 0 and reserve.draw(1, 1) is None
    stamp = reserve.rows_written(np.arange(10, dtype=np.int32))
    reserve.add(_packed(_slots(0, 2)), _priorities(1.0, 1.0), stamp)
    assert len(reserve) == 2 and reserve.draw(1, 4) is not None


def test_without_room_nothing_is_kept():
    reserve = Reserve(0, STACK, 0.6, seed=0)
    stamp = reserve.rows_written(np.arange(10, dtype=np.int32))
    reserve.add(_packed(_slots(0, 2)), _priorities(1.0, 1.0), stamp)
    assert len(reserve) == 0 and reserve.draw(1, 1) is None


def test_what_is_passed_over_changes_neither_the_shares_of_the_others_nor_their_relative_probabilities():
    reserve = _reserve()
    stamp = reserve.rows_written(np.arange(50, dtype=np.int32))
    reserve.add(_packed(_slots(0, 40)), np.where(np.arange(40) < 2, [1.0, 3.0] * 20, 50.0)[None], stamp)
    reserve.rows_written(np.arange(4, 50, dtype=np.int32))  # nearly all of the mass loses rows, the first two do not
    shares, packed = _shares(reserve, 20_000)
    assert shares == pytest.approx({0: 0.25, 1: 0.75}, abs=0.015)
    probabilities = packed[0, :, _PROBABILITY].view(np.float32)
    np.testing.assert_allclose(probabilities / probabilities.max(), np.where(packed[0, :, 0] == 1, 1, 1 / 3), rtol=1e-5)
    assert len(reserve) == 2


def test_it_agrees_with_the_cache_through_random_batches():
    """Each row holds a number of its own: what is drawn must find the numbers that it came with."""
    rng = np.random.default_rng(3)
    reserve = _reserve(cache_rows=64)
    cache = np.zeros(64, np.int64)
    number, came_with = 0, {}
    for _ in range(300):
        new = rng.permutation(64)[: rng.integers(0, 12)].astype(np.int32)
        cache[new] = np.arange(number, number + len(new))
        number += len(new)
        stamp = reserve.rows_written(new)
        packed = _packed(rng.integers(0, 64, (6, 2 * STACK)))
        packed[0, :, 2 * STACK] = np.arange(6) + 6 * stamp
        for transition in packed[0]:
            came_with[int(transition[2 * STACK])] = cache[transition[: 2 * STACK]].tolist()
        reserve.add(packed, rng.uniform(0.1, 1, (1, 6)).astype(np.float32), stamp)
        drawn = reserve.draw(1, 16)
        for transition in drawn[0][0] if drawn is not None else ():
            assert came_with[int(transition[2 * STACK])] == cache[transition[: 2 * STACK]].tolist()
