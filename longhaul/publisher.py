"""Weights on their way up: the newest snapshot, sent once to the site, in the background.

They give way to Acks. A connection of their own is not enough, since both share the path's narrowest queue, and TCP
fills that queue to its brim; so weights are sent at a rate that is found by the delay they cause, as LEDBAT does
(RFC 6817): raised while Pings come back as fast as ever, halved once they take longer.
"""

import threading
import time
from collections.abc import Iterator

import grpc

from longhaul import channel, snapshots
from longhaul.budget import Budget
from longhaul.errors import Outage, Stopped
from longhaul.link_meter import Meter
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from longhaul.security import Credentials
from longhaul.types import Snapshot

_TIMEOUT_S = 600.0
_RETRY_S = 1.0
_PART_BYTES = 16 * 1024
_QUEUEING_S = 0.1  # added to a round trip that weights may cause
_FIRST_BYTES_PER_S = 256 * 1024.0
_STEP_S = 0.2  # between changes of the rate
_LONGEST_S = 20.0  # that a snapshot is stretched to, whatever the delay: it may not be the weights' doing


class Pace:
    """The rate of weights. Kept from one snapshot to the next. Not thread-safe.

    Args:
      meter: knows the path's delay.
    """

    def __init__(self, meter: Meter):
        self._meter = meter
        self.bytes_per_s = _FIRST_BYTES_PER_S
        self._growth = 1.5  # until the path's limit was met for the first time
        self._raised = False
        self._sent_bytes = 0
        self._stepped_s = time.monotonic()
        self._free_at_s = 0.0

    def wait_s(self, size: int, least_bytes_per_s: float, now_s: float) -> float:
        """Counts a message; returns how long to wait before sending it.

        Args:
          size: of the message, bytes.
          least_bytes_per_s: below which the rate does not fall.
          now_s: monotonic time.
        """
        elapsed_s, queueing_s = now_s - self._stepped_s, self._meter.queueing_s()
        if queueing_s > _QUEUEING_S:
            # Once for what a raise has done, and again only when the effect of that must have been seen.
            if self._raised or elapsed_s >= max(_STEP_S, 2 * queueing_s):
                self._step(0.5, now_s)
                self._growth = 1.1
                self._free_at_s = now_s + queueing_s  # what waits drains first
        elif elapsed_s >= _STEP_S:
            is_used = self._sent_bytes > 0.5 * self.bytes_per_s * elapsed_s
            self._step(self._growth if is_used else 1.0, now_s)
        self.bytes_per_s = max(self.bytes_per_s, least_bytes_per_s)
        self._sent_bytes += size
        starts_s = max(now_s, self._free_at_s)
        self._free_at_s = starts_s + size / self.bytes_per_s
        return starts_s - now_s

    def _step(self, factor: float, now_s: float) -> None:
        self.bytes_per_s *= factor
        self._raised = factor > 1
        self._sent_bytes, self._stepped_s = 0, now_s


class Publisher:
    """Sends the newest snapshot whenever there is one that the gateway may lack.

    Over a connection of its own: what waits in a socket's buffer can't be overtaken, and Acks must not wait behind
    weights.

    Args:
      address: the gateway's.
      credentials: see `LinkClient`.
      budget: of the way up; weights wait for it, Acks don't.
      meter: counts.
      closed: ends `run`.

    Attributes:
      busy: whether a snapshot is on its way, which wants the path's delay measured often.
    """

    def __init__(
        self, address: str, credentials: Credentials | None, budget: Budget, meter: Meter, closed: threading.Event
    ):
        self._address = address
        self._credentials = credentials
        self._budget = budget
        self._meter = meter
        self._closed = closed
        self._pace = Pace(meter)
        self._newest: Snapshot | None = None
        self.busy = False
        self._wanted = threading.Event()

    def offer(self, snapshot: Snapshot) -> None:
        """Hands a snapshot over; one that still waits is replaced."""
        self._newest = snapshot
        self._wanted.set()

    def again(self) -> None:
        """Sends what was sent last once more: the gateway may have lost it."""
        self._wanted.set()

    def run(self) -> None:
        """Sends until `closed` is set.

        Raises:
          Refused: the gateway won't have them.
        """
        while not self._closed.is_set():
            if not self._wanted.wait(0.5):
                continue
            self._wanted.clear()
            if self._newest is None or self._closed.is_set():
                continue
            connection = channel.open_channel(self._address, self._credentials)
            self.busy = True
            try:
                rpc.GatewayStub(connection).PublishWeights(self._chunks(self._newest), timeout=_TIMEOUT_S)
                self._meter.count("snapshots_published")
            except grpc.RpcError as error:
                ours = channel.our_error(error, self._address, self._credentials)
                if not isinstance(ours, Outage):
                    raise ours from None
                self._meter.count("publish_failures")
                if not self._closed.wait(_RETRY_S):
                    self._wanted.set()
            finally:
                self.busy = False
                connection.close()

    def _chunks(self, snapshot: Snapshot) -> Iterator[pb.WeightsChunk]:
        for chunk in snapshots.to_chunks(snapshot, self._budget.part_bytes(_PART_BYTES)):
            size = chunk.ByteSize()
            least_bytes_per_s = len(snapshot.payload) / _LONGEST_S
            self._closed.wait(self._pace.wait_s(size, least_bytes_per_s, time.monotonic()))
            try:
                self._budget.take(size, self._closed)
            except Stopped:
                return
            self._meter.published(size)
            yield chunk
