"""The probe: what is held out never reaches the replay, the newest is kept, and its loss is Huber's, unweighted."""

import threading

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import fakes
import test_actor

from longhaul import actor as actor_lib
from longhaul import codec, env, evaluation, networks, probe
from longhaul import config as config_lib
from longhaul.probe import Probe, ProbeWriter
from longhaul.types import ExperienceSpec, NStepTransition

SPEC = ExperienceSpec("Test-v0", (3,), "float32", stack=2, num_actions=4, n_step=1, gamma=0.9)


def row(number):
    return np.array([number, number / 2, 1.0], np.float32)


def offer(writer, numbers):
    """Offers one transition a number, which is its newest row and its return; returns those that were held out."""
    held_out = []
    for number in numbers:
        writer.add_row(0, number, row(number))
        back = tuple(max(0, number - i) for i in (2, 1))
        transition = NStepTransition(back, (back[1], number), number % 4, float(number), 0.9)
        if writer.takes(0, transition):
            held_out.append(number)
    return held_out


def make_writer(folder, share=0.5, seed=1, keep=2048, name="actor_0"):
    writer = ProbeWriter(folder, name, SPEC, share, [seed, 0, 1], keep_rows=4, keep=keep)
    writer.add_row(0, 0, row(0))
    return writer


def test_the_share_is_kept_and_the_choice_is_the_seeds_own(tmp_path):
    chosen = [offer(make_writer(tmp_path / str(i), 0.1, seed), range(1, 4001)) for i, seed in enumerate((1, 1, 2))]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 300 < len(chosen[0]) < 500
    # A choice that follows some pattern of the stream would make another sample than a uniform one.
    gaps = np.diff(chosen[0])
    assert np.mean(gaps) == pytest.approx(10, rel=0.2) and np.std(gaps) == pytest.approx(9.5, rel=0.3)


def test_the_newest_come_back_as_they_were(tmp_path):
    held_out = offer(make_writer(tmp_path), range(1, 401))
    whole = held_out[: len(held_out) // 32 * 32]
    found = probe.newest(tmp_path, 64)
    assert sorted(found.returns.tolist()) == [float(n) for n in whole[-64:]]
    for rows, action, n_step_return, discount in zip(*found):
        n = int(n_step_return)
        np.testing.assert_array_equal(rows, np.stack([row(max(0, n - 2)), row(n - 1), row(n - 1), row(n)]))
        assert (action, discount) == (n % 4, np.float32(0.9))
    assert probe.newest(tmp_path, 1000) is None


def test_old_ones_leave_the_disk_and_every_actor_keeps_its_own(tmp_path):
    for name in ("actor_0", "actor_1"):
        offer(make_writer(tmp_path, 0.5, keep=64, name=name), range(1, 2001))
    assert len(list((tmp_path / "probe").glob("actor_0-*.npz"))) == 2
    found = probe.newest(tmp_path, 128)
    assert len(found.returns) == 128 and len(set(found.returns.tolist())) < 128


def test_files_are_not_unpickled(tmp_path):
    offer(make_writer(tmp_path), range(1, 200))
    path = max((tmp_path / "probe").glob("*.npz"))
    with open(path, "wb") as file:
        np.savez(file, rows=np.array([print], object), actions=0, returns=0, discounts=0)
    with pytest.raises(ValueError, match="allow_pickle"):
        probe.newest(tmp_path, 16)


@pytest.mark.parametrize("mode", config_lib.AUTORESET_MODES)
def test_an_actor_writes_what_it_does_not_hold_out_and_nothing_else(tmp_path, mode):
    config = test_actor._config(n_step=3, stack=2, mode=mode, num_envs=2)
    config.actor.probe_share = 0.4
    stop, made = threading.Event(), []

    def open_writer(*arguments):
        made.append(test_actor.Recorder(*arguments))
        return made[0]

    site, metrics = test_actor.Site(stop, 300), test_actor.Metrics()
    actor_lib.Actor(config, 0, site, metrics, stop, open_writer, tmp_path).run()
    figures = metrics.lines[-1][1]
    written = [(t.obs[-1], t.n_step_return) for t in test_actor._stored(made[0], fakes.decode_vector)]
    held_out = figures["probe_transitions"]
    count = held_out // 32 * 32
    found = probe.newest(tmp_path, count)
    probed = [(fakes.decode_vector(rows[1]), float(r)) for rows, r in zip(found.rows, found.returns)]
    assert held_out / (held_out + len(written)) == pytest.approx(0.4, abs=0.1)
    assert not set(probed) & set(written)
    # Together they are all that the same actor stores without a probe, but for the last file that is not yet full.
    config.actor.probe_share = 0.0
    everything = [(t.obs[-1], t.n_step_return) for t in test_actor._stored(test_actor._run(config, 300).writer,
                  fakes.decode_vector)]  # fmt: skip
    assert set(probed) | set(written) <= set(everything)
    assert len(everything) == len(written) + held_out


def test_the_probes_loss_and_priorities_by_hand(tmp_path):
    config = config_lib.default()
    config.env.id = "fakes:Oracle-v0"
    config.agent.update({"hidden": (8,), "network": "mlp", "huber_delta": 1.0})
    spec = env.make_spec(config)
    network = networks.make_network(spec, config)
    params = networks.init_params(network, spec, 3)
    payload = codec.pack_weights(networks.flatten_params(params), "float32")
    measure = evaluation.ProbeScores(config, spec, tmp_path).measure
    assert measure(payload) == {}

    rng = np.random.default_rng(0)
    count = evaluation.PROBE_TRANSITIONS
    held_out = Probe(
        rng.standard_normal((count, 2, 4)).astype(np.float32),
        rng.integers(0, 3, count).astype(np.int32),
        rng.standard_normal(count).astype(np.float32),
        rng.choice([0.0, 0.9], count).astype(np.float32),
    )
    (tmp_path / "probe").mkdir()
    np.savez(tmp_path / "probe" / "actor_0-00000001.npz", **held_out._asdict())
    q_tm1, q_t = (np.asarray(network.apply(params, held_out.rows[:, [i]])) for i in range(2))
    errors = held_out.returns + held_out.discounts * q_t.max(axis=1) - q_tm1[np.arange(count), held_out.actions]
    losses = np.where(np.abs(errors) <= 1, errors**2 / 2, np.abs(errors) - 0.5)
    priorities = np.abs(errors) + config.replay.priority_epsilon
    drawn = np.average(priorities, weights=priorities**config.replay.priority_exponent)
    assert drawn > 1.2 * priorities.mean()
    expected = {"probe_loss": losses.mean(), "probe_priority": priorities.mean(), "probe_priority_drawn": drawn}
    assert measure(payload) == pytest.approx(expected, rel=1e-5)
