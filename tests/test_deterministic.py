"""Deterministic runs: the replay's rules by hand and by frequency, the same run twice, and the seeds of a site."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from scipy import stats

from launchers import deterministic
from launchers.emulated_link import parse_link
from longhaul import actor as actor_lib
from longhaul import checkpoints, codec, dqn, lockstep, networks, streams
from longhaul import config as config_lib
from longhaul.errors import ConfigError, LonghaulError, Stopped
from longhaul.exploration import Exploration
from longhaul.metrics import MetricsWriter
from longhaul.policy import Policy
from longhaul.seeded_replay import SeededReplay, SumTree
from longhaul.types import ExperienceSpec, NStepTransition
from tests.strict_jax import strict  # noqa: F401 (a fixture)

REPO = Path(__file__).parent.parent
SMOKE = "--config=configs/smoke.py"
SPEC = ExperienceSpec("Test-v0", (2,), "float32", stack=1, num_actions=3, n_step=1, gamma=0.9)

# ---- the tree


def test_a_point_falls_into_the_slot_whose_weight_covers_it():
    tree = SumTree(5)
    tree.set(np.arange(5), np.array([1.0, 2.0, 0.0, 1.0, 0.5]))  # ends at 1, 3, 3, 4, 4.5
    assert tree.total == 4.5
    points = np.array([0.0, 0.99, 1.0, 2.99, 3.0, 3.99, 4.0, 4.49])
    assert tree.find(points).tolist() == [0, 0, 1, 1, 3, 3, 4, 4]
    tree.set(np.array([1, 4, 1]), np.array([9.0, 0.0, 0.25]))  # the last of slot 1 holds
    assert tree.total == 2.25
    assert tree.find(np.array([1.0, 1.24, 1.25])).tolist() == [1, 1, 3]


def test_no_point_finds_a_slot_of_weight_zero_even_at_the_very_end():
    tree = SumTree(8)
    tree.set(np.array([0, 2, 4]), np.array([0.1, 0.2, 0.3]))
    assert tree.find(np.array([0.0, tree.total, np.nextafter(tree.total, 0)])).tolist() == [0, 4, 4]


def test_sums_do_not_drift_and_one_slot_is_a_tree_too():
    tree, rng = SumTree(100), np.random.default_rng(0)
    for _ in range(200):
        tree.set(rng.integers(100, size=7), rng.random(7) * 10.0 ** rng.integers(-6, 6))
    tree.set(np.arange(100), np.full(100, 0.25))
    assert tree.total == 25.0
    one = SumTree(1)
    one.set(np.array([0]), np.array([3.0]))
    assert one.total == 3.0 and one.find(np.array([2.9])).tolist() == [0]


# ---- the replay


def make_replay(seed=1, **settings):
    replay = config_lib.default().replay
    replay.update(dict(capacity=8, min_size=1, priority_exponent=0.5, samples_per_insert=0.0) | settings)
    return SeededReplay(SPEC, replay, num_streams=1, keep_rows=2, seed=seed)


def fill(replay, priorities):
    """Inserts one transition for each priority; that of key k has action k % 3 and the rows 2k and 2k+1."""
    for priority in priorities:
        key = replay.inserts
        for row_id in (2 * key, 2 * key + 1):
            replay.add_row(0, row_id, np.full(2, row_id, np.float32))
        replay.add_transition(0, NStepTransition((2 * key,), (2 * key + 1,), key % 3, float(key), 0.9), key, priority)


def test_probabilities_and_weights_are_those_worked_by_hand():
    replay = make_replay()
    fill(replay, [1.0, 4.0, 9.0])  # to the power of a half 1, 2, 3, of 6 in all
    drawn = replay.draw(300)
    assert set(drawn.keys.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(drawn.probabilities, (drawn.keys + 1) / 6)
    np.testing.assert_array_equal(drawn.priorities, (drawn.keys + 1.0) ** 2)
    weights = dqn.importance_weights(drawn.probabilities.astype(np.float32), np.float32(1.0))
    np.testing.assert_allclose(weights, 1 / (drawn.keys + 1.0), rtol=1e-6)
    assert drawn.table_size == 3 and replay.samples == 300
    np.testing.assert_array_equal(drawn.actions, drawn.keys % 3)
    np.testing.assert_array_equal(drawn.returns, drawn.keys.astype(np.float32))
    np.testing.assert_array_equal(drawn.policy_versions, drawn.keys)
    np.testing.assert_array_equal(drawn.row_ids, np.stack([2 * drawn.keys, 2 * drawn.keys + 1], axis=1))
    np.testing.assert_array_equal(replay.rows([3, 0]), [[3, 3], [0, 0]])


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0])
def test_draws_come_as_often_as_priority_to_the_exponent(exponent):
    replay = make_replay(capacity=50, priority_exponent=exponent)
    rng = np.random.default_rng(3)
    fill(replay, rng.random(70) * 5)
    priorities = rng.random(50) * 5
    replay.update_priorities(np.arange(20, 70, dtype=np.uint64), priorities)
    expected = priorities**exponent / (priorities**exponent).sum()
    counts = np.zeros(50)
    for _ in range(100):
        np.add.at(counts, replay.draw(500).keys.astype(int) - 20, 1)
    assert stats.chisquare(counts, 50_000 * expected).pvalue > 0.001


def test_the_oldest_leaves_when_the_table_is_full_and_its_rows_with_it():
    replay = make_replay(capacity=3)
    fill(replay, [1.0] * 3)
    assert len(replay) == 3 and set(replay.draw(100).keys.tolist()) == {0, 1, 2}
    fill(replay, [1.0] * 2)
    assert len(replay) == 3 and set(replay.draw(100).keys.tolist()) == {2, 3, 4}
    assert replay.held_rows == 6  # two of each transition; the stream's two newest are among them
    with pytest.raises(KeyError):
        replay.rows([3])
    fill(replay, [1.0] * 100)
    assert replay.held_rows == 6


def test_priorities_of_those_that_have_left_are_passed_over():
    replay = make_replay(capacity=3)
    fill(replay, [1.0] * 5)
    replay.update_priorities(np.array([0, 1, 3], np.uint64), np.array([100.0, 100.0, 4.0]))
    drawn = replay.draw(200)
    np.testing.assert_allclose(drawn.probabilities, np.where(drawn.keys == 3, 0.5, 0.25))


def test_without_any_priority_all_are_alike_and_an_empty_table_gives_nothing():
    replay = make_replay()
    with pytest.raises(LonghaulError, match="empty"):
        replay.draw(1)
    fill(replay, [0.0] * 4)
    drawn = replay.draw(200)
    assert set(drawn.keys.tolist()) == {0, 1, 2, 3} and (drawn.probabilities == 0.25).all()


def test_a_draw_waits_for_min_size_and_then_for_its_inserts():
    replay = make_replay(capacity=100, min_size=4, samples_per_insert=2.0)
    fill(replay, [1.0] * 3)
    assert not replay.may_draw
    fill(replay, [1.0])
    assert replay.may_draw
    replay.draw(3)
    # 3 samples need an insert and a half beyond the first 4.
    fill(replay, [1.0])
    assert not replay.may_draw
    fill(replay, [1.0])
    assert replay.may_draw


def test_a_transition_may_enter_with_the_highest_priority_so_far():
    replay = make_replay(capacity=4, priority_exponent=1.0, initial_priority="max")
    fill(replay, [0.1, 0.2])
    replay.update_priorities(np.array([0, 1], np.uint64), np.array([0.25, 3.0]))
    fill(replay, [0.1])
    drawn = replay.draw(200)
    assert dict(zip(drawn.keys.tolist(), drawn.priorities.tolist())) == {0: 0.25, 1: 3.0, 2: 3.0}
    replay.update_priorities(np.array([1], np.uint64), np.array([0.5]))
    fill(replay, [0.1])
    drawn = replay.draw(200)
    assert dict(zip(drawn.keys.tolist(), drawn.priorities.tolist())) == {0: 0.25, 1: 0.5, 2: 3.0, 3: 3.0}


def test_what_is_not_finite_is_refused_and_an_unknown_row_is_an_error():
    replay = make_replay()
    fill(replay, [1.0, np.nan, np.inf, -1.0])
    assert len(replay) == 1 and replay.counters == {"written_items": 1, "refused_priorities": 3}
    with pytest.raises(LonghaulError, match="row 77 is not among the 2 newest"):
        replay.add_transition(0, NStepTransition((1,), (77,), 0, 0.0, 0.9), 0, 1.0)
    with pytest.raises(LonghaulError, match="a row of 12 bytes"):
        replay.add_row(0, 99, np.zeros(3, np.float32))


def test_draws_follow_their_seed_alone():
    keys = []
    for seed in (5, 5, [5, 0, 2], [6, 0, 2]):
        replay = make_replay(seed=seed)
        fill(replay, np.arange(1.0, 9.0))
        keys.append([replay.draw(20).keys.tolist() for _ in range(3)])
    assert keys[0] == keys[1]
    assert keys[0] != keys[2] != keys[3]


# ---- the same run twice


def make_config(**settings):
    config = config_lib.default()
    config.env.num_envs = 2
    config.agent.hidden = (32, 32)
    config.replay.update(dict(capacity=600, min_size=100))
    config.learner.update(dict(batch_size=16, minibatches_per_pull=4, max_updates=320))
    config.learner.update(dict(publish_period_updates=20, target_period_updates=50))
    config.evaluation.update(dict(episodes=2, max_steps=50))
    config.metrics.tensorboard = False
    config.update_from_flattened_dict(settings)
    return config


# A picture stacked four deep through a convolution, with noise in the actor and in the learner.
PIXELS = {
    "env.id": "fakes:OracleImage-v0",
    "env.stack": 4,
    "agent.network": "minatar",
    "agent.noisy_sigma": 0.5,
    "learner.minibatches_per_pull": 2,
    "learner.max_updates": 60,
}


class Content:
    """A judge that is content at the `at`-th look, and keeps the versions it was shown."""

    def __init__(self, at=0):
        self.at, self.versions = at, []

    def __call__(self, snapshot):
        self.versions.append(snapshot.version)
        return len(self.versions) == self.at


def train(workdir, config, judge=None):
    """Returns the bytes of losses.csv and of the last checkpoint's weights."""
    path = workdir / "metrics" / "losses.csv"
    with (
        MetricsWriter(workdir, "learner", tensorboard=False) as learner,
        MetricsWriter(workdir, "actor_0", tensorboard=False) as actor,
        lockstep.LossFile(path) as losses,
    ):
        lockstep.train(config, workdir, losses, learner, actor, threading.Event(), judge or Content())
    return path.read_bytes(), checkpoints.latest_weights(workdir)[1]


@pytest.mark.parametrize(
    "settings",
    [{}, {"seed": 0}, {"seed": -1}, PIXELS, {"learner.reuse": 1.5}],
    ids=["cartpole", "0", "-1", "pixels", "reuse"],
)
def test_the_same_run_twice_is_the_same_to_the_last_bit(tmp_path, settings):
    one = train(tmp_path / "one", make_config(**settings))
    assert train(tmp_path / "other", make_config(**settings)) == one
    lines = one[0].decode().splitlines()
    updates = make_config(**settings).learner.max_updates
    assert lines[0] == ",".join(["update", *dqn.METRICS])
    assert [line.split(",")[0] for line in lines[1:]] == [str(update) for update in range(1, updates + 1)]


def test_another_seed_makes_another_run(tmp_path):
    runs = [train(tmp_path / str(seed), make_config(seed=seed)) for seed in (0, 1, 2)]
    assert len({losses for losses, _ in runs}) == len({weights for _, weights in runs}) == 3


def test_no_clock_leaves_a_trace(tmp_path, monkeypatch):
    plain = train(tmp_path / "plain", make_config())
    pack_weights = codec.pack_weights

    def slow_pack_weights(*args):
        time.sleep(0.02)
        return pack_weights(*args)

    monkeypatch.setattr(codec, "pack_weights", slow_pack_weights)
    often = {"metrics.period_s": 0.001, "learner.checkpoint_period_s": 0.1, "learner.updates_per_s": 200.0}
    assert train(tmp_path / "slow", make_config(**often, **{"metrics.score_transfers": True})) == plain


def test_the_losses_are_float32_to_the_last_bit(tmp_path):
    figures = np.random.default_rng(0).standard_normal((3, len(dqn.METRICS))).astype(np.float32)
    figures[0, 0] = np.nan
    with lockstep.LossFile(tmp_path / "metrics" / "losses.csv") as losses:
        losses.write(5, figures)
    lines = (tmp_path / "metrics" / "losses.csv").read_text().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    assert [row[0] for row in rows] == ["5", "6", "7"]
    np.testing.assert_array_equal(np.array([row[1:] for row in rows], np.float32), figures)


def test_the_judge_sees_each_tenth_publication_and_ends_the_run(tmp_path):
    judge = Content(at=2)
    losses, _ = train(tmp_path, make_config(), judge)
    assert judge.versions == [1, 11]  # the second after ten periods of 20 updates
    assert len(losses.splitlines()) == 1 + 200


# ---- the link in lock-step


class OneRowActor:
    """An actor whose step inserts two transitions of one row."""

    def __init__(self, config):
        self.replay = make_replay(**config.replay)
        self.site = lockstep._Site()
        self.steps = 0
        self.replay.add_row(0, 0, np.zeros(2, np.float32))

    def step(self):
        self.steps += 1
        for _ in range(2):
            self.replay.add_transition(0, NStepTransition((0,), (0,), 0, 1.0, 0.9), 0, 1.0)


def make_link(stop=None, **replay):
    config = config_lib.default()
    config.replay.update(dict(capacity=100, min_size=6, samples_per_insert=2.0) | replay)
    actor = OneRowActor(config)
    link = lockstep.LockstepLink(config, SPEC, actor, stop or threading.Event(), Content())
    link.open(cache_rows=16, batch_size=4, minibatches=2, epoch=1)
    return link, actor


def test_the_actor_steps_just_as_often_as_the_ratio_asks():
    link, actor = make_link()
    steps = []
    for sequence in range(1, 5):
        batch = link.next_batch(0.0)
        assert batch.sequence == sequence and batch.slots.shape == (2, 4, 2)
        assert len(batch.new_slots) == (sequence == 1)
        steps.append(actor.steps)
        assert link.next_batch(0.0) is None and actor.steps == steps[-1]  # until the Ack
        link.ack(sequence, np.ones((2, 4), np.float32))
    # 6 inserts take 3 steps; then 8 samples at 2 for each insert take 4 inserts, 2 steps.
    assert steps == [3, 5, 7, 9]


def test_without_a_ratio_the_actor_steps_once_for_each_batch():
    link, actor = make_link(samples_per_insert=0.0)
    steps = []
    for sequence in range(1, 4):
        link.next_batch(0.0)
        link.ack(sequence, np.ones((2, 4), np.float32))
        steps.append(actor.steps)
    assert steps == [3, 4, 5]


def test_an_ack_sets_priorities_but_none_that_is_not_finite():
    link, actor = make_link()
    link.next_batch(0.0)
    link.ack(1, np.full((2, 4), np.nan, np.float32))
    assert set(actor.replay._priorities[:6]) == {1.0}
    batch = link.next_batch(0.0)
    keys = link._in_flight.copy()
    link.ack(batch.sequence, np.full((2, 4), 1e12, np.float32))
    assert set(actor.replay._priorities[keys.astype(int)]) == {1e9}


def test_a_stop_ends_the_wait_for_a_batch():
    stop = threading.Event()
    link, _ = make_link(stop)
    stop.set()
    with pytest.raises(Stopped):
        link.next_batch(0.0)


# ---- the command


# Programs as a user's are: optimised, and compiled anew by each process; other tests do without (conftest.py).
AS_USED = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=REPO, env=AS_USED, capture_output=True, text=True, timeout=280
    )


def test_the_command_gives_the_same_files_twice_and_refuses_a_folder_in_use(tmp_path):
    for name in ("one", "other"):
        ended = run("launchers.local", SMOKE, "--deterministic", "--config.seed=0", f"--workdir={tmp_path / name}")
        assert ended.returncode == 0, ended.stderr
        assert "one actor instead of config.actor.num_actors (2)" in ended.stderr
        assert "finished: mean return" in ended.stdout
    for file in ("metrics/losses.csv", "checkpoints/200/weights.lhw", "best_weights.bin"):
        one, other = ((tmp_path / name / file).read_bytes() for name in ("one", "other"))
        assert one == other and len(one) > 1000
    ended = run("launchers.local", SMOKE, "--deterministic", f"--workdir={tmp_path / 'one'}")
    assert ended.returncode == 2
    assert "holds a run, and --deterministic begins anew" in ended.stderr.splitlines()[-1]


def refusal(link=None, replay="buffer", seconds=0.0, budget=0.0, **settings):
    config = config_lib.default()
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError) as caught:
        deterministic.prepare(config, replay, parse_link(link), seconds, budget)
    return str(caught.value)


def test_what_goes_by_a_clock_or_in_processes_is_refused_by_name():
    assert refusal(link="rtt_ms=50,rate_mbit=20") == "--deterministic: --link delays by a clock: leave it out"
    assert refusal(link="up_mbit=1").startswith("--deterministic: --link delays")
    assert refusal(budget=1e6).startswith("--deterministic: --link_budget")
    assert refusal(replay="learner").startswith("--deterministic: --replay=learner")
    assert "--config.learner.max_updates" in refusal(seconds=3.0)
    assert "config.env.vectorization is 'async'" in refusal(**{"env.vectorization": "async"})
    assert "config.actor.steps_per_s" in refusal(**{"actor.steps_per_s": 10.0})
    assert "config.link.weights_budget_bytes_per_s" in refusal(**{"link.weights_budget_bytes_per_s": 10.0})


def test_a_refusal_is_one_line_and_status_2():
    ended = run("launchers.local", SMOKE, "--deterministic", "--replay=learner")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    ended = run("launchers.local", SMOKE, "--deterministic", "--learner_python=python3")
    assert ended.returncode == 2 and "leave --learner_python out" in ended.stderr


def test_a_link_without_limits_is_no_link_and_the_actors_become_one():
    config = config_lib.default()
    deterministic.prepare(config, "buffer", parse_link("rtt_ms=0"), 0.0, 0.0)
    assert config.actor.num_actors == 1


# ---- the seeds of a site


SEEDS = (0, 1, -1)


def seeded_config(seed, **settings):
    return make_config(seed=seed, **{"agent.hidden": (4,), "actor.num_actors": 3} | settings)


def test_actions_environments_and_draws_have_streams_of_their_own_at_every_seed(tmp_path):
    actions, env_seeds = [], []
    for seed in SEEDS:
        for index in range(3):
            config = seeded_config(seed)
            made = [actor_lib.Actor(config, index, None, None, threading.Event()) for _ in range(2)]
            draws, again = (tuple(actor._rng.random(8)) for actor in made)
            assert draws == again
            actions.append(draws)
            seeds = [seed for group in made[0]._groups for seed in group.streams._seeds]
            env_seeds += seeds
            assert seeds == [streams.stream_seed(seed, 2 * index + i) for i in range(2)]
        stepped = lockstep.SteppedActor(seeded_config(seed), None, threading.Event(), tmp_path)
        actions.append(tuple(stepped.replay._rng.random(8)))
        probing = actor_lib.Actor(
            seeded_config(seed, **{"actor.probe_share": 0.1}), 0, None, None, threading.Event(), workdir=tmp_path
        )
        actions.append(tuple(probing._probe._rng.random(8)))
    assert len(set(actions)) == len(SEEDS) * 5
    assert len(set(env_seeds)) == len(SEEDS) * 3 * 2


def test_noise_is_apart_for_each_actor_at_every_seed():
    stacks, values = np.ones((2, 1, 2), np.float32), []
    config = seeded_config(1, **{"agent.noisy_sigma": 0.5})
    params = networks.init_params(networks.make_network(SPEC, config), SPEC, 1)
    payload = codec.pack_weights(networks.flatten_params(params), "float32")
    for seed in SEEDS:
        for index in range(3):
            policy = Policy(SPEC, seeded_config(seed, **{"agent.noisy_sigma": 0.5}), 2, noise_seed=index)
            policy.adopt(payload)  # the same weights for all: what differs is noise
            values += [policy.q_values(stacks).tobytes() for _ in range(2)]
    assert len(set(values)) == len(SEEDS) * 3 * 2


def test_every_stream_of_a_site_explores_in_a_measure_of_its_own_whatever_the_seed():
    for seed in SEEDS:
        epsilons = np.concatenate([Exploration(seeded_config(seed), index).epsilons(0) for index in range(3)])
        assert len(set(epsilons)) == 6 and (np.diff(epsilons) < 0).all()
