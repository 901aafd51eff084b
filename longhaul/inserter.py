"""How an actor's experience enters a site's buffer node: observation rows, and the transitions that refer to them.

One background thread sends both in one stream of messages, and the gateway answers each once its transitions are in
the replay (intake.py). What is not answered is sent again after a cut, and is numbered so that nothing is written
twice. The caller only packs and hands over. While the site takes nothing, transitions wait, up to a bound, then they
are dropped and counted.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np

from longhaul import codec
from longhaul.channel import PART_BYTES
from longhaul.errors import LonghaulError, MismatchError, Outage, Stopped, WorkerFailed
from longhaul.proto import longhaul_pb2 as pb
from longhaul.records import MOST_TRANSITIONS, RecordPacker
from longhaul.site_client import SiteClient
from longhaul.types import ExperienceSpec, NStepTransition

_RETRY_S = 0.1  # between looks at a pipe that was found full
_RECONNECT_S = 0.2
# Messages cost more than what is in them: one takes what comes within a period, and a slow actor's of four of them.
_GATHER_S, _GATHER_PERIODS, _ENOUGH = 0.005, 4, 32
# Beyond these, messages would queue up at a busy node, small ones, each at the price of a large one.
_MESSAGES_IN_FLIGHT = 2
_LARGEST = float(np.finfo(np.float32).max)


class _Row:
    """One of a stream's newest rows."""

    __slots__ = ("cell", "sent")

    def __init__(self, cell: bytes):
        self.cell = cell
        self.sent = 0  # number of the last connection that it went over


class _Waiting(NamedTuple):
    """A transition on its way, and the rows that must be there before it."""

    stream: int
    rows: list[_Row]
    record: bytes


class _Message(NamedTuple):
    """What goes out together."""

    places: list[int]  # each row's stream
    cells: list[bytes]
    transitions: list[_Waiting]


class Inserter:
    """Writes the rows and transitions of one actor's streams into a site. Its methods are for one thread.

    Never blocks longer than `write_timeout_s`, and follows the site to a buffer node that has restarted.

    Args:
      site: announced.
      spec: of the experience.
      num_streams: environment streams, each with rows of its own.
      keep_rows: newest rows of a stream that a transition may refer to.
      max_pending_items: transitions handed over and not yet known to be in the replay, over all streams.
      write_timeout_s: how long a full pipe may hold the caller.

    Attributes:
      counters: written_items, dropped_items, refused_priorities, reconnects.
    """

    def __init__(
        self,
        site: SiteClient,
        spec: ExperienceSpec,
        num_streams: int,
        keep_rows: int,
        max_pending_items: int,
        write_timeout_s: float,
    ):
        self._site = site
        self._spec = spec
        self._keep_rows = max(keep_rows, 2 * spec.stack + spec.n_step)
        self._max_pending = max_pending_items
        self._timeout_s = write_timeout_s
        self._cells = codec.CellPacker()
        self._records = RecordPacker(spec.stack)
        self._rows: list[dict[int, _Row]] = [{} for _ in range(num_streams)]  # a stream's newest, oldest first, by id
        self.counters = {"written_items": 0, "dropped_items": 0, "refused_priorities": 0, "reconnects": 0}
        self._lock = threading.Condition()
        self._unsent: deque[_Waiting] = deque()
        self._unanswered: deque[list[_Waiting]] = deque()  # of each message on this connection, oldest first
        self._pending = 0  # transitions in both
        self._written = 0  # transitions taken by the node, over this writer's life
        self._writer_id = secrets.randbits(64)
        self._connection = 0
        self._failure: LonghaulError | None = None
        self._full_until_s = 0.0
        self._closing = threading.Event()
        self._call: Any = None
        self._run_id = ""
        self._thread = threading.Thread(target=self._run, name="inserter", daemon=True)
        self._thread.start()

    def add_row(self, stream: int, row_id: int, row: np.ndarray) -> None:
        """Makes a row available to the stream's transitions.

        Args:
          stream: from 0.
          row_id: unique for ever.
          row: [*row_shape] of the spec's row dtype; copied.

        Raises:
          LonghaulError: the row's size is not the spec's.
        """
        data = np.ascontiguousarray(row).tobytes()
        if len(data) != self._spec.row_bytes:
            raise LonghaulError(f"a row of {len(data)} bytes can't be stored, the spec says {self._spec.row_bytes}")
        rows = self._rows[stream]
        rows[row_id] = _Row(self._cells.pack(row_id, data))
        if len(rows) > self._keep_rows:
            del rows[next(iter(rows))]

    def add_transition(self, stream: int, transition: NStepTransition, policy_version: int, priority: float) -> bool:
        """Hands over one transition with its first priority.

        Returns:
          False if it will not be written: a priority, return or discount that is not finite or is negative
          (refused), or a site that takes nothing at present (dropped). Both are counted.

        Raises:
          LonghaulError: it refers to a row that is not among the stream's newest, or the gateway refuses this actor.
        """
        if self._failure is not None:
            raise self._failure
        if not (0.0 <= priority <= _LARGEST and abs(transition.n_step_return) <= _LARGEST) or not (
            0.0 <= transition.discount <= _LARGEST
        ):
            self.counters["refused_priorities"] += 1
            return False
        newest = self._rows[stream]
        try:
            rows = [newest[row_id] for row_id in transition.obs_ids + transition.next_ids]
        except KeyError as error:
            raise LonghaulError(f"row {error} is not among the {self._keep_rows} newest rows of its stream") from None
        record = self._records.pack(transition, policy_version, priority)
        with self._lock:
            if not self._has_room():
                self.counters["dropped_items"] += 1
                return False
            idle = not self._unsent
            self._unsent.append(_Waiting(stream, rows, record))
            self._pending += 1
            if idle:  # else the sender is awake: to wake it for each transition cost more than the transition
                self._lock.notify_all()
        return True

    def close(self) -> None:
        """Lets the pending transitions go out, for at most write_timeout_s, and lets go of the connection."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._lock:
            while self._pending and (left_s := deadline_s - time.monotonic()) > 0 and self._thread.is_alive():
                self._lock.wait(min(left_s, 0.1))
            self._closing.set()
            self._lock.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(self._timeout_s + 1.0)

    def _has_room(self) -> bool:
        """Waits for room once; while there is none, looks again now and then. Under the lock."""
        if self._pending < self._max_pending:
            self._full_until_s = 0.0
            return True
        now_s = time.monotonic()
        if now_s < self._full_until_s:
            return False
        # Once full, a look must not hold the actor again: it has already waited its timeout.
        deadline_s = now_s if self._full_until_s else now_s + self._timeout_s
        while self._pending >= self._max_pending and (left_s := deadline_s - time.monotonic()) > 0:
            self._lock.wait(left_s)
        if self._pending >= self._max_pending:
            self._full_until_s = time.monotonic() + _RETRY_S
            return False
        self._full_until_s = 0.0
        return True

    # ---- the background thread, and gRPC's own that takes the requests

    def _run(self) -> None:
        said = False
        while not self._closing.is_set():
            try:
                self._begin()
                answered = False
                for response in self._call:
                    if not answered and self._connection > 1:
                        self.counters["reconnects"] += 1
                    answered, said = True, False
                    self._confirm(response)
            except grpc.RpcError as error:
                if self._closing.is_set():
                    return
                ours = self._site.explain(error)
                # A node that has restarted does not know this actor before it is announced there again.
                if not isinstance(ours, Outage | MismatchError):
                    self._failure = ours
                    return
                if not said:
                    logging.warning("experience can't be sent to the gateway: %s", ours)
                    said = True
            except Stopped:
                return
            except Exception as error:
                self._failure = WorkerFailed(f"writing experience failed: {error!r}")
                logging.exception("%s", self._failure)
                return
            self._closing.wait(_RECONNECT_S)

    def _begin(self) -> None:
        """Opens a stream to the buffer node that the site's description names."""
        run_id = self._site.description.run_id
        with self._lock:
            if run_id != self._run_id:
                if self._run_id:
                    # What the node before held is gone, and with it what these transitions refer to.
                    self.counters["dropped_items"] += self._pending
                    self._unsent.clear()
                    self._unanswered.clear()
                    self._pending = 0
                self._run_id = run_id
            self._unsent.extendleft(reversed(list(itertools.chain(*self._unanswered))))
            self._unanswered.clear()
            self._connection += 1
            first = pb.InsertRequest(
                run_id=run_id, writer_id=self._writer_id, streams=len(self._rows), keep_rows=self._keep_rows
            )
            self._unanswered.append([])
        self._call = self._site.insert(self._requests(first, self._connection))

    def _requests(self, first: pb.InsertRequest, connection: int) -> Iterator[pb.InsertRequest]:
        yield first
        number = self._written  # of the next transition to be sent
        while True:
            with self._lock:
                while not self._closing.is_set() and connection == self._connection:
                    if self._unsent and len(self._unanswered) < _MESSAGES_IN_FLIGHT:
                        break
                    self._lock.wait(0.5)
            self._gather()
            with self._lock:
                if self._closing.is_set() or connection != self._connection:
                    return
                message = self._next_message()
                self._unanswered.append(message.transitions)
            yield pb.InsertRequest(
                places=np.array(message.places, "<i4").tobytes(),
                cells=message.cells,
                first_transition=number,
                transitions=b"".join(waiting.record for waiting in message.transitions),
            )
            number += len(message.transitions)

    def _gather(self) -> None:
        """Waits until there is enough for a message; looks now and then, where a notice of each would cost more."""
        for period in range(_GATHER_PERIODS):
            if self._closing.is_set() or len(self._unsent) >= (_ENOUGH if period else MOST_TRANSITIONS):
                return
            self._closing.wait(_GATHER_S)

    def _next_message(self) -> _Message:
        """Takes what fits into one message; under the lock.

        Every row goes over each connection anew before the first transition that needs it there: the node keeps what
        this connection has brought, and after an outage it may have let go of what others have.
        """
        message = _Message([], [], [])
        size = 0
        while self._unsent and len(message.transitions) < MOST_TRANSITIONS:
            waiting = self._unsent[0]
            for row in waiting.rows:
                if row.sent != self._connection:
                    if size >= PART_BYTES:
                        return message  # the rest, and the transition, with the next
                    row.sent = self._connection
                    message.places.append(waiting.stream)
                    message.cells.append(row.cell)
                    size += len(row.cell)
            size += len(waiting.record)
            message.transitions.append(self._unsent.popleft())
        return message

    def _confirm(self, response: pb.InsertResponse) -> None:
        """Takes the answer to the oldest message."""
        with self._lock:
            count = len(self._unanswered.popleft())
            self._pending -= count
            self._written += count
            self.counters["written_items"] += count
            self._lock.notify_all()
