"""Rows on the learner's device, by slot: the far end of the gateway's mirror.

One array [capacity, *row_shape] is allocated at the start and never grows. New rows are written by a jitted scatter
that donates the array, so that it stays the same memory. Arrivals are padded to powers of two: whatever their numbers,
the scatter is compiled once for each of a dozen sizes.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from longhaul.errors import ConfigError, Corruption
from longhaul.types import ExperienceSpec

# Arrivals are padded to at least this many rows, and handed over in pieces of at most that many.
_MIN_BUCKET_ROWS = 16
_MAX_BUCKET_ROWS = 4096
_MOST_COMPILED_BYTES = 2**28  # of rows, beforehand: memory that a run of huge rows may never ask for


def capacity_rows(cache_bytes: int, spec: ExperienceSpec, rows_per_batch: int, max_useful_rows: int) -> int:
    """Returns how many rows the cache holds: what `cache_bytes` allow, and no more than could ever be of use.

    Args:
      cache_bytes: config.learner.cache_bytes.
      spec: tells a row's size.
      rows_per_batch: distinct rows that one batch can refer to, 2 * stack * B * K.
      max_useful_rows: rows that replay can hold at once; the rest of the budget stays unallocated.

    Raises:
      ConfigError: the budget does not hold the rows of one batch.
    """
    affordable = cache_bytes // spec.row_bytes
    if affordable < rows_per_batch:
        raise ConfigError(
            f"config.learner.cache_bytes is {cache_bytes}, and must be at least {rows_per_batch * spec.row_bytes}: a "
            f"batch refers to up to {rows_per_batch} rows of {spec.row_bytes} bytes"
        )
    # Slots are int32, and one past the end must be one too.
    return min(affordable, max(max_useful_rows, rows_per_batch), np.iinfo(np.int32).max - 1)


def _bucket(rows: int) -> int:
    return max(_MIN_BUCKET_ROWS, 1 << (rows - 1).bit_length())


class DeviceCache:
    """The rows that the learner holds, in one device array.

    Args:
      capacity: rows.
      row_shape: of one row.
      row_dtype: numpy name of its dtype.
      sharding: None for jax's default device; over several devices, each has a whole copy. Split among them, any share
        of a minibatch would need rows from all of them at each update; a copy costs a new row's way to each, once.
    """

    def __init__(self, capacity: int, row_shape: tuple[int, ...], row_dtype: str, sharding: Sharding | None = None):
        self.capacity = capacity
        self.row_shape = tuple(row_shape)
        self.row_dtype = np.dtype(row_dtype)
        self._filled = np.zeros(capacity, np.bool_)
        self._writer = np.zeros(capacity, np.int32)
        self._sharding = sharding
        self._array = jnp.zeros((capacity, *self.row_shape), self.row_dtype, device=sharding)
        placed: dict[str, Any] = {} if sharding is None else {"out_shardings": sharding}
        self._scatter: Any = jax.jit(
            lambda array, slots, rows: array.at[slots].set(rows, mode="drop"), donate_argnums=0, **placed
        )
        self._gather: Any = jax.jit(lambda array, slots: array.at[slots].get(mode="promise_in_bounds"))

    @property
    def array(self) -> jax.Array:
        """The device array [capacity, *row_shape]. The next insert donates it: read it, don't keep it."""
        return self._array

    @property
    def compilations(self) -> int:
        """Programs compiled so far for inserting and reading."""
        return self._scatter._cache_size() + self._gather._cache_size()

    def compile(self, most_new: int, most_read: int) -> None:
        """Compiles what arrivals of up to `most_new` rows and audits of up to `most_read` will need.

        Each size would otherwise stop the learner when it is first met, an hour into the run perhaps.
        """
        row_bytes = self.row_dtype.itemsize * math.prod(self.row_shape)
        affordable = max(_MIN_BUCKET_ROWS, _MOST_COMPILED_BYTES // row_bytes)
        for most, run in ((most_new, self._scatter_none), (most_read, self._gather_any)):
            size = _MIN_BUCKET_ROWS
            run(size)
            while size < min(most, _MAX_BUCKET_ROWS) and 2 * size <= affordable:
                size *= 2
                run(size)

    def _scatter_none(self, size: int) -> None:
        self._insert_piece(np.full(size, self.capacity, np.int32), np.zeros((size, *self.row_shape), self.row_dtype))

    def _gather_any(self, size: int) -> None:
        self.read(np.zeros(size, np.int32))

    def is_filled(self, slots: np.ndarray) -> bool:
        """Returns whether every one of the slots (in bounds) holds a row."""
        return bool(self._filled[slots].all())

    def forget(self) -> None:
        """Holds every slot to be empty from now on: the mirror begins anew."""
        self._filled[:] = False

    def insert(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows into slots; the arrays that are handed in are free again on return.

        Args:
          slots: int32 [M], distinct, 0 to capacity - 1.
          rows: [M, *row_shape] of the row dtype.

        Raises:
          Corruption: a slot is out of bounds or named twice: which row it would hold is not defined.
        """
        if len(slots) == 0:
            return
        if slots.min() < 0 or slots.max() >= self.capacity:
            raise Corruption(f"new rows for slots {slots.min()} to {slots.max()} of a cache of {self.capacity}")
        # Of two places that write their number into one slot, one reads the other's back.
        places = np.arange(len(slots), dtype=np.int32)
        self._writer[slots] = places
        if not np.array_equal(self._writer[slots], places):
            raise Corruption(f"{len(slots)} new rows for {len(np.unique(slots))} cache slots: one slot named twice")
        for start in range(0, len(slots), _MAX_BUCKET_ROWS):
            self._insert_piece(slots[start : start + _MAX_BUCKET_ROWS], rows[start : start + _MAX_BUCKET_ROWS])
        self._filled[slots] = True

    def _insert_piece(self, slots: np.ndarray, rows: np.ndarray) -> None:
        count, size = len(slots), _bucket(len(slots))
        # Always into arrays of our own: on a CPU, jax may share a numpy array's memory with the device and read it
        # after this returns (google/jax issue 37830), when the caller already fills it with the next rows.
        padded_slots = np.full(size, self.capacity, np.int32)
        padded_slots[:count] = slots
        padded_rows = np.zeros((size, *self.row_shape), self.row_dtype)
        padded_rows[:count] = rows
        with jax.transfer_guard_host_to_device("allow"):  # meant, and a tenth of device_put's price
            self._array = self._scatter(self._array, padded_slots, padded_rows)

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Returns the contents of the slots (int, [M], in bounds) as a new array [M, *row_shape]; for audits.

        Raises:
          Corruption: a slot is out of bounds.
        """
        count = len(slots)
        if count == 0:
            return np.zeros((0, *self.row_shape), self.row_dtype)
        if slots.min() < 0 or slots.max() >= self.capacity:
            raise Corruption(f"audit of slots {slots.min()} to {slots.max()} in a cache of {self.capacity}")
        padded = np.zeros(_bucket(count), np.int32)
        padded[:count] = slots
        return np.array(jax.device_get(self._gather(self._array, jax.device_put(padded, self._sharding)))[:count])

    def crc32(self, slots: np.ndarray) -> int:
        """Returns zlib.crc32 over the contents of the slots, in the order given."""
        return zlib.crc32(self.read(slots).tobytes())
