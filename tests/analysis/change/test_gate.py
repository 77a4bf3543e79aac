"""Baseline and gate: pass, regression or inconclusive, on runs made by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from ampacity.analysis.change.baseline import make_baseline
from ampacity.analysis.change.baseline_file import read_baseline, write_baseline
from ampacity.analysis.change.checks import (
    WATCHED,
    CheckedChange,
    decide,
    parse_tolerances,
    slos_of,
)
from ampacity.analysis.change.comparable import lengths_apart
from ampacity.analysis.change.engine import (
    Estimate,
    between_runs,
    compare_shares,
    holm,
    spent_at_looks,
    times_longer,
)
from ampacity.analysis.change.gate import _sentence, judge_gate, twice_as_slow
from ampacity.analysis.change.judged import CompareError, Judged, _per_planned, prepare
from ampacity.analysis.change.results import Check, GateResult
from ampacity.analysis.change.samples import Blocks
from ampacity.analysis.metrics.hdr import encode_seconds
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.loadgen.rundir.files import Run
from ampacity.reports.pages.gate import gate_markdown, gate_screen, junit_xml, lines
from benchmarks.servers.steps import STEP_SERVERS, step_run
from benchmarks.studies.gate_rates import later_first_token, study
from tests.support.compared_runs import RATE, stage, ttfts
from tests.support.synthetic import Stage, make_run, request

TIGHT = parse_tolerances(["p50=3%", "p90=3%"])  # less than the noise of so few requests allows


def run(path: Path, stages: Stage | list[Stage], slos: Sequence[str] = (), **meta: Any) -> Judged:
    listed = stages if isinstance(stages, list) else [stages]
    return prepare(make_run(path, listed, slos, **({"run_id": path.name} | meta)))


def reread(base: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write_baseline(base))
    return found


def checks(found: GateResult) -> dict[str, Check]:
    return {c.name: c for c in found.checks}


# --- the pieces -------------------------------------------------------------------------------


def test_holm_rejects_step_by_step() -> None:
    """Of four at 5 %: 0.01 ≤ 0.05/4, 0.016 ≤ 0.05/3, 0.03 > 0.05/2 stops, though 0.04 ≤ 0.05."""
    assert holm([0.04, 0.01, 0.03, 0.016], 0.05) == [False, True, False, True]


def test_holm_holds_the_family_wise_error_of_correlated_tests() -> None:
    from scipy.special import ndtr

    rng = np.random.default_rng(7)
    z = 0.7 * rng.standard_normal((4000, 1)) + np.sqrt(1 - 0.49) * rng.standard_normal((4000, 14))
    false = np.mean([any(holm(p.tolist(), 0.05)) for p in 1 - ndtr(z)])
    assert 0.005 < false < 0.06


def test_share_test_is_exact_under_no_change() -> None:
    """Independent samples, 10 % over in both: p-values are uniform; the 5 % test errs in about 5 %
    of cases.
    """
    rng = np.random.default_rng(3)
    size = np.full(20, 100.0)

    def draw() -> Blocks:
        return Blocks(rng.binomial(100, 0.1, 20).astype(float), size, 2000.0)

    p = []
    for _ in range(1500):
        base, candidate = draw(), draw()
        p.append(
            compare_shares([base], [candidate], base.share, paired=False, noise=0.0).p_regression
        )
    assert 0.025 < np.mean(np.array(p) < 0.05) < 0.06
    assert 0.4 < np.mean(p) < 0.6


def test_pairing_takes_away_what_the_blocks_have_in_common() -> None:
    """Blocks differ by ±10 in both runs alike; only the shift of 1 in 100 is left, without
    variance.
    """
    over = np.array([10.0, 30.0] * 10)
    size = np.full(20, 100.0)
    e = compare_shares(
        [Blocks(over, size, 2000)], [Blocks(over + 1, size, 2000)], 0.2, paired=True, noise=0.0
    )
    assert e.worse == pytest.approx(0.01)
    assert e.within == pytest.approx(0.0, abs=1e-18)
    apart = compare_shares(
        [Blocks(over, size, 2000)], [Blocks(over + 1, size, 2000)], 0.2, paired=False, noise=0.0
    )
    # per side var((10, 30) x 10, ddof 1)/100²/20 = 2000/19/10⁴/20
    assert apart.within == pytest.approx(2 * 2000 / 19 / 1e4 / 20, rel=1e-6)


def test_noise_between_runs_is_moderated() -> None:
    """var(1, 2, 3) = 1, less 0.25 inside a run, with two degrees of freedom, beside 0.5² with four:
    (4 x 0.25 + 2 x 0.75)/6.
    """
    variance, df = between_runs(np.array([1.0, 2.0, 3.0]), 0.25, 0.5)
    assert variance == pytest.approx(2.5 / 6)
    assert df == 6
    assert between_runs(np.array([1.0]), 0.25, 0.5) == (0.25, float("inf"))


def test_further_requests_are_those_that_decide() -> None:
    """At t = 0.82 standard errors; z(0.95) = 1.645 needs (1.645/0.8225)² = 4 times the length."""
    e = Estimate(-0.8224, 1.0, 0.0, float("inf"))
    assert times_longer(e, 0.05, 0.01) == pytest.approx(4.0, rel=1e-3)
    # noise between runs: no length helps
    assert times_longer(replace(e, between=1.0), 0.05, 0.01) is None


def test_histogram_equals_that_of_another_implementation_of_the_format() -> None:
    """Theirs has 1, 5 (301 times), 1000, 2047, 2048, 2049, 5·10⁶ and 4·10⁹ µs."""
    theirs = "HISTFAAAADJ4nJNpmSzMwMAgwgABzFCaEUT8BwL7D1ABJtZbLIf5mVYLMLG0bmZkuj2LkQkAHEgLuA=="
    values = np.array([1, 5, 1000, 2047, 2048, 2049, 5_000_000, 4_000_000_000]) * 1e-6
    ours = encode_seconds(values, np.array([1.0, 301, 1, 1, 1, 1, 1, 1]))
    assert ours.startswith("HISTF")
    ours_read, theirs_read = (HdrHistogram.decode(text) for text in (ours, theirs))
    assert ours_read.equals(theirs_read)
    assert ours_read.get_total_count() == 308


# --- verdicts ---------------------------------------------------------------------------------


def test_same_figures_pass_and_ten_percent_more_is_a_regression(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    same = judge_gate(base, [run(tmp_path / "same", stage(ttfts(1, 1500)))], {})
    assert same.verdict == "pass", same.sentence
    slower = judge_gate(base, [run(tmp_path / "slow", stage(ttfts(1, 1500, 1.1)))], {})
    assert slower.verdict == "regression"
    found = checks(slower)
    # at equal occupancy, of 1,500 requests
    assert found["ttft_p50"].change == pytest.approx(0.1, abs=5e-3)
    assert found["ttft_p50"].verdict == "regression"
    assert found["itl_p50"].verdict == found["tpot_p90"].verdict == "pass"


def test_a_change_inside_its_tolerance_passes_and_one_beyond_does_not(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    slower = run(tmp_path / "slow", stage(ttfts(1, 1500, 1.1)))
    wide = parse_tolerances(["ttft=20%", "e2e=20%"])
    assert judge_gate(base, [slower], wide).verdict == "pass"
    assert judge_gate(base, [slower], parse_tolerances(["ttft=2%"])).verdict == "regression"


def test_tokens_per_second_are_those_measured_and_the_test_is_by_the_plan(tmp_path: Path) -> None:
    """6 tokens planned and received where the baseline had 5: 20 % more tokens/s, none more or less
    per token planned.
    """
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    longer = stage(ttfts(1, 1500))
    longer.records = [request(i, i / RATE, ttft_s=0.1, gaps_s=[0.01] * 5) for i in range(1500)]
    other = run(tmp_path / "other", longer, seed=2)
    result = judge_gate(base, [other], {})
    found = checks(result)["output_tokens_per_s"]
    measured = other.summary.stages[0].output_tokens_per_s
    assert (found.baseline, found.candidate) == (pytest.approx(100, rel=5e-3), measured)
    assert found.candidate == pytest.approx(120, rel=5e-3)
    assert found.change == found.candidate / found.baseline - 1
    assert found.shift == pytest.approx(0.0, abs=1e-9)
    assert found.verdict == "pass"
    assert "at equal load and lengths +0.0%, which is what is tested" in found.reason
    told = next(entry for entry in gate_screen(result, None).answers if entry.label == "TESTED")
    assert "output_tokens_per_s at 20/s +0.0 %" in told.text
    assert "| change | tested, 95 % | allowed | verdict |" in gate_markdown(result)


def test_few_requests_are_inconclusive_and_say_how_many_are_missing(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 300)))]))
    found = judge_gate(base, [run(tmp_path / "other", stage(ttfts(2, 300)), seed=2)], TIGHT)
    assert found.verdict == "inconclusive"
    assert found.same_schedule is False
    assert any("--seed" in note for note in found.notes)
    assert any(
        "at equal load and lengths" in note and "ampacity compare" in note for note in found.notes
    )
    assert any(c.more_requests for c in found.checks if c.verdict == "inconclusive")


def test_a_shape_turned_bimodal_is_found_although_the_median_stays(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    values = ttfts(1, 1500)
    values[values > np.quantile(values, 0.8)] *= 3  # the median and all below it are untouched
    found = judge_gate(base, [run(tmp_path / "two", stage(values))], {})
    assert found.verdict == "regression"
    assert checks(found)["ttft_p50"].verdict == "pass"
    assert checks(found)["ttft_p90"].verdict == "regression"


def test_equal_values_everywhere_are_no_change(tmp_path: Path) -> None:
    """A plateau: every TTFT and every gap is the same; 4 % more of one of them is found."""
    base = reread(make_baseline([run(tmp_path / "base", stage(np.full(600, 0.1)))]))
    assert (
        judge_gate(base, [run(tmp_path / "same", stage(np.full(600, 0.1)))], {}).verdict == "pass"
    )
    found = judge_gate(base, [run(tmp_path / "gap", stage(np.full(600, 0.1), gap_s=0.0104))], {})
    assert checks(found)["itl_p50"].verdict == checks(found)["tpot_p50"].verdict == "regression"
    assert checks(found)["ttft_p50"].verdict == "pass"


def test_noise_is_learned_from_several_baseline_runs(tmp_path: Path) -> None:
    """Runs of one schedule that differ by ±4 %: a candidate 6 % slower is no regression; beside one
    run it is.
    """
    scales = (0.96, 1.0, 1.04, 0.98, 1.03, 0.97)
    several = [run(tmp_path / f"b{i}", stage(ttfts(1, 1500, s))) for i, s in enumerate(scales)]
    slower = run(tmp_path / "slow", stage(ttfts(1, 1500, 1.06)))
    assert judge_gate(reread(make_baseline(several[1:2])), [slower], TIGHT).verdict == "regression"
    found = judge_gate(reread(make_baseline(several)), [slower], TIGHT)
    assert found.verdict == "inconclusive"
    assert "more runs" in checks(found)["ttft_p50"].reason


def test_false_alarms_over_all_metrics_together(tmp_path: Path) -> None:
    """Pairs that share nothing but the workload: of 16 at 5 % each, four would come once in 120."""
    verdicts = []
    for seed in range(16):
        pair = [
            run(tmp_path / f"{seed}-{arm}", stage(ttfts(10 * seed + arm, 300)), seed=2 * seed + arm)
            for arm in (0, 1)
        ]
        verdicts.append(judge_gate(reread(make_baseline(pair[:1])), pair[1:], {}).verdict)
    assert verdicts.count("regression") <= 3


# --- never a pass -----------------------------------------------------------------------------


def test_half_of_the_requests_failed_is_a_regression(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1)))]))
    found = judge_gate(base, [run(tmp_path / "bad", stage(ttfts(1), failed=range(500)))], {})
    assert found.verdict == "regression"
    assert checks(found)["error_rate"].verdict == "regression"


def test_more_errors_than_one_percent_never_pass(tmp_path: Path) -> None:
    """Not even when they all lie in the warm-up, which is cut."""
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1)))]))
    found = judge_gate(
        base, [run(tmp_path / "bad", stage(ttfts(1), failed=range(15)))], {"error_rate": 0.5}
    )
    assert found.verdict != "pass"
    assert "nothing passes" in checks(found)["errors"].reason


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("killed", "killed before it could finish"),
        ("interrupted", "is interrupted"),
        ("aborted", "is aborted"),
        ("limited", "limited by its client"),
        ("missing", "truncated: stage 0 has 1000 of 1200"),
        ("empty", "is empty"),
        ("twice", "row 5: request_id is 4, with attempt 0 of stage 0 for the second time"),
    ],
)
def test_a_run_that_is_no_evidence_cannot_be_compared(tmp_path: Path, how: str, says: str) -> None:
    made, meta = stage(ttfts(1)), {}
    if how in ("interrupted", "aborted"):
        meta = {"status": how, "status_reason": None}
    if how == "limited":
        made.client_limited = True
    if how == "missing":
        made.scheduled_requests = 1200
    if how == "empty":
        made.records = []
    if how == "twice":
        made.records[5].request_id = 4
    found = make_run(tmp_path / how, [made], killed=how == "killed", **meta)
    with pytest.raises((CompareError, RecordsError), match=says) as error:
        prepare(found)
    assert "\n" not in str(error.value)


def test_other_experiments_are_refused_and_what_differs_is_listed(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1)))]))
    workload = {"name": "synthetic", "arrivals": "constant", "prompts": "unique"}
    with pytest.raises(CompareError, match=r"--arrivals is constant, in the baseline poisson$"):
        judge_gate(base, [run(tmp_path / "a", stage(ttfts(1)), workload=workload)], {})
    faster = stage(ttfts(1))
    faster.offered_rps = 30.0
    with pytest.raises(CompareError, match="lacks the load level 20/s"):
        judge_gate(base, [run(tmp_path / "b", faster)], {})
    longer = stage(ttfts(1))
    for record in longer.records:
        record.output_tokens, record.chunk_at_us = 6, record.chunk_at_us[:4]
    with pytest.raises(
        CompareError,
        match=r"1.2 times the output tokens .* \(6 a request on average, the baseline 5\)",
    ):
        judge_gate(base, [run(tmp_path / "c", longer)], {})
    templated = stage(ttfts(1))
    for record in templated.records:
        record.input_tokens = round(1.2 * (record.input_tokens or 0))
    with pytest.raises(
        CompareError, match=r"1.2 times the input tokens .* template or vocabulary"
    ) as refused:
        judge_gate(base, [run(tmp_path / "d", templated)], {})
    assert "ignore_eos" not in str(refused.value)  # which has nothing to do with inputs


def lengths(
    rng: np.random.Generator, came_of_planned: float, *, plan: bool
) -> dict[str, float | None]:
    """Of 500 answers, log-normal with sigma 0.9, which end by themselves after a share of what was
    planned (s.d. 0.2).
    """
    planned = np.round(30 * rng.lognormal(0, 0.9, 500)) + 1
    came = planned * np.clip(rng.normal(came_of_planned, 0.2, 500), 0.05, None)
    ratio, se = _per_planned(came, planned if plan else np.full(500, np.nan))
    return {
        "output_tokens": float(came.mean()),
        "output_tokens_per_planned": ratio,
        "output_tokens_relative_se": se,
    }


@pytest.mark.parametrize("plan", [True, False])
def test_equal_workloads_are_not_refused_for_the_draw_of_their_lengths(plan: bool) -> None:
    """Means of 500 such answers differ by more than 10 % in a tenth of the pairs; two in a thousand
    may be refused.
    """
    rng = np.random.default_rng(11)
    pairs = [[lengths(rng, 0.7, plan=plan) for _ in range(2)] for _ in range(600)]
    means = np.array([[x["output_tokens"] for x in pair] for pair in pairs], dtype=np.float64)
    assert np.mean(np.abs(np.log(means[:, 1] / means[:, 0])) > np.log(1.1)) > 0.05
    assert sum(lengths_apart(*pair, "output_tokens") is not None for pair in pairs) <= 4


def test_answers_that_became_shorter_are_refused_by_the_plan() -> None:
    """85 % of what the baseline's had for the same plan: found by the plan though only by its means
    it is not.
    """
    rng = np.random.default_rng(12)
    found = [
        lengths_apart(lengths(rng, 0.7, plan=True), lengths(rng, 0.595, plan=True), "output_tokens")
        for _ in range(100)
    ]
    told = [f for f in found if f is not None]
    assert len(told) >= 97  # log(0.85) is 0.067 beyond log(1/1.1), 2.5 standard errors of 0.027
    assert np.mean(told) == pytest.approx(0.85, abs=0.01)
    # 5 % is not relevant, however sure
    assert (
        lengths_apart(lengths(rng, 0.7, plan=True), lengths(rng, 0.665, plan=True), "output_tokens")
        is None
    )


def test_a_block_delta_method_by_hand() -> None:
    """20 answers, planned 10 each; ten came with 10, ten with 20: ratio 1.5, residuals +-1/3, s.e.
    1/3 sqrt(20/19)/sqrt(20).
    """
    ratio, se = _per_planned(np.array([10.0, 20.0] * 10), np.full(20, 10.0))
    assert ratio == pytest.approx(1.5)
    assert se == pytest.approx(1 / 3 / np.sqrt(19))


def test_a_predicted_engine_is_under_test_and_no_other_experiment(tmp_path: Path) -> None:
    """Presets that differ by a tenth: the gate must go red, also by a baseline that still holds a
    count of the day.
    """

    def predicted(name: str, model: str, scale: float, cut: int) -> Judged:
        workload = {
            "name": "synthetic",
            "arrivals": "poisson",
            "prompts": "unique",
            "clipped_to_context": cut,
        }
        return run(
            tmp_path / name,
            stage(ttfts(1, scale=scale)),
            predicted=True,
            endpoint={"api": "chat", "model": model},
            workload=workload,
        )

    base = reread(make_baseline([predicted("base", "linear:0.020,0", 1.0, 10)]))
    assert "workload.clipped_to_context" not in base["identity"]
    base["identity"]["workload.clipped_to_context"] = 10
    slower = predicted("slower", "linear:0.022,0", 1.1, 50)
    assert judge_gate(base, [slower], {}).verdict == "regression"
    assert judge_gate(base, [predicted("same", "linear:0.020,0", 1.0, 50)], {}).verdict == "pass"
    live = run(tmp_path / "live", stage(ttfts(1)), endpoint={"api": "chat", "model": "M"})
    with pytest.raises(CompareError, match="predicted is no, in the baseline yes"):
        judge_gate(base, [live], {})


def test_equal_records_are_one_run_whatever_their_names(tmp_path: Path) -> None:
    """A copy, a prediction made again, and one that shares a load level show no noise between runs;
    nor are they two samples.
    """
    again = {"predicted": True, "started_utc": "2026-01-02T00:00:00Z"}
    one, copy = (run(tmp_path / n, stage(ttfts(1)), **again) for n in ("one", "copy"))
    with pytest.raises(
        CompareError, match=r"at 20/s: they are one run .* give each its own --seed"
    ) as error:
        make_baseline([one, copy])
    assert "\n" not in str(error.value)
    higher = stage(ttfts(2), start_s=100.0)
    higher.records = [request(1000 + i, 100.0 + i / 40, stage=1, ttft_s=0.1) for i in range(1000)]
    higher.offered_rps, higher.duration_s = 40.0, 25.0
    with pytest.raises(CompareError, match="at 20/s"):
        make_baseline([run(tmp_path / "two", [stage(ttfts(1)), higher], **again), one])
    other = run(tmp_path / "other", stage(ttfts(2)), seed=2, **again)
    base = reread(make_baseline([one, other]))
    with pytest.raises(CompareError, match=r"runs 1 and 3 .* they are one run"):
        judge_gate(base, [copy, other, one], {}, look=3, looks=3)
    with pytest.raises(CompareError, match="its own run directory"):
        make_baseline([run(tmp_path / "live", stage(ttfts(1)))] * 2)


def test_the_sentence_promises_no_more_than_its_checks() -> None:
    """Of three open checks two become decided with 120 and 377 more requests; the third by no
    length.
    """
    three = [
        Check(f"{name}_p50", "change", "5/s", more_requests=n)
        for name, n in (("ttft", 120), ("itl", 377), ("e2e", None))
    ]
    decided = Check("tpot_p50", "change", "5/s", "pass")
    assert _sentence("inconclusive", [*three, decided]).endswith(
        "e2e_p50 at 5/s. About 377 more requests, in the baseline as well, would decide 2 of these 3; each of the others gives its own reason."
    )
    assert _sentence("inconclusive", [*three[:2], decided]).endswith(
        ". About 377 more requests, in the baseline as well, would decide."
    )
    assert _sentence("inconclusive", [three[2]]) == "Inconclusive: e2e_p50 at 5/s."


def test_baselines_that_cannot_be_used(tmp_path: Path) -> None:
    text = write_baseline(make_baseline([run(tmp_path / "base", stage(ttfts(1)))]))
    for changed, says in (
        (text[:5000], "cut off"),
        (text.replace('"seed": 1', '"seed": 2'), "changed by hand"),
        ("{}", "is no baseline"),
        (text.replace('"schema_version": 4', '"schema_version": 5'), "schema_version 5"),
        (text.replace('"schema_version": 4', '"schema_version": 3'), "schema_version 3"),
    ):
        (tmp_path / "base.json").write_text(changed)
        with pytest.raises(CompareError, match=says) as error:
            read_baseline(tmp_path / "base.json")
        assert "\n" not in str(error.value)
    with pytest.raises(CompareError, match="does not exist"):
        read_baseline(tmp_path / "none.json")


def test_baseline_file_is_small_and_made_the_same_twice(tmp_path: Path) -> None:
    made = run(tmp_path / "base", stage(ttfts(1)))
    text = write_baseline(make_baseline([made]))
    assert text == write_baseline(make_baseline([made]))
    assert len(text) < 30_000
    (tmp_path / "base.json").write_text(text)
    assert read_baseline(tmp_path / "base.json")["levels"]["20/s"]["offered_rps"] == 20.0


# --- SLOs, self-test, tolerances --------------------------------------------------------------


def test_an_absolute_slo_is_judged_beside_the_changes(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)), ["ttft_p90=1s"])]))
    same = make_run(tmp_path / "same", [stage(ttfts(1, 1500))])
    assert judge_gate(base, [prepare(same, slos_of(base, []))], {}).verdict == "pass"
    found = judge_gate(base, [prepare(same, slos_of(base, ["ttft_p90=120ms"]))], {})
    assert found.verdict == "regression"
    assert checks(found)["ttft_p90=120ms"].verdict == "violated"
    assert "ttft_p90=1s" not in checks(found)  # the limit that was given wins


def test_every_metric_that_no_tolerance_can_be_held_to_is_skipped_with_its_reason_in_each_output(
    tmp_path: Path,
) -> None:
    """One gust of 60 slow requests: 6 % of a thousand, all in 3 of 20 blocks, so no p99 can be told
    from noise.
    """
    values = ttfts(1)
    values[500:560] *= 8
    base = reread(make_baseline([run(tmp_path / "base", stage(values), ["ttft_p95=2s"])]))
    assert base["levels"]["20/s"]["quantiles"]["ttft_p99"]["tolerance"]["same_schedule"] is None
    same = run(tmp_path / "same", stage(values))
    found = judge_gate(base, [prepare(same.run, slos_of(base, ["e2e_p95=9s"]))], {})
    assert "ttft_p99" not in checks(found)
    reason = found.untracked["ttft_p99 at 20/s"]
    assert reason == "+0.0%; at this load and length an equal run may differ by more than 15%"
    assert any("--tolerance METRIC=10%" in note for note in found.notes)
    assert f"ttft_p99 at 20/s is not tracked: {reason}" in lines(found)
    assert f"- Not tracked: ttft_p99 at 20/s, {reason}" in gate_markdown(found)
    xml = ElementTree.fromstring(junit_xml(found))
    skipped = [
        case.get("name") for case in xml.iter("testcase") if case.find("skipped") is not None
    ]
    assert sorted(skipped) == sorted(name.partition(" at ")[0] for name in found.untracked)
    assert xml.get("skipped") == str(len(skipped))
    tracked = {c.name for c in found.checks} | set(skipped)
    assert tracked >= {
        f"{metric}_{p}" for metric in ("ttft", "itl", "tpot", "e2e") for p in ("p50", "p90", "p99")
    }
    # the 950th of 1000
    assert checks(found)["ttft_p95=2s"].baseline == pytest.approx(sorted(values)[949])
    assert checks(found)["e2e_p95=9s"].baseline is not None  # that nobody asked for then
    slow = run(tmp_path / "slow", stage(np.where(np.arange(1000) % 20, values, 10.0)))
    assert checks(judge_gate(base, [slow], {}))["ttft_p99"].verdict == "regression"


def test_a_limit_on_p95_is_judged_in_a_sweep_where_the_baseline_kept_it(tmp_path: Path) -> None:
    slow = ttfts(2, scale=20.0)
    later = Stage(
        [request(1000 + i, 60 + i / 30, ttft_s=t, gaps_s=[0.01] * 4) for i, t in enumerate(slow)],
        1000 / 30,
        start_s=60.0,
    )
    both = run(tmp_path / "both", [stage(ttfts(1)), later], ["ttft_p95=1s"])
    base = reread(make_baseline([both]))
    found = [c for c in judge_gate(base, [both], {}).checks if c.kind == "slo"]
    assert len(base["levels"]) == 2
    assert [(c.name, c.level, c.verdict) for c in found] == [("ttft_p95=1s", "20/s", "pass")]
    judged = judge_gate(base, [both], {})
    why = judged.untracked["ttft_p95=1s at 30/s"]
    assert (
        why
        == f"not judged at this load, the baseline did not meet it there ({np.sort(slow)[949]:.3g} s)"
    )
    assert f"ttft_p95=1s at 30/s is not tracked: {why}" in lines(judged)
    # kept nowhere: broken at the lowest load; at a percentile that the baseline does not hold:
    # judged there too, and said
    given = prepare(both.run, slos_of(base, ["ttft_p95=10ms", "ttft_p97=1s"]))
    found = [c for c in judge_gate(base, [given], {}).checks if c.kind == "slo"]
    assert [(c.name, c.level, c.verdict) for c in found] == [
        ("ttft_p95=10ms", "20/s", "violated"),
        ("ttft_p97=1s", "20/s", "pass"),
    ]
    assert found[1].baseline is None
    text = "\n".join(lines(judge_gate(base, [given], {})))
    assert "ttft_p97=1s at 20/s: the baseline does not hold ttft_p97" in text


def test_twice_as_slow_is_found(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", [stage(ttfts(1))])
    base = reread(make_baseline([prepare(made)]))
    found = checks(judge_gate(base, [prepare(twice_as_slow(made))], {}))
    for metric in ("ttft_p50", "itl_p50", "tpot_p50", "e2e_p90"):
        assert found[metric].verdict == "regression"
        assert found[metric].change == pytest.approx(1.0, abs=0.03)


def test_closed_loop_throughput_is_tracked(tmp_path: Path) -> None:
    """The same answers at half the pace of the loop: half the tokens per second."""

    def loop(pace_s: float) -> Stage:
        records = [request(i, i * pace_s, ttft_s=0.1, gaps_s=[0.01] * 4) for i in range(400)]
        return Stage(records, 400 * pace_s, concurrency=4)

    base = reread(make_baseline([run(tmp_path / "base", loop(0.05))]))
    assert list(base["levels"]) == ["4 in flight"]
    found = checks(judge_gate(base, [run(tmp_path / "half", loop(0.1))], {}))["output_tokens_per_s"]
    assert found.verdict == "regression"
    assert found.change == pytest.approx(-0.5, abs=2e-3)  # answers at the edges are cut


def test_tolerances_as_people_write_them() -> None:
    assert parse_tolerances(["ttft_p99=10%", "error_rate=0.5%"]) == {
        "ttft_p99": 0.1,
        "error_rate": 0.005,
    }
    assert parse_tolerances(["itl=4%"]) == {"itl_p50": 0.04, "itl_p90": 0.04, "itl_p99": 0.04}
    assert set(parse_tolerances(["p99=20%"])) == {"ttft_p99", "itl_p99", "tpot_p99", "e2e_p99"}
    for wrong in ("ttft_p99", "ttft_p99=10", "latency=3%", "ttft_p99=0%", "=3%", "ttft_p95=3%"):
        with pytest.raises(CompareError, match="--tolerance"):
            parse_tolerances([wrong])


# --- what a breaker found ---------------------------------------------------------------------


def in_step(users: int, rounds: int, pause_s: float) -> Stage:
    """All users begin an answer of 0.5 s and five tokens at the same moment, and wait ``pause_s``
    after it.
    """
    records = [
        request(i, (i // users) * (0.5 + pause_s), ttft_s=0.1, gaps_s=[0.1] * 4)
        for i in range(users * rounds)
    ]
    return Stage(records, rounds * (0.5 + pause_s), concurrency=users)


@pytest.mark.parametrize(("users", "rounds"), [(64, 30), (128, 10), (4, 400)])
def test_users_in_step_have_a_rate_all_the_same(tmp_path: Path, users: int, rounds: int) -> None:
    base = reread(make_baseline([run(tmp_path / "base", in_step(users, rounds, 0.0))]))
    same = checks(judge_gate(base, [run(tmp_path / "same", in_step(users, rounds, 0.0))], {}))
    # the file has six digits
    assert same["output_tokens_per_s"].change == pytest.approx(0.0, abs=1e-5)
    assert same["output_tokens_per_s"].verdict == "pass"
    half = checks(judge_gate(base, [run(tmp_path / "half", in_step(users, rounds, 0.5))], {}))
    # from the first start to the last: 9 rounds of 0.5 s hold 9 answers each, 9 of 1 s as well
    assert half["output_tokens_per_s"].change == pytest.approx(-0.5, abs=0.02)
    assert half["output_tokens_per_s"].verdict == "regression"


def test_an_outage_takes_the_tokens_that_it_took(tmp_path: Path) -> None:
    """110 of 1,000 requests in a row fail: 11 % fewer tokens per planned one, though two blocks
    have none at all.
    """
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1)))]))
    found = judge_gate(base, [run(tmp_path / "out", stage(ttfts(1), failed=range(500, 610)))], {})
    assert found.verdict != "pass"
    n = base["levels"]["20/s"]["requests"][0]
    assert checks(found)["output_tokens_per_s"].change == pytest.approx(-110 / n, abs=1e-3)


@pytest.mark.parametrize("scatter", [0.005, 0.02, 0.1])
def test_a_tail_ten_times_as_slow_is_found_however_steady_the_rest(
    tmp_path: Path, scatter: float
) -> None:
    """2.5 % of 2,000 requests: p50 and p90 do not move, p99 is 1 s where it was 0.1."""
    rng = np.random.default_rng(5)
    base = reread(
        make_baseline([run(tmp_path / "base", stage(0.1 * rng.lognormal(0, scatter, 2000)))])
    )
    slow = 0.1 * rng.lognormal(0, scatter, 2000)
    slow[::40] *= 10
    found = judge_gate(base, [run(tmp_path / "slow", stage(slow))], {})
    assert checks(found)["ttft_p99"].verdict == "regression"


def test_tokens_that_come_two_at_a_time_have_no_median_gap(tmp_path: Path) -> None:
    """Gaps 0, 20, 0, 20 ms: p50 has zeros around it and is left out with the reason, p90 is 20 ms."""

    def pairs() -> Stage:
        records = [
            request(i, i / RATE, ttft_s=float(t), gaps_s=[0.0, 0.02] * 2)
            for i, t in enumerate(ttfts(1))
        ]
        return Stage(records, len(records) / RATE, offered_rps=RATE)

    base = reread(make_baseline([run(tmp_path / "base", pairs())]))
    level = base["levels"]["20/s"]
    assert "came together" in level["untracked"]["itl_p50"]
    assert level["quantiles"]["itl_p90"]["value_s"] == pytest.approx(0.02)
    assert judge_gate(base, [run(tmp_path / "same", pairs())], {}).verdict == "pass"
    steady = reread(make_baseline([run(tmp_path / "steady", stage(ttfts(1)))]))  # 10 ms each
    row = checks(judge_gate(steady, [run(tmp_path / "other", pairs())], {}))["itl_p50"]
    assert (row.candidate, row.change) == (0.0, -1.0)


def test_imported_runs_have_no_start_and_make_a_baseline(tmp_path: Path) -> None:
    made = run(tmp_path / "base", stage(ttfts(1)), started_utc=None)
    assert reread(make_baseline([made]))["runs"][0]["started_utc"] is None
    with pytest.raises(CompareError, match="they are one run"):
        make_baseline([made, made])


def test_a_change_that_the_client_may_have_made_is_no_regression(tmp_path: Path) -> None:
    """Median 100 ms, 10 % slower: 10 ms. The candidate's client was 15 ms later at p99 than the
    baseline's: it may be that.
    """
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    late = stage(ttfts(1, 1500, 1.1))
    audit = late.meta(0)["audit"]
    late.extra = {"audit": audit | {"slip_p99_s": audit["slip_p99_s"] + 0.015}}
    found = judge_gate(base, [run(tmp_path / "late", late)], {})
    assert checks(found)["ttft_p50"].verdict == "inconclusive"
    assert "the client itself was 15 ms later" in checks(found)["ttft_p50"].reason
    slower = stage(ttfts(1, 1500, 1.3))  # 30 ms: more than the client was late
    slower.extra = late.extra
    assert (
        checks(judge_gate(base, [run(tmp_path / "slow", slower)], {}))["ttft_p50"].verdict
        == "regression"
    )


def level_of(content: dict[str, Any]) -> Any:
    return content["levels"]["20/s"]


def p99_of(content: dict[str, Any]) -> Any:
    return level_of(content)["quantiles"]["ttft_p99"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda c: p99_of(c).update(runs=[]), "ttft_p99 of 20/s is not that of 1 runs"),
        (lambda c: level_of(c).update(requests=[]), "requests of 20/s is not that of 1 runs"),
        (
            lambda c: level_of(c).update(rates=level_of(c)["rates"] * 2),
            "rates of 20/s is not that of 1 runs",
        ),
        (
            lambda c: level_of(c)["errors"][0].update(size=[0.0] * 20),
            "errors of 20/s is not that of 1 runs",
        ),
        (
            lambda c: level_of(c)["cells"]["ttft"][1].update(edges=[2.0] + [1.0] * 18),
            "cells of ttft at 20/s are not in order",
        ),
        (lambda c: level_of(c)["cells"].update(ttft=[{"a": 1}]), "by"),
        (lambda c: c.update(capacity_rps={"a": 1}), "capacity_rps"),
        (lambda c: p99_of(c).update(tolerance={}), "same_schedule"),
        (lambda c: level_of(c)["quantiles"].update(ttft_p77=p99_of(c)), "quantiles"),
        (lambda c: p99_of(c).update(expected=[0.1]), "expected"),
        (lambda c: c["realised"].update(input_tokens="abc"), "realised"),
        (lambda c: p99_of(c).update(value_s=0.0), "value_s"),
        (lambda c: p99_of(c).update(value_s=1e308), "value_s"),
        (lambda c: p99_of(c).update(noise=-1.0), "noise"),
        (lambda c: level_of(c).update(skipped=-5), "skipped"),
        (lambda c: level_of(c).update(quantiles={}), "quantiles"),
        (lambda c: c["runs"][0].pop("seed"), "seed"),
        (lambda c: c.pop("levels"), "levels"),
        (lambda c: c.pop("runs"), "runs"),
        (lambda c: c.update(levels={}), "length >= 1 - at `\\$.levels`"),
        (lambda c: c["levels"]["20/s"].update(rates=[1, 2]), "rates"),
        (lambda c: c["levels"]["20/s"]["quantiles"]["ttft_p50"].pop("marks_s"), "marks_s"),
    ],
)
def test_a_baseline_that_was_edited_and_signed_anew_is_one_line(
    tmp_path: Path, spoil: Any, says: str
) -> None:
    content = make_baseline([run(tmp_path / "base", stage(ttfts(1)))])
    spoil(content)
    (tmp_path / "base.json").write_text(write_baseline(content))
    with pytest.raises(CompareError, match=says) as error:
        read_baseline(tmp_path / "base.json")
    assert "\n" not in str(error.value)


def test_a_baseline_with_a_value_that_is_no_number_cannot_be_read(tmp_path: Path) -> None:
    text = write_baseline(make_baseline([run(tmp_path / "base", stage(ttfts(1)))]))
    (tmp_path / "base.json").write_text(text.replace('"noise": 0.', '"noise": NaN, "was": 0.', 1))
    with pytest.raises(CompareError, match="NaN is no number"):
        read_baseline(tmp_path / "base.json")


def test_a_run_without_any_latency_is_no_baseline(tmp_path: Path) -> None:
    bare = run(tmp_path / "bare", stage(ttfts(1)))
    none = {f"{m}_{p}": "x" for m in ("ttft", "itl", "tpot", "e2e") for p in ("p50", "p90", "p99")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampacity.analysis.change.baseline.track", lambda *_: "x")
        with pytest.raises(
            CompareError, match="no latency that a gate could track: ttft_p10: x;"
        ) as error:
            make_baseline([bare])
    assert all(f"{name}: x" in str(error.value) for name in none)


def test_why_a_run_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(
        CompareError,
        match="20/s: 50 of 1000 requests failed or were in flight at cutoff: with more than 1%",
    ):
        make_baseline([run(tmp_path / "bad", stage(ttfts(1), failed=range(700, 750)))])
    # each lasts 16 of the 20 s: filling up and overload look the same
    endless = stage([15.96] * 400)
    with pytest.raises(CompareError, match=r"20/s: no steady state \(.* look the same\)"):
        make_baseline([run(tmp_path / "endless", endless, ["ttft_p90=500ms"])])
    with pytest.raises(CompareError, match="20/s: 60 requests after the warm-up, 100 are needed"):
        make_baseline([run(tmp_path / "short", stage(ttfts(1, 60)), warmup_requests=0)])


def test_a_stage_that_was_repeated_sent_the_same_and_is_paired(tmp_path: Path) -> None:
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    disturbed = stage(ttfts(3, 1500))
    disturbed.client_limited = True
    again = stage(ttfts(1, 1500), start_s=100.0)
    values = ttfts(1, 1500)
    again.records = [
        request(1500 + i, 100.0 + i / RATE, ttft_s=float(t), gaps_s=[0.01] * 4)
        for i, t in enumerate(values)
    ]
    again.extra = {"schedule": 0}
    found = judge_gate(base, [run(tmp_path / "again", [disturbed, again])], {})
    assert found.same_schedule is True
    assert found.verdict == "pass", found.sentence


# --- a sequence of looks ----------------------------------------------------------------------


def test_what_the_looks_spend_adds_up_and_the_first_spends_most() -> None:
    """Pocock's function by hand: 5 % x ln(1 + (e - 1)/3) = 2.264 % at the first of three looks."""
    found = spent_at_looks(0.05, 3)
    assert sum(found) == pytest.approx(0.05)
    assert found[0] == pytest.approx(0.02264, abs=1e-5)
    assert found == sorted(found, reverse=True)
    assert spent_at_looks(0.05, 1) == pytest.approx([0.05])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sequence_errs_no_more_often_than_one_look(sign: int) -> None:
    """A candidate that is worse by just the tolerance, three samples at most: called worse, or no
    worse, in 5 % at most.
    """
    rng = np.random.default_rng(21)
    wrong = 0
    for _ in range(1500):
        base = Blocks(rng.binomial(100, 0.1, 20).astype(float), np.full(20, 100.0), 2000.0)
        ours: list[Blocks] = []
        for alpha in spent_at_looks(0.05, 3):
            ours.append(
                Blocks(rng.binomial(100, 0.1, 20).astype(float), np.full(20, 100.0), 2000.0)
            )
            e = compare_shares([base], ours, base.share, paired=False, noise=0.0)
            if (e.p_regression if sign > 0 else e.p_equivalence) <= alpha:
                wrong += 1
                break
    assert 0.01 < wrong / 1500 < 0.06


# --- gates that answer ------------------------------------------------------------------------


def test_a_batching_server_at_default_tolerances() -> None:
    """Three pairs, of one seed and of two: equal runs pass or nearly, 10 % longer steps and a TTFT
    25 % longer are found.
    """
    server = STEP_SERVERS["pieces"]
    rate = 0.6 * server.most_rps

    def measured(seed: int, noise: int, speed: float = 1.0) -> Run:
        return step_run(server, rate, 2000, seed, noise, jitter=0.03, speed=speed)

    verdicts: dict[str, list[str]] = {"equal": [], "steps": [], "ttft": []}
    for seed in range(3):
        base = make_baseline([prepare(measured(seed, 10 * seed))])
        for level in base["levels"].values():
            for name, entry in level["quantiles"].items():
                assert (
                    name.startswith("e2e")
                    or name.endswith("p99")
                    or entry["tolerance"]["same_schedule"] <= 0.15
                )
        for other in (seed, seed + 50):
            equal = measured(other, 10 * seed + 1)
            runs = {
                "equal": equal,
                "steps": measured(other, 10 * seed + 2, 1.1),
                "ttft": later_first_token(equal, 0.25),
            }
            for kind, run_ in runs.items():
                verdicts[kind].append(judge_gate(base, [prepare(run_)], {}).verdict)
    assert verdicts["equal"].count("pass") >= 5
    assert "regression" not in verdicts["equal"]
    assert verdicts["steps"] == ["regression"] * 6
    assert verdicts["ttft"] == ["regression"] * 6


def test_steps_that_are_longer_are_told_apart_from_a_fuller_server() -> None:
    """10 % longer steps: a plain TPOT rises by more, as more requests are in flight; at equal
    occupancy it is the 10 %.
    """
    server = STEP_SERVERS["slots"]
    base, slow = (
        prepare(step_run(server, 0.6 * server.most_rps, 2000, 5, n, jitter=0.0, speed=s))
        for n, s in ((1, 1.0), (2, 1.1))
    )
    plain = [j.summary.stages[0].tpot_s.p50 for j in (base, slow)]
    found = checks(judge_gate(make_baseline([base]), [slow], {}))["tpot_p50"]
    assert plain[1] / plain[0] > 1.13
    assert found.shift == pytest.approx(0.10, abs=0.01)
    # that of the two figures beside it
    assert found.change == pytest.approx(plain[1] / plain[0] - 1, abs=1e-3)


def test_a_longer_ttft_alone_is_found_near_saturation_with_other_requests() -> None:
    """At 85 % the length of the queue is mostly chance; a TTFT that nearly waits for nobody, p10,
    still tells 25 % more.
    """
    server = STEP_SERVERS["whole"]
    rate = 0.85 * server.most_rps
    base = make_baseline([prepare(step_run(server, rate, 2000, 3, 30, jitter=0.03))])
    for seed in (53, 54, 55):
        equal = step_run(server, rate, 2000, seed, seed, jitter=0.03)
        assert judge_gate(base, [prepare(equal)], {}).verdict != "regression"
        found = judge_gate(base, [prepare(later_first_token(equal, 0.25))], {})
        assert found.verdict == "regression"
        assert checks(found)["ttft_p10"].shift == pytest.approx(0.25, abs=0.06)


def test_a_candidate_is_measured_again_until_the_answer_is_clear() -> None:
    """The study plays what ``gate --max-samples`` does: 300 requests leave one look open, three
    samples say it.
    """
    options = argparse.Namespace(
        server="pieces",
        load=0.6,
        requests=300,
        looks=3,
        pairs=3,
        first_seed=7,
        baseline_runs=3,
        jitter=0.03,
        run_noise=0.005,
        change=0.1,
        ttft_change=0.25,
        changed_every=1,
    )
    cells = study(options)
    assert set(cells) == {
        f"{k}, {s} seed" for k in ("equal", "steps", "ttft") for s in ("same", "other")
    }
    for name, cell in cells.items():
        assert sum(cell.answers.values()) == (4 if "same" in name else 3)
        assert sum(n * look for look, n in cell.samples.items()) >= sum(cell.answers.values())
        assert max(cell.samples) <= 3
    assert cells["ttft, same seed"].answers["regression"] == 4
    assert cells["equal, same seed"].answers["regression"] == 0


def by_distance(worse: float, passing: float, *, watched: bool = False) -> CheckedChange:
    """By its distance from both limits in standard errors of 1."""
    limits = [Estimate(x, 1.0, 0.0, float("inf")) for x in (worse, passing)]
    return CheckedChange(Check("ttft_p50", "change", "20/s"), 1000, *limits, watched)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        # surely beyond 3 %, the figure beyond the tolerance
        (by_distance(3.0, 1.0), "regression"),
        (by_distance(3.0, -1.0), "inconclusive"),  # surely beyond 3 %, perhaps inside the tolerance
        (by_distance(3.0, -2.0), "pass"),  # surely inside the tolerance: z(0.95) = 1.645
        (by_distance(1.0, 0.5), "inconclusive"),  # beyond the tolerance, perhaps by chance
        (by_distance(-1.0, -5.0, watched=True), WATCHED),  # nothing passes that is only watched
        # the only one watched; among two it may be chance
        (by_distance(1.8, 0.5, watched=True), "inconclusive"),
        (by_distance(2.1, 0.5, watched=True), "regression"),  # by Holm: z(1 - 0.05/2) = 1.960
    ],
)
def test_what_is_a_regression_and_what_passes(found: CheckedChange, verdict: str) -> None:
    """One of two checks, the other of which is plainly equal."""
    assert [c.verdict for c in decide([found, by_distance(-6.0, -9.0)], 0.05)] == [verdict, "pass"]


def test_a_baseline_of_before_is_read(tmp_path: Path) -> None:
    """Without TTFT p10, and with tolerances beyond 15 %, which are those of metrics that are only
    watched.
    """
    base = make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))])
    quantiles = base["levels"]["20/s"]["quantiles"]
    del quantiles["ttft_p10"]
    quantiles["ttft_p99"]["tolerance"] = {"same_schedule": 0.4, "other_schedule": None}
    (tmp_path / "base.json").write_text(write_baseline(base))
    found = judge_gate(
        read_baseline(tmp_path / "base.json"), [run(tmp_path / "c", stage(ttfts(1, 1500)))], {}
    )
    assert found.verdict == "pass"
    assert "ttft_p10" not in checks(found)
    assert "may differ by more than 15%" in found.untracked["ttft_p99 at 20/s"]


def test_a_tolerance_that_is_given_is_no_matter_of_noise(tmp_path: Path) -> None:
    """12 % slower, which by default is a regression; not surely more than the 10 % that are
    allowed, and not less.
    """
    base = reread(make_baseline([run(tmp_path / "base", stage(ttfts(1, 1500)))]))
    slower = run(tmp_path / "slow", stage(ttfts(2, 1500, 1.12)), seed=2)
    assert checks(judge_gate(base, [slower], {}))["ttft_p50"].verdict == "regression"
    given = checks(judge_gate(base, [slower], parse_tolerances(["ttft=10%"])))["ttft_p50"]
    assert (given.verdict, given.tolerance) == ("inconclusive", 0.1)
