"""The gateway's end of an actor's stream, with a real Reverb: written once, with its rows, or refused by name."""

import threading

import numpy as np
import pytest

pytest.importorskip("reverb")

from longhaul import buffer, codec, intake
from longhaul.errors import Corruption, Stopped
from longhaul.proto import longhaul_pb2 as pb
from longhaul.records import MOST_TRANSITIONS, RecordPacker, record_dtype, unpack_records
from longhaul.row_store import RowStore
from longhaul.types import ExperienceSpec, NStepTransition
from tests.site import small_config

SPEC = ExperienceSpec("Test-v0", (3,), "uint8", stack=2, num_actions=4, n_step=1, gamma=0.9)
CELLS = codec.CellPacker()
RECORDS = RecordPacker(SPEC.stack)


class Site:
    def __init__(self, **replay):
        self.table = buffer.ReplayServer(SPEC, small_config(capacity=1000, **replay).replay)
        self.rows = RowStore(1000, SPEC.row_bytes, SPEC.rows_per_item)
        self.accounts = intake.Accounts()
        self.gone = threading.Event()

    def connect(self, writer_id=1, streams=1, keep_rows=8):
        first = pb.InsertRequest(writer_id=writer_id, streams=streams, keep_rows=keep_rows)
        return intake.Intake(first, self.table, self.rows, self.accounts, self.gone.is_set)


@pytest.fixture
def site():
    made = Site()
    yield made
    made.table.stop()


def _record(number, action=1, n_step_return=None, discount=0.9, priority=1.0, row_ids=None):
    ids = row_ids or (number, number, number, number + 1)
    value = float(number) if n_step_return is None else n_step_return
    return RECORDS.pack(NStepTransition(ids[:2], ids[2:], action, value, discount), 3, priority)


def _message(first, records, row_ids=()):
    cells = [CELLS.pack(row_id, bytes([row_id % 256] * 3)) for row_id in row_ids]
    places = np.zeros(len(cells), "<i4").tobytes()
    return pb.InsertRequest(first_transition=first, transitions=b"".join(records), places=places, cells=cells)


def test_a_record_comes_back_as_it_was_packed():
    data = _record(7, action=2, n_step_return=-1.5, discount=0.0, priority=2.5) + _record(8)
    record, other = unpack_records(data, SPEC.stack, SPEC.num_actions)
    assert record.dtype == record_dtype(2) and len(data) == 2 * record.dtype.itemsize
    step = record["step"]
    assert (step["action"], step["n_step_return"], step["discount"], step["policy_version"]) == (2, -1.5, 0.0, 3)
    assert step["row_ids"].tolist() == [7, 7, 7, 8] and record["priority"] == 2.5
    assert other["step"]["n_step_return"] == 8


def test_an_answer_means_that_all_is_in_the_replay(site):
    taking = site.connect()
    assert taking.take(_message(0, [], [0, 1])).written == 0
    for number in range(5):
        answer = taking.take(_message(3 * number, [_record(number)] * 3, [number + 2]))
        assert answer.written == 3 * (number + 1) == site.table.info()[1]
    taking.close()


def test_a_transition_enters_with_its_actors_priority_or_with_the_highest_so_far():
    def priorities(**replay):
        """Of transitions 0 and 1, then, after the learner gave the first one 5 and the second one 2, of number 2."""
        site = Site(**replay)
        try:
            taking = site.connect()
            taking.take(_message(0, [_record(0, priority=0.25), _record(1, priority=0.5)], range(3)))
            sampler = buffer.ReplaySampler(site.table, 64, ahead=1)
            drawn = sampler.draw(threading.Event())
            before = dict(zip(drawn.returns.tolist(), drawn.priorities.tolist()))
            keys = dict(zip(drawn.returns.tolist(), drawn.keys.tolist()))
            site.table.update_priorities(np.array([keys[0.0], keys[1.0]], np.uint64), np.array([5.0, 2.0]))
            taking.take(_message(2, [_record(2, priority=0.75)], [3]))
            taking.close()
            sampler.draw(threading.Event())  # some of it drawn ahead
            drawn = sampler.draw(threading.Event())
            return before, dict(zip(drawn.returns.tolist(), drawn.priorities.tolist()))
        finally:
            site.table.stop()

    assert priorities() == ({0.0: 0.25, 1.0: 0.5}, {0.0: 5.0, 1.0: 2.0, 2.0: 0.75})
    assert priorities(initial_priority="max") == ({0.0: 1.0, 1.0: 1.0}, {0.0: 5.0, 1.0: 2.0, 2.0: 5.0})


def test_what_is_sent_again_after_a_cut_is_written_once(site):
    first = site.connect()
    first.take(_message(0, [_record(0), _record(1), _record(2)], range(4)))
    first.close()
    again = site.connect()
    # Cut into messages anew, the first two of them known.
    assert again.take(_message(0, [_record(0), _record(1)], range(3))).written == 3
    assert again.take(_message(2, [_record(2), _record(3)], [3, 4])).written == 4
    other = site.connect(writer_id=2)
    assert other.take(_message(0, [_record(100)], [100, 101])).written == 1
    assert site.table.info()[1] == 5
    drawn = buffer.ReplaySampler(site.table, 200).draw(threading.Event())
    assert set(drawn.returns.tolist()) == {0.0, 1.0, 2.0, 3.0, 100.0}


def test_two_connections_of_one_actor_at_once_write_once(site):
    messages = [_message(10 * i, [_record(j) for j in range(10 * i, 10 * i + 10)]) for i in range(40)]
    rows = _message(0, [], range(401))
    connections = [site.connect(keep_rows=500) for _ in range(2)]

    def send(taking):
        taking.take(rows)
        for message in messages:
            taking.take(message)

    threads = [threading.Thread(target=send, args=(taking,)) for taking in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert site.table.info()[1] == 400


@pytest.mark.parametrize(
    "record,word",
    [
        (_record(0, action=4), "action is none of 4"),
        (_record(0, action=-1), "action is none of 4"),
        (_record(0, priority=np.inf), "priority is not finite"),
        (_record(0, priority=np.nan), "priority is not finite"),
        (_record(0, priority=-1.0), "is negative"),
        (_record(0, n_step_return=np.nan), "return or discount is not finite"),
        (_record(0, discount=np.inf), "return or discount is not finite"),
        (_record(0)[:-1], "are no records"),
        (_record(0, row_ids=(0, 0, 0, 77)), "rows that have not come"),
        (_record(0) * (MOST_TRANSITIONS + 1), "at most 256"),
    ],
)
def test_what_can_not_be_is_refused_with_all_that_came_along(site, record, word):
    taking = site.connect()
    with pytest.raises(Corruption, match=word):
        taking.take(_message(0, [_record(0), record], [0, 1]))
    assert site.table.info()[1] == 0
    # Others are not harmed.
    assert site.connect(writer_id=2).take(_message(0, [_record(0)], [0, 1])).written == 1


def test_places_that_are_no_numbers_are_refused(site):
    message = _message(0, [], [0])
    message.places += b"x"
    with pytest.raises(Corruption, match="no list of streams"):
        site.connect().take(message)


def test_an_actor_that_is_gone_is_not_waited_for(site, monkeypatch):
    taking = site.connect()
    taking.take(_message(0, [], [0, 1]))
    monkeypatch.setattr(taking._items, "flush", lambda unconfirmed, timeout_s: False)  # a replay that takes nothing
    site.gone.set()
    with pytest.raises(Stopped):
        taking.take(_message(0, [_record(0)]))


def test_it_is_seen_whether_an_actor_has_a_learners_weights(site):
    taking = site.connect()
    data = RECORDS.pack(NStepTransition((0, 0), (0, 1), 1, 0.0, 0.9), 0, 1.0)
    taking.take(_message(0, [data], [0, 1]))
    assert not site.accounts.learned  # version 0: random ones
    taking.take(_message(1, [_record(1)], [2]))
    assert site.accounts.learned
    taking.close()


def test_accounts_are_kept_of_the_last_actors_only(monkeypatch):
    monkeypatch.setattr(intake, "_MOST_WRITERS", 3)
    accounts = intake.Accounts()
    accounts.of(0).written = 5
    for writer_id in (1, 2, 0, 3):
        accounts.of(writer_id)
    assert accounts.of(0).written == 5
    accounts.of(1).written = 1
    for writer_id in (2, 3, 4):
        accounts.of(writer_id)
    assert accounts.of(1).written == 0
