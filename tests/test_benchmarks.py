"""The benchmarks run to their end and print one JSON object last: what they measure changes under them otherwise."""

import json
import subprocess
import sys

import pytest


def last_line(*words):
    """Runs a benchmark; returns the object on its last line."""
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_learners_loop_is_measured_without_a_site():
    figures = last_line("benchmarks.learner", "--rtts_ms=", "--rounds=1", "--seconds=0.5", "--minibatches=2")
    assert figures["step"]["updates_per_s"] > 0 and figures["memory"]["updates_per_s"] > 0


def test_the_learner_is_measured_over_a_link():
    pytest.importorskip("reverb")
    figures = last_line("benchmarks.learner", "--rtts_ms=5", "--rounds=1", "--seconds=1", "--apart")
    link = figures["link_5ms"]
    assert link["updates_per_s"] > 0 and link["of_step"] > 0
    assert 0 < link["compute"] < 1.5 and link["decode"] > 0


def test_a_peer_of_the_learner_that_cannot_be_run_is_refused(tmp_path):
    words = [sys.executable, "-m", "benchmarks.learner", "--rtts_ms=", f"--peer={tmp_path}/python"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and done.stderr.startswith(f"--peer={tmp_path}/python: ")
    assert done.stderr.count("\n") == 1 and "how it is installed" in done.stderr


def test_an_actor_is_measured_against_bare_environments():
    pytest.importorskip("reverb")
    figures = last_line("benchmarks.actor", "--tasks=cartpole", "--rounds=1", "--seconds=1")["cartpole"]
    assert figures["actor_steps_per_s"] > 0 and figures["bare_steps_per_s"] > 0 and figures["dropped"] == 0


def test_the_link_is_measured_against_reverbs_client():
    pytest.importorskip("reverb")
    pytest.importorskip("ale_py")
    words = ("--rtt_ms=5", "--seconds=1", "--warmup_s=3", "--try_s=0.5", "--transitions=2000")
    figures = last_line("benchmarks.link", "run", *words)
    for client in ("longhaul", "reverb"):
        assert figures[client]["samples_per_s"] > 0 and figures[client]["bytes_per_sample"] > 0
    assert figures["longhaul"]["priority_age_s"]["median"] > 0
