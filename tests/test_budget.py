"""A budget holds over every ten seconds, and lets what is urgent pass."""

import threading

import pytest

from longhaul import budget
from longhaul.budget import Budget
from longhaul.errors import Stopped


class _Clock:
    """Stands for both the clock and the wait, so that minutes pass at once."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    def is_set(self):
        return False

    def wait(self, seconds):
        self.now_s += seconds
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


@pytest.mark.parametrize("size", [200, 4096, 10_000])
def test_any_ten_seconds_carry_at_most_five_percent_over_the_budget(clock, size):
    cap = Budget(100_000)
    size = min(size, cap.part_bytes(2**20))
    sent = []
    clock.now_s += 30  # a pause must not be saved up
    while clock.now_s < 170:
        cap.take(size, clock)
        sent.append((clock.now_s, size))
    for start_s, _ in sent[:: max(1, len(sent) // 200)]:
        carried = sum(n for t, n in sent if start_s <= t < start_s + 10)
        assert carried <= 1.05 * 10 * 100_000
    assert sum(n for _, n in sent) >= 0.95 * 0.97 * 100_000 * 40


def test_urgent_messages_pass_and_the_others_pay(clock):
    cap = Budget(1000)
    cap.spend(5000)
    began_s = clock.now_s
    cap.take(10, clock)
    assert clock.now_s - began_s >= 4.5


def test_no_budget_never_waits():
    cap = Budget(0)
    for _ in range(1000):
        cap.take(10**9, threading.Event())
    assert cap.part_bytes(2**20) == 2**20


def test_a_stop_ends_the_wait():
    cap = Budget(1.0)
    cap.spend(1000)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        cap.take(1, stop)
