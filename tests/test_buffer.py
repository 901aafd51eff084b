"""The replay against a real Reverb server: what is written is what is drawn, as often as its priority says."""

import socket
import threading

import numpy as np
import pytest

pytest.importorskip("reverb")

from longhaul import buffer, config
from longhaul.errors import ConfigError, Stopped
from longhaul.records import RecordPacker, step_dtype
from longhaul.types import ExperienceSpec, NStepTransition

VECTOR = ExperienceSpec("Test-v0", (3,), "float32", stack=1, num_actions=4, n_step=3, gamma=0.9)
STACKED = ExperienceSpec("Test-v0", (4, 5), "uint8", stack=4, num_actions=4, n_step=3, gamma=0.9)


def _replay(**changes):
    replay = config.default().replay
    replay.update({"capacity": 1000, "min_size": 1, "samples_per_insert": 0.0, "priority_exponent": 1.0} | changes)
    return replay


@pytest.fixture
def serve():
    servers = []

    def start(spec=VECTOR, port=0, **changes):
        servers.append(buffer.ReplayServer(spec, _replay(**changes), port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


class _Writer:
    """An ItemWriter that waits for its transitions."""

    def __init__(self, server):
        self._items = buffer.ItemWriter(server)
        self._stack = server.spec.stack

    def write(self, transition, policy_version, priority):
        record = RecordPacker(self._stack).pack(transition, policy_version, priority)
        self._items.write(np.frombuffer(record, np.uint8)[: step_dtype(self._stack).itemsize], priority)
        assert self._items.flush(32, 10.0)

    def close(self):
        assert self._items.flush(0, 10.0)
        self._items.close()


def _write_episode(writer, spec, first_id, steps, priority=1.0):
    """One episode of `steps` steps, its rows first_id..first_id+steps; one transition a step as 1-step tails."""
    ids = list(range(first_id, first_id + steps + 1))

    def stack_at(t):
        return tuple(
            ids[max(0, t - spec.stack + 1 + i)] if t - spec.stack + 1 + i > 0 else ids[0] for i in range(spec.stack)
        )

    written = []
    for t in range(steps):
        k = min(spec.n_step, t + 1)
        transition = NStepTransition(stack_at(t + 1 - k), stack_at(t + 1), t % spec.num_actions, float(ids[t]), 0.9**k)
        writer.write(transition, policy_version=ids[t], priority=priority)
        written.append(transition)
    return written


@pytest.mark.parametrize("spec", [VECTOR, STACKED], ids=["vector", "stack 4 of uint8"])
def test_every_drawn_transition_is_one_that_was_written(serve, spec):
    server = serve(spec)
    writer = _Writer(server)
    written = {}
    for episode in range(12):
        for transition in _write_episode(writer, spec, 100 * episode, steps=7):
            written[transition.n_step_return] = transition
    writer.close()
    sampler = buffer.ReplaySampler(server, batch=64)
    seen = set()
    for _ in range(20):
        drawn = sampler.draw(threading.Event())
        assert drawn.table_size == len(written)
        for i in range(64):
            transition = written[float(drawn.returns[i])]
            seen.add(transition)
            assert tuple(drawn.row_ids[i]) == transition.obs_ids + transition.next_ids
            assert drawn.actions[i] == transition.action
            assert drawn.discounts[i] == np.float32(transition.discount)
            assert drawn.policy_versions[i] == int(transition.n_step_return)
    assert len(seen) == len(written)


def test_draws_follow_priority_to_the_exponent(serve):
    server = serve(priority_exponent=0.5, capacity=100)
    writer = _Writer(server)
    priorities = {}
    for i, priority in enumerate([1000.0, 1.0, 4.0, 9.0]):
        _write_episode(writer, VECTOR, 10 * i, 1, priority=priority)
        priorities[10.0 * i] = priority
    writer.close()
    mass = {key: p**0.5 for key, p in priorities.items()}
    total = sum(mass.values())
    sampler = buffer.ReplaySampler(server, batch=500)
    counts = dict.fromkeys(priorities, 0)
    for _ in range(20):
        drawn = sampler.draw(threading.Event())
        for key, probability in zip(drawn.returns, drawn.probabilities):
            counts[float(key)] += 1
            assert probability == pytest.approx(mass[float(key)] / total, rel=1e-6)
    expected = np.array([10_000 * mass[k] / total for k in counts])
    chi_square = float(np.sum((np.array(list(counts.values())) - expected) ** 2 / expected))
    assert chi_square < 16.27  # 0.1% point of chi-square with 3 degrees of freedom


def test_a_new_priority_changes_the_draws_and_zero_everywhere_is_uniform(serve):
    server = serve()
    writer = _Writer(server)
    for i in range(10):
        _write_episode(writer, VECTOR, 10 * i, 1)
    writer.close()
    sampler = buffer.ReplaySampler(server, batch=200, ahead=1)
    drawn = sampler.draw(threading.Event())
    keys = np.unique(drawn.keys)
    assert len(keys) == 10
    server.update_priorities(keys, np.where(keys == keys[3], 1e6, 1.0))
    sampler.draw(threading.Event())
    assert np.mean(sampler.draw(threading.Event()).keys == keys[3]) > 0.99
    server.update_priorities(keys, np.zeros(10))
    sampler.draw(threading.Event())
    drawn = sampler.draw(threading.Event())
    np.testing.assert_allclose(drawn.probabilities, 0.1)
    assert len(np.unique(drawn.keys)) == 10


def test_the_oldest_leave_first_and_only_whole_transitions_remain(serve):
    server = serve(STACKED, capacity=50)
    writer = _Writer(server)
    for episode in range(60):
        _write_episode(writer, STACKED, 1000 * episode, steps=10)
    writer.close()
    assert server.info()[:2] == (50, 600)
    drawn = buffer.ReplaySampler(server, batch=500).draw(threading.Event())
    assert drawn.row_ids.min() >= 55_000
    episodes = drawn.row_ids // 1000
    assert (episodes == episodes[:, :1]).all()
    assert set(np.diff(drawn.row_ids[:, :4], axis=1).ravel()) <= {0, 1}


def test_the_limiter_holds_samples_to_the_ratio_and_never_holds_inserts(serve):
    server = serve(samples_per_insert=2.0, min_size=10, error_buffer=0.1)
    writer = _Writer(server)
    for i in range(100):
        _write_episode(writer, VECTOR, 10 * i, 1)
    writer.close()
    assert server.info()[1] == 100
    sampler, stop = buffer.ReplaySampler(server, batch=10, ahead=1), threading.Event()
    drawn = 0
    threading.Timer(2.0, stop.set).start()
    with pytest.raises(Stopped):
        while True:
            sampler.draw(stop)
            drawn += 10
    # 2 samples an insert after the minimum size, and an error buffer of 2 samples; a whole batch more or less.
    assert 2 * 90 - 10 <= drawn <= 2 * 100 + 10


def test_nothing_is_drawn_before_the_minimum_size(serve):
    server = serve(min_size=5)
    writer = _Writer(server)
    for i in range(4):
        _write_episode(writer, VECTOR, 10 * i, 1)
    writer.close()
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Stopped):
        buffer.ReplaySampler(server, batch=1).draw(stop)


def test_a_taken_port_names_the_flag(serve):
    server = serve()
    with pytest.raises(ConfigError, match="replay_port"):
        serve(port=server.port)


def test_a_port_that_answers_beyond_the_loopback_is_found():
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as inside:
        assert buffer.outside_address(inside.getsockname()[1]) is None
        found = buffer.outside_address(everywhere.getsockname()[1])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if probe.connect_ex(("192.0.2.1", 9)) == 0 and not probe.getsockname()[0].startswith("127."):
                assert found == probe.getsockname()[0]
