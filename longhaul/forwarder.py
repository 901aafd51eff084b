"""The existing approach's far end of the link: takes what the site forwards in order of arrival, and stores it there.

The buffer node at the site is a queue (`launchers.buffer --order=arrival`): it hands on every transition once, oldest
first, and drops the oldest where the link can't keep up. The forwarder receives them over the very same link as a
learner does, and writes each into a second buffer node beside the learner, an ordinary prioritized one, through the
actors' own writer and with the priority that the actor gave it. It hands the learner's weights back to the site, once
each. So the learner runs unchanged, and all that differs from the proposed architecture is which side of the link
replay stands on.
"""

import logging
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import config_dict

from longhaul import device_cache, pacing, scoring
from longhaul.errors import Corruption, Stopped
from longhaul.inserter import Inserter
from longhaul.metrics import MetricsWriter
from longhaul.policy import Policy
from longhaul.row_ids import RowIds
from longhaul.site_client import SiteClient
from longhaul.types import Batch, ExperienceSpec, NStepTransition, Snapshot, TransitionWriter

_WAIT_S = 0.2  # for a batch, before the other duties
_KEEP_ROWS = 256  # that the writer can refer to; a row in use for longer is stored once more
_NEVER = -(2**62)
# Transitions per batch at least. Those that follow each other share rows; where the queue drops what lies between two
# batches, small ones would cost nearly twice the bytes.
_LEAST_PULL = 256


def _open_replay(site: SiteClient, spec: ExperienceSpec, config: config_dict.ConfigDict) -> TransitionWriter:
    pending = max(config.actor.max_pending_items, config.learner.batch_size * config.learner.minibatches_per_pull)
    return Inserter(site, spec, 1, _KEEP_ROWS, pending, config.actor.write_timeout_s)


class RowCopies:
    """The rows that the site's mirror counts on, and under which id each was last given to the writer.

    Args:
      capacity: rows.
      spec: of the experience.
    """

    def __init__(self, capacity: int, spec: ExperienceSpec):
        self.rows = np.zeros((capacity, *spec.row_shape), spec.row_dtype)
        self._ids = np.zeros(capacity, np.int64)
        self._given = np.full(capacity, _NEVER, np.int64)  # number of the row in the writer's stream
        self._count = 0
        self._row_ids = RowIds()
        # One transition's own rows must not push each other out.
        self._within = _KEEP_ROWS - 2 * spec.stack

    def insert(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Puts new rows ([M, *row_shape]) into slots (int32 [M])."""
        self.rows[slots] = rows
        self._given[slots] = _NEVER

    def give(self, slots: list[int], writer: TransitionWriter) -> tuple[int, ...]:
        """Returns the row ids of slots after handing those rows to the writer that it may have let go of."""
        for slot in slots:
            if self._count - self._given[slot] >= self._within:
                self._ids[slot] = self._row_ids.take()
                writer.add_row(0, int(self._ids[slot]), self.rows[slot])
                self._given[slot] = self._count
                self._count += 1
        return tuple(self._ids[slots].tolist())


class Forwarder:
    """Forwards until stopped.

    Args:
      config: the whole configuration.
      spec: the experience, as the site described it.
      link: a LinkClient that has described its site and is not open yet; its maker closes it.
      replay_site: the buffer node beside the learner, not yet announced; its maker closes it.
      metrics: where figures go; the step is transitions.
      stop: ends `run`.
      epoch: greater than that of any forwarder before at this site.
      open_writer: makes the writer into `replay_site`.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        spec: ExperienceSpec,
        link: Any,
        replay_site: SiteClient,
        metrics: MetricsWriter,
        stop: threading.Event,
        epoch: int,
        open_writer: Callable[[SiteClient, ExperienceSpec, config_dict.ConfigDict], TransitionWriter] = _open_replay,
    ):
        self._config, self._spec, self._link, self._site = config, spec, link, replay_site
        self._metrics, self._stop, self._epoch = metrics, stop, epoch
        self._open_writer = open_writer
        minibatches, batch_size = int(config.learner.minibatches_per_pull), int(config.learner.batch_size)
        affordable = config.learner.cache_bytes // (spec.row_bytes * 2 * spec.stack)
        minibatches = max(minibatches, min(_LEAST_PULL, config.replay.spool // 2, affordable) // batch_size)
        self._shape = (minibatches, batch_size)
        batch_rows = 2 * spec.stack * minibatches * batch_size
        useful_rows = config.replay.capacity * 3 // 2 + batch_rows
        self._capacity = device_cache.capacity_rows(config.learner.cache_bytes, spec, batch_rows, useful_rows)
        self._copies = RowCopies(self._capacity, spec)
        self._pace = pacing.transfer_pace(config)
        self._policy = Policy(spec, config, 1)
        self._scorer = scoring.Scorer(spec, config) if config.metrics.score_transfers else None
        self._arrivals = scoring.ArrivalTally()
        self._snapshot: Snapshot | None = None
        self._counters = {"forwarded": 0, "cache_resets": 0, "refused_weights": 0}
        self._site_stats: dict[str, float] = {}
        self._idle_s = 0.0
        self._line_time_s = time.monotonic()
        self._writer: TransitionWriter | None = None

    def run(self) -> None:
        """Forwards until the stop event is set, then returns.

        Raises:
          Refused, DeadlineExceeded, MismatchError: the site or the replay won't have it.
        """
        try:
            self._site.announce(self._spec)
            self._site.start()
            self._writer = self._open_writer(self._site, self._spec, self._config)
            minibatches, batch_size = self._shape
            self._link.open(self._capacity, batch_size, minibatches, self._epoch)
            while not self._stop.is_set():
                self._look_for_weights()
                if self._pace.wait(self._stop, _WAIT_S):
                    self._take_batch()
                if time.monotonic() - self._line_time_s >= self._config.metrics.period_s:
                    self._report()
        except Stopped:
            logging.info("the forwarder was stopped after %d transitions", self._counters["forwarded"])
        finally:
            if self._writer is not None:
                self._writer.close()
                self._report()

    def _take_batch(self) -> None:
        asked_s = time.monotonic()
        batch = self._link.next_batch(_WAIT_S)
        self._idle_s += time.monotonic() - asked_s
        if batch is None:
            return
        self._copies.insert(batch.new_slots, batch.new_rows)
        if len(batch.audit_slots) and zlib.crc32(self._copies.rows[batch.audit_slots].tobytes()) != batch.audit_crc32:
            logging.warning("batch %d: the rows here are not those of the site; begun anew", batch.sequence)
            self._counters["cache_resets"] += 1
            self._link.reset_cache()
            return
        if self._scorer is not None:
            self._score(batch, self._scorer)
        self._write(batch)
        self._pace.count(batch.actions.size)
        self._link.ack(batch.sequence, np.zeros(0, np.float32))  # the credit alone: the queue holds no priorities
        self._site_stats = batch.stats

    def _score(self, batch: Batch, scorer: scoring.Scorer) -> None:
        count = batch.actions.size
        rows = self._copies.rows[batch.slots.reshape(count, -1)]
        columns = (column.reshape(count) for column in (batch.actions, batch.returns, batch.discounts))
        priorities, _ = scorer.score(self._policy.params, rows, *columns)
        self._arrivals.add(priorities, np.ones(count, np.bool_))  # a queue hands everything on once

    def _write(self, batch: Batch) -> None:
        assert self._writer is not None
        stack = self._spec.stack
        version = round(batch.stats.get("policy_version", 0.0))
        columns = zip(
            batch.slots.reshape(-1, 2 * stack).tolist(),
            batch.actions.reshape(-1).tolist(),
            batch.returns.reshape(-1).tolist(),
            batch.discounts.reshape(-1).tolist(),
            batch.probabilities.reshape(-1).tolist(),  # in order of arrival: the actors' priorities
        )
        for slots, action, n_step_return, discount, priority in columns:
            ids = self._copies.give(slots, self._writer)
            transition = NStepTransition(ids[:stack], ids[stack:], action, n_step_return, discount)
            self._writer.add_transition(0, transition, version, priority)
        self._counters["forwarded"] += batch.actions.size

    def _look_for_weights(self) -> None:
        """Hands the learner's newest weights on to the site, once each."""
        snapshot = self._site.newest_weights()
        if snapshot is None or snapshot is self._snapshot:
            return
        self._snapshot = snapshot
        self._link.publish(snapshot)
        if self._scorer is not None:
            try:
                self._policy.adopt(snapshot.payload)
            except Corruption as error:
                self._counters["refused_weights"] += 1
                logging.warning("weights %d can't be scored with: %s", snapshot.version, error)

    def _report(self) -> None:
        assert self._writer is not None
        now_s = time.monotonic()
        period_s = max(now_s - self._line_time_s, 1e-9)
        figures = {
            **self._site_stats,
            **self._link.read_stats(),
            **self._counters,
            **self._writer.counters,
            **(self._arrivals.read() if self._scorer is not None else {}),
            "idle_share": min(1.0, self._idle_s / period_s),
            "weights_version": self._snapshot.version if self._snapshot else 0,
        }
        self._idle_s, self._line_time_s = 0.0, now_s
        self._metrics.write(self._counters["forwarded"], figures)
