"""The device cache: exact contents, a constant number of programs, and no memory shared with who hands rows over."""

import zlib

import jax
import numpy as np
import pytest

from longhaul import device_cache
from longhaul.device_cache import DeviceCache, capacity_rows
from longhaul.errors import ConfigError, Corruption
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SPEC = ExperienceSpec("Test-v0", (5,), "float32", stack=2, num_actions=2, n_step=1, gamma=0.9)  # rows of 20 bytes


def slots_of(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("row_shape, row_dtype", [((5,), "float32"), ((3, 4), "uint8"), ((2, 2, 3), "int16")])
def test_contents_are_what_was_written_last(row_shape, row_dtype):
    rng = np.random.default_rng(0)
    cache, mirror = DeviceCache(100, row_shape, row_dtype), np.zeros((100, *row_shape), row_dtype)
    for _ in range(30):
        slots = rng.permutation(100)[: rng.integers(0, 60)].astype(np.int32)
        rows = rng.integers(0, 200, (len(slots), *row_shape)).astype(row_dtype)
        mirror[slots] = rows
        cache.insert(slots, rows)
        asked = rng.integers(0, 100, rng.integers(0, 50))
        np.testing.assert_array_equal(cache.read(asked), mirror[asked])
        assert cache.crc32(asked) == zlib.crc32(mirror[asked].tobytes())
    assert cache.read(asked).dtype == row_dtype
    np.testing.assert_array_equal(cache.array, mirror)


def test_the_checksum_goes_by_the_order_of_slots():
    cache = DeviceCache(4, (5,), "float32")
    cache.insert(slots_of(0, 1), np.arange(10, dtype=np.float32).reshape(2, 5))
    assert cache.crc32(slots_of(0, 1)) != cache.crc32(slots_of(1, 0))
    assert cache.crc32(slots_of()) == zlib.crc32(b"")


def test_ragged_arrivals_compile_a_program_per_power_of_two():
    cache = DeviceCache(300, (2,), "uint8")
    for count in range(1, 257):
        cache.insert(np.arange(count, dtype=np.int32), np.full((count, 2), count % 256, np.uint8))
    assert cache.compilations == 5  # 16, 32, 64, 128, 256


def test_what_is_compiled_beforehand_need_not_be_again_and_leaves_the_cache_as_it_is():
    cache = DeviceCache(300, (2,), "uint8")
    cache.compile(250, 32)
    before = cache.compilations
    assert before == 5 + 2  # 16, 32, 64, 128, 256, and 16, 32
    assert not cache.array.any() and not cache.is_filled(slots_of(0))
    for count in range(1, 257):
        cache.insert(np.arange(count, dtype=np.int32), np.full((count, 2), count % 256, np.uint8))
        cache.read(np.arange(min(count, 32)))
    assert cache.compilations == before


def test_sizes_that_cost_much_memory_are_left_for_later(monkeypatch):
    monkeypatch.setattr(device_cache, "_MOST_COMPILED_BYTES", 100)
    cache = DeviceCache(300, (2,), "uint8")
    cache.compile(4096, 4096)
    assert cache.compilations == 2 * 2  # 16 and 32 rows


def test_more_rows_than_one_piece_holds_all_arrive():
    cache, count = DeviceCache(10_000, (1,), "int32"), 9_000
    cache.insert(np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)[:, None])
    np.testing.assert_array_equal(cache.read(np.arange(count))[:, 0], np.arange(count))
    np.testing.assert_array_equal(cache.read(np.arange(count, 10_000)), 0)


def test_rows_handed_over_may_be_overwritten_at_once():
    # Sizes from a bucket's exact fit to large enough that a device would read them where they are.
    for count in (16, 64, 4096):
        cache = DeviceCache(4096, (64,), "float32")
        slots, rows = np.arange(count, dtype=np.int32), np.ones((count, 64), np.float32)
        cache.insert(slots, rows)
        rows[:] = -1
        slots[:] = 0
        np.testing.assert_array_equal(cache.read(np.arange(count)), 1)


def test_what_is_read_is_the_readers_own():
    cache = DeviceCache(4, (5,), "float32")
    cache.insert(slots_of(0), np.ones((1, 5), np.float32))
    read = cache.read(slots_of(0))
    read[:] = 7
    cache.insert(slots_of(1), np.full((1, 5), 3, np.float32))
    np.testing.assert_array_equal(cache.read(slots_of(0)), 1)
    np.testing.assert_array_equal(read, 7)


@pytest.mark.parametrize("slots", [(0, 4), (-1, 1), (2, 2)])
def test_slots_out_of_bounds_or_named_twice_are_refused(slots):
    cache = DeviceCache(4, (5,), "float32")
    with pytest.raises(Corruption):
        cache.insert(slots_of(*slots), np.ones((2, 5), np.float32))
    np.testing.assert_array_equal(cache.array, 0)
    if min(slots) < 0 or max(slots) >= 4:
        with pytest.raises(Corruption):
            cache.read(slots_of(*slots))


def test_it_knows_which_slots_were_filled():
    cache = DeviceCache(4, (5,), "float32")
    cache.insert(slots_of(0, 2), np.ones((2, 5), np.float32))
    assert cache.is_filled(slots_of(0, 2, 0)) and not cache.is_filled(slots_of(0, 1))
    cache.forget()
    assert not cache.is_filled(slots_of(0))


def test_inserting_makes_no_transfer_that_is_not_meant():
    cache = DeviceCache(64, (5,), "float32")
    with jax.transfer_guard("disallow"):
        for count in (3, 20):
            cache.insert(np.arange(count, dtype=np.int32), np.ones((count, 5), np.float32))
        np.testing.assert_array_equal(cache.read(slots_of(0, 19)), 1)


def test_capacity_comes_from_the_budget_and_stops_where_replay_does():
    assert capacity_rows(2000, SPEC, rows_per_batch=50, max_useful_rows=1000) == 100
    assert capacity_rows(2019, SPEC, rows_per_batch=50, max_useful_rows=1000) == 100
    assert capacity_rows(10**9, SPEC, rows_per_batch=50, max_useful_rows=1000) == 1000
    assert capacity_rows(10**9, SPEC, rows_per_batch=5000, max_useful_rows=1000) == 5000
    with pytest.raises(ConfigError) as refused:
        capacity_rows(999, SPEC, rows_per_batch=50, max_useful_rows=1000)
    assert "config.learner.cache_bytes is 999" in str(refused.value) and "at least 1000" in str(refused.value)
