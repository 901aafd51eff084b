"""Gateway and link together, over real gRPC and real Reverb: rows are right, credits hold, outages heal."""

import collections
import threading
import time
import types
import zlib

import numpy as np
import pytest

pytest.importorskip("reverb")

from longhaul import buffer, session
from longhaul.errors import DeadlineExceeded, MismatchError, Refused, Stopped
from longhaul.gateway import Gateway
from longhaul.link import LinkClient
from longhaul.proto import longhaul_pb2 as pb
from longhaul.records import RecordPacker, record_dtype
from longhaul.relay import Relay
from longhaul.site_client import SiteClient
from longhaul.types import ExperienceSpec, NStepTransition, Snapshot
from tests.site import SPEC, CheckingLearner, Writer, eventually, linked, running, small_config


@pytest.fixture
def site():
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client)
        writer.write(300)
        yield c, gateway, writer
        writer.close()


def test_every_row_of_every_transition_is_right_and_crosses_once(site):
    c, gateway, _ = site
    with linked(f"127.0.0.1:{gateway.port}", c, minibatches=3) as link:
        learner = CheckingLearner(link, 2000)
        for _ in range(60):
            batch = learner.step()
            assert batch.slots.shape == (3, 16, 8) and batch.stats["policy_version"] == 7
        assert learner.new_rows == len({i + k for i in map(int, learner.drawn) for k in range(-3, 4)})
        assert link.read_stats()["rows_received"] == learner.new_rows


def test_rows_stay_right_when_every_batch_evicts(site):
    c, gateway, _ = site
    # 16 transitions need 112 distinct rows at most; the smallest cache taken is 16 * 8.
    with linked(f"127.0.0.1:{gateway.port}", c, cache_rows=128) as link:
        learner = CheckingLearner(link, 128)
        for _ in range(100):
            learner.step()
        assert learner.new_rows > 1000


def test_no_more_batches_are_in_flight_than_the_window(site):
    c, gateway, _ = site
    with linked(f"127.0.0.1:{gateway.port}", c) as link:
        learner = CheckingLearner(link, 2000)
        learner.take()
        time.sleep(0.5)
        assert gateway.read_stats()["batches_in_flight"] == gateway.read_stats()["window"] == 2


def test_each_credit_is_held_back_from_its_own_ack_on(site, monkeypatch):
    _, gateway, _ = site
    clock = types.SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    opened = pb.Open(batch_size=4, minibatches=1, cache_rows=2000)
    own = session.Session(opened, gateway._table, gateway._rows, collections.Counter())
    monkeypatch.setattr(session, "time", clock)
    due_s = []

    class Closed(threading.Event):
        def wait(self, timeout=None):
            due_s.append(clock.now_s + timeout)
            return False

    try:
        closed = Closed()
        own._window = 3
        batches = []
        for _ in range(3):
            own.wait_credit(closed)
            batches.append(own.make_batch(own.sampler.draw(threading.Event()))[0])
        assert due_s == [100.0] * 3  # no Ack has freed them
        due_s.clear()
        priorities = np.ones(4, np.float32).tobytes()
        for batch, clock.now_s in zip(batches, (100.0, 100.1, 100.2)):
            ack = pb.Ack(sequence=batch.sequence, window=3, priorities=priorities, width=4, hold_s=0.25)
            own.apply_ack(ack)
            own.apply_ack(ack)  # a repeated one gives no credit
        for _ in range(3):
            own.wait_credit(closed)
        assert due_s == pytest.approx([100.25, 100.35, 100.45])
    finally:
        monkeypatch.undo()
        own.close()


def test_what_a_batch_spends_at_the_site_spaces_out_the_draws(site, monkeypatch):
    _, gateway, _ = site
    clock = types.SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    opened = pb.Open(batch_size=4, minibatches=1, cache_rows=2000)
    own = session.Session(opened, gateway._table, gateway._rows, collections.Counter())
    priorities = np.ones(4, np.float32).tobytes()
    monkeypatch.setattr(session, "time", clock)

    class Closed(threading.Event):
        def wait(self, timeout=None):
            clock.now_s += timeout
            return False

    def serve(count, period_s, at_site_s):
        """Batches of a period, as drawn, sent and acknowledged; returns when the draws began."""
        began_s = []
        for number in range(count):
            clock.now_s = max(clock.now_s, 1000.0 * count + number * period_s)
            own.wait_credit(Closed())
            own.wait_pace(Closed())
            began_s.append(clock.now_s)
            batch, _ = own.make_batch(own.sampler.draw(threading.Event()))
            own._in_flight[batch.sequence].drawn_time_s = clock.now_s
            clock.now_s += at_site_s
            assert own.note_sent(batch.sequence) == pytest.approx(at_site_s)
            clock.now_s += 0.05  # the path's, no part of it
            own.apply_ack(pb.Ack(sequence=batch.sequence, window=1, priorities=priorities, width=4))
            # Back in time: another batch is on its way meanwhile.
            clock.now_s = began_s[-1]
            own._ack_times_s.clear()
        return np.array(began_s)

    try:
        own._window = 1
        np.testing.assert_allclose(np.diff(serve(64, 0.01, 0.012)), 0.01)
        assert session.figures(own)["draw_period_s"] == 0.0
        assert np.diff(serve(640, 0.01, 0.024))[-100:].mean() == pytest.approx(0.016, rel=0.03)
        assert session.figures(own)["draw_period_s"] == pytest.approx(0.016, rel=0.03)
        assert own.note_sent(12_345) == 0.0  # rolled back meanwhile
    finally:
        monkeypatch.undo()
        own.close()
    closed = threading.Event()
    closed.set()
    with pytest.raises(Stopped):
        own.pace.period_s = 30.0
        own.wait_pace(closed)


def test_acknowledged_priorities_change_what_is_drawn(site):
    c, gateway, _ = site
    with linked(f"127.0.0.1:{gateway.port}", c, batch_size=64) as link:
        learner = CheckingLearner(link, 2000)
        for _ in range(40):
            batch = learner.take()
            link.ack(batch.sequence, np.where(batch.returns == 100.0, 1e6, 1e-3).astype(np.float32))
        eventually(lambda: np.mean(learner.step(1e6).returns == 100.0) > 0.9)


def test_priorities_that_are_no_numbers_are_refused_counted_and_harm_nobody(site):
    c, gateway, _ = site
    with linked(f"127.0.0.1:{gateway.port}", c, batch_size=4) as link:
        learner = CheckingLearner(link, 2000)
        batch = learner.take()
        link.ack(batch.sequence, np.array([[np.nan, np.inf, -1.0, 2.0]], np.float32))
        for _ in range(20):
            assert np.isfinite(learner.step().probabilities).all()
        assert gateway.read_stats()["refused_priorities"] == 3


def test_a_priority_list_of_the_wrong_length_ends_only_that_stream(site):
    c, gateway, _ = site
    address = f"127.0.0.1:{gateway.port}"
    with linked(address, c) as link:
        learner = CheckingLearner(link, 2000)
        batch = learner.take()
        link.ack(batch.sequence, np.ones((1, 3), np.float32))
        with pytest.raises(Refused, match="do not make 16 values"):
            while True:
                learner.take()
    assert gateway.read_stats()["corrupt_messages"] == 1
    with linked(address, c, epoch=2) as link:
        CheckingLearner(link, 2000).step()


@pytest.mark.parametrize("how", ["reset", "hold"])
def test_the_cache_survives_a_cut(site, how):
    c, gateway, _ = site
    with Relay(("127.0.0.1", gateway.port), rtt_s=0.02) as relay, linked(relay.address, c, silence_s=2.0) as link:
        learner = CheckingLearner(link, 2000)
        for _ in range(100):
            learner.step()
        for cut in range(1, 4):
            sent = learner.new_rows
            if how == "reset":
                relay.reset()
                eventually(lambda cut=cut: link.read_stats().get("outages") == cut)
            else:
                relay.hold()
                eventually(lambda cut=cut: link.read_stats().get("outages") == cut)
                relay.release()
            for _ in range(30):
                learner.step()
            # All rows had crossed, give or take those never drawn: a forgotten cache would send 300 again.
            assert learner.new_rows - sent < 30
        assert gateway.read_stats()["streams"] >= 4
        eventually(lambda: link.read_stats()["acks_unconfirmed"] == 0)


def test_acks_lost_in_a_cut_are_applied_afterwards(site):
    c, gateway, _ = site
    with Relay(("127.0.0.1", gateway.port)) as relay, linked(relay.address, c, batch_size=4) as link:
        learner = CheckingLearner(link, 2000)
        batch = learner.take()
        relay.hold()
        time.sleep(0.1)
        link.ack(batch.sequence, np.full((1, 4), 12345.0, np.float32))
        time.sleep(0.2)
        relay.reset()
        relay.release()
        found = []
        eventually(lambda: found.append(learner.step(12345.0).stats["mean_priority"]) or max(found) > 1000.0)


def test_a_restarted_buffer_node_is_taken_up_with_an_empty_mirror():
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client)
        writer.write(100)
        port = gateway.port
        stop = threading.Event()
        link = LinkClient(f"127.0.0.1:{port}", c, 5, stop)
        link.describe(10.0)
        link.open(2000, 16, 1, 1)
        learner = CheckingLearner(link, 2000)
        for _ in range(20):
            learner.step()
        batch = learner.take()
        writer.close()
    with running(c, port=port) as (second, client):
        link.ack(batch.sequence, np.ones((1, 16), np.float32))
        writer = Writer(client)
        writer.write(50)
        learner.drawn.clear()
        eventually(lambda: second.read_stats().get("streams", 0) > 0)
        for _ in range(20):
            learner.step()
        assert max(learner.drawn[16 * 4 :]) < 60
        link.close()
        stop.set()
        writer.close()


def test_a_newer_learner_supersedes_and_the_older_is_told(site):
    c, gateway, _ = site
    address = f"127.0.0.1:{gateway.port}"
    with linked(address, c, epoch=1) as old:
        learner = CheckingLearner(old, 2000)
        learner.step()
        with linked(address, c, epoch=2) as new:
            CheckingLearner(new, 2000).step()
            with pytest.raises(Refused, match="epoch 2"):
                for _ in range(100):
                    learner.step()


def test_a_cache_too_small_for_a_batch_names_the_setting(site):
    c, gateway, _ = site
    with linked(f"127.0.0.1:{gateway.port}", c, cache_rows=127) as link, pytest.raises(Refused, match="cache_bytes"):
        CheckingLearner(link, 127).step()


def test_an_actor_of_another_experience_is_refused_by_field(site):
    _, gateway, _ = site
    other = ExperienceSpec("Other-v0", (6, 6), "uint8", stack=2, num_actions=3, n_step=3, gamma=0.9)
    client = SiteClient(f"127.0.0.1:{gateway.port}", "actor", threading.Event())
    with pytest.raises(MismatchError, match="stack: 4 != 2"):
        client.announce(other)
    client.close()


def test_describe_waits_for_an_actor_and_then_tells_all():
    c = small_config()
    with running(c) as (gateway, client):
        link = LinkClient(f"127.0.0.1:{gateway.port}", c, 1, threading.Event())
        with pytest.raises(DeadlineExceeded, match="no actor has announced"):
            link.describe(timeout_s=0.5)
        client.announce(SPEC)
        description = link.describe(timeout_s=5.0)
        assert description.spec == SPEC and description.capacity == 10_000
        link.close()


def test_an_outage_longer_than_the_deadline_ends_the_run(site):
    c, gateway, _ = site
    with Relay(("127.0.0.1", gateway.port)) as relay, linked(relay.address, c, deadline_s=1.0, silence_s=1.0) as link:
        CheckingLearner(link, 2000).step()
        relay.hold()
        relay.reset()
        with pytest.raises(DeadlineExceeded, match="gave up"):
            eventually(lambda: link.next_batch(0.1) and False, 60)


def test_the_draws_are_reverbs_through_the_cache_and_through_reconnects():
    c = small_config(priority_exponent=0.6)
    priority = lambda t: 1.0 + (int(t) % 10) ** 2  # noqa: E731
    with running(c) as (gateway, client):
        writer = Writer(client, priority=priority)
        writer.write(40)
        with (
            Relay(("127.0.0.1", gateway.port)) as relay,
            linked(relay.address, c, cache_rows=4000, batch_size=500) as link,
        ):
            learner = CheckingLearner(link, 4000)
            for step in range(200):
                batch = learner.take()
                link.ack(batch.sequence, np.vectorize(priority)(batch.returns).astype(np.float32))
                if step % 50 == 25:
                    relay.reset()
            assert gateway.read_stats()["streams"] >= 4
        times, counts = np.unique(learner.drawn, return_counts=True)
        mass = np.array([priority(t) ** 0.6 for t in times])
        expected = 100_000 * mass / mass.sum()
        assert len(times) == 40 and counts.sum() == 100_000
        # 0.1% point of chi-square with 39 degrees of freedom.
        assert float(np.sum((counts - expected) ** 2 / expected)) < 72.1
        writer.close()


def test_audits_state_what_the_slots_hold(site, monkeypatch):
    c, gateway, _ = site
    monkeypatch.setattr("longhaul.session._AUDIT_PERIOD_S", 0.0)
    with linked(f"127.0.0.1:{gateway.port}", c) as link:
        learner = CheckingLearner(link, 2000)
        learner.step()  # drawn before the period was set or not: the next ones count
        audited = 0
        for _ in range(10):
            batch = learner.step()
            if len(batch.audit_slots):
                audited += 1
                assert zlib.crc32(learner.cache[batch.audit_slots].tobytes()) == batch.audit_crc32
        assert audited == 10
        link.reset_cache()
        learner.cache[:] = 0
        for _ in range(20):
            learner.step()


def test_rows_of_a_batch_larger_than_a_message_come_in_parts():
    spec = ExperienceSpec("Large-v0", (512, 512), "uint8", stack=1, num_actions=3, n_step=1, gamma=0.9)
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client, spec)
        writer.write(24)
        eventually(lambda: gateway._table.info()[0] == 24)
        with linked(f"127.0.0.1:{gateway.port}", c, cache_rows=64, batch_size=12) as link:
            learner = CheckingLearner(link, 64, spec)
            for _ in range(3):
                learner.step()
            assert link.read_stats()["received_rows_bytes"] > 4 * 2**20
        writer.close()


def test_weights_reach_every_site_peer_newest_first(site):
    c, gateway, _ = site
    stop = threading.Event()
    peers = [SiteClient(f"127.0.0.1:{gateway.port}", role, stop) for role in ("actor", "reader")]
    for peer in peers:
        peer.announce(SPEC if peer is peers[0] else None)
        peer.start()
    payload = np.random.default_rng(0).bytes(3 * 2**20 + 17)
    with linked(f"127.0.0.1:{gateway.port}", c) as link:
        link.publish(Snapshot(epoch=5, version=1, payload=payload))
        for peer in peers:
            eventually(lambda peer=peer: peer.newest_weights() is not None)
            assert peer.newest_weights() == Snapshot(5, 1, payload)
        # A restarted learner counts from 1 again, and wins by its epoch; a stale one never does.
        link.publish(Snapshot(epoch=6, version=1, payload=b"new"))
        eventually(lambda: all(p.newest_weights().payload == b"new" for p in peers))
        link.publish(Snapshot(epoch=5, version=99, payload=b"stale"))
        eventually(lambda: gateway.read_stats().get("weights_outdated") == 1)
        assert all(p.newest_weights().epoch == 6 for p in peers)
    for peer in peers:
        peer.close()


def test_actors_are_asked_to_wait_for_the_first_learner_and_for_one_that_is_there_and_behind():
    c = small_config(samples_per_insert=4.0, min_size=100, error_buffer=0.1)
    with running(c) as (gateway, client):
        writer = Writer(client, policy_version=0)
        client.start()
        writer.write(100)  # all that it needs to begin; a tenth more is the error buffer
        time.sleep(0.5)
        assert not client.paused
        writer.write(20)
        eventually(lambda: client.paused)
        with linked(f"127.0.0.1:{gateway.port}", c) as link:
            learner = CheckingLearner(link, 2000)
            for _ in range(5):  # 4 * 120 - 80 is what it needed to begin
                learner.step()
            eventually(lambda: not client.paused)
            writer.write(200)
            eventually(lambda: client.paused)
        eventually(lambda: not client.paused)  # one that has been there and is cut off stops no robot
        writer.write(2000)
        time.sleep(0.5)
        assert not client.paused
        with linked(f"127.0.0.1:{gateway.port}", c, epoch=2) as link:
            CheckingLearner(link, 2000).step()
            time.sleep(0.5)
            assert not client.paused  # what came in its absence is not held against them
        writer.close()


def test_a_restarted_site_does_not_hold_actors_that_have_a_learners_weights():
    c = small_config(samples_per_insert=4.0, min_size=100, error_buffer=0.1)
    with running(c) as (gateway, client):
        writer = Writer(client, policy_version=7)
        client.start()
        writer.write(500)
        eventually(lambda: gateway.read_stats()["inserts"] == 500)
        time.sleep(0.5)
        assert not client.paused
        writer.close()


def test_without_a_ratio_actors_wait_for_nobody():
    with running(small_config(samples_per_insert=0.0, min_size=100)) as (gateway, client):
        writer = Writer(client, policy_version=0)
        client.start()
        writer.write(500)
        eventually(lambda: gateway.read_stats()["inserts"] == 500)
        time.sleep(0.5)
        assert not client.paused
        writer.close()


def test_a_taken_port_names_the_flags(site):
    c, gateway, _ = site
    with pytest.raises(Exception, match="--port"):
        Gateway(c, port=gateway.port).start()


def test_a_transition_whose_rows_the_site_lacks_costs_itself_alone_and_is_counted():
    with running(small_config()) as (gateway, site):
        writer = Writer(site)
        writer.write(100)
        items = buffer.ItemWriter(gateway._table)  # a writer that breaks the rules
        for i in range(10):
            ids = tuple(range(50_000 + 10 * i, 50_004 + 10 * i))
            record = RecordPacker(SPEC.stack).pack(NStepTransition(ids, ids, 0, -1.0, 0.9), 1, 0.0)
            step = np.frombuffer(record, record_dtype(SPEC.stack))["step"].copy()
            items.write(step.view(np.uint8), 1000.0)
        assert items.flush(0, 10.0)
        with linked(f"127.0.0.1:{gateway.port}", small_config()) as link:
            learner = CheckingLearner(link, 2000)
            for _ in range(30):
                learner.step()
            assert gateway.read_stats()["lost_samples"] > 0
            lost = gateway.read_stats()["lost_samples"]
            for _ in range(30):
                learner.step()
            # With priority 0 none of them is drawn again.
            assert gateway.read_stats()["lost_samples"] <= lost + 16
            assert min(learner.drawn) >= 0
        items.close()
        writer.close()


def test_an_ack_that_can_not_be_applied_ends_the_stream_with_a_word(site, monkeypatch, caplog):
    c, gateway, _ = site
    monkeypatch.setattr(buffer.ReplayServer, "update_priorities", lambda *_: 1 / 0)
    with linked(f"127.0.0.1:{gateway.port}", c) as link:
        CheckingLearner(link, 2000).step()
        eventually(lambda: "a call failed: division by zero" in caplog.text)
