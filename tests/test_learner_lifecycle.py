"""The learner's publications and checkpoints, its end, and how a second one goes on where the first one stopped."""

import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import checkpoints, codec, networks
from longhaul.errors import MismatchError, Refused
from tests.memory_link import Run, assert_same, make_config, poison, writers_closed  # noqa: F401 (a fixture)
from tests.strict_jax import strict  # noqa: F401 (a fixture)

# ---- publishing


def test_weights_are_published_at_once_then_each_period_then_at_the_end(tmp_path):
    run = Run(tmp_path, make_config(**{"learner.publish_period_updates": 10, "link.weights_dtype": "float32"}), epoch=4)
    assert {snapshot.epoch for snapshot in run.link.snapshots} == {4}
    versions = [snapshot.version for snapshot in run.link.snapshots]
    assert versions == list(range(1, len(versions) + 1)) and 2 <= len(versions) <= 6
    final = codec.unpack_weights(run.link.snapshots[-1].payload)
    for name, leaf in networks.flatten_params(run.state.params).items():
        np.testing.assert_array_equal(final[name], leaf)


def test_the_first_snapshot_is_the_network_before_any_batch(tmp_path):
    config = make_config(**{"link.weights_dtype": "float32"})
    run = Run(tmp_path, config, start=False, limit=1)
    expected = networks.flatten_params(run.state.params)
    published = threading.Event()
    publish, next_batch = run.link.publish, run.link.next_batch
    run.link.publish = lambda snapshot: (publish(snapshot), published.set())
    run.link.next_batch = lambda timeout_s: next_batch(timeout_s) if published.is_set() else time.sleep(0.01)
    run.learner.run()
    for name, leaf in codec.unpack_weights(run.link.snapshots[0].payload).items():
        np.testing.assert_array_equal(leaf, expected[name])


def test_publishing_and_saving_after_every_update_never_meets_a_donated_buffer(tmp_path):
    config = make_config(**{"learner.publish_period_updates": 1, "learner.checkpoint_period_s": 1e-6})
    run = Run(tmp_path, config)
    assert run.learner.updates == 40 and run.lines[-1]["failed_checkpoints"] == 0
    assert len(run.link.snapshots) >= 2 and checkpoints.complete_steps(tmp_path)[-1] == 40


def test_weights_that_are_not_finite_are_counted_and_never_leave(tmp_path):
    run = Run(tmp_path, start=False, limit=3)
    run.learner._state = run.state._replace(params=jax.tree_util.tree_map(lambda x: x * jnp.nan, run.state.params))
    run.learner.run()
    assert run.link.snapshots == [] and run.lines[-1]["refused_weights"] >= 1
    assert run.lines[-1]["skipped_updates"] == 6


def test_bfloat16_halves_the_payload(tmp_path):
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        run = Run(tmp_path / dtype, make_config(**{"link.weights_dtype": dtype, "agent.hidden": (128, 128)}), limit=1)
        sizes[dtype] = len(run.link.snapshots[0].payload)
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]


def test_a_byte_budget_stretches_the_publishing_period(tmp_path):
    settings = {"learner.publish_period_updates": 2, "learner.max_updates": 60}
    run = Run(tmp_path, make_config(**settings, **{"link.weights_budget_bytes_per_s": 0.01}))
    # At a hundredth of a byte a second only the first is within the budget, and the last is owed to whoever waits.
    assert len(run.link.snapshots) <= 3


def test_an_error_of_the_publishing_thread_ends_the_run(tmp_path):
    run = Run(tmp_path, start=False, window=1)

    def refuse(snapshot):
        raise Refused("superseded")

    run.link.publish = refuse
    with pytest.raises(Refused, match="superseded"):
        run.learner.run()


# ---- the end, and going on


def test_stop_ends_in_order_with_a_checkpoint_and_a_last_line(tmp_path):
    run = Run(tmp_path, make_config(**{"learner.max_updates": 10**6}), limit=5)
    assert run.learner.updates == 10
    assert checkpoints.complete_steps(tmp_path) == [10]
    assert run.lines[-1]["step"] == run.lines[-1]["updates"] == 10
    assert len(run.link.acks) == 5


def test_an_error_of_the_link_is_raised_after_a_checkpoint(tmp_path):
    def fail(batch):
        if batch.sequence == 4:
            raise Refused("another learner has taken over")
        return batch

    with pytest.raises(Refused, match="taken over"):
        Run(tmp_path, change=fail, window=1)
    assert checkpoints.complete_steps(tmp_path) == [6]


def test_a_resumed_learner_goes_on_in_beta_counts_target_phase_and_moments(tmp_path):
    settings = {"learner.target_period_updates": 7, "replay.beta_updates": 40, "learner.publish_period_updates": 10}
    whole = Run(tmp_path / "whole", make_config(**settings), change=poison(2, returns=np.nan))
    # The same in two halves: the second learner's link begins where the first one's ended.
    first = Run(tmp_path / "halves", make_config(**settings), change=poison(2, returns=np.nan), limit=12)
    assert first.learner.updates == 24
    second = Run(tmp_path / "halves", make_config(**settings), start=False, epoch=1)
    assert second.learner.updates == 24
    second.link._rng, second.link.rows, second.link.handed_out = first.link._rng, first.link.rows, 12
    second.link.acks = list(first.link.acks)

    def refill(batch):
        if batch.sequence > 13:
            return batch
        return batch._replace(new_slots=np.arange(200, dtype=np.int32), new_rows=second.link.rows.copy())

    second.link._change = refill
    second.learner.run()
    assert int(second.state.updates) == 40 and int(second.state.skipped) == 2
    assert_same(second.state, whole.state)
    assert [line["beta"] for line in second.lines] == sorted(line["beta"] for line in second.lines)
    assert second.lines[0]["beta"] > 0.4 + 0.6 * 12 / 40 and second.lines[-1]["beta"] > 0.8
    last = first.link.snapshots[-1]
    assert second.link.snapshots[0].version == last.version + 1 and second.link.snapshots[0].epoch > last.epoch


def test_a_finished_run_started_again_ends_at_once(tmp_path):
    Run(tmp_path)
    again = Run(tmp_path)
    assert again.learner.updates == 40 and again.link.handed_out == 0
    assert checkpoints.complete_steps(tmp_path) == [40]


def test_the_checkpoint_of_another_network_is_refused_at_start(tmp_path):
    Run(tmp_path)
    with pytest.raises(MismatchError, match=r"config\.agent\.hidden"):
        Run(tmp_path, make_config(**{"agent.hidden": (32,)}), start=False)


def test_a_disk_that_is_full_costs_checkpoints_and_not_training(tmp_path, caplog):
    run = Run(tmp_path, make_config(**{"learner.checkpoint_period_s": 1e-6}), start=False, window=1)
    saved, full, save = [], OSError(28, "No space left on device"), checkpoints.save

    def save_when_there_is_room(*args):
        if len(saved) < 1:
            saved.append("failed")
            raise full
        return save(*args)

    checkpoints.save = save_when_there_is_room
    try:
        run.learner.run()
    finally:
        checkpoints.save = save
    assert run.learner.updates == 40 and run.lines[-1]["failed_checkpoints"] == 1
    assert checkpoints.complete_steps(tmp_path)[-1] == 40
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(lines) == 1 and "No space left on device" in lines[0] and "\n" not in lines[0]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    one, same, other = (Run(tmp_path / str(i), make_config(seed=seed)) for i, seed in enumerate((0, 0, 1)))
    assert_same(one.state, same.state)
    assert any((x != y).any() for x, y in zip(*(jax.tree_util.tree_leaves(r.state.params) for r in (one, other))))
