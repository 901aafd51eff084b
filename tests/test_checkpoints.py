"""Checkpoints: whole or not there, the newest by number, and never another experience's or network's."""

import functools
import json
import logging
import resource
import threading

import jax
import numpy as np
import pytest

from longhaul import checkpoints, codec, dqn, networks
from longhaul.background import NewestOnly
from longhaul.checkpoints import Progress
from longhaul.config import default
from longhaul.errors import Corruption, MismatchError, Stopped, WorkerFailed
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)

SPEC = ExperienceSpec("Test-v0", (3,), "float32", stack=1, num_actions=2, n_step=3, gamma=0.9)


def make_config(**settings):
    config = default()
    config.agent.hidden = (8,)
    config.update_from_flattened_dict(settings)
    return config


@functools.cache
def make_params(network, seed):
    return networks.init_params(network, SPEC, seed)


def make_state(config, seed=0):
    params = make_params(networks.make_network(SPEC, config), seed)
    state = dqn.init_state(params, dqn.make_optimizer(config), seed)
    return state._replace(updates=state.updates + 17, skipped=state.skipped + 3)


def save(workdir, step, config=None, seed=0):
    config = config or make_config()
    return checkpoints.save(workdir, make_state(config, seed), SPEC, config, Progress(step, epoch=5, version=9))


def assert_same(one, other):
    for x, y in zip(jax.tree_util.tree_leaves(one), jax.tree_util.tree_leaves(other)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_a_state_comes_back_bit_by_bit(tmp_path):
    config = make_config()
    save(tmp_path, 20)
    state, progress = checkpoints.restore(tmp_path, make_state(config, seed=1), SPEC, config)
    assert_same(state, make_state(config))
    assert isinstance(state, dqn.TrainState) and progress == Progress(20, 5, 9)
    assert checkpoints.latest_progress(tmp_path) == progress


def test_there_is_nothing_in_an_empty_folder(tmp_path):
    config = make_config()
    assert checkpoints.restore(tmp_path, make_state(config), SPEC, config) is None
    assert checkpoints.latest_weights(tmp_path) is None and checkpoints.latest_progress(tmp_path) is None


def test_the_newest_is_the_greatest_number_and_the_oldest_are_removed(tmp_path):
    config = make_config(**{"learner.keep_checkpoints": 2})
    for step in (800, 9000, 10000):
        save(tmp_path, step, config, seed=step)
    assert checkpoints.complete_steps(tmp_path) == [9000, 10000]
    step, payload = checkpoints.latest_weights(tmp_path)
    assert step == 10000
    expected = networks.flatten_params(make_state(config, seed=10000).params)
    weights = codec.unpack_weights(payload)
    assert weights.keys() == expected.keys()
    for name in weights:
        np.testing.assert_array_equal(weights[name], expected[name])


def test_half_written_ones_are_passed_over_and_cleared_away(tmp_path):
    save(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    (folder / "30.partial" / "state").mkdir(parents=True)
    (folder / "30.partial" / "meta.json").write_text("{}")
    (folder / "40").mkdir()  # a number for a name, and nothing in it
    (folder / "latest").mkdir()
    (folder / "latest" / "meta.json").write_text("{}")
    assert checkpoints.complete_steps(tmp_path) == [10]
    assert checkpoints.latest_weights(tmp_path)[0] == 10
    save(tmp_path, 20)
    assert checkpoints.complete_steps(tmp_path) == [10, 20] and not (folder / "30.partial").exists()


def test_saving_a_step_again_replaces_it(tmp_path):
    config = make_config()
    save(tmp_path, 10, seed=0)
    save(tmp_path, 10, seed=1)
    state, _ = checkpoints.restore(tmp_path, make_state(config), SPEC, config)
    assert_same(state, make_state(config, seed=1))
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["10"]


def test_a_full_disk_is_one_os_error_and_keeps_what_was_there(tmp_path, caplog, capfd):
    save(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ: writes fail instead
    try:
        with caplog.at_level(logging.INFO), pytest.raises(OSError):
            save(tmp_path, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["10"]
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())
    save(tmp_path, 20)
    assert checkpoints.complete_steps(tmp_path) == [10, 20]


@pytest.mark.parametrize(
    "spec_change, settings, says",
    [
        ({"gamma": 0.5}, {}, "gamma: 0.5 != 0.9"),
        ({"n_step": 1}, {}, "n_step: 1 != 3"),
        ({}, {"agent.dueling": False}, "config.agent.dueling: False != True"),
        ({}, {"agent.hidden": (8, 8)}, "config.agent.hidden: [8, 8] != [8]"),
        ({}, {"agent.network": "mlp"}, "config.agent.network: mlp != auto"),
        ({}, {"agent.distribution": "qr"}, "config.agent.distribution: qr != none"),
        ({}, {"agent.noisy_sigma": 0.5}, "config.agent.noisy_sigma: 0.5 != 0.0"),
        ({}, {"agent.value_rescaling": True}, "config.agent.value_rescaling: True != False"),
        ({}, {"agent.reward_scale": 2.0}, "config.agent.reward_scale: 2.0 != 1.0"),
        ({}, {"agent.munchausen_alpha": 0.9}, "config.agent.munchausen_alpha: 0.9 != 0.0"),
        ({}, {"agent.double": False}, "config.agent.double: False != True"),
    ],
)
def test_another_experience_or_network_is_refused_by_name(tmp_path, spec_change, settings, says):
    save(tmp_path, 10)
    config = make_config(**settings)
    spec = ExperienceSpec(**{**SPEC.__dict__, **spec_change})
    with pytest.raises(MismatchError) as refused:
        checkpoints.restore(tmp_path, make_state(config), spec, config)
    assert says in str(refused.value) and str(tmp_path) in str(refused.value)


def test_settings_without_effect_may_change(tmp_path):
    save(tmp_path, 10)
    unused = ("agent.atoms", 7), ("agent.v_min", -1.0), ("agent.v_max", 1.0), ("agent.munchausen_clip", -2.0)
    config = make_config(**dict(unused))
    assert checkpoints.restore(tmp_path, make_state(config), SPEC, config) is not None


def test_a_checkpoint_older_than_a_setting_was_made_without_it(tmp_path):
    path = save(tmp_path, 10) / "meta.json"
    meta = json.loads(path.read_text())
    meta["network"] = {field: meta["network"][field] for field in ("network", "hidden", "dueling")}
    path.write_text(json.dumps(meta))
    config = make_config()
    assert checkpoints.restore(tmp_path, make_state(config), SPEC, config) is not None
    other = make_config(**{"agent.value_rescaling": True})
    with pytest.raises(MismatchError, match=r"value_rescaling: True != False"):
        checkpoints.restore(tmp_path, make_state(other), SPEC, other)


def test_clipping_can_be_switched_off_on_the_way(tmp_path):
    save(tmp_path, 10)
    config = make_config(**{"learner.max_grad_norm": 0.0})
    state, _ = checkpoints.restore(tmp_path, make_state(config, seed=1), SPEC, config)
    assert_same(state, make_state(make_config()))


@pytest.mark.parametrize("damage", ["meta.json", "state"])
def test_a_damaged_checkpoint_is_refused_and_named(tmp_path, damage):
    config = make_config()
    path = save(tmp_path, 10)
    if damage == "meta.json":
        (path / damage).write_text(json.dumps({"step": 10}))
    else:
        for file in (path / damage).rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with pytest.raises(Corruption) as refused:
        checkpoints.restore(tmp_path, make_state(config), SPEC, config)
    assert str(path) in str(refused.value)


# ---- the thread that writes them


def test_the_newest_item_wins_and_the_last_is_handled_before_the_end():
    handled, entered, go_on = [], threading.Event(), threading.Event()

    def handle(item):
        handled.append(item)
        entered.set()
        assert go_on.wait(10)

    worker = NewestOnly("test", handle)
    worker.submit(1)
    assert entered.wait(10)
    for item in (2, 3, 4):
        worker.submit(item)
    go_on.set()
    worker.close(10)
    assert handled == [1, 4]


def test_an_error_in_the_thread_reaches_the_caller_and_stopped_is_none():
    def fail(error):
        raise error

    worker = NewestOnly("test", fail)
    worker.submit(ValueError("broken"))
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            worker.close(10)
    with pytest.raises(ValueError, match="broken"):
        worker.submit(ValueError("later"))
    stopped = NewestOnly("test", fail)
    stopped.submit(Stopped("orderly"))
    stopped.close(10)


def test_a_thread_that_is_still_busy_is_said_to_be():
    go_on = threading.Event()
    worker = NewestOnly("slow-disk", lambda item: go_on.wait(10))
    worker.submit(1)
    with pytest.raises(WorkerFailed, match="slow-disk"):
        worker.close(0.05)
    go_on.set()
    worker.close(10)
