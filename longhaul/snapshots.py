"""Snapshots of weights in transit: chunks on the wire, and the newest one held for whoever asks."""

import threading
import zlib
from collections.abc import Iterable, Iterator

from longhaul import codec
from longhaul.channel import PART_BYTES
from longhaul.errors import Corruption
from longhaul.proto import longhaul_pb2 as pb
from longhaul.types import Snapshot


def to_chunks(snapshot: Snapshot, part_bytes: int = PART_BYTES) -> Iterator[pb.WeightsChunk]:
    """Cuts a snapshot into messages of `part_bytes` at most; each says whose part it is and what the whole must be."""
    crc32 = zlib.crc32(snapshot.payload)
    count = max(1, -(-len(snapshot.payload) // part_bytes))
    for index in range(count):
        yield pb.WeightsChunk(
            epoch=snapshot.epoch,
            version=snapshot.version,
            index=index,
            count=count,
            total_bytes=len(snapshot.payload),
            crc32=crc32,
            data=snapshot.payload[index * part_bytes : (index + 1) * part_bytes],
        )


def from_chunks(chunks: Iterable[pb.WeightsChunk]) -> Iterator[Snapshot]:
    """Puts snapshots together from a stream of chunks; a new snapshot's first chunk drops an unfinished one.

    Raises:
      Corruption: a chunk is out of place, a size is over the limit, or the checksum does not match.
    """
    first: pb.WeightsChunk | None = None
    received: list[bytes] = []
    size = 0
    for chunk in chunks:
        name = f"weights {chunk.epoch}.{chunk.version}"
        if chunk.index == 0:
            if chunk.total_bytes > codec.MAX_WEIGHTS_BYTES:
                raise Corruption(f"{name}: {chunk.total_bytes} bytes, at most {codec.MAX_WEIGHTS_BYTES} are taken")
            first, received, size = chunk, [], 0
        if (
            first is None
            or (chunk.epoch, chunk.version) != (first.epoch, first.version)
            or chunk.index != len(received)
            or chunk.count != first.count
        ):
            raise Corruption(f"{name}: chunk {chunk.index} of {chunk.count} is out of place")
        received.append(chunk.data)
        size += len(chunk.data)
        if size > first.total_bytes:
            raise Corruption(f"{name}: more than the {first.total_bytes} bytes announced")
        if len(received) == first.count:
            payload = b"".join(received)
            if len(payload) != first.total_bytes or zlib.crc32(payload) != first.crc32:
                raise Corruption(f"{name}: checksum does not match")
            yield Snapshot(first.epoch, first.version, payload)
            first = None


class SnapshotHolder:
    """Holds the newest snapshot by (epoch, version) and wakes who waits for a newer one. Thread-safe."""

    def __init__(self) -> None:
        self._newest: Snapshot | None = None
        self._changed = threading.Condition()

    def newest(self) -> Snapshot | None:
        """Returns the newest snapshot, None before the first."""
        return self._newest

    def offer(self, snapshot: Snapshot) -> bool:
        """Takes the snapshot if it is newer than what is held; returns whether it was."""
        with self._changed:
            if self._newest is not None and snapshot[:2] <= self._newest[:2]:
                return False
            self._newest = snapshot
            self._changed.notify_all()
            return True

    def clear(self) -> None:
        """Forgets the snapshot: what comes next is taken, whatever its number."""
        with self._changed:
            self._newest = None

    def wait_newer(self, epoch: int, version: int, timeout_s: float) -> Snapshot | None:
        """Returns the newest snapshot once it is newer than (epoch, version), None at the timeout."""

        def newer() -> bool:
            return self._newest is not None and self._newest[:2] > (epoch, version)

        with self._changed:
            return self._newest if self._changed.wait_for(newer, timeout_s) else None
