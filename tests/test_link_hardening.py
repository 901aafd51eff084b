"""The link against what wears it out: slow readers, endless reconnects, idle paths, big publications, moved hosts."""

import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("reverb")

from longhaul import channel
from longhaul.gateway import Gateway
from longhaul.link import LinkClient
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from longhaul.relay import Relay
from longhaul.site_client import SiteClient
from longhaul.types import ExperienceSpec, Snapshot
from tests.site import SPEC, CheckingLearner, Writer, eventually, linked, running, small_config

REPO = Path(__file__).parent.parent
MIB = 2**20


class RawLearner:
    """Speaks the wire by hand, and reads only when told to."""

    def __init__(self, address: str, **opened):
        self._connection = channel.open_channel(address)
        self._requests: list[pb.SampleRequest | None] = []
        self._changed = threading.Condition()
        self._call = rpc.GatewayStub(self._connection).Sample(self._send())
        usual = {"learner_id": 1, "epoch": 1, "cache_rows": 2000, "batch_size": 4, "minibatches": 1, "window": 4}
        self._sizes = pb.Open(**usual | opened)
        self.put(pb.SampleRequest(open=self._sizes))
        self.opened = next(self._call).opened

    def _send(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests)
                request = self._requests.pop(0)
            if request is None:
                return
            yield request

    def put(self, request: pb.SampleRequest | None) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify()

    def batch(self) -> tuple[int, int]:
        """Reads one batch whole and acknowledges it; returns its sequence and bytes."""
        message = next(self._call).batch
        size = len(message.rows)
        while size < message.rows_wire_bytes:
            size += len(next(self._call).part.data)
        self.ack(message.sequence)
        return message.sequence, size

    def ack(self, sequence: int) -> None:
        ones = np.ones(self._sizes.batch_size, "<f4").tobytes()
        self.put(pb.SampleRequest(ack=pb.Ack(sequence=sequence, priorities=ones, width=4, window=self._sizes.window)))

    def close(self) -> None:
        self.put(None)
        self._call.cancel()
        self._connection.close()


def _rss_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _threads() -> int:
    """All of this process, those that no Python knows of too."""
    return len(os.listdir("/proc/self/task"))


def _figures(workdir: Path) -> dict[str, float]:
    try:
        return json.loads((workdir / "metrics" / "gateway.jsonl").read_text().splitlines()[-1])
    except (OSError, IndexError, ValueError):  # not there yet, or half a line
        return {}


@pytest.fixture
def buffer_node(tmp_path):
    """A buffer node in a process of its own; yields its process and address."""
    settings = {"replay.samples_per_insert": 0.0, "replay.min_size": 1, "metrics.period_s": 0.2}
    words = [f"--config.{name}={value}" for name, value in settings.items()]
    argv = ["-m", "launchers.buffer", "--config=configs/smoke.py", "--port=0", f"--workdir={tmp_path}", *words]
    process = subprocess.Popen([sys.executable, *argv], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: (tmp_path / "gateway.json").exists() or process.poll() is not None, 60)
        yield process, json.loads((tmp_path / "gateway.json").read_text())["address"]
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_hardly_reads_holds_the_gateway_back_and_its_memory_flat(buffer_node, tmp_path):
    process, address = buffer_node
    spec = ExperienceSpec("Large-v0", (256, 256), "uint8", stack=1, num_actions=3, n_step=1, gamma=0.9)
    site = SiteClient(address, "actor", threading.Event())
    writer = Writer(site, spec)
    writer.write(400)
    before_bytes = _rss_bytes(process.pid)
    # A batch is some 8 MB of rows that the small mirror lacks; the window alone would let 8 GB be made.
    learner = RawLearner(address, window=1024, batch_size=64, cache_rows=128)

    def in_flight_once_still() -> int:
        seen: list[float] = []

        def still() -> bool:
            seen.append(_figures(tmp_path).get("bytes_in_flight", 0))
            return len(seen) > 40 and len(set(seen[-40:])) == 1 and seen[-1] > 0

        eventually(still, 60)
        return int(seen[-1])

    assert in_flight_once_still() < 64 * MIB
    stalled_bytes = _rss_bytes(process.pid)
    read = [learner.batch() for _ in range(20)]
    assert [sequence for sequence, _ in read] == list(range(1, 21))
    assert sum(size for _, size in read) > 60 * MIB
    assert in_flight_once_still() < 64 * MIB
    assert stalled_bytes - before_bytes < 96 * MIB
    assert _rss_bytes(process.pid) - stalled_bytes < 32 * MIB
    learner.close()
    site.close()
    writer.close()


def test_reconnects_leave_threads_and_memory_flat():
    with running(small_config()) as (gateway, client):
        writer = Writer(client)
        writer.write(100)
        address, last, batches = f"127.0.0.1:{gateway.port}", 0, 0
        threads, rss_bytes = 0, 0
        for count in range(60):
            learner = RawLearner(address, run_id=gateway.run_id, last_sequence=last)
            assert learner.opened.resumed == (count > 0)
            learner.ack(last)  # that it was sent before does not say that it has arrived
            if count % 4:  # every fourth goes before it has read a batch
                last = learner.batch()[0]
                batches += 1
            learner.close()
            if count == 20:
                eventually(lambda: gateway.read_stats()["learner_connected"] == 0)
                time.sleep(1.0)
                threads, rss_bytes = _threads(), _rss_bytes()
        eventually(lambda: gateway.read_stats()["learner_connected"] == 0)
        eventually(lambda: _threads() <= threads + 4)
        assert _rss_bytes() - rss_bytes < 16 * MIB
        assert gateway.read_stats()["streams"] == 60 and batches == 45
        writer.close()


def test_learners_that_supersede_each_other_leave_no_threads_behind():
    with running(small_config()) as (gateway, client):
        writer = Writer(client)
        writer.write(100)
        address, threads = f"127.0.0.1:{gateway.port}", 0
        for count in range(1, 21):
            learner = RawLearner(address, learner_id=count, epoch=count)
            learner.batch()
            learner.close()
            if count == 4:
                threads = _threads()
        eventually(lambda: _threads() <= threads + 8)
        writer.close()


def test_a_client_that_is_cut_again_and_again_leaves_threads_and_memory_flat(monkeypatch):
    monkeypatch.setattr(channel, "FIRST_BACKOFF_S", 0.01)
    c = small_config()
    with running(c) as (gateway, client), Relay(("127.0.0.1", gateway.port)) as relay:
        writer = Writer(client)
        writer.write(100)
        with linked(relay.address, c) as link:
            learner = CheckingLearner(link, 2000)
            threads, rss_bytes = 0, 0
            for cut in range(1, 61):
                learner.step()
                relay.reset()
                eventually(lambda cut=cut: gateway.read_stats()["streams"] > cut)
                if cut == 20:
                    threads, rss_bytes = _threads(), _rss_bytes()
            for _ in range(20):
                learner.step()
            eventually(lambda: _threads() <= threads + 4)
            assert _rss_bytes() - rss_bytes < 16 * MIB
            assert link.read_stats()["outages"] > 40
        writer.close()


# ---- idle paths


def test_keepalive_is_the_same_at_both_ends_and_no_ping_is_held_against_a_peer():
    client, server = dict(channel.CLIENT_OPTIONS), dict(channel.SERVER_OPTIONS)
    shared = [name for name in client if "keepalive" in name or "message_length" in name or "max_pings" in name]
    assert len(shared) == 6
    assert {name: client[name] for name in shared} == {name: server[name] for name in shared}
    # A path that forgets idle connections does so after a minute or more.
    assert client["grpc.keepalive_time_ms"] + client["grpc.keepalive_timeout_ms"] <= 30_000
    assert client["grpc.keepalive_permit_without_calls"] == 1 and client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0


def test_an_idle_learner_and_an_idle_site_peer_outlive_a_path_that_forgets_idle_connections():
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client)
        writer.write(100)
        with (
            Relay(("127.0.0.1", gateway.port), idle_timeout_s=4.0) as relay,
            linked(relay.address, c) as link,
        ):
            site = SiteClient(relay.address, "reader", threading.Event())
            site.announce(None)
            site.start()
            learner = CheckingLearner(link, 2000)
            learner.step()
            time.sleep(9.0)  # nothing is drawn, nothing is published
            for _ in range(5):
                learner.step()
            link.publish(Snapshot(1, 1, b"weights"))
            eventually(lambda: site.newest_weights() is not None)
            assert "outages" not in link.read_stats() and relay.forgotten == 0
            assert gateway.read_stats()["streams"] == 1
            site.close()
        writer.close()


@pytest.mark.parametrize("is_pinged", [True, False])
def test_keepalive_alone_keeps_an_idle_watch_alive_however_often_it_pings(is_pinged, monkeypatch):
    # Forty times as often as the server has been told to expect; without pings the path forgets the connection.
    options = dict(channel.CLIENT_OPTIONS) | {"grpc.keepalive_time_ms": 250 if is_pinged else 3_600_000}
    monkeypatch.setattr(channel, "CLIENT_OPTIONS", tuple(options.items()))
    with (
        running(small_config()) as (gateway, _),
        Relay(("127.0.0.1", gateway.port), idle_timeout_s=2.0) as relay,
        channel.open_channel(relay.address) as connection,
    ):
        call = rpc.GatewayStub(connection).WatchWeights(pb.WatchRequest())
        gateway._weights.offer(Snapshot(1, 1, b"first"))
        assert next(call).data == b"first"
        time.sleep(5.0)
        gateway._weights.offer(Snapshot(1, 2, b"second"))
        if is_pinged:
            assert next(call).data == b"second"
            assert relay.connections == 1 and relay.forgotten == 0
        else:
            eventually(lambda: relay.forgotten == 1)
        call.cancel()


# ---- weights and Acks on one narrow link


def test_acks_are_applied_while_a_publication_goes_up_a_narrow_link():
    c = small_config()
    with running(c) as (gateway, client):
        writer = Writer(client)
        writer.write(300)
        with (
            Relay(("127.0.0.1", gateway.port), rtt_s=0.02, rate_bytes_per_s=5e6 / 8) as relay,
            linked(relay.address, c) as link,
        ):
            learner = CheckingLearner(link, 2000)
            for _ in range(30):
                learner.step()
            applied: list[int] = []  # the gateway's highest applied Ack, in the order of events
            link.publish(Snapshot(1, 1, np.random.default_rng(0).bytes(5_000_000)))
            while not gateway.read_stats().get("weights_accepted"):
                learner.step()
                applied.append(gateway._session.acked_sequence)
            assert applied[-1] - applied[0] >= 20
            # Not in one lump at the end: Acks went on arriving all through the publication.
            assert len(set(applied)) >= 20
            assert "outages" not in link.read_stats()
        writer.close()


# ---- names


class NamesServer:
    """A DNS server for one name, whose address changes: answers A with `address`, everything else with nothing."""

    def __init__(self, address: str):
        self.address = address
        self.asked = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                query, client = self._socket.recvfrom(512)
            except OSError:
                return
            end = query.index(b"\0", 12) + 5
            is_a = query[end - 4 : end - 2] == b"\0\1"
            self.asked += is_a
            head = query[:2] + struct.pack(">HHHHH", 0x8580, 1, int(is_a), 0, 0)
            record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(self.address)
            self._socket.sendto(head + query[12:end] + (record if is_a else b""), client)

    def close(self) -> None:
        self._socket.close()


def test_a_gateway_that_moves_to_another_address_is_found_by_its_name():
    c = small_config()
    names = NamesServer("127.0.0.1")
    stop = threading.Event()
    with running(c) as (first, client):
        port = first.port
        # gRPC's form for a name that a given server resolves.
        address = f"dns://127.0.0.1:{names.port}/site.test:{port}"
        writer = Writer(client)
        writer.write(50)
        reader = SiteClient(address, "reader", stop)
        reader.announce(None, timeout_s=20.0)
        reader.start()
        link = LinkClient(address, c, secrets.randbits(60), stop)
        link.describe(20.0)
        link.open(2000, 16, 1, 1)
        learner = CheckingLearner(link, 2000)
        for _ in range(5):
            learner.step()
        first._weights.offer(Snapshot(1, 1, b"first"))
        eventually(lambda: reader.newest_weights() is not None)
        writer.close()
    second = Gateway(c, host="127.0.0.2", port=port)
    second.start()
    names.address = "127.0.0.2"
    site = SiteClient(f"127.0.0.2:{port}", "actor", stop)
    writer = Writer(site)
    writer.write(50)
    second._weights.offer(Snapshot(1, 1, b"second"))
    eventually(lambda: second.read_stats().get("streams", 0) == 1, 60)
    for _ in range(10):
        learner.step()
    eventually(lambda: (newest := reader.newest_weights()) is not None and newest.payload == b"second", 60)
    for closing in (link, reader, site, writer, names):
        closing.close()
    second.stop(0.2)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_gateway_listens_on_ipv4_alone(host):
    gateway = Gateway(small_config(), host=host)
    gateway.start()
    try:
        site = SiteClient(f"127.0.0.1:{gateway.port}", "actor", threading.Event())
        assert site.announce(SPEC, timeout_s=10.0).spec == SPEC
        site.close()
    finally:
        gateway.stop(0.2)
