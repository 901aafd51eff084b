"""What a network says of an action's return: its mean alone (`Scalar`), C51's `Categorical`, or QR-DQN's `Quantile`.

The three share one interface, on one example, `jax.vmap`ped by the caller. They sum products by themselves, since a dot
product's precision is the device's choice (TF32 on GPUs). A network's outputs are [A] for `Scalar`,
else [A, N]; a target is [] or [N] likewise. With `rescaled` all of them live on the scale of h (rescaling.py): a target
is h(r + discount * h^-1(bootstrap)), atom by atom.

Sources: C51, "A Distributional Perspective on Reinforcement Learning" (Bellemare et al. 2017); QR-DQN, "Distributional
Reinforcement Learning with Quantile Regression" (Dabney et al. 2018); the soft targets, "Munchausen Reinforcement
Learning" (Vieillard et al. 2020), equation 2, and for distributions its M-IQN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import config_dict

from longhaul.rescaling import rescale, unscale


def huber_loss(error: jax.Array, delta: float) -> jax.Array:
    """Huber's loss: e^2/2 within `delta` of zero, delta * (|e| - delta/2) beyond.

    With `delta` 0 it is half the squared error everywhere, so that no setting changes the gradient near zero.
    """
    if delta == 0:
        return 0.5 * jnp.square(error)
    size = jnp.abs(error)
    inner = jnp.minimum(size, delta)
    return 0.5 * jnp.square(inner) + delta * (size - inner)


class SoftPolicy(NamedTuple):
    """The softmax of values at one state.

    Attributes:
      probabilities: [A].
      scaled_logs: [A], temperature * log(probability).
    """

    probabilities: jax.Array
    scaled_logs: jax.Array


def soft_policy(values: jax.Array, temperature: float) -> SoftPolicy:
    """Returns softmax(values / temperature), [A] from [A]."""
    logs = jax.nn.log_softmax(values / temperature)
    return SoftPolicy(jnp.exp(logs), temperature * logs)


class Scalar(NamedTuple):
    """Means alone: DQN.

    Attributes:
      rescaled: whether values are h of returns.
      huber_delta: see `huber_loss`.
    """

    rescaled: bool
    huber_delta: float

    @property
    def width(self) -> int:
        """Numbers per action; 0: one, without an axis."""
        return 0

    def values(self, outputs: jax.Array) -> jax.Array:
        """Returns the actions' values, [..., A]."""
        return outputs

    def greedy_target(self, outputs_t: jax.Array, a_t: jax.Array, r_t: jax.Array, discount_t: jax.Array) -> jax.Array:
        """Returns r + discount * q(s_t, a_t), []; [A], [], [] and []."""
        return _backup(self.rescaled, outputs_t[a_t], r_t, discount_t)

    def soft_target(
        self, outputs_t: jax.Array, policy_t: SoftPolicy, r_t: jax.Array, discount_t: jax.Array
    ) -> jax.Array:
        """Returns r + discount * sum_a pi(a) (q(s_t, a) - temperature log pi(a)), []."""
        values = unscale(outputs_t) if self.rescaled else outputs_t
        target = r_t + discount_t * jnp.sum(policy_t.probabilities * (values - policy_t.scaled_logs))
        return rescale(target) if self.rescaled else target

    def mean(self, target: jax.Array) -> jax.Array:
        """Returns a target's mean, []."""
        return target

    def loss(self, chosen: jax.Array, target: jax.Array) -> jax.Array:
        """Returns Huber's loss of the taken action's output, []."""
        return huber_loss(target - chosen, self.huber_delta)


class Categorical(NamedTuple):
    """C51: logits of N atoms, evenly spaced from `v_min` to `v_max`; the loss is the cross entropy.

    Attributes:
      rescaled: whether the atoms are h of returns.
      atoms: N, at least 2.
      v_min: the lowest atom.
      v_max: the highest.
    """

    rescaled: bool
    atoms: int
    v_min: float
    v_max: float

    @property
    def width(self) -> int:
        """Numbers per action."""
        return self.atoms

    @property
    def support(self) -> jax.Array:
        """float32 [N]."""
        return jnp.linspace(self.v_min, self.v_max, self.atoms, dtype=jnp.float32)

    def values(self, outputs: jax.Array) -> jax.Array:
        """Returns the means, [..., A] from [..., A, N]."""
        masses = jax.nn.softmax(outputs)
        return jnp.sum(masses * jnp.broadcast_to(self.support, masses.shape), axis=-1)

    def greedy_target(self, outputs_t: jax.Array, a_t: jax.Array, r_t: jax.Array, discount_t: jax.Array) -> jax.Array:
        """Returns probabilities [N]: the distribution at a_t, shifted and projected; [A, N], [], [] and []."""
        atoms = _backup(self.rescaled, self.support, r_t, discount_t)
        return self.project(atoms, jax.nn.softmax(outputs_t[a_t]))

    def soft_target(
        self, outputs_t: jax.Array, policy_t: SoftPolicy, r_t: jax.Array, discount_t: jax.Array
    ) -> jax.Array:
        """Returns probabilities [N]: the mixture over actions of their shifted distributions, projected."""
        support = unscale(self.support) if self.rescaled else self.support
        atoms = r_t + discount_t * (support[None, :] - policy_t.scaled_logs[:, None])
        masses = policy_t.probabilities[:, None] * jax.nn.softmax(outputs_t)
        return self.project((rescale(atoms) if self.rescaled else atoms).reshape(-1), masses.reshape(-1))

    def project(self, atoms: jax.Array, masses: jax.Array) -> jax.Array:
        """Returns masses on the support, [N] from [M] and [M]: each atom's, clipped to it, is shared by its neighbours.

        Bellemare et al. 2017, equation 7.
        """
        spacing = (self.v_max - self.v_min) / (self.atoms - 1)
        clipped = jnp.clip(atoms, self.v_min, self.v_max)
        shares = jnp.clip(1.0 - jnp.abs(self.support[:, None] - clipped[None, :]) / spacing, 0.0, 1.0)
        return jnp.sum(shares * masses[None, :], axis=1)

    def mean(self, target: jax.Array) -> jax.Array:
        """Returns a target's mean, []."""
        return jnp.sum(target * self.support)

    def loss(self, chosen: jax.Array, target: jax.Array) -> jax.Array:
        """Returns the cross entropy of the taken action's logits, []."""
        return -jnp.sum(target * jax.nn.log_softmax(chosen))


class Quantile(NamedTuple):
    """QR-DQN: N quantiles at the middles (2i + 1) / (2N); the loss is the quantile regression's Huber loss.

    Attributes:
      rescaled: whether the quantiles are h of returns.
      quantiles: N.
      huber_delta: kappa; 0: the plain quantile loss |tau - 1[u < 0]| |u| (QR-DQN-0).
    """

    rescaled: bool
    quantiles: int
    huber_delta: float

    @property
    def width(self) -> int:
        """Numbers per action."""
        return self.quantiles

    def values(self, outputs: jax.Array) -> jax.Array:
        """Returns the means, [..., A] from [..., A, N]."""
        return jnp.mean(outputs, axis=-1)

    def greedy_target(self, outputs_t: jax.Array, a_t: jax.Array, r_t: jax.Array, discount_t: jax.Array) -> jax.Array:
        """Returns r + discount * theta(s_t, a_t), [N]; [A, N], [], [] and []."""
        return _backup(self.rescaled, outputs_t[a_t], r_t, discount_t)

    def soft_target(
        self, outputs_t: jax.Array, policy_t: SoftPolicy, r_t: jax.Array, discount_t: jax.Array
    ) -> jax.Array:
        """Returns r + discount * sum_a pi(a) (theta_i(s_t, a) - temperature log pi(a)), quantile by quantile, [N]."""
        quantiles = unscale(outputs_t) if self.rescaled else outputs_t
        soft = policy_t.probabilities[:, None] * (quantiles - policy_t.scaled_logs[:, None])
        target = r_t + discount_t * jnp.sum(soft, axis=0)
        return rescale(target) if self.rescaled else target

    def mean(self, target: jax.Array) -> jax.Array:
        """Returns a target's mean, []."""
        return jnp.mean(target)

    def loss(self, chosen: jax.Array, target: jax.Array) -> jax.Array:
        """Returns sum_i mean_j |tau_i - 1[u_ij < 0]| L(u_ij) / kappa, [], with u_ij = target_j - chosen_i.

        Dabney et al. 2018, algorithm 1, divided by kappa so that its limit for kappa to 0 is the plain quantile loss.
        """
        middles = (jnp.arange(self.quantiles, dtype=jnp.float32) + 0.5) / self.quantiles
        errors = target[None, :] - chosen[:, None]
        sizes = huber_loss(errors, self.huber_delta) / self.huber_delta if self.huber_delta else jnp.abs(errors)
        sides = jnp.abs(middles[:, None] - (errors < 0).astype(jnp.float32))
        return jnp.sum(jnp.mean(sides * sizes, axis=1))


Distribution = Scalar | Categorical | Quantile


def make_distribution(config: config_dict.ConfigDict) -> Distribution:
    """Returns what config.agent.distribution names."""
    agent: Any = config.agent
    rescaled, delta = bool(agent.value_rescaling), float(agent.huber_delta)
    if agent.distribution == "c51":
        return Categorical(rescaled, int(agent.atoms), float(agent.v_min), float(agent.v_max))
    if agent.distribution == "qr":
        return Quantile(rescaled, int(agent.atoms), delta)
    return Scalar(rescaled, delta)


def _backup(rescaled: bool, x: jax.Array, r_t: jax.Array, discount_t: jax.Array) -> jax.Array:
    """r + discount * x on the scale that x is on: [] or [N] from x of that shape, [] and []."""
    return rescale(r_t + discount_t * unscale(x)) if rescaled else r_t + discount_t * x
