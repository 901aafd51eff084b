"""Data parallel over two devices; test_learner_devices.py runs these in a process that has two."""

import jax
import numpy as np
import pytest

from longhaul.device_cache import DeviceCache
from longhaul.devices import make_mesh, replicated
from longhaul.errors import ConfigError
from longhaul.types import ExperienceSpec
from tests.memory_link import Run, make_config, writers_closed  # noqa: F401 (a fixture)
from tests.strict_jax import strict  # noqa: F401 (a fixture)

IMAGES = ExperienceSpec("Test-v0", (10, 10), "uint8", stack=2, num_actions=3, n_step=1, gamma=0.9)


def config_of(devices, **settings):
    return make_config(**{"learner.devices": devices, "learner.max_updates": 16, "metrics.period_s": 1e-6, **settings})


def assert_close(one, other):
    for x, y in zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-3, atol=1e-5)


def test_there_are_two():
    assert jax.local_device_count() == 2


@pytest.mark.parametrize("settings", [{}, {"agent.noisy_sigma": 0.5, "agent.distribution": "qr"}])
def test_two_devices_train_as_one_does(tmp_path, settings):
    one, two = (Run(tmp_path / str(n), config_of(n, **settings)) for n in (1, 2))
    assert len(one.link.acks) == len(two.link.acks) == 8
    for (sequence, priorities), (other_sequence, other_priorities) in zip(one.link.acks, two.link.acks):
        assert sequence == other_sequence
        np.testing.assert_allclose(priorities, other_priorities, rtol=1e-3, atol=1e-5)
    assert_close(one.state, two.state)
    losses = [[line["loss"] for line in run.lines if line.get("loss") is not None] for run in (one, two)]
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_images_train_as_on_one(tmp_path):
    settings = {"learner.max_updates": 6}
    one, two = (Run(tmp_path / str(n), config_of(n, **settings), spec=IMAGES) for n in (1, 2))
    assert_close(one.state, two.state)
    for (_, priorities), (_, other_priorities) in zip(one.link.acks, two.link.acks):
        np.testing.assert_allclose(priorities, other_priorities, rtol=1e-3, atol=1e-5)


def test_the_work_is_split_and_its_results_are_whole_on_each(tmp_path):
    run = Run(tmp_path, config_of(2, **{"agent.hidden": (24,), "learner.batch_size": 12}), start=False)
    learner, packed = run.learner, np.zeros((2, 12, 8), np.int32)
    program = learner._train_step.lower(learner._state, learner._cache.array, packed).compile().as_text()
    assert "all-reduce" in program
    # A layer's outputs are of six transitions, never of the minibatch's twelve.
    assert "f32[6,24]" in program and "f32[12,24]" not in program
    run.learner.run()
    for leaf in (*jax.tree_util.tree_leaves(run.state), learner._cache.array):
        assert len(leaf.sharding.device_set) == 2 and leaf.sharding.is_fully_replicated


def test_nothing_is_compiled_after_warm_up_and_no_transfer_is_made_that_is_not_meant(tmp_path):
    seen = []

    def look(batch):
        seen.append(run.learner.compilations)
        return batch

    config = config_of(0, **{"learner.max_updates": 40, "learner.publish_period_updates": 4})
    run = Run(tmp_path, config, start=False, change=look, new_rows=(1, 16), window=1)
    with jax.transfer_guard("disallow"):
        run.learner.run()
    assert run.learner.updates == 40 and seen[2] == run.learner.compilations <= 7


def test_the_cache_is_whole_on_each_device_and_read_back_as_it_was_written():
    cache = DeviceCache(64, (5,), "float32", replicated(make_mesh(config_of(2))))
    rows = np.arange(100, dtype=np.float32).reshape(20, 5)
    with jax.transfer_guard("disallow"):
        cache.insert(np.arange(20, dtype=np.int32), rows)
        np.testing.assert_array_equal(cache.read(np.arange(20)), rows)
    for shard in cache.array.addressable_shards:
        assert shard.data.shape == (64, 5)
        np.testing.assert_array_equal(np.asarray(shard.data)[:20], rows)


def test_a_checkpoint_of_one_device_goes_on_on_two_and_back(tmp_path):
    state = Run(tmp_path, config_of(1)).state
    for devices, updates in ((2, 24), (1, 32)):
        resumed = Run(tmp_path, config_of(devices, **{"learner.max_updates": updates}), start=False)
        assert resumed.learner.updates == updates - 8
        for x, y in zip(jax.tree_util.tree_leaves(state), jax.tree_util.tree_leaves(resumed.state), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        resumed.learner.run()
        assert resumed.learner.updates == updates
        state = resumed.state


@pytest.mark.parametrize("devices", [0, 2])
def test_a_minibatch_that_does_not_divide_is_refused_with_sizes_that_do(tmp_path, devices):
    with pytest.raises(ConfigError, match=r"config\.learner\.batch_size is 7.*2 devices.*make it 6 or 8"):
        Run(tmp_path, config_of(devices, **{"learner.batch_size": 7}), start=False)


def test_each_devices_memory_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        Run(tmp_path, config_of(2), start=False)
    assert any(r.getMessage().startswith("learner's memory on each of 2 x cpu: weights") for r in caplog.records)
