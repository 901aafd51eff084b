"""One learner's session with the gateway: credits, batches in flight, the mirror, and the streams that carry them.

A session outlives its streams. It is named by the learner's random id; a stream that is cut is followed by
another one that says which batch arrived last, and the session goes on from there.

Invariant: a batch is sent only while fewer than `window` batches are sent and not acknowledged. Each was drawn
when its credit was there, never before, so that its priorities are as fresh as the link allows.
"""

import math
import threading
import time
import zlib
from collections import OrderedDict, deque
from typing import Any, Protocol

import numpy as np

from longhaul import codec
from longhaul.budget import Budget
from longhaul.buffer import ReplaySampler, ReplayServer
from longhaul.channel import PART_BYTES
from longhaul.crossings import Crossings
from longhaul.draw_pace import DrawPace
from longhaul.errors import ConfigError, Stopped
from longhaul.mirror import Mirror
from longhaul.proto import longhaul_pb2 as pb
from longhaul.queue_sampler import QueueSampler
from longhaul.row_level import RowLevel
from longhaul.row_store import RowStore
from longhaul.types import AUDITED_ROWS, DrawnSamples
from longhaul.window import LARGEST_HOLD_S

MAX_WINDOW = 1024
MAX_BATCH_BYTES = 2**30  # rows of one batch unpacked, were all of them new
_AUDIT_PERIOD_S = 10.0
_MAX_PRIORITY = 1e9  # a finite priority can still drown all others in Reverb's float sums
_AHEAD = 64  # samples that Reverb draws before they are asked for
_DRAWS_AHEAD = 4  # drawn by Reverb, waiting for the packer, being packed, and one to spare


class Carrier(Protocol):
    """What a session asks of its stream; see stream.Stream."""

    closed: threading.Event

    def close(self) -> None: ...

    def join(self) -> None: ...


class _InFlight:
    """What the gateway must remember of a batch until its Ack."""

    def __init__(self, drawn: DrawnSamples):
        self.wire_bytes = 0
        self.sent_age_s = 0.0  # from its draw to its sending
        self.keys = drawn.keys
        self.first = np.zeros(len(drawn.keys), np.bool_)
        self.drawn_time_s = drawn.drawn_time_s


class Session:
    """The state that one learner keeps at one gateway.

    Args:
      opened: the stream's first message.
      server: the replay to draw from.
      rows: what its transitions refer to.
      counters: shared with the gateway: refused_priorities, corrupt_messages, rolled_back_batches ...

    Raises:
      ConfigError: sizes that can't work, each named.
    """

    def __init__(self, opened: pb.Open, server: ReplayServer, rows: RowStore, counters: dict[str, int]):
        spec = server.spec
        self.learner_id = opened.learner_id
        self.epoch = opened.epoch
        self.count = opened.batch_size * opened.minibatches
        self._check_sizes(opened, spec.row_bytes, spec.stack)
        self._server = server
        self._rows = rows
        self._reserved_rows = _DRAWS_AHEAD * self.count
        rows.reserve(self._reserved_rows)
        self._spec = spec
        self._counters = counters
        # One for all streams: to take a sampler down costs Reverb up to seconds.
        self._queue = QueueSampler(server, self.count) if server.order == "arrival" else None
        self.sampler = self._queue or ReplaySampler(server, self.count, ahead=_AHEAD)
        self._mirror = Mirror(opened.cache_rows)
        self._coder = codec.SlotCoder(opened.cache_rows, spec.stack, spec.n_step)
        self._crossings = Crossings(2 * server.capacity) if opened.mark_first else None
        self._lock = threading.Condition()
        self._in_flight: OrderedDict[int, _InFlight] = OrderedDict()
        self._reserved = 0  # credits taken for batches that are being drawn
        self._next_sequence = opened.last_sequence + 1
        self._window = 1
        self._hold_s = 0.0
        self._ack_times_s: deque[float] = deque(maxlen=MAX_WINDOW)  # of the credits that came back last
        self._row_level = RowLevel(0)
        self.budget = Budget(0.0)
        self.pace = DrawPace()
        self._next_audit_s = time.monotonic() + _AUDIT_PERIOD_S
        self._stream: Carrier | None = None
        self.heard_time_s = time.monotonic()
        self.priority_age_s = 0.0
        self.table_figures = (0, 0)  # items inserted and sampled, as the gateway last read them

    def _check_sizes(self, opened: pb.Open, row_bytes: int, stack: int) -> None:
        if opened.batch_size < 1 or opened.minibatches < 1:
            raise ConfigError("batch size and minibatches per pull must be at least 1")
        rows = 2 * stack * self.count
        if rows * row_bytes > MAX_BATCH_BYTES:
            raise ConfigError(
                f"a batch may need {rows} rows of {row_bytes} bytes, {rows * row_bytes} bytes in all; at most "
                f"{MAX_BATCH_BYTES} are sent: lower config.learner.batch_size or config.learner.minibatches_per_pull"
            )
        if opened.cache_rows < rows:
            raise ConfigError(
                f"the learner's cache of {opened.cache_rows} rows can't hold the {rows} rows of one batch: raise "
                f"config.learner.cache_bytes to {rows * row_bytes} or more"
            )

    @property
    def connected(self) -> bool:
        """Whether a stream is open."""
        return self._stream is not None and not self._stream.closed.is_set()

    def attach(self, opened: pb.Open, stream: Carrier) -> None:
        """Takes a new stream, ending the one before, and goes back to the last batch received."""
        previous = self._stream
        if previous is not None:
            previous.close()
            previous.join()
        with self._lock:
            lost = [s for s in self._in_flight if s > opened.last_sequence]
            for sequence in lost:
                batch = self._in_flight.pop(sequence)
                if self._crossings is not None:
                    self._crossings.undo(batch.keys[batch.first])
            self._counters["rolled_back_batches"] += len(lost)
            self._mirror.roll_back(opened.last_sequence)
            self._coder = codec.SlotCoder(self._mirror.capacity, self._spec.stack, self._spec.n_step)
            if self._queue is not None:
                self._queue.roll_back(len(self._in_flight))
            self._next_sequence = opened.last_sequence + 1
            self._reserved = 0
            self._set_window(opened.window)
            self._row_level = RowLevel(opened.row_level)
            self.budget = Budget(opened.budget_bytes_per_s)
            self.heard_time_s = time.monotonic()
        self._stream = stream

    def close(self) -> None:
        """Ends the session's stream, for good."""
        stream, self._stream = self._stream, None  # no cycle: the sampler's threads go as soon as the stream's have
        if stream is not None:
            stream.close()
        self.sampler.close()
        self._rows.reserve(-self._reserved_rows)
        self._reserved_rows = 0

    @property
    def next_sequence(self) -> int:
        """Sequence of the next batch."""
        return self._next_sequence

    @property
    def acked_sequence(self) -> int:
        """Highest sequence with all acks up to it applied."""
        with self._lock:
            return next(iter(self._in_flight), self._next_sequence) - 1

    @property
    def part_bytes(self) -> int:
        """Size of one message's rows at most."""
        return self.budget.part_bytes(PART_BYTES)

    def _set_window(self, window: int) -> None:
        self._window = min(max(1, window), MAX_WINDOW)

    def apply_ack(self, ack: pb.Ack) -> None:
        """Applies the priorities of one batch and takes its credit back. A repeated Ack is passed over.

        Raises:
          Corruption: the priorities are not those of one batch.
        """
        acked_time_s = time.monotonic()
        with self._lock:
            self._set_window(ack.window)
            self._hold_s = min(max(0.0, ack.hold_s), LARGEST_HOLD_S)  # NaN makes 0
            batch = self._in_flight.get(ack.sequence)
        if batch is None:
            return
        if self._queue is None:
            self._apply_priorities(ack, batch)
            self.pace.served(batch.sent_age_s + time.monotonic() - acked_time_s)
        self.priority_age_s = time.monotonic() - batch.drawn_time_s
        with self._lock:
            if self._in_flight.pop(ack.sequence, None) is not None:
                self._ack_times_s.append(acked_time_s)
                if self._queue is not None:
                    self._queue.confirm()
            self._mirror.confirm(ack.sequence)
            self._lock.notify_all()

    def _apply_priorities(self, ack: pb.Ack, batch: _InFlight) -> None:
        priorities = codec.unpack_priorities(ack.priorities, ack.width, self.count)
        good = np.isfinite(priorities) & (priorities >= 0)
        refused = self.count - int(np.count_nonzero(good))
        if refused:
            self._counters["refused_priorities"] += refused
        self._server.update_priorities(batch.keys[good], np.minimum(priorities[good], _MAX_PRIORITY))

    def wait_credit(self, closed: threading.Event) -> float:
        """Waits until one more batch may be in flight and is due, and takes that place for the next `make_batch`.

        Returns:
          Seconds that the credit was there and the draw was held back, as its Ack asked.

        Raises:
          Stopped: the stream was closed meanwhile.
        """
        with self._lock:
            while len(self._in_flight) + self._reserved >= self._window and not closed.is_set():
                self._lock.wait(0.2)
            # Each credit is held from its own Ack on: from the newest one, a hold of several periods would skip some.
            # The places that are free came back with the last so many Acks; those of a window that grew, with none.
            free = self._window - len(self._in_flight) - self._reserved
            times_s = self._ack_times_s
            since_s = times_s[-free] if 0 < free <= len(times_s) else -math.inf
            self._reserved += 1
            held_s = max(0.0, since_s + self._hold_s - time.monotonic())
        if closed.wait(held_s):
            raise Stopped("the stream was closed")
        return held_s

    def wait_pace(self, closed: threading.Event) -> None:
        """Waits until the site is through with enough of the draws before for the next one to begin now.

        Raises:
          Stopped: the stream was closed meanwhile.
        """
        if closed.wait(self.pace.wait_s(time.monotonic())):
            raise Stopped("the stream was closed")
        self.pace.drawn(time.monotonic())

    def note_sent(self, sequence: int) -> float:
        """Notes that a batch leaves; returns how long ago it was drawn, in seconds."""
        with self._lock:
            batch = self._in_flight.get(sequence)
        if batch is None:
            return 0.0
        batch.sent_age_s = time.monotonic() - batch.drawn_time_s
        return batch.sent_age_s

    def note_wait(self, waited_s: float, now_s: float) -> None:
        """Notes how long a batch had to wait for its credit."""
        self._row_level.note(0.0, waited_s, now_s)

    def wake(self) -> None:
        """Wakes a drawer that waits for credit, to see that its stream is closed."""
        with self._lock:
            self._lock.notify_all()

    def make_batch(self, drawn: DrawnSamples) -> tuple[pb.Batch, bytes] | None:
        """Places the rows of a draw, remembers its keys, and returns the message and all its compressed rows.

        None if no sample of the draw has its rows: its credit is free again.
        """
        with self._lock:
            sequence = self._next_sequence
            placement = self._mirror.place(sequence, drawn.row_ids)
            cells = self._cells(drawn, placement.new_places)
            if len(cells) < len(placement.new_places):
                self._mirror.roll_back(sequence - 1)
                sound = self._sound_samples(drawn)
                if sound is None:
                    if self._queue is not None:
                        self._queue.give_up(drawn)
                    self._reserved -= 1
                    self._lock.notify_all()
                    return None
                drawn = sound
                placement = self._mirror.place(sequence, drawn.row_ids)
                cells = self._cells(drawn, placement.new_places)
            self._next_sequence += 1
            self._reserved -= 1
            self._in_flight[sequence] = in_flight = _InFlight(drawn)
            if self._crossings is not None:
                in_flight.first = self._crossings.mark(drawn.keys)
        new_rows = codec.unpack_cells(cells, self._spec.row_bytes)
        rows = self._row_level.compress(new_rows) if new_rows else b""
        # A queue has no probabilities: there the column carries the priorities that the actors gave.
        chances = drawn.probabilities if self._queue is None else drawn.priorities
        columns = codec.Columns(
            placement.slots, drawn.actions, drawn.returns, drawn.discounts, chances.astype(np.float32)
        )
        inserts, samples = self.table_figures
        message = pb.Batch(
            sequence=sequence,
            count=self.count,
            columns=codec.pack_columns(columns, self._coder),
            columns_bytes=codec.columns_bytes(self.count, self._spec.stack),
            table_size=drawn.table_size,
            new_slots=placement.new_slots.astype("<i4").tobytes(),
            rows_bytes=len(new_rows),
            rows_wire_bytes=len(rows),
            rows=rows[: self.part_bytes],
            acked_sequence=self.acked_sequence,
            inserts=inserts,
            samples=samples,
            policy_version=float(drawn.policy_versions.mean()),
            mean_priority=float(drawn.priorities.mean()),
            priority_age_s=self.priority_age_s,
            first_crossings=b"" if self._crossings is None else np.packbits(in_flight.first).tobytes(),
        )
        self._audit(message, drawn, placement.slots)
        in_flight.wire_bytes = message.ByteSize() + max(0, len(rows) - self.part_bytes)
        return message, rows

    def _cells(self, drawn: DrawnSamples, places: np.ndarray) -> list[bytes]:
        """Returns the stored rows at flat places of the draw's row ids; fewer if some are not at the site."""
        cells = self._rows.get(drawn.row_ids.reshape(-1)[places].tolist())
        return [cell for cell in cells if cell is not None]

    def _sound_samples(self, drawn: DrawnSamples) -> DrawnSamples | None:
        """Puts sound samples of the same draw in place of those whose rows neither the site nor the learner has.

        Only a writer that breaks the rules makes such an item; it gets priority 0, so that it is not drawn again.
        None if no sample is sound.
        """
        distinct, places = np.unique(drawn.row_ids, return_inverse=True)
        ids = distinct.tolist()
        known = [self._mirror.slot(i) is not None or cell is not None for i, cell in zip(ids, self._rows.get(ids))]
        sound = np.array(known)[places.reshape(drawn.row_ids.shape)].all(axis=1)
        lost = np.flatnonzero(~sound)
        self._counters["lost_samples"] += len(lost)
        self._server.update_priorities(drawn.keys[lost], np.zeros(len(lost)))
        if not sound.any():
            return None
        chosen = np.arange(len(sound))
        chosen[lost] = np.resize(np.flatnonzero(sound), len(lost))
        columns = {name: column[chosen] for name, column in drawn._asdict().items() if isinstance(column, np.ndarray)}
        return drawn._replace(**columns)

    def _audit(self, message: pb.Batch, drawn: DrawnSamples, slots: np.ndarray) -> None:
        """Now and then states what some of the batch's slots must hold, for the learner to look."""
        now_s = time.monotonic()
        if now_s < self._next_audit_s:
            return
        self._next_audit_s = now_s + _AUDIT_PERIOD_S
        places = np.linspace(0, slots.size - 1, min(AUDITED_ROWS, slots.size)).astype(np.int64)
        # The learner may hold rows that the site has let go of.
        places = places[[cell is not None for cell in self._rows.get(drawn.row_ids.reshape(-1)[places].tolist())]]
        message.audit_slots = slots.reshape(-1)[places].astype("<i4").tobytes()
        message.audit_crc32 = zlib.crc32(codec.unpack_cells(self._cells(drawn, places), self._spec.row_bytes))


def figures(session: Session | None) -> dict[str, Any]:
    """Returns what metrics show of a session."""
    if session is None:
        return {"learner_connected": 0}
    return {
        "learner_connected": int(session.connected),
        "window": session._window,
        "batches_in_flight": len(session._in_flight),
        "bytes_in_flight": sum(batch.wire_bytes for batch in list(session._in_flight.values())),
        "mirror_rows": len(session._mirror),
        "priority_age_s": session.priority_age_s,
        "row_level": session._row_level.level,
        "draw_period_s": session.pace.period_s,
    }
