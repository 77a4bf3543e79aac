"""Baseline and gate: pass, regression or inconclusive, on runs made by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from ampacity.analysis.change.comparable import lengths_apart
from ampacity.analysis.change.judged import CompareError, Judged, _per_planned, prepare
from ampacity.analysis.change.results import Check, GateResult
from ampacity.analysis.gate.baseline import make_baseline
from ampacity.analysis.gate.baseline_file import write_baseline
from ampacity.analysis.gate.checks import parse_tolerances, slos_of
from ampacity.analysis.gate.gate import judge_gate, twice_as_slow
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.reports.change.gate import gate_markdown, gate_screen, junit_xml, lines
from tests.support.compared_runs import RATE, stage, ttfts
from tests.support.repeats import often
from tests.support.synthetic import Stage, make_run, request

TIGHT = parse_tolerances(["p50=3%", "p90=3%"])  # less than the noise of so few requests allows


def run(path: Path, stages: Stage | list[Stage], slos: Sequence[str] = (), **meta: Any) -> Judged:
    listed = stages if isinstance(stages, list) else [stages]
    return prepare(make_run(path, listed, slos, **({"run_id": path.name} | meta)))


def baseline(*runs: Judged) -> dict[str, Any]:
    """Return a baseline as it is read again."""
    found: dict[str, Any] = json.loads(write_baseline(make_baseline(list(runs))))
    return found


def gated(
    folder: Path, before: Stage, after: Stage, tolerances: dict[str, Any] | None = None, **meta: Any
) -> GateResult:
    base = baseline(run(folder / "base", before))
    return judge_gate(base, [run(folder / "after", after, **meta)], tolerances or {})


def checks(found: GateResult) -> dict[str, Check]:
    return {c.name: c for c in found.checks}


# --- verdicts ---------------------------------------------------------------------------------


def test_same_figures_pass_and_ten_percent_more_is_a_regression(tmp_path: Path) -> None:
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
    same = judge_gate(base, [run(tmp_path / "same", stage(ttfts(1, 1500)))], {})
    assert same.verdict == "pass", same.sentence
    slower = judge_gate(base, [run(tmp_path / "slow", stage(ttfts(1, 1500, 1.1)))], {})
    assert slower.verdict == "regression"
    found = checks(slower)
    # at equal occupancy, of 1,500 requests
    assert found["ttft_p50"].change == pytest.approx(0.1, abs=5e-3)
    assert found["ttft_p50"].verdict == "regression"
    assert found["itl_p50"].verdict == found["tpot_p90"].verdict == "pass"


@pytest.mark.parametrize(
    ("median_s", "slower", "verdict"),
    [  # the client's times are exact to 0.1 ms
        (0.4e-3, 1.2, None),  # 0.08 ms, watched
        (0.4e-3, 1.6, "regression"),  # 0.24 ms
        (1e-3, 1.08, "pass"),  # 0.08 ms, within 10 %
        (1e-3, 1.25, "regression"),
    ],
)
def test_a_change_below_what_the_client_resolves_is_no_regression(
    median_s: float, slower: float, verdict: str | None, tmp_path: Path
) -> None:
    values = ttfts(1, 3000, median_s / 0.1)
    found = gated(tmp_path, stage(values), stage(slower * values))
    check = checks(found).get("ttft_p50")
    assert (check and check.verdict) == verdict
    assert ("ttft_p50 at 20/s" in found.untracked) == (check is None)


def test_a_change_inside_its_tolerance_passes_and_one_beyond_does_not(tmp_path: Path) -> None:
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
    slower = run(tmp_path / "slow", stage(ttfts(1, 1500, 1.1)))
    wide = parse_tolerances(["ttft=20%", "e2e=20%"])
    assert judge_gate(base, [slower], wide).verdict == "pass"
    assert judge_gate(base, [slower], parse_tolerances(["ttft=2%"])).verdict == "regression"


def test_tokens_per_second_are_those_measured_and_the_test_is_by_the_plan(tmp_path: Path) -> None:
    """6 tokens planned and received where the baseline had 5: 20 % more tokens/s, none more or less
    per token planned."""
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
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
    markdown = gate_markdown(result)
    assert "| change | tested, 95 % | allowed | verdict |" in markdown
    # 20 % more, and passed: the reason is said wherever the figures are
    assert "- output_tokens_per_s at 20/s: at equal load and lengths +0.0%" in markdown


def test_few_requests_are_inconclusive_and_say_how_many_are_missing(tmp_path: Path) -> None:
    found = gated(tmp_path, stage(ttfts(1, 300)), stage(ttfts(2, 300)), TIGHT, seed=2)
    assert found.verdict == "inconclusive"
    assert found.same_schedule is False
    assert any("--seed" in note for note in found.notes)
    assert any(
        "at equal load and lengths" in note and "ampacity compare" in note for note in found.notes
    )
    assert any(c.more_requests for c in found.checks if c.verdict == "inconclusive")


def test_a_shape_turned_bimodal_is_found_although_the_median_stays(tmp_path: Path) -> None:
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
    values = ttfts(1, 1500)
    values[values > np.quantile(values, 0.8)] *= 3  # the median and all below it are untouched
    found = judge_gate(base, [run(tmp_path / "two", stage(values))], {})
    assert found.verdict == "regression"
    assert checks(found)["ttft_p50"].verdict == "pass"
    assert checks(found)["ttft_p90"].verdict == "regression"


def test_equal_values_everywhere_are_no_change(tmp_path: Path) -> None:
    """A plateau: every TTFT and every gap is the same; 4 % more of one of them is found."""
    base = baseline(run(tmp_path / "base", stage(np.full(600, 0.1))))
    assert (
        judge_gate(base, [run(tmp_path / "same", stage(np.full(600, 0.1)))], {}).verdict == "pass"
    )
    found = judge_gate(base, [run(tmp_path / "gap", stage(np.full(600, 0.1), gap_s=0.0104))], {})
    assert checks(found)["itl_p50"].verdict == checks(found)["tpot_p50"].verdict == "regression"
    assert checks(found)["ttft_p50"].verdict == "pass"


def test_noise_is_learned_from_several_baseline_runs(tmp_path: Path) -> None:
    """Runs of one schedule that differ by ±4 %: a candidate 6 % slower is no regression; beside one
    run it is."""
    scales = (0.96, 1.0, 1.04, 0.98, 1.03, 0.97)
    several = [run(tmp_path / f"b{i}", stage(ttfts(1, 1500, s))) for i, s in enumerate(scales)]
    slower = run(tmp_path / "slow", stage(ttfts(1, 1500, 1.06)))
    assert judge_gate(baseline(*several[1:2]), [slower], TIGHT).verdict == "regression"
    found = judge_gate(baseline(*several), [slower], TIGHT)
    assert found.verdict == "inconclusive"
    assert "more runs" in checks(found)["ttft_p50"].reason


def test_false_alarms_over_all_metrics_together(tmp_path: Path) -> None:
    """Pairs that share nothing but the workload: of 8 at 5 % each, three would come once in 170, of
    16 four once in 140."""
    verdicts, n = [], often(8, 16)
    for seed in range(n):
        pair = [
            run(tmp_path / f"{seed}-{arm}", stage(ttfts(10 * seed + arm, 300)), seed=2 * seed + arm)
            for arm in (0, 1)
        ]
        verdicts.append(judge_gate(baseline(*pair[:1]), pair[1:], {}).verdict)
    assert verdicts.count("regression") <= (2 if n == 8 else 3)


# --- never a pass -----------------------------------------------------------------------------


def test_half_of_the_requests_failed_is_a_regression(tmp_path: Path) -> None:
    found = gated(tmp_path, stage(ttfts(1)), stage(ttfts(1), failed=range(500)))
    assert found.verdict == "regression"
    assert checks(found)["error_rate"].verdict == "regression"


def test_more_errors_than_one_percent_never_pass(tmp_path: Path) -> None:
    """Not even when they all lie in the warm-up, which is cut."""
    found = gated(tmp_path, stage(ttfts(1)), stage(ttfts(1), failed=range(15)), {"error_rate": 0.5})
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
    base = baseline(run(tmp_path / "base", stage(ttfts(1))))
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
    planned (s.d. 0.2)."""
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
    may be refused."""
    rng = np.random.default_rng(11)
    pairs = [[lengths(rng, 0.7, plan=plan) for _ in range(2)] for _ in range(600)]
    means = np.array([[x["output_tokens"] for x in pair] for pair in pairs], dtype=np.float64)
    assert np.mean(np.abs(np.log(means[:, 1] / means[:, 0])) > np.log(1.1)) > 0.05
    assert sum(lengths_apart(*pair, "output_tokens") is not None for pair in pairs) <= 4


def test_answers_that_became_shorter_are_refused_by_the_plan() -> None:
    """85 % of what the baseline's had for the same plan: found by the plan though only by its means
    it is not."""
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
    1/3 sqrt(20/19)/sqrt(20)."""
    ratio, se = _per_planned(np.array([10.0, 20.0] * 10), np.full(20, 10.0))
    assert ratio == pytest.approx(1.5)
    assert se == pytest.approx(1 / 3 / np.sqrt(19))


def test_a_predicted_engine_is_under_test_and_no_other_experiment(tmp_path: Path) -> None:
    """Presets that differ by a tenth: the gate must go red, also by a baseline that still holds a
    count of the day."""

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

    base = baseline(predicted("base", "linear:0.020,0", 1.0, 10))
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
    nor are they two samples."""
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
    base = baseline(one, other)
    with pytest.raises(CompareError, match=r"runs 1 and 3 .* they are one run"):
        judge_gate(base, [copy, other, one], {}, look=3, looks=3)
    with pytest.raises(CompareError, match="its own run directory"):
        make_baseline([run(tmp_path / "live", stage(ttfts(1)))] * 2)


# --- SLOs, self-test, tolerances --------------------------------------------------------------


def test_an_absolute_slo_is_judged_beside_the_changes(tmp_path: Path) -> None:
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500)), ["ttft_p90=1s"]))
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
    from noise."""
    values = ttfts(1)
    values[500:560] *= 8
    base = baseline(run(tmp_path / "base", stage(values), ["ttft_p95=2s"]))
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
    base = baseline(both)
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
    base = baseline(prepare(made))
    found = checks(judge_gate(base, [prepare(twice_as_slow(made))], {}))
    for metric in ("ttft_p50", "itl_p50", "tpot_p50", "e2e_p90"):
        assert found[metric].verdict == "regression"
        assert found[metric].change == pytest.approx(1.0, abs=0.03)


def test_closed_loop_throughput_is_tracked(tmp_path: Path) -> None:
    """The same answers at half the pace of the loop: half the tokens per second."""

    def loop(pace_s: float) -> Stage:
        records = [request(i, i * pace_s, ttft_s=0.1, gaps_s=[0.01] * 4) for i in range(400)]
        return Stage(records, 400 * pace_s, concurrency=4)

    base = baseline(run(tmp_path / "base", loop(0.05)))
    assert list(base["levels"]) == ["4 in flight"]
    found = checks(judge_gate(base, [run(tmp_path / "half", loop(0.1))], {}))["output_tokens_per_s"]
    assert found.verdict == "regression"
    assert found.change == pytest.approx(-0.5, abs=2e-3)  # answers at the edges are cut


# --- what a breaker found ---------------------------------------------------------------------


def in_step(users: int, rounds: int, pause_s: float) -> Stage:
    """All users begin an answer of 0.5 s and five tokens at the same moment, and wait ``pause_s``
    after it."""
    records = [
        request(i, (i // users) * (0.5 + pause_s), ttft_s=0.1, gaps_s=[0.1] * 4)
        for i in range(users * rounds)
    ]
    return Stage(records, rounds * (0.5 + pause_s), concurrency=users)


@pytest.mark.parametrize(("users", "rounds"), [(64, 30), (128, 10), (4, 400)])
def test_users_in_step_have_a_rate_all_the_same(tmp_path: Path, users: int, rounds: int) -> None:
    base = baseline(run(tmp_path / "base", in_step(users, rounds, 0.0)))
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
    have none at all."""
    base = baseline(run(tmp_path / "base", stage(ttfts(1))))
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
    base = baseline(run(tmp_path / "base", stage(0.1 * rng.lognormal(0, scatter, 2000))))
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

    base = baseline(run(tmp_path / "base", pairs()))
    level = base["levels"]["20/s"]
    assert "came together" in level["untracked"]["itl_p50"]
    assert level["quantiles"]["itl_p90"]["value_s"] == pytest.approx(0.02)
    assert judge_gate(base, [run(tmp_path / "same", pairs())], {}).verdict == "pass"
    steady = baseline(run(tmp_path / "steady", stage(ttfts(1))))  # 10 ms each
    row = checks(judge_gate(steady, [run(tmp_path / "other", pairs())], {}))["itl_p50"]
    assert (row.candidate, row.change) == (0.0, -1.0)


def test_imported_runs_have_no_start_and_make_a_baseline(tmp_path: Path) -> None:
    made = run(tmp_path / "base", stage(ttfts(1)), started_utc=None)
    assert baseline(made)["runs"][0]["started_utc"] is None
    with pytest.raises(CompareError, match="they are one run"):
        make_baseline([made, made])


def test_a_change_that_the_client_may_have_made_is_no_regression(tmp_path: Path) -> None:
    """Median 100 ms, 10 % slower: 10 ms. The candidate's client was 15 ms later at p99 than the
    baseline's: it may be that."""
    base = baseline(run(tmp_path / "base", stage(ttfts(1, 1500))))
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
