"""``ampacity compare``: what makes runs comparable, the scorecard by hand, the shift function, what is no evidence."""

from __future__ import annotations

import asyncio
import csv
import html
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from synthetic import Stage, make_run, request

from ampacity.cli.search import make_search
from ampacity.config import make_settings
from ampacity.experiments.predict import predict
from ampacity.progress import Progress
from analysis.arms import Arm
from analysis.comparable import CompareError, in_words, prepare
from analysis.compare import compare, differences
from analysis.shift import between_rounds, enough_pairs, log_change
from loadgen.rundir import load_run
from reports.compare import (
    comparison_csv,
    comparison_markdown,
    render_comparison,
    tables,
    write_comparison_page,
)
from reports.figures import OF_NEIGHBOURS, OTHER_SIGN
from simulator.hardware import find_config

RATE = 20.0
Floats = np.ndarray[Any, np.dtype[np.float64]]


def ttfts(seed: int, n: int = 1000, scale: float = 1.0) -> Floats:
    return scale * np.random.default_rng(seed).lognormal(np.log(0.1), 0.3, n)


def stage(values: Sequence[float] | Floats, rate: float = RATE, **options: Any) -> Stage:
    records = [request(i, i / rate, ttft_s=float(t), gaps_s=[0.01] * 4) for i, t in enumerate(values)]
    return Stage(records, len(values) / rate, offered_rps=rate, **options)


def arm(path: Path, stages: Stage | list[Stage], slos: Sequence[str] = (), *, gpus: int = 1, usd: float | None = None, **meta: Any) -> Arm:  # fmt: skip
    made = make_run(
        path, stages if isinstance(stages, list) else [stages], slos, **({"run_id": path.name} | meta)
    )
    return Arm(path.name.upper(), prepare(made, limited_too=True), gpus, usd)


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {r["name"]: r for r in result["scorecard"]}


def quantiles(result: dict[str, Any], metric: str) -> dict[float, dict[str, Any]]:
    table = next(s for s in result["shift"] if s["metric"] == metric)
    return {q["q"]: q for q in table["quantiles"]}


# --- the scorecard by hand -------------------------------------------------------------------------------------


def route(path: Path, hundreds: int, late: int, failed: int, usd_per_10_s: float) -> Arm:
    """10 requests/s; of every 100 some answer late (over 1 s) and some fail, spread at random."""
    rng, records = np.random.default_rng(5), []
    for h in range(hundreds):
        fates = rng.permutation(["late"] * late + ["failed"] * failed + ["good"] * (100 - late - failed))
        for k, fate in enumerate(fates):
            i = 100 * h + k
            if fate == "failed":
                records.append(request(i, i / 10, ttft_s=None, status="http_error", output_tokens_planned=5))
            else:
                records.append(request(i, i / 10, ttft_s=0.1 if fate == "good" else 1.5, gaps_s=[0.01] * 4))
    made = make_run(
        path,
        [Stage(records, 10.0 * hundreds, offered_rps=10.0)],
        ["ttft_p99=1s"],
        run_id=path.name,
        warmup_requests=0,
    )
    return Arm(path.name.upper(), prepare(made), 1, usd_per_10_s * 360)  # 360 times 10 s is an hour


def test_a_cheaper_accepted_result_beats_more_tokens_per_second(tmp_path: Path) -> None:
    """A: 58 good of 100 in 10 s at 1.10 USD, none failed; B: 85 at 1.45, 15 failed. 1.10/58 > 1.45/85, and A has more tokens."""
    result = compare([route(tmp_path / "a", 1, 42, 0, 1.10), route(tmp_path / "b", 1, 0, 15, 1.45)])
    found = rows(result)
    assert found["goodput_rps"]["values"] == pytest.approx([5.8, 8.5])
    cost = found["usd_per_thousand_good_requests"]
    assert cost["values"] == pytest.approx([1100 / 58, 1450 / 85])
    assert cost["best"] == "B"
    tokens = found["output_tokens_per_s_per_gpu"]
    assert tokens["best"] == "A"
    assert tokens["values"][1] == pytest.approx(42.5, rel=0.02)  # an answer ends past the window
    assert cost["winner"] is None  # a tenth cheaper in 100 requests may be chance


def test_a_rate_comes_from_a_stage_that_is_long_enough_to_have_one(tmp_path: Path) -> None:
    """20/s of which all are good; 52 requests at 30/s, all good too, say nothing of what it carries there."""
    short = Stage(
        [request(2000 + i, 100 + i / 30, stage=1, ttft_s=0.1) for i in range(52)],
        52 / 30,
        100.0,
        offered_rps=30.0,
    )
    both = [
        arm(tmp_path / n, [stage(ttfts(1)), short], ["ttft_p99=1s"], usd=2.0, warmup_requests=0) for n in "ab"
    ]
    assert both[0].judged.summary["stages"][1]["goodput_rps"] == pytest.approx(30)
    assert rows(compare(both))["goodput_rps"]["values"] == pytest.approx([20, 20])
    alone = [
        arm(tmp_path / n, stage(ttfts(1, 99)), ["ttft_p99=1s"], usd=2.0, warmup_requests=0) for n in "cd"
    ]
    found = rows(compare(alone))
    for name in ("goodput_rps", "usd_per_million_output_tokens"):
        assert found[name]["values"] == [None, None]
        assert all("100 requests" in why for why in found[name]["reasons"])


def test_with_more_requests_the_same_advantage_is_real(tmp_path: Path) -> None:
    result = compare([route(tmp_path / "a", 20, 42, 0, 1.10), route(tmp_path / "b", 20, 0, 15, 1.45)])
    cost = rows(result)["usd_per_thousand_good_requests"]
    assert cost["winner"] == "B"
    assert cost["changes"][1]["change"] == pytest.approx((1.45 / 85) / (1.10 / 58) - 1)
    low, high = cost["changes"][1]["change_ci"]
    assert low < -0.1 < high < 0
    assert "B is better in" in result["sentence"]
    tokens = rows(result)["usd_per_million_output_tokens"]
    assert (
        tokens["winner"] is None
    )  # A answered all that was sent: how many tokens it could send is not known
    assert "not what it can carry" in tokens["reason"]


def test_accepted_answers_are_those_that_a_checker_accepted(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """Of 100 answers inside the SLO 50 and 80 are accepted; 10 s of a GPU at 360 USD/h cost 1 USD: 20 and 12.5 USD for 1,000."""
    for name, accepted in (("a", 50), ("b", 80)):
        make_run(tmp_path / name, [stage([0.1] * 100, 10.0)], ["ttft_p99=1s"], run_id=name, warmup_requests=0)
        lines = [json.dumps({"request_id": i, "accepted": i < accepted}) for i in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    labels = [x for n in "ab" for x in ("--labels", f"{n}={tmp_path}/{n}.jsonl")]
    assert ampacity("compare", tmp_path / "a", tmp_path / "b", "--gpu-hour", "360", *labels, "--json") == 0
    found = rows(json.loads(capsys.readouterr().out))
    assert found["usd_per_thousand_accepted_requests"]["values"] == pytest.approx([20.0, 12.5])


def test_figures_per_gpu_and_per_dollar(tmp_path: Path) -> None:
    """B has twice the GPUs at the same price and the same speed: half the goodput per GPU, twice the TTFT × USD/h.

    Both carry the load, so neither ratio is more than that of the GPUs: no winner.
    """
    made = [
        arm(tmp_path / n, stage(ttfts(1)), ["ttft_p99=1s"], gpus=g, usd=2.0) for n, g in (("a", 1), ("b", 2))
    ]
    found = rows(compare(made))
    assert found["goodput_rps_per_gpu"]["values"][0] == pytest.approx(
        2 * found["goodput_rps_per_gpu"]["values"][1]
    )
    assert found["goodput_rps_per_gpu"]["winner"] is None
    assert found["goodput_rps"]["verdict"] == "equal"
    per_dollar = found["ttft_p99_s_x_usd_per_hour"]
    assert per_dollar["values"] == pytest.approx([2 * np.quantile(ttfts(1), 0.99), 4 * np.quantile(ttfts(1), 0.99)], rel=0.03)  # fmt: skip
    assert per_dollar["winner"] is None
    assert "find the usable rate" in per_dollar["reason"]
    assert found["ttft_p99_over_p50"]["verdict"] == "equal"
    assert found["ttft_p99_over_p50"]["winner"] is None


def later(made: Stage, start_s: float, first_id: int) -> Stage:
    """The stage at another time of its run."""
    made.start_s = start_s
    for r in made.records:
        r.request_id += first_id
        for field in ("scheduled_ns", "dispatched_ns", "connected_ns", "started_ns", "sent_ns", "first_token_ns", "first_answer_ns", "last_token_ns", "ended_ns"):  # fmt: skip
            setattr(r, field, getattr(r, field) + round(start_s * 1e9))
    return made


def sweep(path: Path, slow_at: float, usd: float | None = None, first: float = 10.0, **meta: Any) -> Arm:
    """10, 20 and 40 requests/s (or those from ``first`` on) inside the SLO below ``slow_at``."""
    stages: list[Stage] = []
    start = 0.0
    for rate in (first, 2 * first, 4 * first):
        values = ttfts(1, 400) * (1.0 if rate < slow_at else 30.0)
        stages.append(later(stage(values, rate), start, 400 * len(stages)))
        start += 400 / rate + 60
    return arm(path, stages, ["ttft_p90=500ms"], usd=usd, **meta)


def test_usable_rates_win_only_where_their_brackets_are_apart(tmp_path: Path) -> None:
    a, b, c = (sweep(tmp_path / name, at) for name, at in (("a", 15), ("b", 30), ("c", 100)))
    assert rows(compare([a, b]))["usable_rps"]["verdict"] == "open"  # [10, 20] and [20, 40] touch
    found = rows(compare([a, b, c]))["usable_rps"]
    assert found["brackets"][0] == [pytest.approx(10, rel=0.05), 20.0]
    assert found["winner"] is None
    result = compare([a, c])
    assert rows(result)["usable_rps"]["winner"] == "C"
    for narrow in (False, True):
        card = next(t for t in tables(result, narrow=narrow) if t.title == "Scorecard").rows
        assert card[1][2].text == "at least 40.0"
        assert [cell.text for cell in card[2][:3]] == ["  its interval", "10.0 to 20.0", "40.0 to ?"]
    assert "at least 40.0" in comparison_markdown(result)


def test_a_cost_wins_where_the_usable_rate_of_each_is_known(tmp_path: Path) -> None:
    """The SLO of A, B and D breaks between 10 and 20/s: A may carry twice its best stage, so half its cost is no win, a third is.

    Of C, which breaks nowhere, nobody knows what it can carry: more would only help it where it is the cheaper one.
    """
    a, b = sweep(tmp_path / "a", 15, 3.0), sweep(tmp_path / "b", 15, 1.0)
    good = rows(compare([a, b]))["usd_per_thousand_good_requests"]
    assert good["winner"] == "B"
    assert good["changes"][1]["change"] == pytest.approx(-2 / 3)
    half = rows(compare([a, sweep(tmp_path / "d", 15, 1.6)]))["usd_per_thousand_good_requests"]
    assert (half["winner"], half["verdict"]) == (None, "unknown")
    assert "between two tested loads" in half["reason"]
    for n, usd, winner in (("c", 1.0, "C"), ("e", 20.0, None)):  # at 40/s: a twelfth of A's cost; 5/3 of it
        good = rows(compare([a, sweep(tmp_path / n, 100, usd)]))["usd_per_thousand_good_requests"]
        assert good["winner"] == winner
        assert None not in good["values"]


def test_runs_without_a_common_load_are_compared_by_what_they_carry(tmp_path: Path, ampacity: Any, capsys: Any) -> None:  # fmt: skip
    """A carries 10 and breaks at 20, B carries 12 and 24 and breaks at 48: the load to give to both is 10, for 1.2 x 299 requests 36 s.

    Good requests: A's 10/s may be 20/s at most, less than B's 24/s; what carries 12/s and breaks at 24 is not shown to be better.
    """
    a, b = sweep(tmp_path / "a", 15), sweep(tmp_path / "b", 30, first=12.0)
    result = compare([a, b])
    assert result["level"] is None
    assert result["notes"][-1].endswith(
        "with --rates 10 --duration 36s (or longer), the most that all have carried."
    )
    assert result["notes"][-1].startswith("Latencies and failures are not compared: ")
    found = rows(result)
    assert found["usable_rps"]["winner"] == "B"
    assert (found["goodput_rps"]["winner"], found["ttft_p99_over_p50"]["winner"]) == ("B", None)
    near = rows(compare([a, sweep(tmp_path / "c", 15, first=12.0)]))["goodput_rps"]
    assert (near["winner"], near["values"]) == (None, pytest.approx([10, 12]))
    assert "between two tested loads" in near["reason"]
    assert ampacity("compare", tmp_path / "a", tmp_path / "b") == 0
    said = capsys.readouterr().out
    assert "--rates 10 " in said
    assert "quantile" not in said.split("A run wins")[0].split("Scorecard")[1]  # no table that holds nothing


def test_in_closed_loops_the_concurrency_to_give_to_both_is_said(tmp_path: Path) -> None:
    made = []
    for name, users in (("a", 4), ("b", 8)):
        records = [request(i, i / RATE, ttft_s=users / RATE - 0.04, gaps_s=[0.01] * 4) for i in range(1000)]
        made.append(arm(tmp_path / name, Stage(records, 50.0, concurrency=users)))
    assert "with --concurrency 4, which all" in compare(made)["notes"][-1]


def test_cost_and_gpus_at_the_usable_rate_have_its_bracket(tmp_path: Path, ampacity: Any, capsys: Any) -> None:  # fmt: skip
    """Five tokens an answer, 2 USD/h: at 10/s 2/0.18 USD for a million, at 20/s 2/0.36; of C, at least 40/s, at most 2/0.72.

    A peak of 100/s with 1.2: ceil(10 x 1.2) = 12 GPUs at 10/s, ceil(5 x 1.2) = 6 at 20/s; C ceil(3 x 1.2) = 4 at most.
    """
    fleet = {"peak_rps": 100.0, "tensor_parallel": 1, "safety_factor": 1.2, "gpu_hour_usd": 2.0}
    a, c = (sweep(tmp_path / n, at, 2.0, fleet_inputs=fleet) for n, at in (("a", 15), ("c", 100)))
    result = compare([a, c])
    found = rows(result)
    cost, gpus, c_max = (found[n] for n in ("usd_per_million_output_tokens", "gpus_for_peak", "c_max"))
    assert cost["brackets"] == [pytest.approx([2 / 0.36, 2 / 0.18], rel=0.01), [None, pytest.approx(2 / 0.72, rel=0.01)]]  # fmt: skip
    assert (
        cost["values"][0] == a.judged.summary["fleet"]["cost_per_million_output_tokens"]
    )  # that of its report
    assert (cost["winner"], cost["at_least"], cost["note"]) == ("C", [False, True], "one instance at its usable rate")  # fmt: skip
    assert (gpus["brackets"], gpus["winner"]) == ([[6, 12], [None, 4]], "C")
    assert (c_max["winner"], c_max["higher_is_better"]) == (None, None)
    assert ampacity("compare", tmp_path / "a", tmp_path / "c") == 0
    for text in (capsys.readouterr().out, comparison_markdown(result)):
        told = " ".join(text.split())
        assert "at most 2.78" in told
        assert "? to 2.78" in told
        assert "at most 4 " in told
        for basis in ("its usable rate", "its best stage"):
            assert f"of one instance at {basis}, at A: 1 GPU × $2/h; " in told
    other = sweep(tmp_path / "d", 100, 2.0, fleet_inputs=fleet | {"peak_rps": 50.0})
    assert "gpus_for_peak" not in rows(compare([a, other]))


# --- the shift function ----------------------------------------------------------------------------------------


def test_equal_runs_are_equal_and_ten_percent_is_found_at_every_quantile(tmp_path: Path) -> None:
    a = arm(tmp_path / "a", stage(ttfts(1, 2000)))
    same = compare([a, arm(tmp_path / "b", stage(ttfts(1, 2000)))])
    assert same["sentence"] == "No difference between A and B is shown."
    assert same["same_schedule"] is True
    assert quantiles(same, "ttft")[0.5]["verdict"] == "equal"
    found = quantiles(compare([a, arm(tmp_path / "c", stage(ttfts(1, 2000, 1.1)))]), "ttft")
    assert list(found) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
    for q, held in found.items():
        assert held["change"] == pytest.approx(0.1, abs=1e-6)
        assert held["change_ci"][0] < 0.1 < held["change_ci"][1]
        assert held["verdict"] == "differs" or q > 0.95


def test_noise_is_open_not_a_finding(tmp_path: Path) -> None:
    """Known fault: noise hides and invents regressions. 300 requests each, 4 % apart, other seeds: the interval holds 0."""
    a = arm(tmp_path / "a", stage(ttfts(1, 300)), seed=1)
    result = compare([a, arm(tmp_path / "b", stage(ttfts(2, 300, 1.02)), seed=2)])
    found = quantiles(result, "ttft")[0.5]
    assert found["change_ci"][0] < 0 < found["change_ci"][1]
    assert found["verdict"] == "open"
    assert result["same_schedule"] is False
    assert rows(result)["ttft_p99_over_p50"]["winner"] is None


def test_two_modes_with_the_same_median_are_found(tmp_path: Path) -> None:
    """Known fault: the mean stays while the shape turns bimodal. Half at 60 ms, half at 140 ms, around 100 ms."""
    rng = np.random.default_rng(4)
    one = rng.normal(0.1, 0.002, 2000)
    two = np.where(rng.random(2000) < 0.5, 0.06, 0.14) + rng.normal(0, 0.002, 2000)
    two[two.argsort()[950:1050]] = 0.1  # a bridge, so that the median is 100 ms
    assert np.mean(one) == pytest.approx(np.mean(two), rel=0.02)
    found = quantiles(compare([arm(tmp_path / "a", stage(one)), arm(tmp_path / "b", stage(two))]), "ttft")
    assert found[0.5]["verdict"] != "differs"
    assert found[0.2]["verdict"] == found[0.8]["verdict"] == "differs"
    assert found[0.2]["change"] < -0.3 < 0.3 < found[0.8]["change"]


def test_false_findings_stay_rare_over_all_quantiles_and_metrics_together(tmp_path: Path) -> None:
    """16 A/A pairs of independent seeds; with 5 % at most, 4 or more have a chance below 0.8 %."""
    false = 0
    for k in range(16):
        pair = [
            arm(tmp_path / f"{n}{k}", stage(ttfts(2 * k + i, 400)), seed=2 * k + i)
            for i, n in enumerate("ab")
        ]
        result = compare(pair)
        false += any(q["verdict"] == "differs" for s in result["shift"] for q in s["quantiles"])
    assert false <= 3


def failing(path: Path, every: int, scale: float = 1.0, n: int = 1000, **meta: Any) -> Arm:
    """Each request whose number is a multiple of ``every`` fails."""
    made = stage(ttfts(1, n, scale))
    made.records = [
        r if i % every else request(i, i / RATE, ttft_s=None, status="http_error", output_tokens_planned=5)
        for i, r in enumerate(made.records)
    ]
    return arm(path, made, warmup_requests=0, **meta)


def test_a_run_that_fails_is_not_faster_and_the_other_keeps_its_figures(tmp_path: Path) -> None:
    """B's answers are a fifth faster, and a quarter of its requests fail: its p80 and above are infinite, A's are finite."""
    a, b = arm(tmp_path / "a", stage(ttfts(1)), warmup_requests=0), failing(tmp_path / "b", 4, 0.8)
    for arms, sign in (([a, b], 1), ([b, a], -1)):
        result = compare(arms)
        side, other = ("reference_s", "other_s")[::sign]
        for q in (0.9, 0.95, 0.99):
            held = quantiles(result, "ttft")[q]
            assert held[side] == pytest.approx(sorted(ttfts(1))[round(1000 * q) - 1], abs=1e-6)
            assert held[other] is held["change"] is None
            assert (held["infinite"], held["verdict"], held["slower"]) == ([other[:-2]], "differs", sign > 0)
        assert quantiles(result, "ttft")[0.1]["verdict"] == "differs"  # faster: 0.8 times p13 of the answers
        tail = dict(zip("AB"[::sign], rows(result)["ttft_p99_over_p50"]["values"], strict=True))
        assert tail["A"] == pytest.approx(sorted(ttfts(1))[989] / sorted(ttfts(1))[499], rel=1e-4)
        assert tail["B"] is None
        errors = rows(result)["error_rate"]
        assert sorted(errors["values"]) == [0.0, 0.25]
        assert errors["winner"] == "A"
        assert result["sentence"].startswith("Failed or cut off: ")
        assert "at some quantiles and slower or infinite at others in TTFT" in result["sentence"]
        terminal = io.StringIO()
        render_comparison(result, Console(file=terminal, width=80))
        assert "∞" in terminal.getvalue()
        assert "250 of 1,000" in terminal.getvalue()
        write_comparison_page(tmp_path / "page.html", result)
    both = quantiles(compare([b, failing(tmp_path / "c", 3)]), "ttft")[0.99]
    assert (both["infinite"], both["verdict"]) == (["reference", "other"], "unknown")


def test_ten_failures_of_a_thousand_are_a_difference_and_two_are_not(tmp_path: Path) -> None:
    """Pooled share 11/2002: s.e. sqrt(11/2002 x 1991/2002 x 2/1000) = 0.331 points, more than the blocks' 0.229; z = 3.02."""
    a = arm(tmp_path / "a", stage(ttfts(1)), seed=1, warmup_requests=0)
    errors = rows(compare([a, failing(tmp_path / "b", 100, seed=2)]))["error_rate"]
    assert errors["winner"] == "A"
    found = errors["changes"][1]
    assert found["change"] == pytest.approx(0.01)
    assert found["change_ci"] == pytest.approx([0.01 - 1.96 * 0.003306, 0.01 + 1.96 * 0.003306], abs=2e-5)
    assert found["p"] == pytest.approx(0.00249, rel=0.01)
    few = rows(compare([a, failing(tmp_path / "c", 500, seed=2)]))["error_rate"]
    assert (few["verdict"], few["winner"]) == ("equal", None)  # 0.2 points at most 0.55: within one point


def test_what_was_cut_off_is_counted_apart_from_failures_and_both_tables_say_what_they_count(
    tmp_path: Path,
) -> None:
    """Of 1000 requests 10 fail and 40 are given up: 10 failed in the whole run, 5 % failed or cut off."""
    made = stage(ttfts(1))
    for r in made.records[::20]:
        r.status = "http_error" if r.request_id % 100 == 0 else "unfinished"
    b = arm(tmp_path / "b", made, warmup_requests=0)
    result = compare([arm(tmp_path / "a", stage(ttfts(1)), warmup_requests=0), b])
    runs, scores = tables(result)[0], next(t for t in tables(result) if t.title == "Scorecard")
    assert (runs.columns[1].head, runs.columns[1].unit) == ("failed", "whole run")
    assert [row[1].text for row in runs.rows] == ["0 of 1,000", "10 of 1,000, 40 cut off"]
    assert scores.rows[0][0].text == "failed or cut off, where compared"
    assert [cell.text for cell in scores.rows[0][1:3]] == ["0.00%", "5.00%"]


def test_failures_below_the_tail_leave_its_figure(tmp_path: Path) -> None:
    """9 of 1000 fail: the 990th of all is the 990th of the 991 answers, a finite p99."""
    a, b = arm(tmp_path / "a", stage(ttfts(1)), warmup_requests=0), failing(tmp_path / "b", 112)
    answered = np.delete(ttfts(1), np.arange(0, 1000, 112))
    held = quantiles(compare([a, b]), "ttft")[0.99]
    assert held["infinite"] == []
    assert held["other_s"] == pytest.approx(np.sort(answered)[989], abs=1e-6)


def test_rounds_take_out_what_the_order_does() -> None:
    """Log ratios 0.02 ± 0.1 by order: mean 0.02 without scatter. In one order only, the 0.12 cannot be told apart."""
    order = np.array([1.0, -1.0, 1.0, -1.0])
    change = between_rounds(0.02 + 0.1 * order, order)
    assert change.log_ratio == pytest.approx(0.02)
    assert change.se == 0.0
    assert change.df == 2.0
    naive = between_rounds(0.02 + 0.1 * np.ones(4), np.ones(4))
    assert naive.log_ratio == pytest.approx(0.12)
    assert [enough_pairs(o) for o in ([1.0, -1.0], [1.0], [1.0, 1.0], [1.0, -1.0, 1.0])] == [
        False,
        False,
        True,
        True,
    ]


def test_an_end_that_is_not_known_is_a_question_mark_on_either_side() -> None:
    """t(0.975) of 1 degree is 12.7: with se 1 the ends are 1 / 330,000 and 330,000 times."""
    change = log_change(0.0, 1.0, 1.0)
    assert change.ci == (None, None)
    assert change.smallest_seen(1) is None
    assert change.verdict(real=True) == "open"
    assert log_change(0.0, 0.5, 1.0).ci == pytest.approx((np.expm1(-6.353), np.expm1(6.353)), rel=1e-3)


def test_a_lower_end_among_all_of_the_other_samples_is_not_known(tmp_path: Path) -> None:
    """Four fifths of 320 requests took 0.1 ms, the others over 0.2 s: the interval of p80 reaches into the gap between."""
    values = np.where(np.arange(320) % 160 < 128, 1e-4, np.linspace(0.2, 0.4, 320))
    result = compare([arm(tmp_path / n, stage(values), seed=s) for n, s in (("a", 1), ("b", 2))])
    ends = [end for q in quantiles(result, "ttft").values() if q["change_ci"] for end in q["change_ci"]]
    assert None in ends
    assert all(end is None or abs(np.log1p(end)) < np.log(1000.1) for end in ends)


def test_a_ttft_of_0_has_no_ratio_and_breaks_nothing(tmp_path: Path) -> None:
    """Another tool's run may say 0 s; its other metrics are compared."""
    a, b = (arm(tmp_path / n, stage(np.zeros(400)), ["ttft_p99=1s"], usd=2.0) for n in "ab")
    result = compare([a, b])
    assert {q["verdict"] for q in quantiles(result, "ttft").values()} == {"unknown"}
    assert all(q["reason"].startswith("0") for q in quantiles(result, "ttft").values())
    assert rows(result)["ttft_p99_over_p50"]["reasons"][0].startswith("0")
    assert quantiles(result, "tpot")[0.5]["verdict"] == "equal"
    assert result["sentence"] == "No difference between A and B is shown; TTFT could not be compared."
    write_comparison_page(tmp_path / "page.html", result)
    assert "TTFT could not be compared" in comparison_markdown(result)


def test_stages_of_other_lengths_take_no_part_and_that_is_said(tmp_path: Path) -> None:
    """B's p99 lengths take ten times as long, at the same load: nothing of it may touch the comparison."""
    slow = stage(ttfts(1, 400, 10.0), start_s=100.0, extra={"lengths": "p99"})
    for r in slow.records:
        r.request_id += 1000
    a, plain = arm(tmp_path / "a", stage(ttfts(1))), arm(tmp_path / "b", stage(ttfts(1)))
    result = compare([a, arm(tmp_path / "c", [stage(ttfts(1)), slow])])
    assert result["shift"][0]["quantiles"] == compare([a, plain])["shift"][0]["quantiles"]
    (note,) = result["notes"]
    assert note.startswith("C: its stages at other lengths (--lengths p99) are left out")
    assert result["runs"][1]["other_lengths"] == ["p99"]
    assert "other lengths" in comparison_markdown(result)


def test_offline_a_cost_wins_where_more_concurrency_adds_nothing(tmp_path: Path) -> None:
    """A and C stay at 20 answers/s from 4 to 8 in flight; B is only known with 4."""

    def closed(path: Path, levels: Sequence[int], usd: float) -> Arm:
        stages = []
        for k, users in enumerate(levels):
            start, life_s = 100.0 * k, users / RATE
            records = [
                request(1000 * k + i, start + i / RATE, ttft_s=life_s - 0.04, gaps_s=[0.01] * 4)
                for i in range(1000)
            ]
            stages.append(Stage(records, 50.0, start, concurrency=users))
        return arm(path, stages, usd=usd)

    a, b, c = (
        closed(tmp_path / n, x, usd)
        for n, x, usd in (("a", (4, 8), 2.0), ("b", (4,), 1.0), ("c", (4, 8), 1.0))
    )
    tokens = rows(compare([a, b]))["usd_per_million_output_tokens"]
    assert tokens["values"] == pytest.approx(
        [2 / 0.36, 1 / 0.36], rel=0.01
    )  # 100 tokens/s are 0.36 million an hour
    assert tokens["winner"] == "B"  # more than what is known of it would make it cheaper still
    assert tokens["note"] == "one instance at its best stage"
    dearer = rows(compare([c, Arm("B", b.judged, 1, 2.0)]))["usd_per_million_output_tokens"]
    assert dearer["winner"] is None
    assert "do not grow" in dearer["reason"]
    assert rows(compare([a, c]))["usd_per_million_output_tokens"]["winner"] == "C"


def test_runs_of_one_class_are_compared_as_those_of_none(tmp_path: Path) -> None:
    records = [
        request(i, i / RATE, ttft_s=float(t), gaps_s=[0.01] * 4, class_="chat")
        for i, t in enumerate(ttfts(1))
    ]
    made = [arm(tmp_path / n, Stage(records, 50.0, offered_rps=RATE), ["ttft_p99=1s"]) for n in "ab"]
    plain = [arm(tmp_path / n, stage(ttfts(1)), ["ttft_p99=1s"]) for n in "cd"]
    of_class, of_none = compare(made), compare(plain)
    assert [t["quantiles"] for t in of_class["shift"]] == [t["quantiles"] for t in of_none["shift"]]
    assert [r["values"] for r in of_class["scorecard"]] == [r["values"] for r in of_none["scorecard"]]


def test_student_interval_and_smallest_difference() -> None:
    """Four degrees of freedom: t(0.975) = 2.776, t(0.8) = 0.941; se 0.01: 2.82 % either side, 3.79 % seen in 8 of 10 cases."""
    change = log_change(0.0, 0.01, 4.0)
    assert change.ci == pytest.approx((np.expm1(-0.02776), np.expm1(0.02776)), abs=1e-5)
    assert change.p == 1.0
    assert change.smallest_seen(1) == pytest.approx(np.expm1(0.03717), abs=1e-4)
    assert log_change(0.0, 0.01, 4.0).verdict(real=False) == "equal"
    assert log_change(0.01, 1e-6, 4.0).verdict(real=True) == "equal"  # sure, and too small to matter


# --- are they comparable? --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "said", "change"),
    [
        ("workload.name", "--workload: A synthetic; B other", {"workload": {"name": "other", "arrivals": "poisson", "prompts": "unique"}}),
        ("workload.output_tokens.text", "--output-tokens: A not given; B 64", {"workload": {"name": "synthetic", "arrivals": "poisson", "prompts": "unique", "output_tokens": {"text": "64"}}}),
        ("workload.tokenizer.name", "--tokenizer: A not given; B server", {"workload": {"name": "synthetic", "arrivals": "poisson", "prompts": "unique", "tokenizer": {"name": "server"}}}),
        ("model", "--model: A M; B N", {"endpoint": {"api": "chat", "model": "N"}}),
        ("api", "--api: A chat; B completions", {"endpoint": {"api": "completions", "model": "M"}}),
        ("client.connections", "--connections: A not given; B new", {"locked": {"connections": "new"}}),
        ("client.timestamps", "--timestamps: A not given; B kernel", {"locked": {"timestamps": "kernel"}}),
        ("client.think_s", "--think-time: A not given; B 1", {"locked": {"think_s": 1.0}}),
        ("extra_body.max_tokens", "--extra-body max_tokens: A not given; B 64", {"locked": {"extra_body": {"max_tokens": 64}}}),
        ("predicted", "predicted: A no; B yes", {"predicted": True}),
    ],
)  # fmt: skip
def test_what_differs_is_named_and_nothing_is_compared(
    tmp_path: Path, ampacity: Any, capsys: Any, variable: str, said: str, change: dict[str, Any]
) -> None:
    make_run(tmp_path / "a", [stage(ttfts(1, 200))], run_id="a")
    make_run(tmp_path / "b", [stage(ttfts(1, 200))], run_id="b", **change)
    assert ampacity("compare", tmp_path / "a", tmp_path / "b") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"differ in {said} (--anyway" in printed.err
    assert printed.err.count("\n") == 1
    assert ampacity("compare", tmp_path / "a", tmp_path / "b", "--anyway", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["differences"]
    assert [row["variable"] for row in listed] == [variable]


def test_slos_lengths_and_cache_that_differ_are_named(tmp_path: Path) -> None:
    def changed(path: Path, slos: Sequence[str] = ("ttft_p99=1s",), **columns: Any) -> Arm:
        records = [request(i, i / RATE, ttft_s=0.1, gaps_s=[0.01] * 4, **columns) for i in range(200)]
        return arm(path, Stage(records, 10.0, offered_rps=RATE), slos)

    a = changed(tmp_path / "a", cached_tokens=0)
    for name, other in (
        ("slos", changed(tmp_path / "b", ["ttft_p99=2s"], cached_tokens=0)),
        ("realised.input_tokens", changed(tmp_path / "c", input_tokens=120, cached_tokens=0)),
        ("realised.output_tokens", changed(tmp_path / "d", output_tokens=7, cached_tokens=0)),
        ("realised.cached_token_share", changed(tmp_path / "e", cached_tokens=50)),
    ):
        assert [row["variable"] for row in differences([a, other])] == [name]
    close = changed(tmp_path / "f", input_tokens=105, cached_tokens=2)  # 5 % longer, 2 points of cache
    assert differences([a, close]) == []


def test_what_was_counted_or_is_the_engines_name_makes_no_other_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two presets in virtual time, over other loads: the context cuts more of the longer run, and texts are sent more often."""
    made: list[Arm] = []
    find: dict[str, Any] = {"drive": make_search("50%", None, 0, False).run, "experiment": "search"}
    for name, step, how, rates in (("a", "0.010", {}, "5,10"), ("b", "0.012", {}, "5,10,40"), ("c", "0.010", find, None), ("d", "0.020", find, None)):  # fmt: skip
        settings = make_settings({
            "url": "http://a/v1", "input_tokens": "lognormal:p50=100,p99=500", "output_tokens": "2", "duration": "20s",
            "slo": ["ttft_p50=200ms"], "max_requests": "600", "out": str(tmp_path / name), **({"rates": rates} if rates else {}),
        })  # fmt: skip
        engine = replace(find_config(f"linear:{step},0.001"), max_model_len=300)
        quiet = Progress(Console(file=io.StringIO()))
        monkeypatch.setattr("ampacity.experiments.predict.REQUESTS_MIN", 60)
        run = load_run(asyncio.run(predict(settings, engine, ["ampacity"], quiet, **how)))
        run.meta["workload"]["prompts"] = (
            f"9 from a.jsonl, each sent {1.5 + len(made)} times in the largest stage"
        )
        made.append(Arm(name, prepare(run, limited_too=True), 1, None))
    for one, other in (made[:2], made[2:]):
        cut = [a.judged.run.meta["workload"]["clipped_to_context"] for a in (one, other)]
        assert cut[0] != cut[1]
        assert one.judged.run.meta["endpoint"]["model"] != other.judged.run.meta["endpoint"]["model"]
        assert differences([one, other]) == []
        sentence = compare([one, other])["sentence"]
        assert sentence.count("a is better in ") <= 1  # with all that it won
        assert ", req/s" not in sentence


def test_another_tools_definitions_are_listed_beside_ours(tmp_path: Path) -> None:
    """Known fault: two tools give very different TTFT for one server and nobody can say why."""
    told = {
        "tool": "X",
        "definitions": [{"what": "TTFT", "theirs": "first chunk, role or not", "ours": "first token"}],
    }
    a = arm(tmp_path / "a", stage(ttfts(1, 200)))
    b = arm(tmp_path / "b", stage(ttfts(1, 200)), imported=told)
    row = {"variable": "definition of TTFT", "values": ["first token", "first chunk, role or not"]}
    assert row in differences([a, b])
    assert differences([b, arm(tmp_path / "c", stage(ttfts(1, 200)), imported=told)]) == []


def test_several_differences_are_listed_each(tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    make_run(tmp_path / "a", [stage(ttfts(1, 200))], run_id="a")
    make_run(tmp_path / "b", [stage(ttfts(1, 200))], run_id="b", endpoint={"api": "chat", "model": "N"}, locked={"timestamps": "kernel"})  # fmt: skip
    assert ampacity("compare", tmp_path / "a", tmp_path / "b") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "  --model: A M; B N"
    assert lines[1] == "  --timestamps: A not given; B kernel"
    assert "differ in --model, --timestamps (--anyway" in lines[2]


def test_fields_of_one_option_are_one_difference_and_values_that_read_alike_are_told_apart() -> None:
    rows: list[dict[str, Any]] = [
        {"variable": "workload.input_tokens.mean", "values": [100.0, 120.0]},
        {"variable": "workload.input_tokens.text", "values": ["fixed at 100", "fixed at 120"]},
        {"variable": "slos", "values": [["ttft_p99=1s", "itl_p99=50ms"], []]},
        {"variable": "extra_body.n", "values": [1, "1"]},
        {"variable": "modelled", "values": [None, True]},
        {"variable": "workload.images.count", "values": [1, 2.5]},
    ]
    assert in_words(rows) == {
        "--extra-body n": ["1", '"1"'],
        "--input-tokens": ["fixed at 100", "fixed at 120"],
        "--slo": ["ttft_p99=1s, itl_p99=50ms", "none"],
        "modelled": ["not given", "yes"],
        "workload: images.count": ["1", "2.5"],
    }


def test_stages_that_the_client_limited_are_left_out_and_said(tmp_path: Path) -> None:
    slow = stage(ttfts(1, 400, 3.0), 40.0, client_limited=True, start_s=100.0)
    for r in slow.records:
        r.request_id += 1000
    a = arm(tmp_path / "a", [stage(ttfts(1)), slow])
    b = arm(tmp_path / "b", stage(ttfts(1)))
    assert differences([a, b]) == []  # what is left of them can be compared
    result = compare([a, b])
    assert result["level"] == "20/s"
    assert len(result["curves"][0]["stages"]) == 1
    assert result["notes"] == ["A: 1 stage is left out, the client was the limit in it (index 1)."]
    c = arm(tmp_path / "c", [stage(ttfts(1)), later(stage(ttfts(1, 1500), 60.0), 100.0, 1000)])
    offered = rows(compare([a, c]))["output_tokens_per_s_per_gpu"]
    assert offered["values"] == pytest.approx([100, 300], rel=0.02)  # at 20/s and at 60/s, five tokens each
    assert offered["winner"] is None  # nobody knows what A would do at 60/s
    assert "not what it can carry" in offered["reason"]


# --- what is no evidence, and the files ------------------------------------------------------------------------


def broken(path: Path, how: str) -> Path:
    make_run(path, [stage(ttfts(1, 200))], run_id="b", killed=how == "killed")
    meta = json.loads((path / "run.json").read_text())
    parquet = path / "requests.parquet"
    if how == "truncated":
        parquet.write_bytes(parquet.read_bytes()[:3000])
    elif how == "tampered":
        meta["stages"][0]["scheduled_requests"] = 300
    elif how == "newer":
        meta["schema_version"] = 9
    elif how == "empty":
        meta["stages"] = []
    elif how == "aborted":
        meta["status"] = "aborted"
    elif how == "no run":
        return path / "nothing"
    (path / "run.json").write_text(json.dumps(meta))
    return path


def test_a_run_that_is_still_going_on_is_refused_as_such(tmp_path: Path) -> None:
    run = replace(make_run(tmp_path / "a", [stage(ttfts(1, 200))], killed=True), going_s=4.2)
    with pytest.raises(CompareError, match="is still running, last written 4 s ago: wait for its end"):
        prepare(run)


@pytest.mark.parametrize(
    ("how", "says"),
    [("truncated", "requests.parquet cannot be read"), ("tampered", "200 of 300"), ("newer", "schema_version 9"), ("empty", "is empty"),
     ("aborted", "is aborted"), ("killed", "was killed"), ("no run", "no run directory")],
)  # fmt: skip
def test_a_run_that_is_no_evidence_is_one_clear_line(tmp_path: Path, ampacity: Any, capsys: Any, how: str, says: str) -> None:  # fmt: skip
    make_run(tmp_path / "a", [stage(ttfts(1, 200))], run_id="a")
    assert ampacity("compare", tmp_path / "a", broken(tmp_path / "b", how), "--anyway") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--gpus", "C=2"], "--gpus C=2"), (["--gpus", "B=x"], "--gpus B=x"), (["--gpu-hour", "0"], "--gpu-hour 0"),
     (["--labels", "A=none.jsonl"], "none.jsonl"), (["--html", "no/such/dir.html"], "cannot be written")],
)  # fmt: skip
def test_options_that_mean_nothing_are_one_clear_line(tmp_path: Path, ampacity: Any, capsys: Any, options: list[str], says: str) -> None:  # fmt: skip
    for name in "ab":
        make_run(tmp_path / name, [stage(ttfts(1, 200))], run_id=name)
    assert ampacity("compare", tmp_path / "a", tmp_path / "b", *options) == 2
    assert says in capsys.readouterr().err


def test_one_run_or_a_run_twice_is_refused(tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    make_run(tmp_path / "a", [stage(ttfts(1, 200))])
    assert ampacity("compare", tmp_path / "a") == 2
    assert ampacity("compare", tmp_path / "a", tmp_path / "a") == 2
    assert "given twice" in capsys.readouterr().err
    with pytest.raises(CompareError, match="two run directories"):
        compare([arm(tmp_path / "x", stage(ttfts(1, 200)))])


def test_markdown_and_csv_hold_the_figures(tmp_path: Path) -> None:
    made = [
        arm(tmp_path / n, stage(ttfts(1, 1000, s)), ["ttft_p99=1s"], usd=2.0)
        for n, s in (("a", 1.0), ("b|<i>", 1.2))
    ]
    result = compare([Arm("A", made[0].judged, 1, 2.0), Arm("B", made[1].judged, 2, 2.5)])
    text = comparison_markdown(result)
    assert "A: 1 GPU × $2/h; B: 2 GPUs × $2.5/h" in text  # what the costs rest on
    assert "b\\|\\<i>" in text
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    read = list(csv.DictReader(io.StringIO(comparison_csv(result))))
    line = next(r for r in read if r["name"] == "ttft_p50_s" and r["run"] == "B")
    assert float(line["change"]) == pytest.approx(0.2, abs=1e-5)
    assert line["verdict"] == "differs"
    assert {r["run"] for r in read} == {"A", "B"}
    assert [(r["run"], r["value"]) for r in read if r["name"] == "gpu_hour_usd"] == [
        ("A", "2.0"),
        ("B", "2.5"),
    ]


def test_a_change_of_another_sign_than_its_two_figures_is_explained(tmp_path: Path) -> None:
    """A: 100.1 to 200 ms evenly, p90 190 ms. B: 3 % more, but ranks 835 to 905 are one plateau at 189 ms.

    With A's nine marks (185 to 195 ms) moved by 1.79 % a tenth of B is above them in the mean: 172 of 1000 above the lowest (all of
    the plateau), 95 above six, 85 and 73 above the two highest: 172 + 6 x 95 + 85 + 73 = 900.
    """
    a = 0.1 + np.arange(1, 1001) * 1e-4
    b = np.where((a >= 0.18345) & (a <= 0.19055), 0.189, 1.03 * a)
    order = np.random.default_rng(2).permutation(1000)
    result = compare([arm(tmp_path / n, stage(x[order]), warmup_requests=0) for n, x in (("a", a), ("b", b))])
    found = quantiles(result, "ttft")[0.9]
    assert (found["reference_s"], found["other_s"]) == (pytest.approx(0.190), pytest.approx(0.189))
    assert found["change"] == pytest.approx(0.0179, abs=0.0003)
    terminal = io.StringIO()
    render_comparison(result, Console(file=terminal, width=100))
    write_comparison_page(tmp_path / "page.html", result)
    for text in (terminal.getvalue(), comparison_markdown(result), (tmp_path / "page.html").read_text()):
        told = " ".join(html.unescape(text).split())
        assert told.count(OTHER_SIGN) >= 2  # of TTFT and of E2E, which is 40 ms longer
        assert OF_NEIGHBOURS in told


# --- docs/compare.md -------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_docs_says_what_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ampacity: Any, capsys: Any
) -> None:
    text = (Path(__file__).parent.parent / "docs/compare.md").read_text()
    first, *commands = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)[0].splitlines()
    monkeypatch.chdir(tmp_path)
    for command in [*commands, "ampacity compare runs/a runs/b --json"]:
        capsys.readouterr()
        program, *words = shlex.split(
            command.replace("$common", shlex.split(first)[0].removeprefix("common="))
        )
        assert program == "ampacity"
        assert ampacity(*words) == 0
    result = json.loads(capsys.readouterr().out)
    assert "B is slower than A in TTFT, ITL, TPOT, E2E" in result["sentence"]
    cost = rows(result)["usd_per_thousand_good_requests"]
    assert cost["winner"] is None
    assert cost["changes"][1]["change"] == pytest.approx(-0.25, abs=0.01)
    for metric in ("itl", "tpot", "e2e"):
        assert 0.04 < quantiles(result, metric)[0.5]["change"] < 0.1
    assert "B is slower" in Path("compare.md").read_text()
    assert "B is slower" in Path("compare.html").read_text()
