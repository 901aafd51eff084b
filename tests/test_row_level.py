"""The level follows what the site's CPU can spare."""

import zstandard

from longhaul.row_level import RowLevel


def _run(level: RowLevel, share: float, waiting: float, batches: int) -> None:
    """Lets batches pass, each with these shares of the time."""
    now_s = level._since_s
    for _ in range(batches):
        now_s += 1.0
        level.note(share, waiting, now_s)


def test_waiting_for_the_link_raises_the_level_until_it_takes_its_share():
    level = RowLevel(0)
    first = level.level
    _run(level, 0.01, 0.9, 64)
    raised = level.level
    assert raised > first
    _run(level, 0.1, 0.9, 1000)
    assert level.level == raised  # between the bounds it stays
    _run(level, 0.3, 0.9, 32)
    assert level.level < raised


def test_a_gateway_that_never_waits_takes_the_cheapest_level():
    level = RowLevel(0)
    _run(level, 0.01, 0.05, 1000)
    assert level.level == 1


def test_a_fixed_level_stays():
    level = RowLevel(7)
    _run(level, 0.9, 0.9, 100)
    assert level.level == 7


def test_what_is_compressed_can_be_read():
    rows = bytes(range(256)) * 100
    assert zstandard.ZstdDecompressor().decompress(RowLevel(0).compress(rows)) == rows
