"""Rules of the task files: each loads, holds to the bounds, has a whole head, and names a real environment."""

import importlib.util
from pathlib import Path

import pytest

from longhaul import config as config_lib
from longhaul.errors import ConfigError

REPO = Path(__file__).parent.parent
FILES = sorted(path for path in (REPO / "configs").glob("*.py") if path.stem != "__init__")
NAMES = [path.stem for path in FILES]


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_each_task_holds_to_the_bounds_and_starts_from_the_defaults(path):
    config = load(path).get_config()
    config_lib.validate(config)
    assert sorted(config.keys()) == sorted(config_lib.default().keys())


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_each_head_gives_command_time_and_score(path):
    head = load(path).__doc__ or ""
    assert f"python -m launchers.local --config=configs/{path.name}" in head
    assert "\nTime: " in head and "Score: " in head


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_each_environment_can_be_made_and_its_rows_fit_the_network(path):
    pytest.importorskip("gymnasium")
    pytest.importorskip("ale_py")
    from longhaul import env, networks

    config = load(path).get_config()
    spec = env.make_spec(config)
    networks.make_network(spec, config)
    assert spec.num_actions > 1
    if config.env.id.startswith("ALE/"):
        assert (spec.row_shape, spec.row_dtype, spec.stack) == ((84, 84), "uint8", 4)


def test_a_field_out_of_bounds_is_named_with_its_value_and_what_it_must_be():
    config = config_lib.default()
    config.env.stack = 0
    with pytest.raises(ConfigError, match=r"config\.env\.stack is 0, and must be from 1 to 32"):
        config_lib.validate(config)


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_number_that_is_none_is_out_of_every_bound(value):
    config = config_lib.default()
    config.learner.learning_rate = value
    with pytest.raises(ConfigError, match=r"config\.learner\.learning_rate"):
        config_lib.validate(config)


def test_a_value_of_the_wrong_kind_is_refused_by_its_fields_name():
    config = config_lib.default()
    config.agent.hidden = (64, "wide")
    with pytest.raises(ConfigError, match=r"config\.agent\.hidden"):
        config_lib.validate(config)


def test_groups_that_do_not_divide_the_streams_are_refused():
    config = config_lib.default()
    config.env.num_envs, config.actor.groups = 4, 3
    with pytest.raises(ConfigError, match=r"config\.actor\.groups is 3, and must divide config\.env\.num_envs \(4\)"):
        config_lib.validate(config)


def test_a_replay_that_could_never_be_sampled_is_refused():
    config = config_lib.default()
    config.replay.min_size = config.replay.capacity + 1
    with pytest.raises(ConfigError, match=r"config\.replay\.min_size .* more than config\.replay\.capacity"):
        config_lib.validate(config)
