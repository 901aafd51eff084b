"""Rules of processes: how one ends, and that a supervisor leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from longhaul.errors import ConfigError, Outage, Stopped, WorkerFailed
from longhaul.workers import REASON_PREFIX, Supervisor, last_line

REPO = Path(__file__).parent.parent
DEADLINE_S = 20.0

WORKER = """
import sys, time
from longhaul.errors import *
from longhaul.workers import run_worker

def work(signals):
    {body}

sys.exit(run_worker(work, grace_s={grace}))
"""
WAITS = 'print("ready", flush=True); signals.stop.wait(60); print("stopped in order", flush=True)'
IGNORES_STOP = 'print("ready", flush=True); time.sleep(60)'


def worker_argv(body: str, grace: str = "15.0") -> list[str]:
    return [sys.executable, "-c", WORKER.format(body=body, grace=grace)]


def run_to_end(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(worker_argv(body), cwd=REPO, capture_output=True, text=True, timeout=DEADLINE_S)


def started(body: str, grace: str = "15.0", argv: list[str] | None = None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        argv or worker_argv(body, grace), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    return process


def wait_for(condition, what: str):
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"never happened: {what}")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "body, status",
    [
        ("return None", 0),
        ("return 3", 3),
        ('raise ConfigError("config.replay.capacity is 0")', ConfigError.exit_status),
        ('raise MismatchError("gamma: 0.9 != 0.99")', 2),
        ('raise Outage("site:7720 does not answer")', Outage.exit_status),
        ('raise Stopped("")', 0),
        ('raise KeyError("x")', 1),
    ],
)
def test_the_kind_of_error_decides_the_exit_status(body, status):
    assert run_to_end(body).returncode == status


def test_an_error_made_for_the_user_is_one_line_without_a_traceback():
    ended = run_to_end('raise ConfigError("config.env.stack is 0,\\n and must be from 1 to 32")')
    assert ended.stderr == "error: config.env.stack is 0, and must be from 1 to 32\n"


def test_an_unexpected_error_shows_its_traceback_and_then_the_reason():
    ended = run_to_end('raise KeyError("x")')
    assert "Traceback" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: KeyError: 'x'"


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_in_order_and_is_told_by_the_status(signum, status):
    process = started(WAITS)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == "stopped in order\n"
    assert process.returncode == status


def test_an_error_while_stopping_is_still_a_failure():
    process = started(WAITS + '; raise Outage("could not write")')
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and err == "error: could not write\n"


def test_a_worker_that_does_not_stop_ends_itself_and_shows_where_it_hung():
    process = started(IGNORES_STOP, grace="0.5")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "in work" in err


def test_a_thread_that_never_ends_does_not_keep_a_finished_process():
    body = 'import threading; threading.Thread(target=time.sleep, args=(60,)).start(); print("ready", flush=True)'
    process = started(body, grace="0.5")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1


def test_ending_a_process_waits_for_no_thread_and_loses_no_output():
    body = 'import threading; threading.Thread(target=time.sleep, args=(60,)).start(); print("written"); end_process(3)'
    ended = subprocess.run(
        [sys.executable, "-c", f"import time; from longhaul.workers import end_process; {body}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (ended.returncode, ended.stdout) == (3, "written\n")


def test_the_same_request_arriving_twice_does_not_hurry():
    process = started(
        'print("ready", flush=True); signals.stop.wait(60); time.sleep(0.2); return 7 + signals.hurry.is_set()'
    )
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 7


def test_a_second_signal_hurries():
    process = started(
        'print("ready", flush=True); signals.stop.wait(60); print("first", flush=True); '
        "return 7 + signals.hurry.wait(60)"
    )
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "first\n"
    time.sleep(0.6)  # apart from the first one, SAME_REQUEST_S
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 8


def test_output_of_children_goes_to_their_logs(tmp_path):
    with Supervisor(tmp_path) as children:
        children.start("buffer", worker_argv('print("out"); print("err", file=sys.stderr)'), may_finish=True)
        wait_for(lambda: children.status("buffer") is not None, "buffer ends")
    assert sorted((tmp_path / "buffer.log").read_text().split()) == ["err", "out"]


def test_a_failed_child_is_named_with_its_status_and_reason(tmp_path):
    body = 'raise Outage("gateway 10.0.0.1:7720 does not answer")'
    with Supervisor(tmp_path) as children:
        children.start("learner", worker_argv(body), may_finish=True)
        wait_for(lambda: children.status("learner") is not None, "learner ends")
        with pytest.raises(
            WorkerFailed,
            match=r"^learner ended with status 1: gateway 10\.0\.0\.1:7720 does not answer \(log: .*learner",
        ):
            children.check()


def test_a_killed_child_is_a_failure_with_the_signal_in_its_status(tmp_path):
    with Supervisor(tmp_path) as children:
        children.start("actor_0", worker_argv(WAITS), may_finish=True)
        children.check()
        os.kill(children.pids()["actor_0"], signal.SIGKILL)
        wait_for(lambda: children.status("actor_0") is not None, "actor_0 ends")
        with pytest.raises(WorkerFailed, match="actor_0 ended with status 137"):
            children.check()


def test_ending_well_is_a_failure_unless_the_child_may_finish(tmp_path):
    with Supervisor(tmp_path) as children:
        children.start("learner", worker_argv("return 0"), may_finish=True)
        children.start("actor_0", worker_argv("return 0"))
        wait_for(lambda: children.status("learner") == 0 and children.status("actor_0") == 0, "both end")
        with pytest.raises(WorkerFailed, match="actor_0 ended with status 0: it wrote nothing"):
            children.check()


def test_a_command_that_is_not_there_is_named(tmp_path):
    with (
        Supervisor(tmp_path) as children,
        pytest.raises(WorkerFailed, match="learner could not be started: /no/python"),
    ):
        children.start("learner", ["/no/python"])


def test_stop_is_orderly_where_children_heed_it_and_forced_where_not(tmp_path):
    children = Supervisor(tmp_path, grace_s=2.0)
    children.start("good", worker_argv(WAITS))
    children.start(
        "deaf",
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
        ],
    )
    for name in ("good", "deaf"):
        wait_for(lambda name=name: "ready" in (tmp_path / f"{name}.log").read_text(), f"{name} ready")
    pids = children.pids()
    assert children.stop() == ["deaf"]
    assert "stopped in order" in (tmp_path / "good.log").read_text()
    assert not any(is_alive(pid) for pid in pids.values())


def test_a_child_that_others_depend_on_is_stopped_after_them(tmp_path):
    children = Supervisor(tmp_path)
    note = 'print("ready", flush=True); signals.stop.wait(60); print(time.time())'
    children.start("buffer", worker_argv(note), outlives_others=True)
    children.start("actor_0", worker_argv(note.replace("; print(time", "; time.sleep(0.3); print(time")))
    for name in ("buffer", "actor_0"):
        wait_for(lambda name=name: "ready" in (tmp_path / f"{name}.log").read_text(), f"{name} ready")
    assert children.stop() == []
    ended = {name: float((tmp_path / f"{name}.log").read_text().split()[1]) for name in ("buffer", "actor_0")}
    assert ended["buffer"] > ended["actor_0"]


def test_hurry_skips_the_grace(tmp_path):
    hurry = threading.Event()
    children = Supervisor(tmp_path, grace_s=600.0, hurry=hurry)
    children.start(
        "deaf",
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)",
        ],
    )
    wait_for(lambda: "ready" in (tmp_path / "deaf.log").read_text(), "ready")
    hurry.set()
    assert children.stop() == ["deaf"]


def test_what_a_child_has_started_is_gone_with_it_even_if_it_was_killed(tmp_path):
    body = (
        'import subprocess; p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]); '
        "print(p.pid, flush=True); signals.stop.wait(60)"
    )
    children = Supervisor(tmp_path)
    children.start("actor_0", worker_argv(body))
    grandchild = int(wait_for(lambda: (tmp_path / "actor_0.log").read_text(), "grandchild starts"))
    os.kill(children.pids()["actor_0"], signal.SIGKILL)
    wait_for(lambda: children.status("actor_0") is not None, "actor_0 ends")
    assert is_alive(grandchild)
    children.stop()
    wait_for(lambda: not is_alive(grandchild), "grandchild ends")


SUPERVISING = """
import sys, threading, time
from pathlib import Path
from longhaul.workers import Supervisor, run_worker

def work(signals):
    with Supervisor(Path({logs!r}), hurry=signals.hurry) as children:
        for name in ("one", "two"):
            children.start(name, {argv!r})
        while not all("ready" in (Path({logs!r}) / (name + ".log")).read_text() for name in ("one", "two")):
            time.sleep(0.02)
        print(*children.pids().values(), flush=True)
        while not signals.stop.wait(0.05):
            children.check()

sys.exit(run_worker(work))
"""


def start_supervising(tmp_path, *prefix: str) -> tuple[subprocess.Popen[str], list[int]]:
    script = SUPERVISING.format(logs=str(tmp_path), argv=worker_argv(WAITS))
    (tmp_path / "supervising.py").write_text(script)
    argv = [*prefix, sys.executable, str(tmp_path / "supervising.py")]
    if prefix:
        argv = [*prefix, f"{sys.executable} {tmp_path / 'supervising.py'}; exit $?"]
    process = subprocess.Popen(
        argv,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_children_stop_in_order_when_their_supervisor_is_killed(tmp_path):
    process, pids = start_supervising(tmp_path)
    assert len(pids) == 2
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "children end")
    assert all("stopped in order" in (tmp_path / f"{name}.log").read_text() for name in ("one", "two"))


@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_group_of_a_shell_leaves_nothing_behind(tmp_path, signum, status):
    process, pids = start_supervising(tmp_path, "sh", "-c")
    os.killpg(process.pid, signum)
    process.communicate(timeout=DEADLINE_S)
    wait_for(lambda: not any(is_alive(pid) for pid in pids), "children end")
    assert all("stopped in order" in (tmp_path / f"{name}.log").read_text() for name in ("one", "two"))


def test_the_last_line_of_a_log_is_the_reason_where_there_is_one(tmp_path):
    log = tmp_path / "x.log"
    assert last_line(log) == "it wrote nothing"
    log.write_text("first\n\n  second  \n\n")
    assert last_line(log) == "second"
    log.write_text(f"first\n{REASON_PREFIX}the disk is full\n[reverb/cc/server.cc:1] Shutting down\n")
    assert last_line(log) == "the disk is full"


def test_stopped_is_not_an_outage():
    assert not issubclass(Stopped, Outage) and not issubclass(Outage, Stopped)
