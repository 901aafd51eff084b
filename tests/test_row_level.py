"""The level follows what the site's CPU can spare."""

import zstandard

from longhaul.row_level import RowLevel


def _run(level: RowLevel, share: float, batches: int) -> None:
    """Lets batches pass, each taking `share` of the time."""
    now_s = level._since_s
    for _ in range(batches):
        now_s += 1.0
        level.note(share, now_s)


def test_spare_time_raises_the_level_and_a_busy_gateway_lowers_it():
    level = RowLevel(0)
    first = level.level
    _run(level, 0.01, 64)
    assert level.level > first
    _run(level, 0.5, 1000)
    assert level.level == 1
    _run(level, 0.1, 1000)
    assert level.level == 1  # between the bounds it stays


def test_a_fixed_level_stays():
    level = RowLevel(7)
    _run(level, 0.9, 100)
    assert level.level == 7


def test_what_is_compressed_can_be_read():
    rows = bytes(range(256)) * 100
    assert zstandard.ZstdDecompressor().decompress(RowLevel(0).compress(rows)) == rows
