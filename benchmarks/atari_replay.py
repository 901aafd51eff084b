"""Played Atari transitions, and the two replays that the link's benchmark fills with them."""

import itertools
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from longhaul import config as config_lib
from longhaul.types import ExperienceSpec, NStepTransition

GAMES = ("Breakout", "Pong", "SpaceInvaders", "Seaquest")
STACK, N_STEP, GAMMA, BATCH = 4, 3, 0.99, 512
SPEC = ExperienceSpec("ALE", (84, 84), "uint8", STACK, 18, N_STEP, GAMMA)
STOCK_TABLE = "stock"
_INSERTS_AT_ONCE = 500  # before the counts are looked at again


def make_config(capacity: int, replay_ratio: float = 0.0) -> Any:
    """Returns a configuration; with a replay ratio, a site that is behind with its inserts holds the draws back."""
    config = config_lib.default()
    config.replay.update({"capacity": capacity, "min_size": 1000, "samples_per_insert": replay_ratio})
    config.env.stack = STACK
    config.agent.n_step = N_STEP
    return config


def play(game: str, steps: int, seed: int) -> Iterator[tuple[np.ndarray, int, float, bool, bool]]:
    """Yields (row, action, reward, terminated, first) of a random policy; row is what the action led to."""
    from longhaul import env as env_lib

    config = make_config(1000)
    config.env.id = f"ALE/{game}-v5"
    config.env.kwargs = {"frameskip": 1, "full_action_space": True, "repeat_action_probability": 0.0}
    config.env.atari.preprocess = True
    env = env_lib.make_env(config)
    rng = np.random.default_rng(seed)
    row, _ = env.reset(seed=seed)
    yield row, 0, 0.0, False, True
    for _ in range(steps):
        action = int(rng.integers(18))
        row, reward, terminated, truncated, _ = env.step(action)
        yield row, action, float(reward), terminated, False
        if terminated or truncated:
            row, _ = env.reset()
            yield row, 0, 0.0, False, True
    env.close()


class OurReplay:
    """Inserts transitions through longhaul's writer."""

    def __init__(self, address: str, stop: threading.Event, credentials: Any = None):
        from longhaul import channel
        from longhaul.inserter import Inserter
        from longhaul.proto import longhaul_pb2 as pb
        from longhaul.proto import longhaul_pb2_grpc as rpc
        from longhaul.site_client import SiteClient

        site = SiteClient(address, "actor", stop, credentials)
        site.announce(SPEC)
        self._writer = Inserter(site, SPEC, len(GAMES), STACK + N_STEP + 1, 1024, 30.0)
        self._stub = rpc.GatewayStub(channel.open_channel(address, credentials))
        self._request = pb.HealthRequest()

    def samples(self) -> int:
        """Returns how many were drawn so far."""
        return self._stub.Health(self._request, timeout=10).samples

    def add_row(self, game: int, row_id: int, row: np.ndarray) -> None:
        self._writer.add_row(game, row_id, row)

    def add(self, game: int, transition: NStepTransition, priority: float) -> None:
        self._writer.add_transition(game, transition, 1, priority)


class StockReplay:
    """Inserts transitions with Reverb's public writer, as its documentation shows."""

    def __init__(self, address: str):
        import reverb

        self._client = reverb.Client(address)
        self._kept = 2 * (STACK + N_STEP)
        self._writers = [self._client.trajectory_writer(self._kept) for _ in GAMES]
        for writer in self._writers:
            for name in ("frame", "action", "n_step_return", "discount"):
                writer.configure((name,), num_keep_alive_refs=self._kept, max_chunk_length=1)
        self._places: list[dict[int, int]] = [{} for _ in GAMES]
        self._pending = 0

    def samples(self) -> int:
        return self._client.server_info()[STOCK_TABLE].rate_limiter_info.sample_stats.completed

    def add_row(self, game: int, row_id: int, row: np.ndarray) -> None:
        self._places[game][row_id] = self._writers[game].episode_steps
        self._writers[game].append({"frame": row})

    def add(self, game: int, transition: NStepTransition, priority: float) -> None:
        writer, places = self._writers[game], self._places[game]
        steps = {"action": transition.action, "n_step_return": transition.n_step_return}
        writer.append({**{k: np.float32(v) for k, v in steps.items()}, "discount": np.float32(transition.discount)})
        history, length = writer.history, writer.episode_steps

        def frames(ids: tuple[int, ...]) -> Any:
            return history["frame"][[places[i] - length for i in ids]]

        # Reverb reads a cell that stands twice in a row as a slice of two: padded stacks are left out here.
        if len(set(transition.obs_ids)) < STACK or len(set(transition.next_ids)) < STACK:
            return
        writer.create_item(
            STOCK_TABLE,
            priority,
            {
                "obs": frames(transition.obs_ids),
                "next_obs": frames(transition.next_ids),
                "action": history["action"][-1],
                "n_step_return": history["n_step_return"][-1],
                "discount": history["discount"][-1],
            },
        )
        self._pending += 1
        if self._pending % 64 == 0:
            for one in self._writers:
                one.flush(32)
        while len(places) > self._kept:
            del places[next(iter(places))]


class Feeder:
    """Inserts played transitions: first until the replay is full, then at the replay ratio, from the same plays."""

    def __init__(self, replays: list[OurReplay | StockReplay], transitions: int, stop: threading.Event):
        self._stop = stop
        steps = transitions // len(GAMES)
        self._plays = [list(play(game, steps, seed)) for seed, game in enumerate(GAMES)]
        self._ids = itertools.count(secrets.randbits(30) << 33)
        self._rng = np.random.default_rng(0)
        self._replays = replays
        self._sources = [self._insert_for_ever(replay) for replay in replays]

    def _insert_for_ever(self, replay: OurReplay | StockReplay) -> Iterator[None]:
        """Inserts one transition at a time, game by game in turn, yielding after each."""
        streams = [self._one_game(replay, g) for g in range(len(GAMES))]
        while True:
            for stream in streams:
                yield next(stream)

    def _one_game(self, replay: OurReplay | StockReplay, game: int) -> Iterator[None]:
        from longhaul.nstep import NStepAccumulator

        steps = NStepAccumulator(N_STEP, GAMMA, STACK)
        while True:
            for row, action, reward, terminated, first in self._plays[game]:
                row_id = next(self._ids)
                replay.add_row(game, row_id, row)
                if first:
                    steps.abandon()
                    steps.start(row_id)
                    continue
                for transition in steps.step(action, float(np.sign(reward)), terminated, False, row_id):
                    replay.add(game, transition, float(self._rng.exponential()) + 1e-3)
                    yield

    def insert(self, count: int) -> None:
        """Inserts into every replay."""
        for source in self._sources:
            for _ in range(count):
                next(source)

    def follow(self, ratio: float) -> None:
        """Inserts one transition per `ratio` samples drawn, into the replay they were drawn from."""
        before = [replay.samples() for replay in self._replays]
        inserted = [0 for _ in self._replays]
        behind = False
        while not self._stop.wait(0.0 if behind else 0.05):
            behind = False
            for i, replay in enumerate(self._replays):
                due = max(0, int((replay.samples() - before[i]) / ratio) - inserted[i])
                behind = behind or due > _INSERTS_AT_ONCE
                due = min(_INSERTS_AT_ONCE, due)
                for _ in range(due):
                    next(self._sources[i])
                inserted[i] += due


def stock_server(capacity: int, port: int) -> Any:
    import reverb

    table = reverb.Table(
        STOCK_TABLE,
        sampler=reverb.selectors.Prioritized(0.6),
        remover=reverb.selectors.Fifo(),
        max_size=capacity,
        rate_limiter=reverb.rate_limiters.MinSize(1000),
    )
    return reverb.Server([table], port=port)
