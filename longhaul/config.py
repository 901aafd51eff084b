"""The configuration: every field with its default, its meaning and its bounds.

A file in configs/ starts from `default()` and changes what its task needs. Both ends of the link read
the same file; each field has one reader. Units are in the names.
"""

import math
from collections.abc import Callable
from typing import Any

from ml_collections import config_dict

from longhaul.errors import ConfigError

AUTORESET_MODES = ("next_step", "same_step", "disabled")
NETWORKS = ("auto", "mlp", "nature", "impala", "minatar")
DISTRIBUTIONS = ("none", "c51", "qr")


def default() -> config_dict.ConfigDict:
    """Returns the defaults; a task's file changes copies of them."""
    return config_dict.create(
        seed=1,
        env=dict(
            id="CartPole-v1",  # any gymnasium id, or "module:Id" to import the module that registers it
            kwargs=config_dict.ConfigDict(),  # passed to gymnasium.make
            num_envs=4,  # environment streams per actor process
            vectorization="sync",  # "sync": in the actor's process; "async": one process each
            autoreset_mode="next_step",  # gymnasium's three modes
            max_episode_steps=0,  # cap on an episode's steps (truncation); 0 keeps the environment's own
            stack=1,  # rows per observation
            atari=dict(
                preprocess=False,  # the standard ALE preprocessing below
                frame_skip=4,  # frames per action; max over the last two
                screen_size=84,  # pixels, grey
                noop_max=30,  # no-op actions at an episode's start, at most
                episodic_life=False,  # a lost life ends the episode for learning
                clip_rewards=True,  # to their sign; never in evaluation
            ),
        ),
        actor=dict(
            num_actors=2,  # actor processes at the site: the epsilon ladder's length is num_actors * num_envs
            groups=1,  # of an actor's streams, stepped in turns; the policy values one meanwhile; divides env.num_envs
            epsilon=0.4,  # base of the ladder epsilon^(1 + i*alpha/(N-1)) (Horgan et al. 2018)
            epsilon_alpha=7.0,
            epsilon_decay_steps=0,  # of an actor, over which all its epsilons fall in a line from 1; 0: the ladder
            max_pending_items=256,  # transitions written and not yet confirmed, per actor
            write_timeout_s=5.0,  # how long a full pipe may hold an actor before transitions are dropped
            max_env_failures=5,  # consecutive failures of an environment before the actor gives up
            steps_per_s=0.0,  # environment steps per second of one actor process; 0: as many as it can
            probe_share=0.0,  # share of transitions held out of the replay, for the loss on a probe; 0: none
        ),
        agent=dict(
            n_step=3,
            gamma=0.99,  # discount per step
            network="auto",  # one of NETWORKS ("auto" goes by the rows' shape), or your own as "module:Class"
            hidden=(256, 256),  # widths of the MLP's hidden layers; a CNN's dense layer takes the last
            dueling=True,  # value and advantage apart
            double=True,  # the online network chooses the action valued; without effect under Munchausen
            huber_delta=1.0,  # 0: squared error; without distribution and for "qr"
            distribution="none",  # "c51" (Bellemare et al. 2017) or "qr" (Dabney et al. 2018) learns distributions
            atoms=51,  # of a distribution: C51's atoms or QR-DQN's quantiles (200 there)
            v_min=-10.0,  # C51's lowest atom, a return as the network has it (scaled, rescaled)
            v_max=10.0,  # C51's highest atom
            noisy_sigma=0.0,  # initial noise of noisy layers (0.5 in Fortunato et al. 2018); 0: plain layers
            munchausen_alpha=0.0,  # share of the log-policy added to the return (0.9 in Vieillard et al. 2020); 0: none
            munchausen_temperature=0.03,  # of the softmax policy
            munchausen_clip=-1.0,  # the log-policy, times the temperature, is cut there
            reward_scale=1.0,  # returns are multiplied by it where they are learned from
            value_rescaling=False,  # values are R2D2's h of returns (Kapturowski et al. 2019)
            compute_dtype="float32",  # or "bfloat16": of the layers' products; parameters, values, losses: float32
        ),
        replay=dict(
            capacity=100_000,  # transitions
            min_size=1_000,  # transitions before the first sample
            priority_exponent=0.6,  # alpha
            priority_epsilon=1e-3,  # added to |TD error|
            initial_priority="td_error",  # of a new transition: the actor's, or "max": the highest given so far
            beta_start=0.4,  # importance-weight exponent at the first update
            beta_end=1.0,
            beta_updates=100_000,  # updates over which beta goes from start to end
            samples_per_insert=8.0,  # samples drawn per transition inserted; who is ahead waits; 0: nobody waits
            error_buffer=0.1,  # how far either side may run ahead, as a share of min_size (in inserts)
            spool=2_000,  # transitions waiting at a site that forwards in order of arrival; the oldest are dropped
        ),
        learner=dict(
            batch_size=64,  # transitions per update, B
            minibatches_per_pull=1,  # updates per batch pulled over the link, K
            learning_rate=1e-3,
            adam_epsilon=1e-8,
            max_grad_norm=10.0,  # global norm; 0: no clipping
            target_period_updates=200,  # copy of the online network; ignored when target_tau is set
            target_tau=0.0,  # Polyak step per update; 0: periodic copies
            max_updates=50_000,  # the run ends then
            updates_per_s=0.0,  # at most; 0: as many as it can
            publish_period_updates=100,  # between publications of weights
            cache_bytes=256 * 2**20,  # device memory for cached rows, on each device
            reuse=0.0,  # updates on what the cache holds, per update on what has just crossed
            outage_draws=4.0,  # transitions drawn from the cache in outages, per one that crossed, at most; 0: wait
            devices=1,  # local devices that share out each minibatch, which must divide; 0: all there are
            checkpoint_period_s=60.0,
            keep_checkpoints=3,
        ),
        link=dict(
            max_window=64,  # batches in flight at most; the window itself is tuned
            priority_bytes=4,  # bytes per priority sent back: 4 (float32) or 2 (float16)
            row_level=0,  # zstd level for rows; 0: chosen by measured CPU and link
            weights_dtype="bfloat16",  # or "float32"
            weights_budget_bytes_per_s=0.0,  # stretches the publishing period; 0: no budget
            experiences_per_s=0.0,  # transitions that cross per second, at most; 0: no cap
        ),
        evaluation=dict(
            episodes=20,
            seed=10_000,  # episode e is seeded with seed + e
            max_steps=27_000,  # per episode; a longer one is cut and reported as capped
            period_s=5.0,  # between evaluations while a run goes on
            target_return=math.inf,  # mean return that ends a run as solved
        ),
        metrics=dict(
            period_s=1.0,  # between lines of metrics/<role>.jsonl
            tensorboard=True,
            score_transfers=False,  # the priority of what has crossed the link, under the network at its arrival
        ),
    )


def _positive(x: Any) -> bool:
    return x > 0


def _not_negative(x: Any) -> bool:
    return x >= 0


def _unit(x: Any) -> bool:
    return 0 <= x <= 1


def _holds(test: Callable[[Any], bool], value: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return False
    try:
        return test(value)
    except TypeError:  # of a kind that does not compare, such as a text among numbers
        return False


def _one_of(*allowed: str) -> Callable[[Any], bool]:
    return lambda x: x in allowed


def _is_network(x: Any) -> bool:
    return x in NETWORKS or (len(x.split(":")) == 2 and all(x.split(":")))


# field -> (test, what it must be)
_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "env.num_envs": (_positive, "at least 1"),
    "actor.groups": (_positive, "at least 1"),
    "env.vectorization": (_one_of("sync", "async"), "'sync' or 'async'"),
    "env.autoreset_mode": (_one_of(*AUTORESET_MODES), f"one of {AUTORESET_MODES}"),
    "env.max_episode_steps": (_not_negative, "0 or more"),
    "env.stack": (lambda x: 1 <= x <= 32, "from 1 to 32"),
    "env.atari.frame_skip": (_positive, "at least 1"),
    "env.atari.screen_size": (_positive, "at least 1"),
    "env.atari.noop_max": (_not_negative, "0 or more"),
    "actor.num_actors": (_positive, "at least 1"),
    "actor.epsilon": (_unit, "from 0 to 1"),
    "actor.epsilon_alpha": (_not_negative, "0 or more"),
    "actor.epsilon_decay_steps": (_not_negative, "0 (the ladder) or more"),
    "actor.max_pending_items": (_positive, "at least 1"),
    "actor.write_timeout_s": (_positive, "more than 0"),
    "actor.max_env_failures": (_positive, "at least 1"),
    "actor.steps_per_s": (_not_negative, "0 (as many as it can) or more"),
    "actor.probe_share": (lambda x: 0 <= x < 1, "from 0 (none) to less than 1"),
    "agent.n_step": (lambda x: 1 <= x <= 100, "from 1 to 100"),
    "agent.gamma": (_unit, "from 0 to 1"),
    "agent.network": (_is_network, f"one of {NETWORKS}, or 'module:Class'"),
    "agent.hidden": (lambda x: len(x) > 0 and all(w > 0 for w in x), "one positive width or more"),
    "agent.huber_delta": (_not_negative, "0 or more"),
    "agent.distribution": (_one_of(*DISTRIBUTIONS), f"one of {DISTRIBUTIONS}"),
    "agent.atoms": (lambda x: 2 <= x <= 1_000, "from 2 to 1000"),
    "agent.v_min": (math.isfinite, "finite"),
    "agent.v_max": (math.isfinite, "finite"),
    "agent.noisy_sigma": (_not_negative, "0 (plain layers) or more"),
    "agent.munchausen_alpha": (_unit, "from 0 (none) to 1"),
    "agent.munchausen_temperature": (_positive, "more than 0"),
    "agent.munchausen_clip": (lambda x: x <= 0, "0 or less"),
    "agent.reward_scale": (lambda x: 0 < x < math.inf, "more than 0 and finite"),
    "agent.compute_dtype": (_one_of("float32", "bfloat16"), "'float32' or 'bfloat16'"),
    "replay.capacity": (_positive, "at least 1"),
    "replay.min_size": (_positive, "at least 1"),
    "replay.priority_exponent": (_unit, "from 0 to 1"),
    "replay.priority_epsilon": (_positive, "more than 0, or a transition with no error is never drawn again"),
    "replay.initial_priority": (_one_of("td_error", "max"), "'td_error' or 'max'"),
    "replay.beta_start": (_unit, "from 0 to 1"),
    "replay.beta_end": (_unit, "from 0 to 1"),
    "replay.beta_updates": (_positive, "at least 1"),
    "replay.samples_per_insert": (_not_negative, "0 (no limit) or more"),
    "replay.error_buffer": (_positive, "more than 0"),
    "replay.spool": (_positive, "at least 1"),
    "learner.batch_size": (_positive, "at least 1"),
    "learner.minibatches_per_pull": (_positive, "at least 1"),
    "learner.learning_rate": (_positive, "more than 0"),
    "learner.adam_epsilon": (_positive, "more than 0"),
    "learner.max_grad_norm": (_not_negative, "0 (no clipping) or more"),
    "learner.target_period_updates": (_positive, "at least 1"),
    "learner.target_tau": (_unit, "from 0 to 1"),
    "learner.max_updates": (_positive, "at least 1"),
    "learner.updates_per_s": (_not_negative, "0 (as many as it can) or more"),
    "learner.publish_period_updates": (_positive, "at least 1"),
    "learner.cache_bytes": (_positive, "at least 1"),
    "learner.reuse": (_not_negative, "0 (train on each batch as it comes, and no more) or more"),
    "learner.outage_draws": (_not_negative, "0 (wait for the link) or more"),
    "learner.devices": (_not_negative, "0 (all local ones) or more"),
    "learner.checkpoint_period_s": (_positive, "more than 0"),
    "learner.keep_checkpoints": (_positive, "at least 1"),
    "link.max_window": (_positive, "at least 1"),
    "link.priority_bytes": (lambda x: x in (2, 4), "2 or 4"),
    "link.row_level": (lambda x: 0 <= x <= 19, "0 (automatic) or a zstd level from 1 to 19"),
    "link.weights_dtype": (_one_of("bfloat16", "float32"), "'bfloat16' or 'float32'"),
    "link.weights_budget_bytes_per_s": (_not_negative, "0 (no budget) or more"),
    "link.experiences_per_s": (_not_negative, "0 (no cap) or more"),
    "evaluation.episodes": (_positive, "at least 1"),
    "evaluation.max_steps": (_positive, "at least 1"),
    "evaluation.period_s": (_not_negative, "0 or more"),
    "metrics.period_s": (_positive, "more than 0"),
}


def validate(config: config_dict.ConfigDict) -> None:
    """Checks every bound before any work starts.

    Raises:
      ConfigError: the first field that is out of bounds, with its value and what it must be.
    """
    for path, (test, must_be) in _BOUNDS.items():
        value = config
        for part in path.split("."):
            value = value[part]
        if not _holds(test, value):
            raise ConfigError(f"config.{path} is {value!r}, and must be {must_be}")
    if config.agent.distribution == "c51" and not config.agent.v_min < config.agent.v_max:
        raise ConfigError(
            f"config.agent.v_min is {config.agent.v_min}, and must be less than config.agent.v_max "
            f"({config.agent.v_max}): C51's atoms lie between them"
        )
    if config.env.num_envs % config.actor.groups:
        raise ConfigError(
            f"config.actor.groups is {config.actor.groups}, and must divide config.env.num_envs ({config.env.num_envs})"
        )
    if config.replay.min_size > config.replay.capacity:
        raise ConfigError(
            f"config.replay.min_size is {config.replay.min_size}, more than config.replay.capacity "
            f"({config.replay.capacity}): the first sample would never be drawn; lower min_size or raise capacity"
        )
