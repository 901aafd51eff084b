"""An emulated long-haul link: a TCP relay on loopback that delays, limits, holds, cuts and resets.

It works on TCP's bytes, not on packets, so it shows what latency, bandwidth and outages do to the protocol
above; loss and congestion control want a packet-level emulator (`tc netem`) or a real network.

One direction is a queue in front of a serial line: bytes leave at `rate_bytes_per_s`, and arrive half a round
trip later. All connections share the line. What waits is bounded by the line's own bandwidth-delay product
plus a router's queue; past that the relay stops reading and TCP holds the sender back.
"""

import asyncio
import contextlib
import threading
from collections import deque
from typing import Self

from longhaul.errors import WorkerFailed

_CHUNK_BYTES = 16 * 1024
QUEUE_S = 0.1  # a router's buffer, in seconds of the line's rate
_UNLIMITED_QUEUE_BYTES = 64 * 2**20


class _Line:
    """One direction of the link, shared by all connections."""

    def __init__(self, delay_s: float, rate_bytes_per_s: float, queue_s: float):
        self.delay_s = delay_s
        self._queue_s = queue_s
        self.rate_bytes_per_s = rate_bytes_per_s
        self.free_at_s = 0.0
        self.bytes = 0

    @property
    def queue_bytes(self) -> int:
        if not self.rate_bytes_per_s:
            return _UNLIMITED_QUEUE_BYTES
        return max(4 * _CHUNK_BYTES, int(self.rate_bytes_per_s * (self.delay_s + self._queue_s)))

    def departure_s(self, now_s: float, size: int) -> float:
        """Puts `size` bytes on the line; returns when the last of them leaves it."""
        self.free_at_s = max(now_s, self.free_at_s)
        if self.rate_bytes_per_s:
            self.free_at_s += size / self.rate_bytes_per_s
        self.bytes += size
        return self.free_at_s


class _Flow:
    """What a middlebox on the path remembers of one connection: it forgets one that is idle for too long.

    A forgotten flow is not closed: what either end still sends is swallowed, as a NAT without an entry does.
    """

    def __init__(self, idle_timeout_s: float, now_s: float):
        self._idle_timeout_s = idle_timeout_s
        self._carried_s = now_s
        self.forgotten = False

    def expires(self, now_s: float) -> bool:
        """Notes bytes of either direction; returns whether they come too late, for the first time."""
        late = bool(self._idle_timeout_s) and now_s - self._carried_s > self._idle_timeout_s and not self.forgotten
        self.forgotten |= late
        self._carried_s = now_s
        return late


class Relay:
    """Relays connections to `target` over an emulated link, in a thread of its own.

    Use as a context manager; `address` is where clients connect. `hold()` is an outage without a word: bytes
    stop, connections stay; `release()` ends it. `reset()` tears every connection down with an RST. With
    `idle_timeout_s`, connections that carry nothing for so long are forgotten without a word, as a NAT does.

    Args:
      target: host and port behind the link.
      rtt_s: round-trip time, half in each direction.
      rate_bytes_per_s: of each direction; 0 is unlimited.
      up_rate_bytes_per_s: of the way from clients to the target, where it is another.
      port: to listen on, on loopback; 0 takes any.
      idle_timeout_s: after which a connection that carries nothing is forgotten; 0 is never.
      queue_s: a router's buffer before each line, in seconds of its rate.

    Attributes:
      connections: accepted so far.
      forgotten: connections of these that were idle for too long and then used again.
    """

    def __init__(
        self,
        target: tuple[str, int],
        rtt_s: float = 0.0,
        rate_bytes_per_s: float = 0.0,
        port: int = 0,
        idle_timeout_s: float = 0.0,
        queue_s: float = QUEUE_S,
        up_rate_bytes_per_s: float | None = None,
    ):
        self._target = target
        up_rate = rate_bytes_per_s if up_rate_bytes_per_s is None else up_rate_bytes_per_s
        self._up = _Line(rtt_s / 2, up_rate, queue_s)
        self._down = _Line(rtt_s / 2, rate_bytes_per_s, queue_s)
        self._idle_timeout_s = idle_timeout_s
        self.connections = 0
        self.forgotten = 0
        self._wanted_port = port
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    @property
    def address(self) -> str:
        """host:port that clients of the link connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def bytes_up(self) -> int:
        """Bytes from clients to the target so far."""
        return self._up.bytes

    @property
    def bytes_down(self) -> int:
        """Bytes from the target to clients so far."""
        return self._down.bytes

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10.0)
        if self._failure or not self.port:
            raise WorkerFailed(f"relay to {self._target[0]}:{self._target[1]} did not start: {self._failure}")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def hold(self) -> None:
        """Starts a silent outage: nothing is carried, nothing is closed."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        """Ends the outage; what was held is carried on."""
        self._loop.call_soon_threadsafe(self._open.set)

    def reset(self) -> None:
        """Aborts every connection."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def _abort_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, "127.0.0.1", self._wanted_port, limit=_CHUNK_BYTES)
            )
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()
            self._loop.run_forever()
            server.close()
            self._abort_all()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        except OSError as error:
            self._failure = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        flow = _Flow(self._idle_timeout_s, self._loop.time())
        try:
            await self._open.wait()
            await asyncio.sleep(self._up.delay_s + self._down.delay_s)  # the handshake's round trip
            with contextlib.suppress(OSError):
                target_reader, target_writer = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
                self._writers.add(target_writer)
                try:
                    await asyncio.gather(
                        self._pump(reader, target_writer, self._up, flow),
                        self._pump(target_reader, writer, self._down, flow),
                    )
                finally:
                    self._writers.discard(target_writer)
                    target_writer.transport.abort()
        except asyncio.CancelledError:
            pass  # the relay ends; asyncio's streams would print it
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: _Line, flow: _Flow) -> None:
        """Carries one direction of one connection until it ends."""
        waiting: deque[tuple[float, bytes]] = deque()
        waiting_bytes = 0
        changed = asyncio.Event()
        ended = False

        async def read() -> None:
            nonlocal waiting_bytes, ended
            try:
                while data := await reader.read(_CHUNK_BYTES):
                    self.forgotten += flow.expires(self._loop.time())
                    if flow.forgotten:
                        continue
                    waiting.append((line.departure_s(self._loop.time(), len(data)) + line.delay_s, data))
                    waiting_bytes += len(data)
                    changed.set()
                    while waiting_bytes > line.queue_bytes:
                        await asyncio.sleep(0.001)
            finally:
                ended = True
                changed.set()

        reading = asyncio.create_task(read())
        try:
            while waiting or not ended:
                if not waiting:
                    changed.clear()
                    await changed.wait()
                    continue
                arrives_s, data = waiting[0]
                if (ahead_s := arrives_s - self._loop.time()) > 0:
                    await asyncio.sleep(ahead_s)
                await self._open.wait()
                waiting.popleft()
                waiting_bytes -= len(data)
                writer.write(data)
                await writer.drain()
            await reading
            if writer.can_write_eof():
                writer.write_eof()
        finally:
            reading.cancel()
