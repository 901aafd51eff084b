"""The probe: transitions held out of the replay, for a loss that no training has lowered by heart.

Every actor diverts a share of its transitions, config.actor.probe_share, chosen by a generator of its own: a uniform
sample of all that the site makes, whatever the replay's priorities. They are kept in `probe/` of the run's folder as
small files, the newest ones only, and never inserted. Rows of a diverted transition may be rows of others that are
inserted: what is held out is the transition.
"""

import contextlib
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longhaul.types import ExperienceSpec, NStepTransition

_SEGMENT = 32  # transitions per file
_FOLDER = "probe"


class Probe(NamedTuple):
    """Held-out transitions. N is their number.

    Attributes:
      rows: [N, 2*stack, *row_shape] of the row dtype, observation rows then next observation rows.
      actions: int32 [N].
      returns: float32 [N].
      discounts: float32 [N].
    """

    rows: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray


class ProbeWriter:
    """Takes a share of one actor's transitions out of its stream and keeps the newest of them on disk.

    Args:
      workdir: the run's folder.
      name: of the actor, unique in the folder.
      spec: of the experience.
      share: of all transitions that is diverted, from 0 to 1.
      seed: of the choice; a sequence that nothing else is seeded with.
      keep_rows: newest rows of a stream that a transition may refer to.
      keep: transitions kept on disk at least; older files are removed.

    Attributes:
      held_out: transitions diverted so far.
    """

    def __init__(
        self,
        workdir: Path,
        name: str,
        spec: ExperienceSpec,
        share: float,
        seed: list[int],
        keep_rows: int,
        keep: int = 2048,
    ):
        self._folder = workdir / _FOLDER
        self._name = name
        self._share = share
        self._rng = np.random.default_rng(seed)
        self._keep_rows = keep_rows
        self._keep_files = -(-keep // _SEGMENT)
        self._rows: dict[int, OrderedDict[int, np.ndarray]] = {}
        self._stack_shape = (2 * spec.stack, *spec.row_shape)
        self._row_dtype = np.dtype(spec.row_dtype)
        self._waiting: list[tuple[np.ndarray, NStepTransition]] = []
        self._files: list[Path] = []
        self.held_out = 0
        self._folder.mkdir(parents=True, exist_ok=True)

    def add_row(self, stream: int, row_id: int, row: np.ndarray) -> None:
        """Remembers a row ([*row_shape], copied) for as long as a transition of its stream may refer to it."""
        rows = self._rows.setdefault(stream, OrderedDict())
        rows[row_id] = np.array(row)
        if len(rows) > self._keep_rows:
            rows.popitem(last=False)

    def takes(self, stream: int, transition: NStepTransition) -> bool:
        """Decides about one transition; True if it is held out, and then it must not be inserted."""
        if self._rng.random() >= self._share:
            return False
        rows = self._rows[stream]
        stacks = np.stack([rows[i] for i in transition.obs_ids + transition.next_ids]).astype(self._row_dtype)
        self._waiting.append((stacks.reshape(self._stack_shape), transition))
        self.held_out += 1
        if len(self._waiting) == _SEGMENT:
            self._write()
        return True

    def _write(self) -> None:
        transitions = [transition for _, transition in self._waiting]
        number = self.held_out // _SEGMENT
        path = self._folder / f"{self._name}-{number:08d}.npz"
        part = self._folder / f".{path.name}.part"
        with open(part, "wb") as file:
            np.savez(
                file,
                rows=np.stack([rows for rows, _ in self._waiting]),
                actions=np.array([t.action for t in transitions], np.int32),
                returns=np.array([t.n_step_return for t in transitions], np.float32),
                discounts=np.array([t.discount for t in transitions], np.float32),
            )
        part.replace(path)
        self._waiting.clear()
        self._files.append(path)
        while len(self._files) > self._keep_files:
            self._files.pop(0).unlink(missing_ok=True)


def newest(workdir: Path, count: int) -> Probe | None:
    """Returns the newest `count` held-out transitions of all actors, or None while there are fewer.

    Raises:
      OSError: a file can't be read.
    """
    by_time: list[tuple[float, Path]] = []
    for path in (workdir / _FOLDER).glob("[!.]*.npz"):
        with contextlib.suppress(FileNotFoundError):  # an actor has just removed it
            by_time.append((path.stat().st_mtime, path))
    pieces: list[Probe] = []
    found = 0
    for _, path in sorted(by_time, reverse=True):
        with contextlib.suppress(FileNotFoundError, zipfile.BadZipFile), np.load(path, allow_pickle=False) as file:
            pieces.append(Probe(*(file[name] for name in Probe._fields)))
            found += len(pieces[-1].actions)
        if found >= count:
            return Probe(*(np.concatenate(columns)[:count] for columns in zip(*pieces)))
    return None
