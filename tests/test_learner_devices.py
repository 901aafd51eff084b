"""What the learner puts on its devices: which they are, what it takes there, and what is refused."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from longhaul import devices, dqn
from longhaul.errors import ConfigError
from longhaul.types import ExperienceSpec
from tests.memory_link import Run, make_config, writers_closed  # noqa: F401 (a fixture)

MIB = 2**20
SPEC = ExperienceSpec("Test-v0", (10,), "uint8", stack=2, num_actions=2, n_step=1, gamma=0.9)  # rows of 10 bytes


@pytest.mark.timeout(900)
def test_the_rules_of_two_devices_hold():
    """In a process of its own: how many devices a host has is settled when jax starts."""
    if importlib.util.find_spec("reverb"):
        pytest.skip("takes a minute, and the learner's own environment runs it")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/two_devices.py"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True, timeout=840
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_more_devices_than_there_are_are_refused_by_number(tmp_path):
    count = jax.local_device_count()
    with pytest.raises(ConfigError, match=rf"config\.learner\.devices is {count + 1}.*sees {count} .*at most {count}"):
        Run(tmp_path, make_config(**{"learner.devices": count + 1}), start=False)


def test_one_device_is_not_partitioned():
    assert devices.make_mesh(make_config()) is None
    assert devices.replicated(None) is None
    tree = {"w": np.ones(3)}
    assert devices.replicate(tree, None) is tree


# ---- memory


def memory_by_hand(count=1):
    config = make_config(**{"learner.batch_size": 8, "learner.minibatches_per_pull": 3})
    shapes = {"w": jax.ShapeDtypeStruct((100,), np.float32), "b": jax.ShapeDtypeStruct((7,), np.float32)}
    return devices.measure(shapes, dqn.make_optimizer(config), SPEC, config, cache_rows=50, count=count)


def test_memory_by_hand():
    memory = memory_by_hand()
    assert memory.weights == memory.target == 107 * 4
    # Adam: two moments and an int32 count.
    assert memory.optimizer == 2 * 107 * 4 + 4
    # Gradients, weights going out, and a state (weights, target, optimizer) being saved.
    assert memory.copies == 428 + 428 + (428 + 428 + 860)
    assert memory.cache == 50 * 10
    # Two packed batches of 3 * 8 transitions of 4 slots and 4 scalars; 3 * 8 * 4 new rows of 10 bytes; 8 * 4 rows of a
    # minibatch, 10 bytes each and 40 as float32.
    assert memory.batches == 2 * (24 * 8 * 4) + 960 + 8 * 4 * 50


def test_a_share_of_the_memory_of_batches_is_each_devices():
    one, two = memory_by_hand(), memory_by_hand(count=2)
    assert two.batches == 2 * (12 * 8 * 4) + 960 + 4 * 4 * 50
    assert two._replace(batches=one.batches) == one


def test_memory_is_said_before_anything_is_allocated(tmp_path, caplog, monkeypatch):
    def refuse(*_):
        raise AssertionError("allocated")

    monkeypatch.setattr("longhaul.networks.init_params", refuse)
    with caplog.at_level(logging.INFO), pytest.raises(AssertionError, match="allocated"):
        Run(tmp_path, start=False)
    assert [r.getMessage().split(":")[0] for r in caplog.records if "memory" in r.getMessage()] == [
        "learner's memory on cpu"
    ]


def test_the_line_names_every_part_and_the_sum(caplog):
    memory = devices.Memory(
        weights=MIB, optimizer=2 * MIB, target=MIB, copies=6 * MIB, cache=256 * MIB, batches=3 * MIB // 2
    )
    with caplog.at_level(logging.INFO):
        devices.announce(memory, 65_536, None, make_config())
    assert caplog.messages == [
        "learner's memory on cpu: weights 1.0 MiB, optimizer 2.0 MiB, target 1.0 MiB, copies 6.0 MiB, "
        "cache 256 MiB (65,536 rows), batches 1.5 MiB, in all 268 MiB"
    ]


class Device:
    """A device that says how much memory it has, or nothing."""

    platform, device_kind = "gpu", "Test"

    def __init__(self, limit):
        self._limit = limit

    def memory_stats(self):
        return None if self._limit is None else {"bytes_limit": self._limit}

    def __str__(self):
        return "gpu:0"


@pytest.mark.parametrize("limit, refused", [(None, ""), (1000, ""), (999, "to 699 or less"), (300, "agent.hidden")])
def test_what_does_not_fit_is_refused_with_the_cache_that_does(monkeypatch, limit, refused):
    # 300 bytes and a cache of 700.
    memory = devices.Memory(weights=50, optimizer=100, target=50, copies=60, cache=700, batches=40)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(limit)])
    if not refused:
        devices.announce(memory, 7, None, make_config())
        return
    with pytest.raises(ConfigError, match=rf"needs 1000 bytes on gpu:0, which has {limit}.*{refused}") as error:
        devices.announce(memory, 7, None, make_config())
    assert "config.learner.cache_bytes" in str(error.value) and "\n" not in str(error.value)
