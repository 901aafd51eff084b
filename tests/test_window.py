"""The window is what Little's law asks for, one more, and never over its cap."""

import pytest

from longhaul.window import Window


def _fed(window: Window, batches_per_s: float, service_s: float, seconds: float = 5.0, start_s: float = 0.0) -> Window:
    count = int(batches_per_s * seconds)
    for i in range(count + 1):
        window.consumed(start_s + i / batches_per_s)
        window.arrived(service_s)
    return window


@pytest.mark.parametrize(
    "rate,rtt_s,service_s,expected",
    [
        (40, 0.05, 0.01, 4),  # ceil(40 * 0.06) + 1
        (40, 0.2, 0.01, 10),  # ceil(40 * 0.21) + 1
        (10, 0.001, 0.02, 2),
        (400, 0.2, 0.0, 64),  # 81, capped
    ],
)
def test_it_covers_the_turnaround(rate, rtt_s, service_s, expected):
    window = _fed(Window(64), rate, service_s)
    for _ in range(10):
        window.retune(rtt_s)
    assert window.size == expected


def test_it_shrinks_when_the_learner_slows_down():
    window = _fed(Window(64), 100, 0.0)
    for _ in range(10):
        window.retune(0.2)
    assert window.size == 21
    _fed(window, 2, 0.0, seconds=10, start_s=10.0)
    window.retune(0.2)
    assert window.size == 2


def test_it_grows_to_the_learner_from_any_start():
    """A learner of 100 batches a second behind 100 ms, whose rate is at first what the window lets through."""
    window, now_s = Window(64), 0.0
    for _ in range(30):
        rate = min(100.0, window.size / 0.1)
        _fed(window, rate, 0.0, seconds=6.0, start_s=now_s)
        now_s += 7.0
        window.retune(0.1)
    assert window.size == 11


def test_a_cap_of_one_holds():
    window = _fed(Window(1), 100, 0.1)
    window.retune(1.0)
    assert window.size == 1
