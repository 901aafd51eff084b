"""A site that is asked for more than it can do draws more slowly, so that what it has drawn does not wait."""

import pytest

from longhaul.draw_pace import DrawPace


def _run(pace, draws, work_s, gap_s=0.0, start_s=0.0):
    """A site that needs work_s for a batch, and twice that while the next one is on its heels.

    Returns when the last draw began, and the mean time between the last 100.
    """
    now_s, began = start_s, []
    for _ in range(draws):
        now_s += max(gap_s, work_s)
        now_s += pace.wait_s(now_s)
        pace.drawn(now_s)
        began.append(now_s)
        period_s = began[-1] - began[-2] if len(began) > 1 else work_s
        pace.served(work_s + max(0.0, 2 * work_s - period_s))
    return now_s, (began[-1] - began[-101]) / 100


def test_a_site_without_queues_is_not_held_back():
    pace = DrawPace()
    assert pace.wait_s(0.0) == 0.0
    _, period_s = _run(pace, 500, work_s=0.1, gap_s=0.5)
    assert pace.period_s == 0.0 and period_s == pytest.approx(0.5)


def test_draws_are_spaced_until_a_batch_is_no_more_than_its_share_at_the_site():
    pace = DrawPace()
    _, period_s = _run(pace, 1000, work_s=0.1)
    # At a period p it is 0.3 - p at the site, which is 1.5 p at p = 0.12.
    assert 0.118 < period_s < 0.125


def test_it_goes_back_when_the_site_has_the_time_again():
    pace = DrawPace()
    now_s, slow_s = _run(pace, 1000, work_s=0.2)
    _, fast_s = _run(pace, 600, work_s=0.05, start_s=now_s)
    assert 0.236 < slow_s < 0.25 and 0.059 < fast_s < 0.0625


def test_one_long_stall_does_not_slow_it_for_long():
    pace = DrawPace()
    now_s, before_s = _run(pace, 1000, work_s=0.1)
    _, after_s = _run(pace, 200, work_s=0.1, start_s=now_s + 30.0)
    assert after_s < 1.05 * before_s


def test_a_spell_of_large_batches_does_not_slow_the_small_ones_after_it():
    """A cold cache behind a budget: batches take ten times as long until it is warm."""
    pace = DrawPace()
    now_s, _ = _run(pace, 101, work_s=1.0)
    _, period_s = _run(pace, 400, work_s=0.1, start_s=now_s)
    assert period_s < 0.125


def test_small_batches_are_not_spaced_for_what_no_queue_takes():
    """A batch of 8 ms at the site is no queue, even where one is drawn every 2 ms."""
    pace = DrawPace()
    for draw in range(500):
        pace.drawn(0.002 * draw)
        pace.served(0.008)
    assert pace.period_s == 0.0
