"""The prioritized replay at the site: a Reverb table, and the gateway's writers and samplers of it.

The only importer of Reverb (Cassirer et al. 2021), and through it of TensorFlow. An item of the table is one n-step
transition, a packed record (records.py): action, return, discount, version of the weights that acted, and the ids of
the observation rows of both of its stacks. The rows themselves lie beside the table (row_store.RowStore), each once
however many transitions refer to it, and take no part in a draw: with them in the items, Reverb spent three quarters
of its time on moving rows that the learner already had.

The table's limiter holds back samples only: the learner may draw at most `samples_per_insert` times what has
been inserted. Inserts are never blocked by the table, since then a learner that is cut off would stop a robot; actors
that are ahead of a present learner, or of the first one to come, are asked to wait by the gateway instead.
"""

import contextlib
import ctypes
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from reverb import pybind
from reverb.cc import schema_pb2

from longhaul.errors import ConfigError, Stopped, WorkerFailed
from longhaul.initial_priority import InitialPriority
from longhaul.records import step_dtype
from longhaul.types import DrawnSamples, ExperienceSpec

TABLE = "replay"
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_FOREVER = 1e300  # Reverb takes a double; an insert is never blocked
_LOOK_S = 0.2  # between looks at the stop event while the limiter holds a draw back


def _signature(spec: ExperienceSpec) -> dict[str, tf.TensorSpec]:
    return {"step": tf.TensorSpec([1, step_dtype(spec.stack).itemsize], tf.uint8)}


def limiter_error_buffer(replay: Any) -> float:
    """Returns how many samples either side may run ahead of the ratio; at least one insert's worth."""
    return max(1.0, replay.samples_per_insert) * max(1.0, replay.error_buffer * replay.min_size)


def _limiter(replay: Any) -> reverb.rate_limiters.RateLimiter:
    ratio = replay.samples_per_insert
    if not ratio:
        return reverb.rate_limiters.MinSize(replay.min_size)
    return reverb.rate_limiters.RateLimiter(
        samples_per_insert=ratio,
        min_size_to_sample=replay.min_size,
        min_diff=ratio * replay.min_size - limiter_error_buffer(replay),
        max_diff=_FOREVER,
    )


def _check_free(port: int) -> None:
    """Reverb shares a taken port with whoever holds it (SO_REUSEPORT) instead of failing, so look first."""
    if not port:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(
                f"the replay can't listen on port {port}, something does already; choose another --replay_port"
            )


def _keep_freed_memory() -> None:
    """Tells glibc not to give memory back to the kernel between draws.

    A draw allocates and frees tens of thousands of small strings and some large arrays; to give them back and fault
    them in again took a fifth of the gateway's time. Other C libraries have their own ways and are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, size in ((_M_TRIM_THRESHOLD, 2**30), (_M_TOP_PAD, 2**26), (_M_MMAP_THRESHOLD, 2**25)):
            mallopt(parameter, size)


def outside_address(port: int) -> str | None:
    """Returns an address of this host, not the loopback, at which a port answers; None if there is none.

    Connects to this host's own addresses only: a firewall in front of it may still let nobody in.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks the kernel which address it would send from
        except OSError:
            return None
        own = probe.getsockname()[0]
    if own.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(2.0)
        return own if attempt.connect_ex((own, port)) == 0 else None


class ReplayServer:
    """The Reverb server with the table `replay`.

    Args:
      spec: of the experience it will hold.
      replay: config.replay.
      port: to listen on, on every interface (Reverb knows no other way); 0 takes any.
      order: "priority": items are drawn by it, time after time; "arrival": a queue of replay.spool items, each drawn
        once, of which the oldest is dropped for one too many.
      checkpoints: where checkpoints go; a temporary folder, made by the first of them, if None.

    Attributes:
      spec: as given.
      order: as given.
      port: listened on.
      capacity: transitions held at most.
      initial_priority: of new ones; whoever writes them asks it.

    Raises:
      ConfigError: the port is taken.
    """

    def __init__(
        self,
        spec: ExperienceSpec,
        replay: Any,
        port: int = 0,
        order: str = "priority",
        checkpoints: Path | None = None,
    ):
        self.spec = spec
        self.order = order
        queue = order == "arrival"
        self.capacity = int(replay.spool if queue else replay.capacity)
        self.initial_priority = InitialPriority(replay)
        table = reverb.Table(
            TABLE,
            sampler=reverb.selectors.Fifo() if queue else reverb.selectors.Prioritized(replay.priority_exponent),
            remover=reverb.selectors.Fifo(),
            max_size=self.capacity,
            max_times_sampled=1 if queue else 0,
            rate_limiter=reverb.rate_limiters.MinSize(1) if queue else _limiter(replay),
            signature=_signature(spec),
        )
        _check_free(port)
        _keep_freed_memory()
        # A folder that nothing was ever written to: Reverb would take up what it finds there, without its rows.
        folder = Path(checkpoints or tempfile.gettempdir()) / f"replay-{secrets.token_hex(8)}"
        checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(str(folder))
        self._server = reverb.Server([table], port=port or None, checkpointer=checkpointer)
        self.port = int(self._server.port)
        self._client = reverb.Client(f"localhost:{self.port}")

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities by item key; keys no longer in the table are passed over.

        Args:
          keys: uint64 [N].
          priorities: float64 [N], finite and not negative: Reverb takes +inf and then samples NaN for ever.
        """
        self.initial_priority.note(priorities)
        self._client.mutate_priorities(TABLE, dict(zip(keys.tolist(), priorities.tolist())))

    def info(self) -> tuple[int, int, int]:
        """Returns the table's size, and the items inserted and sampled since it was made."""
        # Reverb's own server_info also decodes the table's signature, for milliseconds at each of ten looks a second.
        for serialized in self._client._client.ServerInfo(10):
            info = schema_pb2.TableInfo.FromString(serialized)
            limits = info.rate_limiter_info
            return info.current_size, limits.insert_stats.completed, limits.sample_stats.completed
        raise WorkerFailed("the replay server has no table")

    def checkpoint(self) -> str:
        """Writes the table to disk; returns the folder. The rows that it refers to are not in it."""
        return self._client.checkpoint()

    def stop(self) -> None:
        """Stops serving; writers and samplers get errors from here on."""
        self._server.stop()


class ReplaySampler:
    """Draws batches of transitions from a replay server in this process.

    Args:
      server: to draw from.
      batch: transitions per draw, N.
      ahead: samples that Reverb may draw before they are asked for, at most N. The more, the less its threads wake
        each other, and the older are the priorities that these samples were chosen on; `drawn_time_s` counts it in.
    """

    def __init__(self, server: ReplayServer, batch: int, ahead: int = 64):
        self._spec = server.spec
        self._port = server.port
        self._batch = batch
        self._ahead = max(1, min(ahead, batch))
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the thread
        self._drawn: queue.SimpleQueue[DrawnSamples | Exception] = queue.SimpleQueue()
        self._pending = False
        # Reverb waits for its limiter without an end, in a thread that outlives whoever asks: to give up a draw would
        # lose what it has so far, and to take Reverb's sampler down and set it up again costs up to seconds.
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def _new_iterator(self) -> Iterator[Any]:
        signature = _signature(self._spec)
        dataset = reverb.TrajectoryDataset(
            server_address=f"localhost:{self._port}",
            table=TABLE,
            dtypes={name: spec.dtype for name, spec in signature.items()},
            shapes={name: spec.shape for name, spec in signature.items()},
            max_in_flight_samples_per_worker=self._ahead,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=-1,
        )
        return iter(dataset.batch(self._batch, drop_remainder=True))

    def draw(self, stop: threading.Event) -> DrawnSamples:
        """Draws one batch, waiting for the limiter as long as it takes; for one thread at a time.

        Raises:
          Stopped: the stop event was set meanwhile; what was being drawn is returned by the next call.
          WorkerFailed: the replay server is gone.
        """
        if not self._pending:
            self._pending = True
            self._asked.put(True)
        while not stop.is_set():
            try:
                drawn = self._drawn.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            self._pending = False
            if isinstance(drawn, Exception):
                raise WorkerFailed(f"drawing from the replay failed: {drawn}") from drawn
            return drawn
        raise Stopped("drawing from the replay was stopped")

    def close(self) -> None:
        """Ends the thread, once the draw that it may be waiting for is over."""
        self._asked.put(False)

    def _run(self) -> None:
        iterator: Iterator[Any] | None = None
        ended_s = time.monotonic()  # of the draw before, when Reverb began to draw ahead
        share_ahead = self._ahead / self._batch
        while self._asked.get():
            began_s = time.monotonic()
            try:
                if iterator is None:
                    ended_s = began_s
                    iterator = self._new_iterator()
                sample = next(iterator)
                middle_s = (began_s + time.monotonic()) / 2
                self._drawn.put(self._unpack(sample, share_ahead * ended_s + (1 - share_ahead) * middle_s))
            except (tf.errors.OpError, reverb.errors.ReverbError, StopIteration) as error:
                iterator = None
                self._drawn.put(error)
            ended_s = time.monotonic()

    def _unpack(self, sample: Any, drawn_time_s: float) -> DrawnSamples:
        step = sample.data["step"].numpy().reshape(self._batch, -1).view(step_dtype(self._spec.stack))[:, 0]
        return DrawnSamples(
            keys=sample.info.key.numpy(),
            row_ids=np.ascontiguousarray(step["row_ids"]),
            actions=step["action"].astype(np.int32),
            returns=step["n_step_return"].astype(np.float32),
            discounts=step["discount"].astype(np.float32),
            probabilities=sample.info.probability.numpy(),
            priorities=sample.info.priority.numpy(),
            policy_versions=step["policy_version"].astype(np.int64),
            table_size=int(sample.info.table_size.numpy()[-1]),
            drawn_time_s=drawn_time_s,
        )


class ItemWriter:
    """Writes transitions into a replay server; the rows that they refer to must be in the site's row store by then.

    Not thread-safe. Never blocks, except in `flush`.

    Args:
      server: to write into.
    """

    def __init__(self, server: ReplayServer):
        self._client = reverb.Client(f"localhost:{server.port}")
        self._writer: reverb.TrajectoryWriter | None = None

    def write(self, step: np.ndarray, priority: float) -> None:
        """Hands one transition to Reverb, which sends it in the background.

        Args:
          step: uint8, the bytes of one record of `records.step_dtype`.
          priority: finite and not negative.

        Raises:
          WorkerFailed: the connection has failed for good, with all that was not confirmed; the next call makes
            another.
        """
        try:
            if self._writer is None:
                self._writer = self._client.trajectory_writer(num_keep_alive_refs=1)
                options = pybind.ConstantChunkerOptions(max_chunk_length=1, num_keep_alive_refs=1)
                self._writer._writer.ConfigureChunker(0, options)
            # Reverb's own Python layer flattens trees at each of these calls, for twice what they cost by themselves.
            steps = self._writer._writer.Append([step])
            self._writer._writer.CreateItem(TABLE, priority, [steps], [False])
        except (RuntimeError, reverb.errors.ReverbError) as error:
            self._abandon()
            raise WorkerFailed(f"writing into the replay failed: {error}") from error

    def flush(self, unconfirmed: int, timeout_s: float) -> bool:
        """Waits until at most `unconfirmed` transitions are not yet in the table; returns False at the timeout.

        Raises:
          WorkerFailed: as `write`.
        """
        if self._writer is None:
            return True
        try:
            self._writer.flush(block_until_num_items=unconfirmed, timeout_ms=max(1, int(timeout_s * 1000)))
        except reverb.errors.DeadlineExceededError:
            return False
        except (RuntimeError, reverb.errors.ReverbError) as error:
            self._abandon()
            raise WorkerFailed(f"writing into the replay failed: {error}") from error
        return True

    def close(self) -> None:
        """Lets go of the connection; what is not confirmed may be lost."""
        self._abandon()

    def _abandon(self) -> None:
        """Lets go of a writer without waiting for it: closing one whose server is gone can block."""
        writer, self._writer = self._writer, None
        if writer is not None:
            threading.Thread(target=writer.close, name="close-writer", daemon=True).start()
