"""Every row that a transition of the replay refers to is there, however streams differ in speed; nothing else stays."""

from collections import deque

import numpy as np
import pytest

from longhaul import codec, row_store
from longhaul.errors import Corruption
from longhaul.row_store import RowStore

ROW_BYTES = 3
PACKER = codec.CellPacker()


def _cell(row_id, row=b"abc"):
    return PACKER.pack(row_id, row)


def _held(store, row_ids):
    return [row_id for row_id, cell in zip(row_ids, store.get(list(row_ids))) if cell is not None]


def test_a_row_comes_back_as_it_was_packed_and_an_unknown_one_is_none():
    store = RowStore(10, ROW_BYTES, 2)
    feed = store.open(1, 4, 0)
    feed.put([0, 0], [_cell(7), _cell(8, b"xyz")])
    assert store.get([8, 9, 7]) == [_cell(8, b"xyz"), None, _cell(7)]
    assert (len(store), store.stored_bytes) == (2, 2 * len(_cell(7)))
    assert store.holds([7, 8]) and not store.holds([7, 9])


@pytest.mark.parametrize("capacity", [1, 20, 100])
def test_rows_live_as_long_as_the_transitions_that_refer_to_them(capacity):
    """Against a model: a replay that lets its oldest go, filled by streams of very different speed."""
    rng = np.random.default_rng(capacity)
    streams, keep, pending = 5, 6, 8
    store = RowStore(capacity, ROW_BYTES, 4)
    feeds = [store.open(1, keep, pending) for _ in range(streams)]
    newest = [deque(maxlen=keep) for _ in range(streams)]
    written = [0] * streams  # and not yet counted
    replay = deque(maxlen=capacity)
    for row_id in range(4000):
        stream = int(rng.choice(streams, p=[0.6, 0.3, 0.08, 0.015, 0.005]))
        newest[stream].append(row_id)
        feeds[stream].put([0], [_cell(row_id)])
        if len(newest[stream]) == keep:
            replay.append(tuple(rng.choice(list(newest[stream]), 4)))
            written[stream] += 1
        if written[stream] > int(rng.integers(0, pending)):
            feeds[stream].settle(written[stream])
            written[stream] = 0
        needed = {row for item in replay for row in item}
        assert len(_held(store, needed)) == len(needed)
    # A row comes with each transition, so little else is held than the replay's.
    assert len(store) <= capacity + streams * (keep + 3 * pending)


def test_an_actor_that_writes_no_transitions_does_not_fill_memory():
    store = RowStore(10, ROW_BYTES, 4)
    feed = store.open(1, 6, 5)
    for row_id in range(1000):
        feed.put([0], [_cell(row_id)])
        feed.settle(0)
    assert len(store) <= 4 * (10 + 5) + 6


def test_a_row_sent_twice_after_a_cut_lives_by_its_later_pin():
    store = RowStore(5, ROW_BYTES, 2)
    first = store.open(1, 3, 0)
    first.put([0, 0], [_cell(1), _cell(2)])
    first.close()
    second = store.open(1, 3, 0)
    second.put([0], [_cell(1, b"new")])  # what came first stays
    assert store.get([1]) == [_cell(1)]
    other = store.open(1, 3, 0)
    for i in range(20):
        other.put([0], [_cell(100 + i)])
        other.settle(1)
    assert _held(store, [1, 2]) == [1]
    for i in range(3):
        second.put([0], [_cell(200 + i)])
        second.settle(0)
    assert _held(store, [1]) == [1]
    for i in range(20, 30):
        other.put([0], [_cell(100 + i)])
        other.settle(1)
    assert _held(store, [1]) == []


def test_two_streams_that_hold_one_row_both_pin_it():
    store = RowStore(1, ROW_BYTES, 2)
    feeds = [store.open(1, 1, 0) for _ in range(2)]
    for feed in feeds:
        feed.put([0], [_cell(1)])
    feeds[0].close()
    feeds[0] = store.open(1, 1, 0)
    for i in range(10):
        feeds[0].put([0], [_cell(10 + i)])
        feeds[0].settle(1)
    assert _held(store, [1]) == [1]


@pytest.mark.parametrize(
    "places,cells",
    [
        ([0], [_cell(1, b"abcd")]),
        ([0], [b"short"]),
        ([0], [bytes(8) + b"\1broken"]),
        ([2], [_cell(1)]),
        ([-1], [_cell(1)]),
        ([0, 0], [_cell(1)]),
    ],
)
def test_what_is_no_row_is_refused_with_all_that_came_along(places, cells):
    store = RowStore(10, ROW_BYTES, 2)
    feed = store.open(2, 4, 0)
    with pytest.raises(Corruption):
        feed.put([*places, 0], [*cells, _cell(5)])
    assert len(store) == 0


@pytest.mark.parametrize("streams,keep_rows", [(0, 1), (1, 0), (10**6, 10**6)])
def test_figures_that_can_not_be_are_refused(streams, keep_rows):
    with pytest.raises(Corruption):
        RowStore(10, ROW_BYTES, 2).open(streams, keep_rows, 1)


def test_saved_rows_come_back_and_another_file_is_refused(tmp_path):
    rows = {7: _cell(7), 2**62: _cell(2**62, bytes(range(3)))}
    row_store.save_rows(tmp_path / "rows.npz", rows)
    assert row_store.load_rows(tmp_path / "rows.npz") == rows
    row_store.save_rows(tmp_path / "none.npz", {})
    assert row_store.load_rows(tmp_path / "none.npz") == {}
    (tmp_path / "other.npz").write_bytes(b"no rows")
    with pytest.raises(Corruption, match=r"other\.npz"):
        row_store.load_rows(tmp_path / "other.npz")
