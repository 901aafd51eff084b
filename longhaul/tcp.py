"""What gRPC has no options for: the kernel's side of this process's TCP sockets. Linux only."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from longhaul.errors import ConfigError

_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def own_sockets() -> Iterator[socket.socket]:
    """Yields this process's TCP sockets, whoever has opened them: each a duplicate, closed with the next step."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found


def set_congestion_control(port: int, algorithm: str) -> None:
    """Has the connections that will be accepted on a port send by another congestion control than the kernel's default.

    A connection inherits its listener's choice (tcp_ca_openreq_child of linux/net/ipv4/tcp_minisocks.c).

    Args:
      port: that this process listens on.
      algorithm: the kernel's name, such as "cubic", "reno", "bbr".

    Raises:
      ConfigError: the kernel has no such algorithm, or does not let this user have it; nothing listens there.
    """
    found = False
    for listener in own_sockets():
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or listener.getsockname()[1] != port:
            continue
        found = True
        try:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
        except PermissionError:
            raise ConfigError(
                f"--tcp_congestion_control={algorithm}: this user may choose among {_names(_ALLOWED)}; as root, "
                f"`sysctl net.ipv4.tcp_allowed_congestion_control='{_names(_ALLOWED)} {algorithm}'` allows it"
            ) from None
        except OSError:
            raise ConfigError(
                f"--tcp_congestion_control={algorithm}: this kernel has {_names(_AVAILABLE)}; "
                f"`modprobe tcp_{algorithm}` may bring it"
            ) from None
    if not found:
        raise ConfigError(f"--tcp_congestion_control={algorithm}: this process has no socket that listens on {port}")


def _names(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return "no list of them"
