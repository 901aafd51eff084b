"""The gateway: the site's one door, through which batches leave, and priorities and weights come in.

It stands in the buffer node's process beside the Reverb server and turns samples into batches (session.py,
mirror.py, codec.py), hands weights on to the site's actors (snapshots.py), and tells actors when to wait. It knows
nothing of networks and losses. The replay is made when the first actor announces what its experience looks like;
whoever differs from it is refused by name.
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NoReturn

import grpc

from longhaul import buffer, intake, row_store, session, snapshots, stream, tcp
from longhaul.channel import PROTOCOL_VERSION, SERVER_OPTIONS, spec_from_proto, spec_to_proto
from longhaul.errors import ConfigError, Corruption, LonghaulError, MismatchError, Refused, Stopped
from longhaul.proto import longhaul_pb2 as pb
from longhaul.proto import longhaul_pb2_grpc as rpc
from longhaul.security import CheckToken, Credentials
from longhaul.types import ExperienceSpec

_MAX_CALLS = 1024  # threads for calls; each actor holds two, each learner and each evaluator one
_TABLE_PERIOD_S = 0.1  # between looks at the table's figures
_LEARNER_AWAY_S = 3.0  # a learner unheard for so long does not hold actors back
_STATUS_OF = {
    ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    Corruption: grpc.StatusCode.INVALID_ARGUMENT,
    MismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    Refused: grpc.StatusCode.ABORTED,
}


class Gateway:
    """The buffer node: replay and gateway in one process.

    Args:
      config: the run's; replay is read.
      host: address to listen on.
      port: 0 takes any.
      replay_port: Reverb's, which nobody but this process needs to reach; 0 takes any.
      credentials: for TLS and tokens; None serves in the clear, whoever calls.
      order: what leaves for the learner, "priority" or "arrival"; see `buffer.ReplayServer`.
      checkpoints: folder for checkpoints of the replay; a temporary one if None.
      congestion_control: TCP's, for what is sent to the learner; the kernel's default if empty.

    Attributes:
      port: listened on, after `start`.
      run_id: new with each start.
    """

    def __init__(
        self,
        config: Any,
        host: str = "127.0.0.1",
        port: int = 0,
        replay_port: int = 0,
        credentials: Credentials | None = None,
        order: str = "priority",
        checkpoints: Path | None = None,
        congestion_control: str = "",
    ):
        self._replay = config.replay
        self._congestion_control = congestion_control
        self._order = order
        self._checkpoints = checkpoints
        self._host = host
        self._credentials = credentials
        self.port = port
        self._replay_port = replay_port
        self.run_id = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._server: grpc.Server | None = None
        self._table: buffer.ReplayServer | None = None
        self._rows: row_store.RowStore | None = None
        self._session: session.Session | None = None
        self._accounts = intake.Accounts()
        self._weights = snapshots.SnapshotHolder()
        self._counters: Counter[str] = Counter()
        self._size_inserts_samples = (0, 0, 0)
        self._ahead_base = 0.0
        self._pause = False
        self._watcher = threading.Thread(target=self._watch_table, name="table-watcher", daemon=True)

    def start(self) -> None:
        """Listens.

        Raises:
          ConfigError: the address can't be listened on; names host and port. The kernel won't have the congestion
            control.
        """
        pool = futures.ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="call")
        check = None
        if self._credentials is not None:
            check = CheckToken(self._credentials.token_hashes, self._refused_call)
        server = grpc.server(pool, options=SERVER_OPTIONS, interceptors=[check] if check else [])
        rpc.add_GatewayServicer_to_server(_Service(self, check), server)
        address = f"{self._host}:{self.port}"
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials.for_server())
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(f"the gateway can't listen on {address}; choose another --host or --port")
        self.port = port
        self._server = server  # `stop` ends it, whatever still fails
        server.start()
        if self._congestion_control:
            tcp.set_congestion_control(port, self._congestion_control)
        self._watcher.start()
        logging.info("gateway of run %s listens on %s:%d", self.run_id, self._host, self.port)

    def stop(self, grace_s: float = 2.0) -> None:
        """Ends all calls, then the replay."""
        self._stop.set()
        with self._lock:
            if self._session is not None:
                self._session.close()
        if self._server is not None:
            self._server.stop(grace_s).wait(grace_s + 5.0)
        if self._watcher.ident is not None:
            self._watcher.join(5.0)
        if self._table is not None:
            self._table.stop()

    def read_stats(self) -> dict[str, float]:
        """Returns figures for metrics."""
        size, inserts, samples = self._size_inserts_samples
        return {
            "table_size": size,
            "inserts": inserts,
            "samples": samples,
            "spool_dropped": inserts - samples - size if self._order == "arrival" else 0,
            "pause_inserts": int(self._pause),
            "connected_actors": self._rows.feeds if self._rows is not None else 0,
            "stored_rows": len(self._rows) if self._rows is not None else 0,
            "stored_rows_bytes": self._rows.stored_bytes if self._rows is not None else 0,
            **session.figures(self._session),
            **self._counters,
        }

    def _refused_call(self, text: str) -> None:
        self._counters["refused_calls"] += 1
        logging.warning("refused a call: %s", text)

    def announce(self, spec: ExperienceSpec) -> None:
        """Makes the replay for the first actor's experience; checks each later one's against it.

        Raises:
          MismatchError: naming each field that differs.
        """
        with self._lock:
            if self._table is None:
                self._rows = row_store.RowStore(self._replay.capacity, spec.row_bytes, spec.rows_per_item)
                self._table = buffer.ReplayServer(spec, self._replay, self._replay_port, self._order, self._checkpoints)
                logging.info("replay for %s listens on port %d", spec, self._table.port)
                if outside := buffer.outside_address(self._table.port):
                    logging.warning(
                        "Reverb answers at %s:%d, unencrypted and without a password: close that port to other hosts "
                        "(launchers/site/replay-port.nft does it)",
                        outside,
                        self._table.port,
                    )
        if differences := self._table.spec.differences(spec):
            self._counters["refused_actors"] += 1
            raise MismatchError(f"this site's experience differs from yours: {'; '.join(differences)}")

    def describe(self) -> pb.DescribeResponse:
        """Returns what a peer must know."""
        table, weights = self._table, self._weights.newest()
        assert table is not None
        return pb.DescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            run_id=self.run_id,
            spec=spec_to_proto(table.spec),
            capacity=self._replay.capacity,
            min_size=self._replay.min_size,
            priority_exponent=self._replay.priority_exponent,
            weights_epoch=weights.epoch if weights else 0,
            weights_version=weights.version if weights else 0,
        )

    def open_stream(self, opened: pb.Open) -> tuple[stream.Stream, pb.Opened]:
        """Finds or makes the learner's session and attaches a stream to it.

        Raises:
          Refused: a learner with a higher epoch holds the site.
          ConfigError, MismatchError: sizes that can't work, or no experience announced yet.
        """
        with self._lock:
            table, rows = self._table, self._rows
            if table is None or rows is None:
                raise MismatchError("no actor has announced its experience yet: call Describe first")
            current = self._session
            if current is not None and current.learner_id != opened.learner_id:
                if opened.epoch <= current.epoch:
                    raise Refused(f"a learner of epoch {current.epoch} holds this site, yours is {opened.epoch}")
                current.close()
                self._counters["superseded_learners"] += 1
            resumed = current is not None and current.learner_id == opened.learner_id and opened.run_id == self.run_id
            if not resumed or current is None:
                if current is not None:
                    current.close()
                current = session.Session(opened, table, rows, self._counters)
                self._session = current
            carrier = stream.Stream(current)
            current.attach(opened, carrier)
            self._counters["streams"] += 1
            return carrier, pb.Opened(resumed=resumed, next_sequence=current.next_sequence, run_id=self.run_id)

    def checkpoint(self) -> Path:
        """Writes the table and the rows that it refers to; returns the folder."""
        table, rows = self._table, self._rows
        assert table is not None and rows is not None
        before = rows.snapshot()  # what is let go of while the table is being written may still be in it
        folder = Path(table.checkpoint())
        row_store.save_rows(folder / "rows.npz", before | rows.snapshot())
        return folder

    def open_intake(self, first: pb.InsertRequest, gone: Callable[[], bool]) -> intake.Intake:
        """Begins to take an actor's experience.

        Raises:
          MismatchError: the actor has announced itself to another run of this node.
          Corruption: its figures can't be.
        """
        if self._rows is None or self._table is None or first.run_id != self.run_id:
            raise MismatchError("the buffer node has restarted: announce the experience again")
        return intake.Intake(first, self._table, self._rows, self._accounts, lambda: self._stop.is_set() or gone())

    def _watch_table(self) -> None:
        """Reads the table's figures and decides whether actors should wait."""
        ratio = self._replay.samples_per_insert if self._order == "priority" else 0.0  # a queue drops, nobody waits
        allowed = ratio * self._replay.min_size + buffer.limiter_error_buffer(self._replay)
        while not self._stop.wait(_TABLE_PERIOD_S):
            if self._table is None:
                continue
            try:
                size, inserts, samples = self._table.info()
            except Exception as error:  # Reverb raises several kinds; the next look tries again
                logging.warning("the table's figures can't be read: %s", error)
                self._counters["table_failures"] += 1
                continue
            self._size_inserts_samples = (size, inserts, samples)
            current = self._session
            # Before the first learner they wait too, with what it needs to begin: all that they did at random until
            # it comes would crowd out what it teaches them. What they do on weights that one left is worth having.
            waited_for = current is None and not self._accounts.learned
            if current is not None:
                current.table_figures = (inserts, samples)
                waited_for = current.connected and time.monotonic() - current.heard_time_s < _LEARNER_AWAY_S
            ahead = ratio * inserts - samples if ratio else 0.0
            if not waited_for:
                # What is inserted while no learner draws is not held against the actors afterwards.
                self._ahead_base = max(self._ahead_base, ahead - allowed)
            before, self._pause = self._pause, waited_for and ahead - self._ahead_base > allowed
            if self._pause and not before and current is None:
                logging.info("the actors wait for a learner, with %d transitions for it to begin with", size)


class _Service(rpc.GatewayServicer):
    """The gRPC face of a gateway: errors to status codes, streams to sessions, and nothing else."""

    def __init__(self, gateway: Gateway, check: CheckToken | None):
        self._gateway = gateway
        self._check = check

    def _refuse(self, context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
        context.abort(code, text)
        raise AssertionError("abort raises")

    def _abort(self, context: grpc.ServicerContext, error: Exception) -> NoReturn:
        for kind, code in _STATUS_OF.items():
            if isinstance(error, kind):
                self._refuse(context, code, str(error))
        logging.exception("a call failed: %s", error)
        text = str(error) if isinstance(error, LonghaulError) else f"{type(error).__name__} at the gateway"
        self._refuse(context, grpc.StatusCode.INTERNAL, text)

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:
        gateway = self._gateway
        if request.protocol_version != PROTOCOL_VERSION:
            text = f"the gateway speaks protocol {PROTOCOL_VERSION}, you {request.protocol_version}: upgrade the older"
            self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        if self._check is not None and (known := self._check.role_of(context.invocation_metadata())) != request.role:
            text = f"the token is a {known}'s, the call says {request.role!r}"
            gateway._refused_call(text)
            self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, text)
        try:
            if request.HasField("spec"):
                if request.role != "actor":
                    raise ConfigError(f"only actors announce experience, not a {request.role!r}")
                gateway.announce(spec_from_proto(request.spec))
        except Exception as error:
            self._abort(context, error)
        if gateway._table is None:
            self._refuse(context, grpc.StatusCode.UNAVAILABLE, "no actor has announced its experience yet")
        return gateway.describe()

    def Sample(
        self, requests: Iterator[pb.SampleRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SampleResponse]:
        first = next(requests, None)
        if first is None or first.WhichOneof("kind") != "open":
            self._gateway._counters["corrupt_messages"] += 1
            self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "a Sample stream begins with Open")
        try:
            carrier, opened = self._gateway.open_stream(first.open)
        except Exception as error:
            self._abort(context, error)
        if not context.add_callback(carrier.close):
            carrier.close()
            return
        threading.Thread(target=carrier.receive, args=(requests,), name="receiver", daemon=True).start()
        carrier.start()
        yield pb.SampleResponse(opened=opened)
        try:
            yield from carrier.messages()
        except Exception as error:
            self._abort(context, error)
        if context.is_active():
            self._refuse(context, grpc.StatusCode.UNAVAILABLE, "the gateway ends this stream")

    def Insert(
        self, requests: Iterator[pb.InsertRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.InsertResponse]:
        taking: intake.Intake | None = None
        try:
            for request in requests:
                if taking is None:
                    taking = self._gateway.open_intake(request, lambda: not context.is_active())
                yield taking.take(request)
        except Stopped:
            pass
        except Corruption as error:
            self._gateway._counters["corrupt_messages"] += 1
            self._abort(context, error)
        except LonghaulError as error:
            self._abort(context, error)
        finally:
            if taking is not None:
                taking.close()

    def PublishWeights(self, chunks: Iterator[pb.WeightsChunk], context: grpc.ServicerContext) -> pb.PublishResponse:
        holder = self._gateway._weights
        accepted = False
        try:
            for snapshot in snapshots.from_chunks(chunks):
                accepted = holder.offer(snapshot)
                self._gateway._counters["weights_accepted" if accepted else "weights_outdated"] += 1
        except Corruption as error:
            self._gateway._counters["corrupt_messages"] += 1
            self._abort(context, error)
        newest = holder.newest()
        return pb.PublishResponse(
            accepted=accepted, epoch=newest.epoch if newest else 0, version=newest.version if newest else 0
        )

    def WatchWeights(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.WeightsChunk]:
        held = (request.epoch, request.version)
        while context.is_active() and not self._gateway._stop.is_set():
            snapshot = self._gateway._weights.wait_newer(*held, timeout_s=0.5)
            if snapshot is not None:
                held = snapshot[:2]
                yield from snapshots.to_chunks(snapshot)

    def Checkpoint(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> pb.CheckpointResponse:
        if self._gateway._table is None:
            self._refuse(context, grpc.StatusCode.UNAVAILABLE, "there is no replay yet")
        try:
            return pb.CheckpointResponse(path=str(self._gateway.checkpoint()))
        except Exception as error:
            self._abort(context, error)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        gateway = self._gateway
        size, inserts, samples = gateway._size_inserts_samples
        weights = gateway._weights.newest()
        current = gateway._session
        return pb.HealthResponse(
            run_id=gateway.run_id,
            table_size=size,
            inserts=inserts,
            samples=samples,
            learner_connected=current is not None and current.connected,
            pause_inserts=gateway._pause,
            weights_epoch=weights.epoch if weights else 0,
            weights_version=weights.version if weights else 0,
            counters=dict(gateway._counters),
        )
