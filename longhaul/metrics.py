"""Figures of a run over time: one JSON object a line, and TensorBoard event files beside them.

A run's folder holds `metrics/<role>.jsonl`. Each line has `time_s` (seconds since 1970), `step` (what the
role counts by: updates for the learner, environment steps for an actor, seconds for the rest) and then the
figures by name, units in the names. JSON has no NaN or infinity, so a figure that is not finite is written as null.
"""

import json
import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any


def jsonl_path(workdir: Path, role: str) -> Path:
    """Returns where the figures of `role` are kept in a run's folder."""
    return workdir / "metrics" / f"{role}.jsonl"


class MetricsWriter:
    """Appends one role's figures to its file; safe to share between threads.

    A line is handed to the operating system whole and at once, so that a reader sees it within the same second
    and a killed process loses nothing that it wrote.

    Args:
      workdir: the run's folder; None discards everything.
      role: the writer's name, such as "learner" or "actor_0"; also the file's name.
      tensorboard: write TensorBoard scalars too, under `tensorboard/<role>`.

    Raises:
      OSError: the folder can't be made or written.
    """

    def __init__(self, workdir: Path | None, role: str, tensorboard: bool = True):
        self._lock = threading.Lock()
        self._file: Any = None
        self._events: Any = None
        if workdir is None:
            return
        path = jsonl_path(workdir, role)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and in append mode: one write call a line, and a role that is started again goes on.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close())
        if tensorboard:
            from tensorboardX import SummaryWriter  # brings protobuf along, so only where it is wanted

            self._events = SummaryWriter(str(workdir / "tensorboard" / role), flush_secs=10)

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Appends one line; after close() it does nothing."""
        now = time.time()
        finite = {name: _finite_or_none(value) for name, value in figures.items()}
        line = json.dumps({"time_s": round(now, 3), "step": int(step), **finite}, allow_nan=False)
        with self._lock:
            if self._file is None:
                return
            self._file.write(line.encode() + b"\n")
            if self._events is not None:
                for name, value in finite.items():
                    if value is not None:
                        self._events.add_scalar(name, value, int(step), walltime=now)

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        with self._lock:
            file, events, self._file, self._events = self._file, self._events, None, None
            if file is not None:
                file.close()
            if events is not None:
                events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsTail:
    """Reads one role's figures as they are written, from another process.

    Args:
      workdir: the run's folder.
      role: the writer's name.
    """

    def __init__(self, workdir: Path, role: str):
        self._path = jsonl_path(workdir, role)
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Returns the whole lines written since the last call, oldest first; [] while there is no file.

        A last line that is still without its end is left for the next call. A line that is not JSON (cut short by a
        full disk) is passed over.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            return []
        self._offset += len(whole) + 1
        lines = []
        for text in whole.split(b"\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                lines.append(line)
        return lines


def read_jsonl(workdir: Path, role: str) -> list[dict[str, Any]]:
    """Returns all of one role's lines, oldest first; [] if it wrote none."""
    return MetricsTail(workdir, role).read_new()


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Writes a whole file so that a reader sees the old contents or the new ones, never a part.

    Raises:
      OSError: the folder can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    os.replace(part, path)


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
