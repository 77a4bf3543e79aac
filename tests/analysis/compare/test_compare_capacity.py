"""The scorecard: capacities, closed loops, and costs at a capacity."""

import csv
import heapq
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from ampacity.analysis.compare.pairs import ComparedRun
from ampacity.analysis.compare.scorecard import compare
from ampacity.reports.change.compare import comparison_csv, comparison_markdown
from ampacity.reports.change.compare_tables import tables
from tests.support.compared_runs import RATE, arm, later, rows, stage, ttfts
from tests.support.synthetic import Stage, request


def sweep(
    path: Path, slow_at: float, usd: float | None = None, first: float = 10.0, **meta: Any
) -> ComparedRun:
    """10, 20 and 40 requests/s (or those from ``first`` on) inside the SLO below ``slow_at``."""
    stages: list[Stage] = []
    start = 0.0
    for rate in (first, 2 * first, 4 * first):
        values = ttfts(1, 400) * (1.0 if rate < slow_at else 30.0)
        stages.append(later(stage(values, rate), start, 400 * len(stages)))
        start += 400 / rate + 60
    return arm(path, stages, ["ttft_p90=500ms"], usd=usd, **meta)


def test_usable_rates_win_only_where_their_brackets_are_apart(tmp_path: Path) -> None:
    made = (("a", 15, 10.0), ("b", 25, 18.0), ("c", 100, 8.0))
    a, b, c = (sweep(tmp_path / name, at, first=first) for name, at, first in made)
    assert (
        rows(compare([a, b]))["capacity_rps"].verdict == "inconclusive"
    )  # 9.9 to 18.2 and 18 to 34 touch
    found = rows(compare([a, b, c]))["capacity_rps"]
    low, high = found.brackets[0]
    assert (low, high) == a.judged.summary.capacity.capacity_rps_ci
    assert low < 10.5 < 15 < high < 25
    assert found.winner is None
    result = compare([a, c])
    assert rows(result)["capacity_rps"].winner == "C"
    card = next(t for t in tables(result) if t.title == "Scorecard").rows
    assert card[1][2].text == "at least 32.0"
    assert [cell.text for cell in card[2][:3]] == [
        "  its interval",
        f"{low:#.3g} to {high:#.3g}",
        "32.0 to ?",
    ]
    card = next(t for t in tables(result, fits=lambda _: False) if t.title == "Scorecard").rows
    at = next(i for i, row in enumerate(card) if row[0].text.startswith("capacity per instance"))
    assert [cell.text for cell in card[at]][1:] == ["", "", "", "C"]
    assert [cell.text for cell in card[at + 1]][0::2] == ["  A", f"{low:#.3g} to {high:#.3g}", ""]
    assert [cell.text for cell in card[at + 2]][:3] == ["  C", "at least 32.0", "32.0 to ?"]
    assert "at least 32.0" in comparison_markdown(result)
    read = {
        r["run"]: r
        for r in csv.DictReader(io.StringIO(comparison_csv(result)))
        if r["name"] == "capacity_rps"
    }
    assert [read["C"][k] for k in ("bound", "low", "high")] == ["at least", "32.0", ""]
    assert [read["A"][k] for k in ("bound", "high")] == ["", f"{high}"]
    assert float(read["A"]["low"]) == pytest.approx(low)


def closed(path: Path, seed: int, service_s: float) -> ComparedRun:
    """Four servers with gamma service times and a queue, with 4 to 32 users: 4 / ``service_s``
    answers/s; up to 8 users meet the SLO."""
    rng, stages, start = np.random.default_rng(seed), [], 0.0
    for k, users in enumerate((4, 8, 16, 32)):
        free, ready, records = [0.0] * 4, [0.0] * users, []
        for i in range(800):
            due, begin = heapq.heappop(ready), heapq.heappop(free)
            begin = max(due, begin)
            end = begin + rng.gamma(4, service_s / 4)
            heapq.heappush(free, end)
            heapq.heappush(ready, end)
            records.append(
                request(
                    800 * k + i,
                    start + due,
                    ttft_s=begin - due + 0.001,
                    gaps_s=[(end - begin) / 4] * 4,
                )
            )
        stages.append(Stage(records, due, start, concurrency=users))
        start += due + 20
    return arm(path, stages, [f"e2e_p95={5 * service_s:g}s"], usd=2.0)


def test_of_closed_loops_equal_engines_win_nothing_and_a_faster_one_does(tmp_path: Path) -> None:
    """20 answers/s each, of two seeds; one that takes 25 % more time gives 16."""
    made = [
        closed(tmp_path / n, seed, s)
        for n, seed, s in (("a", 2, 0.2), ("b", 5, 0.2), ("c", 3, 0.25))
    ]
    names = ("capacity_rps", "usable_rps_per_gpu", "usd_per_million_output_tokens")
    equal, apart = (rows(compare([made[0], other])) for other in made[1:])
    assert [equal[n].winner for n in names] == [None] * 3
    assert [apart[n].winner for n in names] == ["A"] * 3
    low, high = apart["capacity_rps"].brackets[0]
    assert low < apart["capacity_rps"].values[0] < high


def test_a_closed_loop_that_is_better_by_less_than_2_percent_does_not_win(tmp_path: Path) -> None:
    """Answers at equal steps: 20 and 20.05/s, without any scatter; 21/s wins."""

    def even(name: str, rate: float) -> ComparedRun:
        stages, start = [], 0.0
        for k, (users, life_s) in enumerate(((4, 0.2), (8, 0.4))):
            records = [
                request(400 * k + i, start + i / rate, ttft_s=life_s - 0.04, gaps_s=[0.01] * 4)
                for i in range(400)
            ]
            stages.append(Stage(records, 400 / rate, start, concurrency=users))
            start += 400 / rate + 10
        return arm(tmp_path / name, stages, ["e2e_p95=300ms"], usd=2.0)

    a = even("a", 20.0)
    for name, rate, winner in (("b", 20.05, None), ("c", 21.0, "C")):
        found = rows(compare([a, even(name, rate)]))
        assert [found[n].winner for n in ("capacity_rps", "usd_per_million_output_tokens")] == [
            winner
        ] * 2


def test_usable_rates_that_touch_have_no_cheaper_one_whatever_the_lengths_by_chance(
    tmp_path: Path,
) -> None:
    """A is at 9.9 to 18.2, B at 18 to 34: no dearer at least. Every tenth answer of B has 6 tokens,
    the others 5."""
    made = (("a", 15, 10.0), ("b", 25, 18.0), ("c", 25, 18.0))
    a, b, c = (sweep(tmp_path / name, at, 2.0, first) for name, at, first in made)
    held = b.judged.summary
    longer = held.fleet.output_tokens_mean + 0.25  # 5 % more: enough to part the brackets
    fleet = structs.replace(held.fleet, output_tokens_mean=longer)
    b = replace(b, judged=replace(b.judged, summary=structs.replace(held, fleet=fleet)))
    found = rows(compare([a, b]))["usd_per_million_output_tokens"]
    assert (found.winner, found.verdict) == (None, "inconclusive")
    cheaper = ComparedRun("D", c.judged, 1, 0.8)  # per request less, whatever the rates are
    assert rows(compare([a, cheaper]))["usd_per_million_output_tokens"].winner == "D"
    free = [ComparedRun(x.name, x.judged, 1, 0.0) for x in (a, c)]
    assert rows(compare(free))["usd_per_million_output_tokens"].winner is None


def test_a_usable_rate_wins_over_a_run_that_met_its_slos_nowhere(tmp_path: Path) -> None:
    """A breaks at its lowest load, 5/s: it carries less. B carries 10/s; C, of which 4.5/s is
    known, may be no better."""
    a, b = sweep(tmp_path / "a", 0, first=5.0), sweep(tmp_path / "b", 15)
    found = rows(compare([a, b]))["capacity_rps"]
    assert (found.winner, found.values[0], found.brackets[0]) == ("B", None, (0.0, 5.0))
    assert rows(compare([a, sweep(tmp_path / "c", 8, first=4.5)]))["capacity_rps"].winner is None


def test_a_cost_wins_where_the_usable_rate_of_each_is_known(tmp_path: Path) -> None:
    """The SLO of A, B and D breaks between 9.9 and 18.2/s: A may carry 1.8 times its best stage;
    its cost over 1.7 is no win, over 3 it is.

    Of C, which breaks nowhere, nobody knows what it can carry: more would only help it where it is
    the cheaper one."""
    a, b = sweep(tmp_path / "a", 15, 3.0), sweep(tmp_path / "b", 15, 1.0)
    good = rows(compare([a, b]))["usd_per_thousand_good_requests"]
    assert good.winner == "B"
    assert good.changes[1].change == pytest.approx(-2 / 3)
    half = rows(compare([a, sweep(tmp_path / "d", 15, 1.75)]))["usd_per_thousand_good_requests"]
    assert (half.winner, half.verdict) == (None, "unknown")
    assert "only known to lie in an interval" in half.reason
    for n, usd, winner in (
        ("c", 1.0, "C"),
        ("e", 20.0, None),
    ):  # at 40/s: a twelfth of A's cost; 5/3 of it
        good = rows(compare([a, sweep(tmp_path / n, 100, usd)]))["usd_per_thousand_good_requests"]
        assert good.winner == winner
        assert None not in good.values


def test_slos_that_hold_nowhere_show_no_limit_at_unlike_loads(tmp_path: Path) -> None:
    """Every fourth answer is late at 8 as at 9/s: A and B are equal, and more was offered to B. At
    one load half the price wins."""
    a, b, c = (
        arm(tmp_path / n, stage([0.1, 0.1, 0.1, 1.5] * 150, rate), ["ttft_p90=500ms"], usd=usd)
        for n, rate, usd in (("a", 8.0, 2.0), ("b", 9.0, 2.0), ("c", 8.0, 1.0))
    )
    found = rows(compare([a, b]))
    for name in ("goodput_rps", "goodput_rps_per_gpu", "usd_per_thousand_good_requests"):
        assert found[name].winner is None
        assert "not what it can carry" in found[name].reason
    assert rows(compare([a, c]))["usd_per_thousand_good_requests"].winner == "C"


def test_tokens_win_where_the_others_are_shown_to_give_no_more_of_them(tmp_path: Path) -> None:
    """A's SLO breaks at 20/s, but its tokens go on to grow. Of D, which answers 10/s, the queue
    grows at 20/s: at most half of C's at 40."""
    a, c = (sweep(tmp_path / n, at, 2.0) for n, at in (("a", 15), ("c", 100)))
    behind = later(stage(ttfts(1, 400) + np.arange(400) * (1 / 10 - 1 / 20), 20.0), 100.0, 400)
    d = arm(tmp_path / "d", [stage(ttfts(1, 400), 10.0), behind], ["ttft_p90=500ms"], usd=2.0)
    assert [s.stable for s in d.judged.summary.stages] == [True, False]
    for other, winner in ((a, None), (d, "C")):
        assert rows(compare([other, c]))["output_tokens_per_s_per_gpu"].winner == winner


def test_runs_without_a_common_load_are_compared_by_what_they_carry(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """A carries 10 and breaks at 20, B carries 12 and 24 and breaks at 48: the load to give to both
    is the lower end of A's interval, nearly 10.

    For 1.2 x 299 requests 37 s. Good requests: A's 10/s may be 20/s at most, less than B's 24/s;
    what carries 12/s and breaks at 24 is not shown to be better."""
    a, b = sweep(tmp_path / "a", 15), sweep(tmp_path / "b", 30, first=12.0)
    result = compare([a, b])
    assert result.level is None
    least = a.judged.summary.capacity.capacity_rps_ci[0]
    load = f"{math.floor(100 * least) / 100:g}"
    assert 9.5 < least < 10
    assert result.notes[0].endswith(
        f"with --rates {load} --duration 37s (or longer), the most that all have carried."
    )
    assert result.notes[0].startswith("Latencies and failures are not compared: ")
    found = rows(result)
    assert found["capacity_rps"].winner == "B"
    assert (found["goodput_rps"].winner, found["ttft_p99_over_p50"].winner) == ("B", None)
    near = rows(compare([a, sweep(tmp_path / "c", 15, first=12.0)]))["goodput_rps"]
    assert (near.winner, near.values) == (None, pytest.approx([10, 12]))
    assert "only known to lie in an interval" in near.reason
    assert ampacity("compare", tmp_path / "a", tmp_path / "b") == 0
    said = capsys.readouterr().out
    assert f"--rates {load} " in said
    assert "TTFT of B" not in said  # no table that holds nothing


def test_in_closed_loops_the_concurrency_to_give_to_both_is_said(tmp_path: Path) -> None:
    made = []
    for name, users in (("a", 4), ("b", 8)):
        records = [
            request(i, i / RATE, ttft_s=users / RATE - 0.04, gaps_s=[0.01] * 4) for i in range(1000)
        ]
        made.append(arm(tmp_path / name, Stage(records, 50.0, concurrency=users)))
    assert "with --concurrency 4, the most that all have carried" in " ".join(compare(made).notes)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([1239.0], [1300.0], "with --rates 1230 --duration 30s"),
        ([10.48], [12.0], "with --rates 10.4 --duration 35s"),
        (
            [20.0],
            [5.0, 40.0],
            "with lower --rates than 5, for longer: B is not shown to carry any that was tried",
        ),
    ],
)
def test_the_load_to_give_to_all_is_one_that_each_carried_inside_its_slos(
    tmp_path: Path, a: list[float], b: list[float], said: str
) -> None:
    """Rounded down, without an exponent; 1.2 x 299 requests at 10.4/s take 34.5 s. In the third
    case B violates the SLO from 5/s on."""
    late = 1.0 if len(b) == 1 else 10.0
    made = []
    for name, rates, scale in (("a", a, 1.0), ("b", b, late)):
        stages = [
            later(stage(ttfts(1, 400 if rate < 100 else 8000, scale), rate), 200.0 * k, 400 * k)
            for k, rate in enumerate(rates)
        ]
        made.append(arm(tmp_path / name, stages, ["ttft_p90=500ms"]))
    assert said in " ".join(compare(made).notes)


def test_a_warm_up_that_leaves_the_other_run_nothing_makes_no_common_load(tmp_path: Path) -> None:
    """Of A's 600 requests the first 200 are slow; B has 130 in all, of which fewer than 100 are
    left without so many."""
    slow = ttfts(1, 600) * np.repeat([20.0, 1.0], [200, 400])
    a, b, c = (
        arm(tmp_path / n, stage(x), ["ttft_p90=1s"])
        for n, x in (("a", slow), ("b", ttfts(2, 130)), ("c", ttfts(3, 600)))
    )
    assert a.judged.summary.stages[0].window.warmup_requests > 30
    result = compare([a, b])
    assert result.level is None
    # A misses nothing for certain and is steady: requests are lacking, not a lower load
    expected = "run each again with the same --rates, for longer (--duration): A is not shown"
    assert expected in result.notes[0]
    assert compare([a, c]).level == "20/s"


def test_cost_and_gpus_at_the_usable_rate_have_its_bracket(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """Five tokens an answer, 2 USD/h: at x/s 2/(0.018 x) USD for a million; of C, at least 40/s, at
    most 2/0.72.

    A peak of 100/s with 1.2: ceil(1.2 ceil(100/x)) GPUs at x/s; C ceil(3 x 1.2) = 4 at most."""
    fleet = {"peak_rps": 100.0, "tensor_parallel": 1, "safety_factor": 1.2, "gpu_hour_usd": 2.0}
    a, c = (sweep(tmp_path / n, at, 2.0, fleet_inputs=fleet) for n, at in (("a", 15), ("c", 100)))
    result = compare([a, c])
    found = rows(result)
    cost, gpus, c_max = (
        found[n] for n in ("usd_per_million_output_tokens", "gpus_for_peak", "c_max")
    )
    low, high = a.judged.summary.capacity.capacity_rps_ci
    assert cost.brackets == [
        pytest.approx((2 / 0.018 / high, 2 / 0.018 / low), rel=0.01),
        (None, pytest.approx(2 / 0.72, rel=0.01)),
    ]
    of_report = a.judged.summary.fleet.cost_per_million_output_tokens
    assert cost.values[0] == of_report
    assert (cost.winner, cost.at_least, cost.note) == (
        "C",
        [False, True],
        "one instance at its capacity",
    )
    assert (gpus.brackets, gpus.winner) == (
        [tuple(math.ceil(1.2 * math.ceil(100 / x)) for x in (high, low)), (None, 4)],
        "C",
    )
    assert (c_max.winner, c_max.higher_is_better) == (None, None)
    assert ampacity("compare", "--summary", "full", tmp_path / "a", tmp_path / "c") == 0
    for text in (capsys.readouterr().out, comparison_markdown(result)):
        told = " ".join(text.split())
        assert "at most 2.78" in told
        assert "? to 2.78" in told
        assert "at most 4 " in told
        for basis in ("its capacity", "its best stage"):
            assert f"of one instance at {basis}, at A: 1 GPU × $2.00/h; " in told
    other = sweep(tmp_path / "d", 100, 2.0, fleet_inputs=fleet | {"peak_rps": 50.0})
    assert "gpus_for_peak" not in rows(compare([a, other]))


def test_offline_a_cost_wins_where_more_concurrency_adds_nothing(tmp_path: Path) -> None:
    """A and C stay at 20 answers/s from 4 to 8 in flight; B is only known with 4."""

    def closed(path: Path, levels: Sequence[int], usd: float) -> ComparedRun:
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
    # 100 tokens/s are 0.36 million an hour
    assert tokens.values == pytest.approx([2 / 0.36, 1 / 0.36], rel=0.01)
    assert tokens.winner == "B"  # more than what is known of it would make it cheaper still
    assert tokens.note == "one instance at its best stage"
    dearer = rows(compare([c, ComparedRun("B", b.judged, 1, 2.0)]))["usd_per_million_output_tokens"]
    assert dearer.winner is None
    assert "do not grow" in dearer.reason
    assert rows(compare([a, c]))["usd_per_million_output_tokens"].winner == "C"
