"""Scores: figures worked by hand from made-up files, what ends and what is reused, the peer's part, a run of all."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import curves, peer_sb3, scores
from benchmarks.curves import Curve, Point
from benchmarks.scores import Run
from longhaul.errors import ConfigError
from longhaul.metrics import jsonl_path

REPO = Path(__file__).parent.parent
PEER = REPO / "build" / "peer" / "bin" / "python"


def write_lines(workdir, role, lines):
    path = jsonl_path(workdir, role)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def curve(*evaluations, episodes=20):
    """A run of (environment steps, return): 10 updates and 1 s for every 100 steps, an evaluation of 0.5 s."""
    return Curve(2.0, [Point(s, s / 10, r, episodes, s / 100, s / 100 + 0.5) for s, r in evaluations])


# ---- one run


def test_an_evaluation_counts_where_its_weights_were_taken_up(tmp_path):
    # Taken up at 110 s and 120 s. Actors make 10 and 30 steps/s from 105 s on; updates are 5 a second from 110 s on.
    write_lines(tmp_path, "actor_0", [{"time_s": 105, "env_steps": 0}, {"time_s": 125, "env_steps": 200}])
    write_lines(tmp_path, "actor_1", [{"time_s": 105, "env_steps": 0}, {"time_s": 125, "env_steps": 600}])
    write_lines(tmp_path, "learner", [{"time_s": 110, "updates": 0}, {"time_s": 130, "updates": 100}])
    lines = [
        {"time_s": 112, "evaluation_s": 2.0, "return_mean": 10.0, "episodes": 20},
        {"time_s": 121, "evaluation_s": 1.0, "return_mean": 30.0, "episodes": 20},
    ]
    write_lines(tmp_path, "evaluator", lines)
    found = curves.read_run(tmp_path, 2, 100.0, 111.0)
    assert found.first_update_s == 11.0
    assert found.points == [Point(200.0, 0.0, 10.0, 20, 10.0, 12.0), Point(600.0, 50.0, 30.0, 20, 20.0, 21.0)]


def test_before_an_actors_first_line_it_has_made_no_steps(tmp_path):
    write_lines(tmp_path, "actor_0", [{"time_s": 105, "env_steps": 50}])
    write_lines(tmp_path, "evaluator", [{"time_s": 104, "evaluation_s": 1.0, "return_mean": 1.0, "episodes": 20}])
    found = curves.read_run(tmp_path, 1, 100.0, None)
    assert found.points[0].env_steps == 0.0 and math.isnan(found.first_update_s)


def test_the_peers_seconds_leave_its_evaluations_out_and_keep_both(tmp_path):
    first = {"env_steps": 0, "updates": 0, "return_mean": 9.0, "episodes": 20, "train_s": 3.0, "wall_s": 4.0}
    second = {"env_steps": 1000, "updates": 500, "return_mean": 20.0, "episodes": 20, "train_s": 5.0, "wall_s": 7.5}
    write_lines(tmp_path, "evaluator", [first | {"first_update_s": None}, second | {"first_update_s": 3.5}])
    found = curves.read_peer(tmp_path)
    assert found.first_update_s == 3.5
    assert found.points == [Point(0, 0, 9.0, 20, 3.0, 4.0), Point(1000, 500, 20.0, 20, 5.0, 7.5)]


def test_a_curve_comes_back_from_its_json():
    whole = curve((100, 1.0), (200, 2.0))
    assert curves.curve_of(json.loads(json.dumps(whole.plain()))) == whole
    assert math.isnan(curves.curve_of(Curve(math.nan, []).plain()).first_update_s)


@pytest.mark.parametrize("steps, expected", [(100, 10.0), (150, 20.0), (275, 37.5), (300, 40.0)])
def test_a_return_lies_on_the_line_between_evaluations(steps, expected):
    assert curves.return_at(curve((100, 10.0), (200, 30.0), (300, 40.0)), steps) == expected


@pytest.mark.parametrize("steps", [99, 301])
def test_there_is_no_return_where_nothing_was_evaluated_on_one_side(steps):
    assert math.isnan(curves.return_at(curve((100, 10.0), (300, 40.0)), steps))
    assert math.isnan(curves.return_at(Curve(1.0, []), steps))


def test_the_target_is_reached_by_the_first_evaluation_no_less_than_it():
    run = curve((100, 10.0), (200, 475.0), (300, 100.0), (400, 500.0))
    assert curves.reaching(run, 475.0) == run.points[1]
    assert curves.reaching(run, 475.1) == run.points[3]
    assert curves.reaching(run, 501.0) is None


def test_an_evaluation_of_few_episodes_does_not_show_the_target():
    assert curves.reaching(curve((100, 500.0), episodes=19), 475.0) is None


def test_a_run_is_over_when_it_is_past_the_steps_and_has_reached_the_target():
    run = curve((100, 10.0), (200, 480.0))
    assert curves.is_over(run, 200, 475.0) and curves.is_over(run, 0, 475.0) and curves.is_over(run, 200, None)
    assert not curves.is_over(run, 201, 475.0) and not curves.is_over(run, 200, 490.0)
    assert not curves.is_over(run, 0, None)  # nothing is asked of it, so it goes on to its own end
    assert not curves.is_over(Curve(1.0, []), 0, 475.0)


# ---- over seeds


def test_a_seed_that_never_reaches_the_target_is_left_out_and_said():
    runs = [curve((100, 10.0), (200, 480.0)), curve((100, 10.0), (400, 480.0)), curve((100, 10.0), (400, 20.0))]
    found = curves.rows(runs, [150], 475.0)
    assert found["environment steps to 475"][:2] == [200, 400] and math.isnan(found["environment steps to 475"][2])
    assert found["updates to 475"][:2] == [20, 40]
    assert found["s to 475, trained"][:2] == [2.0, 4.0]
    assert found["s to 475, trained, from the first update"][:2] == [0.0, 2.0]
    assert found["s to 475, shown"][:2] == [2.5, 4.5]
    # Mean 300 of two seeds, standard deviation 141.4, Student's 12.706 / sqrt(2) at 1 degree of freedom: 1270.6.
    figures = curves.statistics(found)["environment steps to 475"]
    assert figures["mean"] == 300.0 and figures["half"] == pytest.approx(1270.6, abs=0.1)
    assert figures["seeds"] == [200.0, 400.0, None]
    line = next(text for text in curves.table({"longhaul": found}) if text.startswith("updates to 475"))
    assert line.endswith("2 of 3 seeds)")


def test_both_sides_stand_in_one_table_and_no_seed_is_no_number():
    ours = curves.rows([curve((100, 10.0), (200, 30.0))], [150], 475.0)
    peers = curves.rows([curve((100, 20.0), (200, 40.0))], [150], 475.0)
    lines = curves.table({"longhaul": ours, "peer": peers})
    assert lines[0].split() == ["longhaul", "peer"]
    by_name = {line.split("  ")[0]: line for line in lines[1:]}
    assert "20 (one seed" in by_name["return at 150 steps"] and "30 (one seed" in by_name["return at 150 steps"]
    assert by_name["updates to 475"].count("- (0 of 1 seeds)") == 2
    assert json.dumps(curves.statistics(ours), allow_nan=False)


# ---- runs


@pytest.fixture
def ended(tmp_path):
    """A run that has ended, with its figures."""
    run = Run(tmp_path / "longhaul-seed1", "longhaul", 1, 1, 100, 475.0, (sys.executable, "-c", "raise SystemExit(9)"))
    run.folder.mkdir()
    summary = {"figures": curve((100, 480.0)).plain(), "plan": run.plan()}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    return run


def test_a_run_that_has_ended_is_not_made_again(ended):
    assert scores.make(ended, None) == curve((100, 480.0))


def test_a_run_of_other_settings_is_not_taken_for_this_one(ended):
    other = Run(**{**ended.__dict__, "target": 400.0})
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(target\)"):
        scores.make(other, None)


# ---- mistakes


@pytest.mark.parametrize("word", ["20k", "0", "-5", "1.5", ""])
def test_steps_that_are_none_are_refused(word):
    with pytest.raises(ConfigError, match="--at_steps: "):
        scores.parse_steps(["100", word])


def test_steps_are_put_in_order():
    assert scores.parse_steps(["300", "100"]) == [100, 300]


def test_a_peer_that_cannot_be_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--peer=.* is no interpreter"):
        scores.check_peer(str(tmp_path / "python"), "CartPole-v1")
    with pytest.raises(ConfigError, match=r"no hyperparameters for config\.env\.id='Pendulum-v1'"):
        scores.check_peer(sys.executable, "Pendulum-v1")


@pytest.mark.parametrize(
    "words, said",
    [
        (["--seads=3"], "Unknown command line flag 'seads'"),
        (["--at_steps=20k"], "--at_steps: '20k' must be a whole number above 0"),
        (["--target=475"], "config.evaluation.episodes is 2, and must be at least 20"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words, said, tmp_path):
    command = [sys.executable, "-m", "benchmarks.scores", "--config=configs/smoke.py", f"--workdir={tmp_path}", *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert said in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr


# ---- the peer


class Countdown:
    """An environment that gives a reward of 1 a step for `seed` steps, and 5 a step to action 1."""

    def __init__(self):
        self.closed = False

    def reset(self, *, seed):
        self._left = seed
        return np.array([seed], np.float32), {}

    def step(self, action):
        self._left -= 1
        return np.array([self._left], np.float32), 5.0 if action else 1.0, self._left == 0, False, {}

    def close(self):
        self.closed = True


def test_the_peers_episodes_keep_their_seeds_and_are_cut():
    # 40 episodes in 32 lanes, of 1 to 40 steps, cut at 35; the policy takes action 1 on even rows.
    def by_hand(length):
        return float(sum(5 if row % 2 == 0 else 1 for row in range(length, max(length - 35, 0), -1)))

    returns = peer_sb3.evaluate(lambda rows: (rows[:, 0] % 2 == 0).astype(int), Countdown, 40, 1, 35)
    assert returns == [by_hand(length) for length in range(1, 41)]


class Model:
    """Stands for a DQN that makes one update a step from step 3 on."""

    def __init__(self):
        self.num_timesteps = 0

    @property
    def _n_updates(self):
        return max(self.num_timesteps - 2, 0)

    def predict(self, rows, deterministic):
        assert deterministic
        return np.zeros(len(rows), int), None


def test_the_peer_evaluates_when_due_and_at_its_end(tmp_path, monkeypatch):
    task = peer_sb3.Task(steps=10, explore_steps=5, evaluate_every=4, settings={})
    monkeypatch.setitem(peer_sb3.TASKS, "made-up", task)
    monkeypatch.setattr(peer_sb3, "make_env", lambda task: Countdown())
    words = {"task": "made-up", "seconds": 0.0, "episodes": 2, "evaluation_seed": 3, "max_steps": 100}
    schedule = peer_sb3._Schedule(peer_sb3.argparse.Namespace(**words, workdir=str(tmp_path)), 10)
    model = Model()
    went_on = []
    for model.num_timesteps in range(11):
        went_on.append(schedule(model))
    assert went_on == [True] * 10 + [False]
    points = curves.read_peer(tmp_path).points
    assert [(p.env_steps, p.updates) for p in points] == [(0, 0), (4, 2), (8, 6), (10, 8)]
    assert {(p.return_mean, p.episodes) for p in points} == {(3.5, 2)}  # episodes of 3 and 4 steps
    assert all(p.trained_s <= p.shown_s for p in points)


@pytest.mark.skipif(not list(PEER.parent.parent.glob("lib/*/site-packages/stable_baselines3")), reason="no build/peer")
def test_the_peer_trains_and_times_its_update(tmp_path):
    def last_line(*words):
        command = [str(PEER), "-m", "benchmarks.peer_sb3", *words]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    assert last_line("--task=CartPole-v1", "--steps=1500", "--episodes=2", f"--workdir={tmp_path}")["updates"] > 0
    assert [point.env_steps for point in curves.read_peer(tmp_path).points] == [0, 1000, 1500]
    assert last_line("--updates_only", "--batch=32", "--time_s=0.5", "--threads=1")["updates_per_s"]["32"] > 0


# ---- all of it


def test_seeds_are_trained_measured_and_reused(tmp_path):
    pytest.importorskip("reverb")
    words = ["--config=configs/smoke.py", "--seeds=1", "--at_steps=300", f"--workdir={tmp_path}"]
    command = [sys.executable, "-m", "benchmarks.scores", *words]
    ended = []
    for _ in range(2):
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-2000:]
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        assert figures["task"] == "CartPole-v1"
        assert figures["longhaul"]["return of the last evaluation"]["seeds"][0] > 0
        ended.append(json.loads((tmp_path / "longhaul-seed1" / "summary.json").read_text())["ended_time_s"])
    assert ended[0] == ended[1]
