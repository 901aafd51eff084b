"""Networks: which rows get which network, what is scaled, and how weights become flat dicts."""

import re

import jax
import numpy as np
import pytest

from longhaul import codec, networks, torsos
from longhaul.config import default
from longhaul.errors import ConfigError
from longhaul.types import ExperienceSpec
from tests.strict_jax import strict  # noqa: F401 (a fixture)


def make_spec(row_shape, row_dtype="float32", stack=1, num_actions=3):
    return ExperienceSpec("Test-v0", row_shape, row_dtype, stack, num_actions, n_step=1, gamma=0.99)


def make_config(**agent):
    config = default()
    config.agent.hidden = (16, 8)
    config.agent.update(agent)
    return config


def values_of(spec, config, rows, seed=0):
    network = networks.make_network(spec, config)
    return np.asarray(jax.jit(network.apply)(networks.init_params(network, spec, seed), rows))


def random_rows(spec, batch=5, seed=0):
    rng = np.random.default_rng(seed)
    shape = (batch, spec.stack, *spec.row_shape)
    if spec.row_dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    if spec.row_dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.standard_normal(shape).astype(spec.row_dtype)


@pytest.mark.parametrize(
    "row_shape, row_dtype, stack, kind",
    [
        ((4,), "float32", 1, torsos.MLP),
        ((7,), "uint8", 3, torsos.MLP),
        ((36, 36), "uint8", 4, torsos.NatureCNN),
        ((40, 36, 3), "uint8", 2, torsos.NatureCNN),
        ((36, 36, 1), "float32", 1, torsos.NatureCNN),
        ((10, 10, 4), "bool", 1, torsos.MinAtarCNN),
        ((35, 84), "uint8", 2, torsos.MinAtarCNN),
    ],
)
@pytest.mark.parametrize("dueling", [True, False])
def test_auto_chooses_by_the_rank_of_a_row_and_gives_one_value_per_action(row_shape, row_dtype, stack, kind, dueling):
    spec, config = make_spec(row_shape, row_dtype, stack), make_config(dueling=dueling)
    assert isinstance(networks.make_network(spec, config).torso, kind)
    q = values_of(spec, config, random_rows(spec))
    assert q.shape == (5, 3) and q.dtype == np.float32 and np.isfinite(q).all()


def test_the_nature_network_has_the_layers_of_the_paper():
    spec = make_spec((84, 84), "uint8", stack=4, num_actions=6)
    config = make_config(hidden=(512,), dueling=False)
    flat = networks.flatten_params(networks.init_params(networks.make_network(spec, config), spec, 0))
    shapes = {path: leaf.shape for path, leaf in flat.items() if path.endswith("kernel")}
    assert shapes == {
        "params/torso/conv_0/kernel": (8, 8, 4, 32),
        "params/torso/conv_1/kernel": (4, 4, 32, 64),
        "params/torso/conv_2/kernel": (3, 3, 64, 64),
        "params/torso/dense/kernel": (7 * 7 * 64, 512),
        "params/head/q/kernel": (512, 6),
    }


@pytest.mark.parametrize("sides", [(84, 84), (37, 42)])
@pytest.mark.parametrize("kernel, stride", [(8, 4), (4, 2), (3, 1)])
def test_a_convolution_in_blocks_is_the_convolution(kernel, stride, sides):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, *sides, 3)).astype(np.float32)
    weights = rng.normal(size=(kernel, kernel, 3, 5)).astype(np.float32)

    def value_and_gradients(convolve):
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        value, pull_back = jax.vjp(lambda x, w: convolve(x, w, (stride, stride), "VALID", **options), images, weights)
        return value, *pull_back(value)

    ours, plain = map(value_and_gradients, (torsos.convolve_in_blocks, jax.lax.conv_general_dilated))
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("count, portions", [(3, 1), (torsos.PORTION, 1), (torsos.PORTION + 1, 2), (300, 30)])
def test_the_nature_network_looks_at_blocks_on_a_cpu_alone_and_gives_the_same_values(count, portions, monkeypatch):
    spec = make_spec((84, 84), "uint8", stack=4)
    rows = random_rows(spec, count)
    network = networks.make_network(spec, make_config())
    params = networks.init_params(network, spec, 0)

    def strides_and_values():
        text = str(jax.make_jaxpr(network.apply)(params, rows))
        gradients = jax.grad(lambda weights: (network.apply(weights, rows) ** 2).mean())(params)
        return re.findall(r"window_strides=\((\d), \d\)", text), network.apply(params, rows), gradients

    strides, values, gradients = strides_and_values()
    assert strides == portions * ["1", "1", "1"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plain_strides, plain_values, plain_gradients = strides_and_values()
    assert plain_strides == ["4", "2", "1"]
    np.testing.assert_allclose(values, plain_values, rtol=1e-4, atol=1e-5)
    for ours, plain in zip(*map(jax.tree_util.tree_leaves, (gradients, plain_gradients)), strict=True):
        # By their norms: a sum's other order may move one number across relu's kink.
        assert np.linalg.norm(ours - plain) < 1e-3 * np.linalg.norm(plain)


def test_the_minatar_network_has_the_layers_of_the_paper():
    spec = make_spec((10, 10, 7), "bool", stack=1, num_actions=6)
    config = make_config(hidden=(128,), dueling=False)
    flat = networks.flatten_params(networks.init_params(networks.make_network(spec, config), spec, 0))
    shapes = {path: leaf.shape for path, leaf in flat.items() if path.endswith("kernel")}
    assert shapes == {
        "params/torso/conv/kernel": (3, 3, 7, 16),
        "params/torso/dense/kernel": (8 * 8 * 16, 128),
        "params/head/q/kernel": (128, 6),
    }


@pytest.mark.parametrize("row_shape", [(6,), (10, 10, 4), (36, 36)])
def test_booleans_are_0_and_1_and_not_scaled(row_shape):
    as_bools, as_floats = make_spec(row_shape, "bool"), make_spec(row_shape, "float32")
    rows = random_rows(as_bools)
    np.testing.assert_array_equal(
        values_of(as_bools, make_config(), rows), values_of(as_floats, make_config(), rows.astype(np.float32))
    )


@pytest.mark.parametrize("row_shape", [(6,), (10, 10, 4), (36, 36)])
def test_uint8_is_scaled_once_and_float32_never(row_shape):
    config = make_config()
    as_bytes, as_floats = make_spec(row_shape, "uint8"), make_spec(row_shape, "float32")
    rows = random_rows(as_bytes)
    scaled = values_of(as_bytes, config, rows)
    np.testing.assert_allclose(
        scaled, values_of(as_floats, config, rows.astype(np.float32) / 255), rtol=1e-4, atol=1e-5
    )
    unscaled = values_of(as_floats, config, rows.astype(np.float32))
    assert np.abs(unscaled - scaled).max() > 1.0


def test_other_small_dtypes_keep_their_values():
    config = make_config()
    rows = np.arange(10).reshape(5, 1, 2)
    expected = values_of(make_spec((2,)), config, rows.astype(np.float32))
    for dtype in ("int32", "int16", "float16"):
        np.testing.assert_allclose(values_of(make_spec((2,), dtype), config, rows.astype(dtype)), expected, rtol=1e-6)


def test_stacked_frames_of_an_image_are_channels_oldest_first():
    spec = make_spec((36, 36), "uint8", stack=2)
    as_channels = make_spec((36, 36, 2), "uint8", stack=1)
    rows = random_rows(spec)
    np.testing.assert_array_equal(
        values_of(spec, make_config(), rows), values_of(as_channels, make_config(), np.moveaxis(rows, 1, -1)[:, None])
    )


def test_the_dueling_head_centres_advantages_and_the_flag_changes_the_network():
    spec = make_spec((4,))
    network = networks.make_network(spec, make_config(dueling=True))
    params = networks.init_params(network, spec, 0)
    flat = networks.flatten_params(params)
    rows = random_rows(spec)
    # A constant added to all advantages changes nothing; one added to the value moves all by as much.
    q = np.asarray(network.apply(params, rows))
    shifted = dict(flat, **{"params/head/advantage/bias": flat["params/head/advantage/bias"] + 5})
    np.testing.assert_allclose(network.apply(networks.unflatten_params(shifted), rows), q, atol=1e-5)
    raised = dict(flat, **{"params/head/value/bias": flat["params/head/value/bias"] + 5})
    np.testing.assert_allclose(network.apply(networks.unflatten_params(raised), rows), q + 5, atol=1e-5)
    plain = networks.make_network(spec, make_config(dueling=False))
    assert "params/head/q/bias" in networks.flatten_params(networks.init_params(plain, spec, 0))


def test_the_mlp_can_be_asked_for_on_images():
    spec = make_spec((10, 10, 4), "uint8")
    assert values_of(spec, make_config(network="mlp"), random_rows(spec)).shape == (5, 3)


@pytest.mark.parametrize(
    "network, row_shape, says",
    [
        ("auto", (), "shape ()"),
        ("auto", (2, 3, 4, 5), "shape (2, 3, 4, 5)"),
        ("nature", (4,), "shape (4,)"),
        ("nature", (10, 10, 4), "at least 36x36"),
        ("minatar", (4,), "shape (4,)"),
        ("auto", (10, 2), "at least 3x3"),
        ("nature", (84, 35), "shape (84, 35)"),
        ("mlp", (), "shape ()"),
        ("mlp", (0,), "shape (0,)"),
    ],
)
def test_rows_that_fit_no_network_are_refused_by_field_and_shape(network, row_shape, says):
    with pytest.raises(ConfigError) as refused:
        networks.make_network(make_spec(row_shape), make_config(network=network))
    assert "config.agent.network" in str(refused.value) and says in str(refused.value)


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex64"])
def test_dtypes_that_a_device_would_narrow_are_refused(dtype):
    with pytest.raises(ConfigError, match=dtype):
        networks.make_network(make_spec((4,), dtype), make_config())


def test_the_seed_decides_the_weights():
    spec = make_spec((4,))
    network = networks.make_network(spec, make_config())
    one, same, other = (networks.flatten_params(networks.init_params(network, spec, seed)) for seed in (0, 0, 1))
    for path in one:
        np.testing.assert_array_equal(one[path], same[path])
    assert any((one[path] != other[path]).any() for path in one)


def test_flat_weights_come_back_through_the_codec_as_the_same_network():
    spec, config = make_spec((4,)), make_config()
    network = networks.make_network(spec, config)
    params = networks.init_params(network, spec, 3)
    payload = codec.pack_weights(networks.flatten_params(params), "float32")
    again = networks.unflatten_params(codec.unpack_weights(payload))
    rows = random_rows(spec)
    np.testing.assert_array_equal(network.apply(again, rows), network.apply(params, rows))


def test_flat_weights_share_no_memory_with_the_device():
    spec = make_spec((4,))
    network = networks.make_network(spec, make_config())
    params = networks.init_params(network, spec, 0)
    flat = networks.flatten_params(params)
    before = np.array(params["params"]["torso"]["dense_0"]["kernel"])
    flat["params/torso/dense_0/kernel"][:] = 0
    np.testing.assert_array_equal(params["params"]["torso"]["dense_0"]["kernel"], before)


# ---- users' own torsos


@pytest.mark.parametrize(
    "agent", [{}, {"distribution": "qr", "atoms": 5}, {"noisy_sigma": 0.5, "dueling": False, "distribution": "c51"}]
)
def test_a_users_own_torso_works_with_every_head(agent):
    spec = make_spec((4,), stack=2)
    config = make_config(network="tests.own_torso:Good", **agent)
    rows = random_rows(spec)
    assert values_of(spec, config, rows).shape == (5, 3)
    flat = networks.flatten_params(networks.init_params(networks.make_network(spec, config), spec, 0))
    assert flat["params/torso/own/kernel"].shape == (4, 16)


@pytest.mark.parametrize(
    "name, says",
    [
        ("tests.no_such_module:Good", "can't be imported"),
        ("tests.own_torso:Missing", "has no 'Missing'"),
        ("tests.own_torso:NoField", "can't be made as NoField"),
        ("tests.own_torso:not_a_module", "no Flax module"),
        ("tests.own_torso:Unbatched", r"returns float32\[16\]"),
        ("tests.own_torso:Half", r"returns float16\[2, 4\]"),
        ("tests.own_torso:Normalised", "batch_stats"),
        ("tests.own_torso:Images", r"fails on rows float32\[2, 1, 4\]: ValueError"),
    ],
)
def test_a_torso_that_breaks_the_contract_is_refused_in_one_line(name, says):
    with pytest.raises(ConfigError, match=says) as refused:
        networks.make_network(make_spec((4,)), make_config(network=name))
    assert "config.agent.network" in str(refused.value) and "\n" not in str(refused.value)


def test_the_impala_network_has_the_layers_of_the_paper():
    spec = make_spec((84, 84), "uint8", stack=4, num_actions=6)
    config = make_config(network="impala", hidden=(256,), dueling=False)
    network = networks.make_network(spec, config)
    shapes = jax.eval_shape(network.init, jax.random.PRNGKey(0), np.zeros((1, 4, 84, 84), np.uint8))["params"]
    torso = {name: leaf["kernel"].shape for name, leaf in shapes["torso"].items()}
    assert [torso[f"conv_{i}"] for i in range(3)] == [(3, 3, 4, 16), (3, 3, 16, 32), (3, 3, 32, 32)]
    assert len(torso) == 1 + 3 * 5  # 15 convolutions and a dense layer
    assert torso["dense"] == (11 * 11 * 32, 256)
    small = make_spec((10, 10), "uint8")
    assert values_of(small, config, random_rows(small)).shape == (5, 3)
