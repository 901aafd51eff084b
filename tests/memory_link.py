"""A link without a network, and a learner on it.

Batches of random transitions are made in memory and handed over through LinkClient's interface.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import jax
import numpy as np
import pytest

from longhaul.config import default
from longhaul.errors import Stopped
from longhaul.learner import Learner
from longhaul.metrics import MetricsWriter, read_jsonl
from longhaul.types import Batch, ExperienceSpec, Snapshot

SPEC = ExperienceSpec("Memory-v0", (4,), "float32", stack=2, num_actions=3, n_step=3, gamma=0.9)


class Opened(NamedTuple):
    cache_rows: int
    batch_size: int
    minibatches: int
    epoch: int


class MemoryLink:
    """Makes the same batches for the same seed, each with new rows whose number varies, and keeps what comes back.

    Args:
      stop: next_batch raises Stopped once it is set.
      spec: of the experience.
      seed: of the batches.
      window: batches that may be handed out and not yet acknowledged.
      limit: batches in all; then next_batch sets `stop`. 0: no limit.
      new_rows: range of new rows per batch after the first, which fills `filled` slots.
      filled: slots in use.
      reuse_buffers: hand out views of one set of arrays, overwritten at the next call, as a decoder in C might.
      change: applied to each batch before it is handed out.
    """

    def __init__(
        self,
        stop: threading.Event,
        spec: ExperienceSpec = SPEC,
        seed: int = 0,
        window: int = 4,
        limit: int = 0,
        new_rows: tuple[int, int] = (0, 40),
        filled: int = 200,
        reuse_buffers: bool = False,
        change: Callable[[Batch], Batch] = lambda batch: batch,
    ):
        self._stop, self._spec, self._window, self._limit = stop, spec, window, limit
        self._rng = np.random.default_rng(seed)
        self._new_rows, self._filled, self._reuse_buffers, self._change = new_rows, filled, reuse_buffers, change
        self._lent: list[np.ndarray] = []
        self.opened: Opened | None = None
        self.handed_out = 0
        self.acks: list[tuple[int, np.ndarray]] = []
        self.snapshots: list[Snapshot] = []
        self.resets = 0
        self.down = False
        # What the learner's cache must hold.
        self.rows = np.zeros((filled, *spec.row_shape), spec.row_dtype)

    def open(self, cache_rows: int, batch_size: int, minibatches: int, epoch: int, mark_first: bool = False) -> None:
        assert self.opened is None and cache_rows >= self._filled
        self.opened = Opened(cache_rows, batch_size, minibatches, epoch)

    def next_batch(self, timeout_s: float) -> Batch | None:
        if self._reuse_buffers:
            for array in self._lent:
                array.view(np.uint8).fill(0x5A)
        if self._stop.is_set():
            raise Stopped("the link was stopped")
        if self._limit and self.handed_out >= self._limit:
            self._stop.set()
            return None
        if self.handed_out - len(self.acks) >= self._window:
            return None
        self.handed_out += 1
        return self._change(self._lend(self._make()))

    def ack(self, sequence: int, priorities: np.ndarray) -> None:
        self.acks.append((sequence, np.array(priorities)))

    def publish(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def reset_cache(self) -> None:
        self.resets += 1

    def read_stats(self) -> dict[str, float]:
        return {"window": self._window, "rtt_s": 0.0}

    def close(self) -> None:
        pass

    def _make(self) -> Batch:
        assert self.opened is not None
        spec, rng = self._spec, self._rng
        shape = (self.opened.minibatches, self.opened.batch_size)
        count = self._filled if self.handed_out == 1 else int(rng.integers(*self._new_rows, endpoint=True))
        new_slots = rng.permutation(self._filled)[:count].astype(np.int32)
        if spec.row_dtype == "uint8":
            new_rows = rng.integers(0, 256, (count, *spec.row_shape), np.uint8)
        else:
            new_rows = rng.standard_normal((count, *spec.row_shape)).astype(spec.row_dtype)
        self.rows[new_slots] = new_rows
        return Batch(
            sequence=self.handed_out,
            slots=rng.integers(0, self._filled, (*shape, 2 * spec.stack)).astype(np.int32),
            actions=rng.integers(0, spec.num_actions, shape).astype(np.int32),
            returns=rng.standard_normal(shape).astype(np.float32),
            discounts=np.full(shape, spec.gamma**spec.n_step, np.float32),
            probabilities=rng.uniform(1e-4, 1e-2, shape).astype(np.float32),
            table_size=1000,
            new_slots=new_slots,
            new_rows=new_rows,
            received_time_s=time.monotonic(),
            audit_slots=np.zeros(0, np.int32),
            audit_crc32=0,
            stats={"inserts": 10 * self.handed_out, "draw_age_s": 0.25},
        )

    def _lend(self, batch: Batch) -> Batch:
        """Returns the batch, in arrays that are overwritten later where buffers are reused."""
        self._lent = [column for column in batch if isinstance(column, np.ndarray)] if self._reuse_buffers else []
        return batch


def make_config(**settings):
    config = default()
    config.agent.hidden = (16,)
    config.replay.capacity = 1000
    config.learner.update(batch_size=8, minibatches_per_pull=2, max_updates=40, target_period_updates=10)
    config.metrics.tensorboard = False
    config.update_from_flattened_dict(settings)
    return config


class Run:
    """One learner on a MemoryLink, run to its end.

    Args:
      workdir: its folder.
      config: `make_config()` if None.
      start: run it at once.
      epoch: of the learner.
      spec: of the experience.
      link: settings of the MemoryLink.
    """

    opened: ClassVar[list[MetricsWriter]] = []

    def __init__(self, workdir, config=None, start=True, epoch=1, spec=SPEC, **link):
        self.workdir, self.config, self.stop = workdir, config or make_config(), threading.Event()
        self.link = MemoryLink(self.stop, spec, **link)
        self.metrics = MetricsWriter(workdir, "learner", tensorboard=False)
        Run.opened.append(self.metrics)
        self.learner = Learner(self.config, spec, self.link, self.metrics, workdir, self.stop, epoch)
        if start:
            self.learner.run()

    @property
    def lines(self):
        return read_jsonl(self.workdir, "learner")

    @property
    def state(self):
        return self.learner._state


def assert_same(one, other):
    for x, y in zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other)):
        np.testing.assert_array_equal(x, y)


def poison(sequence, **columns):
    """Returns a change that sets one element of the columns of one batch (or of all, for None)."""

    def change(batch):
        if sequence is not None and batch.sequence != sequence:
            return batch
        for name, value in columns.items():
            getattr(batch, name)[..., 0] = value
        return batch

    return change


@pytest.fixture(autouse=True)
def writers_closed() -> Iterator[None]:
    yield
    while Run.opened:
        Run.opened.pop().close()
