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

from longhaul.errors import ConfigError


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
      port: serve the newest figures to Prometheus on this loopback port, with a folder or without; 0 does not.

    Raises:
      OSError: the folder can't be made or written.
      ConfigError: the port is taken.
    """

    def __init__(self, workdir: Path | None, role: str, tensorboard: bool = True, port: int = 0):
        self._lock = threading.Lock()
        self._file: Any = None
        self._events: Any = None
        self._exporter = Exporter(role, port) if port else None
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
        if self._exporter is not None:
            self._exporter.set({"step": step, **finite})
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
        if self._exporter is not None:
            self._exporter.close()
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


class Exporter:
    """Serves one role's newest figures to Prometheus, as gauges `longhaul_<figure>{role="<role>"}`.

    Args:
      role: label of every gauge.
      port: on the loopback; whoever may look from outside is for a reverse proxy to say.

    Raises:
      ConfigError: the port is taken.
    """

    def __init__(self, role: str, port: int):
        import prometheus_client  # only where it is wanted

        self._prometheus = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._role = role
        self._lock = threading.Lock()
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            raise ConfigError(f"--metrics_port={port} can't be listened on: {error.strerror}; choose another") from None

    def set(self, figures: dict[str, float | None]) -> None:
        """Takes over the figures; those that are None keep their last value."""
        with self._lock:
            for name, value in figures.items():
                if value is None:
                    continue
                if name not in self._gauges:
                    made = self._prometheus.Gauge(f"longhaul_{name}", name, ["role"], registry=self._registry)
                    self._gauges[name] = made.labels(self._role)
                self._gauges[name].set(value)

    def close(self) -> None:
        """Ends the serving; may be called twice."""
        self._server.shutdown()
        self._server.server_close()


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
