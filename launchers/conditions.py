"""The terms of a comparison: its settings, what both sides share, and the rates that follow from what is measured."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import config_dict

from launchers import command_line, emulated_link, trials
from launchers.comparison import SIDES
from launchers.trials import Trial
from longhaul import config as config_lib
from longhaul import workers
from longhaul.errors import ConfigError

_QUARTER = 0.25  # of production, which the link of setting a carries
# Of what the link carries, the share that draws make use of: a link that is exactly full has queues without end.
_DRAWN_SHARE = 0.8
_PROBE_SHARE = 0.02
_PUBLISH_PERIOD_S = 2.0
_PULLS_PER_S = 5.0  # fewer, larger batches would age in the learner's queue
_OUTAGE_S, _LARGEST_OUTAGE_SHARE = 60.0, 0.25  # of a run
# The way to the site carries weights, whose size has nothing to do with what the actors produce.
_UP_MBIT = 10.0
# Fields that a user's own --config.FIELD goes before.
_YIELD = {
    "actor.probe_share",
    "learner.minibatches_per_pull",
    "learner.publish_period_updates",
    "evaluation.period_s",
}
_NO_LIMIT = "rtt_ms=0.1"


def settings(names: list[str] | None, link: str | None, seconds: float) -> dict[str, str]:
    """Returns --link by setting; setting a's has no rate yet.

    Raises:
      ConfigError: there is no such setting.
    """
    outage_s = min(_OUTAGE_S, _LARGEST_OUTAGE_SHARE * seconds)
    known = {"a": _NO_LIMIT, "b": "rtt_ms=50,rate_mbit=20", "c": f"rtt_ms=150,rate_mbit=5,outage_s={outage_s:g}"}
    chosen: dict[str, str] = {}
    for name in names if names is not None else [] if link else ["a"]:
        if name not in known:
            raise ConfigError(f"--settings: there is no setting {name!r}; there are {', '.join(known)}")
        chosen[name] = known[name]
    return chosen | ({"link": link} if link else {})


class Sweep(NamedTuple):
    """A field and the values it takes; ("", []) is none."""

    field: str
    values: list[str]


def parse_sweep(text: str | None, config: config_dict.ConfigDict) -> Sweep:
    """Reads FIELD=VALUE,VALUE.

    Raises:
      ConfigError: it is of another form, there is no such field, or a value is out of its bounds.
    """
    if not text:
        return Sweep("", [])
    field, _, rest = text.partition("=")
    found = [value for value in rest.split(",") if value]
    if not found:
        raise ConfigError(f"--sweep={text}: give a field and its values, such as replay.priority_exponent=0.4,0.6")
    for value in found:
        tried = config_dict.ConfigDict(config.copy_and_resolve_references())
        try:
            tried.update_from_flattened_dict({field: type(_leaf(tried, field))(value)})
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"--sweep={text}: config.{field} can't be {value!r}: {error}") from error
        config_lib.validate(tried)
    return Sweep(field, found)


def _leaf(config: config_dict.ConfigDict, field: str) -> Any:
    value: Any = config
    for part in field.split("."):
        value = value[part]
    return value


def command() -> str:
    """Returns the command line, to be given again."""
    return "python -m launchers.compare " + " ".join(sys.argv[1:])


class Calibration(NamedTuple):
    """What the two short runs without a limit have measured.

    Attributes:
      production_per_s: transitions that the actors really make.
      existing_bytes: across the link for one experience in order of arrival, TCP's payload.
      proposed_bytes: likewise for one draw by priority.
    """

    production_per_s: float
    existing_bytes: float
    proposed_bytes: float


@dataclasses.dataclass(frozen=True)
class Condition:
    """One setting under one budget.

    Attributes:
      key: (setting, budget).
      link: --link of both sides.
      link_rate_bytes_per_s: towards the learner; 0: unlimited.
      experiences_per_s: config.link.experiences_per_s of both sides; 0: no cap.
      updates_per_s: config.learner.updates_per_s of both sides.
      derivation: how the latter came about.
    """

    key: tuple[str, str]
    link: str
    link_rate_bytes_per_s: float
    experiences_per_s: float
    updates_per_s: float
    derivation: str

    def facts(self) -> dict[str, Any]:
        """Returns what the report says of it."""
        found = dataclasses.asdict(self)
        del found["key"]
        return found

    def text(self) -> str:
        """Returns one line for the terminal."""
        cap = f", {self.experiences_per_s:g} experiences/s" if self.experiences_per_s else ""
        return (
            f"setting {self.key[0]}, equal {self.key[1]}/s: --link={self.link}{cap}, {self.updates_per_s:g} updates/s "
            f"({self.derivation})"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all runs of a comparison share.

    Attributes:
      config: the task's, with the user's changes.
      workdir: the comparison's folder.
      seconds: length of a run.
      steps_per_s: environment steps of all actors together.
      updates_per_s: as the user has set it; 0: to be derived.
    """

    config: config_dict.ConfigDict
    workdir: Path
    seconds: float
    steps_per_s: float
    updates_per_s: float

    def equal(self) -> dict[str, Any]:
        """Returns the settings that are the same on both sides and not the task file's."""
        shared = self._overrides(0.0, 0.0)
        for derived in ("updates_per_s", "minibatches_per_pull", "publish_period_updates"):
            shared.pop(f"learner.{derived}", None)
        del shared["link.experiences_per_s"]
        words = " ".join(command_line.config_arguments(sys.argv))
        # As texts: JSON has no infinity.
        return {"seconds": self.seconds, "configuration": words, **{f"config.{k}": str(v) for k, v in shared.items()}}

    def _overrides(self, updates_per_s: float, experiences_per_s: float) -> dict[str, Any]:
        config = self.config
        found = {
            "actor.steps_per_s": self.steps_per_s / config.actor.num_actors,
            "actor.probe_share": _PROBE_SHARE,
            "learner.updates_per_s": updates_per_s,
            "learner.max_updates": 10**9,
            "learner.minibatches_per_pull": min(
                config.learner.minibatches_per_pull,
                max(1, int(updates_per_s / self._updates_of_a_draw() / _PULLS_PER_S)),
            ),
            "learner.publish_period_updates": max(1, round(_PUBLISH_PERIOD_S * updates_per_s)),
            "link.experiences_per_s": experiences_per_s,
            "replay.samples_per_insert": 0.0,  # the paces hold both rates; a limiter would hold one side's actors
            "evaluation.target_return": math.inf,
            "evaluation.period_s": max(config.evaluation.period_s, self.seconds / 60),
            "metrics.score_transfers": True,
            "metrics.tensorboard": False,
        }
        given = {word.lstrip("-").split("=")[0] for word in command_line.config_arguments(sys.argv)}
        return {name: value for name, value in found.items() if name not in _YIELD or f"config.{name}" not in given}

    def _updates_of_a_draw(self) -> float:
        """Returns the updates made per draw that crosses: its own, and those that config.learner.reuse adds."""
        return 1.0 + self.config.learner.reuse

    def updates(self, draws_per_s: float) -> float:
        """Returns the updates/s of both sides, as the user has set them or from the draws that cross."""
        return self.updates_per_s or float(
            f"{draws_per_s * self._updates_of_a_draw() / self.config.learner.batch_size:.4g}"
        )

    def words(self, updates_per_s: float, experiences_per_s: float) -> tuple[str, ...]:
        """Returns the words of a run's command line that make its configuration."""
        overrides = self._overrides(updates_per_s, experiences_per_s)
        own = [f"--config.{name}={value}" for name, value in overrides.items()]
        return (*command_line.config_arguments(sys.argv), *own)

    def trial(self, condition: Condition, side: str, seed: int, field: str, value: str | None) -> Trial:
        """Returns one run; `value` is the swept field's, None leaves it."""
        folder = self.workdir / "-".join(condition.key)
        words = self.words(condition.updates_per_s, condition.experiences_per_s)
        if value is not None:
            folder /= f"{field}={value}"
            words = (*words, f"--config.{field}={value}")
        return Trial(
            folder / side / f"seed{seed}",
            side,
            seed,
            self.seconds,
            condition.link,
            condition.link_rate_bytes_per_s,
            self.config.actor.num_actors,
            words,
        )

    def condition(self, setting: str, link: str, budget: str, measured: Calibration) -> Condition:
        """Derives the rates of one setting under one budget, for both sides together."""
        dearest = max(measured.existing_bytes, measured.proposed_bytes)
        quarter = _QUARTER * measured.production_per_s
        rate = emulated_link.parse_link(link).rate_bytes_per_s  # type: ignore[union-attr]
        cap = 0.0
        if setting == "a" and budget == "bytes":
            rate = _round(quarter * measured.existing_bytes)
            link = f"{link},rate_mbit={rate * 8 / 1e6:.6g},up_mbit={_UP_MBIT:g}"
        carried = min(measured.production_per_s, rate / dearest) if rate else measured.production_per_s
        drawn, why = (
            _DRAWN_SHARE * carried,
            f"{_DRAWN_SHARE:.0%} of the smaller of production and the link's rate over the bytes of the dearer side's "
            "experience, over the batch size",
        )
        if budget == "experiences":
            drawn = cap = _round(min(quarter, drawn))
            why = "the cap on experiences/s over the batch size"
        if self.config.learner.reuse:
            why += f", times {self._updates_of_a_draw():g}, for config.learner.reuse"
        derivation = "as --updates_per_s says" if self.updates_per_s else why
        return Condition((setting, budget), link, rate, cap, self.updates(drawn), derivation)


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def calibrate(plan: Plan, seconds: float, parallel: int, signals: workers.StopSignals) -> Calibration | None:
    """Runs both sides without a limit and measures production and bytes; None if interrupted.

    The proposed side draws an eighth of what is produced: the fewer the draws, the fewer find their rows in the cache,
    and setting a's draws, less than a quarter, must fit the link.
    """
    updates = plan.updates(_QUARTER / 2 * plan.steps_per_s)
    words = plan.words(updates, 0.0)
    runs = [
        Trial(
            plan.workdir / "calibration" / side / f"seed{plan.config.seed}",
            side,
            plan.config.seed,
            seconds,
            _NO_LIMIT,
            0.0,
            plan.config.actor.num_actors,
            words,
        )
        for side in SIDES
    ]
    for group in [runs] if parallel == 2 else [[run] for run in runs]:
        if not trials.make(group, signals):
            return None
    existing, proposed = (trials.finished(run) for run in runs)
    assert existing is not None and proposed is not None
    # The last quarter: an empty cache and libraries that are still loading are behind it.
    return Calibration(
        production_per_s=round(min(existing["last"]["env_steps_per_s"], proposed["last"]["env_steps_per_s"]), 1),
        existing_bytes=_bytes_per_experience(existing, seconds),
        proposed_bytes=_bytes_per_experience(proposed, seconds),
    )


def _bytes_per_experience(figures: dict[str, Any], seconds: float) -> float:
    """Returns the last quarter's; where nothing has crossed in it, the whole run's.

    Raises:
      ConfigError: nothing has crossed at all.
    """
    for part in ("last", "all"):
        if (found := figures[part]["bytes_per_experience"]) is not None:
            return round(found, 2)
    raise ConfigError(f"--calibration_s={seconds:g} is too short: no experience crossed the link in that time")
