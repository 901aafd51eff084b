"""Names of rows, unique for ever."""

import secrets

from longhaul.types import ROW_COUNTER_BITS, ROW_INCARNATION_BITS


class RowIds:
    """Row ids, unique for ever: random bits of this process's life, then a counter."""

    def __init__(self) -> None:
        self._limit = 0
        self._next = 0

    def take(self) -> int:
        """Returns the next id."""
        if self._next == self._limit:
            incarnation = secrets.randbits(ROW_INCARNATION_BITS)
            self._next = incarnation << ROW_COUNTER_BITS
            self._limit = (incarnation + 1) << ROW_COUNTER_BITS
        row_id = self._next
        self._next += 1
        return row_id
