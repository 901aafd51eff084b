"""The relay keeps bytes and order, limits, holds and resets."""

import contextlib
import hashlib
import socket
import threading
import time

import pytest

from longhaul.errors import WorkerFailed
from longhaul.relay import Relay


@pytest.fixture
def echo():
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()
    stop.set()
    server.close()


def _receive(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = client.recv(65536)
        if not part:
            break
        data += part
    return data


def test_every_byte_arrives_in_order(echo):
    sent = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(20_000))
    with (
        Relay(echo, rtt_s=0.02, rate_bytes_per_s=2e6) as relay,
        socket.create_connection(("127.0.0.1", relay.port)) as c,
    ):
        threading.Thread(target=c.sendall, args=(sent,), daemon=True).start()
        assert _receive(c, len(sent)) == sent
        assert relay.bytes_up == relay.bytes_down == len(sent)


def test_an_answer_takes_at_least_the_round_trip_and_the_line_time(echo):
    with (
        Relay(echo, rtt_s=0.1, rate_bytes_per_s=1e6) as relay,
        socket.create_connection(("127.0.0.1", relay.port)) as c,
    ):
        start = time.monotonic()
        c.sendall(bytes(100_000))
        _receive(c, 100_000)
        # A lower bound holds on any machine: 0.1 s of path and 0.1 s for the last byte to leave one line.
        assert time.monotonic() - start >= 0.2


def test_held_bytes_arrive_after_release(echo):
    with Relay(echo) as relay, socket.create_connection(("127.0.0.1", relay.port)) as c:
        c.sendall(b"a")
        assert _receive(c, 1) == b"a"
        relay.hold()
        time.sleep(0.05)
        c.sendall(b"b")
        c.settimeout(0.3)
        with pytest.raises(TimeoutError):
            c.recv(1)
        relay.release()
        c.settimeout(10)
        assert _receive(c, 1) == b"b"


def test_reset_ends_connections_and_new_ones_work(echo):
    with Relay(echo) as relay:
        with socket.create_connection(("127.0.0.1", relay.port)) as c:
            c.sendall(b"a")
            assert _receive(c, 1) == b"a"
            relay.reset()
            c.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert c.recv(1) == b""
        with socket.create_connection(("127.0.0.1", relay.port)) as c:
            c.sendall(b"z")
            assert _receive(c, 1) == b"z"


def test_a_connection_idle_for_too_long_is_forgotten_without_a_word(echo):
    with Relay(echo, idle_timeout_s=0.5) as relay, socket.create_connection(("127.0.0.1", relay.port)) as c:
        for _ in range(8):  # in use, however little, it lives for longer than the timeout
            time.sleep(0.1)
            c.sendall(b"a")
            assert _receive(c, 1) == b"a"
        time.sleep(0.7)
        c.sendall(b"b")
        c.settimeout(0.3)
        with pytest.raises(TimeoutError):
            c.recv(1)
        c.sendall(b"c")  # nor does it come back by being used
        with pytest.raises(TimeoutError):
            c.recv(1)
        with socket.create_connection(("127.0.0.1", relay.port)) as other:
            other.sendall(b"z")
            assert _receive(other, 1) == b"z"
        assert relay.connections == 2 and relay.forgotten == 1


def test_a_taken_port_is_one_clear_error(echo):
    with pytest.raises(WorkerFailed, match="did not start"), Relay(echo, port=echo[1]):
        pass
