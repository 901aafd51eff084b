"""The learner's loop on batches made in memory: what it trains on, sends back, publishes, saves and refuses."""

import logging
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import codec, dqn, networks, train_step
from longhaul.errors import ConfigError, Corruption, MismatchError
from longhaul.learner import Learner
from longhaul.metrics import MetricsWriter, read_jsonl
from longhaul.types import ExperienceSpec
from tests.memory_link import SPEC, MemoryLink, Opened, Run, assert_same, make_config, poison, writers_closed  # noqa: F401 (a fixture)
from tests.strict_jax import strict  # noqa: F401 (a fixture)

# ---- training


def test_every_batch_is_trained_on_and_acknowledged_in_order(tmp_path):
    run = Run(tmp_path)
    assert run.learner.updates == 40 and int(run.state.updates) == 40
    assert run.link.opened == Opened(run.learner._shape.cache_rows, 8, 2, 1)
    assert [sequence for sequence, _ in run.link.acks] == list(range(1, 21))
    for _, priorities in run.link.acks:
        assert priorities.shape == (2, 8) and priorities.dtype == np.float32
        assert np.isfinite(priorities).all() and (priorities >= 1e-3).all()


def test_the_loop_trains_as_the_update_alone_does_on_the_same_rows(tmp_path):
    batches = []
    rows = {}

    def keep(batch):
        batches.append(batch)
        rows[batch.sequence] = run.link.rows.copy()
        return batch

    run = Run(tmp_path, start=False, change=keep)
    run.learner.run()
    network = networks.make_network(SPEC, run.config)
    optimizer = dqn.make_optimizer(run.config)
    state = dqn.init_state(networks.init_params(network, SPEC, run.config.seed), optimizer, run.config.seed)
    update = jax.jit(dqn.make_update(network, optimizer, run.config))
    for (_, sent_back), batch in zip(run.link.acks, batches):
        for k in range(2):
            minibatch = dqn.Minibatch(*(jnp.array(getattr(batch, name)[k]) for name in dqn.Minibatch._fields))
            state, priorities, _ = update(state, jnp.array(rows[batch.sequence]), minibatch)
            np.testing.assert_allclose(sent_back[k], priorities, rtol=1e-4, atol=1e-6)
    for x, y in zip(jax.tree_util.tree_leaves(state), jax.tree_util.tree_leaves(run.state)):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_losses_are_the_same_however_many_batches_wait_and_whoever_reuses_their_memory(tmp_path):
    runs = [
        Run(tmp_path / name, window=window, reuse_buffers=reuse)
        for name, window, reuse in (("one", 1, False), ("eight", 8, False), ("lent", 8, True))
    ]
    for run in runs[1:]:
        for (_, priorities), (_, expected) in zip(run.link.acks, runs[0].link.acks):
            np.testing.assert_array_equal(priorities, expected)
        assert_same(run.state, runs[0].state)


def test_priorities_of_a_batch_do_not_wait_for_one_that_is_not_there(tmp_path):
    acks_when_asked = []

    class Slow(MemoryLink):
        def next_batch(self, timeout_s):
            acks_when_asked.append((self.handed_out - len(self.acks), timeout_s))
            return super().next_batch(timeout_s)

    stop = threading.Event()
    link = Slow(stop, window=1)
    learner = Learner(make_config(), SPEC, link, MetricsWriter(None, "learner"), tmp_path, stop, 1)
    learner.run()
    # With a batch on the device it looks without waiting, and it waits only once all is acknowledged.
    assert all(timeout_s == 0 for in_flight, timeout_s in acks_when_asked if in_flight)
    assert all(timeout_s > 0 for in_flight, timeout_s in acks_when_asked if not in_flight)
    assert max(in_flight for in_flight, _ in acks_when_asked) == 1


def test_no_transfer_happens_in_the_loop_that_is_not_meant(tmp_path):
    run = Run(tmp_path, start=False)
    with jax.transfer_guard("disallow"):
        run.learner.run()
    assert run.learner.updates == 40


@pytest.mark.parametrize("row_shape, row_dtype", [((4,), "float32"), ((36, 36), "uint8")])
def test_programs_and_arrays_stay_the_same_in_number_under_ragged_batches_and_publishing(
    tmp_path, row_shape, row_dtype
):
    spec = ExperienceSpec("Test-v0", row_shape, row_dtype, stack=2, num_actions=3, n_step=1, gamma=0.9)
    seen = []

    def look(batch):
        if batch.sequence in (40, 80):
            run.learner._publisher.close(10)
            run.learner._publisher.__init__(run.link, run.config, 1, run.learner._publisher.version)
            seen.append((run.learner.compilations, len(jax.live_arrays())))
        return batch

    config = make_config(**{"learner.max_updates": 160, "learner.publish_period_updates": 1, "learner.batch_size": 2})
    run = Run(tmp_path, config, start=False, spec=spec, change=look, new_rows=(1, 30), window=1)
    run.learner.run()
    (programs, arrays), (programs_later, arrays_later) = seen
    assert programs == programs_later <= 6
    assert arrays_later <= arrays + 2


def test_images_train_too(tmp_path):
    spec = ExperienceSpec("Test-v0", (36, 36), "uint8", stack=2, num_actions=3, n_step=1, gamma=0.9)
    run = Run(tmp_path, make_config(**{"learner.max_updates": 6}), spec=spec)
    assert run.learner.updates == 6 and int(run.state.skipped) == 0


# ---- outages


class _Cut(MemoryLink):
    """Goes down after some batches, for a number of looks."""

    def __init__(self, *args, after=10, looks=30, **settings):
        super().__init__(*args, **settings)
        self._after, self._looks = after, looks
        self.waits = []

    def next_batch(self, timeout_s):
        self.down = self.handed_out == self._after and self._looks > 0
        if self.down:
            self._looks -= 1
            self.waits.append(timeout_s)
            return None
        return super().next_batch(timeout_s)


def _run_cut(tmp_path, looks=30, **settings):
    stop = threading.Event()
    link = _Cut(stop, looks=looks, new_rows=(0, 0))
    config = make_config(**{"learner.max_updates": 120, **settings})
    with MetricsWriter(tmp_path, "learner", tensorboard=False) as metrics:
        learner = Learner(config, SPEC, link, metrics, tmp_path, stop, 1)
        learner.run()
    return learner, link, read_jsonl(tmp_path, "learner")[-1]


def test_training_goes_on_from_the_cache_while_the_link_is_down(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    learner, link, last = _run_cut(tmp_path)
    assert learner.updates == int(learner._state.updates) == 120 and int(learner._state.skipped) == 0
    made = learner._reserve_updates
    # 160 transitions have crossed, each for four draws, but only as many as are held.
    assert 2 <= made <= 60 and last["reserve_updates"] == made
    assert len(link.acks) == (120 - made) / 2, "only what the site has sent is acknowledged"
    assert [sequence for sequence, _ in link.acks] == list(range(1, len(link.acks) + 1))
    words = [record.getMessage() for record in caplog.records]
    assert sum("training on with" in line for line in words) == 1
    assert f"batches come again: {made} updates were made without" in words
    assert link.waits[0] == 0  # nothing is waited for while there is something to train on


@pytest.mark.parametrize("reuse", [0.0, 2.0])
def test_what_is_trained_on_meanwhile_is_what_the_cache_holds(tmp_path, reuse):
    drawn = []

    class Watching(Learner):
        def _dispatch_reserve(self):
            done = super()._dispatch_reserve()
            if done is not None:
                drawn.append((done.packed, np.array(self._cache.array)))
            return done

    stop = threading.Event()
    link = _Cut(stop)
    learner = Watching(
        make_config(**{"learner.reuse": reuse}), SPEC, link, MetricsWriter(None, "learner"), tmp_path, stop, 1
    )
    came = {}
    change = link._change

    def keep(batch):
        for slots, value in zip(batch.slots.reshape(-1, 4), batch.returns.reshape(-1)):
            came.setdefault(value.view(np.int32).item(), link.rows[slots].copy())
        return change(batch)

    link._change = keep
    learner.run()
    assert drawn
    for packed, rows in drawn:
        for transition in packed.reshape(-1, packed.shape[-1]):
            np.testing.assert_array_equal(rows[transition[:4]], came[int(transition[5])])


def test_it_waits_where_it_shall(tmp_path):
    _, link, last = _run_cut(tmp_path, looks=5, **{"learner.outage_draws": 0.0})
    assert last["reserve_updates"] == 0 and len(link.acks) == 60
    assert link.waits[-1] > 0


def test_once_enough_has_been_drawn_it_waits_for_the_link(tmp_path):
    _, link, last = _run_cut(tmp_path, **{"learner.outage_draws": 0.5})
    assert 2 <= last["reserve_updates"] <= 10  # 160 have crossed: 80 draws at most, of 8 an update
    assert link.waits[-1] > 0


def test_a_second_outage_soon_after_is_bridged_by_no_more_than_what_crossed_between(tmp_path):
    stop, drawn_after = threading.Event(), []
    link = _Cut(stop, new_rows=(0, 0))

    class Twice(Learner):
        def _dispatch_reserve(self):
            if (done := super()._dispatch_reserve()) is not None:
                drawn_after.append(link.handed_out)
            return done

        def _dispatch(self, batch):
            if link.handed_out == 11:  # the first is over
                link._after, link._looks = 12, 30
            return super()._dispatch(batch)

    config = make_config(**{"learner.outage_draws": 1.0, "learner.max_updates": 120})
    Twice(config, SPEC, link, MetricsWriter(None, "learner"), tmp_path, stop, 1).run()
    assert set(drawn_after) == {10, 12}
    assert drawn_after.count(10) > 2 and 1 <= drawn_after.count(12) <= 2  # two batches, each for one draw


def test_a_site_that_sends_nothing_but_is_there_is_waited_for(tmp_path):
    class Quiet(_Cut):
        def next_batch(self, timeout_s):
            batch = super().next_batch(timeout_s)
            self.down = False
            return batch

    stop = threading.Event()
    learner = Learner(make_config(), SPEC, Quiet(stop, looks=5), MetricsWriter(None, "learner"), tmp_path, stop, 1)
    learner.run()
    assert learner._reserve_updates == 0


# ---- reuse


@pytest.mark.parametrize("reuse, share", [(1.0, 1 / 2), (3.0, 3 / 4), (0.5, 1 / 3), (0.0, 0.0)])
def test_so_many_updates_are_made_on_what_is_held_per_update_on_what_crosses(tmp_path, reuse, share):
    settings = {"learner.reuse": reuse, "learner.max_updates": 240, "learner.outage_draws": 0.0}
    run = Run(tmp_path, make_config(**settings))
    last = run.lines[-1]
    assert last["updates"] == 240 and run.learner._state.updates == 240 and last["skipped_updates"] == 0
    # Two updates a batch; the first has to be trained on before anything of it is held, and the last ends in between.
    assert last["reused_updates"] == pytest.approx(240 * share, abs=2 * (reuse + 2))
    assert len(run.link.acks) == (240 - last["reused_updates"]) / 2, "what crossed, each once"
    assert [sequence for sequence, _ in run.link.acks] == list(range(1, len(run.link.acks) + 1))
    assert last["reserve_updates"] == 0


def test_reuse_is_by_the_priorities_that_training_gave_last(tmp_path):
    given, drawn = {}, []

    class Watching(Learner):
        def _settle(self, done):
            super()._settle(done)
            priorities, _ = train_step.split_report(np.asarray(done.report), self._shape)
            places = done.packed.reshape(-1, done.packed.shape[-1])[:, SPEC.stack - 1]
            given.update(zip(places.tolist(), priorities.reshape(-1).tolist()))

        def _dispatch_reserve(self):
            known = dict(given)
            if (done := super()._dispatch_reserve()) is not None:
                drawn.append((known, done.packed.reshape(-1, done.packed.shape[-1])))
            return done

    stop = threading.Event()
    config = make_config(**{"learner.reuse": 1.0, "learner.max_updates": 200})
    Watching(config, SPEC, MemoryLink(stop, new_rows=(0, 0)), MetricsWriter(None, "learner"), tmp_path, stop, 1).run()
    assert len(drawn) > 40
    column = 2 * SPEC.stack + train_step.SCALARS.index("probabilities")
    for known, packed in drawn:
        probabilities = packed[:, column].copy().view(np.float32)
        masses = (
            np.array([known[place] for place in packed[:, SPEC.stack - 1].tolist()]) ** config.replay.priority_exponent
        )
        np.testing.assert_allclose(probabilities / probabilities.max(), masses / masses.max(), rtol=1e-4)


def test_reuse_waits_for_what_has_a_priority(tmp_path):
    """Batches that leave nothing to draw from, all of priority 0, are trained on without reuse."""
    nothing = {"change": lambda batch: batch._replace(returns=np.full_like(batch.returns, np.nan))}
    run = Run(tmp_path, make_config(**{"learner.reuse": 3.0, "replay.priority_epsilon": 0.0}), **nothing)
    assert run.lines[-1]["updates"] == 40 and run.lines[-1]["reused_updates"] == 0 and len(run.link.acks) == 20


# ---- what does not fit


def change_column(name, function):
    return lambda batch: batch._replace(**{name: function(getattr(batch, name))})


@pytest.mark.parametrize(
    "name, function, error",
    [
        ("returns", lambda x: x[..., None], MismatchError),  # [K, B, 1] would broadcast
        ("returns", lambda x: x.astype(np.float64), MismatchError),
        ("discounts", lambda x: x[:, :4], MismatchError),
        ("actions", lambda x: x.astype(np.int64), MismatchError),
        ("actions", lambda x: x + 3, Corruption),
        ("actions", lambda x: x - 3, Corruption),
        ("slots", lambda x: x + 100_000, Corruption),
        ("slots", lambda x: x - 100_000, Corruption),
        ("slots", lambda x: x[..., :2], MismatchError),
        ("new_rows", lambda x: x.astype(np.float64), MismatchError),
        ("new_rows", lambda x: x[1:], MismatchError),
        ("new_slots", lambda x: np.zeros_like(x), Corruption),
        ("new_slots", lambda x: x - 1, Corruption),
    ],
)
def test_a_batch_of_another_shape_dtype_or_range_is_refused_by_name_and_not_trained_on(tmp_path, name, function, error):
    run = Run(tmp_path, start=False, change=change_column(name, function))
    with pytest.raises(error, match=r"batch 1|cache"):
        run.learner.run()
    assert run.learner.updates == 0 and run.link.acks == []


def test_a_cache_too_small_for_one_batch_is_refused_with_the_size_it_needs(tmp_path):
    needed = 2 * SPEC.stack * 2 * 8 * SPEC.row_bytes
    with pytest.raises(ConfigError, match=rf"config\.learner.cache_bytes.*at least {needed}"):
        Run(tmp_path, make_config(**{"learner.cache_bytes": needed - 1}))


def test_the_cache_never_exceeds_what_replay_can_fill(tmp_path):
    run = Run(tmp_path, make_config(**{"learner.cache_bytes": 2**40}), start=False)
    assert 1000 <= run.learner._cache.capacity <= 2000


def test_a_cache_that_disagrees_with_the_mirror_begins_anew_and_trains_on_no_wrong_row(tmp_path, caplog):
    def audit(batch):
        slots = batch.slots[0, 0].copy()
        checksum = zlib.crc32(run.link.rows[slots].tobytes())
        return batch._replace(audit_slots=slots, audit_crc32=checksum + (batch.sequence == 7))

    run = Run(tmp_path, start=False, change=audit, window=100, limit=12)
    with caplog.at_level(logging.WARNING):
        run.learner.run()
    # The mirror of this link does not begin anew, so that every later batch speaks of rows that are held to be lost.
    assert [sequence for sequence, _ in run.link.acks] == [1, 2, 3, 4, 5, 6]
    assert run.link.resets == 1 and run.lines[-1]["cache_resets"] == 1
    assert len([r for r in caplog.records if "begins anew" in r.getMessage()]) == 1


def test_after_a_reset_training_goes_on_with_the_rows_sent_again(tmp_path):
    def begin_anew(batch):
        if batch.sequence == 3:
            return batch._replace(audit_slots=np.zeros(1, np.int32), audit_crc32=12345)
        if batch.sequence == 5:
            run.link.acks.extend([(3, np.zeros(0)), (4, np.zeros(0))])
            return batch._replace(new_slots=np.arange(200, dtype=np.int32), new_rows=run.link.rows.copy())
        return batch

    run = Run(tmp_path, start=False, change=begin_anew, window=100)
    run.learner.run()
    assert run.link.resets == 1 and run.learner.updates == 40
    np.testing.assert_array_equal(run.learner._cache.read(np.arange(200)), run.link.rows)


@pytest.mark.parametrize("column, value", [("returns", np.nan), ("returns", -np.inf), ("discounts", np.nan)])
def test_a_non_finite_batch_is_skipped_counted_and_spoils_nothing(tmp_path, column, value):
    run = Run(tmp_path, change=poison(3, **{column: value}))
    assert int(run.state.skipped) == 2 and int(run.state.updates) == 40
    assert run.lines[-1]["skipped_updates"] == 2
    for _, priorities in run.link.acks:
        assert np.isfinite(priorities).all() and (priorities > 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree_util.tree_leaves(run.state))
    assert all(np.isfinite(w).all() for w in codec.unpack_weights(run.link.snapshots[-1].payload).values())


def test_zero_probabilities_do_no_harm(tmp_path):
    run = Run(tmp_path, change=poison(None, probabilities=0))
    assert int(run.state.skipped) == 0 and np.isfinite(run.lines[-1]["loss"])


# ---- figures


def test_figures_say_what_happened(tmp_path):
    config = make_config(**{"metrics.period_s": 1e-6})
    run = Run(tmp_path, config, window=1)
    last = [line for line in run.lines if line.get("loss") is not None][-1]
    assert {
        *("updates", "updates_per_s", "samples_per_s", "loss", "loss_unweighted", "mean_abs_td", "grad_norm", "mean_q"),
        *("beta", "skipped_updates", "target_updates", "idle_share", "batch_age_s", "new_rows_per_sample"),
        *("window", "rtt_s", "inserts", "weights_version", "cache_resets", "failed_checkpoints", "compilations"),
    } <= last.keys()
    assert run.lines[-1]["target_updates"] == 4 and run.lines[-1]["inserts"] == 200
    assert last["loss"] <= last["loss_unweighted"]  # weights are at most one
    assert 0 <= last["idle_share"] <= 1 and last["sample_age_s"] >= last["batch_age_s"] + 0.2
    steps = [line["step"] for line in run.lines]
    assert steps == sorted(steps) and steps[-1] == 40


def test_means_leave_out_skipped_minibatches(tmp_path):
    run = Run(tmp_path, change=poison(3, returns=np.nan))
    assert np.isfinite(run.lines[-1]["loss"]) and run.lines[-1]["updates"] == 40


def test_lines_are_written_while_it_waits_for_batches(tmp_path):
    run = Run(tmp_path, make_config(**{"metrics.period_s": 0.01}), start=False)
    written = threading.Event()
    run.link.next_batch = lambda timeout_s: time.sleep(0.01)
    threading.Thread(target=lambda: (written.wait(10), run.stop.set()), daemon=True).start()
    write = run.metrics.write
    run.metrics.write = lambda step, figures: (write(step, figures), written.set())
    run.learner.run()
    assert run.lines[0]["loss"] is None and run.lines[0]["updates_per_s"] == 0
    assert run.lines[0]["idle_share"] > 0.5


def test_a_network_too_large_to_publish_is_refused_at_start_with_the_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "MAX_WEIGHTS_BYTES", 100)
    with pytest.raises(ConfigError, match=r"at most 100 are sent.*config\.agent\.hidden"):
        Run(tmp_path, start=False)
