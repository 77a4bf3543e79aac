"""The scorecard of a comparison, by hand: rates, costs, what the capacity gives, who wins."""

from __future__ import annotations

import csv
import heapq
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from rich.cells import cell_len
from rich.console import Console

from ampacity.analysis.change.judged import prepare
from ampacity.analysis.change.results import Comparison
from ampacity.analysis.compare.pairs import ComparedRun
from ampacity.analysis.compare.scorecard import compare
from ampacity.reports.change.compare import comparison_csv, comparison_markdown, render_comparison
from ampacity.reports.change.compare_tables import tables
from tests.support.compared_runs import RATE, arm, later, rows, stage, ttfts
from tests.support.synthetic import Stage, make_run, request


def route(path: Path, hundreds: int, late: int, failed: int, usd_per_10_s: float) -> ComparedRun:
    """10 requests/s; of every 100 some answer late (over 1 s) and some fail, spread at random."""
    rng, records = np.random.default_rng(5), []
    for h in range(hundreds):
        fates = rng.permutation(
            ["late"] * late + ["failed"] * failed + ["good"] * (100 - late - failed)
        )
        for k, fate in enumerate(fates):
            i = 100 * h + k
            if fate == "failed":
                records.append(
                    request(i, i / 10, ttft_s=None, status="http_error", output_tokens_planned=5)
                )
            else:
                records.append(
                    request(i, i / 10, ttft_s=0.1 if fate == "good" else 1.5, gaps_s=[0.01] * 4)
                )
    made = make_run(
        path,
        [Stage(records, 10.0 * hundreds, offered_rps=10.0)],
        ["ttft_p99=1s"],
        run_id=path.name,
        warmup_requests=0,
    )
    # 360 times 10 s is an hour
    return ComparedRun(path.name.upper(), prepare(made), 1, usd_per_10_s * 360)


def test_a_cheaper_accepted_result_beats_more_tokens_per_second(tmp_path: Path) -> None:
    """A: 58 good of 100 in 10 s at 1.10 USD, none failed; B: 85 at 1.45, 15 failed. 1.10/58 >
    1.45/85, and A has more tokens.
    """
    result = compare([route(tmp_path / "a", 1, 42, 0, 1.10), route(tmp_path / "b", 1, 0, 15, 1.45)])
    found = rows(result)
    assert found["goodput_rps"].values == pytest.approx([5.8, 8.5])
    cost = found["usd_per_thousand_good_requests"]
    assert cost.values == pytest.approx([1100 / 58, 1450 / 85])
    assert cost.best == "B"
    tokens = found["output_tokens_per_s_per_gpu"]
    assert tokens.best == "A"
    assert tokens.values[1] == pytest.approx(42.5, rel=0.02)  # an answer ends past the window
    assert cost.winner is None  # a tenth cheaper in 100 requests may be chance


def test_a_rate_comes_from_a_stage_that_is_long_enough_to_have_one(tmp_path: Path) -> None:
    """20/s of which all are good; 52 requests at 30/s, all good too, say nothing of what it carries
    there.
    """
    short = Stage(
        [request(2000 + i, 100 + i / 30, stage=1, ttft_s=0.1) for i in range(52)],
        52 / 30,
        100.0,
        offered_rps=30.0,
    )
    both = [
        arm(tmp_path / n, [stage(ttfts(1)), short], ["ttft_p99=1s"], usd=2.0, warmup_requests=0)
        for n in "ab"
    ]
    assert both[0].judged.summary.stages[1].goodput_rps == pytest.approx(30)
    assert rows(compare(both))["goodput_rps"].values == pytest.approx([20, 20])
    alone = [
        arm(tmp_path / n, stage(ttfts(1, 99)), ["ttft_p99=1s"], usd=2.0, warmup_requests=0)
        for n in "cd"
    ]
    found = rows(compare(alone))
    for name in ("goodput_rps", "usd_per_million_output_tokens"):
        assert found[name].values == [None, None]
        assert all("100 requests" in why for why in found[name].reasons)


def test_of_figures_that_read_the_same_none_leads(tmp_path: Path) -> None:
    """24.996 and 25.004 both read 25.0; 25.0 and 25.1 do not."""
    result = compare([arm(tmp_path / n, stage(ttfts(1, 200)), usd=2.0) for n in "ab"])
    row = next(r for r in result.scorecard if r.name == "ttft_p99_s_x_usd_per_hour")
    lines = [
        structs.replace(row, verdict="open", best="B", values=v)
        for v in ([25.004, 24.996], [25.1, 25.0])
    ]
    result = structs.replace(result, scorecard=lines)
    card = next(t for t in tables(result) if t.title == "Scorecard").rows
    assert [[cells[1].text, cells[2].text, cells[-1].text] for cells in card] == [
        ["25.0", "25.0", "open"],
        ["25.1", "25.0", "open (B)"],
    ]


def test_with_more_requests_the_same_advantage_is_real(tmp_path: Path) -> None:
    result = compare(
        [route(tmp_path / "a", 20, 42, 0, 1.10), route(tmp_path / "b", 20, 0, 15, 1.45)]
    )
    cost = rows(result)["usd_per_thousand_good_requests"]
    assert cost.winner == "B"
    assert cost.changes[1].change == pytest.approx((1.45 / 85) / (1.10 / 58) - 1)
    low, high = cost.changes[1].change_ci
    assert low < -0.1 < high < 0
    assert "B is better in" in result.sentence
    tokens = rows(result)["usd_per_million_output_tokens"]
    # A answered all that was sent: how many tokens it could send is not known
    assert tokens.winner is None
    assert "not what it can carry" in tokens.reason


def test_accepted_answers_are_those_that_a_checker_accepted(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """Of 100 answers inside the SLO 50 and 80 are accepted; 10 s of a GPU at 360 USD/h cost 1 USD:
    20 and 12.5 USD for 1,000.
    """
    for name, accepted in (("a", 50), ("b", 80)):
        make_run(
            tmp_path / name,
            [stage([0.1] * 100, 10.0)],
            ["ttft_p99=1s"],
            run_id=name,
            warmup_requests=0,
        )
        lines = [json.dumps({"request_id": i, "accepted": i < accepted}) for i in range(100)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    labels = [x for n in "ab" for x in ("--labels", f"{n}={tmp_path}/{n}.jsonl")]
    assert (
        ampacity("compare", tmp_path / "a", tmp_path / "b", "--gpu-hour", "360", *labels, "--json")
        == 0
    )
    found = rows(msgspec.json.decode(capsys.readouterr().out, type=Comparison))
    assert found["usd_per_thousand_accepted_requests"].values == pytest.approx([20.0, 12.5])


def test_figures_per_gpu_and_per_dollar(tmp_path: Path) -> None:
    """B has twice the GPUs at the same price and the same speed: half the goodput per GPU, twice
    the TTFT × USD/h.

    Both carry the load, so neither ratio is more than that of the GPUs: no winner.
    """
    made = [
        arm(tmp_path / n, stage(ttfts(1)), ["ttft_p99=1s"], gpus=g, usd=2.0)
        for n, g in (("a", 1), ("b", 2))
    ]
    found = rows(compare(made))
    assert found["goodput_rps_per_gpu"].values[0] == pytest.approx(
        2 * found["goodput_rps_per_gpu"].values[1]
    )
    assert found["goodput_rps_per_gpu"].winner is None
    assert found["goodput_rps"].verdict == "equal"
    per_dollar = found["ttft_p99_s_x_usd_per_hour"]
    assert per_dollar.values == pytest.approx(
        [2 * np.quantile(ttfts(1), 0.99), 4 * np.quantile(ttfts(1), 0.99)], rel=0.03
    )
    assert per_dollar.winner is None
    assert "find the capacity" in per_dollar.reason
    tail = found["ttft_p99_over_p50"]  # a slower median lowers it as well: neither better nor worse
    assert (tail.verdict, tail.best, tail.winner) == ("unknown", None, None)
    assert tail.values[0] == tail.values[1]


def rendered(result: Comparison, width: int) -> list[str]:
    terminal = io.StringIO()
    render_comparison(result, Console(file=terminal, width=width))
    return terminal.getvalue().splitlines()


@pytest.mark.parametrize("runs", [2, 3])
def test_at_80_columns_the_difference_and_the_winner_are_on_the_page(
    tmp_path: Path, runs: int
) -> None:
    """58 and 85 of 100 requests are good, of 10 requests/s: 46.6 % more (85 / 58); a third run like
    the first changes 0.
    """
    arms = [
        route(tmp_path / "a", 10, 37, 5, 1.0),
        route(tmp_path / "b", 10, 12, 3, 1.0),
        route(tmp_path / "c", 10, 37, 5, 1.0),
    ]
    result = compare(arms[:runs])
    assert rows(result)["goodput_rps"].winner == "B"
    lines = rendered(result, 80)
    assert max(map(cell_len, lines)) <= 80
    assert not any("…" in line for line in lines)
    card = lines[
        lines.index("Scorecard") : next(i for i, line in enumerate(lines) if line.startswith("¹"))
    ]
    assert card[1].split() == ["figure", "value", "its", "interval", "against", "A", "better"]
    at = next(i for i, line in enumerate(card) if line.startswith("goodput per instance"))
    assert card[at].split()[-1] == "B"
    assert card[at + 1].split()[:2] == ["A", "5.80"]
    assert re.fullmatch(r"  B +8\.50 +\+46\.6 % \(\+\d+\.\d to \+\d+\.\d\) *", card[at + 2])
    if runs == 3:
        assert re.fullmatch(r"  C +5\.80 +\+0\.0 % \(-\d+\.\d to \+\d+\.\d\) *", card[at + 3])
    wide = [line.split() for line in rendered(result, 250)]
    found = next(words for words in wide if words[:3] == ["goodput", "per", "instance,"])
    assert found[4 : 4 + runs] == ["5.80", "8.50", "5.80"][:runs]
    assert "+46.6" in found
    assert found[-1] == "B"


def test_the_files_that_were_written_are_named_and_not_in_the_json(
    tmp_path: Path, ampacity: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        make_run(Path(name), [stage(ttfts(1, 200))], run_id=name)
    files = ("--html", "x.html", "--markdown", "x.md", "--csv", "x.csv")
    assert ampacity("compare", "a", "b", *files) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "comparison: x.html",
        "Markdown: x.md",
        "CSV: x.csv",
    ]
    assert ampacity("compare", "a", "b", *files, "--json") == 0
    assert json.loads(capsys.readouterr().out)["compared"] is True
    assert ampacity("compare", "a", "b") == 0
    assert "x.html" not in capsys.readouterr().out


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
    assert rows(compare([a, b]))["capacity_rps"].verdict == "open"  # 9.9 to 18.2 and 18 to 34 touch
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
    answers/s; up to 8 users meet the SLO.
    """
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
    the others 5.
    """
    made = (("a", 15, 10.0), ("b", 25, 18.0), ("c", 25, 18.0))
    a, b, c = (sweep(tmp_path / name, at, 2.0, first) for name, at, first in made)
    held = b.judged.summary
    longer = held.fleet.output_tokens_mean + 0.25  # 5 % more: enough to part the brackets
    fleet = structs.replace(held.fleet, output_tokens_mean=longer)
    b = replace(b, judged=replace(b.judged, summary=structs.replace(held, fleet=fleet)))
    found = rows(compare([a, b]))["usd_per_million_output_tokens"]
    assert (found.winner, found.verdict) == (None, "open")
    cheaper = ComparedRun("D", c.judged, 1, 0.8)  # per request less, whatever the rates are
    assert rows(compare([a, cheaper]))["usd_per_million_output_tokens"].winner == "D"
    free = [ComparedRun(x.name, x.judged, 1, 0.0) for x in (a, c)]
    assert rows(compare(free))["usd_per_million_output_tokens"].winner is None


def test_a_usable_rate_wins_over_a_run_that_met_its_slos_nowhere(tmp_path: Path) -> None:
    """A breaks at its lowest load, 5/s: it carries less. B carries 10/s; C, of which 4.5/s is
    known, may be no better.
    """
    a, b = sweep(tmp_path / "a", 0, first=5.0), sweep(tmp_path / "b", 15)
    found = rows(compare([a, b]))["capacity_rps"]
    assert (found.winner, found.values[0], found.brackets[0]) == ("B", None, (0.0, 5.0))
    assert rows(compare([a, sweep(tmp_path / "c", 8, first=4.5)]))["capacity_rps"].winner is None


def test_a_cost_wins_where_the_usable_rate_of_each_is_known(tmp_path: Path) -> None:
    """The SLO of A, B and D breaks between 9.9 and 18.2/s: A may carry 1.8 times its best stage;
    its cost over 1.7 is no win, over 3 it is.

    Of C, which breaks nowhere, nobody knows what it can carry: more would only help it where it is
    the cheaper one.
    """
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
    one load half the price wins.
    """
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
    grows at 20/s: at most half of C's at 40.
    """
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
    what carries 12/s and breaks at 24 is not shown to be better.
    """
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
    case B violates the SLO from 5/s on.
    """
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
    left without so many.
    """
    slow = ttfts(1, 600) * np.repeat([20.0, 1.0], [200, 400])
    a, b, c = (
        arm(tmp_path / n, stage(x), ["ttft_p90=1s"])
        for n, x in (("a", slow), ("b", ttfts(2, 130)), ("c", ttfts(3, 600)))
    )
    assert a.judged.summary.stages[0].window.warmup_requests > 30
    result = compare([a, b])
    assert result.level is None
    # A misses nothing for certain and is steady: requests are lacking, not a lower load
    assert (
        "run each again with the same --rates, for longer (--duration): A is not shown"
        in result.notes[0]
    )
    assert compare([a, c]).level == "20/s"


def test_cost_and_gpus_at_the_usable_rate_have_its_bracket(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """Five tokens an answer, 2 USD/h: at x/s 2/(0.018 x) USD for a million; of C, at least 40/s, at
    most 2/0.72.

    A peak of 100/s with 1.2: ceil(1.2 ceil(100/x)) GPUs at x/s; C ceil(3 x 1.2) = 4 at most.
    """
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


def test_what_was_cut_off_is_counted_apart_from_failures_and_both_tables_say_what_they_count(
    tmp_path: Path,
) -> None:
    """Of 1000 requests 10 fail and 40 are given up: 10 failed in the whole run, 5 % failed or cut
    off.
    """
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


def test_markdown_and_csv_hold_the_figures(tmp_path: Path) -> None:
    made = [
        arm(tmp_path / n, stage(ttfts(1, 1000, s)), ["ttft_p99=1s"], usd=2.0)
        for n, s in (("a", 1.0), ("b|<i>", 1.2))
    ]
    result = compare(
        [ComparedRun("A", made[0].judged, 1, 2.0), ComparedRun("B", made[1].judged, 2, 2.5)]
    )
    text = comparison_markdown(result)
    assert "A: 1 GPU × $2.00/h; B: 2 GPUs × $2.50/h" in text  # what the costs rest on
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
    notes = {r["note"] for r in read if r["name"].startswith("usd_per_")}
    assert notes == {"one instance at its capacity", "one instance at its best stage"}
    assert [(r["run"], r["value"]) for r in read if r["name"] == "gpu_hour_usd"] == [
        ("A", "2.0"),
        ("B", "2.5"),
    ]


def test_longer_answers_that_the_seed_drew_are_no_more_tokens_per_second(tmp_path: Path) -> None:
    """Both carry 20/s and give every token that was planned; B's seed drew 6 where A's drew 5: 20 %
    more tokens, and no winner.
    """

    def drawn(name: str, tokens: int, **meta: Any) -> ComparedRun:
        records = [
            request(
                i, i / RATE, ttft_s=0.1, gaps_s=[0.01] * (tokens - 1), output_tokens_planned=tokens
            )
            for i in range(1000)
        ]
        return arm(
            tmp_path / name,
            Stage(records, 50.0, offered_rps=RATE),
            ["ttft_p99=1s"],
            usd=2.0,
            **meta,
        )

    found = rows(compare([drawn("a", 5, seed=1), drawn("b", 6, seed=2)]))[
        "output_tokens_per_s_per_gpu"
    ]
    assert found.values == pytest.approx([100, 120], rel=0.02)
    change = found.changes[1]
    assert change.change == pytest.approx(found.values[1] / found.values[0] - 1)
    assert change.tested_change == pytest.approx(0.0, abs=1e-9)
    assert change.change_ci == pytest.approx([0.0, change.change], abs=1e-9)
    assert (found.verdict, found.winner) == ("open", None)
