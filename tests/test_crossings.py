"""First crossings: each item is marked once, and again only where its batch was lost."""

import secrets
import threading

import numpy as np
import pytest

from longhaul.crossings import Crossings


def keys(*values):
    return np.array(values, np.uint64)


def test_a_key_is_marked_the_first_time_only():
    crossings = Crossings(10)
    assert crossings.mark(keys(1, 2, 2, 2**64 - 1)).tolist() == [True, True, False, True]
    assert crossings.mark(keys(2**64 - 1, 3)).tolist() == [False, True]


def test_what_did_not_arrive_is_marked_again():
    crossings = Crossings(10)
    crossings.mark(keys(1, 2))
    crossings.undo(keys(2))
    assert crossings.mark(keys(1, 2)).tolist() == [False, True]


def test_the_oldest_keys_are_forgotten():
    crossings = Crossings(3)
    crossings.mark(keys(1, 2, 3, 4))
    assert crossings.mark(keys(4, 3, 2)).tolist() == [False] * 3
    assert crossings.mark(keys(1)).tolist() == [True]


@pytest.mark.parametrize("asked", [True, False])
def test_a_learner_that_asks_is_told_and_no_other(asked):
    pytest.importorskip("reverb")
    from longhaul.link import LinkClient
    from longhaul.relay import Relay
    from tests.site import CheckingLearner, Writer, running, small_config

    stop = threading.Event()
    with running(small_config()) as (gateway, site), Relay(("127.0.0.1", gateway.port)) as relay:
        writer = Writer(site)
        writer.write(100)
        link = LinkClient(relay.address, small_config(), secrets.randbits(60), stop)
        try:
            link.describe(10.0)
            link.open(2000, 12, 1, 1, mark_first=asked)
            learner, marks = CheckingLearner(link, 2000), []
            for i in range(60):
                marks.append(learner.step().first_crossings.reshape(-1))
                if i in (5, 30):
                    relay.reset()
        finally:
            link.close()
            stop.set()
            writer.close()
    if not asked:
        assert not any(mark.size for mark in marks)
        return
    seen = set()
    for n_step_return, first in zip(learner.drawn, np.concatenate(marks).tolist()):
        assert first == (n_step_return not in seen)
        seen.add(n_step_return)
