"""The receiving half of a learner's stream: messages in, whole batches in order out, and how far they have come.

It outlives the streams: the last batch that arrived whole is where the next stream goes on.
"""

import queue
import threading

from longhaul.arrival import Assembly, unpack_batch
from longhaul.codec import SlotCoder
from longhaul.errors import Corruption, Outage
from longhaul.proto import longhaul_pb2 as pb
from longhaul.types import Batch, ExperienceSpec


class Inbox:
    """Batches that have arrived and wait for the learner. Thread-safe: one thread fills it, any thread takes.

    Bounded by the window: the gateway sends no more than that without Acks.

    Attributes:
      last_sequence: of the last batch that arrived whole, 0 before the first.
    """

    def __init__(self) -> None:
        self._batches: queue.Queue[Batch] = queue.Queue()
        self._lock = threading.Lock()
        self._assembly: Assembly | None = None
        self._coder: SlotCoder | None = None
        self._refusing = False
        self.last_sequence = 0

    @property
    def waiting(self) -> int:
        """Batches that nobody has taken yet."""
        return self._batches.qsize()

    def take(self, timeout_s: float) -> Batch | None:
        """Returns the next batch, None if there is none within timeout_s."""
        try:
            return self._batches.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None

    def start_stream(self) -> None:
        """Drops a batch whose parts a cut has lost, and what the coding of its stream has learned."""
        self._assembly = None
        self._coder = None

    def put(self, response: pb.SampleResponse, spec: ExperienceSpec, opened: pb.Open, rtt_s: float) -> pb.Batch | None:
        """Takes a `batch` or `part` message.

        Args:
          response: the message.
          spec: of the experience.
          opened: what the stream was opened with.
          rtt_s: round trip, which the batch's age counts in.

        Returns:
          The message of the batch that is whole now and waits for the learner, None if there is none.

        Raises:
          Corruption: it is neither, out of place, or its contents can't be those of a batch.
        """
        kind = response.WhichOneof("kind")
        if kind == "batch":
            if self._assembly is not None:
                raise Corruption(f"batch {response.batch.sequence} begins within {self._assembly.message.sequence}")
            self._assembly = Assembly(response.batch)
        elif kind == "part":
            if self._assembly is None:
                raise Corruption("a part without a batch")
            self._assembly.add(response.part)
        else:
            raise Corruption("an empty message")
        if not self._assembly.complete:
            return None
        assembly, self._assembly = self._assembly, None
        message = assembly.message
        if self._coder is None:
            self._coder = SlotCoder(opened.cache_rows, spec.stack, spec.n_step)
        batch = unpack_batch(message, b"".join(assembly.rows), spec, opened, self._coder, rtt_s)
        if message.sequence != self.last_sequence + 1:
            raise Corruption(f"batch {message.sequence} follows batch {self.last_sequence}")
        with self._lock:
            if self._refusing:
                return None
            self.last_sequence = message.sequence
            self._batches.put(batch)
        return message

    def refuse(self) -> None:
        """Drops what waits, and what still arrives until `begin`: it refers to a cache that is given up."""
        with self._lock:
            self._refusing = True
            self._drain()

    def go_on(self) -> None:
        """Takes up a stream that goes on from the last batch.

        Raises:
          Outage: the batches are refused, so this stream is of no use: another must begin anew.
        """
        if self._refusing:
            raise Outage("the stream goes on from a cache that was given up")

    def begin(self, next_sequence: int) -> int:
        """Takes up a stream that begins anew at a sequence; returns how many waiting batches are dropped."""
        with self._lock:
            self._refusing = False
            self.last_sequence = next_sequence - 1
            return self._drain()

    def _drain(self) -> int:
        count = 0
        while self.take(0.0) is not None:
            count += 1
        return count
