"""The gateway's end of one Sample stream: credits and priorities come in, batches go out.

A drawer and a packer thread fill a short queue, gRPC's handler empties it; a slow reader holds them back instead of
filling memory. What must outlive a cut belongs to the session (session.py).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from longhaul.errors import Corruption, LonghaulError, Refused, Stopped
from longhaul.proto import longhaul_pb2 as pb
from longhaul.session import Session

_QUEUED_MESSAGES = 8
_QUEUED_PONGS = 64  # a learner pings once a second


class _Pipe:
    """Hands things from thread to thread, at most so many at a time; closing it wakes whoever waits."""

    def __init__(self, size: int):
        self._size = size
        self._changed = threading.Condition()
        self._held: deque[Any] = deque()
        self._closed = False

    def put(self, what: Any) -> None:
        """Waits for room.

        Raises:
          Stopped: the pipe is closed.
        """
        with self._changed:
            while len(self._held) >= self._size and not self._closed:
                self._changed.wait()
            self._add(what)

    def wait_until(self, most: int) -> None:
        """Waits until at most so much is left in it.

        Raises:
          Stopped: the pipe is closed.
        """
        with self._changed:
            while len(self._held) > most and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Stopped("the stream was closed")

    def put_first(self, what: Any, most: int) -> None:
        """Goes before what is there and waits for nothing; where there is more than `most`, it is left out."""
        with self._changed:
            if len(self._held) < most:
                self._held.appendleft(what)
                self._changed.notify_all()

    def get(self) -> Any:
        """Waits for the next; what is still there when the pipe is closed is lost.

        Raises:
          Stopped: the pipe is closed.
        """
        with self._changed:
            while not self._held and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Stopped("the stream was closed")
            self._changed.notify_all()
            return self._held.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add(self, what: Any) -> None:
        if self._closed:
            raise Stopped("the stream was closed")
        self._held.append(what)
        self._changed.notify_all()


class Stream:
    """One gRPC stream of a session: a drawer and a packer fill a short queue, the handler empties it.

    Attributes:
      closed: set when either end is done with it.
    """

    def __init__(self, session: Session):
        self._session = session
        self.closed = threading.Event()
        self._messages = _Pipe(_QUEUED_MESSAGES)
        self._error: Exception | None = None
        self._drawn = _Pipe(1)  # from drawer to packer: a draw, when it began, how long its credit was waited for
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (("drawer", self._draw), ("packer", self._pack))
        ]

    def start(self) -> None:
        """Begins to draw."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the stream from any thread; returns at once."""
        self.closed.set()
        self._messages.close()
        self._drawn.close()
        self._session.wake()

    def join(self) -> None:
        """Waits until nothing is drawn any more, so that the session's state is still.

        Raises:
          LonghaulError: a thread did not end in time.
        """
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(30.0)
                if thread.is_alive():
                    raise LonghaulError("the stream before this one does not end")

    def receive(self, requests: Iterator[pb.SampleRequest]) -> None:
        """Applies what the learner sends until it ends; runs in a thread of its own."""
        try:
            for request in requests:
                try:
                    self._take(request)
                except Corruption as error:
                    self._session._counters["corrupt_messages"] += 1
                    self._fail(Refused(str(error)))
                    return
                except Exception as error:
                    if not self.closed.is_set():  # else the replay may be gone on purpose
                        self._fail(error)
                    return
        except Exception as error:
            # gRPC ends the iterator with an error of its own when the stream is cut, and keeps that error: its
            # traceback would keep this stream, its session and Reverb's threads.
            error.__traceback__ = None
            if not self.closed.is_set():
                logging.debug("the learner's stream ended: %s", error)
        finally:
            self.close()

    def _take(self, request: pb.SampleRequest) -> None:
        session = self._session
        session.heard_time_s = time.monotonic()
        kind = request.WhichOneof("kind")
        if kind == "ack":
            session.apply_ack(request.ack)
        elif kind == "ping":
            pong = pb.Pong(id=request.ping.id, acked_sequence=session.acked_sequence, received_s=session.heard_time_s)
            # The Acks behind it must not wait for a slow reader.
            self._messages.put_first(pb.SampleResponse(pong=pong), _QUEUED_PONGS)
        else:
            raise Corruption(f"a stream carries acks and pings after its first message, not {kind!r}")

    def messages(self) -> Iterator[pb.SampleResponse]:
        """Yields what is to be sent, until the stream is closed; raises what went wrong at this end."""
        try:
            while True:
                message = self._messages.get()
                self._session.budget.take(message.ByteSize(), self.closed)
                if message.HasField("batch"):
                    message.batch.draw_age_s = self._session.note_sent(message.batch.sequence)
                yield message
        except Stopped:
            pass
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.close()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Stopped:
            pass
        except Exception as error:
            self._fail(error)

    def _draw(self) -> None:
        """Draws a batch for every credit; Reverb's own threads do the work, while the packer has Python."""
        session = self._session
        while True:
            asked_s = time.monotonic()
            held_s = session.wait_credit(self.closed)
            credited_s = time.monotonic()
            waited_s = credited_s - asked_s - held_s
            session.note_wait(waited_s, credited_s)
            # A batch that is drawn while others wait to be packed or sent only grows old.
            self._drawn.wait_until(0)
            self._messages.wait_until(1)
            session.wait_pace(self.closed)
            began_s = time.monotonic()  # a credit that has waited here was not needed yet: no part of the service
            self._drawn.put((session.sampler.draw(self.closed), began_s, waited_s))

    def _pack(self) -> None:
        """Makes messages of what was drawn."""
        session = self._session
        while True:
            drawn, began_s, waited_s = self._drawn.get()
            made = session.make_batch(drawn)
            if made is None:
                continue
            message, rows = made
            message.service_s = time.monotonic() - began_s
            message.credit_wait_s = waited_s
            self._messages.put(pb.SampleResponse(batch=message))
            size = session.part_bytes
            for offset in range(size, len(rows), size):
                part = pb.RowsPart(sequence=message.sequence, offset=offset, data=rows[offset : offset + size])
                self._messages.put(pb.SampleResponse(part=part))
