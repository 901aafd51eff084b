"""How fast the learner's loop is on batches already in memory, against its jitted step alone.

  python -m benchmarks.learner [--batch_size=64] [--minibatches=1,8] [--hidden=256,256] [--seconds=10]

Rounds of the loop and of the step alone alternate, so that whatever else the machine does meets both. Prints one JSON
object on its last line: for each K, `updates_per_s` and `samples_per_s` of the loop (checks, row inserts, packing,
priorities, metrics and publishing included), `step_updates_per_s` of the step alone on data on the device, their ratio.
"""

import argparse
import json
import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul import train_step
from longhaul.config import default
from longhaul.errors import Stopped
from longhaul.learner import Learner
from longhaul.metrics import MetricsWriter
from longhaul.types import Batch, ExperienceSpec, Snapshot

SPEC = ExperienceSpec("CartPole-v1", (4,), "float32", stack=1, num_actions=2, n_step=3, gamma=0.99)
_FILLED = 20_000  # cache slots in use
_BATCHES = 64  # made beforehand and handed out in turn
_ROUNDS = 4


class MemorySource:
    """LinkClient's interface over batches made beforehand; always has the next one ready.

    Args:
      seconds: after so long next_batch raises Stopped.
      new_rows: rows each batch brings along, as a cache that evicts would ask for.
      warm_batches: handed out before the clock starts: the first ones compile.
    """

    def __init__(self, new_rows: int, warm_batches: int = 50):
        self._new_rows, self._warm_batches = new_rows, warm_batches
        self._batches: list[Batch] = []
        self.seconds, self.handed_out, self.acks, self.start_s, self.end_s = 0.0, 0, 0, 0.0, 0.0

    def open(self, cache_rows: int, batch_size: int, minibatches: int, epoch: int) -> None:
        rng = np.random.default_rng(0)
        shape = (minibatches, batch_size)
        for i in range(_BATCHES):
            count = _FILLED if i == 0 else self._new_rows
            self._batches.append(
                Batch(
                    sequence=i + 1,
                    slots=rng.integers(0, _FILLED, (*shape, 2 * SPEC.stack)).astype(np.int32),
                    actions=rng.integers(0, SPEC.num_actions, shape).astype(np.int32),
                    returns=rng.standard_normal(shape).astype(np.float32),
                    discounts=np.full(shape, SPEC.gamma**SPEC.n_step, np.float32),
                    probabilities=rng.uniform(1e-5, 1e-3, shape).astype(np.float32),
                    table_size=100_000,
                    new_slots=rng.permutation(_FILLED)[:count].astype(np.int32),
                    new_rows=rng.standard_normal((count, *SPEC.row_shape)).astype(SPEC.row_dtype),
                    received_time_s=time.monotonic(),
                    audit_slots=np.zeros(0, np.int32),
                    audit_crc32=0,
                    stats={},
                )
            )

    def next_batch(self, timeout_s: float) -> Batch | None:
        if self.handed_out == self._warm_batches:
            self.start_s = time.monotonic()
        elif self.handed_out > self._warm_batches and time.monotonic() - self.start_s > self.seconds:
            self.end_s = time.monotonic()
            raise Stopped("measured")
        batch = self._batches[0 if self.handed_out == 0 else 1 + self.handed_out % (_BATCHES - 1)]
        self.handed_out += 1
        return batch

    @property
    def batches_per_s(self) -> float:
        return (self.handed_out - self._warm_batches) / (self.end_s - self.start_s)

    def ack(self, sequence: int, priorities: np.ndarray) -> None:
        self.acks += 1

    def publish(self, snapshot: Snapshot) -> None:
        pass

    def read_stats(self) -> dict[str, float]:
        return {}


def measure_loop(config: Any, new_rows: int, seconds: float) -> float:
    """Returns updates per second of the whole loop, over `seconds` after warming up."""
    source = MemorySource(new_rows)
    source.seconds = seconds
    with tempfile.TemporaryDirectory() as folder, MetricsWriter(Path(folder), "learner", tensorboard=False) as metrics:
        Learner(config, SPEC, source, metrics, Path(folder), threading.Event(), 1).run()
    return source.batches_per_s * config.learner.minibatches_per_pull


def measure_step(config: Any, seconds: float) -> float:
    """Returns updates per second of the jitted step alone, its data on the device and nothing fetched."""
    source = MemorySource(0)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(config, SPEC, source, MetricsWriter(None, "learner"), Path(folder), threading.Event(), 1)
        minibatches = config.learner.minibatches_per_pull
        source.open(_FILLED, config.learner.batch_size, minibatches, 1)
        packed = [jax.device_put(train_step.pack_batch(batch)) for batch in source._batches]
        state, cache = learner._state, learner._cache.array
        calls, start_s = 0, time.monotonic()
        while calls == 0 or time.monotonic() - start_s < seconds:
            for i in range(20):
                state, report = learner._train_step(state, cache, packed[i])
            jax.block_until_ready(report)  # so that no endless queue of calls is timed
            if calls == 0:
                start_s = time.monotonic()  # the first ones compile
            calls += 20
        return (calls - 20) * minibatches / (time.monotonic() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=64, help="B, transitions per update")
    parser.add_argument("--minibatches", default="1,8", help="values of K, updates per batch pulled")
    parser.add_argument("--hidden", default="256,256", help="widths of the MLP")
    parser.add_argument("--new_rows_per_sample", type=float, default=0.125, help="rows sent per sample drawn")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, over all rounds")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    # Each round builds its learner anew; only the first compiles.
    programs = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    figures: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    figures |= {"batch_size": arguments.batch_size, "hidden": arguments.hidden}
    for minibatches in (int(k) for k in arguments.minibatches.split(",")):
        config = default()
        config.agent.hidden = tuple(int(width) for width in arguments.hidden.split(","))
        config.learner.update(batch_size=arguments.batch_size, minibatches_per_pull=minibatches, max_updates=10**9)
        new_rows = int(arguments.new_rows_per_sample * arguments.batch_size * minibatches)
        loop, step = [], []
        for _ in range(_ROUNDS):
            loop.append(measure_loop(config, new_rows, arguments.seconds / _ROUNDS))
            step.append(measure_step(config, arguments.seconds / _ROUNDS))
        figures[f"K{minibatches}"] = {
            "updates_per_s": round(max(loop), 1),
            "samples_per_s": round(max(loop) * arguments.batch_size),
            "step_updates_per_s": round(max(step), 1),
            "ratio": round(max(loop) / max(step), 3),
        }
    programs.cleanup()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
