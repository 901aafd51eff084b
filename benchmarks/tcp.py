"""What the kernel has counted on this process's TCP connections: the bytes that really came, framing and all."""

import contextlib
import socket
import struct

from longhaul.tcp import own_sockets

_TCP_INFO_BYTES = 248
# struct tcp_info of linux/tcp.h: 8 one-byte fields, 24 uint32, then uint64: pacing_rate, max_pacing_rate,
# bytes_acked, bytes_received.
_ACKED_OFFSET = 8 + 24 * 4 + 2 * 8
_RECEIVED_OFFSET = _ACKED_OFFSET + 8


def connection_bytes() -> dict[tuple[str, int, int], tuple[int, int]]:
    """Returns (peer host, peer port, own port) -> (bytes received, bytes sent and acknowledged) of open connections."""
    found = {}
    for connection in own_sockets():
        with contextlib.suppress(OSError):  # a listener has no peer
            peer = connection.getpeername()
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            acked, received = struct.unpack_from("<QQ", info, _ACKED_OFFSET)
            host = peer[0].removeprefix("::ffff:")
            found[(host, peer[1], connection.getsockname()[1])] = (received, acked)
    return found


def received_from(ports: set[int]) -> int:
    """Returns the bytes received over all open connections to these peer ports."""
    return sum(received for (_, port, _), (received, _) in connection_bytes().items() if port in ports)
