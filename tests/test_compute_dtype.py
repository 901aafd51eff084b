"""config.agent.compute_dtype: layers compute in bfloat16, and everything that is kept or compared stays float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul import dqn, networks
from longhaul.config import default
from longhaul.errors import ConfigError
from tests.strict_jax import strict  # noqa: F401 (a fixture)
from tests.test_dqn import CACHE, Harness, f32
from tests.test_networks import make_config, make_spec, random_rows

NARROW = {"agent.compute_dtype": "bfloat16"}
PRODUCTS = ("dot_general", "conv_general_dilated")
NETWORKS = [
    ("mlp", (4,), "float32", {}),
    ("nature", (36, 36), "uint8", {}),
    ("minatar", (10, 10, 4), "bool", {}),
    ("impala", (10, 10), "uint8", {}),
    ("mlp", (4,), "float32", {"noisy_sigma": 0.5, "dueling": False}),
    ("mlp", (4,), "float32", {"distribution": "qr", "atoms": 5}),
    ("tests.own_torso:Narrow", (4,), "float32", {}),
]


def operand_dtypes(jaxpr):
    """Returns the dtypes of the factors of all products in a program, inner programs' too."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            found.append(tuple(str(x.aval.dtype) for x in equation.invars))
        for inner in jax.tree_util.tree_leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += operand_dtypes(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("name, row_shape, row_dtype, agent", NETWORKS)
def test_every_product_is_of_bfloat16_and_parameters_and_values_are_float32_and_close(
    name, row_shape, row_dtype, agent
):
    spec = make_spec(row_shape, row_dtype, stack=2)
    wide = networks.make_network(spec, make_config(network=name, **agent))
    narrow = networks.make_network(spec, make_config(network=name, compute_dtype="bfloat16", **agent))
    params, rows = networks.init_params(wide, spec, 0), random_rows(spec)
    for one, other in zip(*map(jax.tree_util.tree_leaves, (params, networks.init_params(narrow, spec, 0)))):
        assert other.dtype == jnp.float32
        np.testing.assert_array_equal(one, other)
    for network, dtype in ((wide, "float32"), (narrow, "bfloat16")):
        products = operand_dtypes(jax.make_jaxpr(network.apply)(params, rows).jaxpr)
        assert products and all(dtypes == (dtype, dtype) for dtypes in products)
    q, narrow_q = (np.asarray(jax.jit(network.apply)(params, rows)) for network in (wide, narrow))
    assert narrow_q.dtype == np.float32 and (narrow_q != q).any()
    # Each rounding is of at most 2^-9 of a factor; a few layers add theirs up.
    np.testing.assert_allclose(narrow_q, q, atol=0.03 * np.abs(q).max())


def test_values_are_told_apart_finer_than_bfloat16_would():
    spec = make_spec((1,), num_actions=1)
    network = networks.make_network(
        spec, make_config(hidden=(1,), dueling=False, compute_dtype="bfloat16", network="mlp")
    )
    flat = networks.flatten_params(networks.init_params(network, spec, 0))
    flat = {path: np.ones_like(leaf) for path, leaf in flat.items()}
    flat["params/head/q/bias"][:] = 100.25  # between 100 and 100.5, bfloat16's neighbours there
    q = network.apply(networks.unflatten_params(flat), np.zeros((1, 1, 1), np.float32))
    assert float(q[0, 0]) == 101.25  # the hidden unit is relu(0 + 1) = 1


@pytest.mark.parametrize("settings", [{}, {"agent.noisy_sigma": 0.5}, {"agent.distribution": "qr", "agent.atoms": 5}])
def test_training_in_bfloat16_lowers_the_loss_and_keeps_the_state_in_float32(settings):
    h = Harness(**NARROW, **settings, **{"learner.learning_rate": 1e-2})
    dtypes = operand_dtypes(jax.make_jaxpr(h.update)(h.state, jnp.array(CACHE), h.minibatch).jaxpr)
    assert any("bfloat16" in pair for pair in dtypes)
    steps = [h.step(discounts=f32(0, 0, 0, 0)) for _ in range(200)]
    losses = [metrics["loss"] for _, _, metrics in steps]
    assert np.mean(losses[-20:]) < 0.3 * np.mean(losses[:20])
    leaves = jax.tree_util.tree_leaves(h.state)
    assert {str(leaf.dtype) for leaf in leaves} <= {"float32", "int32", "uint32"}
    _, priorities, metrics = h.update(h.state, jnp.array(CACHE), h.minibatch)
    assert priorities.dtype == metrics["loss"].dtype == metrics["mean_q"].dtype == jnp.float32


def test_targets_and_losses_are_float32():
    h, config = Harness(**NARROW), default()
    loss, aux = dqn.make_loss(h.network, config)(
        h.state.params, h.state.target_params, jnp.array(CACHE)[h.minibatch.slots], h.minibatch, f32(1, 1, 1, 1)
    )
    assert loss.dtype == aux.errors.dtype == aux.losses.dtype == aux.mean_q.dtype == jnp.float32


def test_an_own_torso_that_can_not_be_told_is_refused_with_the_mend():
    config = make_config(network="tests.own_torso:Good", compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"config\.agent\.compute_dtype is 'bfloat16'.*`dtype: Any") as refused:
        networks.make_network(make_spec((4,)), config)
    assert "\n" not in str(refused.value)
