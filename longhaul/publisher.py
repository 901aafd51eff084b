"""Weights on their way up: the newest snapshot, sent once to the site, in the background."""

import threading
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
_PART_BYTES = 64 * 1024


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
    """

    def __init__(
        self, address: str, credentials: Credentials | None, budget: Budget, meter: Meter, closed: threading.Event
    ):
        self._address = address
        self._credentials = credentials
        self._budget = budget
        self._meter = meter
        self._closed = closed
        self._newest: Snapshot | None = None
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
                connection.close()

    def _chunks(self, snapshot: Snapshot) -> Iterator[pb.WeightsChunk]:
        for chunk in snapshots.to_chunks(snapshot, self._budget.part_bytes(_PART_BYTES)):
            size = chunk.ByteSize()
            try:
                self._budget.take(size, self._closed)
            except Stopped:
                return
            self._meter.published(size)
            yield chunk
