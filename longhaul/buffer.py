"""The prioritized replay at the site: a Reverb table, its writer for actors and its sampler for the gateway.

The only importer of Reverb (Cassirer et al. 2021), and through it of TensorFlow. An item of the table is one
n-step transition. Its column `rows` refers to the distinct observation rows of both of its stacks, in order; each
row is a chunk of its own, so the replay holds every row once however many transitions refer to it. A row is stored
as a string (codec.CellPacker: its id, then its bytes, compressed by the actor that made it): a draw then hands on
what is stored, and only the few rows that must cross the link are ever unpacked again. Its column `step` is a packed
record: action, return, discount, the version of the weights that acted, and where in `rows` each place of the two
stacks is found.

The table's limiter holds back samples only: the learner may draw at most `samples_per_insert` times what has
been inserted. Inserts are never blocked by the table, since then an absent learner would stop a robot; actors
that are ahead of a present learner are asked to wait by the gateway instead.
"""

import contextlib
import ctypes
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from reverb import pybind
from reverb.cc import schema_pb2

from longhaul import codec
from longhaul.errors import ConfigError, LonghaulError, Stopped, WorkerFailed
from longhaul.types import DrawnSamples, ExperienceSpec, NStepTransition

TABLE = "replay"
_ROW, _STEP = 0, 1  # columns of the writer
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_FOREVER = 1e300  # Reverb takes a double; an insert is never blocked
_RETRY_S = 0.1  # between looks at a pipe that was found full
_DRAW_TIMEOUT_MS = 200  # how long one draw waits for the limiter before the sampler can look at the stop event


def step_dtype(stack: int) -> np.dtype:
    """Returns the packed record of an item's `step` column."""
    return np.dtype(
        [
            ("action", "<i4"),
            ("n_step_return", "<f4"),
            ("discount", "<f4"),
            ("policy_version", "<i8"),
            ("index", "u1", (2 * stack,)),
        ]
    )


def _signature(spec: ExperienceSpec) -> dict[str, tf.TensorSpec]:
    return {
        "rows": tf.TensorSpec([spec.rows_per_item], tf.string),
        "step": tf.TensorSpec([1, step_dtype(spec.stack).itemsize], tf.uint8),
    }


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

    Raises:
      ConfigError: the port is taken.
    """

    def __init__(self, spec: ExperienceSpec, replay: Any, port: int = 0):
        self.spec = spec
        table = reverb.Table(
            TABLE,
            sampler=reverb.selectors.Prioritized(replay.priority_exponent),
            remover=reverb.selectors.Fifo(),
            max_size=replay.capacity,
            rate_limiter=_limiter(replay),
            signature=_signature(spec),
        )
        _check_free(port)
        _keep_freed_memory()
        self._server = reverb.Server([table], port=port or None)
        self.port = int(self._server.port)
        self._client = reverb.Client(f"localhost:{self.port}")

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities by item key; keys no longer in the table are passed over.

        Args:
          keys: uint64 [N].
          priorities: float64 [N], finite and not negative: Reverb takes +inf and then samples NaN for ever.
        """
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
        """Writes the table to disk; returns the path."""
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
        self._iterator: Iterator[Any] | None = None
        self._ended_s = time.monotonic()  # of the draw before, when Reverb began to draw ahead

    def _new_iterator(self) -> Iterator[Any]:
        signature = _signature(self._spec)
        dataset = reverb.TrajectoryDataset(
            server_address=f"localhost:{self._port}",
            table=TABLE,
            dtypes={name: spec.dtype for name, spec in signature.items()},
            shapes={name: spec.shape for name, spec in signature.items()},
            max_in_flight_samples_per_worker=self._ahead,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=_DRAW_TIMEOUT_MS,
        )
        return iter(dataset.batch(self._batch, drop_remainder=True))

    def draw(self, stop: threading.Event) -> DrawnSamples:
        """Draws one batch, waiting for the limiter as long as it takes.

        Raises:
          Stopped: the stop event was set meanwhile.
          WorkerFailed: the replay server is gone.
        """
        while not stop.is_set():
            began_s = time.monotonic()
            try:
                if self._iterator is None:
                    self._ended_s = began_s
                    self._iterator = self._new_iterator()
                sample = next(self._iterator)
                share_ahead = self._ahead / self._batch
                drawn = self._unpack(sample, share_ahead * self._ended_s + (1 - share_ahead) * began_s)
                self._ended_s = time.monotonic()
                return drawn
            except StopIteration:
                # The limiter held the draw back for _DRAW_TIMEOUT_MS.
                self._iterator = None
            except (tf.errors.OpError, reverb.errors.ReverbError) as error:
                if stop.is_set():
                    break
                raise WorkerFailed(f"drawing from the replay failed: {error}") from error
        raise Stopped("drawing from the replay was stopped")

    def _unpack(self, sample: Any, drawn_time_s: float) -> DrawnSamples:
        spec = self._spec
        count, per_item = self._batch, spec.rows_per_item
        cells = sample.data["rows"].numpy().ravel().tolist()
        step = sample.data["step"].numpy().reshape(count, -1).view(step_dtype(spec.stack)).reshape(count)
        ids = codec.cell_ids(cells).reshape(count, per_item)
        index = step["index"].astype(np.int32)
        return DrawnSamples(
            keys=sample.info.key.numpy(),
            row_ids=np.take_along_axis(ids, index, axis=1),
            row_index=index + np.arange(count, dtype=np.int32)[:, None] * per_item,
            cells=cells,
            actions=step["action"].astype(np.int32),
            returns=step["n_step_return"].astype(np.float32),
            discounts=step["discount"].astype(np.float32),
            probabilities=sample.info.probability.numpy(),
            priorities=sample.info.priority.numpy(),
            policy_versions=step["policy_version"].astype(np.int64),
            table_size=int(sample.info.table_size.numpy()[-1]),
            drawn_time_s=drawn_time_s,
        )


class _Stream:
    """One environment stream's Reverb writer, and the rows it can still refer to."""

    def __init__(self, keep_rows: int):
        self.rows: deque[tuple[int, np.ndarray]] = deque(maxlen=keep_rows)
        self.refs: dict[int, Any] = {}
        self.writer: reverb.TrajectoryWriter | None = None
        self.unflushed = 0
        self.full_until_s = 0.0


class ReplayWriter:
    """Writes the rows and transitions of one actor's streams into the replay.

    Never blocks longer than `write_timeout_s`: when the replay takes nothing for that long, transitions are
    dropped and counted until it takes them again. Not thread-safe.

    Args:
      address: host:port of the replay.
      spec: of the experience.
      num_streams: environment streams, each with rows of its own.
      keep_rows: newest rows of a stream that a transition may refer to.
      max_pending_items: transitions written and not yet confirmed, over all streams.
      write_timeout_s: how long a full pipe may hold the caller.

    Attributes:
      counters: written_items, dropped_items, refused_priorities, reconnects.
    """

    def __init__(
        self,
        address: str,
        spec: ExperienceSpec,
        num_streams: int,
        keep_rows: int,
        max_pending_items: int,
        write_timeout_s: float,
    ):
        self._spec = spec
        self._keep_rows = max(keep_rows, 2 * spec.stack + spec.n_step)
        self._pending_per_stream = max(1, max_pending_items // num_streams)
        self._timeout_ms = max(1, int(write_timeout_s * 1000))
        self._step_dtype = step_dtype(spec.stack)
        _keep_freed_memory()
        self._packer = codec.CellPacker()
        self._streams = [_Stream(self._keep_rows) for _ in range(num_streams)]
        self.counters = {"written_items": 0, "dropped_items": 0, "refused_priorities": 0, "reconnects": 0}
        self._client = reverb.Client(address)

    def reconnect(self, address: str) -> None:
        """Goes over to another replay server; the rows that streams may still refer to go along."""
        self.counters["reconnects"] += 1
        for stream in self._streams:
            self._abandon(stream)
        self._client = reverb.Client(address)

    def add_row(self, stream: int, row_id: int, row: np.ndarray) -> None:
        """Makes a row available to the stream's transitions.

        Args:
          stream: from 0.
          row_id: unique for ever.
          row: [*row_shape] of the spec's row dtype; copied.

        Raises:
          LonghaulError: the row's size is not the spec's.
        """
        data = np.ascontiguousarray(row).tobytes()
        if len(data) != self._spec.row_bytes:
            raise LonghaulError(f"a row of {len(data)} bytes can't be stored, the spec says {self._spec.row_bytes}")
        packed = np.empty((), object)  # Reverb's string; numpy's own would lose zeros at its end
        packed[()] = self._packer.pack(row_id, data)
        own = self._streams[stream]
        if len(own.rows) == self._keep_rows:
            own.refs.pop(own.rows[0][0], None)
        own.rows.append((row_id, packed))

    def add_transition(self, stream: int, transition: NStepTransition, policy_version: int, priority: float) -> bool:
        """Writes one transition with its first priority.

        Returns:
          False if it was not written: a priority, return or discount that is not finite or is negative
          (refused), or a replay that takes nothing at present (dropped). Both are counted.
        """
        if not (
            0.0 <= priority < np.inf and np.isfinite(transition.n_step_return) and 0.0 <= transition.discount < np.inf
        ):
            self.counters["refused_priorities"] += 1
            return False
        own = self._streams[stream]
        if not self._has_room(own):
            self.counters["dropped_items"] += 1
            return False
        distinct, index = _distinct(transition.obs_ids + transition.next_ids, self._spec.rows_per_item)
        step = np.zeros(1, self._step_dtype)
        step[0] = (
            transition.action,
            transition.n_step_return,
            transition.discount,
            policy_version,
            index,
        )
        try:
            writer = self._writer(own)
            rows = [self._ref(own, writer, row_id) for row_id in distinct]
            # Reverb's own Python layer flattens trees at each of these calls, for twice what they cost by themselves.
            steps = writer._writer.Append([None, step.view(np.uint8)])
            writer._writer.CreateItem(TABLE, priority, [rows, steps[_STEP:]], [False, False])
        except (RuntimeError, reverb.errors.ReverbError):
            # The writer's connection has failed for good; a new one starts with the rows at hand.
            self._abandon(own)
            own.full_until_s = time.monotonic() + _RETRY_S
            self.counters["dropped_items"] += 1
            return False
        own.unflushed += 1
        self.counters["written_items"] += 1
        return True

    def close(self) -> None:
        """Lets the pending transitions go out, for at most write_timeout_s, and lets go of the connection."""
        for stream in self._streams:
            if stream.writer is not None:
                with contextlib.suppress(RuntimeError, reverb.errors.ReverbError):
                    stream.writer.flush(timeout_ms=self._timeout_ms)
                self._abandon(stream)

    def _writer(self, stream: _Stream) -> reverb.TrajectoryWriter:
        if stream.writer is None:
            writer = self._client.trajectory_writer(num_keep_alive_refs=self._keep_rows)
            for column in (_ROW, _STEP):
                writer._writer.ConfigureChunker(
                    column, pybind.ConstantChunkerOptions(max_chunk_length=1, num_keep_alive_refs=self._keep_rows)
                )
            stream.writer = writer
        return stream.writer

    def _ref(self, stream: _Stream, writer: reverb.TrajectoryWriter, row_id: int) -> Any:
        """Returns Reverb's reference to a row, after handing over the stream's rows up to it."""
        if row_id not in stream.refs:
            for known_id, packed in stream.rows:
                if known_id not in stream.refs:
                    stream.refs[known_id] = writer._writer.Append([packed, None])[_ROW]
                if known_id == row_id:
                    break
        if row_id not in stream.refs:
            raise LonghaulError(f"row {row_id} is not among the {self._keep_rows} newest rows of its stream")
        return stream.refs[row_id]

    def _has_room(self, stream: _Stream) -> bool:
        """Confirms pending transitions now and then; False while the replay does not take them."""
        waiting = time.monotonic() < stream.full_until_s
        if waiting or stream.writer is None or stream.unflushed < self._pending_per_stream // 2 + 1:
            return not waiting
        try:
            # Once full, a look must not hold the actor again: it has already waited its timeout.
            patience_ms = 1 if stream.full_until_s else self._timeout_ms
            stream.writer.flush(block_until_num_items=self._pending_per_stream // 2, timeout_ms=patience_ms)
        except reverb.errors.DeadlineExceededError:
            stream.full_until_s = time.monotonic() + _RETRY_S
            return False
        except (RuntimeError, reverb.errors.ReverbError):
            self._abandon(stream)
        stream.unflushed = 0
        stream.full_until_s = 0.0
        return True

    def _abandon(self, stream: _Stream) -> None:
        """Lets go of a writer without waiting for it: closing one whose server is gone can block."""
        writer, stream.writer = stream.writer, None
        stream.refs.clear()
        stream.unflushed = 0
        stream.full_until_s = 0.0
        if writer is not None:
            threading.Thread(target=writer.close, name="close-writer", daemon=True).start()


def _distinct(row_ids: tuple[int, ...], length: int) -> tuple[list[int], list[int]]:
    """Returns the distinct ids in order of first use, padded to `length`, and each place's index among them.

    Reverb reads a cell that stands twice in a row as a slice of two, so the padding alternates between the
    last two ids; a transition has two distinct rows at least.
    """
    places: dict[int, int] = {}
    for row_id in row_ids:
        places.setdefault(row_id, len(places))
    distinct = list(places)
    if len(distinct) < 2 or len(distinct) > length:
        raise LonghaulError(f"a transition refers to {len(distinct)} rows, from 2 to {length} are possible")
    while len(distinct) < length:
        distinct.append(distinct[-2])
    return distinct, [places[row_id] for row_id in row_ids]
