"""What crosses the link, counted: bytes by kind and direction, round-trip times, outages."""

import threading
import time
from collections import Counter, OrderedDict, deque

from longhaul.proto import longhaul_pb2 as pb

_RTT_SAMPLES = 30  # one a second, however often is pinged
_PINGS = 60  # that may still be answered; older ones are forgotten
_DOWN_S = 3.0  # no message for so long: too soon to give the path up, but not to do something else meanwhile


class Meter:
    """Counts at the learner's end. Thread-safe.

    Bytes are those of gRPC messages; HTTP/2 and TCP add some 1-3% that only the kernel sees.
    """

    def __init__(self) -> None:
        self._batch_size = 1
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._rtts_s: deque[float] = deque(maxlen=_RTT_SAMPLES)
        self._pings: OrderedDict[int, float] = OrderedDict()
        self._last_ping = 0
        self._ups_s: deque[float] = deque(maxlen=_RTT_SAMPLES)  # one way, and the two clocks' difference
        self._newest_up_s = 0.0
        self._next_rtt_at_s = 0.0
        self._heard_s = time.monotonic()
        self._cut_at_s: float | None = None
        self._last_read = (time.monotonic(), 0, 0, 0)
        self._samples = 0

    @property
    def connected(self) -> bool:
        """Whether no outage goes on."""
        return self._cut_at_s is None

    @property
    def down(self) -> bool:
        """Whether an outage goes on, or seems to: no Ping is answered, as one is where a site has nothing to send."""
        return not self.connected or self.silent_s() > _DOWN_S

    @property
    def rtt_s(self) -> float:
        """Shortest of the latest round trips: the path's own, without what waits in queues; 0 before the first."""
        with self._lock:
            return min(self._rtts_s, default=0.0)

    def set_batch_size(self, batch_size: int) -> None:
        """Says how many samples make an update."""
        self._batch_size = batch_size

    def heard(self) -> None:
        """Notes a sign of life."""
        self._heard_s = time.monotonic()

    def silent_s(self) -> float:
        """Returns the time since the last sign of life."""
        return time.monotonic() - self._heard_s

    def count(self, what: str) -> None:
        """Counts an event."""
        with self._lock:
            self._counts[what] += 1

    def sent(self, kind: str, size: int) -> None:
        """Counts a request."""
        with self._lock:
            self._bytes[f"sent_{'acks' if kind == 'ack' else 'control'}_bytes"] += size

    def received(self, response: pb.SampleResponse, kind: str | None) -> None:
        """Counts a response and notes the sign of life."""
        self.heard()
        size = response.ByteSize()
        rows = 0
        if kind == "batch":
            rows = len(response.batch.rows) + len(response.batch.new_slots)
        elif kind == "part":
            rows = size
        with self._lock:
            self._bytes["received_rows_bytes"] += rows
            self._bytes["received_transitions_bytes" if kind == "batch" else "received_control_bytes"] += size - rows

    def batch(self, message: pb.Batch) -> None:
        """Counts a whole batch."""
        with self._lock:
            self._samples += message.count
            self._counts["rows_received"] += len(message.new_slots) // 4

    def published(self, size: int) -> None:
        """Counts a part of a snapshot."""
        with self._lock:
            self._bytes["sent_weights_bytes"] += size

    def ping(self) -> int:
        """Notes that a Ping leaves now; returns the number it must carry."""
        with self._lock:
            self._last_ping += 1
            self._pings[self._last_ping] = time.monotonic()
            while len(self._pings) > _PINGS:
                self._pings.popitem(last=False)
            return self._last_ping

    def pong(self, identity: int, received_s: float) -> None:
        """Takes a Ping's round trip from its answer, and its way up from when the gateway says that it came."""
        with self._lock:
            now_s = time.monotonic()
            sent_s = self._pings.pop(identity, None)
            if sent_s is None:
                return
            rtt_s, self._newest_up_s = now_s - sent_s, received_s - sent_s
            if now_s >= self._next_rtt_at_s or not self._rtts_s:
                self._rtts_s.append(rtt_s)
                self._ups_s.append(self._newest_up_s)
                self._next_rtt_at_s = now_s + 1.0
            else:
                self._rtts_s[-1] = min(self._rtts_s[-1], rtt_s)
                self._ups_s[-1] = min(self._ups_s[-1], self._newest_up_s)

    def queueing_s(self) -> float:
        """Returns how long what is sent now waits on the way up, by the newest Ping and by one not answered yet.

        By the one-way delay (RFC 6817, section 2.1): batches that wait on the way down say nothing about the way up.
        """
        with self._lock:
            if not self._rtts_s:
                return 0.0
            oldest_s = next(iter(self._pings.values()), None)
            unanswered_s = 0.0 if oldest_s is None else time.monotonic() - oldest_s
            # What an answer has lately taken, and as much again, may be the way down's doing.
            return max(self._newest_up_s - min(self._ups_s), unanswered_s - 2 * max(self._rtts_s))

    def outage_starts(self) -> bool:
        """Notes that the stream is cut; returns False if it was already."""
        with self._lock:
            if self._cut_at_s is not None:
                return False
            self._cut_at_s = time.monotonic()
            self._counts["outages"] += 1
            return True

    def outage_ends(self) -> float:
        """Notes that the stream works; returns how long it did not, 0 if there was no outage."""
        with self._lock:
            if self._cut_at_s is None:
                return 0.0
            lasted_s = time.monotonic() - self._cut_at_s
            self._cut_at_s = None
            self._rtts_s.clear()
            self._pings.clear()  # those lost in the cut are never answered
            return lasted_s

    def read(self) -> dict[str, float]:
        """Returns totals by kind, and rates since the last call."""
        with self._lock:
            now_s = time.monotonic()
            received = sum(n for kind, n in self._bytes.items() if kind.startswith("received"))
            sent = sum(n for kind, n in self._bytes.items() if kind.startswith("sent"))
            then_s, received_then, sent_then, samples_then = self._last_read
            self._last_read = (now_s, received, sent, self._samples)
            elapsed_s = max(now_s - then_s, 1e-9)
            samples = self._samples - samples_then
            figures: dict[str, float] = {
                "link_received_bytes": received,
                "link_sent_bytes": sent,
                "link_received_bytes_per_s": (received - received_then) / elapsed_s,
                "link_sent_bytes_per_s": (sent - sent_then) / elapsed_s,
                "rtt_s": min(self._rtts_s, default=0.0),
                "link_samples": self._samples,
                **self._bytes,
                **self._counts,
            }
            carried = received - received_then + sent - sent_then
            figures["link_projected_bytes_per_day"] = carried / elapsed_s * 86_400
            if samples:
                figures["received_bytes_per_sample"] = (received - received_then) / samples
                figures["link_bytes_per_update"] = carried / (samples / self._batch_size)
            return figures
