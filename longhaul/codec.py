"""What crosses the link, as bytes: rows, columns, priorities and weights. No pickle, no threads, no sockets.

Rows of one batch are compressed together: observations resemble each other, and a zstd window that spans
many frames finds what frame-by-frame compression can't. Columns and weights are split into byte planes first
(all first bytes, then all second ones ...), as HDF5's and Blosc's shuffle filters do: exponents and high
bytes then stand together and compress, mantissas cost what they must.

Every decompression states its size beforehand and is bounded by it, so that no message can make us allocate
more than the batch it claims to be.
"""

import json
import math
import struct
import zlib
from typing import NamedTuple

import numpy as np
import zstandard

from longhaul.errors import ConfigError, Corruption

MAX_WEIGHTS_BYTES = 4 * 2**30  # unpacked; refuses absurd claims before allocating
_WEIGHTS_MAGIC = b"LHW1"
_WEIGHTS_LEVEL = 3
_COLUMNS_LEVEL = 3
_CELL_LEVEL = 1  # in the actor's loop: quick
_CELL_RAW, _CELL_ZSTD = b"\0", b"\1"
_ID_BYTES = 8
_SMALLEST_COMPRESSED_ROW_BYTES = 256
_WEIGHTS_DTYPES = {"bfloat16": 2, "float32": 4}  # bytes per value


class Columns(NamedTuple):
    """The packed part of a batch that is not rows. N transitions.

    Attributes:
      slots: int32 [N, 2*stack].
      actions: int32 [N].
      returns: float32 [N].
      discounts: float32 [N].
      probabilities: float32 [N].
    """

    slots: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray
    probabilities: np.ndarray


def compress(data: bytes | memoryview, level: int) -> bytes:
    """Compresses into one zstd frame that states its content size."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def decompress(
    data: bytes, size_bytes: int, limit_bytes: int, what: str, decompressor: zstandard.ZstdDecompressor | None = None
) -> bytes:
    """Decompresses one zstd frame of a size known beforehand.

    Args:
      data: the frame.
      size_bytes: what the message says it unpacks to.
      limit_bytes: what it may unpack to at most; checked before anything is allocated.
      what: for messages, e.g. "rows of batch 7".
      decompressor: to use again and again; to make one costs as much as a small frame.

    Raises:
      Corruption: the sizes disagree, the limit is passed, or the frame is damaged.
    """
    if not 0 <= size_bytes <= limit_bytes:
        raise Corruption(f"{what}: {size_bytes} bytes claimed, at most {limit_bytes} allowed")
    try:
        stated = zstandard.get_frame_parameters(data).content_size
        if stated != size_bytes:
            raise Corruption(f"{what}: the frame states {stated} bytes, the message {size_bytes}")
        decompressor = decompressor or zstandard.ZstdDecompressor()
        unpacked = decompressor.decompress(data, max_output_size=size_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corruption(f"{what}: {error}") from error
    if len(unpacked) != size_bytes:
        raise Corruption(f"{what}: {len(unpacked)} bytes unpacked, {size_bytes} expected")
    return unpacked


def _split_planes(values: np.ndarray) -> bytes:
    """Returns the bytes of a contiguous little-endian array, first bytes first."""
    width = values.dtype.itemsize
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, width).T.tobytes()


def _join_planes(data: memoryview, dtype: str, count: int) -> np.ndarray:
    """Undoes `_split_planes`; the array is new and writable."""
    width = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, np.uint8, count * width).reshape(width, count)
    return planes.T.copy(order="C").view(dtype).reshape(count)


class CellPacker:
    """Makes the form in which the replay stores a row: its id (int64), one byte that says how, then its bytes.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_CELL_LEVEL, write_content_size=True)

    def pack(self, row_id: int, row: bytes) -> bytes:
        """Returns the cell of one row; rows that do not shrink are kept as they are."""
        name = row_id.to_bytes(_ID_BYTES, "little", signed=True)
        if len(row) >= _SMALLEST_COMPRESSED_ROW_BYTES:
            packed = self._compressor.compress(row)
            if len(packed) < len(row):
                return name + _CELL_ZSTD + packed
        return name + _CELL_RAW + row


def cell_id(cell: bytes) -> int:
    """Returns the id of a cell's row."""
    return int.from_bytes(cell[:_ID_BYTES], "little", signed=True)


def unpack_cells(cells: list[bytes], row_bytes: int) -> bytes:
    """Returns the rows of cells, one after the other.

    Raises:
      Corruption: a cell that does not hold a row of row_bytes.
    """
    decompressor = zstandard.ZstdDecompressor()
    rows = []
    for cell in cells:
        how, data = cell[_ID_BYTES : _ID_BYTES + 1], cell[_ID_BYTES + 1 :]
        row = decompress(data, row_bytes, row_bytes, "a row", decompressor) if how == _CELL_ZSTD else data
        if len(row) != row_bytes or how not in (_CELL_RAW, _CELL_ZSTD):
            raise Corruption(f"a row of {len(row)} bytes, the spec says {row_bytes}")
        rows.append(row)
    return b"".join(rows)


class SlotCoder:
    """Turns cache slots into small numbers and back, by what both ends have seen on one stream so far.

    A row is mostly followed by the same row: the slot that came after a slot the last time is the guess for the next,
    and only the differences from the guesses travel, nearly all of them 0. Both ends must code the same batches in the
    same order.

    Args:
      capacity: slots of the cache.
      stack: rows per observation.
      n_step: the bootstrap state's stack begins so many rows after the observation's, unless an episode ended.
    """

    def __init__(self, capacity: int, stack: int, n_step: int):
        self._capacity = capacity
        self._stack = stack
        self._n_step = n_step
        self._next = np.arange(1, capacity + 1, dtype=np.int32)  # rows that arrive together sit side by side
        self._next_stack = self._next.copy()  # the first of the next stack, after the last of a stack

    def encode(self, slots: np.ndarray) -> np.ndarray:
        """Returns int32 differences, in the shape of the slots (int32 [N, 2*stack])."""
        differences = slots.astype(np.int32)
        for place in range(1, 2 * self._stack):
            differences[:, place] -= self._guess(slots, place)
        self._learn(slots)
        return differences

    def decode(self, differences: np.ndarray) -> np.ndarray:
        """Undoes `encode`.

        Raises:
          Corruption: a slot outside the cache.
        """
        slots = differences.astype(np.int32)
        for place in range(1, 2 * self._stack):
            slots[:, place] += self._guess(slots, place)
        if slots.size and (slots.min() < 0 or slots.max() >= self._capacity):
            raise Corruption(f"columns: a slot outside the cache of {self._capacity} rows")
        self._learn(slots)
        return slots

    def _guess(self, slots: np.ndarray, place: int) -> np.ndarray:
        if place == self._stack and self._n_step < self._stack:
            return slots[:, self._n_step]
        after = self._next_stack if place == self._stack else self._next
        return after.take(slots[:, place - 1], mode="clip")  # out of bounds only in what `decode` will refuse

    def _learn(self, slots: np.ndarray) -> None:
        for place in range(1, 2 * self._stack):
            after = self._next_stack if place == self._stack else self._next
            after[slots[:, place - 1]] = slots[:, place]


def columns_bytes(count: int, stack: int) -> int:
    """Size of packed columns before compression, for `count` transitions."""
    return count * (2 * stack + 4) * 4


def pack_columns(columns: Columns, coder: SlotCoder) -> bytes:
    """Packs and compresses the columns of a batch, the next one of the coder's stream."""
    parts = [_split_planes(coder.encode(columns.slots).astype("<i4").T.reshape(-1))]
    parts.append(_split_planes(columns.actions.astype("<i4")))
    for column in (columns.returns, columns.discounts, columns.probabilities):
        parts.append(_split_planes(column.astype("<f4")))
    return compress(b"".join(parts), _COLUMNS_LEVEL)


def unpack_columns(data: bytes, size_bytes: int, count: int, stack: int, coder: SlotCoder) -> Columns:
    """Undoes `pack_columns`; the arrays are new and writable.

    Raises:
      Corruption: the sizes are not those of `count` transitions, a slot is not one, or the frame is damaged.
    """
    expected = columns_bytes(count, stack)
    if size_bytes != expected:
        raise Corruption(f"columns: {size_bytes} bytes claimed, {expected} make {count} transitions")
    raw = memoryview(decompress(data, size_bytes, expected, "columns"))
    end = count * 2 * stack * 4
    slots = coder.decode(_join_planes(raw[:end], "<i4", count * 2 * stack).reshape(2 * stack, count).T)
    flat = []
    for dtype in ("<i4", "<f4", "<f4", "<f4"):
        flat.append(_join_planes(raw[end : end + count * 4], dtype, count))
        end += count * 4
    return Columns(slots, *flat)


def pack_priorities(priorities: np.ndarray, width: int) -> bytes:
    """Packs priorities as little-endian floats of 2 or 4 bytes; float16 saturates instead of overflowing."""
    flat = np.asarray(priorities, np.float32).reshape(-1)
    if width == 4:
        return flat.astype("<f4").tobytes()
    largest, smallest = np.finfo(np.float16).max, np.finfo(np.float16).smallest_subnormal
    # A positive priority must not become 0: its transition would never be drawn again.
    held = np.where(flat > 0, np.clip(flat, smallest, largest), flat)
    return held.astype("<f2").tobytes()


def unpack_priorities(data: bytes, width: int, count: int) -> np.ndarray:
    """Returns float64 [count].

    Raises:
      Corruption: the size is not that of `count` floats of `width` bytes.
    """
    if width not in (2, 4) or len(data) != count * width:
        raise Corruption(f"priorities: {len(data)} bytes of width {width} do not make {count} values")
    return np.frombuffer(data, f"<f{width}").astype(np.float64)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds float32 to the nearest bfloat16, ties to even, as uint16 bit patterns; NaN stays NaN."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype("<u2")


def pack_weights(flat: dict[str, np.ndarray], dtype: str) -> bytes:
    """Packs named arrays into one payload: magic, header length, JSON header, zstd of byte planes.

    Args:
      flat: name -> float32 array of any shape.
      dtype: "float32" keeps every bit, "bfloat16" rounds to nearest even.

    Raises:
      ConfigError: an unknown dtype.
    """
    if dtype not in _WEIGHTS_DTYPES:
        raise ConfigError(f"weights dtype is {dtype!r}, and must be one of {sorted(_WEIGHTS_DTYPES)}")
    names = sorted(flat)
    arrays = [np.asarray(flat[name], np.float32) for name in names]
    joined = np.concatenate([a.reshape(-1) for a in arrays]) if arrays else np.zeros(0, np.float32)
    raw = _split_planes(_to_bfloat16(joined) if dtype == "bfloat16" else joined.astype("<f4"))
    header = json.dumps(
        {
            "dtype": dtype,
            "arrays": [[name, list(a.shape)] for name, a in zip(names, arrays)],
            "raw_bytes": len(raw),
            "crc32": zlib.crc32(raw),
        },
        separators=(",", ":"),
    ).encode()
    return _WEIGHTS_MAGIC + struct.pack("<I", len(header)) + header + compress(raw, _WEIGHTS_LEVEL)


def unpack_weights(payload: bytes) -> dict[str, np.ndarray]:
    """Undoes `pack_weights`; returns name -> float32 array.

    Raises:
      Corruption: anything that `pack_weights` did not write, by what fails first.
    """
    prefix = len(_WEIGHTS_MAGIC) + 4
    if len(payload) < prefix or payload[:4] != _WEIGHTS_MAGIC:
        raise Corruption("weights: not a longhaul weights payload")
    (header_bytes,) = struct.unpack_from("<I", payload, 4)
    try:
        header = json.loads(payload[prefix : prefix + header_bytes])
        dtype = str(header["dtype"])
        width = _WEIGHTS_DTYPES[dtype]
        shapes = [(str(name), tuple(int(d) for d in shape)) for name, shape in header["arrays"]]
        raw_bytes, crc32 = int(header["raw_bytes"]), int(header["crc32"])
        if any(d < 0 for _, shape in shapes for d in shape):
            raise ValueError("negative dimension")
    except (ValueError, KeyError, TypeError) as error:
        raise Corruption(f"weights: damaged header ({error})") from error
    counts = [math.prod(shape) for _, shape in shapes]
    if raw_bytes != sum(counts) * width:
        raise Corruption(f"weights: {raw_bytes} bytes claimed, the shapes make {sum(counts) * width}")
    raw = decompress(payload[prefix + header_bytes :], raw_bytes, MAX_WEIGHTS_BYTES, "weights")
    if zlib.crc32(raw) != crc32:
        raise Corruption("weights: checksum does not match")
    if dtype == "bfloat16":
        bits = _join_planes(memoryview(raw), "<u2", sum(counts)).astype("<u4") << 16
        values = bits.view("<f4")
    else:
        values = _join_planes(memoryview(raw), "<f4", sum(counts))
    pieces = np.split(values, np.cumsum(counts)[:-1]) if counts else []
    return {name: piece.reshape(shape).astype(np.float32) for (name, shape), piece in zip(shapes, pieces)}
