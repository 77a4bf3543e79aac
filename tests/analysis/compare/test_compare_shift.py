"""Differences by quantile: real ones are found, noise and failures are told apart from them."""

import html
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from ampacity.analysis.change import engine
from ampacity.analysis.change.results import Comparison
from ampacity.analysis.compare.findings import _sentence
from ampacity.analysis.compare.pairs import ComparedRun
from ampacity.analysis.compare.scorecard import compare
from ampacity.reports.change.compare import (
    comparison_markdown,
    comparison_screen,
    render_comparison,
    write_comparison_page,
)
from tests.support.compared_runs import RATE, arm, quantiles, rows, stage, ttfts
from tests.support.repeats import often


def failing(
    path: Path,
    every: int,
    scale: float = 1.0,
    n: int = 1000,
    status: str = "http_error",
    **meta: Any,
) -> ComparedRun:
    """Each request whose number is a multiple of ``every`` fails."""
    made = stage(ttfts(1, n, scale), failed=range(0, n, every), status=status)
    return arm(path, made, warmup_requests=0, **meta)


def test_equal_runs_are_equal_and_ten_percent_is_found_at_every_quantile(tmp_path: Path) -> None:
    a = arm(tmp_path / "a", stage(ttfts(1, 2000)))
    same = compare([a, arm(tmp_path / "b", stage(ttfts(1, 2000)))])
    assert same.sentence == "No difference between A and B is shown, latencies at 20/s."
    assert same.same_schedule is True
    assert quantiles(same, "ttft")[0.5].verdict == "equal"
    found = quantiles(compare([a, arm(tmp_path / "c", stage(ttfts(1, 2000, 1.1)))]), "ttft")
    assert list(found) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
    for q, held in found.items():
        assert held.change == pytest.approx(0.1, abs=1e-6)
        assert held.change_ci[0] < 0.1 < held.change_ci[1]
        assert held.verdict == "differs" or q > 0.95


def test_noise_is_open_not_a_finding(tmp_path: Path) -> None:
    """Known fault: noise hides and invents regressions. 300 requests each, 4 % apart, other seeds:
    the interval holds 0."""
    a = arm(tmp_path / "a", stage(ttfts(1, 300)), seed=1)
    result = compare([a, arm(tmp_path / "b", stage(ttfts(2, 300, 1.02)), seed=2)])
    found = quantiles(result, "ttft")[0.5]
    assert found.change_ci[0] < 0 < found.change_ci[1]
    assert found.verdict == "inconclusive"
    assert result.same_schedule is False
    assert rows(result)["ttft_p99_over_p50"].winner is None


def test_two_modes_with_the_same_median_are_found(tmp_path: Path) -> None:
    """Known fault: the mean stays while the shape turns bimodal. Half at 60 ms, half at 140 ms,
    around 100 ms."""
    rng = np.random.default_rng(4)
    one = rng.normal(0.1, 0.002, 2000)
    two = np.where(rng.random(2000) < 0.5, 0.06, 0.14) + rng.normal(0, 0.002, 2000)
    two[two.argsort()[950:1050]] = 0.1  # a bridge, so that the median is 100 ms
    assert np.mean(one) == pytest.approx(np.mean(two), rel=0.02)
    found = quantiles(
        compare([arm(tmp_path / "a", stage(one)), arm(tmp_path / "b", stage(two))]), "ttft"
    )
    assert found[0.5].verdict != "differs"
    assert found[0.2].verdict == found[0.8].verdict == "differs"
    assert found[0.2].change < -0.3 < 0.3 < found[0.8].change


def test_false_findings_stay_rare_over_all_quantiles_and_metrics_together(tmp_path: Path) -> None:
    """A/A pairs of independent seeds; with 5 % at most, 3 or more of 8 have a chance of 0.6 %, 4 or
    more of 16 one of 0.7 %."""
    false, n = 0, often(8, 16)
    for k in range(n):
        pair = [
            arm(tmp_path / f"{n}{k}", stage(ttfts(2 * k + i, 400)), seed=2 * k + i)
            for i, n in enumerate("ab")
        ]
        result = compare(pair)
        false += any(q.verdict == "differs" for s in result.shift for q in s.quantiles)
    assert false <= (2 if n == 8 else 3)


def test_a_run_that_fails_is_not_faster_and_the_other_keeps_its_figures(tmp_path: Path) -> None:
    """B's answers are a fifth faster, and a quarter of its requests fail: its p80 and above are
    infinite, A's are finite."""
    a, b = arm(tmp_path / "a", stage(ttfts(1)), warmup_requests=0), failing(tmp_path / "b", 4, 0.8)
    for arms, sign in (([a, b], 1), ([b, a], -1)):
        result = compare(arms)
        side, other = ("reference_s", "other_s")[::sign]
        for q in (0.9, 0.95, 0.99):
            held = quantiles(result, "ttft")[q]
            assert getattr(held, side) == pytest.approx(
                sorted(ttfts(1))[round(1000 * q) - 1], abs=1e-6
            )
            assert getattr(held, other) is held.change is None
            assert (held.infinite, held.verdict, held.slower) == ([other[:-2]], "differs", sign > 0)
        # faster: 0.8 times p13 of the answers
        assert quantiles(result, "ttft")[0.1].verdict == "differs"
        tail = dict(zip("AB"[::sign], rows(result)["ttft_p99_over_p50"].values, strict=True))
        assert tail["A"] == pytest.approx(sorted(ttfts(1))[989] / sorted(ttfts(1))[499], rel=1e-4)
        assert tail["B"] is None
        errors = rows(result)["error_rate"]
        assert sorted(errors.values) == [0.0, 0.25]
        assert errors.winner == "A"
        assert result.sentence.startswith("Failed or cut off at 20/s: ")
        assert "at some quantiles and slower or infinite at others in TTFT" in result.sentence
        terminal = io.StringIO()
        render_comparison(result, Console(file=terminal, width=80))
        assert "∞" in terminal.getvalue()
        assert "250 of 1,000" in terminal.getvalue()
        write_comparison_page(tmp_path / "page.html", result)
    slow = compare(
        [
            a,
            arm(
                tmp_path / "s",
                stage(np.where(np.arange(1000) % 5, ttfts(1), 3 * ttfts(1))),
                warmup_requests=0,
            ),
        ]
    )
    assert slow.sentence.startswith("A is faster than S in TTFT, E2E at 20/s (one run of each")
    both = quantiles(compare([b, failing(tmp_path / "c", 3)]), "ttft")[0.99]
    assert (both.infinite, both.verdict) == (["reference", "other"], "unknown")


def test_what_was_cut_off_is_not_called_failed(tmp_path: Path) -> None:
    """Of B's 1000 requests 20 are cut off unfinished: its p99 lies among them, and how long they
    would have taken nobody knows."""
    a, failed = arm(tmp_path / "a", stage(ttfts(1)), warmup_requests=0), failing(tmp_path / "c", 50)
    result = compare([a, failing(tmp_path / "b", 50, status="unfinished")])
    held, why = (
        quantiles(result, "ttft")[0.99],
        "infinite or unknown: requests that were in flight at cutoff reach into it",
    )
    assert (held.infinite, held.reason) == (["other"], why)
    assert rows(result)["ttft_p99_over_p50"].reasons == [None, why]
    held = quantiles(compare([a, failed]), "ttft")[0.99]
    assert held.reason == "infinite: requests that failed reach into it"
    held = quantiles(compare([failed, failing(tmp_path / "d", 50, status="unfinished")]), "ttft")[
        0.99
    ]
    assert held.reason == "infinite: requests that failed or were in flight at cutoff reach into it"


def test_ten_failures_of_a_thousand_are_a_difference_and_two_are_not(tmp_path: Path) -> None:
    """Pooled share 11/2002: s.e. sqrt(11/2002 x 1991/2002 x 2/1000) = 0.331 points, more than the
    blocks' 0.229; z = 3.02."""
    a = arm(tmp_path / "a", stage(ttfts(1)), seed=1, warmup_requests=0)
    errors = rows(compare([a, failing(tmp_path / "b", 100, seed=2)]))["error_rate"]
    assert errors.winner == "A"
    found = errors.changes[1]
    assert found.change == pytest.approx(0.01)
    expected = pytest.approx([0.01 - 1.96 * 0.003306, 0.01 + 1.96 * 0.003306], abs=2e-5)
    assert found.change_ci == expected
    assert found.p == pytest.approx(0.00249, rel=0.01)
    few = rows(compare([a, failing(tmp_path / "c", 500, seed=2)]))["error_rate"]
    # 0.2 points at most 0.55: within one point
    assert (few.verdict, few.winner) == ("equal", None)


def test_failures_below_the_tail_leave_its_figure(tmp_path: Path) -> None:
    """9 of 1000 fail: the 990th of all is the 990th of the 991 answers, a finite p99."""
    a, b = arm(tmp_path / "a", stage(ttfts(1)), warmup_requests=0), failing(tmp_path / "b", 112)
    answered = np.delete(ttfts(1), np.arange(0, 1000, 112))
    held = quantiles(compare([a, b]), "ttft")[0.99]
    assert held.infinite == []
    assert held.other_s == pytest.approx(np.sort(answered)[989], abs=1e-6)


def test_rounds_take_out_what_the_order_does() -> None:
    """Log ratios 0.02 ± 0.1 by order: mean 0.02 without scatter. In one order only, the 0.12 cannot
    be told apart."""
    order = np.array([1.0, -1.0, 1.0, -1.0])
    change = engine.between_rounds(0.02 + 0.1 * order, order)
    assert change.log_ratio == pytest.approx(0.02)
    assert change.se == 0.0
    assert change.df == 2.0
    naive = engine.between_rounds(0.02 + 0.1 * np.ones(4), np.ones(4))
    assert naive.log_ratio == pytest.approx(0.12)
    assert [
        engine.enough_pairs(o) for o in ([1.0, -1.0], [1.0], [1.0, 1.0], [1.0, -1.0, 1.0])
    ] == json.loads("""[false, false, true,
        true]""")


def test_an_end_that_is_not_known_is_a_question_mark_on_either_side() -> None:
    """t(0.975) of 1 degree is 12.7: with se 1 the ends are 1 / 330,000 and 330,000 times."""
    change = engine.log_change(0.0, 1.0, 1.0)
    assert change.ci == (None, None)
    assert change.smallest_seen(1) is None
    assert change.verdict(real=True) == "inconclusive"
    assert engine.log_change(0.0, 0.5, 1.0).ci == pytest.approx(
        (np.expm1(-6.353), np.expm1(6.353)), rel=1e-3
    )


def test_a_lower_end_among_all_of_the_other_samples_is_not_known(tmp_path: Path) -> None:
    """Four fifths of 320 requests took 0.1 ms, the others over 0.2 s: the interval of p80 reaches
    into the gap between."""
    values = np.where(np.arange(320) % 160 < 128, 1e-4, np.linspace(0.2, 0.4, 320))
    result = compare([arm(tmp_path / n, stage(values), seed=s) for n, s in (("a", 1), ("b", 2))])
    ends = [end for q in quantiles(result, "ttft").values() if q.change_ci for end in q.change_ci]
    assert None in ends
    assert all(end is None or abs(np.log1p(end)) < np.log(1000.1) for end in ends)


def test_a_ttft_of_0_has_no_ratio_and_breaks_nothing(tmp_path: Path) -> None:
    """Another tool's run may say 0 s; its other metrics are compared."""
    a, b = (arm(tmp_path / n, stage(np.zeros(400)), ["ttft_p99=1s"], usd=2.0) for n in "ab")
    result = compare([a, b])
    assert {q.verdict for q in quantiles(result, "ttft").values()} == {"unknown"}
    assert all(q.reason.startswith("0") for q in quantiles(result, "ttft").values())
    assert rows(result)["ttft_p99_over_p50"].reasons[0].startswith("0")
    assert quantiles(result, "tpot")[0.5].verdict == "equal"
    assert (
        result.sentence
        == "No difference between A and B is shown, latencies at 20/s; TTFT could not be compared."
    )
    write_comparison_page(tmp_path / "page.html", result)
    assert "TTFT could not be compared" in comparison_markdown(result)


def test_where_no_latency_could_be_compared_none_is_called_equal(tmp_path: Path) -> None:
    """As in an A/B of a few requests each, of which only the failures are compared."""
    result = compare([arm(tmp_path / n, stage(ttfts(1, 400))) for n in "ab"])
    shifts = [
        replace(shift, quantiles=[replace(q, p=None) for q in shift.quantiles])
        for shift in result.shift
    ]
    first: Any = SimpleNamespace(rounds=False)
    runs: Any = [SimpleNamespace(name=name) for name in "AB"]
    sentence = _sentence(runs, first, [], shifts, "20/s")
    assert sentence == "No latency could be compared; no other difference between A and B is shown."
    answer = comparison_screen(replace(result, sentence=sentence)).answers[0]
    assert answer.text.startswith("not known: no latency could be compared")


def test_student_interval_and_smallest_difference() -> None:
    """Four degrees of freedom: t(0.975) = 2.776, t(0.8) = 0.941; se 0.01: 2.82 % either side, 3.79
    % seen in 8 of 10 cases."""
    change = engine.log_change(0.0, 0.01, 4.0)
    assert change.ci == pytest.approx((np.expm1(-0.02776), np.expm1(0.02776)), abs=1e-5)
    assert change.p == 1.0
    assert change.smallest_seen(1) == pytest.approx(np.expm1(0.03717), abs=1e-4)
    assert engine.log_change(0.0, 0.01, 4.0).verdict(real=False) == "equal"
    # sure, and too small to matter
    assert engine.log_change(0.01, 1e-6, 4.0).verdict(real=True) == "equal"


def test_the_change_is_that_of_the_two_figures_and_no_run_wins_against_them(tmp_path: Path) -> None:
    """A: 100.1 to 200 ms evenly, p90 190 ms. B: 3 % more, but ranks 835 to 905 are one plateau at
    189 ms, 0.5 % less.

    With A's nine marks (185 to 195 ms) moved by 1.79 % a tenth of B is above them in the mean (172
    + 6 x 95 + 85 + 73 = 900 of 9,000). The neighbourhood is slower, the figure itself is not: the
    change is -0.5 %, its interval holds it and 0, and nothing differs."""
    a = 0.1 + np.arange(1, 1001) * 1e-4
    b = np.where((a >= 0.18345) & (a <= 0.19055), 0.189, 1.03 * a)
    order = np.random.default_rng(2).permutation(1000)
    result = compare(
        [arm(tmp_path / n, stage(x[order]), warmup_requests=0) for n, x in (("a", a), ("b", b))]
    )
    found = quantiles(result, "ttft")
    held = found[0.9]
    assert (held.reference_s, held.other_s) == (pytest.approx(0.190), pytest.approx(0.189))
    assert held.change == pytest.approx(0.189 / 0.190 - 1)
    assert held.shift == pytest.approx(0.0179, abs=0.0003)
    assert held.change_ci[0] <= held.change < 0 < held.shift < held.change_ci[1]
    assert held.verdict == "inconclusive"
    for q in found.values():
        assert q.change == pytest.approx(q.other_s / q.reference_s - 1)
    for text in (comparison_markdown(result), rendered(result)):
        assert "-0.5 %" in text
    write_comparison_page(tmp_path / "page.html", result)
    assert "-0.5 %" in html.unescape((tmp_path / "page.html").read_text())


def rendered(result: Comparison) -> str:
    terminal = io.StringIO()
    render_comparison(result, Console(file=terminal, width=120))
    return terminal.getvalue()


def test_a_p99_whose_interval_has_no_upper_end_is_at_least_that(tmp_path: Path) -> None:
    """Of 320 independent requests the 95 % interval of p99 has no upper end (that takes 368); of
    2,000 it has one."""
    few, many = (
        compare(
            [
                arm(tmp_path / f"{n}{k}", stage(ttfts(s, k)), usd=2.0, warmup_requests=0)
                for n, s in (("a", 1), ("b", 2))
            ]
        )
        for k in (320, 2000)
    )
    for result, least in ((few, True), (many, False)):
        held = quantiles(result, "ttft")
        assert held[0.99].at_least == [least, least]
        assert held[0.95].at_least == [False, False]
        assert rows(result)["ttft_p99_s_x_usd_per_hour"].lower_bound == [least, least]
        write_comparison_page(tmp_path / "page.html", result)
        page = html.unescape((tmp_path / "page.html").read_text())
        figure = f"{1e3 * held[0.99].reference_s:.0f} ms"
        for text in (comparison_markdown(result), rendered(result), page):
            assert figure in text
            assert (f"≥ {figure}" in text) == least


def test_a_queue_amplifies_the_noise_of_a_runs_speed() -> None:
    """M/M/1 at a load r: P(N >= n) = r^n, so d ln P / d ln(rate) = n, and of the mean in flight 1 /
    (1 - r): 4 at 0.75.

    A run that is slower by 0.5 % moves P(N >= 4) = 0.316 by 4 x 0.5 % of itself. In a closed loop N
    does not vary."""
    n = np.random.default_rng(3).geometric(0.25, 400_000) - 1.0
    over = (n >= 4).astype(float)
    moved = engine.queue_noise(n, over, np.ones(len(n)))
    assert moved == pytest.approx(engine.ASSUMED_NOISE * 4 * 0.75**4, rel=0.02)
    mean = engine.queue_noise(n, n, np.ones(len(n))) / 3.0
    assert mean == pytest.approx(engine.ASSUMED_NOISE / 0.25, rel=0.03)
    closed = np.full(len(n), 8.0)
    assert engine.queue_noise(closed, over, np.ones(len(n))) == pytest.approx(0.0, abs=1e-12)


def queue_run(path: Path, seed: int, speed: float = 1.0, own: int = 0) -> ComparedRun:
    """M/M/1 at 85 %, 2,000 requests, 3 % of noise in each time; the same ``seed`` sent the same
    work at the same times."""
    rng, noise = np.random.default_rng(seed), np.random.default_rng([seed, own])
    due, service = np.arange(2000) / RATE, rng.exponential(0.85 / RATE, 2000) * speed
    done = np.cumsum(service)
    ttft = done + np.maximum.accumulate(due - np.concatenate([[0.0], done[:-1]])) - due
    return arm(path, stage(ttft * np.exp(noise.normal(0, 0.03, 2000))), ["ttft_p99=60s"], seed=seed)


def test_half_a_per_cent_of_speed_near_saturation_is_no_difference_and_ten_are_one(
    tmp_path: Path,
) -> None:
    """Two runs that are 0.7 % apart, which 0.5 % in each gives half of the time: pairs of which
    none may differ."""
    for seed in range(often(3, 6)):
        a = queue_run(tmp_path / f"a{seed}", seed)
        same = compare([a, queue_run(tmp_path / f"b{seed}", seed, 1.007, 1)])
        assert not [r.name for r in same.scorecard if r.winner]
        assert same.sentence.startswith("No difference")
    slower = compare([a, queue_run(tmp_path / "c", seed, 1.1, 1)])
    assert f"A{seed} is faster than C in TTFT" in slower.sentence
