"""How fast, and at what cost in bytes, a learner draws Atari transitions over a long-haul link.

  python -m benchmarks.link run [--rtt_ms=50] [--rate_mbit=100] [--seconds=20]
  python -m benchmarks.link serve --port=P          # at the site; prints a line beginning "ready"
  python -m benchmarks.link pull --address=HOST:P --client=longhaul|reverb --seconds=S     # in the cloud

`serve` fills a buffer node with transitions of several games, played by a random policy with the standard
preprocessing (84x84 grey, frame skip 4, stack 4, n-step 3), then inserts one transition for each `--replay_ratio`
drawn. `pull` draws batches of 512 and sends priorities back, with longhaul's link (rows into the device cache) or
with the stock Reverb client (TrajectoryDataset, the best of several in-flight and worker counts). The stock client
has a Reverb server of its own, on the next port, where the same transitions lie as Reverb's users store them: frames
as uint8, stacked by reference. `run` does both through the project's relay. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tcp
from benchmarks.atari_replay import (
    BATCH,
    SPEC,
    STACK,
    STOCK_TABLE,
    Feeder,
    OurReplay,
    StockReplay,
    make_config,
    stock_server,
)
from longhaul import config as config_lib

# In flight per worker, and workers: what the stock client is tried with.
REVERB_SETTINGS = ((100, 1), (100, 4), (500, 4), (1000, 4), (2000, 4), (1000, 8))


def serve(arguments: argparse.Namespace) -> None:
    """A buffer node in this process, a feeder in another."""
    from longhaul.gateway import Gateway

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    gateway = Gateway(
        make_config(arguments.capacity, arguments.replay_ratio),
        arguments.host,
        arguments.port,
        arguments.replay_port,
        _credentials(arguments, "gateway"),
        congestion_control=arguments.tcp_congestion_control,
    )
    gateway.start()
    stock = stock_server(arguments.capacity, gateway.port + 1)
    command = [sys.executable, "-m", "benchmarks.link", "feed", f"--address=127.0.0.1:{gateway.port}"]
    command += [f"--transitions={arguments.transitions}", f"--replay_ratio={arguments.replay_ratio}"]
    command += [f"--credentials={arguments.credentials}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as feeder:
        try:
            assert feeder.stdout is not None
            for line in feeder.stdout:
                if line.startswith("ready"):
                    print(f"ready {arguments.host}:{gateway.port} {gateway.read_stats()}", flush=True)
        except KeyboardInterrupt:
            pass
        finally:
            feeder.terminate()
            gateway.stop()
            stock.stop()


def _credentials(arguments: argparse.Namespace, role: str) -> Any:
    from longhaul import security

    return security.load(Path(arguments.credentials, role), role) if arguments.credentials else None


def _next_port(address: str) -> str:
    host, port = address.rsplit(":", 1)
    return f"{host}:{int(port) + 1}"


def feed(arguments: argparse.Namespace) -> None:
    stop = threading.Event()
    replays = [
        OurReplay(arguments.address, stop, _credentials(arguments, "actor")),
        StockReplay(_next_port(arguments.address)),
    ]
    feeder = Feeder(replays, arguments.transitions, stop)
    feeder.insert(arguments.transitions)
    print("ready", flush=True)
    if arguments.replay_ratio:
        feeder.follow(arguments.replay_ratio)
    else:
        stop.wait()


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))}


class _Received:
    """The bytes received over time, as the kernel counts them."""

    def __init__(self, ports: set[int]):
        self._ports = ports
        self._looks: list[tuple[float, int]] = []

    def look(self, now_s: float) -> None:
        """Notes them, five times a second at most."""
        if not self._looks or now_s - self._looks[-1][0] > 0.2:
            self._looks.append((now_s, tcp.received_from(self._ports)))

    def most_over(self, span_s: float) -> float:
        """Returns the highest mean rate over any span of at least span_s, in bytes/s; 0 if none was that long."""
        rates, end = [0.0], 0
        for start_s, start_bytes in self._looks:
            while end < len(self._looks) and self._looks[end][0] < start_s + span_s:
                end += 1
            if end == len(self._looks):
                break
            rates.append((self._looks[end][1] - start_bytes) / (self._looks[end][0] - start_s))
        return max(rates)


def pull_longhaul(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draws through the gateway, from a cold cache; the figures are of the time after the warm-up, and of the cold."""
    from longhaul.device_cache import DeviceCache
    from longhaul.link import LinkClient

    stop = threading.Event()
    config = make_config(1000)
    config.link.max_window = arguments.max_window
    link = LinkClient(
        arguments.address,
        config,
        secrets.randbits(60),
        stop,
        credentials=_credentials(arguments, "learner"),
        budget_bytes_per_s=arguments.link_budget,
    )
    description = link.describe(60.0)
    spec = description.spec
    rows = min(arguments.cache_mb * 2**20 // spec.row_bytes, 2 * description.capacity)
    cache = DeviceCache(rows, spec.row_shape, spec.row_dtype)
    ports = {int(arguments.address.rsplit(":", 1)[1])}
    rng = np.random.default_rng(0)
    samples = 0
    ages: dict[str, list[float]] = {"batch": [], "priority": []}
    waited_s = 0.0
    inserts = 0.0
    marks: dict[str, tuple[float, int, int, float]] = {}
    received = _Received(ports)

    def mark(name: str) -> None:
        marks[name] = (time.monotonic(), samples, tcp.received_from(ports), inserts)

    mark("start")
    link.open(rows, BATCH, 1, int(time.time() * 1000))
    end_s = time.monotonic() + arguments.warmup_s + arguments.seconds
    warm_s = time.monotonic() + arguments.warmup_s
    stats: dict[str, float] = {}
    due_s = time.monotonic()
    while time.monotonic() < end_s:
        began_s = time.monotonic()
        batch = link.next_batch(1.0)
        received.look(began_s)
        if "warm" in marks:
            waited_s += time.monotonic() - began_s
        if batch is None:
            continue
        cache.insert(batch.new_slots, batch.new_rows)
        if "warm" in marks:
            ages["batch"].append(batch.stats["draw_age_s"] + time.monotonic() - batch.received_time_s)
            ages["priority"].append(batch.stats["priority_age_s"])
        samples += BATCH
        inserts = batch.stats["inserts"]
        if arguments.samples_per_s:
            # Stands for training: the learner is busy until it would be through with this batch.
            due_s = max(due_s + BATCH / arguments.samples_per_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
        link.ack(batch.sequence, rng.exponential(size=(1, BATCH)).astype(np.float32) + 1e-3)
        if "first" not in marks:
            mark("first")
        if "cold" not in marks and samples >= 20 * BATCH:
            mark("cold")
        if "warm" not in marks and time.monotonic() >= warm_s:
            link.read_stats()
            mark("warm")
    mark("end")
    stats = link.read_stats()
    cache.array.block_until_ready()
    link.close()

    def between(a: str, b: str, what: int) -> float:  # what: 0 seconds, 1 samples, 2 bytes, 3 inserts
        return marks[b][what] - marks[a][what]

    return {
        "client": "longhaul",
        "samples_per_s": between("warm", "end", 1) / between("warm", "end", 0),
        "inserts_per_s": between("warm", "end", 3) / between("warm", "end", 0),
        "bytes_per_sample": between("warm", "end", 2) / max(1, between("warm", "end", 1)),
        "cold_bytes_per_sample": between("start", "cold", 2) / max(1, between("start", "cold", 1)),
        "cold_samples": between("start", "cold", 1),
        "batch_age_s": _percentiles(ages["batch"]),
        "priority_age_s": _percentiles(ages["priority"]),
        "idle_share": waited_s / between("warm", "end", 0),
        "most_bytes_per_s_over_10_s": received.most_over(10.0),
        "link": {name: value for name, value in stats.items() if np.isfinite(value)},
    }


def _pull_reverb_once(address: str, in_flight: int, workers: int, seconds: float, port: int) -> dict[str, Any]:
    import reverb
    import tensorflow as tf

    frames = tf.TensorSpec([STACK, *SPEC.row_shape], tf.uint8)
    scalar = tf.TensorSpec([], tf.float32)
    signature = {"obs": frames, "next_obs": frames, "action": scalar, "n_step_return": scalar, "discount": scalar}
    dataset = reverb.TrajectoryDataset(
        server_address=address,
        table=STOCK_TABLE,
        dtypes={name: spec.dtype for name, spec in signature.items()},
        shapes={name: spec.shape for name, spec in signature.items()},
        max_in_flight_samples_per_worker=in_flight,
        num_workers_per_iterator=workers,
    )
    iterator = iter(dataset.batch(BATCH, drop_remainder=True))
    client = reverb.Client(address)
    updates: list[tuple[np.ndarray, np.ndarray]] = []
    wake, done = threading.Event(), threading.Event()

    def update() -> None:
        while not done.is_set():
            wake.wait(0.5)
            wake.clear()
            while updates:
                keys, priorities = updates.pop(0)
                client.mutate_priorities(STOCK_TABLE, dict(zip(keys.tolist(), priorities.tolist())))

    updater = threading.Thread(target=update, daemon=True)
    updater.start()
    rng = np.random.default_rng(0)
    next(iterator)
    samples, waited_s = 0, 0.0
    start_s, start_bytes = time.monotonic(), tcp.received_from({port})
    while time.monotonic() - start_s < seconds:
        began_s = time.monotonic()
        batch = next(iterator)
        waited_s += time.monotonic() - began_s
        _ = batch.data["obs"].numpy(), batch.data["next_obs"].numpy()
        updates.append((batch.info.key.numpy(), rng.exponential(size=BATCH) + 1e-3))
        wake.set()
        samples += BATCH
    elapsed_s = time.monotonic() - start_s
    received = tcp.received_from({port}) - start_bytes
    done.set()
    return {
        "client": "reverb",
        "in_flight": in_flight,
        "workers": workers,
        "samples_per_s": samples / elapsed_s,
        "bytes_per_sample": received / max(1, samples),
        "batch_age_s": {},
        "priority_age_s": {},
        "idle_share": waited_s / elapsed_s,
    }


def pull_reverb(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draws with the stock client: the best of REVERB_SETTINGS in short tries, then for the time asked."""
    address = _next_port(arguments.address)
    port = int(address.rsplit(":", 1)[1])
    tries = [_pull_reverb_once(address, n, workers, arguments.try_s, port) for n, workers in REVERB_SETTINGS]
    best = max(tries, key=lambda result: result["samples_per_s"])
    result = _pull_reverb_once(address, best["in_flight"], best["workers"], arguments.seconds, port)
    result["tried"] = [[t["in_flight"], t["workers"], round(t["samples_per_s"])] for t in tries]
    return result


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both clients through the relay, one after the other, from one buffer node."""
    command = [sys.executable, "-m", "benchmarks.link", "serve", "--host=127.0.0.1", "--port=0"]
    command += [f"--transitions={arguments.transitions}", f"--replay_ratio={arguments.replay_ratio}"]
    results: dict[str, Any] = {"rtt_ms": arguments.rtt_ms, "rate_mbit": arguments.rate_mbit}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as site:
        try:
            assert site.stdout is not None
            line = next(line for line in site.stdout if line.startswith("ready"))
            gateway = line.split()[1]
            host, port = gateway.rsplit(":", 1)
            rate = arguments.rate_mbit * 1e6 / 8
            for client in ("longhaul", "reverb"):
                # The relay's port is the clients' gateway; the stock server's comes right after it.
                with _relays(host, int(port), arguments.rtt_ms / 1000, rate) as address:
                    words = ["pull", f"--client={client}", f"--seconds={arguments.seconds}"]
                    words += [f"--address={address}", f"--warmup_s={arguments.warmup_s}", f"--try_s={arguments.try_s}"]
                    interpreter = arguments.learner_python if client == "longhaul" else arguments.python
                    results[client] = json.loads(_child(words, interpreter)[-1])
        finally:
            site.terminate()
    ours, theirs = results["longhaul"], results["reverb"]
    results["samples_ratio"] = ours["samples_per_s"] / theirs["samples_per_s"]
    results["bytes_ratio"] = theirs["bytes_per_sample"] / ours["bytes_per_sample"]
    results["cold_bytes_ratio"] = theirs["bytes_per_sample"] / ours["cold_bytes_per_sample"]
    return results


@contextlib.contextmanager
def _relays(host: str, port: int, rtt_s: float, rate_bytes_per_s: float) -> Iterator[str]:
    """Relays a gateway's port and the next one, on neighbouring ports too."""
    from longhaul.errors import WorkerFailed
    from longhaul.relay import Relay

    for _ in range(20):
        with (
            contextlib.suppress(WorkerFailed),
            Relay((host, port), rtt_s, rate_bytes_per_s) as first,
            Relay((host, port + 1), rtt_s, rate_bytes_per_s, port=first.port + 1),
        ):
            yield first.address
            return
    raise SystemExit("no two neighbouring ports are free")


def _child(words: list[str], interpreter: str) -> list[str]:
    command = [interpreter, "-m", "benchmarks.link", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    site = commands.add_parser("serve")
    site.add_argument("--host", default="0.0.0.0")
    site.add_argument("--port", type=int, default=0)
    site.add_argument("--replay_port", type=int, default=0)
    site.add_argument("--capacity", type=int, default=20_000)
    site.add_argument("--tcp_congestion_control", default="", help="as launchers.buffer has it")
    feeder = commands.add_parser("feed")
    client = commands.add_parser("pull")
    client.add_argument("--client", choices=("longhaul", "reverb"), default="longhaul")
    client.add_argument("--cache_mb", type=int, default=1024)
    client.add_argument("--samples_per_s", type=float, default=0.0, help="pace of the learner; 0 is as fast as it can")
    client.add_argument("--link_budget", type=float, default=0.0, help="bytes/s that longhaul may use; 0 is no limit")
    client.add_argument(
        "--max_window", type=int, default=config_lib.default().link.max_window, help="batches in flight"
    )
    both = commands.add_parser("run")
    both.add_argument("--rtt_ms", type=float, default=50.0)
    both.add_argument("--rate_mbit", type=float, default=100.0)
    both.add_argument("--python", default=sys.executable)
    both.add_argument("--learner_python", default=sys.executable)
    for command in (feeder, client):
        command.add_argument("--address", required=True)
    for command in (client, both):
        command.add_argument("--try_s", type=float, default=4.0, help="of each setting of the stock client")
        command.add_argument("--seconds", type=float, default=20.0)
        command.add_argument("--warmup_s", type=float, default=15.0)
    for command in (site, feeder, client):
        command.add_argument("--credentials", default="", help="--out of launchers.certs: TLS and tokens")
    for command in (site, feeder, both):
        command.add_argument("--transitions", type=int, default=20_000)
        command.add_argument("--replay_ratio", type=float, default=8.0)
    arguments = parser.parse_args()
    pulls = {"longhaul": pull_longhaul, "reverb": pull_reverb}
    if arguments.command == "pull":
        print(json.dumps(pulls[arguments.client](arguments)), flush=True)
        os._exit(0)  # Reverb's samplers do not always let an interpreter end
    elif arguments.command == "run":
        print(json.dumps(run(arguments)))
    else:
        {"serve": serve, "feed": feed}[arguments.command](arguments)


if __name__ == "__main__":
    main()
