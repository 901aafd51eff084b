"""gRPC as both ends of the link use it: options for long, fat paths, chunking, and one map from its errors to ours.

The options are sized for 200 ms at 1 Gbit/s: 25 MB are in flight there, so a stream may hold 64 MB before it waits
for the reader. Keepalive pings find a dead path below an idle stream; both ends hold the same figures, since a
server that is pinged more often than it expects closes the connection (gRFC A8, A9).
"""

import random
import threading
import time

import grpc

from longhaul.errors import DeadlineExceeded, LonghaulError, MismatchError, Outage, Refused, Stopped
from longhaul.proto import longhaul_pb2 as pb
from longhaul.security import Credentials, SendToken, explain_failure
from longhaul.types import ExperienceSpec

PROTOCOL_VERSION = 3
PART_BYTES = 2**17  # of a large payload per message: others get their turn, and each is a sign of life on a slow link
MAX_MESSAGE_BYTES = 8 * 2**20  # parts and the columns of a large batch fit with room to spare
KEEPALIVE_PERIOD_S = 10.0
KEEPALIVE_TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.2
_STREAM_WINDOW_BYTES = 64 * 2**20

_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_PERIOD_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.lookahead_bytes", _STREAM_WINDOW_BYTES),
    ("grpc.http2.write_buffer_size", 2**20),
)
CLIENT_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A host may have moved: its name is looked up again with each try, not every 30 s at most.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Two clients of one process must not share a connection that one of them has given up on.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_PERIOD_S * 500)),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a taken port must be an error
)

_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.Channel:
    """Returns a channel to host:port, in the clear without credentials; it connects when first used."""
    if credentials is None:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    channel = grpc.secure_channel(address, credentials.for_channel(), options=CLIENT_OPTIONS)
    return grpc.intercept_channel(channel, SendToken(credentials.token))


def our_error(
    error: grpc.RpcError, address: str, credentials: Credentials | None = None, explain: bool = True
) -> LonghaulError:
    """Maps a gRPC error to ours: the only place that reads status codes.

    A connection that never came to be is looked at once more, since a certificate that is refused today will be
    refused tomorrow, while gRPC calls it unavailable. That look can take seconds; `explain=False` leaves it out.

    Returns:
      MismatchError for FAILED_PRECONDITION, Refused for what will stay refused, Outage for the rest.
    """
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    details = (error.details() if hasattr(error, "details") else "") or str(error)
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return MismatchError(f"{address}: {details}")
    if code in _REFUSALS:
        return Refused(f"{address} refused ({code.name}): {details}")
    if explain and code == grpc.StatusCode.UNAVAILABLE and (reason := explain_failure(address, credentials)):
        return Refused(f"{address}: {reason}")
    return Outage(f"{address} does not answer ({code.name}): {details}")


def spec_to_proto(spec: ExperienceSpec) -> pb.ExperienceSpec:
    """Returns the message of a spec."""
    return pb.ExperienceSpec(
        env_id=spec.env_id,
        row_shape=spec.row_shape,
        row_dtype=spec.row_dtype,
        stack=spec.stack,
        num_actions=spec.num_actions,
        n_step=spec.n_step,
        gamma=spec.gamma,
    )


def spec_from_proto(message: pb.ExperienceSpec) -> ExperienceSpec:
    """Returns the spec of a message."""
    return ExperienceSpec(
        env_id=message.env_id,
        row_shape=tuple(message.row_shape),
        row_dtype=message.row_dtype,
        stack=message.stack,
        num_actions=message.num_actions,
        n_step=message.n_step,
        gamma=message.gamma,
    )


class Backoff:
    """Waits between tries: doubling from FIRST_BACKOFF_S to `cap_s`, each with jitter, until a deadline.

    Args:
      what: for the deadline's message.
      stop: ends a wait at once.
      deadline_s: from the first try (this object's making) to giving up; None tries for ever.
    """

    def __init__(self, what: str, stop: threading.Event, cap_s: float = 5.0, deadline_s: float | None = None):
        self._what = what
        self._stop = stop
        self._cap_s = cap_s
        self._deadline_s = deadline_s
        self._started_s = time.monotonic()
        self._next_s = FIRST_BACKOFF_S

    def wait(self, error: LonghaulError) -> None:
        """Waits before the next try after `error`.

        Raises:
          Stopped: the stop event was set.
          DeadlineExceeded: the deadline has passed; the text tells of the last error.
        """
        lasted_s = time.monotonic() - self._started_s
        if self._deadline_s is not None and lasted_s >= self._deadline_s:
            raise DeadlineExceeded(f"{self._what}: gave up after {lasted_s:.0f} s: {error}") from error
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        if self._stop.wait(pause_s):
            raise Stopped(f"{self._what}: stopped") from error
        self._next_s = min(self._cap_s, self._next_s * 2)
