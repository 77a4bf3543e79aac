"""The scorecard of a comparison, by hand: rates, costs, what the capacity gives, who wins."""

import csv
import io
import json
import re
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
from tests.support.compared_runs import RATE, arm, rows, stage, ttfts
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
    1.45/85, and A has more tokens."""
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
    there."""
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
        structs.replace(row, verdict="inconclusive", best="B", values=v)
        for v in ([25.004, 24.996], [25.1, 25.0])
    ]
    result = structs.replace(result, scorecard=lines)
    card = next(t for t in tables(result) if t.title == "Scorecard").rows
    assert [[cells[1].text, cells[2].text, cells[-1].text] for cells in card] == [
        ["25.0", "25.0", "inconclusive"],
        ["25.1", "25.0", "inconclusive (B)"],
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
    20 and 12.5 USD for 1,000."""
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

    Both carry the load, so neither ratio is more than that of the GPUs: no winner."""
    made = [
        arm(tmp_path / n, stage(ttfts(1)), ["ttft_p99=1s"], gpus=g, usd=2.0)
        for n, g in (("a", 1), ("b", 2))
    ]
    found = rows(compare(made))
    expected = pytest.approx(2 * found["goodput_rps_per_gpu"].values[1])
    assert found["goodput_rps_per_gpu"].values[0] == expected
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
    the first changes 0."""
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


def test_what_was_cut_off_is_counted_apart_from_failures_and_both_tables_say_what_they_count(
    tmp_path: Path,
) -> None:
    """Of 1000 requests 10 fail and 40 are given up: 10 failed in the whole run, 5 % failed or cut
    off."""
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
    more tokens, and no winner, as it is other work."""

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
    assert (found.verdict, found.winner) == ("unknown", None)
