"""The comparison: statistics worked by hand, verdicts, what is skipped on a rerun, and the report."""

import html.parser
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launchers import comparison, conditions, report, trials
from launchers.comparison import BINS, Pair, interval, ratio, verdicts
from launchers.trials import Trial
from longhaul import config as config_lib
from longhaul.errors import ConfigError
from longhaul.metrics import jsonl_path, read_jsonl

REPO = Path(__file__).parent.parent


# ---- statistics


def test_the_interval_is_students():
    # Mean 2, standard deviation 1, three seeds: 4.303 / sqrt(3) by the table of t at 2 degrees of freedom.
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.half == pytest.approx(2.484, abs=1e-3)
    assert (found.low, found.high) == (pytest.approx(-0.484, abs=1e-3), pytest.approx(4.484, abs=1e-3))


def test_the_gain_of_what_arrives_is_over_the_mean_of_the_same_runs_stream():
    pairs = pairs_of(
        [{"arrival_priority": 6.0, "probe_priority": 2.0}, {"arrival_priority": 5.0, "probe_priority": 0.0}]
    )
    gains = comparison.values(pairs, "proposed", "last", "arrival_gain")
    assert gains[0] == 3.0 and math.isnan(gains[1])
    assert comparison.values(pairs, "existing", "last", "arrival_gain") == [1.0, 1.0]


def test_the_priorities_verdict_says_what_fresh_priorities_would_give():
    pairs = pairs_of([{"probe_priority_drawn": 9.0, "probe_priority": 3.0}, {"probe_priority_drawn": 5.0}])
    assert "on priorities never out of date would give 4 (95%" in judged({("a", "bytes"): pairs}, "(all draws)").text


def test_one_seed_has_no_interval_and_none_has_no_mean():
    assert interval([3.0]) == (3.0, math.inf)
    assert math.isnan(interval([]).mean) and math.isnan(interval([math.nan]).mean)
    assert interval([1.0, math.nan]) == (1.0, math.inf)


def test_ratios_are_taken_seed_by_seed():
    assert ratio([2.0, 8.0], [1.0, 2.0]).mean == 3.0
    assert ratio([2.0, 8.0], [0.0, 2.0]) == (4.0, math.inf)
    assert ratio([2.0, math.nan], [1.0, 2.0]) == (2.0, math.inf)


def run_figures(last=None, returns=None, down_bytes=None):
    """Figures of a made-up run, as `comparison.measure` has them."""
    means = {name: 1.0 for name in report.FIGURES} | (last or {})
    curves = {name: [1.0] * BINS for name in ("loss", "probe_loss", "arrival_priority", "idle_share")}
    curves["time_s"] = curves["env_steps"] = [float(i) for i in range(BINS)]
    curves["return"] = returns or [10.0] * BINS
    curves["down_bytes"] = down_bytes or [100.0 * i for i in range(BINS)]
    curves["down_bytes_per_s"] = [100.0] * BINS
    return {"all": means, "last": means, "totals": {"updates": 5.0, "down_bytes": 100.0}, "curves": curves}


def pairs_of(proposed, existing=None):
    """One pair for each seed's figures of the last quarter."""
    existing = existing or [{}] * len(proposed)
    return [Pair(run_figures(a), run_figures(b)) for a, b in zip(existing, proposed)]


def judged(measured, words):
    found = [verdict for verdict in verdicts(measured) if words in verdict.claim]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("priority, holds", [((4.0, 4.2, 4.1), True), ((3.0, 3.2, 3.1), False), ((3.92, 3.92), True)])
def test_the_priorities_claim_holds_from_its_factor_on(priority, holds):
    verdict = judged({("a", "bytes"): pairs_of([{"arrival_priority": p} for p in priority])}, "(all draws)")
    assert verdict.holds == holds
    mean = sum(priority) / len(priority)
    assert verdict.text.startswith(f"{'holds' if holds else 'does not hold'}: {mean:.4g} (95%: ")
    assert "needed at least 3.92" in verdict.text


@pytest.mark.parametrize("loss, holds", [((0.2, 0.22), True), ((0.26, 0.26), True), ((0.5, 0.6), False)])
def test_the_losses_claim_holds_up_to_its_share(loss, holds):
    verdict = judged({("a", "bytes"): pairs_of([{"loss": x} for x in loss])}, "Training loss")
    assert verdict.holds == holds and "needed at most 0.26" in verdict.text


def test_an_interval_that_reaches_past_the_limit_is_said_so():
    wide = judged({("a", "bytes"): pairs_of([{"loss": x} for x in (0.1, 0.4)])}, "Training loss")
    assert wide.holds and "the interval reaches to both sides" in wide.text
    narrow = judged({("a", "bytes"): pairs_of([{"loss": x} for x in (0.1, 0.1)])}, "Training loss")
    assert "both sides" not in narrow.text


def test_claims_of_one_setting_are_judged_there_only_and_what_is_not_measured_is_not_judged():
    measured = {("b", "bytes"): pairs_of([{}]), ("b", "experiences"): pairs_of([{}])}
    assert [verdict.claim for verdict in verdicts(measured)] == ["Return at equal bytes never worse, setting b"]
    missing = judged({("a", "bytes"): pairs_of([{"loss": None}])}, "Training loss")
    assert missing.holds is None and missing.text == "not measured"


def test_returns_are_compared_at_equal_bytes_not_at_equal_times():
    rising = [float(i) for i in range(BINS)]
    # The proposed side gets as far with half the bytes.
    half = [50.0 * i for i in range(BINS)]
    pair = Pair(run_figures(returns=rising), run_figures(returns=rising, down_bytes=half))
    difference = comparison.return_by_bytes(pair, points=4)
    largest = 50.0 * (BINS - 1)
    expected = [largest * share / 50 - largest * share / 100 for share in (0.25, 0.5, 0.75, 1.0)]
    np.testing.assert_allclose(difference, expected)


@pytest.mark.parametrize("shift, holds", [(5.0, True), (0.0, True), (-5.0, False)])
def test_the_returns_claim_goes_by_the_sign_of_the_difference(shift, holds):
    pairs = [Pair(run_figures(), run_figures(returns=[10.0 + shift + e] * BINS)) for e in (0.0, 0.1, -0.1)]
    verdict = judged({("b", "bytes"): pairs}, "never worse")
    assert verdict.holds == holds
    assert f"surely worse at {0 if holds else 10} of 10 points" in verdict.text


def test_a_return_that_is_better_in_the_mean_and_surely_worse_somewhere_does_not_hold():
    returns = [0.0] * (BINS // 4) + [100.0] * (BINS - BINS // 4)
    pairs = [Pair(run_figures(), run_figures(returns=returns)) for _ in range(3)]
    assert judged({("b", "bytes"): pairs}, "never worse").holds is False


# ---- one run's files


def write_lines(workdir, role, lines):
    path = jsonl_path(workdir, role)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def a_run(workdir, link_role="learner"):
    """40 s from time 1000 on: figures that are easy to work out."""
    times = [1000 + t for t in range(-4, 44)]
    learner = [
        {"time_s": t, "updates": 10 * (t - 990), "updates_per_s": 10, "loss": 4.0 if t < 1030 else 1.0,
         "loss_unweighted": 8.0, "policy_version": 3.5, "weights_version": 8, "idle_share": 0.25, "sample_age_s": 0.5}
        for t in times
    ]  # fmt: skip
    learner[30] |= {"outages": 1}  # a count that is not there before the first
    learner[31:] = [line | {"outages": 2} for line in learner[31:]]
    # Twice as many draws in the first half, so that a mean over lines would be another.
    link = [
        {"time_s": t, "link_samples": 100 * (t - 990), "arrival_priority": 6.0 if t < 1020 else 3.0,
         "arrival_draws": 200 if t < 1020 else 100, "arrival_first_crossings": 50, "arrival_priority_first": 9.0}
        for t in times
    ]  # fmt: skip
    if link_role == "learner":
        learner = [one | other for one, other in zip(learner, link)]
    else:
        write_lines(workdir, link_role, [one | {"outages": other.get("outages")} for one, other in zip(link, learner)])
    write_lines(workdir, "learner", learner)
    write_lines(workdir, "evaluator", [{"time_s": 1000 + t, "return_mean": t, "probe_loss": 2.0} for t in (5, 35)])
    write_lines(workdir, "link", [{"time_s": t, "down_bytes": 3000 * (t - 990), "up_bytes": 0} for t in times])
    write_lines(workdir, "gateway", [{"time_s": t, "spool_dropped": 7 * (t - 990)} for t in times])
    for i in range(2):
        write_lines(workdir, f"actor_{i}", [{"time_s": t, "env_steps": 300 * (t - 990)} for t in times])


@pytest.mark.parametrize("replay, link_role", [("buffer", "learner"), ("learner", "forwarder")])
def test_a_run_is_measured_from_its_first_update_and_over_its_last_quarter(tmp_path, replay, link_role):
    a_run(tmp_path, link_role)
    found = comparison.measure(tmp_path, replay, 2, from_s=1000.0, seconds=40.0, rate=6000.0)
    assert found["all"]["loss"] == pytest.approx((30 * 4 + 10 * 1) / 40)
    assert found["last"]["loss"] == 1.0 and found["last"]["versions_behind"] == 4.5
    assert found["all"]["arrival_priority"] == pytest.approx((20 * 200 * 6 + 20 * 100 * 3) / (20 * 300))
    assert found["last"]["arrival_priority"] == 3.0 and found["last"]["arrival_priority_first"] == 9.0
    assert (found["all"]["return"], found["last"]["return"]) == (20.0, 35.0)
    assert found["last"]["env_steps_per_s"] == pytest.approx(600.0)
    assert found["all"]["experiences_per_s"] == pytest.approx(100.0)
    assert found["all"]["bytes_per_experience"] == pytest.approx(30.0)
    assert found["all"]["link_use"] == pytest.approx(0.5)
    assert found["all"]["dropped_per_s"] == pytest.approx(7.0)
    assert found["totals"]["experiences"] == 4000 and found["totals"]["down_bytes"] == 120_000
    assert found["totals"]["outages"] == 2
    curves = found["curves"]
    assert all(len(values) == BINS for values in curves.values())
    assert curves["down_bytes"][1] == pytest.approx(4500.0) and curves["time_s"][1] == pytest.approx(1.5)
    assert [r for r in curves["return"] if r is not None] == [5.0, 35.0]
    json.dumps(found, allow_nan=False)


def test_what_a_run_has_not_written_is_missing_and_not_nought(tmp_path):
    found = comparison.measure(tmp_path, "buffer", 1, from_s=1000.0, seconds=40.0, rate=0.0)
    assert found["last"]["loss"] is None and found["last"]["link_use"] is None
    json.dumps(found, allow_nan=False)


# ---- resuming


def a_trial(folder, **changes):
    fields = dict(folder=folder / "existing" / "seed1", side="existing", seed=1, seconds=30.0, link="rtt_ms=1",
                  link_rate_bytes_per_s=0.0, num_actors=1, words=("--config=configs/smoke.py",))  # fmt: skip
    return Trial(**(fields | changes))


def keep(trial, figures):
    trial.folder.mkdir(parents=True)
    (trial.folder / "summary.json").write_text(json.dumps({"figures": figures, "plan": trial.plan()}))


def test_a_run_that_has_ended_is_not_made_again(tmp_path):
    trial = a_trial(tmp_path)
    keep(trial, {"all": 1})
    assert trials.finished(trial) == {"all": 1}
    assert trials.make([trial], signals=None)  # starts nothing, so it needs no signals


@pytest.mark.parametrize("text", [None, "", "{", "{}", '{"outcome": "interrupted"}', '{"plan": {}}', "[]"])
def test_a_run_that_was_interrupted_is_to_be_made(tmp_path, text):
    trial = a_trial(tmp_path)
    trial.folder.mkdir(parents=True)
    if text is not None:
        (trial.folder / "summary.json").write_text(text)
    assert trials.finished(trial) is None


@pytest.mark.parametrize(
    "change", [{"seconds": 31.0}, {"link": "rtt_ms=2"}, {"words": ("--config=configs/cartpole.py",)}]
)
def test_a_folder_of_other_settings_is_refused_by_their_names(tmp_path, change):
    keep(a_trial(tmp_path), {})
    with pytest.raises(ConfigError, match=rf"other settings \({next(iter(change))}\): give another --workdir"):
        trials.finished(a_trial(tmp_path, **change))


# ---- settings


def test_setting_a_carries_a_quarter_of_production_and_the_draws_fit_the_dearer_side(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare", "--config=configs/cartpole.py"])
    plan = conditions.Plan(config_lib.default(), tmp_path, 300.0, 1600.0, 0.0)
    measured = conditions.Calibration(production_per_s=1600.0, existing_bytes=30.0, proposed_bytes=40.0)
    made = plan.condition("a", "rtt_ms=0.1", "bytes", measured)
    assert made.link_rate_bytes_per_s == 400 * 30
    assert made.link == "rtt_ms=0.1,rate_mbit=0.096,up_mbit=10"
    assert made.updates_per_s == pytest.approx(0.8 * 400 * 30 / 40 / 64, rel=0.01)
    both = plan.condition("a", "rtt_ms=0.1", "experiences", measured)
    assert both.experiences_per_s == 400 and both.link == "rtt_ms=0.1"
    assert both.updates_per_s == 400 / 64  # as many are drawn as are forwarded
    # Where the link carries more than is produced, production is what there is to draw.
    wide = plan.condition("b", "rtt_ms=50,rate_mbit=20", "bytes", measured)
    assert wide.updates_per_s == pytest.approx(0.8 * 1600 / 64, rel=0.01)
    trial = plan.trial(made, "existing", 3, "", None)
    assert trial.folder == tmp_path / "a-bytes" / "existing" / "seed3"
    argv = trial.argv()
    assert "--replay=learner" in argv and "--config.seed=3" in argv
    assert trial.words == plan.trial(made, "proposed", 4, "", None).words  # all that differs is the side
    swept = plan.trial(made, "proposed", 3, "replay.priority_exponent", "0.4")
    assert "--config.replay.priority_exponent=0.4" in swept.argv() and "0.4" in swept.folder.parts[-3]


def test_reuse_leaves_what_crosses_alone_and_multiplies_the_updates_of_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare", "--config=configs/lunarlander.py"])
    measured = conditions.Calibration(production_per_s=1600.0, existing_bytes=30.0, proposed_bytes=40.0)
    plain, reusing = config_lib.default(), config_lib.default()
    plain.learner.minibatches_per_pull = reusing.learner.minibatches_per_pull = 8
    reusing.learner.reuse = 3.0
    made = [
        conditions.Plan(config, tmp_path, 300.0, 16_000.0, 0.0).condition("b", "rtt_ms=50", "bytes", measured)
        for config in (plain, reusing)
    ]
    assert made[1].updates_per_s == 4 * made[0].updates_per_s and made[1].link == made[0].link
    assert "times 4, for config.learner.reuse" in made[1].derivation
    pulls = [
        conditions.Plan(config, tmp_path, 300.0, 16_000.0, 0.0).words(updates_per_s, 0.0)
        for config, updates_per_s in ((plain, 20.0), (reusing, 80.0), (reusing, 20.0))
    ]
    # As many pulls a second cross: fewer, larger ones would age at the learner.
    assert ["--config.learner.minibatches_per_pull=4" in words for words in pulls] == [True, True, False]
    given = conditions.Plan(reusing, tmp_path, 300.0, 16_000.0, 7.0)
    assert given.condition("b", "rtt_ms=50", "bytes", measured).updates_per_s == 7.0


def test_the_outage_is_a_minute_or_a_quarter_of_a_short_run():
    assert conditions.settings(["c"], None, 600.0)["c"] == "rtt_ms=150,rate_mbit=5,outage_s=60"
    assert conditions.settings(["c"], None, 40.0)["c"].endswith("outage_s=10")
    assert conditions.settings(None, None, 40.0) == {"a": "rtt_ms=0.1"}
    assert conditions.settings(None, "rtt_ms=5", 40.0) == {"link": "rtt_ms=5"}
    with pytest.raises(ConfigError, match="no setting 'd'"):
        conditions.settings(["d"], None, 40.0)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("replay.priority_exponent", "give a field and its values"),
        ("replay.alpha=0.4", "can't be '0.4'"),
        ("replay.capacity=many", "can't be 'many'"),
        ("replay.priority_exponent=0.4,2", "priority_exponent is 2.0, and must be from 0 to 1"),
    ],
)
def test_a_sweep_that_can_not_be_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        conditions.parse_sweep(text, config_lib.default())


def test_a_sweep_is_a_field_and_its_values():
    assert conditions.parse_sweep("replay.spool=10,20", config_lib.default()) == ("replay.spool", ["10", "20"])
    assert conditions.parse_sweep(None, config_lib.default()) == ("", [])


# ---- the report


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.sources, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources.extend(value for name, value in attributes if name in ("src", "href"))

    def handle_data(self, data):
        self.text += data


def test_the_report_needs_no_other_file_and_states_claims_figures_and_differences(tmp_path):
    measured = {
        ("a", "bytes"): pairs_of([{"loss": 0.5}, {"loss": 0.7}]),
        ("c", "bytes"): pairs_of([{}]),
    }
    swept = {("a", "bytes"): {"replay.priority_exponent=0.4": pairs_of([{}, {}])}}
    path = report.write(tmp_path, "a <title>", measured, swept, {"command": "x & y", "calibration": {"bytes": 3}})
    page = Page(path.read_text())
    assert len(page.sources) == 2 and all(s.startswith("data:image/png;base64,") for s in page.sources)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "a <title>" in page.text and "x & y" in page.text
    for title in report.FIGURES.values():
        assert page.text.count(title) >= 2
    assert "Training loss at most 26% of the existing approach's, last quarter, setting a" in page.text
    assert "does not hold: 0.6 (95%: " in page.text
    assert "replay.priority_exponent=0.4" in page.text
    for difference in report.DIFFERENCES:
        assert difference in page.text
    for setting in "ac":
        assert (tmp_path / "plots" / f"{setting}-bytes.png").read_bytes().startswith(b"\x89PNG")


def test_statistics_are_plain_json_with_both_sides_and_their_ratio():
    found = report.statistics(pairs_of([{"loss": 0.5}, {"loss": 0.7}]))
    json.dumps(found, allow_nan=False)
    assert found["seeds"] == 2 and found["last"]["loss"]["ratio"]["mean"] == pytest.approx(0.6)
    assert found["last"]["loss"]["existing"] == {"mean": 1.0, "half": 0.0}
    assert report.statistics(pairs_of([{}]))["all"]["return"]["proposed"] == {"mean": 1.0, "half": None}


# ---- the command


def compare(*words):
    return subprocess.run(
        [sys.executable, "-m", "launchers.compare", "--config=configs/smoke.py", *words],
        cwd=REPO, capture_output=True, text=True, timeout=280, env={**os.environ},
    )  # fmt: skip


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--settings=d"], "--settings: there is no setting 'd'"),
        (["--budgets=time"], "--budgets: 'time' is none"),
        (["--link=rtt=5"], "--link=rtt=5"),
        (["--sweep=replay.alpha=1"], "--sweep=replay.alpha=1"),
        (["--seconds=1"], "--seconds"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_flag(words, reason):
    ended = compare(*words)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1 and reason in ended.stderr


def test_both_sides_are_run_measured_and_reported_and_a_rerun_makes_nothing_again(tmp_path):
    pytest.importorskip("reverb")
    pytest.importorskip("gymnasium")
    words = (f"--workdir={tmp_path}", "--link=rtt_ms=5,rate_mbit=5", "--seeds=1", "--seconds=10", "--calibration_s=5",
             "--parallel=2", "--budgets=bytes", "--steps_per_s=400", "--config.evaluation.period_s=0.5",
             "--config.actor.num_actors=1", "--config.learner.reuse=1")  # fmt: skip
    ended = compare(*words)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    whole = summary["figures"]["link-bytes"]["all"]  # its last quarter may be shorter than a slow machine's next line
    for name in ("loss", "loss_unweighted", "arrival_priority", "arrival_priority_first", "return", "idle_share"):
        for side in ("existing", "proposed"):
            assert whole[name][side]["mean"] is not None, (name, side)
    for side in ("existing", "proposed"):
        one = json.loads((tmp_path / "link-bytes" / side / "seed1" / "summary.json").read_text())
        assert one["replay"] == {"existing": "learner", "proposed": "buffer"}[side]
        assert one["figures"]["totals"]["experiences"] > 0
        reused = read_jsonl(tmp_path / "link-bytes" / side / "seed1", "learner")[-1]["reused_updates"]
        assert reused > 0 if side == "proposed" else reused == 0
    assert summary["facts"]["setting link, equal bytes/s:"]["updates_per_s"] > 0
    assert "data:image/png;base64," in (tmp_path / "report.html").read_text()
    assert "Return at equal bytes never worse, setting link" in ended.stdout

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "link-bytes").glob("*/seed1/summary.json")}
    again = compare(*words)
    assert again.returncode == 0, again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert len(before) == 2
