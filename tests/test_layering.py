"""The order of imports, read from the syntax trees.

The project's rule: imports go down the list below only. Launchers stand above everything and read the flags; below them
are the four parts (actor, gateway, link, learner), which never import each other; below those what speaks for a part
(the replay, the site's client); then the pure pieces; at the bottom plain records, errors, settings, figures and
processes. Then, whatever stands in between: the site's door (gateway, session, buffer, site_client) and the link never
reach JAX; link and learner never reach Reverb, TensorFlow or gymnasium, actors neither of the first two; networks, dqn
and learner never reach gRPC either; and Reverb and TensorFlow are imported by buffer alone.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent

# A module may import those named before it. A new module gets its place here.
ORDER = [
    # plain: standard library and numpy
    *("errors", "types", "config", "metrics", "workers"),
    # pure pieces
    *(
        "proto",
        "codec",
        "records",
        "security",
        "budget",
        "channel",
        "tcp",
        "relay",
        "snapshots",
        "arrival",
        "initial_priority",
        "mirror",
        "crossings",
        "row_level",
        "window",
        "draw_pace",
    ),
    *("inbox", "link_meter", "publisher", "background"),
    *("pacing", "row_ids", "probe"),
    *(
        "nstep",
        "atari",
        "minatar",
        "env",
        "streams",
        "exploration",
        "rescaling",
        "first_priority",
        "distributions",
        "heads",
        "torsos",
        "networks",
        "weights_publisher",
        "policy",
        "devices",
        "dqn",
        "device_cache",
        "train_step",
        "reserve",
        "scoring",
    ),
    # what speaks for a part
    *(
        "buffer",
        "row_store",
        "seeded_replay",
        "queue_sampler",
        "site_client",
        "inserter",
        "intake",
        "session",
        "stream",
        "checkpoints",
        "evaluation",
    ),
    # the parts
    *("actor", "forwarder", "gateway", "link", "learner"),
    # actor and learner together, in one thread
    "lockstep",
]
PARTS = {"actor", "forwarder", "gateway", "link", "learner"}
SITE_LIBRARIES = {"reverb", "tensorflow", "gymnasium", "ale_py", "cv2", "minatar"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}

# module -> what it must not reach, directly or through other modules of ours
NEVER = {
    "gateway": JAX,
    "session": JAX,
    "buffer": JAX,
    "site_client": JAX,
    "actor": {"reverb", "tensorflow"},
    "forwarder": {"reverb", "tensorflow"},
    "link": JAX | SITE_LIBRARIES,
    "learner": SITE_LIBRARIES | {"grpc"},
    "networks": SITE_LIBRARIES | {"grpc"},
    "dqn": SITE_LIBRARIES | {"grpc"},
    "env": JAX | {"grpc"},
}


def modules_of(package: str) -> dict[str, Path]:
    """Returns the modules of a package by name; a package inside it counts as one module."""
    folder = REPO / package
    found = {path.stem: path for path in folder.glob("*.py") if path.stem != "__init__"}
    return found | {path.parent.name: path for path in folder.glob("*/__init__.py")}


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Returns the dotted names that a file imports anywhere, in functions and under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the whole name"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def imported_modules(path: Path, package: str) -> set[str]:
    """Returns which modules of a package a file imports."""
    parts = [name.split(".") for name in imports_of(path)]
    return {name[1] for name in parts if name[0] == package and len(name) > 1 and name[1] in modules_of(package)}


def reached_libraries(module: str, seen: set[str] | None = None) -> set[str]:
    """Returns the top names that a module imports, itself or through other modules of ours."""
    seen = seen if seen is not None else set()
    seen.add(module)
    path = modules_of("longhaul")[module]
    found = {name.split(".")[0] for name in imports_of(path)}
    for inner in imported_modules(path, "longhaul") - seen:
        found |= reached_libraries(inner, seen)
    return found


def test_every_module_has_its_place():
    assert sorted(modules_of("longhaul")) == sorted(ORDER), "add new modules to ORDER, and take out those that are gone"


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_down_the_list(module):
    allowed = set(ORDER[: ORDER.index(module)])
    upwards = imported_modules(modules_of("longhaul")[module], "longhaul") - allowed
    if module == "proto":
        upwards -= {"proto"}  # generated files of one package
    assert not upwards, f"{module} imports {sorted(upwards)}, which stand above it"


@pytest.mark.parametrize("part", sorted(PARTS))
def test_parts_do_not_import_each_other(part):
    assert not imported_modules(modules_of("longhaul")[part], "longhaul") & (PARTS - {part})


@pytest.mark.parametrize("module", sorted(NEVER))
def test_what_a_module_must_never_reach(module):
    reached = reached_libraries(module) & NEVER[module]
    assert not reached, f"{module} reaches {sorted(reached)}"


@pytest.mark.parametrize("module", ORDER)
def test_only_buffer_imports_reverb_and_tensorflow(module):
    names = {name.split(".")[0] for name in imports_of(modules_of("longhaul")[module])}
    assert module == "buffer" or not names & {"reverb", "tensorflow", "tree"}


@pytest.mark.parametrize("module", ORDER)
def test_only_launchers_read_flags_and_nothing_imports_them(module):
    names = imports_of(modules_of("longhaul")[module])
    assert not any(name.startswith(("absl.flags", "absl.app", "ml_collections.config_flags")) for name in names)
    assert not any(name.split(".")[0] in ("launchers", "configs", "tests") for name in names)


def test_there_is_no_drawer_of_leftovers():
    for package in ("longhaul", "launchers", "configs", "tests", "benchmarks"):
        assert not {"utils", "util", "helpers", "common", "misc"} & set(modules_of(package))
