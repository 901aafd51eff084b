"""The window is what Little's law asks for, one more, and never over its cap."""

import pytest

from longhaul.window import Window


def _fed(
    window: Window,
    batches_per_s: float,
    service_s: float,
    seconds: float = 5.0,
    start_s: float = 0.0,
    age_s: float = 0.0,
) -> Window:
    count = int(batches_per_s * seconds)
    for i in range(count + 1):
        window.consumed(start_s + i / batches_per_s)
        window.arrived(service_s, age_s=age_s)
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


def test_where_both_ends_wait_it_grows_while_that_helps_and_no_further():
    """Queues of 80 ms that nobody measures, behind a gateway of 40 batches a second."""
    window, now_s, sizes = Window(64), 0.0, []
    for _ in range(60):
        rate = min(40.0, window.size / 0.16)
        _fed(window, rate, 0.03, seconds=4.0, start_s=now_s)
        now_s += 5.0
        window.starved(1.0)
        window.arrived(0.03, credit_wait_s=1.0 if rate < 40 else 0.0)
        window.retune(0.05, window._retuned_s + 2.0)
        sizes.append(window.size)
    # 40 * 0.16 = 6.4; now and then it looks whether fewer would do.
    assert max(sizes) <= 9 and sum(sizes[-40:]) / 40 >= 6


def test_a_try_that_only_makes_batches_wait_is_taken_back():
    """A path of 10 batches a second and 50 ms, where each batch too many waits 100 ms."""
    window, now_s = Window(64), 0.0
    for _ in range(40):
        _fed(window, 10.0, 0.01, seconds=4.0, start_s=now_s, age_s=max(0.06, window.size / 10))
        now_s += 5.0
        window.starved(1.0)
        window.arrived(0.01, credit_wait_s=1.0)
        window.retune(0.05, window._retuned_s + 2.0)
        assert window.size <= 3  # ceil(10 * 0.06) + 1, and one tried


def test_a_small_gain_does_not_keep_a_try_that_makes_batches_older():
    """The same path, whose rate happens to rise a little with each try and to fall afterwards."""
    window, now_s = Window(64), 0.0
    for _ in range(60):
        rate = 11.0 if window._trying else 10.0
        _fed(window, rate, 0.01, seconds=4.0, start_s=now_s, age_s=max(0.06, window.size / 10))
        now_s += 5.0
        window.starved(1.0)
        window.arrived(0.01, credit_wait_s=1.0)
        window.retune(0.05, window._retuned_s + 2.0)
        assert window.size <= 3


def test_a_try_that_makes_nothing_older_is_kept_though_its_gain_is_no_more_than_the_noise():
    """A path that halts now and then, whose rate varies by more than one batch more in flight can add."""
    window, now_s, sizes = Window(64), 0.0, []
    for second in range(60):
        full = window.size >= 12
        rate = min(40.0, 12.0 + 2.3 * window.size) * (1.0, 0.95, 0.98)[second % 3]
        _fed(window, rate, 0.03, seconds=4.0, start_s=now_s, age_s=0.08 + 0.004 * (second % 3))
        now_s += 5.0
        window.starved(1.0)
        window.arrived(0.03, credit_wait_s=0.0 if full else 1.0)
        window.retune(0.05, window._retuned_s + 2.0)
        sizes.append(window.size)
    assert min(sizes[-20:]) >= 11 and max(sizes) <= 16


def test_a_try_that_costs_rate_is_taken_back():
    window, now_s = Window(64), 0.0
    for _ in range(40):
        rate = 40.0 if window.size <= 5 else 30.0
        _fed(window, rate, 0.03, seconds=4.0, start_s=now_s)
        now_s += 5.0
        window.starved(1.0)
        window.arrived(0.03, credit_wait_s=1.0)
        window.retune(0.05, window._retuned_s + 2.0)
        assert window.size <= 7


def _learn(window: Window, rate: float, turnaround_s: float, seconds: int) -> list[float]:
    """A learner of `rate` batches a second: how long each batch waited for it, second by second at worst.

    Each credit leaves when its batch is through, is held back as the window says, and is a batch a turnaround later.
    """
    free_s, arrivals, least = 0.0, [0.0] * window.size, []
    for second in range(seconds):
        spares = []
        while free_s < second + 1:
            arrival_s = arrivals.pop(0)
            spares.append(free_s - arrival_s)
            if arrival_s <= free_s:
                window.taken(free_s - arrival_s)
            else:
                window.starved(arrival_s - free_s)
            free_s = max(free_s, arrival_s) + 1 / rate
            window.consumed(free_s)
            window.arrived(0.0)
            while len(arrivals) < window.size:
                arrivals.append(free_s + window.hold_s + turnaround_s)
        least.append(min(spares))
        window.retune(turnaround_s, window._retuned_s + 1.0)
    return least


@pytest.mark.parametrize("rate,turnaround_s", [(19, 0.115), (100, 0.055), (10, 0.001), (8, 0.3)])
def test_batches_come_just_before_they_are_needed(rate, turnaround_s):
    window = Window(64)
    least = _learn(window, rate, turnaround_s, 80)
    margin_s = max(0.004, 0.25 / rate)
    assert all(0 <= spare_s < margin_s + 0.3 / rate for spare_s in least[-10:])


def test_batches_that_come_late_are_not_held_back():
    window = Window(2)  # too small for this path
    _learn(window, 100, 0.1, 20)
    assert window.hold_s == 0
