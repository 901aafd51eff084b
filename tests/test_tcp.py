"""What is asked of the kernel's TCP really holds for the connections that are accepted afterwards."""

import socket

import pytest

pytest.importorskip("reverb")

from longhaul import tcp
from longhaul.channel import open_channel
from longhaul.errors import ConfigError
from longhaul.gateway import Gateway
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from tests.site import small_config


def _algorithm(connection: socket.socket) -> str:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def test_accepted_connections_send_by_the_algorithm_asked_for_and_others_do_not():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        default = _algorithm(other)
        asked = "reno" if default != "reno" else "cubic"
        tcp.set_congestion_control(listener.getsockname()[1], asked)
        for server, expected in ((listener, asked), (other, default)):
            with socket.create_connection(server.getsockname()), server.accept()[0] as accepted:
                assert _algorithm(accepted) == expected


def test_a_gateway_answers_by_the_algorithm_asked_for():
    gateway = Gateway(small_config(), congestion_control="reno")
    gateway.start()
    try:
        with open_channel(f"127.0.0.1:{gateway.port}") as channel:
            rpc.GatewayStub(channel).Health(pb.HealthRequest(), timeout=10.0)
            accepted = []
            for found in tcp.own_sockets():
                if found.getsockname()[1] == gateway.port and not found.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    accepted.append(_algorithm(found))
            assert accepted == ["reno"]
    finally:
        gateway.stop()


def test_a_port_that_nobody_listens_on_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=f"no socket that listens on {port}"):
        tcp.set_congestion_control(port, "reno")


def test_an_unknown_algorithm_is_named_with_what_the_kernel_has():
    gateway = Gateway(small_config(), congestion_control="hopeful")
    try:
        with pytest.raises(ConfigError, match=r"--tcp_congestion_control=hopeful: this kernel has .*reno.*modprobe"):
            gateway.start()
    finally:
        gateway.stop()
