"""Rules of the commands: help, mistakes told in one line, and what each process may load."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launchers import command_line, emulated_link, threads
from launchers.progress import Progress, RunFigures, shown_figures
from longhaul import config as config_lib
from longhaul.errors import ConfigError
from longhaul.metrics import MetricsWriter

REPO = Path(__file__).parent.parent
ROLES = ("local", "buffer", "actor", "learner", "evaluate", "forward", "compare")
SMOKE = "--config=configs/smoke.py"


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


# ---- the command line


@pytest.mark.parametrize("role", ROLES)
def test_help_tells_the_command_and_its_flags_and_ends_well(role):
    ended = run("-m", f"launchers.{role}", "--helpshort")
    assert ended.returncode == 0 and ended.stderr == ""
    assert f"python -m launchers.{role} --config=" in ended.stdout
    for flag in ("--config:", "--workdir:"):
        assert flag in ended.stdout


@pytest.mark.parametrize("role", ROLES)
def test_every_command_names_the_field_that_is_out_of_bounds(role):
    ended = run("-m", f"launchers.{role}", SMOKE, "--config.replay.priority_exponent=2")
    assert ended.returncode == 2
    assert ended.stderr == "error: config.replay.priority_exponent is 2.0, and must be from 0 to 1\n"


@pytest.mark.parametrize(
    "words, reason",
    [
        ([], "--config is missing"),
        (["--config=configs/none.py"], "--config: there is no file configs/none.py"),
        ([SMOKE, "--confg=3"], "Unknown command line flag 'confg'"),
        ([SMOKE, "--config.learner.batchsize=3"], "batchsize"),
        ([SMOKE, "--config.learner.batch_size=three"], "--config.learner.batch_size=three"),
        ([SMOKE, "batch_size=3"], "the command line's word 'batch_size=3' means nothing"),
        ([SMOKE, "--link=rtt=50"], "--link=rtt=50: 'rtt=50' can't be read"),
        ([SMOKE, "--workdir=/proc/none"], "--workdir=/proc/none can't be used"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(words, reason):
    ended = run("-m", "launchers.local", *words)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and reason in lines[0]


def test_a_mistake_inside_the_users_file_is_told_with_its_kind(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def get_config():\n    return undefined_name\n")
    ended = run("-m", "launchers.local", f"--config={path}")
    assert ended.returncode == 2
    assert ended.stderr == "error: --config: NameError: name 'undefined_name' is not defined\n"


@pytest.mark.parametrize(
    "role, words, reason",
    [
        ("actor", ["--actor_index=2"], "--actor_index is 2, and must be below config.actor.num_actors (2)"),
        ("actor", ["--gateway=nowhere"], "--gateway is 'nowhere', and must be HOST:PORT"),
        ("learner", ["--gateway=host:port"], "--gateway is 'host:port', and must be HOST:PORT"),
        ("learner", ["--gateway=site.example.org:7720"], "--gateway is site.example.org, beyond the loopback"),
        ("buffer", ["--host=0.0.0.0"], "--host is 0.0.0.0, beyond the loopback, and there is no TLS"),
        ("learner", ["--credentials=/none"], "--credentials: /none/learner.token can't be read"),
        ("evaluate", [], "give one of --checkpoint, --weights and --gateway, not none of them"),
        ("evaluate", ["--weights=a", "--checkpoint=b"], "not --checkpoint and --weights"),
        ("evaluate", ["--weights=a", "--watch"], "--watch follows a running site, so it needs --gateway"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(role, words, reason):
    ended = run("-m", f"launchers.{role}", SMOKE, *words)
    assert ended.returncode == 2
    assert reason in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_certificates_are_made_by_one_command_and_its_mistakes_are_named(tmp_path):
    assert "--gateway_names" in run("-m", "launchers.certs", "--helpshort").stdout
    ended = run("-m", "launchers.certs", f"--out={tmp_path}/certs", "--gateway_names=a/b")
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: --gateway_names: 'a/b' is neither a host name nor an address\n",
    )
    ended = run("-m", "launchers.certs", f"--out={tmp_path}/certs")
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in (tmp_path / "certs").iterdir() if path.is_dir()} == {
        "gateway",
        "learner",
        "actor",
        "reader",
    }


def test_overrides_are_handed_on_as_they_were_written():
    argv = [
        "local",
        SMOKE,
        "--workdir=w",
        "--config.seed=3",
        "--config.env.id",
        "A:B-v0",
        "--noconfig.agent.double",
        "--link=x",
    ]
    assert command_line.config_arguments(argv) == [
        SMOKE,
        "--config.seed=3",
        "--config.env.id",
        "A:B-v0",
        "--noconfig.agent.double",
    ]


def test_the_written_configuration_is_strict_json(tmp_path):
    config = config_lib.default()
    command_line.write_config(config, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert written["evaluation"]["target_return"] == "inf"
    assert written["agent"]["hidden"] == [256, 256]


@pytest.mark.parametrize(
    "text, rtt_s, rate",
    [("rtt_ms=50,rate_mbit=20", 0.05, 2.5e6), ("rtt_ms=200", 0.2, 0.0), ("rate_mbit=1", 0.0, 125_000.0)],
)
def test_a_link_is_read_in_its_units(text, rtt_s, rate):
    assert emulated_link.parse_link(text) == emulated_link.EmulatedLink(rtt_s=rtt_s, rate_bytes_per_s=rate)


@pytest.mark.parametrize(
    "text", ["rtt_ms", "rtt_ms=fast", "rtt_ms=-1", "rate_mbit=inf", "rate_mbit=nan", "loss=0.1", "50"]
)
def test_a_link_that_can_not_be_read_is_refused(text):
    with pytest.raises(ConfigError, match="--link="):
        emulated_link.parse_link(text)


def test_a_link_may_have_another_rate_up_and_an_outage():
    link = emulated_link.parse_link("rtt_ms=10,rate_mbit=8,up_mbit=16,outage_at_s=30,outage_s=5")
    assert link == emulated_link.EmulatedLink(0.01, 1e6, 2e6, 30.0, 5.0)


class Held:
    """A relay as the plan sees it: what was asked of it."""

    def __init__(self):
        self.asked = []

    def hold(self):
        self.asked.append("hold")

    def release(self):
        self.asked.append("release")


@pytest.mark.parametrize("at_s, begins_s", [(30.0, 30.0), (None, 45.0)])
def test_the_outage_comes_once_at_its_time_or_in_the_middle(at_s, begins_s):
    relay = Held()
    link = emulated_link.EmulatedLink(0.01, 0.0, outage_at_s=at_s, outage_s=10.0)
    plan = emulated_link.OutagePlan(link, relay, run_s=100.0)
    asked = []
    for elapsed_s in range(100):
        plan.follow(float(elapsed_s))
        asked.append(len(relay.asked))
    assert relay.asked == ["hold", "release"]
    assert (asked.index(1), asked.index(2)) == (begins_s, begins_s + 10)


def test_no_link_is_plain_loopback():
    assert emulated_link.parse_link(None) is None
    with emulated_link.reach(("127.0.0.1", 7720), None) as (address, _):
        assert address == "127.0.0.1:7720"


# ---- what processes load and use


def loaded_by(statements: str) -> set[str]:
    ended = run("-c", f"{statements}; import sys; print(*(n for n, m in sys.modules.items() if m))")
    assert ended.returncode == 0, ended.stderr
    return {name.split(".")[0] for name in ended.stdout.split()}


def test_the_learner_loads_neither_tensorflow_nor_reverb_nor_gymnasium():
    loaded = loaded_by("import launchers.learner, longhaul.learner, longhaul.link, longhaul.checkpoints")
    assert {"jax", "flax", "optax", "grpc"} <= loaded
    assert not {"tensorflow", "reverb", "gymnasium", "ale_py", "cv2"} & loaded


def test_actors_load_neither_tensorflow_nor_reverb():
    pytest.importorskip("gymnasium")
    loaded = loaded_by("import launchers.actor, longhaul.actor")
    assert {"jax", "flax", "gymnasium", "grpc"} <= loaded
    assert not {"tensorflow", "reverb", "optax"} & loaded


def test_the_buffer_node_does_not_load_jax():
    pytest.importorskip("reverb")
    loaded = loaded_by("import launchers.buffer; launchers.buffer.keep_jax_out(); import longhaul.gateway")
    assert {"reverb", "tensorflow", "grpc"} <= loaded
    assert not {"jax", "jaxlib", "flax", "optax", "gymnasium"} & loaded


def test_actors_and_evaluation_keep_off_the_accelerator_and_to_one_thread(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for role in ("actor", "evaluate"):
        env = threads.environment(role)
        assert env["JAX_PLATFORMS"] == "cpu" and env["OMP_NUM_THREADS"] == "1"
    assert "JAX_PLATFORMS" not in threads.environment("learner")


def test_a_thread_count_that_the_user_sets_is_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in threads.environment("actor")


# ---- installation


def installed(folder: Path, **versions: str) -> dict[str, str]:
    """Makes packages of these versions seem installed; returns the environment in which they do."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


def test_a_tensorflow_that_does_not_fit_reverb_is_named_with_the_one_that_does(tmp_path):
    env = installed(tmp_path, dm_reverb="0.14.0", tensorflow_cpu="2.17.0")
    ended = run("-m", "launchers.reverb_check", env=env)
    assert ended.returncode == 2
    assert "needs tensorflow-cpu 2.15.x, and TensorFlow 2.17.0 is installed" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_buffer_node_tells_the_same_before_it_loads_anything(tmp_path):
    env = installed(tmp_path, dm_reverb="0.14.0", tensorflow_cpu="2.17.0")
    ended = run("-m", "launchers.buffer", SMOKE, env=env)
    assert ended.returncode == 2 and "needs tensorflow-cpu 2.15.x" in ended.stderr


def test_the_full_environment_passes_its_own_check():
    pytest.importorskip("reverb")
    ended = run("-m", "launchers.reverb_check")
    assert (ended.returncode, ended.stderr) == (0, "")


def build_env(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "requirements/build_env.sh", python, str(folder), "requirements/learner.lock", "-c", "pass"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_python_is_told_in_one_line_with_what_to_install(tmp_path):
    ended = build_env("python3.11-that-is-not-there", tmp_path / "env")
    assert ended.returncode == 1 and not (tmp_path / "env").exists()
    assert len(ended.stderr.splitlines()) == 1 and "install Python 3.11" in ended.stderr


def test_a_wrong_python_is_told_with_its_version(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.13.1\n[ "$1" = -V ]\n')
    python.chmod(0o755)
    ended = build_env(str(python), tmp_path / "env")
    assert ended.returncode == 1
    assert "Python 3.13.1" in ended.stderr and "install 3.11" in ended.stderr


# ---- progress and plots


def write_run(workdir: Path) -> None:
    for i, steps in enumerate((100, 150)):
        with MetricsWriter(workdir, f"actor_{i}", tensorboard=False) as writer:
            writer.write(steps, {"env_steps": steps, "episode_return": 10.0 * (i + 1)})
    with MetricsWriter(workdir, "learner", tensorboard=False) as writer:
        for updates in (10, 20):
            writer.write(updates, {"updates": updates, "loss": 1.0 / updates, "rtt_s": 0.05, "window": 3})
        writer.write(20, {"link_received_bytes": 4000, "link_samples": 100, "link_received_bytes_per_s": 123456.0})
    with MetricsWriter(workdir, "evaluator", tensorboard=False) as writer:
        for version, score in ((1, 60.0), (2, 40.0)):
            writer.write(version, {"return_mean": score, "return_min": 1.0, "return_max": 99.0})


def test_figures_are_the_newest_of_each_role_and_sums_over_actors(tmp_path):
    write_run(tmp_path)
    figures = RunFigures(tmp_path, 2, since_s=0.0)
    figures.update()
    assert (figures.updates, figures.env_steps) == (20, 250)
    assert figures.explored_return == 15.0
    assert (figures.evaluated_return, figures.best_return, figures.evaluations) == (40.0, 60.0, 2)
    assert figures.bytes_per_sample == 40.0


def test_figures_of_an_earlier_run_in_the_same_folder_do_not_count(tmp_path):
    write_run(tmp_path)
    figures = RunFigures(tmp_path, 2, since_s=time.time() + 1)
    figures.update()
    assert figures.evaluated_return is None and figures.env_steps == 0


def test_a_best_return_below_zero_is_kept(tmp_path):
    with MetricsWriter(tmp_path, "evaluator", tensorboard=False) as writer:
        for score in (-20.0, -5.0, 0.0, -7.0):
            writer.write(1, {"return_mean": score})
    figures = RunFigures(tmp_path, 0, since_s=0.0)
    figures.update()
    assert figures.best_return == 0.0


def test_progress_without_a_terminal_is_a_plain_line_now_and_then(tmp_path, capsys):
    write_run(tmp_path)
    figures = RunFigures(tmp_path, 2, since_s=0.0)
    with Progress("run") as progress:
        progress.show(figures, 1.0)
        figures.update()
        progress.show(figures, 2.0)
    assert capsys.readouterr().out == "time 0:01  starting processes load their libraries\n"
    assert shown_figures(figures, 61.0) == {
        "time": "1:01",
        "updates": "20",
        "env steps": "250",
        "return (greedy)": "40",
        "return (actors)": "15",
        "loss": "0.05",
        "samples/s": "-",
        "link": "123 kB/s",
        "window": "3",
        "RTT": "50 ms",
    }


def test_a_plot_is_drawn_from_a_whole_run_and_from_one_without_figures(tmp_path):
    from launchers.plots import plot_run

    write_run(tmp_path / "whole")
    for workdir in (tmp_path / "whole", tmp_path / "empty"):
        path = plot_run(workdir, "cartpole", 2, 475.0)
        assert path == workdir / "plots" / "run.png"
        assert path.read_bytes().startswith(b"\x89PNG")
