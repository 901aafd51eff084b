"""The rate of weights: found by the delay they cause, and never so low that they do not arrive."""

import time

import pytest

from longhaul.publisher import Pace

PART = 16 * 1024
PATH = 625_000.0  # bytes/s


class _Path:
    """A queue before a line, as a Pace's meter sees it: with each answer, late by the delay that it tells of."""

    def __init__(self, bytes_per_s: float, standing_s: float = 0.0):
        self._rate, self._standing_s = bytes_per_s, standing_s
        self._backlog = 0.0
        self._seen: list[tuple[float, float]] = []  # when a Ping comes back, and what it tells
        self.now_s = time.monotonic()

    def carry(self, size: int) -> None:
        self._backlog += size

    def wait(self, seconds: float) -> None:
        if seconds <= 0:
            return
        steps = max(1, round(seconds / 0.01))
        for _ in range(steps):
            step_s = seconds / steps
            self.now_s += step_s
            self._backlog = max(0.0, self._backlog - self._rate * step_s)
            self._seen.append((self.now_s + 0.05 + self.delay_s, self.delay_s))

    @property
    def delay_s(self) -> float:
        return self._standing_s + self._backlog / self._rate

    def queueing_s(self) -> float:
        return max(((at_s, told) for at_s, told in self._seen[-1000:] if at_s <= self.now_s), default=(0, 0.0))[1]


def _send(path, pace, size: int, least: float = 0.0) -> list[float]:
    """Sends a snapshot; returns the path's delays while it goes."""
    delays = []
    for _ in range(size // PART):
        path.wait(pace.wait_s(PART, least, path.now_s))
        path.carry(PART)
        delays.append(path.delay_s)
    return delays


@pytest.mark.parametrize("rate", [PATH, 10 * PATH])
def test_weights_fill_the_path_and_not_the_queue_before_it(rate):
    path = _Path(rate)
    pace = Pace(path)
    _send(path, pace, 5_000_000)  # finds the rate
    began_s = path.now_s
    delays = _send(path, pace, 20_000_000)
    assert sorted(delays)[len(delays) // 2] < 0.15 and max(delays) < 0.6
    assert path.now_s - began_s < 2.0 * 20_000_000 / rate


def test_a_delay_that_is_not_the_weights_doing_does_not_starve_them():
    path = _Path(PATH, standing_s=3.0)
    began_s = path.now_s
    _send(path, Pace(path), 2_000_000, least=2_000_000 / 20)
    assert path.now_s - began_s < 30


def test_a_path_without_delay_is_never_slowed():
    path = _Path(1e12)
    pace = Pace(path)
    began_s = path.now_s
    _send(path, pace, 100_000_000)
    assert pace.bytes_per_s > 10e6
    assert path.now_s - began_s < 30
