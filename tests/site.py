"""A whole site in one process for tests: real Reverb, real gRPC on port 0, and a learner that checks every row."""

import contextlib
import secrets
import threading
import time

import numpy as np

from longhaul import config
from longhaul.gateway import Gateway
from longhaul.inserter import Inserter
from longhaul.link import LinkClient
from longhaul.site_client import SiteClient
from longhaul.types import Batch, ExperienceSpec, NStepTransition

SPEC = ExperienceSpec("Oracle-v0", (6, 6), "uint8", stack=4, num_actions=3, n_step=3, gamma=0.9)


def small_config(**replay):
    """A configuration for the oracle's experience: no limiter, priorities straight."""
    c = config.default()
    c.replay.update({"capacity": 10_000, "min_size": 1, "samples_per_insert": 0.0, "priority_exponent": 1.0} | replay)
    return c


def rows_of(row_ids: np.ndarray, spec: ExperienceSpec) -> np.ndarray:
    """The oracle's rows [*row_ids.shape, *row_shape]: the id in the first bytes, then noise made from it."""
    ids = np.asarray(row_ids, np.uint64)
    places = np.arange(spec.row_bytes, dtype=np.uint64)
    mixed = (ids[..., None] + 1) * np.uint64(0x9E3779B97F4A7C15) ^ (places + 1) * np.uint64(0xBF58476D1CE4E5B9)
    rows = ((mixed ^ mixed >> np.uint64(29)) * np.uint64(0x94D049BB133111EB) >> np.uint64(40)).astype(np.uint8)
    rows[..., :8] = np.ascontiguousarray(ids.astype("<u8")[..., None]).view(np.uint8)
    return rows.view(spec.row_dtype).reshape(*ids.shape, *spec.row_shape)


class Writer:
    """Fills a site with the oracle's transitions: each says in its return which it is."""

    def __init__(self, site: SiteClient, spec: ExperienceSpec = SPEC, priority=lambda t: 1.0, policy_version=7):
        self.spec = spec
        self._policy_version = policy_version
        self._priority = priority
        site.announce(spec)
        self._writer = Inserter(site, spec, 1, 16, 256, 5.0)
        self._next = 0

    def write(self, count: int) -> None:
        """Appends `count` transitions of one endless episode."""
        spec = self.spec
        first = spec.stack + spec.n_step - 1
        for _ in range(count):
            while self._next <= first:
                self._writer.add_row(0, self._next, rows_of(self._next, spec))
                self._next += 1
            t = self._next - 1 - spec.n_step
            assert self._writer.add_transition(0, self.transition(t), self._policy_version, self._priority(t))
            self._writer.add_row(0, self._next, rows_of(self._next, spec))
            self._next += 1

    def transition(self, t: int) -> NStepTransition:
        """The transition whose observation's newest row is t."""
        spec = self.spec
        ids = tuple(range(t - spec.stack + 1, t + 1))
        return NStepTransition(ids, tuple(i + spec.n_step for i in ids), t % 3, float(t), 0.9**3)

    def close(self) -> None:
        self._writer.close()


class CheckingLearner:
    """Applies batches to a numpy cache and checks every row of every transition against its return."""

    def __init__(self, link: LinkClient, capacity: int, spec: ExperienceSpec = SPEC):
        self.link = link
        self.spec = spec
        self.cache = np.zeros((capacity, *spec.row_shape), spec.row_dtype)
        self.new_rows = 0
        self.drawn: list[float] = []

    def take(self, timeout_s: float = 20.0) -> Batch:
        """Next batch, applied and checked."""
        deadline_s = time.monotonic() + timeout_s
        while (batch := self.link.next_batch(0.5)) is None:
            assert time.monotonic() < deadline_s, f"no batch within {timeout_s} s"
        self.cache[batch.new_slots] = batch.new_rows
        self.new_rows += len(batch.new_slots)
        gathered = self.cache[batch.slots.reshape(-1, 2 * self.spec.stack)]
        newest = batch.returns.reshape(-1).astype(np.int64)
        first = np.arange(1 - self.spec.stack, 1)
        expected = newest[:, None] + np.concatenate([first, first + self.spec.n_step])
        np.testing.assert_array_equal(gathered, rows_of(expected, self.spec))
        np.testing.assert_array_equal(batch.actions.reshape(-1), newest % 3)
        self.drawn.extend(batch.returns.reshape(-1).tolist())
        return batch

    def step(self, priority: float = 1.0) -> Batch:
        """Takes a batch and acknowledges it with one priority for all."""
        batch = self.take()
        self.link.ack(batch.sequence, np.full(batch.actions.shape, priority, np.float32))
        return batch


@contextlib.contextmanager
def running(run_config, port=0, order="priority"):
    """A gateway, and a site client for writers."""
    stop = threading.Event()
    gateway = Gateway(run_config, port=port, order=order)
    gateway.start()
    site = SiteClient(f"127.0.0.1:{gateway.port}", "actor", stop)
    try:
        yield gateway, site
    finally:
        stop.set()
        site.close()
        gateway.stop(0.2)


@contextlib.contextmanager
def linked(address, run_config, cache_rows=2000, batch_size=16, minibatches=1, epoch=1, **kwargs):
    """An open link, closed at the end."""
    stop = threading.Event()
    link = LinkClient(address, run_config, secrets.randbits(60), stop, **kwargs)
    try:
        link.describe(10.0)
        link.open(cache_rows, batch_size, minibatches, epoch)
        yield link
    finally:
        link.close()
        stop.set()


def eventually(condition, timeout_s: float = 15.0) -> None:
    """Waits until a condition holds; fails if it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come to hold in time"
        time.sleep(0.02)
