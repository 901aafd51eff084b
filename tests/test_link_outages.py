"""Outages of the long-haul link: noticed, said once at each end, waited out for ever or up to a deadline."""

import itertools
import random
import re
import threading
import time

import grpc
import pytest

pytest.importorskip("reverb")

from longhaul import channel
from longhaul.errors import DeadlineExceeded, Outage, Stopped
from longhaul.gateway import Gateway
from longhaul.inbox import Inbox
from longhaul.learner import Learner
from longhaul.link import LinkClient
from longhaul.metrics import MetricsWriter
from longhaul.relay import Relay
from longhaul.site_client import SiteClient
from longhaul.types import Snapshot
from tests.site import SPEC, CheckingLearner, Writer, eventually, linked, running, small_config


@pytest.fixture
def site():
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client)
        writer.write(200)
        yield c, gateway
        writer.close()


def _lines(caplog, words: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if re.search(words, r.getMessage())]


def test_a_silent_cut_is_noticed_with_the_defaults_and_the_cache_is_kept(site, caplog):
    c, gateway = site
    with Relay(("127.0.0.1", gateway.port), rtt_s=0.02) as relay, linked(relay.address, c) as link:
        learner = CheckingLearner(link, 2000)
        for _ in range(100):
            learner.step()
        rows = learner.new_rows
        assert not link.down
        relay.hold()
        eventually(lambda: link.down, 10.0)
        assert not link.read_stats().get("outages")  # it only seems to be one yet
        # No timings of ours: what the link promises is how long is waited.
        eventually(lambda: link.read_stats().get("outages") == 1, 30.0)
        while link.read_stats()["batches_waiting"]:
            learner.step()
        relay.release()
        learner.take(15.0)
        assert not link.down
        assert learner.new_rows - rows < 30
        assert len(_lines(caplog, "is cut")) == 1
        eventually(lambda: len(_lines(caplog, r"is back after [\d.]+ s, cache kept, \d+ acks sent again")) == 1)


@pytest.mark.parametrize("how", ["reset", "hold"])
def test_each_cut_is_one_line_at_its_start_and_one_at_its_end_with_what_it_cost(site, caplog, how):
    c, gateway = site
    with Relay(("127.0.0.1", gateway.port)) as relay, linked(relay.address, c, silence_s=4.0) as link:
        learner = CheckingLearner(link, 2000)
        for cut in range(1, 3 if how == "reset" else 2):
            last = learner.step().sequence
            relay.hold()
            if how == "reset":
                relay.reset()
            eventually(lambda cut=cut: link.read_stats().get("outages") == cut)
            time.sleep(1.5)  # several tries fail meanwhile
            relay.release()
            eventually(lambda last=last: learner.step().sequence > last + 5)
            assert len(_lines(caplog, r"link to .* is cut, batch \d+ was the last: ")) == cut
            assert len(_lines(caplog, r"link to .* is back after [\d.]+ s, cache kept, \d+ acks sent again")) == cut


def test_a_site_peer_says_once_that_the_gateway_is_away_and_once_that_it_is_back(caplog):
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client)
        port = gateway.port
        reader = SiteClient(f"127.0.0.1:{port}", "reader", threading.Event())
        reader.announce(None)
        reader.start()
        writer.close()
        client.close()
    eventually(lambda: _lines(caplog, "the gateway is away"))
    time.sleep(2.0)  # several tries of both its threads fail meanwhile
    again = Gateway(c, port=port)
    again.start()
    site = SiteClient(f"127.0.0.1:{port}", "actor", threading.Event())
    writer = Writer(site)
    again._weights.offer(Snapshot(1, 1, b"weights"))
    eventually(lambda: reader.newest_weights() is not None)
    eventually(lambda: _lines(caplog, r"the gateway is back after [\d.]+ s"))
    assert len(_lines(caplog, "the gateway is away")) == len(_lines(caplog, "the gateway is back")) == 1
    writer.close()
    site.close()
    reader.close()
    again.stop(0.2)


def test_without_a_deadline_the_link_tries_on_and_with_one_it_says_how_long_it_did(site):
    c, gateway = site
    with Relay(("127.0.0.1", gateway.port)) as relay, linked(relay.address, c, silence_s=1.0) as patient:
        with linked(relay.address, c, epoch=2, silence_s=1.0, deadline_s=1.0) as hurried:
            CheckingLearner(hurried, 2000).step()
            relay.hold()
            relay.reset()
            with pytest.raises(DeadlineExceeded, match=r"site 127.*: gave up after \d+ s: .*does not answer"):
                eventually(lambda: hurried.next_batch(0.1) and False, 60)
        relay.release()
        with pytest.raises(Exception, match="epoch 2"):  # it has come through, and is refused for another reason
            eventually(lambda: patient.next_batch(0.1) and False, 30)


class _Clock(threading.Event):
    """A clock and a stop event whose waits pass at once, and are noted."""

    def __init__(self):
        super().__init__()
        self.seen: list[float] = []
        self._now_s = 100.0

    def monotonic(self):
        return self._now_s

    def wait(self, timeout=None):
        self.seen.append(timeout)
        self._now_s += timeout
        return self.is_set()


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(channel, "time", clock)
    return clock


def test_pauses_between_tries_double_to_a_cap_are_jittered_and_never_end(clock):
    random.seed(1)
    backoff = channel.Backoff("site", clock, cap_s=3.0)
    for _ in range(5000):
        backoff.wait(Outage("away"))
    for pause_s, full_s in zip(clock.seen, itertools.chain([0.2, 0.4, 0.8, 1.6], itertools.repeat(3.0))):
        assert full_s / 2 <= pause_s <= full_s
    late = clock.seen[4:]
    assert max(late) > 2.9 and min(late) < 1.6 and len(set(late)) > 4000
    clock.set()
    with pytest.raises(Stopped):
        backoff.wait(Outage("away"))


def test_a_deadline_is_of_the_whole_outage_and_tells_of_the_last_error(clock):
    backoff = channel.Backoff("site", clock, deadline_s=60.0)
    with pytest.raises(DeadlineExceeded, match=r"site: gave up after 6[0-5] s: no route"):
        for _ in range(1000):
            backoff.wait(Outage("no route"))


def test_a_stream_that_goes_on_from_a_cache_given_up_is_not_taken():
    inbox = Inbox()
    inbox.go_on()
    inbox.refuse()
    with pytest.raises(Outage, match="given up"):
        inbox.go_on()
    assert inbox.begin(8) == 0 and inbox.last_sequence == 7
    inbox.go_on()


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_status_is_an_outage_or_for_good_and_never_a_bare_grpc_error(status):
    class Error(grpc.RpcError):
        def code(self):
            return status

        def details(self):
            return "details"

    ours = channel.our_error(Error(), "127.0.0.1:1")
    lasting = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL"}
    assert isinstance(ours, Outage) == (status.name in lasting | {"OK", "NOT_FOUND", "ALREADY_EXISTS", "DATA_LOSS"})
    assert "127.0.0.1:1" in str(ours) and "details" in str(ours) and "\n" not in str(ours)


def test_a_learner_trains_on_through_a_cut_and_its_cache_is_right_afterwards(site, tmp_path):
    c, gateway = site
    c.agent.update(network="mlp", hidden=(16,), n_step=SPEC.n_step, gamma=SPEC.gamma)
    c.learner.update(batch_size=16, minibatches_per_pull=2, outage_draws=1e6)
    stop = threading.Event()
    with Relay(("127.0.0.1", gateway.port)) as relay:
        link = LinkClient(relay.address, c, 7, stop, silence_s=4.0)
        link.describe(10.0)
        with MetricsWriter(None, "learner") as metrics:
            learner = Learner(c, SPEC, link, metrics, tmp_path, stop, 1)
            thread = threading.Thread(target=learner.run)
            thread.start()
            try:
                eventually(lambda: learner.updates > 20, 60.0)
                made = learner._reserve_updates  # a busy machine may be silent for a while by itself
                relay.hold()
                eventually(lambda: learner._reserve_updates > made + 50, 60.0)
                relay.release()
                eventually(lambda: learner._reserve_began_at is None, 30.0)
                updates = learner.updates
                eventually(lambda: learner.updates > updates + 20, 30.0)
                assert learner._cache_resets == 0
            finally:
                stop.set()
                thread.join(20.0)
                link.close()
    assert not thread.is_alive()
