"""The existing approach's far end, with two real buffer nodes and real gRPC: each transition once, in order."""

import contextlib
import secrets
import threading

import numpy as np
import pytest

pytest.importorskip("reverb")
pytest.importorskip("jax")

from longhaul import codec, networks, scoring
from longhaul.errors import Refused
from longhaul.forwarder import Forwarder, RowCopies
from longhaul.inserter import Inserter
from longhaul.link import LinkClient
from longhaul.metrics import MetricsWriter, read_jsonl
from longhaul.relay import Relay
from longhaul.site_client import SiteClient
from longhaul.types import Snapshot
from tests.site import SPEC, CheckingLearner, Writer, eventually, linked, rows_of, running, small_config

BATCH = 16


def make_config(spool=32, **replay):
    # The forwarder takes at most half a queue at a time: here batches of 16.
    config = small_config(spool=spool, **replay)
    config.learner.update(batch_size=BATCH, minibatches_per_pull=1, cache_bytes=2000 * SPEC.row_bytes)
    config.agent.update({"network": "mlp", "hidden": (8,)})
    config.metrics.period_s = 0.1
    return config


class Recorder:
    """The real writer, and a record of what it was handed."""

    def __init__(self, site, spec, config):
        self._writer = Inserter(site, spec, 1, 256, 256, 5.0)
        self.counters = self._writer.counters
        self.rows, self.transitions = {}, []

    def add_row(self, stream, row_id, row):
        assert row_id not in self.rows
        self.rows[row_id] = np.array(row)
        self._writer.add_row(stream, row_id, row)

    def add_transition(self, stream, transition, policy_version, priority):
        self.transitions.append((transition, policy_version, priority))
        return self._writer.add_transition(stream, transition, policy_version, priority)

    def close(self):
        self._writer.close()

    @property
    def order(self):
        """Which transitions were handed over, by their returns."""
        return [int(transition.n_step_return) for transition, _, _ in self.transitions]


def queue_site(config):
    """A site that forwards in order of arrival, and its actor's client."""
    return running(config, order="arrival")


@contextlib.contextmanager
def forwarding(config, address, cloud, workdir=None, **link_options):
    """A forwarder from an address into a buffer node; yields the record of what it hands over, once it runs."""
    stop = threading.Event()
    made = []

    def open_writer(*arguments):
        made.append(Recorder(*arguments))
        return made[0]

    metrics = MetricsWriter(workdir, "forwarder", tensorboard=False)
    link = LinkClient(address, config, secrets.randbits(60), stop, **link_options)
    replay_site = SiteClient(f"127.0.0.1:{cloud.port}", "actor", stop)
    thread = None
    try:
        link.describe(20.0)
        forwarder = Forwarder(config, SPEC, link, replay_site, metrics, stop, 1, open_writer)
        thread = threading.Thread(target=forwarder.run)
        thread.start()
        eventually(lambda: bool(made))
        yield made[0]
    finally:
        stop.set()
        if thread is not None:
            thread.join(30.0)
        link.close()
        replay_site.close()
        metrics.close()


def expect_oracles(record, writer, numbers):
    """Row for row, transition for transition, what the actor wrote, in that order."""
    assert record.order == list(numbers)
    for transition, version, priority in record.transitions:
        t = int(transition.n_step_return)
        written = writer.transition(t)
        assert (transition.action, version) == (written.action, 7)
        assert np.float32(transition.discount) == np.float32(written.discount)
        assert np.float32(priority) == np.float32(writer._priority(t))
        for ids, originals in ((transition.obs_ids, written.obs_ids), (transition.next_ids, written.next_ids)):
            np.testing.assert_array_equal(np.stack([record.rows[i] for i in ids]), rows_of(np.array(originals), SPEC))


FIRST = SPEC.stack - 1  # the oracle's first transition


def test_each_transition_arrives_once_in_order_with_its_rows_and_its_first_priority():
    config = make_config()
    with (
        queue_site(config) as (site_node, site),
        running(config) as (cloud, _),
        forwarding_after(site, config, site_node, cloud) as (writer, record),
    ):
        for part in range(1, 26):  # never more than the queue holds
            writer.write(BATCH)
            eventually(lambda part=part: len(record.transitions) == part * BATCH)
        expect_oracles(record, writer, range(FIRST, FIRST + 400))
        assert record.counters["dropped_items"] == 0
        eventually(lambda: cloud._table is not None and cloud._table.info()[1] == 400)
        with linked(f"127.0.0.1:{cloud.port}", config, batch_size=BATCH) as link:
            learner = CheckingLearner(link, 2000)
            for _ in range(20):
                learner.step()
        assert site_node.read_stats()["spool_dropped"] == 0


@contextlib.contextmanager
def forwarding_after(site, config, site_node, cloud, **options):
    """An actor that has announced itself, and a forwarder."""
    writer = Writer(site, SPEC, priority=lambda t: 1.0 + t % 7)
    try:
        with forwarding(config, f"127.0.0.1:{site_node.port}", cloud, **options) as record:
            yield writer, record
    finally:
        writer.close()


def test_of_more_than_the_queue_holds_the_oldest_are_dropped_and_counted():
    config = make_config(spool=64)
    with queue_site(config) as (site_node, site), running(config) as (cloud, _):
        writer = Writer(site, SPEC)
        writer.write(500)
        eventually(lambda: site_node._table.info()[1] == 500)
        eventually(lambda: site_node.read_stats()["spool_dropped"] == 500 - 64)
        with forwarding(config, f"127.0.0.1:{site_node.port}", cloud) as record:
            eventually(lambda: len(record.transitions) == 64)
            expect_oracles(record, writer, range(FIRST + 500 - 64, FIRST + 500))
        assert site_node.read_stats()["spool_dropped"] == 500 - 64
        writer.close()


def test_nothing_is_lost_or_doubled_by_cuts_of_the_link():
    config = make_config(spool=5_000)
    config.learner.cache_bytes *= 4
    with (
        queue_site(config) as (site_node, site),
        running(config) as (cloud, _),
        Relay(("127.0.0.1", site_node.port), rtt_s=0.01, rate_bytes_per_s=400_000.0) as relay,
    ):
        writer = Writer(site, SPEC, priority=lambda t: 1.0 + t % 7)
        writer.write(256)
        with forwarding(config, relay.address, cloud) as record:
            for part in range(4):
                had = len(record.transitions)
                writer.write(320)
                eventually(lambda had=had: len(record.transitions) > had, 30.0)
                relay.reset()
                if part == 2:  # a silent outage, too
                    relay.hold()
                    writer.write(256)
                    relay.reset()
                    relay.release()
            eventually(lambda: len(record.transitions) >= 256 + 4 * 320 + 256, 60.0)
            expect_oracles(record, writer, range(FIRST, FIRST + 256 + 4 * 320 + 256))
        assert site_node.read_stats()["rolled_back_batches"] > 0
        writer.close()


def test_the_learners_weights_reach_the_site():
    config = make_config()
    with (
        queue_site(config) as (site_node, site),
        running(config) as (cloud, _),
        forwarding_after(site, config, site_node, cloud) as (writer, _),
    ):
        writer.write(BATCH)
        site.start()
        eventually(lambda: cloud._table is not None and cloud._table.info()[1] == BATCH)
        with linked(f"127.0.0.1:{cloud.port}", config, batch_size=BATCH) as link:
            for version in (1, 2):
                link.publish(Snapshot(5, version, bytes(10 * version)))
                eventually(lambda v=version: (s := site.newest_weights()) is not None and s.version == v)
        assert site.newest_weights() == Snapshot(5, 2, bytes(20))


def test_what_arrives_is_scored_under_the_learners_newest_weights(tmp_path):
    config = make_config()
    config.metrics.score_transfers = True
    network = networks.make_network(SPEC, config)
    params = networks.init_params(network, SPEC, 99)
    payload = codec.pack_weights(networks.flatten_params(params), "float32")
    with (
        queue_site(config) as (site_node, site),
        running(config) as (cloud, _),
        forwarding_after(site, config, site_node, cloud, workdir=tmp_path) as (writer, _),
    ):
        cloud._weights.offer(Snapshot(1, 1, payload))
        eventually(lambda: (newest := site_node._weights.newest()) is not None and newest.version == 1)
        writer.write(2 * BATCH)
        eventually(lambda: sum(line["arrival_draws"] for line in read_jsonl(tmp_path, "forwarder")) == 2 * BATCH)
        lines = [line for line in read_jsonl(tmp_path, "forwarder") if line["arrival_draws"]]
        assert sum(line["arrival_first_crossings"] for line in lines) == 2 * BATCH
        mean = sum(line["arrival_priority"] * line["arrival_draws"] for line in lines) / (2 * BATCH)
        ts = np.arange(FIRST, FIRST + 2 * BATCH)
        originals = [writer.transition(int(t)) for t in ts]
        rows = rows_of(np.array([o.obs_ids + o.next_ids for o in originals]), SPEC)
        columns = (
            np.array([o.action for o in originals], np.int32),
            np.array([o.n_step_return for o in originals], np.float32),
            np.array([o.discount for o in originals], np.float32),
        )
        expected, _ = scoring.Scorer(SPEC, config).score(params, rows, *columns)
        assert mean == pytest.approx(expected.mean(), rel=1e-5)


def test_a_row_that_the_writer_has_let_go_of_is_handed_over_again_under_a_new_name():
    class Rows:
        def __init__(self):
            self.given = []

        def add_row(self, stream, row_id, row):
            self.given.append((row_id, row.tobytes()))

    copies, writer = RowCopies(600, SPEC), Rows()
    slots = np.arange(500, dtype=np.int32)
    copies.insert(slots, rows_of(slots, SPEC))
    (first,) = copies.give([3], writer)
    assert copies.give([3], writer) == (first,) and len(writer.given) == 1
    for slot in range(10, 500):
        copies.give([slot], writer)
    (second,) = copies.give([3], writer)
    assert second != first
    assert writer.given[0][1] == writer.given[-1][1] == rows_of(3, SPEC).tobytes()
    copies.insert(np.array([3], np.int32), rows_of(np.array([77]), SPEC))
    (third,) = copies.give([3], writer)
    assert third not in (first, second) and writer.given[-1][1] == rows_of(77, SPEC).tobytes()


def test_no_more_is_taken_than_the_cap_allows(tmp_path):
    config = make_config()
    config.link.experiences_per_s = 1e-6
    with (
        queue_site(config) as (site_node, site),
        running(config) as (cloud, _),
        forwarding_after(site, config, site_node, cloud, workdir=tmp_path) as (writer, record),
    ):
        writer.write(2 * BATCH)
        eventually(lambda: len(record.transitions) >= BATCH)
        eventually(lambda: len(read_jsonl(tmp_path, "forwarder")) > 5)
        assert len(record.transitions) == BATCH


def test_a_queue_that_never_holds_a_batch_is_refused_by_the_fields_name():
    config = make_config(spool=BATCH - 1)
    stop = threading.Event()
    with queue_site(config) as (site_node, site):
        writer = Writer(site, SPEC)
        writer.write(1)
        link = LinkClient(f"127.0.0.1:{site_node.port}", config, secrets.randbits(60), stop)
        try:
            link.describe(10.0)
            link.open(2000, BATCH, 1, 1)
            with pytest.raises(Refused, match=r"config\.replay\.spool is 15, and must be at least 16"):
                for _ in range(100):
                    link.next_batch(0.2)
        finally:
            link.close()
            stop.set()
            writer.close()
