"""Several curves of one run: classes, and length combinations that leave the headline alone."""

import asyncio
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ampacity.analysis.change.judged import prepare
from ampacity.analysis.contract import stage as contract
from ampacity.analysis.contract.summary import read_summary
from ampacity.config import make_settings
from ampacity.experiments.sweep import sweep
from ampacity.experiments.virtual.predict import predict
from ampacity.loadgen.rundir.files import Run, load_run
from ampacity.progress import Progress, stage_line
from ampacity.reports.charts.families import curve_charts, curve_tables
from ampacity.reports.pages.run_report import render_report
from ampacity.reports.pages.terminal import render_table
from ampacity.reports.render.tables import stages_table
from ampacity.simulator.models.hardware import find_config
from ampacity.values import ConfigError
from ampacity.workloads.lengths.parse import Fixed
from ampacity.workloads.profile import load_workload
from tests.support.contract import struct_of, summarise
from tests.support.synthetic import Stage, make_run, queue_sweep, request

SLOS = ["ttft_p99=200ms"]
RATES = [25.0, 50.0, 100.0, 150.0, 220.0]


def slow(count: int, start_s: float, first_id: int) -> list[Any]:
    """One request in ten fails, the rest take 2 s to a first token."""
    return [
        request(
            first_id + i,
            start_s + 0.05 * i,
            ttft_s=None if i % 10 == 0 else 2.0,
            status="timeout" if i % 10 == 0 else "ok",
            input_tokens_planned=4142,
            output_tokens_planned=601,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A sweep, and the same one with a curve at p99 lengths behind it, client-limited and unstable
    stages included."""
    path = tmp_path_factory.mktemp("families")

    def own() -> list[Stage]:
        return queue_sweep(np.random.default_rng(1), RATES, 20.0, service_rps=200)

    last = own()
    first_id = sum(len(stage.records) for stage in last)
    for n, start_s in enumerate((1000.0, 1100.0)):
        records = slow(400, start_s, first_id + 400 * n)
        last.append(
            Stage(records, 20.0, start_s, 20.0, client_limited=bool(n), extra={"lengths": "p99"})
        )
    return make_run(path / "own", own(), SLOS), make_run(path / "more", last, SLOS)


def test_stages_at_other_lengths_change_nothing_but_families(runs: tuple[Run, Run]) -> None:
    plain, more = map(summarise, runs)
    families = more.pop("families")
    assert plain.pop("families") == []
    assert more == plain
    (family,) = families
    assert (family["lengths"], family["input_tokens"], family["output_tokens"]) == (
        "p99",
        4142,
        601,
    )
    assert [s["index"] for s in family["stages"]] == [5, 6]
    assert {s["lengths"] for s in family["stages"]} == {"p99"}
    assert family["capacity"]["capacity_rps"] is None
    # the only stage that counts violates the SLO
    assert family["capacity"]["capacity_rps_ci"] == [0.0, 20.0]
    assert family["knee"]["reason"] == "needs 4 usable stages, has 1"


def test_a_comparison_takes_the_workloads_own_stages(runs: tuple[Run, Run]) -> None:
    judged = prepare(runs[1])
    assert [f"{rate:g}/s" for rate in RATES] == list(judged.levels())


def test_the_report_draws_the_families_beside_the_own_curve(runs: tuple[Run, Run]) -> None:
    plain, more = map(summarise, runs)
    assert not [*curve_charts(read_summary(plain)), *curve_tables(read_summary(plain))]
    (chart,) = curve_charts(read_summary(more))
    points = [row for rows in chart.spec["datasets"].values() for row in rows if "state" in row]
    own = [
        s["slo_verdicts"][0]["value_s"] for s in more["stages"] if s["slo_verdicts"][0]["value_s"]
    ]
    assert sorted(r["y"] for r in points if "own" in r["text"]) == sorted(own)
    # p50: its p99 is infinite
    assert [r["y"] for r in points if "at p99 lengths" in r["text"]] == [2.0, 2.0]
    rate, (low, high) = more["capacity"]["capacity_rps"], more["capacity"]["capacity_rps_ci"]
    assert [key.label for key in chart.keys][:2] == [
        "the workload's own lengths: TTFT p99 (SLO ttft_p99=200ms), SLOs kept up to "
        f"{rate:.0f} req/s ({low:.0f} to {high:.0f})",
        "all at p99 lengths: TTFT p50",
    ]
    (table,) = curve_tables(read_summary(more))
    assert [cell.text for cell in table.rows[1]][:2] == ["all at p99 lengths", "4,142 in, 601 out"]
    page = render_report(read_summary(more), runs[1].meta)
    assert page.count('id="chart-lengths"') == 1
    assert "<summary>Stages at p99 lengths" in page


def two_classes(rate: float, start_s: float, first_id: int, slow_s: float) -> Stage:
    """Class a has its first token after 0.1 s, class b after ``slow_s``; 800 requests, every second
    one of b."""
    records = [
        request(
            first_id + i,
            start_s + i / rate,
            ttft_s=slow_s if i % 2 else 0.1,
            class_="b" if i % 2 else "a",
        )
        for i in range(800)
    ]
    return Stage(records, 800 / rate, start_s, rate)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    stages = [two_classes(10.0, 0.0, 0, 0.1), two_classes(20.0, 200.0, 800, 1.0)]
    slos = ["a:ttft_p90=150ms", "b:ttft_p90=500ms"]
    return make_run(tmp_path_factory.mktemp("classes") / "run", stages, slos, warmup_requests=0)


def test_each_class_has_the_load_at_which_its_own_slos_break(mixed: Run) -> None:
    summary = summarise(mixed)
    a, b = summary["classes"]
    assert (a["name"], a["slos"], b["slos"]) == ("a", ["a:ttft_p90=150ms"], ["b:ttft_p90=500ms"])
    assert (a["capacity_rps"], a["crossing"]) == (pytest.approx(20), "lower_bound")
    # b: all within at 10/s, none at 20/s; two loads say no more than that the limit is in between
    assert b["crossing"] == "pooled"
    assert 10 < b["capacity_rps"] < 20
    assert b["capacity_rps_ci"][0] < 11
    assert b["capacity_rps_ci"][1] > 16
    assert b["binding_slo"] == summary["capacity"]["binding_slo"] == "b:ttft_p90=500ms"
    top = summary["stages"][1]["classes"]
    assert (top["a"]["slo_met"], top["b"]["slo_met"]) == (True, False)
    assert (top["a"]["slo_attainment"], top["b"]["slo_attainment"]) == (1.0, 0.0)
    (chart,) = curve_charts(read_summary(summary))
    assert chart.name == "classes"
    points = {
        (r["x"], r["text"].split()[0]): r["y"]
        for rows in chart.spec["datasets"].values()
        for r in rows
        if "state" in r
    }
    expected = {(10, "a"): 0.1, (20, "a"): 0.1, (10, "b"): 0.1, (20, "b"): 1.0}
    assert points == {key: pytest.approx(value) for key, value in expected.items()}
    rules = [r["text"] for rows in chart.spec["datasets"].values() for r in rows if "x2" in r]
    assert rules == ["SLO a:ttft_p90=150ms", "SLO b:ttft_p90=500ms"]
    (table,) = curve_tables(read_summary(summary))
    assert [cell.text for cell in table.rows[0]][:3] == ["a", "a:ttft_p90=150ms", "≥ 20.0"]
    printed = StringIO()
    render_table(read_summary(summary), Console(file=printed, width=150))
    assert "SLOs kept" in printed.getvalue()


def test_a_class_that_breaks_an_slo_below_the_usable_rate_of_all_is_named(tmp_path: Path) -> None:
    def stage(rate: float, start_s: float, first_id: int, slow: str) -> Stage:
        """Every twentieth request is of class b; those whose class is in ``slow`` take 1 s, others
        0.1 s."""
        names = ["b" if i % 20 == 0 else "a" for i in range(2000)]
        records = [
            request(
                first_id + i, start_s + i / rate, ttft_s=1.0 if name in slow else 0.1, class_=name
            )
            for i, name in enumerate(names)
        ]
        return Stage(records, 2000 / rate, start_s, rate)

    def run(name: str, slos: list[str]) -> dict[str, Any]:
        stages = [
            stage(10.0, 0.0, 0, ""),
            stage(20.0, 300.0, 2000, "b"),
            stage(40.0, 500.0, 4000, "ab"),
        ]
        return summarise(make_run(tmp_path / name, stages, slos, warmup_requests=0))

    all_together = run("all", ["ttft_p90=500ms"])
    # the SLO of all is kept by 95 % at 20/s and by none at 40/s; by class b up to 10/s
    assert 20 < all_together["capacity"]["capacity_rps"] < 40
    (text,) = [w["text"] for w in all_together["warnings"] if w["code"] == "class_below"]
    said = re.search(
        r"class b keeps ttft_p90=500ms only up to ([\d.]+) requests/s of all classes \(between",
        text,
    )
    assert said
    assert 10 < float(said[1]) < 20
    assert "class a keeps" not in text
    own = run("own", ["b:ttft_p90=500ms"])  # the capacity is that of the class
    assert "class_below" not in [w["code"] for w in own["warnings"]]


def test_a_run_of_one_class_has_no_curves_of_classes(runs: tuple[Run, Run]) -> None:
    summary = summarise(runs[0])
    assert summary["classes"] == []
    assert not [*curve_charts(read_summary(summary)), *curve_tables(read_summary(summary))]


def test_the_stage_table_shows_the_most_requests_in_flight(runs: tuple[Run, Run]) -> None:
    summary = summarise(runs[0])
    table = stages_table(read_summary(summary))
    at = [column.head for column in table.columns].index("at most")
    assert [row[at].text for row in table.rows] == [
        f"{s['concurrency_max']:,}" for s in summary["stages"]
    ]


def test_a_quantile_of_a_mixed_workload_is_that_of_each_class(tmp_path: Path) -> None:
    workload = load_workload("chat").at_quantile(0.99)
    assert (workload.input_tokens, workload.output_tokens) == (Fixed(4142), Fixed(601))
    (tmp_path / "office.yaml").write_text(MIXED)
    office = load_workload(str(tmp_path / "office.yaml")).at_quantile(0.5)
    assert [(k.input_tokens, k.output_tokens) for k in office.classes] == [
        (Fixed(100), Fixed(50)),
        (Fixed(3000), Fixed(400)),
    ]
    assert office.input_tokens.quantile(0.6) == 100  # 7 of 10 requests have 100, 3 have 3000
    assert office.input_tokens.quantile(0.8) == 3000
    assert [kind.slos for kind in office.classes] == [("ttft_p99=1s",), ()]


MIXED = """
name: office
classes:
  chat: {weight: 7, input_tokens: 100, output_tokens: 50, slo: [ttft_p99=1s]}
  batch: {weight: 3, input_tokens: 3000, output_tokens: 400}
"""


def test_a_predicted_sweep_at_p99_lengths_is_cut_to_the_context(tmp_path: Path) -> None:
    settings = make_settings(
        {
            "url": "http://a/v1",
            "input_tokens": "lognormal:p50=100,p99=900",
            "output_tokens": "2",
            "rates": "1",
            "lengths": "p99",
            "out": str(tmp_path / "run"),
            "duration": "1m",
        }
    )
    engine = replace(find_config("linear:0.01,0.001"), max_model_len=500)
    quiet = Progress(Console(file=StringIO()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampacity.experiments.virtual.player.REQUESTS_MIN", 60)
        run = load_run(asyncio.run(predict(settings, engine, ["ampacity"], quiet)))
    assert [meta["lengths"] for meta in run.meta["stages"]] == [None, "p99"]
    (family,) = summarise(run)["families"]
    assert stage_line(struct_of(contract.Stage, family["stages"][0])).startswith(
        "stage 1, all at p99 lengths: 1 req/s, "
    )
    # 900 at p99; 500 hold it and its answer
    assert (family["input_tokens"], family["output_tokens"]) == (498, 2)


class Recording:
    """A rig that answers every stage at once: saturated above 8 requests/s, at longer lengths above
    2."""

    def __init__(self, settings: Any) -> None:
        self.settings, self.lengths, self.typical_e2e_s = settings, None, 1.0
        self.stages: list[contract.Stage] = []
        self.tokens: list[Any] = []
        self.ended: tuple[str, str] | None = None
        self.spent_s = 0.0

    def stage_s(self, rate_rps: float) -> float:
        return float(self.settings.duration_s)

    def expect(self, *args: Any, **kwargs: Any) -> None:
        """Show no progress."""

    async def open_stage(self, rate_rps: float, duration_s: float, enough: Any) -> contract.Stage:
        over = rate_rps > (8 if self.lengths is None else 2)
        self.stages.append(
            struct_of(
                contract.Stage,
                {
                    "index": len(self.stages),
                    "kind": "open",
                    "requests": round(rate_rps * duration_s),
                    "concurrency": 1.0,
                    "offered_rps": rate_rps,
                    "lengths": self.lengths,
                    "stable": not over,
                    "client_limited": False,
                    "slo_verdicts": [],
                    "slo_met": None,
                    "achieved_rps": min(rate_rps, 8.0),
                    "window": {"end_s": duration_s, "warmup_requests": 0},
                },
            )
        )
        self.tokens.append(self.settings.workload.input_tokens)
        return self.stages[-1]


def test_a_sweep_finds_the_rates_of_each_length_combination_by_itself() -> None:
    settings = make_settings(
        {"url": "http://a/v1", "workload": "chat", "lengths": "mixed, p50,p99"}
    )
    assert settings.lengths == ("p50", "p99")
    alone, rig = Recording(replace(settings, lengths=())), Recording(settings)
    asyncio.run(sweep(alone))
    asyncio.run(sweep(rig))
    curves = {name: [s for s in rig.stages if s.lengths == name] for name in (None, "p50", "p99")}
    assert curves[None] == alone.stages  # as if there were no others
    tokens = {s.lengths: rig.tokens[s.index] for s in rig.stages}
    assert (tokens["p50"], tokens["p99"]) == (Fixed(1020), Fixed(4142))
    within = max(s.offered_rps for s in curves["p99"] if s.stable)
    over = min(s.offered_rps for s in curves["p99"] if not s.stable)
    assert within <= 2 < over <= 1.5 * within  # its own bracket, not that of the workload


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"lengths": "p0"}, "--lengths p0: write quantiles"),
        ({"lengths": "p100"}, "--lengths p100: write quantiles"),
        ({"lengths": "median"}, "--lengths median: write quantiles"),
        ({"lengths": "p50", "workload": "agentic"}, "it excludes sessions"),
    ],
)
def test_lengths_that_cannot_be_swept_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        make_settings({"url": "http://a/v1", **raw})
    assert "\n" not in str(refused.value)
