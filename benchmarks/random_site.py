"""A site that the learner's benchmark draws from: a buffer node with random transitions, and links to it.

  python -m benchmarks.random_site --network=mlp --rtts_ms=0,50,200

Prints a line `ready ADDRESS ADDRESS ...`, one for each round trip, when it is filled; then it inserts a transition for
each REPLAY_RATIO drawn, until SIGTERM.
"""

import argparse
import contextlib
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from longhaul.config import default
from longhaul.types import ExperienceSpec, NStepTransition

REPLAY_RATIO = 8.0
SPECS = {
    "mlp": ExperienceSpec("CartPole-v1", (4,), "float32", stack=1, num_actions=2, n_step=3, gamma=0.99),
    "nature": ExperienceSpec("ALE", (84, 84), "uint8", stack=4, num_actions=4, n_step=3, gamma=0.99),
}
_TRANSITIONS = {"mlp": 20_000, "nature": 10_000}
_RATE_MBIT = 1000.0


def make_config(network: str, batch_size: int, minibatches: int) -> Any:
    """Returns the configuration of both ends."""
    config = default()
    config.agent.network = network
    if network == "nature":
        config.env.stack = SPECS[network].stack
        config.agent.hidden = (512,)
    config.replay.capacity = 2 * _TRANSITIONS[network]
    config.learner.update(batch_size=batch_size, minibatches_per_pull=minibatches, max_updates=10**9)
    return config


def numbers(text: str) -> list[float]:
    """Returns numbers with commas between; none of an empty text."""
    return [float(word) for word in text.split(",") if word]


def serve(arguments: argparse.Namespace) -> None:
    """A buffer node, filled with random transitions, that inserts one for each eight drawn; says when it is filled."""
    from longhaul.gateway import Gateway
    from longhaul.inserter import Inserter
    from longhaul.nstep import NStepAccumulator
    from longhaul.relay import Relay
    from longhaul.site_client import SiteClient

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec = SPECS[arguments.network]
    gateway = Gateway(make_config(arguments.network, 1, 1), "127.0.0.1", 0, 0)
    gateway.start()
    stop = threading.Event()
    site = SiteClient(f"127.0.0.1:{gateway.port}", "actor", stop)
    site.announce(spec)
    writer = Inserter(site, spec, 1, spec.stack + spec.n_step + 1, 1024, 30.0)
    rng = np.random.default_rng(0)
    # As compressible as a game's frames: mostly flat, a few places differ.
    picture = (rng.standard_normal(spec.row_shape) * 60).astype(spec.row_dtype)
    steps = NStepAccumulator(spec.n_step, spec.gamma, spec.stack)
    row_ids = iter(range(1 + (secrets.randbits(30) << 33), 2**63 - 1))

    def insert() -> Iterator[NStepTransition]:
        first = True
        while True:
            row_id = next(row_ids)
            row = picture.copy()
            places = tuple(rng.integers(0, side, 8) for side in spec.row_shape)
            row[places] = rng.integers(0, 255, 8)
            writer.add_row(0, row_id, row)
            if first:
                steps.start(row_id)
                first = False
                continue
            for transition in steps.step(int(rng.integers(spec.num_actions)), 0.1, False, False, row_id):
                writer.add_transition(0, transition, 1, float(rng.exponential()) + 1e-3)
                yield transition

    source = insert()
    for _ in range(_TRANSITIONS[arguments.network]):
        next(source)
    relays = contextlib.ExitStack()
    target, rate = ("127.0.0.1", gateway.port), _RATE_MBIT * 1e6 / 8
    links = [relays.enter_context(Relay(target, rtt_ms / 1000, rate)) for rtt_ms in numbers(arguments.rtts_ms)]
    print("ready", *(relay.address for relay in links), flush=True)
    inserted, before = 0, gateway.read_stats()["samples"]
    try:
        while not stop.wait(0.02):
            while inserted < (gateway.read_stats()["samples"] - before) / REPLAY_RATIO:
                for _ in range(32):
                    next(source)
                inserted += 32
    except KeyboardInterrupt:
        pass
    finally:
        relays.close()
        writer.close()
        site.close()
        gateway.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=tuple(SPECS), default="mlp")
    parser.add_argument("--rtts_ms", default="0")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
