"""The mathematics of deep Q-learning from prioritized replay.

Pure functions on one example, `jax.vmap`ped by the caller, and one update step made of them. Names carry time:
`tm1` is the state acted in, `t` the state bootstrapped from, n steps later. What differs between scalar and
distributional values is distributions.py's.

Sources: double Q-learning, van Hasselt et al. 2016; prioritized replay, Schaul et al. 2016; n-step returns and
priorities as in "Distributed Prioritized Experience Replay" (Horgan et al. 2018); the Munchausen term, Vieillard et al.
2020.

A priority is the difference of means, |E[target] - q(s_tm1, a_tm1)|, for distributions too. Rainbow (Hessel et al.
2018) takes the loss there; but the first priority is an actor's, who as in Horgan et al. knows values alone, and both
must be on one scale.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from ml_collections import config_dict

from longhaul.distributions import SoftPolicy, soft_policy
from longhaul.heads import NOISE
from longhaul.networks import QNetwork
from longhaul.rescaling import unscale
from longhaul.types import Params

# Below this a float32 is subnormal, and devices may read it as zero.
_SMALLEST_NORMAL = jnp.finfo(jnp.float32).tiny


class TrainState(NamedTuple):
    """All that training on needs; a checkpoint holds exactly this.

    Attributes:
      params: online network.
      target_params: target network.
      opt_state: optax state; its moments and count move with applied updates only.
      updates: int32 [], minibatches seen, skipped ones too: beta goes by it.
      skipped: int32 [], updates left out because the loss or a gradient was not finite.
      rng: uint32 [2], the run's key; noise of update i comes from `jax.random.fold_in(rng, i)`.
    """

    params: Params
    target_params: Params
    opt_state: optax.OptState
    updates: jax.Array
    skipped: jax.Array
    rng: jax.Array


class Minibatch(NamedTuple):
    """One minibatch as the update takes it.

    Attributes:
      slots: int32 [B, 2*stack], cache slots of the observation rows, then of the next observation rows; in bounds.
      actions: int32 [B].
      returns: float32 [B], n-step returns.
      discounts: float32 [B], gamma^k, or 0 after termination.
      probabilities: float32 [B], with which each was drawn.
    """

    slots: jax.Array
    actions: jax.Array
    returns: jax.Array
    discounts: jax.Array
    probabilities: jax.Array


# The figures of one update, in the order of a report.
METRICS = ("loss", "loss_unweighted", "mean_abs_td", "grad_norm", "mean_q", "beta", "applied", "target_moved")

Update = Callable[[TrainState, jax.Array, Minibatch], tuple[TrainState, jax.Array, dict[str, jax.Array]]]


def munchausen_bonus(policy_tm1: SoftPolicy, a_tm1: jax.Array, alpha: float, clip: float) -> jax.Array:
    """Returns what is added to the return: alpha * clip(temperature * log pi(a_tm1 | s_tm1), `clip`, 0), [].

    Vieillard et al. 2020, section 3. Of n steps only the first gets it: the states between do not travel.
    """
    return alpha * jnp.clip(policy_tm1.scaled_logs[a_tm1], clip, 0.0)


def importance_weights(probabilities: jax.Array, beta: jax.Array) -> jax.Array:
    """Prioritized replay's weights (N*P)^-beta over the batch's largest (Schaul et al. 2016, section 3.4).

    N, the table's size, cancels: (N*P_i)^-beta / max_j (N*P_j)^-beta = (min_j P_j / P_i)^beta, and so computed
    nothing can overflow. A probability that is not a positive normal number says nothing about its transition,
    which then gets weight 1 and leaves the others' weights alone.

    Args:
      probabilities: float32 [B].
      beta: float32 [], 0 to 1.

    Returns:
      float32 [B], finite, from 0 to 1.
    """
    known = (probabilities >= _SMALLEST_NORMAL) & jnp.isfinite(probabilities)
    smallest = jnp.min(jnp.where(known, probabilities, jnp.inf))
    ratio = jnp.where(known, smallest / jnp.where(known, probabilities, 1.0), 1.0)
    return jnp.power(ratio, beta)


def linear_beta(updates: jax.Array, start: float, end: float, num_updates: int) -> jax.Array:
    """Returns the weights' exponent: from `start` at update 0 in a line to `end` at `num_updates`, then constant."""
    share = jnp.minimum(updates.astype(jnp.float32) / num_updates, 1.0)
    return start + share * (end - start)


def priorities(td_errors: jax.Array, epsilon: float) -> jax.Array:
    """Returns |TD error| + epsilon from the raw error: importance weights and Huber's slope play no part.

    A transition whose error is not finite can't be learned from, and gets `epsilon` alone: the smallest priority
    there is, so that it does not come back at once to spoil the next minibatch.
    """
    return jnp.where(jnp.isfinite(td_errors), jnp.abs(td_errors), 0.0) + epsilon


def target_is_due(applied: jax.Array, period: int, tau: float) -> jax.Array:
    """Returns bool [], whether the target moves after `applied` updates: each `period`, or always with `tau`."""
    return jnp.ones((), jnp.bool_) if tau > 0 else applied % period == 0


def moved_target(params: Params, target_params: Params, tau: float) -> Params:
    """Returns the target network moved: `tau` of the way to the online one (Polyak), or onto it if `tau` is 0."""
    return optax.incremental_update(params, target_params, tau) if tau > 0 else params


def make_optimizer(config: config_dict.ConfigDict) -> optax.GradientTransformation:
    """Adam after clipping of the gradients' global norm."""
    max_norm = config.learner.max_grad_norm
    # A stand-in without effect, not one transformation fewer: the state's tree is then the same with and without.
    clip = optax.clip_by_global_norm(max_norm) if max_norm > 0 else optax.identity()
    return optax.chain(clip, optax.adam(config.learner.learning_rate, eps=config.learner.adam_epsilon))


def init_state(params: Params, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Returns the state before the first update; no two of its leaves share memory, so that it can be donated."""
    return TrainState(
        params=jax.tree_util.tree_map(jnp.copy, params),
        target_params=jax.tree_util.tree_map(jnp.copy, params),
        opt_state=optimizer.init(params),
        updates=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        # A stream apart from the one that the weights were drawn from.
        rng=jax.random.fold_in(jax.random.PRNGKey(seed), 1),
    )


def _select(chosen: jax.Array, if_true: Params, if_false: Params) -> Params:
    return jax.tree_util.tree_map(lambda a, b: jnp.where(chosen, a, b), if_true, if_false)


class LossAux(NamedTuple):
    """What the loss computes besides itself.

    Attributes:
      errors: float32 [B], means of the targets minus values.
      losses: float32 [B], without importance weights.
      mean_q: float32 [], mean value at s_tm1.
    """

    errors: jax.Array
    losses: jax.Array
    mean_q: jax.Array


class Loss(Protocol):
    """`(params, target_params, rows, minibatch, weights, key) -> (loss, aux)`, to be differentiated by params."""

    def __call__(
        self,
        params: Params,
        target_params: Params,
        rows: jax.Array,
        minibatch: Minibatch,
        weights: jax.Array,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, LossAux]: ...


_Targets = Callable[[Params, Params, jax.Array, Minibatch, list[Any]], jax.Array]


def _make_targets(network: QNetwork, config: config_dict.ConfigDict) -> _Targets:
    """Returns `(params, target_params, rows, minibatch, three keys) -> targets`, [B] or [B, N]."""
    agent, form, outputs = config.agent, network.distribution, _make_outputs(network)
    double, reward_scale = bool(agent.double), float(agent.reward_scale)
    alpha, clip = float(agent.munchausen_alpha), float(agent.munchausen_clip)

    def soft(outputs_at: jax.Array) -> SoftPolicy:
        values = form.values(outputs_at)
        return soft_policy(unscale(values) if form.rescaled else values, float(agent.munchausen_temperature))

    def targets(
        params: Params, target_params: Params, rows: jax.Array, minibatch: Minibatch, keys: list[Any]
    ) -> jax.Array:
        stack = rows.shape[1] // 2
        rows_tm1, rows_t = rows[:, :stack], rows[:, stack:]
        returns = minibatch.returns if reward_scale == 1 else minibatch.returns * reward_scale
        outputs_t = outputs(target_params, rows_t, keys[0])
        if alpha > 0:
            policy_tm1 = jax.vmap(soft)(outputs(target_params, rows_tm1, keys[1]))
            bonus = jax.vmap(lambda policy, a: munchausen_bonus(policy, a, alpha, clip))(policy_tm1, minibatch.actions)
            policy_t = jax.vmap(soft)(outputs_t)
            return jax.vmap(form.soft_target)(outputs_t, policy_t, returns + bonus, minibatch.discounts)
        selector = outputs(params, rows_t, keys[2]) if double else outputs_t
        a_t = jnp.argmax(form.values(selector), axis=-1)
        return jax.vmap(form.greedy_target)(outputs_t, a_t, returns, minibatch.discounts)

    return targets


def _make_outputs(network: QNetwork) -> Callable[[Params, jax.Array, jax.Array | None], jax.Array]:
    """Returns `(params, rows, key) -> outputs`; without noise if the key is None."""

    def outputs(params: Params, rows: jax.Array, key: jax.Array | None) -> jax.Array:
        rngs = None if key is None else {NOISE: key}
        found: Any = network.apply(params, rows, rngs=rngs, method="outputs")
        return found

    return outputs


def make_loss(network: QNetwork, config: config_dict.ConfigDict) -> Loss:
    """Returns the loss: the mean of weighted losses of the distribution (Huber's for scalars).

    Rows are [B, 2*stack, *row_shape], the observation's then the bootstrap state's; weights float32 [B]. With a key,
    noisy layers have noise, drawn apart for each of the networks' calls (Fortunato et al. 2018, section 3.1).

    Double Q-learning has the online network choose the action that the target network values. Under Munchausen nothing
    is maximised, and both policies are the target network's, so that `double` plays no part.
    """
    form, outputs, make_targets = network.distribution, _make_outputs(network), _make_targets(network, config)

    def loss(
        params: Params,
        target_params: Params,
        rows: jax.Array,
        minibatch: Minibatch,
        weights: jax.Array,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, LossAux]:
        online_key, *keys = [None] * 4 if key is None else jax.random.split(key, 4)
        targets = jax.lax.stop_gradient(make_targets(params, target_params, rows, minibatch, keys))
        outputs_tm1 = outputs(params, rows[:, : rows.shape[1] // 2], online_key)
        chosen = jax.vmap(lambda each, action: each[action])(outputs_tm1, minibatch.actions)
        values = form.values(outputs_tm1)
        value = jax.vmap(lambda each, action: each[action])(values, minibatch.actions)
        errors = jax.vmap(form.mean)(targets) - jax.lax.stop_gradient(value)
        losses = jax.vmap(form.loss)(chosen, targets)
        return jnp.mean(weights * losses), LossAux(errors, losses, jnp.mean(values))

    return loss


def make_update(network: QNetwork, optimizer: optax.GradientTransformation, config: config_dict.ConfigDict) -> Update:
    """Returns the update step `(state, cache, minibatch) -> (state, priorities, metrics)`, to be jitted.

    The step gathers the minibatch's rows from the cache ([capacity, *row_shape]), minimises the weighted loss
    by one optimizer step, moves the target network, and returns the new priorities (float32 [B]). Is the loss or a
    gradient not finite, then nothing but the counters changes. Metrics are float32 [], named by METRICS; applied and
    target_moved are 0 or 1.
    """
    loss_and_grad = jax.value_and_grad(make_loss(network, config), has_aux=True)
    replay, epsilon = config.replay, float(config.replay.priority_epsilon)
    beta_start, beta_end, beta_updates = float(replay.beta_start), float(replay.beta_end), int(replay.beta_updates)
    period, tau = int(config.learner.target_period_updates), float(config.learner.target_tau)
    noisy = config.agent.noisy_sigma > 0

    def update(
        state: TrainState, cache: jax.Array, minibatch: Minibatch
    ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
        rows = cache.at[minibatch.slots].get(mode="promise_in_bounds")
        beta = linear_beta(state.updates, beta_start, beta_end, beta_updates)
        weights = importance_weights(minibatch.probabilities, beta)
        key = jax.random.fold_in(state.rng, state.updates) if noisy else None
        (loss, aux), grads = loss_and_grad(state.params, state.target_params, rows, minibatch, weights, key)
        grad_norm = optax.global_norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        with jax.numpy_dtype_promotion("standard"):  # optax's bias correction raises a float to an int32 power
            changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = _select(finite, optax.apply_updates(state.params, changes), state.params)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        updates = state.updates + 1
        # Counting applied updates, not seen ones, keeps a skipped update from swallowing a period's copy.
        moved = finite & target_is_due(updates - skipped, period, tau)
        new_state = TrainState(
            params=params,
            target_params=_select(moved, moved_target(params, state.target_params, tau), state.target_params),
            opt_state=_select(finite, opt_state, state.opt_state),
            updates=updates,
            skipped=skipped,
            rng=state.rng,
        )
        metrics = {
            "loss": loss,
            "loss_unweighted": jnp.mean(aux.losses),
            "mean_abs_td": jnp.mean(jnp.abs(aux.errors)),
            "grad_norm": grad_norm,
            "mean_q": aux.mean_q,
            "beta": beta,
            "applied": finite.astype(jnp.float32),
            "target_moved": moved.astype(jnp.float32),
        }
        return new_state, priorities(aux.errors, epsilon), metrics

    return update
