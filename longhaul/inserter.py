"""How experience enters a site's buffer node: rows to the gateway's row store, then transitions to the replay.

A transition is written once the gateway has said that all of its rows are stored, so that whatever the replay draws
finds its rows. One background thread writes; the caller only packs rows and hands over. While the site takes
nothing, transitions wait, up to a bound, then they are dropped and counted.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np

from longhaul import buffer, codec
from longhaul.channel import PART_BYTES
from longhaul.errors import LonghaulError, MismatchError, Outage, Stopped, WorkerFailed
from longhaul.proto import longhaul_pb2 as pb
from longhaul.site_client import SiteClient
from longhaul.types import ExperienceSpec, NStepTransition

_RETRY_S = 0.1  # between looks at a pipe that was found full
_RECONNECT_S = 0.2
_ROWS_PER_MESSAGE = 64
_GATHER_S = 0.005  # rows that come within it share a message: messages cost the gateway more than rows
_FLUSH_PERIOD_ITEMS = 32  # Reverb warns of more than 50 unconfirmed
_LARGEST = float(np.finfo(np.float32).max)


class _Row:
    """One of a stream's newest rows."""

    __slots__ = ("cell", "sent")

    def __init__(self, cell: bytes):
        self.cell = cell
        self.sent = False


class _Waiting(NamedTuple):
    """A transition, and how many rows must have been stored before it may be written."""

    rows: int
    transition: NStepTransition
    policy_version: int
    priority: float


class Inserter:
    """Writes the rows and transitions of one actor's streams into a site. Its methods are for one thread.

    Never blocks longer than `write_timeout_s`, and follows the site to a buffer node that has restarted.

    Args:
      site: announced; its description says where the replay is.
      spec: of the experience.
      num_streams: environment streams, each with rows of its own.
      keep_rows: newest rows of a stream that a transition may refer to.
      max_pending_items: transitions handed over and not yet written, over all streams.
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
        self._packer = codec.CellPacker()
        self._rows: list[dict[int, _Row]] = [{} for _ in range(num_streams)]  # a stream's newest, oldest first, by id
        self.counters = {"written_items": 0, "dropped_items": 0, "refused_priorities": 0, "reconnects": 0}
        self._lock = threading.Condition()
        self._unsent: deque[tuple[int, bytes]] = deque()  # (stream, cell)
        self._unstored: deque[tuple[int, bytes]] = deque()  # sent and not yet confirmed
        self._waiting: deque[_Waiting] = deque()
        self._queued_rows = 0  # ever
        self._stored_rows = 0  # ever
        self._stored_before = 0  # this connection
        self._handed_over = 0  # transitions, over this connection
        self._settled = 0  # likewise
        self._ask = False  # the gateway to answer though no row goes to it
        self._connection = 0
        self._failure: LonghaulError | None = None
        self._full_until_s = 0.0
        self._closing = threading.Event()
        self._call: Any = None
        self._run_id = ""
        self._items: buffer.ItemWriter | None = None
        self._unflushed = 0
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
        rows[row_id] = _Row(self._packer.pack(row_id, data))
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
        with self._lock:
            if not self._has_room():
                self.counters["dropped_items"] += 1
                return False
            idle = not (self._unsent or self._ask)
            for row in rows:
                if not row.sent:
                    row.sent = True
                    self._unsent.append((stream, row.cell))
                    self._queued_rows += 1
            self._waiting.append(_Waiting(self._queued_rows, transition, policy_version, priority))
            self._handed_over += 1
            # Its rows may all be stored already, with no answer to come that would let it go.
            self._ask = self._queued_rows == self._stored_rows
            if idle:  # else the sender is awake: to wake it for each transition cost more than the transition
                self._lock.notify_all()
        return True

    def close(self) -> None:
        """Lets the pending transitions go out, for at most write_timeout_s, and lets go of the connection."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._lock:
            while self._waiting and (left_s := deadline_s - time.monotonic()) > 0 and self._thread.is_alive():
                self._lock.wait(min(left_s, 0.1))
            self._closing.set()
            self._lock.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(self._timeout_s + 1.0)
        if self._items is not None:
            with contextlib.suppress(WorkerFailed):
                self._items.flush(0, max(0.0, deadline_s - time.monotonic()))
            self._items.close()

    def _has_room(self) -> bool:
        """Waits for room once; while there is none, looks again now and then. Under the lock."""
        if len(self._waiting) < self._max_pending:
            self._full_until_s = 0.0
            return True
        now_s = time.monotonic()
        if now_s < self._full_until_s:
            return False
        # Once full, a look must not hold the actor again: it has already waited its timeout.
        deadline_s = now_s if self._full_until_s else now_s + self._timeout_s
        while len(self._waiting) >= self._max_pending and (left_s := deadline_s - time.monotonic()) > 0:
            self._lock.wait(left_s)
        if len(self._waiting) >= self._max_pending:
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
                    self._stored(response.stored)
            except grpc.RpcError as error:
                if self._closing.is_set():
                    return
                ours = self._site.explain(error)
                # A node that has restarted does not know this actor before it is announced there again.
                if not isinstance(ours, Outage | MismatchError):
                    self._failure = ours
                    return
                if not said:
                    logging.warning("rows can't be sent to the gateway: %s", ours)
                    said = True
            except Stopped:
                return
            except Exception as error:
                self._failure = WorkerFailed(f"writing experience failed: {error!r}")
                logging.exception("%s", self._failure)
                return
            self._closing.wait(_RECONNECT_S)

    def _begin(self) -> None:
        """Opens a stream of rows, to the buffer node that the site's description names."""
        description = self._site.description
        with self._lock:
            if description.run_id != self._run_id:
                if self._run_id:
                    # What the node before held is gone, and with it what these transitions refer to.
                    self.counters["dropped_items"] += len(self._waiting)
                    self._waiting.clear()
                    self._unsent.clear()
                    self._unstored.clear()
                    self._stored_rows = self._queued_rows
                self._run_id = description.run_id
                if self._items is not None:
                    self._items.close()
                self._items = buffer.ItemWriter(description.replay_address, self._spec)
            # Rows may be stored twice, never too late: what is pinned there is pinned by this connection alone.
            self._unsent.extendleft(reversed(self._unstored))
            self._unstored.clear()
            for rows in self._rows:
                for row in list(rows.values()):  # at once: the actor goes on adding
                    row.sent = row.sent and any(row.cell is cell for _, cell in self._unsent)
            self._stored_before = self._stored_rows
            self._handed_over, self._settled = len(self._waiting), 0
            self._ask = bool(self._waiting)
            self._connection += 1
        first = pb.RowsRequest(
            run_id=self._run_id, streams=len(self._rows), keep_rows=self._keep_rows, pending=self._max_pending
        )
        self._call = self._site.put_rows(self._requests(first, self._connection))

    def _requests(self, first: pb.RowsRequest, connection: int) -> Iterator[pb.RowsRequest]:
        yield first
        while True:
            with self._lock:
                while not (self._unsent or self._ask or self._closing.is_set() or connection != self._connection):
                    self._lock.wait(0.5)
                size = sum(len(cell) for _, cell in itertools.islice(self._unsent, _ROWS_PER_MESSAGE))
                full = len(self._unsent) >= _ROWS_PER_MESSAGE or size >= PART_BYTES
            if not full:
                self._closing.wait(_GATHER_S)
            with self._lock:
                if self._closing.is_set() or connection != self._connection:
                    return
                self._ask = False
                batch: list[tuple[int, bytes]] = []
                size = 0
                while self._unsent and len(batch) < _ROWS_PER_MESSAGE and size < PART_BYTES:
                    batch.append(self._unsent.popleft())
                    size += len(batch[-1][1])
                self._unstored.extend(batch)
                request = pb.RowsRequest(handed_over=self._handed_over, settled=self._settled)
            request.places = np.array([stream for stream, _ in batch], "<i4").tobytes()
            request.cells.extend(cell for _, cell in batch)
            yield request

    def _stored(self, stored: int) -> None:
        """Writes the transitions whose rows are all stored by now."""
        with self._lock:
            now = self._stored_before + stored
            for _ in range(now - self._stored_rows):
                self._unstored.popleft()
            self._stored_rows = now
            ready = []
            for waiting in self._waiting:
                if waiting.rows > now:
                    break
                ready.append(waiting)
        written = sum(self._write(waiting) for waiting in ready)
        with self._lock:
            for _ in ready:
                self._waiting.popleft()
            self._settled += len(ready)
            self.counters["written_items"] += written
            self.counters["dropped_items"] += len(ready) - written
            self._lock.notify_all()

    def _write(self, waiting: _Waiting) -> bool:
        """Writes one transition; False if the replay's connection has failed."""
        assert self._items is not None
        try:
            self._items.write(waiting.transition, waiting.policy_version, waiting.priority)
            self._unflushed += 1
            if self._unflushed >= _FLUSH_PERIOD_ITEMS:
                # Bounds what Reverb holds unconfirmed; meanwhile transitions wait here, where they are counted. A
                # writer whose server is gone waits for ever, but then the connection to the gateway ends too.
                while (
                    not self._closing.is_set()
                    and self._call.is_active()
                    and not self._items.flush(_FLUSH_PERIOD_ITEMS // 2, _RETRY_S)
                ):
                    pass
                self._unflushed = _FLUSH_PERIOD_ITEMS // 2
        except WorkerFailed as error:
            logging.warning("%s", error)
            return False
        return True
