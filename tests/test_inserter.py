"""The actors' way in, with a real gateway and a real Reverb: rows first, nothing lost unnoticed, nothing blocked."""

import shutil
import threading

import numpy as np
import pytest

pytest.importorskip("reverb")

from longhaul import buffer, codec, row_store
from longhaul.errors import LonghaulError, Refused
from longhaul.inserter import Inserter
from longhaul.site_client import SiteClient
from longhaul.types import ExperienceSpec, NStepTransition
from tests.site import eventually, running, small_config

VECTOR = ExperienceSpec("Test-v0", (3,), "float32", stack=1, num_actions=4, n_step=3, gamma=0.9)
FRAMES = ExperienceSpec("Test-v0", (84, 84), "uint8", stack=4, num_actions=4, n_step=3, gamma=0.9)


def _row(spec, row_id):
    return np.random.default_rng(row_id).integers(0, 200, spec.row_shape).astype(spec.row_dtype)


def _inserter(site, spec=VECTOR, streams=1, pending=256, timeout_s=5.0):
    site.announce(spec)
    return Inserter(site, spec, streams, 16, pending, timeout_s)


def _step(writer, spec, row_id, stream=0, back=1):
    """One row, and the 1-step transition from `back` rows before; its return says which it is."""
    writer.add_row(stream, row_id, _row(spec, row_id))
    return writer.add_transition(stream, NStepTransition((row_id - back,), (row_id,), 1, float(row_id), 0.9), 3, 1.0)


def test_whatever_is_drawn_has_its_rows_from_the_first_draw_on():
    with running(small_config()) as (gateway, site):
        writer = _inserter(site, streams=2)
        for stream in range(2):
            writer.add_row(stream, 1000 * stream, _row(VECTOR, 1000 * stream))
        sampler = None
        for i in range(1, 400):
            for stream in range(2):
                assert _step(writer, VECTOR, 1000 * stream + i, stream)
            if i == 20:
                eventually(lambda: gateway._table.info()[0] > 0)
                sampler = buffer.ReplaySampler(gateway._table, 8, ahead=1)
            if sampler is not None and i % 10 == 0:
                drawn = sampler.draw(threading.Event())
                cells = gateway._rows.get(drawn.row_ids.reshape(-1).tolist())
                rows = np.frombuffer(codec.unpack_cells(cells, VECTOR.row_bytes), np.float32).reshape(-1, 2, 3)
                for newest, (before, after) in zip(drawn.returns, rows):
                    np.testing.assert_array_equal(after, _row(VECTOR, int(newest)))
                    np.testing.assert_array_equal(before, _row(VECTOR, int(newest) - 1))
        writer.close()
        assert gateway._table.info()[1] == writer.counters["written_items"] == 2 * 399
        assert writer.counters["dropped_items"] == 0


def test_transitions_whose_rows_are_all_stored_already_do_not_wait_for_the_next_row():
    with running(small_config()) as (gateway, site):
        writer = _inserter(site)
        writer.add_row(0, 0, _row(VECTOR, 0))
        for count in range(1, 6):
            if count == 1:
                assert _step(writer, VECTOR, 1)
            else:
                assert writer.add_transition(0, NStepTransition((0,), (1,), 0, 1.0, 0.9), 0, 1.0)
            eventually(lambda count=count: gateway._table.info()[1] == count)
        writer.close()


@pytest.mark.parametrize(
    "priority,n_step_return",
    [(np.nan, 1.0), (np.inf, 1.0), (-1.0, 1.0), (1e39, 1.0), (1.0, np.nan), (1.0, np.inf), (1.0, -1e39)],
)
def test_what_would_poison_the_table_is_refused_and_counted(priority, n_step_return):
    with running(small_config()) as (_, site):
        writer = _inserter(site)
        for row_id in (1, 2):
            writer.add_row(0, row_id, _row(VECTOR, row_id))
        assert not writer.add_transition(0, NStepTransition((1,), (2,), 0, n_step_return, 0.9), 0, priority)
        assert writer.counters["refused_priorities"] == 1
        writer.close()
        assert writer.counters["written_items"] == 0


def test_a_dead_node_never_blocks_the_writer_and_losses_are_counted():
    with running(small_config()) as (gateway, site):
        writer = _inserter(site, pending=8, timeout_s=0.2)
        writer.add_row(0, 0, _row(VECTOR, 0))
        assert _step(writer, VECTOR, 1)
        eventually(lambda: writer.counters["written_items"] == 1)
        port = gateway.port
        gateway.stop(0.1)
        results = [_step(writer, VECTOR, i) for i in range(2, 102)]
        assert results.count(False) == writer.counters["dropped_items"] > 80
        with running(small_config(), port) as (other, _):
            site.announce(VECTOR)
            # A transition may refer to rows that were handed over before the change of node.
            eventually(lambda: _step(writer, VECTOR, 102, back=1) or None)
            eventually(lambda: writer.counters["written_items"] == 2)
            assert other._table.info()[1] == 1
            assert _held(other, [101, 102])
            assert writer.counters["reconnects"] == 1
            writer.close()


def _held(gateway, row_ids):
    return None not in gateway._rows.get(row_ids)


def test_a_cut_connection_of_rows_loses_and_doubles_nothing():
    with running(small_config()) as (gateway, site):
        writer = _inserter(site)
        writer.add_row(0, 0, _row(VECTOR, 0))
        for i in range(1, 1001):
            assert _step(writer, VECTOR, i)
            if i % 200 == 0:
                eventually(lambda: writer._call is not None)
                writer._call.cancel()
        eventually(lambda: writer.counters["written_items"] == 1000)
        writer.close()
        assert gateway._table.info()[1] == 1000
        assert writer.counters["reconnects"] >= 1 and writer.counters["dropped_items"] == 0
        assert _held(gateway, list(range(1001)))


def test_after_an_outage_in_which_the_site_has_let_go_of_its_rows_an_actor_goes_on():
    with running(small_config(capacity=20)) as (gateway, site):
        writer = _inserter(site)
        writer.add_row(0, 0, _row(VECTOR, 0))
        for i in range(1, 11):
            assert _step(writer, VECTOR, i)
        eventually(lambda: writer.counters["written_items"] == 10)
        healed, insert = threading.Event(), site.insert
        site.insert = lambda requests: healed.wait(30) and insert(requests)
        writer._call.cancel()
        # The first two refer to rows that are stored already, the last to one that is not.
        for i in (9, 10):
            assert writer.add_transition(0, NStepTransition((i - 1,), (i,), 1, float(i), 0.9), 3, 1.0)
        assert _step(writer, VECTOR, 11)
        other_site = SiteClient(f"127.0.0.1:{gateway.port}", "actor", threading.Event())
        other = _inserter(other_site)
        other.add_row(0, 1000, _row(VECTOR, 1000))
        for i in range(1001, 2200):
            assert _step(other, VECTOR, i)
        eventually(lambda: not _held(gateway, [9]) and other.counters["written_items"] == 1199)
        healed.set()
        eventually(lambda: writer.counters["written_items"] == 13)
        assert _step(writer, VECTOR, 12)
        writer.close()
        assert gateway._table.info()[1] == 14 + 1199
        assert _held(gateway, [8, 9, 10, 11, 12])
        other.close()
        other_site.close()


def test_rows_are_stored_once_however_many_transitions_refer_to_them():
    with running(small_config(capacity=5000)) as (gateway, site):
        writer = _inserter(site, FRAMES)
        rng = np.random.default_rng(0)
        for row_id in range(3000):
            writer.add_row(0, row_id, rng.integers(0, 255, (84, 84), dtype=np.uint8))
            if row_id >= 6:
                ids = tuple(range(row_id - 6, row_id + 1))
                assert writer.add_transition(0, NStepTransition(ids[:4], ids[3:], 0, 1.0, 0.9), 0, 1.0)
        writer.close()
        # Incompressible rows: once each they are 21 MB, eight times each 169 MB.
        assert len(gateway._rows) == 3000
        assert gateway._rows.stored_bytes < 1.01 * 3000 * 7056


def test_an_unknown_row_or_a_row_of_another_size_is_one_clear_error():
    with running(small_config()) as (_, site):
        writer = _inserter(site)
        with pytest.raises(LonghaulError, match="spec says 12"):
            writer.add_row(0, 1, np.zeros(5, np.float32))
        writer.add_row(0, 1, _row(VECTOR, 1))
        with pytest.raises(LonghaulError, match="row 7 is not among"):
            writer.add_transition(0, NStepTransition((1,), (7,), 0, 1.0, 0.9), 0, 1.0)
        writer.close()


def test_rows_that_can_not_be_are_refused_counted_and_harm_nobody_else():
    with running(small_config()) as (gateway, site):
        good = _inserter(site)
        good.add_row(0, 0, _row(VECTOR, 0))
        other_site = SiteClient(f"127.0.0.1:{gateway.port}", "actor", threading.Event())
        bad = _inserter(other_site)
        bad._cells.pack = lambda row_id, row: row_id.to_bytes(8, "little") + b"\1damaged"
        for row_id in (10, 11):
            bad.add_row(0, row_id, _row(VECTOR, row_id))
        bad.add_transition(0, NStepTransition((10,), (11,), 0, 1.0, 0.9), 0, 1.0)

        def told():
            try:
                bad.add_transition(0, NStepTransition((10,), (11,), 0, 1.0, 0.9), 0, 1.0)
            except Refused as error:
                return "a row" in str(error)
            return False

        eventually(told)
        assert gateway.read_stats()["corrupt_messages"] == 1
        for i in range(1, 50):
            assert _step(good, VECTOR, i)
        good.close()
        assert gateway._table.info()[1] == 49
        bad.close()
        other_site.close()


def test_a_checkpoint_holds_the_table_and_every_row_it_refers_to():
    with running(small_config(capacity=50)) as (gateway, site):
        writer = _inserter(site)
        writer.add_row(0, 0, _row(VECTOR, 0))
        for i in range(1, 200):
            assert _step(writer, VECTOR, i)
        writer.close()
        folder = gateway.checkpoint()
        rows = row_store.load_rows(folder / "rows.npz")
        assert set(range(149, 200)) <= set(rows)
        cells = [rows[i] for i in range(149, 200)]
        assert codec.unpack_cells(cells, 12) == b"".join(_row(VECTOR, i).tobytes() for i in range(149, 200))
        assert [path for path in folder.iterdir() if path.name != "rows.npz"]  # Reverb's own
        shutil.rmtree(folder.parent)
