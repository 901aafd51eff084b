"""Processes of a run: how each one stops, what status it ends with, and how one process looks after others.

One stop event per process, set by SIGINT or SIGTERM, is what everything that waits looks at. A process asked to stop
has GRACE_S to do so in order, then it ends itself; the supervisor that started it kills what is left; and a process
whose supervisor has died stops in order as if asked to. So nothing outlives a run, whichever process dies first.

Exit statuses: 0 done; 1 failed, the reason on the last line; 2 a flag, field or space that can't be used;
130 or 143 stopped in order by SIGINT or SIGTERM.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from longhaul.errors import LonghaulError, Stopped, WorkerFailed

# From the request to stop to the kill. Twenty seconds are promised for a whole run; the rest is for the kill itself.
GRACE_S = 15.0
# `timeout` and some shells signal a process and then its whole group: the same request, arriving twice.
SAME_REQUEST_S = 0.5
# How long the children that others depend on are kept once the others were asked to stop.
OUTLIVE_S = 8.0

REASON_PREFIX = "error: "

_SUPERVISOR_VARIABLE = "LONGHAUL_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_LAST_LINE_BYTES = 65536


class StopSignals:
    """Turns SIGINT and SIGTERM into an event; a second one, not sent together with the first, hurries.

    Must be made on the main thread.

    Args:
      grace_s: a process that still runs this long after the first signal writes every thread's stack to stderr and
        ends with status 1. That also covers threads that hang while the interpreter shuts down. None: no limit.

    Attributes:
      stop: set by the first signal.
      hurry: set by the second one.
      signum: the first signal's number, or None.
    """

    def __init__(self, grace_s: float | None = GRACE_S):
        self.stop = threading.Event()
        self.hurry = threading.Event()
        self.signum: int | None = None
        self._first_s = 0.0
        self._grace_s = grace_s
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            self._first_s = time.monotonic()
            if self._grace_s is not None:
                end_at_latest_after(self._grace_s)
            self.stop.set()
        elif time.monotonic() - self._first_s > SAME_REQUEST_S:
            if self.hurry.is_set():  # a third one: end at once, as if there were no handler
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            self.hurry.set()
            if self._grace_s is not None:
                end_at_latest_after(1.0)


def end_at_latest_after(seconds: float) -> None:
    """Ends this process with status 1 after that time, with all stacks on stderr, whatever its threads then do."""
    # A thread of C, so it works even where the interpreter's lock is held or the main thread never comes back.
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def die_with_supervisor() -> None:
    """Has the kernel send SIGTERM to this process when the supervisor that started it dies; otherwise does nothing."""
    supervisor = os.environ.pop(_SUPERVISOR_VARIABLE, "")
    if not supervisor or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(supervisor):  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def run_worker(work: Callable[[StopSignals], int | None], grace_s: float | None = GRACE_S) -> int:
    """Runs a process's work and returns its exit status; errors become one line on stderr, the last one.

    A LonghaulError is a line without a traceback, since its text is written for the user. Anything else is a fault of
    ours and shows its traceback first.

    Args:
      work: called with the stop signals; returns a status or None for 0.
      grace_s: see StopSignals.
    """
    signals = StopSignals(grace_s)
    die_with_supervisor()
    try:
        status = work(signals) or 0
    except Stopped:
        status = 0
    except LonghaulError as error:
        print_reason(str(error))
        status = error.exit_status
    except Exception as error:
        traceback.print_exc()
        print_reason(f"{type(error).__name__}: {error}")
        status = 1
    if grace_s is not None and signals.signum is None:
        end_at_latest_after(grace_s)  # the interpreter's shutdown is bounded too
    if status == 0 and signals.signum is not None:
        status = 128 + signals.signum
    return status


def end_process(status: int) -> NoReturn:
    """Ends this process now, with what it has written flushed, and without tearing down the interpreter.

    What native libraries do while a process is torn down is beyond us: Reverb's sampler threads wait there for
    samples that never come. By now all that must be kept has been closed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def print_reason(text: str) -> None:
    """Writes why a process fails as one line on stderr."""
    sys.stdout.flush()
    print(REASON_PREFIX + " ".join(text.split()), file=sys.stderr, flush=True)


@dataclasses.dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    may_finish: bool
    outlives_others: bool

    @property
    def pid(self) -> int:
        return self.process.pid


class Supervisor:
    """Starts child processes, notices how each ends, and ends them all together.

    Use as a context manager on the main thread: the kernel ties the children to the thread that started them.

        with Supervisor(workdir / "logs") as children:
            children.start("buffer", [sys.executable, "-m", "launchers.buffer"], outlives_others=True)
            while not signals.stop.wait(0.2):
                children.check()

    Args:
      log_dir: each child's stdout and stderr go to `<log_dir>/<name>.log`.
      grace_s: from the request to stop to the kill.
      hurry: when set, stop() no longer waits.
    """

    def __init__(self, log_dir: Path, grace_s: float = GRACE_S, hurry: threading.Event | None = None):
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._hurry = hurry or threading.Event()
        self._children: dict[str, _Child] = {}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        may_finish: bool = False,
        outlives_others: bool = False,
    ) -> None:
        """Starts a child in a process group of its own, so that a terminal's Ctrl-C reaches it only through us.

        Args:
          name: unique; names the log file.
          argv: the command.
          env: variables set on top of this process's own.
          may_finish: ending with status 0 is no failure.
          outlives_others: on stop() it is asked to stop only when the others have ended, or have had OUTLIVE_S.

        Raises:
          WorkerFailed: the command can't be run.
        """
        if name in self._children:
            raise ValueError(f"a child named {name} was started already")
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._log_dir / f"{name}.log"
        full_env = {**os.environ, **(env or {}), _SUPERVISOR_VARIABLE: str(os.getpid())}
        with open(log_path, "ab") as log:
            try:
                process = subprocess.Popen(
                    list(argv),
                    env=full_env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                raise WorkerFailed(f"{name} could not be started: {argv[0]}: {error.strerror}") from error
        self._children[name] = _Child(name, process, log_path, may_finish, outlives_others)

    def status(self, name: str) -> int | None:
        """Returns a child's exit status (128 + number if a signal killed it), or None while it runs."""
        return _ended(self._children[name])

    def pids(self) -> dict[str, int]:
        """Returns the process ids of the children that still run, by name."""
        return {c.name: c.pid for c in self._children.values() if _ended(c) is None}

    def check(self) -> None:
        """Raises if a child has ended that should not have.

        Raises:
          WorkerFailed: with the child's name, exit status and last log line.
        """
        for child in self._children.values():
            status = _ended(child)
            if status is None or (status == 0 and child.may_finish):
                continue
            raise WorkerFailed(
                f"{child.name} ended with status {status}: {last_line(child.log_path)} (log: {child.log_path})"
            )

    def stop(self) -> list[str]:
        """Asks all children to stop, waits for them at most grace_s, then kills; returns the names of the killed."""
        deadline = time.monotonic() + self._grace_s
        first = [c for c in self._children.values() if not c.outlives_others]
        last = [c for c in self._children.values() if c.outlives_others]
        _signal_each(first, signal.SIGTERM)
        self._wait(first, min(deadline, time.monotonic() + OUTLIVE_S))
        _signal_each(last, signal.SIGTERM)
        self._wait(first + last, deadline)
        killed = [c.name for c in self._children.values() if _ended(c) is None]
        for child in self._children.values():
            # The group holds what a child started itself (environment processes): gone with it, however it ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.process.wait()
        self._children.clear()
        return killed

    def _wait(self, children: list[_Child], deadline: float) -> None:
        while any(_ended(c) is None for c in children):
            if time.monotonic() >= deadline or self._hurry.wait(_POLL_S):
                return

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def last_line(log_path: Path) -> str:
    """Returns the reason in a log, else its last line that is not blank, else a text that says there is none."""
    try:
        with open(log_path, "rb") as log:
            log.seek(max(0, log_path.stat().st_size - _LAST_LINE_BYTES))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    except FileNotFoundError:
        lines = []
    # Native libraries may still write while the process goes down, so our own reason may not be the very last line.
    reasons = [line.removeprefix(REASON_PREFIX) for line in lines if line.startswith(REASON_PREFIX)]
    return (reasons or lines or ["it wrote nothing"])[-1]


def _ended(child: _Child) -> int | None:
    """Returns the exit status as a shell gives it, or None; the process id stays taken, so that it can be signalled."""
    info = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status


def _signal_each(children: list[_Child], signum: int) -> None:
    for child in children:
        if _ended(child) is None:
            os.kill(child.pid, signum)  # to the child alone: it stops what it has started itself
