"""The learner's end of the long-haul link: one stream of batches, its credits, its outages, its meters.

A batch arrives as cache slots and the few rows the cache lacks; an Ack carries the priorities back and is the
credit for the next batch. The window of batches in flight is just what hides the link,
ceil(turnaround * batches per second) + 1, since each further batch would be drawn on older priorities.

When the link is cut, the stream is opened again with the last batch that arrived whole; the gateway's mirror
goes back to it, acks that may have been lost are sent again, and the device cache goes on being right.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from longhaul import channel, codec
from longhaul.budget import Budget
from longhaul.errors import Corruption, LonghaulError, MismatchError, Outage, Stopped
from longhaul.inbox import Inbox
from longhaul.link_meter import Meter
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from longhaul.publisher import Publisher
from longhaul.security import Credentials
from longhaul.site_client import SiteDescription, describe
from longhaul.types import Batch, Snapshot
from longhaul.window import Window

_PING_PERIOD_S = 1.0
_PINGS_PER_PERIOD = 5  # while weights are sent, which give way to what they delay
_SILENCE_S = 15.0  # no message for so long, though a Ping is answered every second: the path is dead
_OPENING_SILENCE_S = 5.0  # likewise before the first answer: TCP's own retries become rarer and rarer, ours don't
_LARGEST_ACK_WAIT_S = 1.0
_BACKOFF_CAP_S = 3.0
_CONNECT_TIMEOUT_S = 10.0


class LinkClient:
    """The learner's connection to one site.

    Usage:
      link = LinkClient("site:7720", config, learner_id, stop)
      description = link.describe()
      link.open(cache_rows, batch_size, minibatches, epoch)
      while (batch := link.next_batch(1.0)) is not None: ... link.ack(batch.sequence, priorities)
      link.close()

    Args:
      gateway_address: host:port.
      config: the run's; `link` is read.
      learner_id: random, one per learner process.
      stop: ends every wait with Stopped.
      deadline_s: of one outage; None tries for ever.
      credentials: for TLS and the learner's token; None speaks in the clear.
      budget_bytes_per_s: of each direction; 0 is no limit.
      silence_s: without any message before the path is taken for dead.
    """

    def __init__(
        self,
        gateway_address: str,
        config: Any,
        learner_id: int,
        stop: threading.Event,
        deadline_s: float | None = None,
        credentials: Credentials | None = None,
        budget_bytes_per_s: float = 0.0,
        silence_s: float = _SILENCE_S,
    ):
        self._address = gateway_address
        self._config = config.link
        self._learner_id = learner_id
        self._stop = stop
        self._deadline_s = deadline_s
        self._budget = Budget(budget_bytes_per_s)
        self._silence_s = silence_s
        self._closing = False
        self._closed = threading.Event()
        self._credentials = credentials
        self._channel = channel.open_channel(gateway_address, credentials)
        self._lock = threading.Lock()
        self._description: SiteDescription | None = None
        self._open: pb.Open | None = None
        self._inbox = Inbox()
        self._requests: queue.SimpleQueue[pb.SampleRequest | None] | None = None
        self._call: grpc.Call | None = None
        self._unconfirmed: OrderedDict[int, bytes] = OrderedDict()
        self._first_sequence = 1  # of the present session; acks of earlier ones have nowhere to go
        self._failure: Exception | None = None
        self.window = Window(self._config.max_window)
        self.meter = Meter()
        self._publisher = Publisher(gateway_address, credentials, self._budget, self.meter, self._closed)
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (("link", self._run), ("link-ping", self._ping), ("link-publish", self._publisher.run))
        ]

    def describe(self, timeout_s: float | None = None) -> SiteDescription:
        """Returns what the site offers, waiting until it answers and an actor has announced its experience.

        Raises:
          Refused, MismatchError, DeadlineExceeded, Stopped.
        """
        backoff = channel.Backoff(f"site {self._address}", self._stop, cap_s=2.0, deadline_s=timeout_s)
        said = ""
        while True:
            try:
                self._description = self._ask()
                return self._description
            except Outage as outage:
                if str(outage) != said:
                    logging.warning("waiting for the site: %s", outage)
                    said = str(outage)
                backoff.wait(outage)

    def _ask(self) -> SiteDescription:
        stub = rpc.GatewayStub(self._channel)
        return describe(stub, self._address, "learner", None, self._credentials, _CONNECT_TIMEOUT_S)

    def open(self, cache_rows: int, batch_size: int, minibatches: int, epoch: int, mark_first: bool = False) -> None:
        """Starts the stream; batches of [minibatches, batch_size] transitions come from now on.

        With `mark_first` each says which of its transitions have not crossed before (Batch.first_crossings).
        """
        assert self._description is not None, "describe first"
        self._open = pb.Open(
            learner_id=self._learner_id,
            epoch=epoch,
            cache_rows=cache_rows,
            batch_size=batch_size,
            minibatches=minibatches,
            run_id=self._description.run_id,
            row_level=self._config.row_level,
            budget_bytes_per_s=self._budget.bytes_per_s,
            mark_first=mark_first,
        )
        self.meter.set_batch_size(batch_size)
        for thread in self._threads:
            thread.start()

    def next_batch(self, timeout_s: float) -> Batch | None:
        """Returns the next batch in order, None if there is none within timeout_s.

        Raises:
          Stopped: the stop event is set.
          Refused, MismatchError, DeadlineExceeded: the link has ended for good.
        """
        start_s = time.monotonic()
        batch = self._inbox.take(0.0)
        if batch is None:
            batch = self._inbox.take(timeout_s)
            self.window.starved(time.monotonic() - start_s)
        else:
            self.window.taken(start_s - batch.received_time_s)
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise Stopped("the link was stopped")
        return batch

    @property
    def down(self) -> bool:
        """See `Meter.down`."""
        return self.meter.down

    def ack(self, sequence: int, priorities: np.ndarray) -> None:
        """Sends a batch's priorities back; kept until the gateway confirms that it has applied them.

        Args:
          sequence: the batch's.
          priorities: float32 [K, B], in the batch's order.
        """
        packed = codec.pack_priorities(priorities, self._config.priority_bytes)
        self.window.consumed(time.monotonic())
        with self._lock:
            if sequence < self._first_sequence:
                return
            self._unconfirmed[sequence] = packed
            self._send_ack(sequence, packed)

    def publish(self, snapshot: Snapshot) -> None:
        """Hands a snapshot over for sending; returns at once. One that waits is replaced by a newer one."""
        self._publisher.offer(snapshot)

    def reset_cache(self) -> None:
        """Begins anew with an empty mirror: for a learner whose cache does not hold what it should."""
        assert self._open is not None
        self.meter.count("cache_resets")
        with self._lock:
            self._open.run_id = ""
            self._inbox.refuse()
        if self._call is not None:
            self._call.cancel()

    def read_stats(self) -> dict[str, float]:
        """Returns the link's figures since the last call: see `Meter.read` and `Window.figures`."""
        with self._lock:
            unconfirmed = len(self._unconfirmed)
        return {
            **self.meter.read(),
            **self.window.figures(),
            "batches_waiting": self._inbox.waiting,
            "acks_unconfirmed": unconfirmed,
        }

    def close(self) -> None:
        """Ends the stream and its threads; acks already handed over are given a moment to leave."""
        self._closing = True
        with self._lock:
            if self._requests is not None:
                self._requests.put(None)
        deadline_s = time.monotonic() + 2.0
        while self._call is not None and time.monotonic() < deadline_s and self._threads[0].is_alive():
            time.sleep(0.02)
        self._closed.set()
        self._publisher.again()
        if self._call is not None:
            self._call.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5.0)
        self._channel.close()

    # ---- the stream

    def _guard(self, work: Any) -> None:
        """Runs a thread's work; what ends it for good is raised at the learner's next call."""
        try:
            work()
        except Stopped:
            pass
        except Exception as error:
            if not self._closed.is_set():
                self._failure = error

    def _done(self) -> bool:
        return self._closed.is_set() or self._stop.is_set()

    def _run(self) -> None:
        """Opens stream after stream until the end; one log line where an outage starts, one where it ends."""
        backoff: channel.Backoff | None = None
        while not self._done():
            try:
                self._stream()
                if self._done() or self._closing:
                    return
                raise Outage(f"{self._address} ended the stream")
            except (grpc.RpcError, Outage, Corruption) as error:
                ours: LonghaulError
                if isinstance(error, grpc.RpcError):
                    # A stream that worked until now was cut, and that needs no explaining.
                    explain = not self.meter.connected or not self._inbox.last_sequence
                    ours = channel.our_error(error, self._address, self._credentials, explain)
                else:
                    ours = error
                if self._done() or self._closing:
                    return
                if isinstance(ours, Corruption):
                    self.meter.count("corrupt_messages")
                elif not isinstance(ours, Outage):
                    raise ours from None
                if backoff is None or self.meter.connected:
                    backoff = channel.Backoff(f"site {self._address}", self._stop, _BACKOFF_CAP_S, self._deadline_s)
                if self.meter.outage_starts():
                    logging.warning(
                        "link to %s is cut, batch %d was the last: %s", self._address, self._inbox.last_sequence, ours
                    )
                backoff.wait(ours)
                self._renew_channel()

    def _renew_channel(self) -> None:
        """A new connection, with a new look at the name: the old one may hang on a dead path or a moved host."""
        self._channel.close()
        self._channel = channel.open_channel(self._address, self._credentials)

    def _stream(self) -> None:
        """One stream, from Open to its end."""
        assert self._open is not None and self._description is not None
        requests: queue.SimpleQueue[pb.SampleRequest | None] = queue.SimpleQueue()
        opened = pb.Open()
        opened.CopyFrom(self._open)
        opened.last_sequence = self._inbox.last_sequence
        opened.window = self.window.size
        requests.put(pb.SampleRequest(open=opened))
        self.meter.heard()
        call = rpc.GatewayStub(self._channel).Sample(self._metered(requests), wait_for_ready=False)
        self._call = call
        try:
            self._receive(call, requests)
        finally:
            with self._lock:
                self._requests = None
            self._call = None
            requests.put(None)
            call.cancel()

    def _metered(self, requests: "queue.SimpleQueue[pb.SampleRequest | None]") -> Iterator[pb.SampleRequest]:
        while (request := requests.get()) is not None:
            size = request.ByteSize()
            # Priorities and pings do not wait for weights, whatever is overdrawn; and not for ever for each other.
            self._closed.wait(min(self._budget.spend(size), _LARGEST_ACK_WAIT_S))
            self.meter.sent(request.WhichOneof("kind"), size)
            yield request

    def _receive(
        self, call: Iterator[pb.SampleResponse], requests: "queue.SimpleQueue[pb.SampleRequest | None]"
    ) -> None:
        assert self._open is not None and self._description is not None
        self._inbox.start_stream()
        for response in call:
            kind = response.WhichOneof("kind")
            self.meter.received(response, kind)
            if kind == "opened":
                self._resume(response.opened, requests)
            elif kind == "pong":
                self.meter.pong(response.pong.id, response.pong.received_s)
                self._confirm(response.pong.acked_sequence)
            else:
                started_s = time.monotonic()
                message = self._inbox.put(response, self._description.spec, self._open, self.meter.rtt_s)
                if message is not None:
                    self._confirm(message.acked_sequence)
                    self.meter.batch(message)
                    worked_s = message.service_s + time.monotonic() - started_s
                    self.window.arrived(worked_s, message.credit_wait_s, message.priority_age_s)

    def _resume(self, opened: pb.Opened, requests: "queue.SimpleQueue[pb.SampleRequest | None]") -> None:
        """Takes the stream into use: sends again what may be lost, or begins anew with a gateway that forgot us."""
        assert self._open is not None
        with self._lock:
            if opened.resumed:
                self._inbox.go_on()
            else:
                dropped = self._inbox.begin(opened.next_sequence)
                self._unconfirmed.clear()
                self._first_sequence = opened.next_sequence
                if self._open.run_id and opened.run_id != self._open.run_id:
                    logging.warning("the site's buffer node has restarted: %d waiting batches dropped", dropped)
                    self._check_same_experience()
                self._open.run_id = opened.run_id
            self._requests = requests
            for sequence, packed in self._unconfirmed.items():
                self._send_ack(sequence, packed)
        self._publisher.again()  # a gateway that has restarted holds no weights
        cut_s = self.meter.outage_ends()
        if cut_s:
            logging.warning(
                "link to %s is back after %.1f s, cache %s, %d acks sent again",
                self._address,
                cut_s,
                "kept" if opened.resumed else "begun anew",
                len(self._unconfirmed),
            )

    def _check_same_experience(self) -> None:
        assert self._description is not None
        if differences := self._description.spec.differences(self._ask().spec):
            raise MismatchError(f"{self._address}: its experience has changed: {'; '.join(differences)}")

    def _send_ack(self, sequence: int, packed: bytes) -> None:
        if self._requests is not None:
            ack = pb.Ack(
                sequence=sequence,
                priorities=packed,
                width=self._config.priority_bytes,
                window=self.window.size,
                hold_s=self.window.hold_s,
            )
            self._requests.put(pb.SampleRequest(ack=ack))

    def _confirm(self, sequence: int) -> None:
        with self._lock:
            while self._unconfirmed and next(iter(self._unconfirmed)) <= sequence:
                self._unconfirmed.popitem(last=False)

    def _ping(self) -> None:
        count = 0
        while not self._closed.wait(_PING_PERIOD_S / _PINGS_PER_PERIOD) and not self._stop.is_set():
            count += 1
            is_regular = count % _PINGS_PER_PERIOD == 0
            if not is_regular and not self._publisher.busy:
                continue
            call = self._call
            patience_s = self._silence_s if self._requests is not None else _OPENING_SILENCE_S
            if call is not None and self.meter.silent_s() > patience_s:
                call.cancel()  # the stream's thread sees a cut and tries again
                continue
            with self._lock:
                if self._requests is None:
                    continue
                self._requests.put(pb.SampleRequest(ping=pb.Ping(id=self.meter.ping())))
            if is_regular:
                self.window.retune(self.meter.rtt_s)
