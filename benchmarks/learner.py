"""How fast the learner is when its batches come over a link, against its jitted step on data already in memory.

  python -m benchmarks.learner [--network=mlp] [--batch_size=64] [--minibatches=8] [--rtts_ms=0,50,200] [--seconds=6]
      [--reuse=3] [--peer=build/peer/bin/python]

Rounds of each alternate, so that whatever else the machine does meets all of them; each figure is the best round's.

* `step`: the jitted call alone, its batches on the device and nothing fetched in between: the upper bound;
* `memory`: the learner's whole loop (checks, row inserts, packing, priorities, metrics, publishing) on batches made
  beforehand, each with new rows as a cache that evicts would ask for;
* `link_<RTT>ms`: the whole loop over a real link: a buffer node and the project's relay (1 Gbit/s) in a process of
  their own (--site_python: where Reverb is installed), which inserts a transition for each eight drawn. With --reuse
  (config.learner.reuse) the learner makes so many updates more on what its cache holds, and they count;
* `peer` (--peer: an interpreter as benchmarks/peer_sb3.py has it): Stable-Baselines3's DQN.train of the same MLP.

All ends share this machine's cores, so a site at work slows the learner down as no site elsewhere would: with --apart
the learner has the first core to itself in all three, the site and the relay the others.

Prints one JSON object on its last line: updates/s of each; ratios to `step`, `peer` and, of the links, `memory`; of the
links the shares of time that the learner's thread spends waiting for batches (idle), placing rows (transfer), handing
batches to the device (dispatch) and waiting for it (compute), and that the link's thread spends on decoding (decode,
beside the others); processor time of the learner's process per update, without the site's, though that slows it
down (cpu_ms_per_update); programs compiled after the warm-up (recompiled). Networks: the MLP on CartPole's rows, and
the Nature CNN on 84x84x4 pixels.
"""

import argparse
import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_site import REPLAY_RATIO, SPECS, make_config, numbers
from longhaul.errors import Stopped
from longhaul.types import Batch, Snapshot

_FILLED = {"mlp": 20_000, "nature": 4_000}  # cache slots in use
_BATCHES = 32  # made beforehand and handed out in turn
_WARM_BATCHES = 40  # the first ones compile, and fill the cache of a link
_WARM_S = 6.0


# ---- sources of batches, with LinkClient's interface


class _Clock:
    """Ends a measurement: counts batches after the warm-up, for so long."""

    def __init__(self, warm_batches: int, warm_s: float, seconds: float):
        self._warm_batches, self._warm_s, self._seconds = warm_batches, warm_s, seconds
        self._began_s = time.monotonic()
        self._handed_out = 0
        self._first = 0
        self.start_s = 0.0
        self.start_cpu_s = 0.0
        self.measured_s = 0.0
        self.measured_cpu_s = 0.0
        self.batches_per_s = 0.0

    def tick(self) -> bool:
        """Counts a batch; True where the measured time has just begun.

        Raises:
          Stopped: the measurement is over.
        """
        now_s = time.monotonic()
        warm = self._handed_out >= self._warm_batches and now_s - self._began_s >= self._warm_s
        self._handed_out += 1
        if self.start_s:
            if now_s - self.start_s > self._seconds:
                self.measured_s = now_s - self.start_s
                self.measured_cpu_s = time.process_time() - self.start_cpu_s
                self.batches_per_s = (self._handed_out - 1 - self._first) / self.measured_s
                raise Stopped("measured")
        elif warm:
            self.start_s, self._first = now_s, self._handed_out - 1
            self.start_cpu_s = time.process_time()
            return True
        return False


class MemorySource:
    """Batches made beforehand; always has the next one ready."""

    def __init__(self, network: str, new_rows: int, clock: _Clock):
        self._spec, self._filled, self._new_rows, self._clock = SPECS[network], _FILLED[network], new_rows, clock
        self.batches: list[Batch] = []
        self.down = False  # see LinkClient
        self._next = 0

    def open(self, cache_rows: int, batch_size: int, minibatches: int, epoch: int, mark_first: bool = False) -> None:
        rng = np.random.default_rng(0)
        spec, shape = self._spec, (minibatches, batch_size)
        for i in range(_BATCHES):
            count = self._filled if i == 0 else self._new_rows
            rows = (rng.standard_normal((count, *spec.row_shape)) * 60).astype(spec.row_dtype)
            self.batches.append(
                Batch(
                    sequence=i + 1,
                    slots=rng.integers(0, self._filled, (*shape, 2 * spec.stack)).astype(np.int32),
                    actions=rng.integers(0, spec.num_actions, shape).astype(np.int32),
                    returns=rng.standard_normal(shape).astype(np.float32),
                    discounts=np.full(shape, spec.gamma**spec.n_step, np.float32),
                    probabilities=rng.uniform(1e-5, 1e-3, shape).astype(np.float32),
                    table_size=100_000,
                    new_slots=rng.permutation(self._filled)[:count].astype(np.int32),
                    new_rows=rows,
                    received_time_s=time.monotonic(),
                    audit_slots=np.zeros(0, np.int32),
                    audit_crc32=0,
                    stats={},
                )
            )

    def next_batch(self, timeout_s: float) -> Batch | None:
        self._clock.tick()
        batch = self.batches[0 if self._next == 0 else 1 + self._next % (_BATCHES - 1)]
        self._next += 1
        return batch

    def ack(self, sequence: int, priorities: np.ndarray) -> None:
        pass

    def publish(self, snapshot: Snapshot) -> None:
        pass

    def read_stats(self) -> dict[str, float]:
        return {}


class _Shares:
    """Seconds spent in functions, by what they are for."""

    def __init__(self) -> None:
        self.seconds = {"idle": 0.0, "transfer": 0.0, "dispatch": 0.0, "compute": 0.0, "decode": 0.0}

    def time(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[kind] += time.monotonic() - began_s

        return timed

    def begin(self) -> None:
        for kind in self.seconds:
            self.seconds[kind] = 0.0


# ---- what is measured


@contextlib.contextmanager
def _learner(config: Any, network: str, source: Any) -> Iterator[Any]:
    from longhaul.learner import Learner
    from longhaul.metrics import MetricsWriter

    with tempfile.TemporaryDirectory() as folder, MetricsWriter(None, "learner") as metrics:
        yield Learner(config, SPECS[network], source, metrics, Path(folder), threading.Event(), int(time.time() * 1e3))


def measure_step(config: Any, network: str, seconds: float) -> float:
    """Returns updates per second of the jitted step alone, its data on the device and nothing fetched."""
    import jax

    from longhaul import train_step

    source = MemorySource(network, 0, _Clock(0, 0.0, 0.0))
    with _learner(config, network, source) as learner:
        minibatches = config.learner.minibatches_per_pull
        source.open(_FILLED[network], config.learner.batch_size, minibatches, 1)
        packed = [jax.device_put(train_step.pack_batch(batch)) for batch in source.batches]
        state, cache = learner._state, learner._cache.array
        at_once = 20 if network == "mlp" else 1
        calls, start_s = 0, 0.0
        while not start_s or time.monotonic() - start_s < seconds:
            for i in range(at_once):
                state, report = learner._train_step(state, cache, packed[i])
            jax.block_until_ready(report)  # so that no endless queue of calls is timed
            calls += at_once if start_s else 0
            start_s = start_s or time.monotonic()  # the first ones compile
        return calls * minibatches / (time.monotonic() - start_s)


def measure_memory(config: Any, network: str, seconds: float) -> dict[str, float]:
    """Returns updates per second of the whole loop on batches in memory, and what they cost."""
    samples = config.learner.batch_size * config.learner.minibatches_per_pull
    clock = _Clock(_WARM_BATCHES if network == "mlp" else 3, 0.0, seconds)
    with _learner(config, network, MemorySource(network, int(samples / REPLAY_RATIO), clock)) as learner:
        learner.run()
    rate = clock.batches_per_s * config.learner.minibatches_per_pull
    return {"updates_per_s": rate, "cpu_ms_per_update": round(1e3 * clock.measured_cpu_s / clock.measured_s / rate, 3)}


def measure_link(config: Any, network: str, seconds: float, address: str) -> dict[str, Any]:
    """Returns updates per second of the whole loop over a link, and where its time goes."""
    from longhaul.link import LinkClient

    clock, batch_size = _Clock(3, _WARM_S, seconds), config.learner.batch_size
    shares = _Shares()
    link = LinkClient(address, config, secrets.randbits(60), threading.Event())
    link.describe(30.0)
    with _learner(config, network, link) as learner:
        compiled, updates = 0, 0
        next_batch = link.next_batch

        def counted(timeout_s: float) -> Batch | None:
            nonlocal compiled, updates
            batch = next_batch(timeout_s)
            if batch is not None and clock.tick():
                shares.begin()
                compiled, updates = learner.compilations, learner.updates
            return batch

        link.next_batch = shares.time("idle", counted)  # type: ignore[method-assign]
        link._inbox.put = shares.time("decode", link._inbox.put)  # type: ignore[method-assign]
        learner._cache.insert = shares.time("transfer", learner._cache.insert)
        learner._train_step = _Called(learner._train_step, shares.time("dispatch", learner._train_step))
        learner._settle = shares.time("compute", learner._settle)
        try:
            learner.run()
        finally:
            link.close()
        recompiled, updates = learner.compilations - compiled, learner.updates - updates
    return {
        "updates_per_s": updates / clock.measured_s,
        "cpu_ms_per_update": round(1e3 * clock.measured_cpu_s / updates, 3),
        "samples_crossed_per_s": round(clock.batches_per_s * config.learner.minibatches_per_pull * batch_size),
        **{kind: round(spent_s / seconds, 3) for kind, spent_s in shares.seconds.items()},
        "recompiled": recompiled,
    }


def measure_peer(python: str, batch_size: int, seconds: float) -> float:
    """Returns updates per second of the peer's update alone."""
    command = [python, "-m", "benchmarks.peer_sb3", "--updates_only", f"--batch={batch_size}", f"--time_s={seconds}"]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"--peer={python}: {error}; benchmarks/peer_sb3.py says how it is installed") from None
    return json.loads(output.splitlines()[-1])["updates_per_s"][str(batch_size)]


class _Called:
    """A jitted function that is called another way, and else is what it was."""

    def __init__(self, function: Any, call: Callable[..., Any]):
        self._function, self._call = function, call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


# ---- the command


@contextlib.contextmanager
def _site(arguments: argparse.Namespace, cores: set[int]) -> Iterator[list[str]]:
    """Runs the site on these cores; yields the links' addresses."""
    command = [arguments.site_python, "-m", "benchmarks.random_site", f"--network={arguments.network}"]
    command += [f"--rtts_ms={arguments.rtts_ms}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        try:
            os.sched_setaffinity(node.pid, cores)
            assert node.stdout is not None
            ready = next((line for line in node.stdout if line.startswith("ready")), None)
            if ready is None:
                raise SystemExit(f"--site_python={arguments.site_python}: the site did not start; it needs Reverb")
            yield ready.split()[1:]
        finally:
            node.terminate()


def _rate(figures: dict[str, Any]) -> float:
    return figures["updates_per_s"]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures everything."""
    cores = os.sched_getaffinity(0)
    mine = min(cores)
    if arguments.apart:
        if len(cores) < 2:
            raise SystemExit("--apart needs two cores")
        os.sched_setaffinity(0, {mine})  # before JAX makes its threads
    import jax

    logging.getLogger().setLevel(logging.ERROR)
    # Each round builds its learner anew; only the first compiles.
    programs = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    network, seconds = arguments.network, arguments.seconds
    config = make_config(network, arguments.batch_size, arguments.minibatches)
    reusing = config.copy_and_resolve_references()
    reusing.learner.reuse = arguments.reuse
    rtts = numbers(arguments.rtts_ms)
    step: list[float] = []
    memory: list[dict[str, float]] = []
    peer: list[float] = []
    links: dict[float, list[dict[str, Any]]] = {rtt: [] for rtt in rtts}
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(_site(arguments, cores - {mine} if arguments.apart else cores)) if rtts else []
        for _ in range(arguments.rounds):
            if arguments.peer:
                peer.append(measure_peer(arguments.peer, arguments.batch_size, seconds))
            step.append(measure_step(config, network, seconds))
            memory.append(measure_memory(config, network, seconds))
            for address, found in zip(addresses, links.values()):
                found.append(measure_link(reusing, network, seconds, address))
    programs.cleanup()
    best_step, best_memory = max(step), max(memory, key=_rate)

    def with_ratios(one: dict[str, Any]) -> dict[str, Any]:
        rate = _rate(one)
        of_peer = {"of_peer": round(rate / max(peer), 3)} if peer else {}
        return {**one, "updates_per_s": round(rate, 2), "of_step": round(rate / best_step, 3), **of_peer}

    figures: dict[str, Any] = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "network": network,
        "batch_size": arguments.batch_size,
        "minibatches_per_pull": arguments.minibatches,
        "reuse": arguments.reuse,
        "apart": arguments.apart,
        **({"peer": {"updates_per_s": max(peer)}} if peer else {}),
        "step": {"updates_per_s": round(best_step, 2)},
        "memory": with_ratios(best_memory),
    }
    for rtt, found in links.items():
        best = max(found, key=_rate)
        of_memory = {"of_memory": round(_rate(best) / _rate(best_memory), 3)}
        figures[f"link_{rtt:g}ms"] = with_ratios(best) | of_memory
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=tuple(SPECS), default="mlp")
    parser.add_argument("--batch_size", type=int, default=64, help="B, transitions per update")
    parser.add_argument("--minibatches", type=int, default=8, help="K, updates per batch pulled")
    parser.add_argument("--reuse", type=float, default=0.0, help="updates on cached rows per update on what crosses")
    parser.add_argument("--rtts_ms", default="0,50,200", help="round trips; empty for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement of each round")
    parser.add_argument("--site_python", default=sys.executable, help="interpreter of the site's process")
    parser.add_argument("--apart", action="store_true", help="the learner on the first core, the site on the others")
    parser.add_argument("--peer", help="interpreter with Stable-Baselines3, whose update is timed beside these")
    arguments = parser.parse_args()
    if arguments.peer and arguments.network != "mlp":
        parser.error("--peer: its update is the MLP's alone; leave it out, or --network")
    print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()
