"""The actor against the oracle: every stored transition is checked against what the oracle must have done.

Most tests record what the actor hands to its writer; the last ones read it back from a real Reverb server.
"""

import math
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import fakes

from longhaul import actor as actor_lib
from longhaul import codec, networks
from longhaul import config as config_lib
from longhaul import streams as streams_lib
from longhaul.errors import WorkerFailed
from longhaul.policy import Policy
from longhaul.site_client import SiteDescription
from longhaul.types import ROW_COUNTER_BITS, ROW_INCARNATION_BITS, Snapshot

MODES = config_lib.AUTORESET_MODES
GAMMA = 0.5  # dyadic, so that the oracle's returns are exact


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(streams_lib, "FIRST_BACKOFF_S", 0.001)


class Stored(NamedTuple):
    """One transition as a reader of the replay sees it."""

    obs: tuple[fakes.Place, ...]
    next_obs: tuple[fakes.Place, ...]
    action: int
    n_step_return: float
    discount: float


class Site:
    """The gateway's client as the actor sees it; sets `stop` after some acting steps."""

    def __init__(self, stop, acts):
        self._stop, self._acts = stop, acts
        self.acts = 0
        self.snapshots = {}  # acting step -> the snapshot held from then on
        self.pauses = set()  # acting steps before which it asks to wait, a few times
        self._pausing = 0
        self.description = SiteDescription("run", None, 1, 1, 0.6, 0, 0)
        self.actions = {}  # acting step -> what happens before it

    def announce(self, spec, timeout_s=None):
        self.spec = spec
        return self.description

    def start(self):
        pass

    @property
    def paused(self):
        if self.acts in self.pauses and self._pausing < 3:
            self._pausing += 1
            return True
        self._pausing = 0
        if self.acts == self._acts - 1:
            self._stop.set()
        self.actions.pop(self.acts, lambda: None)()
        self.acts += 1
        return False

    def newest_weights(self):
        held = [step for step in self.snapshots if step < self.acts]
        return self.snapshots[max(held)] if held else None


class Recorder:
    """A writer that keeps what it is handed, and insists on the writer's contract."""

    def __init__(self, site, spec, num_streams, keep_rows, max_pending_items, write_timeout_s):
        self.spec, self.keep_rows = spec, keep_rows
        self.rows = {}
        self.streams = [[] for _ in range(num_streams)]
        self.transitions = []  # (stream, transition, version, priority)
        self.counters = {"written_items": 0, "dropped_items": 0}
        self.closed = False

    def add_row(self, stream, row_id, row):
        assert row_id not in self.rows
        assert row.shape == self.spec.row_shape
        assert row.dtype == self.spec.row_dtype
        self.rows[row_id] = np.array(row)
        self.streams[stream].append(row_id)

    def add_transition(self, stream, transition, policy_version, priority):
        newest = self.streams[stream][-self.keep_rows :]
        assert set(transition.obs_ids + transition.next_ids) <= set(newest)
        self.transitions.append((stream, transition, policy_version, priority))
        self.counters["written_items"] += 1
        return True

    def close(self):
        self.closed = True

    def stacks(self, ids):
        return np.stack([self.rows[i] for i in ids])


class Metrics:
    def __init__(self):
        self.lines = []

    def write(self, step, figures):
        self.lines.append((step, dict(figures)))


class Run(NamedTuple):
    actor: actor_lib.Actor
    writer: Recorder
    site: Site
    metrics: Metrics


def _config(n_step=3, stack=1, mode="next_step", image=False, num_envs=2, epsilon=0.4, env_id="", groups=1, **kwargs):
    config = config_lib.default()
    config.env.update(
        {
            "id": env_id or ("fakes:OracleImage-v0" if image else "fakes:Oracle-v0"),
            "stack": stack,
            "autoreset_mode": mode,
            "num_envs": num_envs,
        }
    )
    for name, value in kwargs.items():
        config.env.kwargs[name] = value
    config.agent.update({"n_step": n_step, "gamma": GAMMA, "hidden": (8,), "network": "mlp"})
    config.actor.epsilon, config.actor.groups = epsilon, groups
    return config


def _make(config, acts, actor_index=0):
    stop = threading.Event()
    site, metrics, made = Site(stop, acts), Metrics(), []

    def open_writer(*args):
        made.append(Recorder(*args))
        return made[0]

    actor = actor_lib.Actor(config, actor_index, site, metrics, stop, open_writer)
    return actor, site, metrics, made


def _run(config, acts=80, actor_index=0, prepare=lambda site: None):
    actor, site, metrics, made = _make(config, acts, actor_index)
    prepare(site)
    actor.run()
    return Run(actor, made[0], site, metrics)


def _stored(writer, decode):
    """What the recorder holds, in places instead of rows."""
    found = []
    for _, transition, _, _ in writer.transitions:
        obs, next_obs = (
            tuple(decode(writer.rows[i]) for i in ids) for ids in (transition.obs_ids, transition.next_ids)
        )
        found.append(Stored(obs, next_obs, transition.action, transition.n_step_return, transition.discount))
    return found


def _expected(place, n_step, stack):
    """The transition that begins at a place, worked out from the oracle's definition alone; its action is unknown."""
    identity, episode, t = place
    length = fakes.LENGTHS[episode % len(fakes.LENGTHS)]
    terminates = fakes.ENDS[episode % len(fakes.ENDS)] in ("terminated", "both")
    k = min(n_step, length - t)

    def stacked(step):
        return tuple(fakes.Place(identity, episode, max(0, step - stack + 1 + i)) for i in range(stack))

    total = sum(GAMMA**i * fakes.oracle_reward(fakes.Place(identity, episode, t + 1 + i)) for i in range(k))
    discount = 0.0 if terminates and t + k == length else GAMMA**k
    return Stored(stacked(t), stacked(t + k), -1, total, discount)


def _check(stored, n_step, stack, float_error=0.0):
    """Every transition is the oracle's, none is there twice, and none is missing from an episode before the last."""
    places = [transition.obs[-1] for transition in stored]
    assert len(set(places)) == len(places)
    for transition in stored:
        expected = _expected(transition.obs[-1], n_step, stack)
        assert transition.obs == expected.obs
        assert transition.next_obs == expected.next_obs
        assert transition.n_step_return == pytest.approx(expected.n_step_return, rel=float_error, abs=0)
        assert transition.discount == expected.discount
        assert 0 <= transition.action < 3
    last = {}
    for identity, episode, _ in places:
        last[identity] = max(episode, last.get(identity, 0))
    for identity, episodes in last.items():
        for episode in range(episodes):
            length = fakes.LENGTHS[episode % len(fakes.LENGTHS)]
            assert {fakes.Place(identity, episode, t) for t in range(length)} <= set(places)
    return last


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_step,stack,groups", [(1, 1, 1), (3, 1, 2), (5, 1, 1), (1, 4, 2), (3, 4, 1), (5, 4, 2)])
def test_every_stored_transition_is_the_oracles(n_step, stack, groups, mode):
    image = stack > 1
    run = _run(_config(n_step, stack, mode, image, groups=groups))
    last = _check(_stored(run.writer, fakes.decode_image if image else fakes.decode_vector), n_step, stack)
    seeds = [streams_lib.stream_seed(1, stream) for stream in range(2)]
    assert set(last) == {fakes.identity_of(seed) for seed in seeds}
    assert min(last.values()) > 6
    assert run.writer.closed


def test_all_modes_store_the_same_transitions():
    sets = []
    for mode in MODES:
        stored = _stored(_run(_config(mode=mode, epsilon=0.0)).writer, fakes.decode_vector)
        sets.append({transition for transition in stored if transition.obs[-1].episode < 10})
    assert len(sets[0]) == 2 * 2 * sum(fakes.LENGTHS)
    assert sets[0] == sets[1] == sets[2]


def test_groups_act_as_one_does():
    """Without exploration each stream's experience is the same, priorities and all, however streams are grouped."""
    alone, grouped = (_run(_config(stack=4, num_envs=4, epsilon=0.0, groups=groups)) for groups in (1, 2))

    def of_stream(run, number):
        found = [t for t in run.writer.transitions if t[0] == number]
        obs = [tuple(fakes.decode_vector(run.writer.rows[i]) for i in t[1].obs_ids) for t in found]
        return [(o, t.action, t.n_step_return, t.discount) for o, (_, t, _, _) in zip(obs, found)], [
            t[3] for t in found
        ]

    for number in range(4):
        (acted, priorities), (others, again) = of_stream(alone, number), of_stream(grouped, number)
        assert len(acted) > 50 and acted == others
        np.testing.assert_allclose(priorities, again, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_streams_and_actors_of_a_site_never_mix(groups):
    runs = [_run(_config(num_envs=4, groups=groups), actor_index=index) for index in range(2)]
    identities = []
    for run in runs:
        for stream, transition, _, _ in run.writer.transitions:
            rows = [fakes.decode_vector(run.writer.rows[i]) for i in transition.obs_ids + transition.next_ids]
            assert len({(place.identity, place.episode) for place in rows}) == 1
            identities.append((run.actor, stream, rows[0].identity))
    assert len({identity for *_, identity in identities}) == len(set(identities)) == 8
    assert not set(runs[0].writer.rows) & set(runs[1].writer.rows)


def test_a_failure_never_bridges_two_episodes():
    run = _run(_config(fail_share=0.03), acts=400)
    failures = run.metrics.lines[-1][1]["env_failures"]
    assert failures > 5
    for transition in _stored(run.writer, fakes.decode_vector):
        expected = _expected(transition.obs[-1], 3, 1)
        assert transition._replace(action=-1) == expected


def test_environments_that_keep_failing_end_the_actor_with_everything_closed():
    actor, _, metrics, made = _make(_config(fail_share=1.0), 100)
    with pytest.raises(WorkerFailed, match="failed 6 times in a row"):
        actor.run()
    assert made[0].closed
    assert metrics.lines


@pytest.mark.parametrize("start", [1, -1])
def test_random_and_greedy_actions_are_legal_whatever_the_start(start):
    for epsilon in (0.0, 1.0):
        run = _run(_config(start=start, epsilon=epsilon), acts=30)
        assert run.metrics.lines[-1][1]["env_failures"] == 0  # the oracle raises at an action that is not its own
        assert {t.action for _, t, _, _ in run.writer.transitions} <= {0, 1, 2}


@pytest.mark.parametrize("group", range(4))
def test_a_group_explores_by_its_own_part_of_the_ladder(group, monkeypatch):
    config = _config(num_envs=4, groups=4)
    actor, *_, made = _make(config, acts=40)
    ladder = np.zeros(4)
    ladder[group] = 1.0
    monkeypatch.setattr(actor._exploration, "epsilons", lambda env_steps: ladder)
    actor.run()
    actions = [[t.action for stream, t, _, _ in made[0].transitions if stream == i] for i in range(4)]
    assert [len(set(taken)) > 1 for taken in actions] == [i == group for i in range(4)]


def test_an_actor_takes_its_own_part_of_the_ladder():
    config = _config(num_envs=4)
    figures = _run(config, acts=2, actor_index=1).metrics.lines[-1][1]
    assert figures["epsilon_max"] == pytest.approx(0.4 ** (1 + 4 * 7 / 7))
    assert figures["epsilon_min"] == pytest.approx(0.4 ** (1 + 7 * 7 / 7))


def test_row_ids_are_an_incarnation_and_a_counter():
    ids, others = actor_lib.RowIds(), actor_lib.RowIds()
    taken = [ids.take() for _ in range(100)]
    assert taken == list(range(taken[0], taken[0] + 100))
    assert taken[0] % 2**ROW_COUNTER_BITS == 0
    assert 0 <= taken[0] < 2 ** (ROW_COUNTER_BITS + ROW_INCARNATION_BITS) <= 2**63
    assert others.take() >> ROW_COUNTER_BITS != taken[0] >> ROW_COUNTER_BITS


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_first_priorities_are_the_actors_own_td_errors(mode, groups):
    config = _config(stack=4, mode=mode, groups=groups)
    run = _run(config)
    policy = Policy(run.writer.spec, config, 1)
    assert len(run.writer.transitions) > 100
    for _, transition, version, priority in run.writer.transitions:
        q_value = policy.q_values(run.writer.stacks(transition.obs_ids)[None])[0, transition.action]
        value = policy.q_values(run.writer.stacks(transition.next_ids)[None])[0].max()
        error = transition.n_step_return + transition.discount * value - q_value
        assert priority == pytest.approx(abs(error) + config.replay.priority_epsilon, rel=1e-3, abs=1e-3)
        assert version == 0


def _weights(config, value=None, seed=0):
    spec = actor_lib.env_lib.make_spec(config)
    flat = networks.flatten_params(networks.init_params(networks.make_network(spec, config), spec, seed))
    if value is not None:
        flat = {name: np.full_like(leaf, value) for name, leaf in flat.items()}
    return flat


def test_published_weights_are_acted_on_and_stored_by_version():
    config = _config(epsilon=0.0, mode="same_step")
    flat = _weights(config, 0.0)
    last_bias = next(name for name in flat if "advantage" in name and "bias" in name)
    flat[last_bias][1] = 3.0  # Q = (-1, 2, -1) everywhere
    payload = codec.pack_weights(flat, "float32")
    run = _run(config, prepare=lambda site: site.snapshots.update({10: Snapshot(5, 7, payload)}))
    acted = [(t, priority) for _, t, version, priority in run.writer.transitions if version == 7]
    assert len(acted) > 50
    for transition, priority in acted:
        assert transition.action == 1
        error = transition.n_step_return + transition.discount * 2.0 - 2.0
        assert priority == pytest.approx(abs(error) + config.replay.priority_epsilon)
    figures = run.metrics.lines[-1][1]
    assert (figures["weights_epoch"], figures["weights_version"]) == (5, 7)
    assert figures["weights_age_s"] >= 0


def test_an_older_version_of_whatever_the_gateway_holds_is_adopted_too():
    config = _config()
    payload = codec.pack_weights(_weights(config), "float32")
    held = {5: Snapshot(1, 900, payload), 20: Snapshot(2, 1, payload), 40: Snapshot(1, 3, payload)}
    run = _run(config, prepare=lambda site: site.snapshots.update(held))
    assert {version for _, _, version, _ in run.writer.transitions} == {0, 900, 1, 3}
    figures = run.metrics.lines[-1][1]
    assert (figures["weights_epoch"], figures["weights_version"]) == (1, 3)


def test_weights_that_do_not_fit_or_are_not_finite_are_refused_and_counted():
    config = _config()
    good = codec.pack_weights(_weights(config), "float32")
    other = _config()
    other.agent.hidden = (9,)
    held = {
        5: Snapshot(1, 1, good),
        15: Snapshot(1, 2, codec.pack_weights(_weights(config, math.nan), "float32")),
        25: Snapshot(1, 3, codec.pack_weights(_weights(other), "float32")),
        35: Snapshot(1, 4, good[:-3]),
    }
    run = _run(config, prepare=lambda site: site.snapshots.update(held))
    assert {version for _, _, version, _ in run.writer.transitions} == {0, 1}
    figures = run.metrics.lines[-1][1]
    assert figures["refused_weights"] == 3
    assert figures["weights_version"] == 1


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e300])
def test_rewards_that_are_not_finite_are_never_stored(reward):
    run = _run(_config(env_id="fakes:Reward-v0", reward=reward), acts=20)
    assert not run.writer.transitions
    assert run.metrics.lines[-1][1]["refused_transitions"] == 2 * (20 - 3)


def test_a_site_that_asks_to_wait_is_obeyed_visibly():
    run = _run(_config(num_envs=1), acts=20, prepare=lambda site: site.pauses.update({5, 9}))
    assert run.metrics.lines[-1][1]["paused_s"] >= 6 * actor_lib._PAUSE_LOOK_S * 0.9
    _check(_stored(run.writer, fakes.decode_vector), 3, 1)


def test_a_pause_ends_with_the_stop_event():
    stop = threading.Event()
    site = type("Paused", (Site,), {"paused": True})(stop, 10)
    metrics = Metrics()
    threading.Timer(0.2, stop.set).start()
    actor_lib.Actor(_config(), 0, site, metrics, stop, Recorder).run()
    assert metrics.lines[-1][0] == 0


def test_metrics_tell_what_happened():
    config = _config(mode="same_step", num_envs=2)
    config.metrics.period_s = 1e-9
    run = _run(config, acts=60)
    steps = [step for step, _ in run.metrics.lines]
    assert steps == sorted(steps)
    last = run.metrics.lines[-1][1]
    assert steps[-1] == last["env_steps"] == 2 * 60
    assert last["episodes"] == 2 * 10  # 56 steps are ten episodes
    assert last["written_items"] == len(run.writer.transitions)
    assert any("episode_return" in figures for _, figures in run.metrics.lines)
    assert not all("episode_return" in figures for _, figures in run.metrics.lines)
    lengths = {figures["episode_length"] for _, figures in run.metrics.lines if "episode_length" in figures}
    assert lengths == {float(length) for length in fakes.LENGTHS}


def test_the_same_seed_acts_the_same_and_zero_is_a_seed():
    def actions(seed):
        config = _config(epsilon=1.0)
        config.seed = seed
        return [t.action for _, t, _, _ in _run(config, acts=30).writer.transitions]

    assert actions(0) == actions(0)
    assert actions(0) != actions(1)


class RealSite(Site):
    """As Site, with a real buffer node behind it."""

    def __init__(self, stop, acts, gateway):
        super().__init__(stop, acts)
        self._clients = []
        self._go_to(gateway)

    def _go_to(self, gateway):
        from longhaul.site_client import SiteClient

        self._clients.append(SiteClient(f"127.0.0.1:{gateway.port}", "actor", self._stop))
        if len(self._clients) > 1:
            self.description = self._clients[-1].announce(self.spec)

    def move(self, gateway):
        self._go_to(gateway)

    def announce(self, spec, timeout_s=None):
        super().announce(spec)
        self.description = self._clients[-1].announce(spec)
        return self.description

    def insert(self, requests):
        return self._clients[-1].insert(requests)

    def explain(self, error):
        return self._clients[-1].explain(error)

    def close(self):
        for client in self._clients:
            client.close()


@pytest.fixture
def node():
    """Starts real buffer nodes for the oracle's transitions, drawn from uniformly."""
    pytest.importorskip("reverb")
    from longhaul.gateway import Gateway

    nodes = []

    def start(config):
        config.replay.update({"capacity": 5000, "min_size": 1, "samples_per_insert": 0.0, "priority_exponent": 0.0})
        nodes.append(Gateway(config))
        nodes[-1].start()
        return nodes[-1]

    yield start
    for one in nodes:
        one.stop(0.1)


def _run_into(config, gateway, acts, prepare=lambda site: None):
    stop = threading.Event()
    site, metrics = RealSite(stop, acts, gateway), Metrics()
    prepare(site)
    actor_lib.Actor(config, 0, site, metrics, stop).run()
    site.close()
    return metrics.lines[-1][1]


def _read_back(gateway, count, decode):
    """Draws until every item has come; returns them in places, and their priorities."""
    from longhaul import buffer

    server, rows = gateway._table, gateway._rows
    spec, sampler, found = server.spec, buffer.ReplaySampler(server, 256), {}
    shape = (2 * spec.stack, *spec.row_shape)
    while len(found) < count:
        drawn = sampler.draw(threading.Event())
        for i, key in enumerate(drawn.keys.tolist()):
            unpacked = codec.unpack_cells(rows.get(drawn.row_ids[i].tolist()), spec.row_bytes)
            places = tuple(decode(row) for row in np.frombuffer(unpacked, spec.row_dtype).reshape(shape))
            found[key] = (
                Stored(
                    places[: spec.stack],
                    places[spec.stack :],
                    int(drawn.actions[i]),
                    float(drawn.returns[i]),
                    float(drawn.discounts[i]),
                ),
                float(drawn.priorities[i]),
            )
    return found


@pytest.mark.parametrize(("n_step", "stack", "mode"), [(1, 1, "next_step"), (3, 4, "same_step"), (5, 4, "disabled")])
def test_a_real_replay_gives_back_the_oracles_transitions_one_by_one(node, n_step, stack, mode):
    image = stack > 1
    config = _config(n_step, stack, mode, image)
    gateway = node(config)
    figures = _run_into(config, gateway, 80)
    size, inserted, _ = gateway._table.info()
    assert size == inserted == figures["written_items"] > 100
    assert figures["dropped_items"] == 0
    found = _read_back(gateway, size, fakes.decode_image if image else fakes.decode_vector)
    _check([transition for transition, _ in found.values()], n_step, stack, float_error=1e-6)
    assert all(math.isfinite(priority) and priority > 0 for _, priority in found.values())


def test_an_actor_keeps_acting_while_its_node_is_gone_and_goes_on_when_told_of_another(node):
    config = _config(num_envs=1)
    config.actor.write_timeout_s = 0.2
    config.actor.max_pending_items = 8
    first, second = node(config), node(config)

    def prepare(site):
        def move():
            site.move(second)
            while second.read_stats()["connected_actors"] == 0:  # the writer goes over in its own time
                time.sleep(0.01)

        site.actions = {40: lambda: first.stop(0.1), 200: move}

    figures = _run_into(config, first, 400, prepare)
    assert figures["env_steps"] > 300
    assert figures["dropped_items"] > 0
    size, _, _ = second._table.info()
    assert size > 100
    stored = [transition for transition, _ in _read_back(second, size, fakes.decode_vector).values()]
    for transition in stored:
        assert transition._replace(action=-1) == _expected(transition.obs[-1], 3, 1)


def test_an_actor_follows_a_real_buffer_node_through_its_restart():
    pytest.importorskip("reverb")
    from longhaul.gateway import Gateway
    from longhaul.site_client import SiteClient

    config = _config(num_envs=1)
    config.replay.update({"capacity": 500, "min_size": 1, "samples_per_insert": 0.0})
    config.actor.write_timeout_s = 0.2
    stop, metrics = threading.Event(), Metrics()
    gateway = Gateway(config)
    gateway.start()
    site = SiteClient(f"127.0.0.1:{gateway.port}", "actor", stop)
    failures = []

    def work():
        try:
            actor_lib.Actor(config, 0, site, metrics, stop).run()
        except Exception as error:
            failures.append(error)

    def wait_for_inserts(node):
        for _ in range(600):
            if node.read_stats()["inserts"] > 50:
                return
            assert not failures
            stop.wait(0.1)
        raise AssertionError(f"no inserts: {node.read_stats()}, {metrics.lines[-1:]}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_for_inserts(gateway)
        gateway.stop()
        gateway = Gateway(config, port=gateway.port)
        gateway.start()
        wait_for_inserts(gateway)
    finally:
        stop.set()
        thread.join(30)
        site.close()
        gateway.stop()
    assert not thread.is_alive()
    assert not failures
    assert metrics.lines[-1][1]["reconnects"] == 1
