"""The learner: pulls batches over the link, trains on them, sends priorities back and weights out.

One thread drives the device. It hands batch i+1 over before it looks at what came of batch i, but only if batch
i+1 is already there: the device then never waits for the host, and no priority waits for a batch that is late.
"""

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import config_dict

from longhaul import checkpoints, device_cache, devices, dqn, networks, pacing, scoring, train_step
from longhaul.background import NewestOnly
from longhaul.errors import LonghaulError, Stopped, WorkerFailed
from longhaul.metrics import MetricsWriter
from longhaul.reserve import Allowance, Reserve
from longhaul.types import AUDITED_ROWS, Batch, ExperienceSpec
from longhaul.weights_publisher import WeightsPublisher

# Longest wait for a batch before the loop looks after its other duties.
_WAIT_S = 0.2
# For the last snapshot and the last checkpoint, within the time that an orderly stop may take.
_CLOSE_TIMEOUT_S = 6.0

_APPLIED, _TARGET_MOVED = dqn.METRICS.index("applied"), dqn.METRICS.index("target_moved")


class _InFlight(NamedTuple):
    """A batch handed to the device, whose priorities are not known yet."""

    batch: Batch | None  # None: drawn from the reserve
    packed: np.ndarray
    report: jax.Array
    stamp: int = 0  # of its rows, see Reserve
    places: np.ndarray | None = None  # in the reserve
    scores: jax.Array | None = None  # see Learner._score_on_arrival


class _Tally:
    """What the loop counts between two lines of metrics."""

    def __init__(self, skipped: int):
        self.skipped = skipped
        self.target_updates = 0
        self.begin()

    def begin(self) -> None:
        """Starts the next line."""
        self.started_s = time.monotonic()
        self.idle_s = 0.0
        self.updates = 0
        self.batches = 0
        self.batch_age_s = 0.0
        self.sample_age_s = 0.0
        self.new_rows = 0
        self._sums = np.zeros(len(dqn.METRICS), np.float64)

    def add(self, figures: np.ndarray) -> None:
        """Adds [K, F] figures; the means leave out minibatches that were skipped, whose figures are not finite."""
        sums = figures.sum(axis=0)
        self.updates += len(figures)
        if sums[_APPLIED] < len(figures):
            self.skipped += len(figures) - int(sums[_APPLIED])
            sums = figures[figures[:, _APPLIED] > 0].sum(axis=0)
        self._sums += sums
        self.target_updates += int(sums[_TARGET_MOVED])

    def means(self) -> dict[str, float]:
        """Returns the means since `begin`; NaN if nothing was applied."""
        applied = self._sums[_APPLIED]
        means = self._sums / applied if applied else np.full(len(self._sums), np.nan)
        return {n: float(x) for n, x in zip(dqn.METRICS, means) if n not in ("applied", "target_moved")}


class Learner:
    """Trains until config.learner.max_updates or until stopped; goes on from a checkpoint where there is one.

    Usage:
      Learner(config, spec, link, metrics, workdir, stop, epoch).run()

    Args:
      config: the whole configuration.
      spec: the experience, as the site described it.
      link: a LinkClient that has described its site and is not open yet; the caller closes it.
      metrics: where figures go.
      workdir: the run's folder, for checkpoints.
      stop: an orderly end, with a checkpoint.
      epoch: greater than that of any learner before at this site.

    Raises:
      ConfigError: the rows fit no network, the cache does not hold one batch, a minibatch does not divide among the
        devices, or the memory does not fit them.
      MismatchError: workdir holds the checkpoint of another experience or network.
    """

    _publisher_type = WeightsPublisher

    def __init__(
        self,
        config: config_dict.ConfigDict,
        spec: ExperienceSpec,
        link: Any,
        metrics: MetricsWriter,
        workdir: Path,
        stop: threading.Event,
        epoch: int,
    ):
        self._config, self._spec, self._link, self._metrics = config, spec, link, metrics
        self._workdir, self._stop, self._epoch = workdir, stop, epoch
        mesh = devices.make_mesh(config)
        minibatches, batch_size = int(config.learner.minibatches_per_pull), int(config.learner.batch_size)
        batch_rows = 2 * spec.stack * minibatches * batch_size
        # Replay holds a row for each transition and those of episodes' ends; rows that it has let go of linger until
        # they are the least recently used.
        useful_rows = config.replay.capacity * 3 // 2 + batch_rows
        capacity = device_cache.capacity_rows(config.learner.cache_bytes, spec, batch_rows, useful_rows)
        self._shape = train_step.BatchShape(minibatches, batch_size, capacity)

        network = networks.make_network(spec, config)
        optimizer = dqn.make_optimizer(config)
        shapes = devices.weights_shapes(network, spec)
        devices.check_weights_size(shapes)
        count = 1 if mesh is None else mesh.size
        memory = devices.measure(shapes, optimizer, spec, config, capacity, count)
        devices.announce(memory, capacity, mesh, config)
        params = networks.init_params(network, spec, config.seed)
        self._state = dqn.init_state(params, optimizer, config.seed)
        restored = checkpoints.restore(workdir, self._state, spec, config)
        version = 0
        if restored is not None:
            # Copies on the device: what it donates must be its own.
            self._state = jax.tree_util.tree_map(lambda leaf: jnp.array(leaf, copy=True), restored[0])
            version = restored[1].version
            # Whatever a clock set back says, these weights must win over those of the learner that wrote it.
            self._epoch = max(epoch, restored[1].epoch + 1)
            logging.info("going on from the checkpoint of update %d", restored[1].step)
        self._state = devices.replicate(self._state, mesh)
        self.updates = int(self._state.updates)
        self._tally = _Tally(int(self._state.skipped))

        self._cache = device_cache.DeviceCache(capacity, spec.row_shape, spec.row_dtype, devices.replicated(mesh))
        self._cache.compile(batch_rows, AUDITED_ROWS)
        self._train_step: Any = train_step.make_train_step(dqn.make_update(network, optimizer, config), mesh)
        self._pace = pacing.Pace(float(config.learner.updates_per_s))
        self._transfer_pace = pacing.transfer_pace(config)
        self._reuse, outage_draws = float(config.learner.reuse), float(config.learner.outage_draws)
        kept = capacity if self._reuse or outage_draws else 0
        self._reserve = Reserve(kept, spec.stack, float(config.replay.priority_exponent), config.seed)
        self._allowance = Allowance(outage_draws)
        self._reuse_due = 0.0  # batches
        self._reused_updates = self._reserve_updates = 0  # on what is held: while batches come, and while none do
        self._reserve_began_at: int | None = None  # of the latter, in the present outage; None: there is none
        self._arrivals = scoring.ArrivalTally() if config.metrics.score_transfers else None
        self._score: Any = scoring.make_batch_score(spec, config)
        self._copy_state = jax.jit(lambda state: jax.tree_util.tree_map(jnp.copy, state))
        self._publisher = self._publisher_type(link, config, self._epoch, version)
        self._saver: NewestOnly[tuple[dqn.TrainState, checkpoints.Progress]] = NewestOnly("checkpoints", self._save)
        self._failed_checkpoints = 0
        self._cache_resets = 0
        self._resetting = False
        self._site_stats: dict[str, float] = {}
        logging.info(
            "learner on %s: %d weights, cache of %d rows (%.0f MiB)",
            jax.devices()[0].device_kind,
            sum(leaf.size for leaf in jax.tree_util.tree_leaves(params)),
            capacity,
            capacity * spec.row_bytes / 2**20,
        )

    @property
    def compilations(self) -> int:
        """Programs compiled so far for the loop; constant once every size has been seen."""
        return self._train_step._cache_size() + self._cache.compilations

    def run(self) -> None:
        """Trains to the end.

        Raises:
          Refused, DeadlineExceeded, MismatchError, Corruption, WorkerFailed: training can't go on; it is saved.
        """
        shape, mark_first = self._shape, self._arrivals is not None
        self._link.open(shape.cache_rows, shape.batch_size, shape.minibatches, self._epoch, mark_first)
        try:
            self._publisher.submit(self._state.params)
            self._loop()
        except Stopped:
            logging.info("learner stopped at update %d", self.updates)
        except LonghaulError:
            with contextlib.suppress(LonghaulError):
                self._finish()
            raise
        self._finish()

    # ---- the loop

    def _loop(self) -> None:
        learner, metrics_period_s = self._config.learner, self._config.metrics.period_s
        max_updates, publish_period_updates = learner.max_updates, learner.publish_period_updates
        checkpoint_period_s = learner.checkpoint_period_s
        published_at, saved_s = self.updates, time.monotonic()
        in_flight: _InFlight | None = None
        self._tally.begin()
        while self.updates < max_updates and not self._stop.is_set():
            newest = self._hand_over(in_flight is not None)
            if in_flight is not None:
                self._settle(in_flight)
            in_flight = newest
            self._publisher.check()
            now_s = time.monotonic()
            if self.updates - published_at >= publish_period_updates and now_s >= self._publisher.not_before_s:
                self._publisher.submit(self._state.params)
                published_at = self.updates
            if now_s - saved_s >= checkpoint_period_s:
                self._saver.submit((self._copy_state(self._state), self._progress()))
                saved_s = now_s
            if now_s - self._tally.started_s >= metrics_period_s:
                self._write_metrics()
        if in_flight is not None:
            self._settle(in_flight)

    def _hand_over(self, busy: bool) -> _InFlight | None:
        """Hands the device what is next; None if that is nothing. Waits for it a while, unless the device is busy."""
        ahead_s = self._pace.delay_s()
        if ahead_s == 0 and self._reuse_due >= 1:
            self._reuse_due -= 1
            if (reused := self._dispatch_reserve()) is not None:
                self._reused_updates += self._shape.minibatches
                return reused
        ahead_s = max(ahead_s, self._transfer_pace.delay_s())
        if ahead_s > 0:
            if not busy:
                self._stop.wait(min(ahead_s, _WAIT_S))
            return None
        asked_s = time.monotonic()
        batch = self._link.next_batch(0.0 if busy else _WAIT_S)
        if not busy:
            self._tally.idle_s += time.monotonic() - asked_s
        if batch is not None:
            return self._dispatch(batch)
        return self._bridge_outage() if self._link.down else None

    def _dispatch(self, batch: Batch) -> _InFlight | None:
        """Puts a batch's new rows in place and hands it to the device; None if the cache does not hold its rows."""
        train_step.check_batch(batch, self._spec, self._shape)
        self._cache.insert(batch.new_slots, batch.new_rows)
        stamp = self._reserve.rows_written(batch.new_slots)
        if not self._rows_agree(batch):
            return None
        packed = train_step.pack_batch(batch)
        scores = self._score_on_arrival(packed)
        report = self._train(packed)
        self._transfer_pace.count(batch.actions.size)
        self._tally.new_rows += len(batch.new_slots)
        self._site_stats = batch.stats
        if self._reserve_began_at is not None:
            count = self._reserve_updates - self._reserve_began_at
            logging.info("batches come again: %d updates were made without", count)
            self._reserve_began_at = None
        return _InFlight(batch, packed, report, stamp, scores=scores)

    def _bridge_outage(self) -> _InFlight | None:
        """Hands the device a batch of what is held; None if there is no more to be had from it in this outage."""
        held = len(self._reserve)
        if not self._allowance.take(self._shape.minibatches * self._shape.batch_size, held):
            return None
        if (done := self._dispatch_reserve()) is None:
            return None
        if self._reserve_began_at is None:
            self._reserve_began_at = self._reserve_updates
            logging.info("nothing comes from the site: training on with %d transitions held here", held)
        self._reserve_updates += self._shape.minibatches
        return done

    def _dispatch_reserve(self) -> _InFlight | None:
        """Hands a batch of what has crossed before to the device; None if nothing is held."""
        drawn = self._reserve.draw(self._shape.minibatches, self._shape.batch_size)
        if drawn is None:
            return None
        packed, places = drawn
        return _InFlight(None, packed, self._train(packed), places=places)

    def _train(self, packed: np.ndarray) -> jax.Array:
        """Has the device train on a packed batch; returns the report to come."""
        with jax.transfer_guard_host_to_device("allow"):  # the one transfer that is meant, cheaper than device_put
            self._state, report = self._train_step(self._state, self._cache.array, packed)
        self.updates += self._shape.minibatches
        self._pace.count(self._shape.minibatches)
        return report

    def _score_on_arrival(self, packed: np.ndarray) -> jax.Array | None:
        """Returns what the network as it is makes of the batch, float32 [K*B]; None if nobody asks."""
        if self._arrivals is None:
            return None
        with jax.transfer_guard_host_to_device("allow"):
            return self._score(self._state.params, self._cache.array, packed)

    def _settle(self, done: _InFlight) -> None:
        """Waits for a batch's training and sends its priorities back."""
        with jax.transfer_guard_device_to_host("allow"):  # the one transfer back that is meant
            report = np.asarray(done.report)
            if self._arrivals is not None and done.batch is not None and done.scores is not None:
                self._arrivals.add(np.asarray(done.scores), done.batch.first_crossings)
        priorities, figures = train_step.split_report(report, self._shape)
        tally = self._tally
        tally.add(figures)
        if done.batch is None:
            assert done.places is not None
            self._reserve.update(done.places, priorities)
            return
        self._link.ack(done.batch.sequence, priorities)
        self._reserve.add(done.packed, priorities, done.stamp)
        self._allowance.earn(priorities.size)
        self._reuse_due = min(self._reuse_due, 1.0) + self._reuse
        age_s = time.monotonic() - done.batch.received_time_s
        tally.batches += 1
        tally.batch_age_s += age_s
        tally.sample_age_s += age_s + done.batch.stats.get("draw_age_s", 0.0)

    def _rows_agree(self, batch: Batch) -> bool:
        """Returns whether the cache holds this batch's rows; if not, begins anew with an empty cache, once."""
        agree = self._cache.is_filled(batch.slots) and (
            len(batch.audit_slots) == 0 or self._cache.crc32(batch.audit_slots) == batch.audit_crc32
        )
        if agree:
            self._resetting = False
        elif not self._resetting:
            # Batches already on their way were placed by the old mirror: they fail this test too, and are passed over.
            self._resetting = True
            self._cache_resets += 1
            logging.warning(
                "batch %d: the row cache disagrees with the gateway's mirror; it begins anew", batch.sequence
            )
            self._cache.forget()
            self._reserve.forget()
            self._link.reset_cache()
        return agree

    # ---- what leaves the loop

    def _progress(self) -> checkpoints.Progress:
        return checkpoints.Progress(self.updates, self._epoch, self._publisher.version)

    def _save(self, item: tuple[dqn.TrainState, checkpoints.Progress]) -> None:
        try:
            checkpoints.save(self._workdir, item[0], self._spec, self._config, item[1])
        except OSError as error:
            self._failed_checkpoints += 1
            logging.error("no checkpoint at update %d, training goes on: %s", item[1].step, error)

    def _write_metrics(self) -> None:
        tally = self._tally
        elapsed_s = max(time.monotonic() - tally.started_s, 1e-9)
        samples = tally.updates * self._shape.batch_size
        figures = {
            **self._site_stats,
            **self._link.read_stats(),
            **tally.means(),
            **(self._arrivals.read() if self._arrivals is not None else {}),
            "updates": self.updates,
            "updates_per_s": tally.updates / elapsed_s,
            "samples_per_s": samples / elapsed_s,
            "skipped_updates": tally.skipped,
            "target_updates": tally.target_updates,
            # Waiting for the link; what config.learner.updates_per_s holds back is no such time.
            "idle_share": min(1.0, tally.idle_s / elapsed_s),
            "batch_age_s": tally.batch_age_s / tally.batches if tally.batches else np.nan,
            "sample_age_s": tally.sample_age_s / tally.batches if tally.batches else np.nan,
            "new_rows_per_sample": tally.new_rows / samples if samples else np.nan,
            "reserve_updates": self._reserve_updates,
            "reused_updates": self._reused_updates,
            "cache_resets": self._cache_resets,
            "weights_version": self._publisher.version,
            "refused_weights": self._publisher.refused,
            "failed_checkpoints": self._failed_checkpoints,
            "compilations": self.compilations,
        }
        self._metrics.write(self.updates, figures)
        tally.begin()

    def _finish(self) -> None:
        """Publishes and saves what has been learned, and ends the threads."""
        self._publisher.submit(self._state.params)
        self._publisher.close(_CLOSE_TIMEOUT_S)
        self._saver.submit((self._copy_state(self._state), self._progress()))
        self._saver.close(_CLOSE_TIMEOUT_S)
        self._write_metrics()
        if self._failed_checkpoints and not checkpoints.complete_steps(self._workdir):
            raise WorkerFailed(f"no checkpoint could be written to {self._workdir}: see the errors above")
