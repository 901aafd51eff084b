"""The mathematics of deep Q-learning from prioritized replay.

Pure functions on one example, `jax.vmap`ped by the caller, and one update step made of them. Names carry time:
`tm1` is the state acted in, `t` the state bootstrapped from, n steps later.

Sources: double Q-learning, van Hasselt et al. 2016; prioritized replay, Schaul et al. 2016; n-step returns and
priorities as in "Distributed Prioritized Experience Replay" (Horgan et al. 2018).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from ml_collections import config_dict

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


def q_target(q_t: jax.Array, r_t: jax.Array, discount_t: jax.Array) -> jax.Array:
    """Q-learning's target r + discount * max_a q(s_t, a).

    Args:
      q_t: [A], the target network's values at the bootstrap state.
      r_t: [], n-step return.
      discount_t: [], gamma^k, or 0 after termination.

    Returns:
      [], never differentiated through.
    """
    return jax.lax.stop_gradient(r_t + discount_t * jnp.max(q_t))


def double_q_target(q_t: jax.Array, q_t_selector: jax.Array, r_t: jax.Array, discount_t: jax.Array) -> jax.Array:
    """Double Q-learning's target r + discount * q(s_t, argmax_a selector(s_t, a)).

    Args:
      q_t: [A], the target network's values at the bootstrap state.
      q_t_selector: [A], the online network's values there.
      r_t: [], n-step return.
      discount_t: [], gamma^k, or 0 after termination.

    Returns:
      [], never differentiated through.
    """
    return jax.lax.stop_gradient(r_t + discount_t * q_t[jnp.argmax(q_t_selector)])


def td_error(q_tm1: jax.Array, a_tm1: jax.Array, target_tm1: jax.Array) -> jax.Array:
    """Returns target - q(s_tm1, a_tm1), [] from [A], [] and []."""
    return target_tm1 - q_tm1[a_tm1]


def huber_loss(error: jax.Array, delta: float) -> jax.Array:
    """Huber's loss: e^2/2 within `delta` of zero, delta * (|e| - delta/2) beyond.

    With `delta` 0 it is half the squared error everywhere, so that no setting changes the gradient near zero.
    """
    if delta == 0:
        return 0.5 * jnp.square(error)
    size = jnp.abs(error)
    inner = jnp.minimum(size, delta)
    return 0.5 * jnp.square(inner) + delta * (size - inner)


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


class _LossAux(NamedTuple):
    """What the loss computes besides itself: TD errors [B], the loss without weights [], mean Q at s_tm1 []."""

    errors: jax.Array
    loss_unweighted: jax.Array
    mean_q: jax.Array


_Loss = Callable[[Params, Params, jax.Array, Minibatch, jax.Array], tuple[jax.Array, _LossAux]]


def make_loss(network: nn.Module, config: config_dict.ConfigDict) -> _Loss:
    """Returns `(params, target_params, rows, minibatch, weights) -> (loss, aux)`, to be differentiated by params.

    Rows are [B, 2*stack, *row_shape], the observation's then the bootstrap state's; weights float32 [B]. The loss is
    the mean of weighted Huber losses.
    """
    double, delta = bool(config.agent.double), float(config.agent.huber_delta)
    q_values: Callable[[Params, jax.Array], Any] = network.apply

    def loss(
        params: Params, target_params: Params, rows: jax.Array, minibatch: Minibatch, weights: jax.Array
    ) -> tuple[jax.Array, _LossAux]:
        stack = rows.shape[1] // 2
        rows_tm1, rows_t = rows[:, :stack], rows[:, stack:]
        q_t = q_values(target_params, rows_t)
        if double:
            selector = q_values(jax.lax.stop_gradient(params), rows_t)
            target_tm1 = jax.vmap(double_q_target)(q_t, selector, minibatch.returns, minibatch.discounts)
        else:
            target_tm1 = jax.vmap(q_target)(q_t, minibatch.returns, minibatch.discounts)
        q_tm1 = q_values(params, rows_tm1)
        errors = jax.vmap(td_error)(q_tm1, minibatch.actions, target_tm1)
        losses = huber_loss(errors, delta)
        return jnp.mean(weights * losses), _LossAux(errors, jnp.mean(losses), jnp.mean(q_tm1))

    return loss


def make_update(network: nn.Module, optimizer: optax.GradientTransformation, config: config_dict.ConfigDict) -> Update:
    """Returns the update step `(state, cache, minibatch) -> (state, priorities, metrics)`, to be jitted.

    The step gathers the minibatch's rows from the cache ([capacity, *row_shape]), minimises the weighted Huber loss
    by one optimizer step, moves the target network, and returns the new priorities (float32 [B]). Is the loss or a
    gradient not finite, then nothing but the counters changes. Metrics are float32 [], named by METRICS; applied and
    target_moved are 0 or 1.
    """
    loss_and_grad = jax.value_and_grad(make_loss(network, config), has_aux=True)
    replay, epsilon = config.replay, float(config.replay.priority_epsilon)
    beta_start, beta_end, beta_updates = float(replay.beta_start), float(replay.beta_end), int(replay.beta_updates)
    period, tau = int(config.learner.target_period_updates), float(config.learner.target_tau)

    def update(
        state: TrainState, cache: jax.Array, minibatch: Minibatch
    ) -> tuple[TrainState, jax.Array, dict[str, jax.Array]]:
        rows = cache.at[minibatch.slots].get(mode="promise_in_bounds")
        beta = linear_beta(state.updates, beta_start, beta_end, beta_updates)
        weights = importance_weights(minibatch.probabilities, beta)
        (loss, aux), grads = loss_and_grad(state.params, state.target_params, rows, minibatch, weights)
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
            "loss_unweighted": aux.loss_unweighted,
            "mean_abs_td": jnp.mean(jnp.abs(aux.errors)),
            "grad_norm": grad_norm,
            "mean_q": aux.mean_q,
            "beta": beta,
            "applied": finite.astype(jnp.float32),
            "target_moved": moved.astype(jnp.float32),
        }
        return new_state, priorities(aux.errors, epsilon), metrics

    return update
