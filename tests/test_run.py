"""Whole runs of configs/smoke.py: all processes, real Reverb, the emulated link, and how each kind of end goes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("reverb")
pytest.importorskip("gymnasium")

REPO = Path(__file__).parent.parent
SMOKE = "--config=configs/smoke.py"
ENDLESS = "--config.learner.max_updates=100000000"
# For starting five processes that load TensorFlow or JAX, on two cores that others use too.
START_S = 180.0
STOP_S = 20.0


def start(*words: str, shell: bool = False) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", *words]
    if shell:
        argv = ["sh", "-c", " ".join(argv) + "; exit $?"]
    return subprocess.Popen(
        argv, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def wait_for(condition, what: str, within_s: float = START_S):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"never happened: {what}")


def figures(workdir: Path, role: str) -> dict[str, float]:
    try:
        lines = (workdir / "metrics" / f"{role}.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return json.loads(lines[-1]) if lines else {}


def processes_of(workdir: Path) -> dict[str, int]:
    """Returns the pids of the run's processes by module, as the kernel lists them."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if f"--workdir={workdir}" in words and "-m" in words:
            module, index = words[words.index("-m") + 1], [w for w in words if w.startswith("--actor_index=")]
            found[module + "".join(index)] = int(entry.name)
    return found


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture
def endless_run(tmp_path):
    """A run that has begun to learn, through a shell, as a signal to it would find it."""
    process = start("launchers.local", SMOKE, ENDLESS, f"--workdir={tmp_path}", shell=True)
    try:
        wait_for(lambda: figures(tmp_path, "learner").get("updates", 0) > 0 or process.poll() is not None, "learning")
        wait_for(lambda: figures(tmp_path, "evaluator") or process.poll() is not None, "an evaluation")
        yield process, tmp_path
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_whole_run_ends_by_itself_and_leaves_what_it_promises(tmp_path):
    process = start("launchers.local", SMOKE, "--link=rtt_ms=20,rate_mbit=50", f"--workdir={tmp_path}")
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out
    assert "was killed" not in out
    assert out.splitlines()[-1] == f"plot: {tmp_path}/plots/run.png"
    assert (tmp_path / "plots" / "run.png").read_bytes().startswith(b"\x89PNG")

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["learner"]["max_updates"] == 200
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == "finished" and summary["updates"] == 200
    assert summary["env_steps"] >= 200 and summary["samples"] >= 200 * 32
    assert summary["return_mean"] >= 1 and summary["link_bytes_per_sample"] > 0
    assert summary["rtt_s"] >= 0.02
    # The last weights that were published were evaluated, and the best ones were kept.
    assert figures(tmp_path, "evaluator")["weights_version"] == figures(tmp_path, "learner")["weights_version"]
    assert (tmp_path / "checkpoints" / "200").is_dir()
    assert not processes_of(tmp_path)

    ended = subprocess.run(
        [sys.executable, "-m", "launchers.evaluate", SMOKE, f"--checkpoint={tmp_path}"],
        cwd=REPO, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    score = json.loads(ended.stdout.splitlines()[-1])
    assert score["episodes"] == 2 and score["return_min"] <= score["return_mean"] <= score["return_max"]
    ended = subprocess.run(
        [sys.executable, "-m", "launchers.evaluate", SMOKE, f"--weights={tmp_path}/best_weights.bin"],
        cwd=REPO, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert json.loads(ended.stdout.splitlines()[-1])["return_mean"] == summary["return_best"]


def test_sigterm_to_the_shell_around_a_run_leaves_a_checkpoint_and_no_process(endless_run):
    process, workdir = endless_run
    running = processes_of(workdir)
    assert len(running) == 6, running
    # What each process has really loaded.
    assert "libtensorflow" in mapped_files(running["launchers.buffer"])
    assert "jaxlib" not in mapped_files(running["launchers.buffer"])
    learner_files = mapped_files(running["launchers.learner"])
    assert "jaxlib" in learner_files
    assert not any(library in learner_files for library in ("tensorflow", "reverb", "ale_py"))

    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=STOP_S)
    assert process.returncode in (143, -signal.SIGTERM)
    wait_for(lambda: not processes_of(workdir), "all processes are gone", STOP_S)
    assert [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    assert json.loads((workdir / "summary.json").read_text())["outcome"] == "interrupted"


def test_a_killed_actor_ends_the_run_by_name(endless_run):
    process, workdir = endless_run
    os.kill(processes_of(workdir)["launchers.actor--actor_index=1"], signal.SIGKILL)
    out, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 1
    assert "was killed" not in out
    assert out.splitlines()[-1].startswith("error: actor_1 ended with status 137")
    assert not processes_of(workdir)
    assert [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]


def test_a_target_that_is_not_reached_is_a_failure_that_says_so(tmp_path):
    words = (SMOKE, "--config.evaluation.target_return=1000.0", "--config.actor.num_actors=1")
    process = start("launchers.local", *words, f"--workdir={tmp_path}")
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 1
    assert out.splitlines()[-1].endswith("below config.evaluation.target_return (1000)")
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "target missed"


def test_parts_started_by_hand_with_credentials_do_what_local_does(tmp_path):
    subprocess.run([sys.executable, "-m", "launchers.certs", f"--out={tmp_path}/certs"], cwd=REPO, check=True)
    workdir = f"--workdir={tmp_path}"
    ours = {role: f"--credentials={tmp_path}/certs/{role}" for role in ("gateway", "learner", "actor")}
    buffer = start("launchers.buffer", SMOKE, workdir, "--port=0", ours["gateway"])
    others = []
    try:
        wait_for(lambda: (tmp_path / "gateway.json").exists() or buffer.poll() is not None, "the gateway listens")
        gateway = f"--gateway={json.loads((tmp_path / 'gateway.json').read_text())['address']}"
        learner = start("launchers.learner", SMOKE, workdir, gateway, ours["learner"])
        others = [
            start("launchers.actor", SMOKE, workdir, gateway, ours["actor"], f"--actor_index={i}") for i in range(2)
        ]
        learner_out, _ = learner.communicate(timeout=START_S)
        assert learner.returncode == 0, learner_out
        assert figures(tmp_path, "learner")["updates"] == 200
        for process in [*others, buffer]:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=STOP_S)
            assert process.returncode == 130, out
    finally:
        for process in [*others, buffer]:
            if process.poll() is None:
                process.kill()
                process.communicate()
