"""How a peer at the site (an actor, an evaluator) speaks with the gateway: announce, follow weights, obey pacing.

A site's network is near, yet the gateway may restart: every thread here tries again until its stop event.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc

from longhaul import channel, snapshots
from longhaul.errors import Corruption, LonghaulError, Outage, Stopped
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from longhaul.security import Credentials
from longhaul.types import ExperienceSpec, Snapshot

_CALL_TIMEOUT_S = 5.0
_HEALTH_PERIOD_S = 0.1
_RETRY_S = 0.5  # give or take half: a site's peers must not all come back at once
_SILENT_WATCHES = 10  # streams of weights that may fail in a row, while the gateway answers, before a warning


class SiteDescription(NamedTuple):
    """What a gateway says of its site.

    Attributes:
      run_id: new with each start of the buffer node.
      spec: of the site's experience.
      capacity: items the replay holds at most.
      min_size: items before the first sample.
      priority_exponent: alpha.
      weights_epoch: of the newest snapshot held, 0 if none.
      weights_version: likewise.
    """

    run_id: str
    spec: ExperienceSpec
    capacity: int
    min_size: int
    priority_exponent: float
    weights_epoch: int
    weights_version: int


def describe(
    stub: rpc.GatewayStub,
    address: str,
    role: str,
    spec: ExperienceSpec | None,
    credentials: Credentials | None = None,
    timeout_s: float = _CALL_TIMEOUT_S,
) -> SiteDescription:
    """Asks once.

    Raises:
      Outage, Refused, MismatchError: see `channel.our_error`.
    """
    request = pb.DescribeRequest(protocol_version=channel.PROTOCOL_VERSION, role=role)
    if spec is not None:
        request.spec.CopyFrom(channel.spec_to_proto(spec))
    try:
        response = stub.Describe(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise channel.our_error(error, address, credentials) from None
    return SiteDescription(
        run_id=response.run_id,
        spec=channel.spec_from_proto(response.spec),
        capacity=response.capacity,
        min_size=response.min_size,
        priority_exponent=response.priority_exponent,
        weights_epoch=response.weights_epoch,
        weights_version=response.weights_version,
    )


class SiteClient:
    """A site peer's connection to its gateway.

    Usage:
      site = SiteClient("127.0.0.1:7720", "actor", stop)
      description = site.announce(spec)
      site.start()
      ... site.newest_weights(), site.paused, site.description ...
      site.close()

    Args:
      gateway_address: host:port.
      role: "actor" or "reader".
      stop: ends every wait.
      credentials: for TLS and the role's token; None speaks in the clear.
    """

    def __init__(self, gateway_address: str, role: str, stop: threading.Event, credentials: Credentials | None = None):
        self._address = gateway_address
        self._role = role
        self._stop = stop
        self._closed = threading.Event()
        self._credentials = credentials
        self._channel = channel.open_channel(gateway_address, credentials)
        self._stub = rpc.GatewayStub(self._channel)
        self._spec: ExperienceSpec | None = None
        self._description: SiteDescription | None = None
        self._weights = snapshots.SnapshotHolder()
        self._paused = False
        self._watch_call: grpc.Call | None = None
        self._failure: LonghaulError | None = None
        self._away_since_s = 0.0  # 0: the gateway answers
        self._failed_watches = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for name, work in (("follow-weights", self._follow_weights), ("follow-health", self._follow_health))
        ]

    @property
    def description(self) -> SiteDescription:
        """The newest description; another object after the buffer node has restarted."""
        assert self._description is not None, "announce first"
        return self._description

    @property
    def paused(self) -> bool:
        """Whether the gateway asks actors to wait, since the learner is behind.

        Raises:
          LonghaulError: a background thread has failed for good.
        """
        if self._failure is not None:
            raise self._failure
        return self._paused

    def newest_weights(self) -> Snapshot | None:
        """Returns the newest snapshot, None before the first; the same object until there is a newer one."""
        return self._weights.newest()

    def announce(self, spec: ExperienceSpec | None, timeout_s: float | None = None) -> SiteDescription:
        """Tells the gateway what experience this peer makes (None: it makes none), waiting until it answers.

        Raises:
          Refused, MismatchError: the gateway says no.
          DeadlineExceeded: no answer within timeout_s.
          Stopped: the stop event was set.
        """
        self._spec = spec
        backoff = channel.Backoff(f"gateway {self._address}", self._stop, cap_s=1.0, deadline_s=timeout_s)
        said = False
        while True:
            try:
                self._description = describe(self._stub, self._address, self._role, spec, self._credentials)
                return self._description
            except Outage as outage:
                if not said:
                    logging.warning("waiting for the gateway: %s", outage)
                    said = True
                backoff.wait(outage)

    def insert(self, requests: Iterator[pb.InsertRequest]) -> Any:
        """Opens a stream of experience to the gateway; returns gRPC's call, an iterator of InsertResponse.

        Raises:
          Stopped: this client is closed.
        """
        if self._done():
            raise Stopped("the site's client is closed")
        return self._stub.Insert(requests)

    def explain(self, error: grpc.RpcError) -> LonghaulError:
        """Returns our error for one of gRPC's."""
        return channel.our_error(error, self._address, self._credentials)

    def start(self) -> None:
        """Starts to follow weights and health in the background."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the background threads and the connection."""
        self._closed.set()
        if self._watch_call is not None:
            self._watch_call.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_CALL_TIMEOUT_S + 1.0)
        self._channel.close()

    def _done(self) -> bool:
        return self._closed.is_set() or self._stop.is_set()

    def _run(self, work: Callable[[], None]) -> None:
        """Repeats a piece of background work; an outage is waited out, a refusal reaches the caller."""
        while not self._done():
            try:
                work()
            except grpc.RpcError as error:
                ours = channel.our_error(error, self._address, self._credentials)
                if not isinstance(ours, Outage):
                    self._failure = ours
                    return
                if not self._done():
                    self._note_failure(work, ours)
                self._closed.wait(_RETRY_S * random.uniform(0.5, 1.5))
            except Corruption as error:
                logging.warning("refused what the gateway sent: %s", error)
                self._closed.wait(_RETRY_S)
            except Stopped:
                return
            except LonghaulError as error:
                self._failure = error
                return

    def _note_failure(self, work: Callable[[], None], outage: Outage) -> None:
        """One log line for an outage: Health tells when it begins and ends, since its calls are short."""
        if work == self._follow_health:
            self._paused = False
            if not self._away_since_s:
                self._away_since_s = time.monotonic()
                logging.warning("the gateway is away: %s", outage)
        elif not self._away_since_s:
            self._failed_watches += 1
            if self._failed_watches == _SILENT_WATCHES:
                logging.warning("the gateway answers, but sends no weights: %s", outage)

    def _follow_weights(self) -> None:
        held = self._weights.newest()
        request = pb.WatchRequest(epoch=held.epoch if held else 0, version=held.version if held else 0)
        self._watch_call = self._stub.WatchWeights(request)
        for snapshot in snapshots.from_chunks(self._watch_call):
            self._weights.offer(snapshot)
            self._failed_watches = 0

    def _follow_health(self) -> None:
        health = self._stub.Health(pb.HealthRequest(), timeout=_CALL_TIMEOUT_S)
        if self._away_since_s:
            logging.warning("the gateway is back after %.1f s", time.monotonic() - self._away_since_s)
            self._away_since_s = 0.0
        if health.run_id != self.description.run_id:
            # Another buffer node: an empty replay, perhaps elsewhere, and weights counted from anew.
            logging.warning("the buffer node has restarted: announcing again")
            self._weights.clear()
            if self._watch_call is not None:
                self._watch_call.cancel()
            self.announce(self._spec)
        self._paused = health.pause_inserts
        self._closed.wait(_HEALTH_PERIOD_S)
