"""The observation rows of a site, by id: each is held once, as long as a transition of the replay may refer to it.

A row comes before the transitions that refer to it: whatever the replay draws is found here. The newest rows of every
environment stream are pinned, since transitions to come refer to them, however slow the stream. A row that its stream
has left behind is pinned until the transitions that came with its successors are written; then it stays for as many
further transitions as the replay holds (which lets its oldest go first), and some more for those on their way out of
it, or in it and not yet counted here.
"""

import threading
from collections import deque
from pathlib import Path

import numpy as np

from longhaul import codec
from longhaul.errors import Corruption

_MOST_STREAMS = 65_536
_MOST_KEPT_ROWS = 1_000_000


class RowStore:
    """Rows as their actors packed them (codec.CellPacker). Thread-safe.

    Args:
      capacity: transitions that the replay holds at most.
      row_bytes: size of one row unpacked.
      rows_per_item: rows that one transition refers to at most.
    """

    def __init__(self, capacity: int, row_bytes: int, rows_per_item: int):
        self._capacity = capacity
        self._row_bytes = row_bytes
        self._rows_per_item = rows_per_item
        self._lock = threading.Lock()
        self._cells: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}  # row id -> streams that hold on to it
        self._leaving: deque[tuple[int, int]] = deque()  # (transitions settled when it was unpinned, row id)
        self._returned: dict[int, int] = {}  # row id -> entries of `_leaving` that a later pin has made void
        self._settled = 0  # transitions written into the replay, over all actors
        self._on_their_way = 0  # transitions into and out of the replay, at most
        self._bytes = 0
        self._feeds = 0

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def stored_bytes(self) -> int:
        """Size of all rows as they are stored."""
        return self._bytes

    @property
    def feeds(self) -> int:
        """Actors that are connected."""
        return self._feeds

    def get(self, row_ids: list[int]) -> list[bytes | None]:
        """Returns the cells of rows, None for each that is not here."""
        cells = self._cells
        return [cells.get(row_id) for row_id in row_ids]

    def snapshot(self) -> dict[int, bytes]:
        """Returns all rows as they are stored, by id."""
        with self._lock:
            return dict(self._cells)

    def reserve(self, transitions: int) -> None:
        """Keeps rows for so many more transitions on their way into or out of the replay; fewer if negative."""
        with self._lock:
            self._on_their_way += transitions

    def holds(self, row_ids: list[int]) -> bool:
        """Returns whether all of these rows are here."""
        return all(map(self._cells.__contains__, row_ids))

    def _count_feed(self, change: int, transitions: int) -> None:
        self.reserve(change * transitions)
        with self._lock:
            self._feeds += change

    def open(self, streams: int, keep_rows: int, most_transitions: int) -> "RowFeed":
        """Begins to take the rows of one actor.

        Args:
          streams: its environment streams.
          keep_rows: newest rows of a stream that transitions to come may refer to.
          most_transitions: that may be in the replay and not yet counted by `RowFeed.settle`.

        Raises:
          Corruption: a number that can't be.
        """
        if not (0 < streams <= _MOST_STREAMS and keep_rows > 0 and streams * keep_rows <= _MOST_KEPT_ROWS):
            raise Corruption(f"rows of {streams} streams, {keep_rows} kept of each: not possible")
        return RowFeed(self, streams, keep_rows, most_transitions)

    def _put(self, cells: list[bytes]) -> list[int]:
        """Stores and pins rows; returns their ids."""
        row_ids = [codec.cell_id(cell) for cell in cells]
        with self._lock:
            for row_id, cell in zip(row_ids, cells):
                if row_id not in self._cells:  # else it has come twice, after a cut; the first stays
                    self._cells[row_id] = cell
                    self._bytes += len(cell)
                elif row_id not in self._pins:
                    self._returned[row_id] = self._returned.get(row_id, 0) + 1
                self._pins[row_id] = self._pins.get(row_id, 0) + 1
        return row_ids

    def _unpin(self, row_ids: list[int], settled: int = 0) -> None:
        """Lets go of pins, after so many transitions more."""
        with self._lock:
            self._settled += settled
            for row_id in row_ids:
                if pins := self._pins[row_id] - 1:
                    self._pins[row_id] = pins
                else:
                    del self._pins[row_id]
                    self._leaving.append((self._settled, row_id))
            self._evict()

    def _evict(self) -> None:
        kept = self._capacity + self._on_their_way
        # The second bound is for an actor that sends rows and never a transition.
        while self._leaving and (
            self._settled - self._leaving[0][0] > kept or len(self._leaving) > self._rows_per_item * kept
        ):
            _, row_id = self._leaving.popleft()
            if void := self._returned.get(row_id, 0):
                if void == 1:
                    del self._returned[row_id]
                else:
                    self._returned[row_id] = void - 1
                continue
            self._bytes -= len(self._cells.pop(row_id))


def save_rows(path: Path, rows: dict[int, bytes]) -> None:
    """Writes rows, as they are stored, into one .npz file: `sizes` int64 [N] of the cells, and `cells`, their bytes."""
    cells = list(rows.values())
    with open(path, "wb") as file:
        np.savez(
            file, sizes=np.array([len(cell) for cell in cells], np.int64), cells=np.frombuffer(b"".join(cells), "u1")
        )


def load_rows(path: Path) -> dict[int, bytes]:
    """Undoes `save_rows`; nothing is unpickled.

    Raises:
      Corruption: the file is not one of `save_rows`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            sizes, joined = file["sizes"], file["cells"].tobytes()
    except (OSError, ValueError, KeyError) as error:
        raise Corruption(f"{path}: {error}") from error
    ends = np.cumsum(sizes)
    if len(sizes) and (sizes.min() < 0 or ends[-1] != len(joined)):
        raise Corruption(f"{path}: {len(joined)} bytes are not the rows it names")
    cells = [joined[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist())]
    return {codec.cell_id(cell): cell for cell in cells}


class RowFeed:
    """What one actor brings into the store, over one connection. Not thread-safe."""

    def __init__(self, store: RowStore, streams: int, keep_rows: int, most_transitions: int):
        self._store = store
        self._most_transitions = most_transitions
        store._count_feed(1, most_transitions)
        self._newest: list[deque[int]] = [deque() for _ in range(streams)]
        self._left_behind: list[int] = []
        self._keep_rows = keep_rows

    def put(self, places: list[int], cells: list[bytes]) -> None:
        """Stores rows, all or none. What their streams leave behind stays until `settle`.

        Args:
          places: each row's stream, from 0.
          cells: each row, packed.

        Raises:
          Corruption: a stream that is not there, a cell that does not hold a row.
        """
        if len(places) != len(cells):
            raise Corruption(f"{len(cells)} rows for {len(places)} streams")
        for place in places:
            if not 0 <= place < len(self._newest):
                raise Corruption(f"a row of stream {place}, of {len(self._newest)}")
        codec.unpack_cells(cells, self._store._row_bytes)  # here it costs its sender's stream, later a learner's
        row_ids = self._store._put(cells)
        for place, row_id in zip(places, row_ids):
            newest = self._newest[place]
            newest.append(row_id)
            if len(newest) > self._keep_rows:
                self._left_behind.append(newest.popleft())

    def settle(self, transitions: int) -> None:
        """Notes that so many transitions more, all that refer to rows put so far, are in the replay."""
        self._store._unpin(self._left_behind, transitions)
        self._left_behind = []

    def close(self) -> None:
        """No more rows come: those pinned stay as long as if all were settled now."""
        self.settle(0)
        for newest in self._newest:
            self._store._unpin(list(newest))
            newest.clear()
        self._store._count_feed(-1, self._most_transitions)
