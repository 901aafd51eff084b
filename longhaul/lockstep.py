"""Actor, replay and learner in lock-step in one thread: the same run twice is the same to the last bit.

Of a run's processes none waits for another in the same place twice: which weights acted, what stood in the table at a
draw and on which priorities, is decided by the clock. Here the learner's wish for a batch drives everything. Has the
batch before not been acknowledged, there is none; then the actor steps until the replay ratio allows a draw; and what
is published reaches the actor before its next step. Actor and learner are those of any run, with what they do in
threads of their own done at once. No clock decides anything: figures and checkpoints are written by time as ever, and
leave no trace in the losses.

What differs from a run of processes: the window is one batch, so that every batch is drawn on the priorities that the
one before it has brought, and there is no link. Rows, priorities and weights are rounded and placed as on the link.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from ml_collections import config_dict

from longhaul import codec, dqn, train_step
from longhaul import env as env_lib
from longhaul.actor import Actor
from longhaul.crossings import Crossings
from longhaul.errors import Stopped
from longhaul.learner import Learner
from longhaul.metrics import MetricsWriter
from longhaul.mirror import Mirror
from longhaul.seeded_replay import SeededReplay
from longhaul.types import Batch, ExperienceSpec, Params, Snapshot
from longhaul.weights_publisher import WeightsPublisher

# Between evaluations; what is evaluated are weights that the actor acts on, the first, random ones among them.
EVALUATION_PERIOD_PUBLICATIONS = 10

_EPOCH = 1
_MAX_PRIORITY = 1e9  # as at a site, see session.py
# Draws stand apart from an actor's actions, seeded with [seed, actor], and from its probe's, [seed, actor, 1].
_DRAWS_STREAM = (0, 2)

# Is given weights to evaluate; says whether they are good enough to end the run.
Judge = Callable[[Snapshot], bool]


class LossFile:
    """Figures of every update as a table, `update` and then `dqn.METRICS`, each float32 by its shortest exact text.

    Args:
      path: of the .csv file, made anew.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w")  # noqa: SIM115 (closed by close())
        self._file.write(",".join(("update", *dqn.METRICS)) + "\n")

    def write(self, first_update: int, figures: np.ndarray) -> None:
        """Appends a line for each of float32 [K, F]; the first is that of update `first_update`, from 1."""
        for update, row in enumerate(figures, first_update):
            self._file.write(",".join((str(update), *map(str, row))) + "\n")

    def close(self) -> None:
        """Writes out what is left."""
        self._file.close()

    def __enter__(self) -> "LossFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Site:
    """The gateway's client as far as an actor in lock-step asks for it."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def newest_weights(self) -> Snapshot | None:
        return self.snapshot


class SteppedActor(Actor):
    """An actor whose steps are taken one by one, by whoever calls, into a replay beside it.

    Args:
      config, metrics, stop, workdir: see Actor.
    """

    def __init__(self, config: config_dict.ConfigDict, metrics: MetricsWriter, stop: threading.Event, workdir: Path):
        self.site = _Site()
        super().__init__(config, 0, self.site, metrics, stop, workdir=workdir)  # type: ignore[arg-type]
        seed = [config.seed % 2**64, *_DRAWS_STREAM]
        self.replay = SeededReplay(self._spec, config.replay, config.env.num_envs, self._keep_rows, seed)

    def begin(self) -> None:
        """Makes the environments and begins their first episodes."""
        self._writer = self.replay
        self._begin_all()

    def step(self) -> None:
        """One step of all streams, on the newest weights."""
        self._look_for_weights()
        self._act()
        self._report_if_due()

    def close(self) -> None:
        """Closes the environments."""
        self._close()


class LockstepLink:
    """What a learner takes for its LinkClient: draws from the actor's replay, and drives the actor meanwhile.

    Args:
      config: whole configuration.
      spec: of the experience.
      actor: begun.
      stop: next_batch raises Stopped once it is set.
      judge: is given each tenth snapshot, from the first; where it says so the run is over.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        spec: ExperienceSpec,
        actor: SteppedActor,
        stop: threading.Event,
        judge: Judge,
    ):
        self._config, self._spec, self._actor, self._stop, self._judge = config, spec, actor, stop, judge
        self._replay = actor.replay
        self._shape = (0, 0)
        self._mirror = Mirror(1)
        self._crossings: Crossings | None = None
        self._sequence = 0
        self._in_flight: np.ndarray | None = None  # keys of the batch that is not acknowledged
        self._to_judge: Snapshot | None = None

    down = False  # see LinkClient

    def open(self, cache_rows: int, batch_size: int, minibatches: int, epoch: int, mark_first: bool = False) -> None:
        """See LinkClient."""
        self._shape = (minibatches, batch_size)
        self._mirror = Mirror(cache_rows)
        self._crossings = Crossings(2 * self._config.replay.capacity) if mark_first else None

    def next_batch(self, timeout_s: float) -> Batch | None:
        """Returns the next batch, None while the one before is not acknowledged; the timeout is not looked at.

        Raises:
          Stopped: the stop event is set, or the judge is content.
          WorkerFailed: environments keep failing.
        """
        if self._in_flight is not None:
            return None
        if self._to_judge is not None:
            snapshot, self._to_judge = self._to_judge, None
            if self._judge(snapshot):
                raise Stopped("the weights are good enough")
        # Without a ratio nothing says how often the actor steps: then once for each batch.
        acted = bool(self._config.replay.samples_per_insert)
        while not (acted and self._replay.may_draw):
            if self._stop.is_set():
                raise Stopped("the run was stopped")
            self._actor.step()
            acted = True
        return self._draw()

    def _draw(self) -> Batch:
        drawn = self._replay.draw(self._shape[0] * self._shape[1])
        self._sequence += 1
        self._in_flight = drawn.keys
        placement = self._mirror.place(self._sequence, drawn.row_ids)
        first = self._crossings.mark(drawn.keys).reshape(self._shape) if self._crossings else np.zeros(0, np.bool_)
        return Batch(
            sequence=self._sequence,
            slots=placement.slots.reshape(*self._shape, -1),
            actions=drawn.actions.reshape(self._shape),
            returns=drawn.returns.reshape(self._shape),
            discounts=drawn.discounts.reshape(self._shape),
            probabilities=drawn.probabilities.astype(np.float32).reshape(self._shape),
            table_size=drawn.table_size,
            new_slots=placement.new_slots,
            new_rows=self._replay.rows(drawn.row_ids.reshape(-1)[placement.new_places].tolist()),
            received_time_s=time.monotonic(),
            audit_slots=np.zeros(0, np.int32),
            audit_crc32=0,
            stats={
                "inserts": self._replay.inserts,
                "samples": self._replay.samples,
                "policy_version": float(drawn.policy_versions.mean()),
                "mean_priority": float(drawn.priorities.mean()),
            },
            first_crossings=first,
        )

    def ack(self, sequence: int, priorities: np.ndarray) -> None:
        """Sets the priorities of the batch in flight, float32 [K, B], rounded as config.link.priority_bytes has it."""
        keys, self._in_flight = self._in_flight, None
        assert keys is not None and sequence == self._sequence, "an Ack without its batch"
        width = self._config.link.priority_bytes
        rounded = codec.unpack_priorities(codec.pack_priorities(priorities, width), width, len(keys))
        good = np.isfinite(rounded) & (rounded >= 0)
        self._replay.update_priorities(keys[good], np.minimum(rounded[good], _MAX_PRIORITY))
        self._mirror.confirm(sequence)

    def publish(self, snapshot: Snapshot) -> None:
        """Hands weights to the actor, for its next step."""
        self._actor.site.snapshot = snapshot
        if (snapshot.version - 1) % EVALUATION_PERIOD_PUBLICATIONS == 0:
            self._to_judge = snapshot

    def reset_cache(self) -> None:
        """Never asked for: this mirror and its learner can't lose each other."""
        raise AssertionError("the row cache disagrees with its mirror in one process")

    def read_stats(self) -> dict[str, float]:
        """Returns figures for metrics."""
        return {"window": 1, "link_samples": self._replay.samples}


class _PublisherAtOnce(WeightsPublisher):
    """Publishes in the learner's own thread: in another, newer weights may overtake older ones, or not."""

    def submit(self, params: Params) -> None:
        self._publish(self._copy(params))


class LockstepLearner(Learner):
    """A learner without threads that matter to what it learns, which records every update.

    Args:
      learner_arguments: see Learner.
      losses: where each update's figures go.
    """

    _publisher_type = _PublisherAtOnce

    def __init__(self, *learner_arguments: Any, losses: LossFile):
        super().__init__(*learner_arguments)
        self._losses = losses
        self._recorded = self.updates

    def _settle(self, done: Any) -> None:
        super()._settle(done)
        with jax.transfer_guard_device_to_host("allow"):
            _, figures = train_step.split_report(np.asarray(done.report), self._shape)
        self._losses.write(self._recorded + 1, figures)
        self._recorded += len(figures)


def train(
    config: config_dict.ConfigDict,
    workdir: Path,
    losses: LossFile,
    learner_metrics: MetricsWriter,
    actor_metrics: MetricsWriter,
    stop: threading.Event,
    judge: Judge,
) -> Snapshot:
    """Trains until config.learner.max_updates, until the judge is content or until stopped; saves a checkpoint.

    Args:
      config: whole configuration; one actor acts, whatever it says.
      workdir: the run's folder.
      losses: where each update's figures go.
      learner_metrics: the learner's.
      actor_metrics: the actor's.
      stop: an orderly end.
      judge: evaluates weights now and then, see LockstepLink.

    Returns:
      The weights published last, those of the last update.

    Raises:
      ConfigError: environment, network or cache can't be made.
      WorkerFailed: environments keep failing.
    """
    actor = SteppedActor(config, actor_metrics, stop, workdir)
    try:
        actor.begin()
        spec = env_lib.make_spec(config)
        link = LockstepLink(config, spec, actor, stop, judge)
        LockstepLearner(config, spec, link, learner_metrics, workdir, stop, _EPOCH, losses=losses).run()
        assert actor.site.snapshot is not None, "a learner publishes before its first batch"
        return actor.site.snapshot
    finally:
        actor.close()
