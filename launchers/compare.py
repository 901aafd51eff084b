"""The paper's experiment: trains both architectures on equal terms and reports.

  python -m launchers.compare --config=configs/cartpole.py --settings=a --seeds=3
  python -m launchers.compare --config=configs/cartpole.py --link=rtt_ms=50,rate_mbit=20 --seeds=3

The existing approach keeps prioritized replay beside the learner and sends everything there in order of arrival; the
proposed one keeps it at the site and sends what the learner draws. Settings: a, the link carries a quarter of what the
actors produce, at 0.1 ms; b, 50 ms and 20 Mbit/s; c, 150 ms and 5 Mbit/s with an outage in the middle. Each is run
at equal bytes/s and at equal transferred experiences/s. Leaves summary.json, report.html and plots/ in --workdir.
Started again with the same --workdir and flags it goes on where it was interrupted.
"""

import itertools
import json
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict

from launchers import command_line, conditions, emulated_link, report, trials
from launchers.comparison import SIDES, Pair, verdicts
from launchers.conditions import Condition, Plan
from longhaul import workers
from longhaul.errors import ConfigError
from longhaul.metrics import write_atomically

_LINK = flags.DEFINE_string(
    "link", None, "a link to compare across, as `launchers.local` takes it; its setting is 'link'"
)
_SETTINGS = flags.DEFINE_list(
    "settings", None, "settings to compare in, of a, b and c; a if neither this nor --link is given"
)
_BUDGETS = flags.DEFINE_list(
    "budgets",
    ["bytes", "experiences"],
    "bytes: equal bytes/s for both sides; experiences: equal transferred experiences/s; or both, in turn",
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "runs of each side, seeds from config.seed on", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 300.0, "length of a run, from its first update on", lower_bound=10.0)
_PARALLEL = flags.DEFINE_integer(
    "parallel", 1, "2 makes both sides of a seed at the same time", lower_bound=1, upper_bound=2
)
_STEPS_PER_S = flags.DEFINE_float(
    "steps_per_s", 1500.0, "environment steps/s of a site, all actors together", lower_bound=1.0
)
_UPDATES_PER_S = flags.DEFINE_float(
    "updates_per_s",
    0.0,
    "of the learner; 0: such that the draws are what the link carries, the same for both sides",
    lower_bound=0.0,
)
_CALIBRATION_S = flags.DEFINE_float(
    "calibration_s", 40.0, "length of the two runs that measure bytes and rates", lower_bound=5.0
)
_SWEEP = flags.DEFINE_string(
    "sweep", None, "a field and its values, such as replay.priority_exponent=0.4,0.6,0.8: both sides with each"
)
flags.adopt_module_key_flags(command_line)


def main(config: config_dict.ConfigDict, signals: workers.StopSignals) -> int:
    emulated_link.parse_link(_LINK.value)
    settings = conditions.settings(_SETTINGS.value, _LINK.value, _SECONDS.value)
    for budget in _BUDGETS.value:
        if budget not in ("bytes", "experiences"):
            raise ConfigError(f"--budgets: {budget!r} is none; give bytes, experiences, or both with a comma between")
    sweep = conditions.parse_sweep(_SWEEP.value, config)
    workdir = _workdir()
    workdir.mkdir(parents=True, exist_ok=True)
    command_line.write_config(config, workdir)
    print(f"comparison's folder: {workdir}", flush=True)
    plan = Plan(config, workdir, _SECONDS.value, _STEPS_PER_S.value, _UPDATES_PER_S.value)
    measured = conditions.calibrate(plan, _CALIBRATION_S.value, _PARALLEL.value, signals)
    if measured is None:
        return _interrupted(workdir)
    todo = [
        plan.condition(name, link, budget, measured) for name, link in settings.items() for budget in _BUDGETS.value
    ]
    for condition in todo:
        print(condition.text(), flush=True)
    jobs = list(itertools.product(range(_SEEDS.value), todo, [None, *sweep.values]))
    for number, (seed, condition, value) in enumerate(jobs, 1):
        where = f"{'-'.join(condition.key)}{f', {sweep.field}={value}' if value else ''}, seed {config.seed + seed}"
        print(f"pair {number} of {len(jobs)}: {where}", flush=True)
        runs = [plan.trial(condition, side, config.seed + seed, sweep.field, value) for side in SIDES]
        for group in [runs] if _PARALLEL.value == 2 else [[run] for run in runs]:
            if not trials.make(group, signals):
                return _interrupted(workdir)
        if value is None:
            _write(plan, todo, sweep, measured)
    _write(plan, todo, sweep, measured, say=True)
    return 0


def _workdir() -> Path:
    folder = command_line.workdir()
    return folder or command_line.workdir_or_new().with_name(f"compare-{command_line.workdir_or_new().name}")


def _interrupted(workdir: Path) -> int:
    print(f"interrupted; the same command with --workdir={workdir} goes on from here", flush=True)
    return 0


def _pairs(plan: Plan, condition: Condition, sweep: conditions.Sweep, value: str | None) -> list[Pair]:
    """Returns the seeds of which both sides have ended."""
    found = []
    for seed in range(_SEEDS.value):
        ended = [
            trials.finished(plan.trial(condition, side, plan.config.seed + seed, sweep.field, value)) for side in SIDES
        ]
        if ended[0] is not None and ended[1] is not None:
            found.append(Pair(ended[0], ended[1]))
    return found


def _write(
    plan: Plan, todo: list[Condition], sweep: conditions.Sweep, measured: conditions.Calibration, say: bool = False
) -> None:
    """Writes summary and report of what has ended so far."""
    pairs = {condition.key: _pairs(plan, condition, sweep, None) for condition in todo}
    pairs = {key: found for key, found in pairs.items() if found}
    if not pairs:
        return
    swept = {
        condition.key: {f"{sweep.field}={value}": _pairs(plan, condition, sweep, value) for value in sweep.values}
        for condition in todo
    }
    facts: dict[str, Any] = {
        "command": conditions.command(),
        "equal on both sides": plan.equal(),
        "calibration": measured._asdict(),
        **{f"setting {c.key[0]}, equal {c.key[1]}/s:": c.facts() for c in todo},
    }
    summary = {
        "task": command_line.config_path().stem,
        "facts": facts,
        "differences": report.DIFFERENCES,
        "claims": [verdict._asdict() for verdict in verdicts(pairs)],
        "figures": {f"{s}-{b}": report.statistics(found) for (s, b), found in pairs.items()},
        "sweep": {
            f"{s}-{b}": {value: report.statistics(found) for value, found in by_value.items() if found}
            for (s, b), by_value in swept.items()
        },
    }
    write_atomically(plan.workdir / "summary.json", json.dumps(summary, indent=1) + "\n")
    title = f"Replay at the site against replay at the learner: {command_line.config_path().stem}"
    path = report.write(plan.workdir, title, pairs, swept, facts)
    if say:
        print("\n".join(report.lines(pairs)))
        print(f"summary: {plan.workdir}/summary.json\nreport: {path}", flush=True)


if __name__ == "__main__":
    command_line.run(main, "compare", trials.GRACE_S + 5.0)
