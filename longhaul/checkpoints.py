"""A learner's checkpoints: `checkpoints/<step>/` in a run's folder.

Each holds `state/` (the whole TrainState, by orbax), `weights.lhw` (the online network as `codec` packs weights, so
that evaluation needs neither orbax nor the optimizer) and `meta.json`. A checkpoint is written beside its place and
renamed into it at the end: a folder with a number for a name is whole, anything else is left over from a crash.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import config_dict

from longhaul import codec, networks
from longhaul import config as config_lib
from longhaul.dqn import TrainState
from longhaul.errors import Corruption, MismatchError
from longhaul.types import ExperienceSpec

_PARTIAL_SUFFIX = ".partial"
# Room for what a checkpoint holds besides arrays.
_SPACE_MARGIN_BYTES = 2**17
# What of config.agent decides the network's shape, and what its outputs are trained to be.
_NETWORK_FIELDS = (
    *("network", "hidden", "dueling", "noisy_sigma", "distribution", "atoms", "v_min", "v_max"),
    *("double", "munchausen_alpha", "munchausen_temperature", "munchausen_clip", "reward_scale", "value_rescaling"),
)


class Progress(NamedTuple):
    """What a learner must know besides its TrainState to go on.

    Attributes:
      step: updates seen.
      epoch: of the learner that wrote it.
      version: of the last weights published.
    """

    step: int
    epoch: int
    version: int


def _folder(workdir: Path) -> Path:
    return Path(workdir).absolute() / "checkpoints"


def complete_steps(workdir: Path) -> list[int]:
    """Returns the steps of whole checkpoints, oldest first, in the order of numbers (9000 before 10000)."""
    folder = _folder(workdir)
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if (entry / "meta.json").is_file())
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def latest_weights(workdir: Path) -> tuple[int, bytes] | None:
    """Returns the newest checkpoint's step and weights for `codec.unpack_weights`; None if there is none.

    Raises:
      OSError: it can't be read.
    """
    # While a run goes on, the oldest ones vanish: one that goes between listing and reading had a successor.
    for step in reversed(complete_steps(workdir)):
        with contextlib.suppress(FileNotFoundError):
            return step, (_folder(workdir) / str(step) / "weights.lhw").read_bytes()
    return None


def latest_progress(workdir: Path) -> Progress | None:
    """Returns how far the newest checkpoint had come; None if there is none.

    Raises:
      Corruption: its meta.json is damaged.
    """
    steps = complete_steps(workdir)
    return _progress(_read_meta(workdir, steps[-1])) if steps else None


def save(
    workdir: Path,
    state: TrainState,
    spec: ExperienceSpec,
    config: config_dict.ConfigDict,
    progress: Progress,
) -> Path:
    """Writes one checkpoint and removes the oldest beyond config.learner.keep_checkpoints.

    Args:
      workdir: the run's folder.
      state: leaves on the host or on the device; not donated before this returns.
      spec: what the learner is trained on; a restore insists on the same.
      config: kept in meta.json.
      progress: its step names the folder; an existing checkpoint of that step is replaced.

    Returns:
      The checkpoint's folder.

    Raises:
      OSError: it can't be written, e.g. the disk is full; older checkpoints are as they were.
    """
    host = jax.tree_util.tree_map(np.array, jax.device_get(state))
    folder = _folder(workdir)
    final, partial = folder / str(progress.step), folder / f"{progress.step}{_PARTIAL_SUFFIX}"
    try:
        _remove_partial(folder)
        partial.mkdir(parents=True)
        _require_space(partial, sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(host)))
        _save_arrays(partial / "state", _by_path(host))
        weights = codec.pack_weights(networks.flatten_params(host.params), "float32")
        _write_durably(partial / "weights.lhw", weights)
        meta = {
            **progress._asdict(),
            "spec": dataclasses.asdict(spec),
            "network": _network_fields(config),
            "arrays": _shape_texts(host),
            "config": json.loads(config.to_json_best_effort()),
        }
        _write_durably(partial / "meta.json", json.dumps(meta, indent=2).encode())
        if final.exists():
            os.rename(final, folder / f"{progress.step}.replaced{_PARTIAL_SUFFIX}")
        os.rename(partial, final)
        _remove_partial(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for step in complete_steps(workdir)[: -config.learner.keep_checkpoints]:
        shutil.rmtree(folder / str(step), ignore_errors=True)
    return final


def restore(
    workdir: Path, template: TrainState, spec: ExperienceSpec, config: config_dict.ConfigDict
) -> tuple[TrainState, Progress] | None:
    """Reads the newest checkpoint.

    Args:
      workdir: the run's folder.
      template: a state of the same tree and shapes.
      spec: what the learner is to be trained on.
      config: tells the network.

    Returns:
      The state (numpy leaves that nothing else shares) and the progress, or None if there is no checkpoint.

    Raises:
      MismatchError: it is another experience's or another network's, which the text names.
      Corruption: it can't be read whole.
    """
    steps = complete_steps(workdir)
    if not steps:
        return None
    path = _folder(workdir) / str(steps[-1])
    meta = _read_meta(workdir, steps[-1])
    try:
        saved_spec = ExperienceSpec(**{**meta["spec"], "row_shape": tuple(meta["spec"]["row_shape"])})
        saved_network, saved_arrays = dict(meta["network"]), dict(meta["arrays"])
    except (KeyError, TypeError) as error:
        raise Corruption(f"{path}/meta.json is damaged ({error!r}): remove {path}") from error
    differences = spec.differences(saved_spec)
    network, defaults = _network_fields(config), _network_fields(config_lib.default())
    for field in _NETWORK_FIELDS:
        saved = saved_network.get(field, defaults[field])  # absent from checkpoints older than the field
        if network[field] != saved:
            differences.append(f"config.agent.{field}: {network[field]} != {saved}")
    wanted = _shape_texts(template)
    if not differences:
        for key in sorted(wanted.keys() | saved_arrays.keys()):
            if wanted.get(key) != saved_arrays.get(key):
                differences.append(f"{key}: {wanted.get(key, 'absent')} != {saved_arrays.get(key, 'absent')}")
                break
    if differences:
        raise MismatchError(
            f"the checkpoint {path} was made by another learner (mine != the checkpoint's): {'; '.join(differences)}: "
            "use the settings it was made with, or another --workdir"
        )
    found = _restore_arrays(path / "state", _by_path(template))
    _, tree = jax.tree_util.tree_flatten(template)
    return jax.tree_util.tree_unflatten(tree, [np.array(found[key]) for key in wanted]), _progress(meta)


def _network_fields(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns the fields as JSON will have them; None for those that the others leave without effect."""
    agent = config.agent
    unused: set[str] = set()
    if agent.distribution == "none":
        unused |= {"atoms", "v_min", "v_max"}
    if agent.distribution == "qr":
        unused |= {"v_min", "v_max"}
    unused |= {"double"} if agent.munchausen_alpha else {"munchausen_temperature", "munchausen_clip"}
    fields = {field: None if field in unused else agent[field] for field in _NETWORK_FIELDS}
    return {field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()}


def _by_path(state: TrainState) -> dict[str, Any]:
    """Returns the leaves by their path, in the tree's order: a checkpoint then depends on no library's classes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _shape_texts(state: TrainState) -> dict[str, str]:
    return {key: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for key, leaf in _by_path(state).items()}


def _progress(meta: dict[str, Any]) -> Progress:
    try:
        return Progress(*(int(meta[field]) for field in Progress._fields))
    except (KeyError, TypeError, ValueError) as error:
        raise Corruption(f"a checkpoint's meta.json is damaged ({error!r})") from error


def _read_meta(workdir: Path, step: int) -> dict[str, Any]:
    path = _folder(workdir) / str(step) / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Corruption(f"{path} can't be read ({error}): remove {path.parent}") from error
    if not isinstance(meta, dict):
        raise Corruption(f"{path} is not a JSON object: remove {path.parent}")
    return meta


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _require_space(folder: Path, state_bytes: int) -> None:
    """Raises the system's own OSError if the disk, a quota or a limit has no room for a checkpoint.

    Asked for with a file of that size, before orbax starts: its many threads report a full disk page by page.
    """
    reserve = folder / "reserve"
    with open(reserve, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * state_bytes + _SPACE_MARGIN_BYTES)
    reserve.unlink()


def _remove_partial(folder: Path) -> None:
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.endswith(_PARTIAL_SUFFIX):
                shutil.rmtree(entry, ignore_errors=True)


def _first_line(error: Exception) -> str:
    """Returns an error's first line, or the operating system's part of it where tensorstore buried one in it."""
    text = (str(error).splitlines() or [repr(error)])[0]
    from_system = re.search(r"OS error \d+: [^\]]*", text)
    return from_system.group() if from_system else text[:300]


def _checkpointer() -> Any:
    """Returns orbax's synchronous checkpointer: the asynchronous one logs a failed write as a page of traceback."""
    import orbax.checkpoint as ocp  # takes seconds, and evaluation has no need of it

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    # Orbax's errors are of many kinds (tensorstore's, JAX's); all mean that the folder was not written.
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, arrays)
    except Exception as error:
        raise OSError(f"{path} can't be written: {_first_line(error)}") from error


def _restore_arrays(path: Path, template: dict[str, Any]) -> dict[str, np.ndarray]:
    target = {key: np.zeros(leaf.shape, leaf.dtype) for key, leaf in template.items()}
    try:
        with _checkpointer() as checkpointer:
            return checkpointer.restore(path, target)
    except Exception as error:
        raise Corruption(f"{path} can't be restored ({_first_line(error)}): remove {path.parent}") from error
