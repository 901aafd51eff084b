"""The actor: steps environments with an epsilon-greedy policy on the newest weights, and fills the replay.

As in "Distributed Prioritized Experience Replay" (Horgan et al. 2018): every environment stream has an epsilon of its
own from a ladder over the whole site (or from a line down, exploration.py), transitions are n-step, and the first
priority comes from the actor's own Q-values: in the plainest case |R + discount * max_a Q(s_{t+n}, a) - Q(s_t, a_t)| +
config.replay.priority_epsilon (first_priority.py has the others). What s_{t+n} is worth the next acting step computes
anyway, so a transition waits for it; where an episode was truncated and the next one has already begun, one extra call
of the policy, of the same shape, values the last states.

With config.actor.groups the streams are stepped in turns: while the environments of one group are stepped, the device
values the others' states ("Sample Factory", Petrenko et al. 2020, section 3.2, has two groups for the same reason).

A share of the transitions (config.actor.probe_share) goes to the probe instead of the replay, see probe.py.

The actor knows neither the learner nor the link. Without weights it acts on random ones (version 0), without news it
goes on with what it has, and while the replay takes nothing it drops transitions and counts them.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import config_dict

from longhaul import env as env_lib
from longhaul.errors import Corruption, Stopped
from longhaul.exploration import Exploration
from longhaul.first_priority import Acted, FirstPriority
from longhaul.inserter import Inserter
from longhaul.metrics import MetricsWriter
from longhaul.nstep import NStepAccumulator
from longhaul.pacing import Pace
from longhaul.policy import Policy
from longhaul.probe import ProbeWriter
from longhaul.row_ids import RowIds
from longhaul.site_client import SiteClient
from longhaul.streams import Events, Streams
from longhaul.types import ExperienceSpec, NStepTransition, Snapshot, TransitionWriter

_MAX_PRIORITY = 1e38  # returns are stored as float32
_LONGEST_WAIT_S = 0.2  # for the next step's time, before the other duties
_PAUSE_LOOK_S = 0.02  # between looks at whether the site still asks to wait


class _Held(NamedTuple):
    """A transition that waits for its priority."""

    stream: int  # of its group
    transition: NStepTransition
    acted: Acted
    policy_version: int


class _Group:
    """Some of the actor's streams, one after the other, that are stepped together."""

    def __init__(
        self,
        config: config_dict.ConfigDict,
        spec: ExperienceSpec,
        actor_index: int,
        first: int,
        count: int,
        stop: threading.Event,
    ):
        self.first = first  # stream of the actor's
        self.count = count
        self.streams = Streams(config, actor_index, stop, first, count)
        self.accumulators = [NStepAccumulator(spec.n_step, spec.gamma, spec.stack) for _ in range(count)]
        # Per stream, (what was acted, policy version) of the steps whose transition is still to come, oldest first.
        self.acted: list[deque[tuple[Acted, int]]] = [deque() for _ in range(count)]
        self.held: list[_Held] = []
        self.stacks = np.zeros((count, spec.stack, *spec.row_shape), spec.row_dtype)
        self.all = np.arange(count)
        self.begun: Any = None  # values of the present stacks, begun while Python had other work

    def push_rows(self, rows: np.ndarray, valid: np.ndarray) -> None:
        """Puts the newest rows of the streams where an action was taken onto their stacks."""
        stacks = self.stacks
        if len(valid) == len(stacks):
            stacks[:, :-1] = stacks[:, 1:]
            stacks[:, -1] = rows
        else:
            stacks[valid, :-1] = stacks[valid, 1:]
            stacks[valid, -1] = rows[valid]


class _Progress:
    """What happened since the last metrics line, and in all."""

    def __init__(self) -> None:
        self.env_steps = 0
        self.episodes = 0
        self.returns: list[float] = []
        self.lengths: list[int] = []
        self.paused_s = 0.0
        self.refused_transitions = 0
        self.refused_weights = 0
        self.line_time_s = time.monotonic()
        self.line_env_steps = 0

    def add_episodes(self, episodes: list[tuple[float, int]]) -> None:
        for episode_return, length in episodes:
            self.episodes += 1
            self.lengths.append(length)
            if math.isfinite(episode_return):  # one bad reward must not blank the figure of the others
                self.returns.append(episode_return)

    def line(self, now_s: float) -> dict[str, float]:
        """Returns the figures, and begins a new period."""
        period_s = max(now_s - self.line_time_s, 1e-9)
        figures = {
            "env_steps": float(self.env_steps),
            "env_steps_per_s": (self.env_steps - self.line_env_steps) / period_s,
            "episodes": float(self.episodes),
            "paused_s": self.paused_s,
            "refused_transitions": float(self.refused_transitions),
            "refused_weights": float(self.refused_weights),
        }
        if self.returns:
            figures["episode_return"] = sum(self.returns) / len(self.returns)
        if self.lengths:
            figures["episode_length"] = sum(self.lengths) / len(self.lengths)
        self.returns, self.lengths = [], []
        self.line_time_s, self.line_env_steps = now_s, self.env_steps
        return figures


class Actor:
    """One actor process's work.

    Args:
      config: whole configuration.
      actor_index: from 0 to config.actor.num_actors - 1; decides seeds and the part of the epsilon ladder.
      site: the gateway's client, not yet announced; `run` announces and starts it, its maker closes it.
      metrics: where a line goes each config.metrics.period_s; its step is environment steps.
      stop: ends `run`.
      open_writer: makes the replay's writer; its arguments are those of `Inserter`.
      workdir: the run's folder, for the probe; only needed with config.actor.probe_share.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        actor_index: int,
        site: SiteClient,
        metrics: MetricsWriter,
        stop: threading.Event,
        open_writer: Callable[..., TransitionWriter] = Inserter,
        workdir: Path | None = None,
    ):
        self._config = config
        self._site = site
        self._metrics = metrics
        self._stop = stop
        self._open_writer = open_writer
        self._spec = spec = env_lib.make_spec(config)
        count = config.env.num_envs // config.actor.groups
        firsts = range(0, config.env.num_envs, count)
        self._groups = [_Group(config, spec, actor_index, first, count, stop) for first in firsts]
        self._policy = Policy(spec, config, count, noise_seed=actor_index)
        self._exploration = Exploration(config, actor_index)
        self._first_priority = FirstPriority(config)
        # Apart from the environments' seeds, which come from config.seed alone.
        self._rng = np.random.default_rng([config.seed % 2**64, actor_index])
        self._row_ids = RowIds()
        self._metrics_period_s = float(config.metrics.period_s)
        self._snapshot: Snapshot | None = None
        self._adopted: tuple[int, int] = (0, 0)  # (epoch, version) acted on
        self._adopted_time_s = 0.0
        self._progress = _Progress()
        self._writer: TransitionWriter | None = None
        self._pace = Pace(float(config.actor.steps_per_s))
        # The oldest row of a transition's first stack, up to the row it bootstraps from, and the next episode's first
        # row, which may be there before the transition is written.
        self._keep_rows = spec.stack + spec.n_step + 1
        self._probe: ProbeWriter | None = None
        if config.actor.probe_share and workdir is not None:
            seed = [config.seed % 2**64, actor_index, 1]  # apart from the actions'
            share = float(config.actor.probe_share)
            self._probe = ProbeWriter(workdir, f"actor_{actor_index}", spec, share, seed, self._keep_rows)

    def run(self) -> None:
        """Acts until the stop event is set, then returns.

        Raises:
          WorkerFailed: environments keep failing.
          MismatchError, Refused: the gateway won't have this actor.
        """
        try:
            self._site.announce(self._spec)
            self._site.start()
            config = self._config.actor
            self._writer = self._open_writer(
                self._site,
                self._spec,
                self._config.env.num_envs,
                self._keep_rows,
                config.max_pending_items,
                config.write_timeout_s,
            )
            self._begin_all()
            while not self._stop.is_set():
                if self._pace.wait(self._stop, _LONGEST_WAIT_S) and not self._paused():
                    self._look_for_weights()
                    self._act()
                self._report_if_due()
        except Stopped:
            logging.info("the actor was stopped after %d environment steps", self._progress.env_steps)
        finally:
            self._close()

    def _begin_all(self) -> None:
        """Makes the environments and begins their first episodes."""
        for group in self._groups:
            self._begin(group, group.streams.start())

    def _act(self) -> None:
        """One step of all streams."""
        for group in self._groups:
            self._act_in(group)

    def _act_in(self, group: _Group) -> None:
        """One step of a group's streams: values, actions, transitions."""
        q_values = self._policy.q_values(group.stacks) if group.begun is None else np.asarray(group.begun)
        group.begun = None
        if group.held:
            self._write_held(group, self._first_priority.state_values(q_values))
        epsilons = self._exploration.epsilons(self._progress.env_steps)[group.first : group.first + group.count]
        random = self._rng.random(group.count) < epsilons
        actions = np.where(
            random, self._rng.integers(self._spec.num_actions, size=group.count), q_values.argmax(axis=1)
        )
        events = group.streams.step(actions)
        valid = group.all if events.valid.all() else np.flatnonzero(events.valid)
        group.push_rows(events.next_rows, valid)
        broken = bool(events.failed.any() or events.started.any())
        if not broken:
            # The device values the next stacks while the transitions are put together, and other groups are stepped.
            group.begun = self._policy.begin(group.stacks)
        self._add_steps(group, events, valid, actions, q_values)
        if broken:
            for stream in np.flatnonzero(events.failed).tolist():
                group.accumulators[stream].abandon()
                group.acted[stream].clear()
            if events.started.any():
                self._value_last_states(group, events)
                self._begin(group, events)
            group.begun = self._policy.begin(group.stacks)
        self._progress.add_episodes(events.episodes)

    def _add_steps(
        self, group: _Group, events: Events, valid: np.ndarray, actions: np.ndarray, q_values: np.ndarray
    ) -> None:
        """Hands rows and steps of the streams where an action was taken to the writer and the accumulators."""
        rows = events.next_rows
        version = self._adopted[1]
        all_acted = self._first_priority.acted(q_values, actions)
        columns = actions.tolist(), events.rewards.tolist(), events.terminated.tolist(), events.truncated.tolist()
        for stream in valid.tolist():
            row_id = self._row_ids.take()
            self._add_row(group.first + stream, row_id, rows[stream])
            acted = group.acted[stream]
            acted.append((all_acted[stream], version))
            step = [column[stream] for column in columns]
            for transition in group.accumulators[stream].step(*step, row_id):
                group.held.append(_Held(stream, transition, *acted.popleft()))
        self._progress.env_steps += len(valid)
        self._pace.count(len(valid))

    def _value_last_states(self, group: _Group, events: Events) -> None:
        """Writes what still waits in streams that begin anew, before their stacks are overwritten.

        Needs the policy only for truncated episodes: after a termination nothing is bootstrapped, and in mode
        next_step the acting call of the reset step has valued the last states.
        """
        if not group.held:
            return
        values = [0.0] * group.count
        if any(held.transition.discount and events.started[held.stream] for held in group.held):
            values = self._first_priority.state_values(self._policy.q_values(group.stacks))
            self._write_held(group, values)
            return
        waiting, group.held = group.held, []
        for held in waiting:
            if events.started[held.stream]:
                self._write(group, held, 0.0)
            else:
                group.held.append(held)

    def _begin(self, group: _Group, events: Events) -> None:
        """Starts the episodes that begin."""
        for stream in np.flatnonzero(events.started).tolist():
            row_id = self._row_ids.take()
            row = events.first_rows[stream]
            self._add_row(group.first + stream, row_id, row)
            group.accumulators[stream].start(row_id)
            group.stacks[stream] = row

    def _add_row(self, stream: int, row_id: int, row: np.ndarray) -> None:
        assert self._writer is not None
        self._writer.add_row(stream, row_id, row)
        if self._probe is not None:
            self._probe.add_row(stream, row_id, row)

    def _write_held(self, group: _Group, values: list[float]) -> None:
        """Writes all that waits; values[stream] is what the state is worth that its transitions bootstrap from."""
        waiting, group.held = group.held, []
        for held in waiting:
            self._write(group, held, values[held.stream])

    def _write(self, group: _Group, held: _Held, value: float) -> None:
        """Writes one transition with its first priority, unless it is not finite as a float32: Reverb would take it."""
        assert self._writer is not None
        transition = held.transition
        priority = self._first_priority.priority(held.acted, transition.n_step_return, transition.discount, value)
        if not priority <= _MAX_PRIORITY:
            self._progress.refused_transitions += 1
            return
        stream = group.first + held.stream
        if self._probe is not None and self._probe.takes(stream, transition):
            return
        self._writer.add_transition(stream, transition, held.policy_version, priority)

    def _look_for_weights(self) -> None:
        """Adopts what the gateway holds if that is not what is held here, be it newer or, after its restart, older."""
        snapshot = self._site.newest_weights()
        if snapshot is None or snapshot is self._snapshot:
            return
        known, self._snapshot = self._snapshot, snapshot
        if known is not None and (known.epoch, known.version) == (snapshot.epoch, snapshot.version):
            return
        try:
            self._policy.adopt(snapshot.payload)
            for group in self._groups:
                if group.begun is not None:
                    np.asarray(group.begun)  # of the weights before: not used, but must not read the stacks any more
                    group.begun = None
        except Corruption as error:
            self._progress.refused_weights += 1
            logging.warning("weights %d of epoch %d refused: %s", snapshot.version, snapshot.epoch, error)
            return
        self._adopted = (snapshot.epoch, snapshot.version)
        self._adopted_time_s = time.monotonic()

    def _paused(self) -> bool:
        """Waits a little if the gateway asks actors to."""
        if not self._site.paused:
            return False
        began_s = time.monotonic()
        self._stop.wait(_PAUSE_LOOK_S)
        self._progress.paused_s += time.monotonic() - began_s
        return True

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s - self._progress.line_time_s >= self._metrics_period_s:
            self._report(now_s)

    def _report(self, now_s: float) -> None:
        assert self._writer is not None
        figures: dict[str, Any] = self._progress.line(now_s)
        figures["env_failures"] = sum(group.streams.total_failures for group in self._groups)
        figures["weights_epoch"], figures["weights_version"] = self._adopted
        if self._adopted_time_s:
            figures["weights_age_s"] = now_s - self._adopted_time_s
        epsilons = self._exploration.epsilons(self._progress.env_steps)
        figures["epsilon_min"], figures["epsilon_max"] = float(epsilons.min()), float(epsilons.max())
        if self._probe is not None:
            figures["probe_transitions"] = self._probe.held_out
        figures.update(self._writer.counters)
        self._metrics.write(self._progress.env_steps, figures)

    def _close(self) -> None:
        with contextlib.ExitStack() as closing:  # one that fails must not keep the others open
            for group in self._groups:
                closing.callback(group.streams.close)
            if self._writer is not None:
                closing.callback(lambda: self._report(time.monotonic()))  # of what has gone out in the end
                closing.callback(self._writer.close)
