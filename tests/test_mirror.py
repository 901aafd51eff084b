"""The mirror and the cache it stands for agree after every batch, through evictions and rollbacks."""

import random

import numpy as np
import pytest

from longhaul.errors import ConfigError
from longhaul.mirror import Mirror, Placement


class _Cache:
    """A learner's cache, holding row ids in place of rows."""

    def __init__(self, capacity):
        self.slots = np.full(capacity, -1, np.int64)

    def apply(self, placement: Placement, row_ids: np.ndarray) -> None:
        self.slots[placement.new_slots] = row_ids.reshape(-1)[placement.new_places]
        np.testing.assert_array_equal(self.slots[placement.slots], row_ids)


def test_a_row_is_sent_once_while_it_fits():
    mirror, cache = Mirror(100), _Cache(100)
    ids = np.array([[1, 2, 3], [2, 3, 4]])
    placement = mirror.place(1, ids)
    assert sorted(ids.reshape(-1)[placement.new_places]) == [1, 2, 3, 4]
    cache.apply(placement, ids)
    placement = mirror.place(2, ids[:, ::-1])
    assert len(placement.new_slots) == 0
    cache.apply(placement, ids[:, ::-1])


def test_new_rows_come_in_order_of_their_ids_and_slots():
    placement = Mirror(10).place(1, np.array([30, 10, 20]))
    assert placement.new_slots.tolist() == [0, 1, 2]
    assert np.array([30, 10, 20])[placement.new_places].tolist() == [10, 20, 30]


def test_the_least_recently_used_leaves_first():
    mirror = Mirror(3)
    mirror.place(1, np.array([1, 2, 3]))
    mirror.place(2, np.array([1]))
    mirror.place(3, np.array([4]))
    assert mirror.slot(2) is None and mirror.slot(1) is not None and mirror.slot(3) is not None


def test_a_batch_that_just_fits_evicts_everything_but_itself():
    mirror, cache = Mirror(4), _Cache(4)
    for sequence, ids in enumerate(([1, 2, 3, 4], [4, 5, 6, 7], [7, 6, 1, 4]), 1):
        cache.apply(mirror.place(sequence, np.array(ids)), np.array(ids))


def test_a_batch_too_large_is_refused_and_changes_nothing():
    mirror = Mirror(2)
    mirror.place(1, np.array([1, 2]))
    with pytest.raises(ConfigError, match="3 rows"):
        mirror.place(2, np.array([3, 4, 5]))
    assert mirror.slot(1) is not None and len(mirror) == 2


@pytest.mark.parametrize("seed", range(20))
def test_mirror_and_cache_agree_through_random_batches_and_outages(seed):
    rng = random.Random(seed)
    capacity = rng.choice([8, 17, 64])
    mirror, cache = Mirror(capacity), _Cache(capacity)
    sequence = applied = 0
    waiting = []  # placed and not yet applied
    for _ in range(400):
        event = rng.random()
        if event < 0.6:
            sequence += 1
            newest = sequence // 2
            ids = np.array([[rng.randint(max(0, newest - 80), newest) for _ in range(4)] for _ in range(2)])
            waiting.append((sequence, mirror.place(sequence, ids), ids))
        elif event < 0.9 and waiting:
            applied, placement, ids = waiting.pop(0)
            cache.apply(placement, ids)
            if rng.random() < 0.5:
                mirror.confirm(applied)
        elif event >= 0.9:
            # An outage: whatever has not been applied is lost.
            mirror.roll_back(applied)
            waiting.clear()
            sequence = applied
        assert len(mirror) <= capacity


def test_an_empty_cache_names_the_setting():
    with pytest.raises(ConfigError, match="cache_bytes"):
        Mirror(0)
