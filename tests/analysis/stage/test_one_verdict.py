"""One notion of a steady state, one verdict, one name of a stage and one goodput peak, in tables,
charts and text.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.slo import parse_slo, verdict_word
from ampacity.analysis.stage.analyse import read_records, stage_records
from ampacity.analysis.stage.throughput import steady_state
from ampacity.analysis.stage.verdicts import Judged, judge_requests
from ampacity.loadgen.rundir.meta import read_stage
from ampacity.reports.charts.curves import charts, latency_by_concurrency, latency_by_rate
from ampacity.reports.charts.marks import STATES, stage_state
from ampacity.reports.charts.rates import goodput_by_load
from ampacity.reports.pages.findings import findings
from ampacity.reports.pages.run_report import render_report
from ampacity.reports.render.tables import ABOVE_ACHIEVED, slo_table, stages_table
from benchmarks.servers import ORIGIN_NS, SERVERS, limit_at, stage_of, table_of
from tests.analysis.stage.test_outage import stage as stage_with
from tests.support.contract import summarise
from tests.support.sample_summary import open_sweep
from tests.support.synthetic import Stage, make_run, request


def column(table: Any, head: str) -> list[Any]:
    at = [c.head for c in table.columns].index(head)
    return [row[at] for row in table.rows]


def note_of(table: Any, cell: Any) -> str:
    return str(table.notes[cell.note - 1])


@pytest.mark.parametrize(
    ("changes", "word", "state"),
    [
        ({}, "yes", "steady"),
        ({"stable": False, "stable_reason": "the queue kept growing"}, "no", "growing"),
        ({"stable": None, "stable_reason": "12 requests are too few"}, "unknown", "short"),
        ({"window": {"settled": False, "reason": "never settled"}}, "not shown", "unsettled"),
        (
            {"littles_law": {"ok": False, "consistency": 1.13, "tolerance": 0.05}},
            "not shown",
            "unsettled",
        ),
        # 8 in flight that wait for none: their number changes by sqrt(16) = 4; 3 of that in 60 s
        ({"concurrency": 8.0, "growth_rps": 0.21}, "not shown", "unsettled"),
        ({"concurrency": 8.0, "growth_rps": 0.19}, "yes", "steady"),
        # a law that is off says nothing of a stage that is no figure
        (
            {"littles_law": {"ok": False, "consistency": 1.13, "tolerance": 0.05}, "requests": 80},
            "yes",
            "steady",
        ),
        (
            {
                "littles_law": {"ok": False, "consistency": 1.13, "tolerance": 0.05},
                "client_limited": True,
            },
            "yes",
            "client",
        ),
    ],
)
def test_a_steady_state_is_one_thing_in_table_chart_and_text(
    changes: dict[str, Any], word: str, state: str
) -> None:
    summary = open_sweep()
    stage = summary["stages"][1]
    for name, change in changes.items():
        stage[name] = stage[name] | change if isinstance(change, dict) else change
    read = read_summary(summary)
    assert (steady_state(read.stages[1])[0], stage_state(read.stages[1], read)) == (word, state)
    table = stages_table(read)
    cell = column(table, "steady")[1]
    assert cell.text == ("–" if word == "unknown" else word)
    assert (cell.note is None) is (word == "yes")
    if state in STATES:
        labels = {key.label for chart in charts(read_summary(summary)) for key in chart.keys}
        assert STATES[state] in labels


def test_a_stage_that_never_settled_is_called_steady_nowhere(tmp_path: Path) -> None:
    """The time to first token doubles and doubles, while no queue grows: MSER-5 finds no end of
    that."""
    records = [request(i, i * 0.1, ttft_s=0.01 * 2 ** (i / 100)) for i in range(600)]
    summary = summarise(
        make_run(tmp_path / "run", [Stage(records, 60.0, offered_rps=10.0)], ["ttft_p95=9s"])
    )
    (stage,) = summary["stages"]
    assert (stage["stable"], stage["window"]["settled"]) == (True, False)
    assert "no steady state was shown" in " ".join(w["text"] for w in summary["warnings"])
    assert [c.text for c in column(stages_table(read_summary(summary)), "steady")] == ["not shown"]
    read = read_summary(summary)
    assert stage_state(read.stages[0], read) == "unsettled"


def test_an_outage_has_one_verdict_in_headline_and_table(tmp_path: Path) -> None:
    """Half of the 300 ms limit is usual; with an outage of 4 s in 20 s too few are left to say that
    p99 is met."""
    run = make_run(
        tmp_path / "run", [stage_with(((10.0, 14.0),), duration_s=20.0)], ["ttft_p99=1s"]
    )
    summary = summarise(run)
    (stage,) = summary["stages"]
    assert (stage["slo_met"], stage["outage"]["outside"]["slo_met"]) == (False, None)
    table = stages_table(read_summary(summary))
    (cell,) = column(table, "SLO")
    assert (cell.text, cell.state) == ("violated", "bad")
    said = note_of(table, cell)
    assert said.startswith("SLO violated; outside of it inconclusive (ttft_p99=1s: ")
    assert said in summary["verdict"]
    assert [c.text for c in column(slo_table(read_summary(summary)), "verdict")] == ["violated"]


@pytest.mark.parametrize(
    ("down", "text"),
    [
        ((14.0, 18.0), "SLO violated; outside of it met"),
        ((14.0, 14.5), "SLO met all the same; outside of it met"),
    ],
)
def test_an_outage_that_is_the_only_trouble(
    tmp_path: Path, down: tuple[float, float], text: str
) -> None:
    short = down[1] - down[0] < 1
    made = stage_with((down,), answer_s=0.1 if short else 0.5, duration_s=120.0 if short else 40.0)
    summary = summarise(make_run(tmp_path / "run", [made], ["error_rate=5%"]))
    table = stages_table(read_summary(summary))
    (cell,) = column(table, "SLO")
    assert note_of(table, cell) == text
    assert cell.text == text.split(" ")[1].rstrip(";")
    assert f"{text}." in summary["verdict"]


def test_stages_of_one_load_have_one_name_everywhere(tmp_path: Path) -> None:
    """Ran in the order 20, 10, 20 req/s: the stages at 20 are 0 and 2, in tables, charts and
    warnings alike."""
    stages = [
        Stage(
            [
                request(
                    1000 * k + i,
                    100 * k + i / rate,
                    stage=k,
                    status="http_error" if i % 9 == 0 else "ok",
                    ttft_s=None if i % 9 == 0 else 0.1,
                )
                for i in range(400)
            ],
            400 / rate,
            100.0 * k,
            rate,
        )
        for k, rate in enumerate((20.0, 10.0, 20.0))
    ]
    run = make_run(tmp_path / "run", stages, ["ttft_p90=1s"], warmup_requests=0)
    summary = summarise(run)
    names = ["20 req/s (stage 0)", "10 req/s", "20 req/s (stage 2)"]
    assert [s["name"] for s in summary["stages"]] == names
    in_order = [names[1], names[0], names[2]]
    assert [c.text for c in column(stages_table(read_summary(summary)), "load")] == in_order
    assert [c.text for c in column(slo_table(read_summary(summary)), "load")] == in_order
    (errors,) = [c for c in charts(read_summary(summary)) if c.name == "errors"]
    assert [row["stage"] for row in errors.spec["datasets"]["errors"]] == in_order
    (curve,) = [c for c in charts(read_summary(summary)) if c.name == "ttft-percentiles"]
    assert [key.label for key in curve.keys][-3:] == in_order
    assert "(stage 1)" not in render_report(read_summary(summary), run.meta)


def test_an_estimated_goodput_peak_is_called_one_and_drawn_off_the_points() -> None:
    summary = open_sweep()
    summary["goodput"] = json.loads("""{"peak_rps": 6.3, "peak_rps_ci": [6.0, 6.6],
        "at_offered_rps": 6.481, "basis": "pooled", "reason": null}""")
    (found,) = [f for f in findings(read_summary(summary)) if f.label == "Goodput peak"]
    assert (found.value, found.interval) == (
        "an estimated 6.30 req/s",
        "95 % interval 6.00 to 6.60 req/s",
    )
    # the stage at 7/s has 6.56
    said = "an estimate of its own, from all open-loop stages together; a stage lies above it by chance; at 6.48 req/s offered"
    assert found.note.startswith(said)
    chart = goodput_by_load(read_summary(summary))
    assert chart.title == "Goodput peaks at an estimated 6.30 requests/s, at 6.48 offered"
    expected = "estimated peak 6.30 req/s (95 % interval 6.00 to 6.60)"
    assert expected in [key.label for key in chart.keys]
    drawn = [r for rows in chart.spec["datasets"].values() for r in rows if r.get("y") == 6.3]
    assert [row["x"] for row in drawn] == [6.481]
    bars = [r for rows in chart.spec["datasets"].values() for r in rows if r.get("y2") == 6.6]
    # the bar from 6.0 to 6.6, and the point that carries it
    assert {row["y"] for row in bars} == {6.0, 6.3}
    summary["goodput"] |= {"basis": "stage", "peak_rps_ci": None, "at_offered_rps": 7.0}
    (found,) = [f for f in findings(read_summary(summary)) if f.label == "Goodput peak"]
    assert (found.value, found.interval) == ("6.30 req/s", None)
    assert "of the best stage" in found.note
    measured = goodput_by_load(read_summary(summary))
    assert "stimate" not in measured.title + measured.caption + " ".join(
        k.label for k in measured.keys
    )


@pytest.mark.parametrize(
    ("good", "noted"), [(4.3, True), (4.0, False), (4.001, False), (3.9, False)]
)
def test_a_goodput_above_the_achieved_rate_has_a_note(good: float, noted: bool) -> None:
    summary = open_sweep()
    summary["stages"][0] |= {"achieved_rps": 4.0, "goodput_rps": good}
    table = stages_table(read_summary(summary))
    cell = column(table, "goodput")[0]
    assert (cell.note is not None and note_of(table, cell) == ABOVE_ACHIEVED) is noted


@pytest.mark.parametrize(
    ("verdict", "word"),
    [
        ("met", "met"),
        ("violated", "violated"),
        ("inconclusive", "inconclusive"),
        (True, "met"),
        (False, "violated"),
        (None, "inconclusive"),
    ],
)
def test_the_words_of_a_verdict(verdict: str | bool | None, word: str) -> None:
    assert verdict_word(verdict) == word


def test_quick_answers_of_a_start_up_do_not_hide_a_violation() -> None:
    """A batching server at 0.95 of saturation, whose limit allows 0.85: of 60 stages of 300
    requests those that are violated without the cut are so with it, unless the cut held so many
    that nothing is sure."""
    server, slo = SERVERS["mm8"](), limit_at("mm8", 0.85, 0.95)
    rate, unsure = 0.95 * server.most_rps, 0
    for seed in range(60):
        sent = stage_of(server, rate, 300 / rate, np.random.default_rng([seed, 300]))
        table, metas = table_of([sent])
        found = stage_records(read_records(table, ORIGIN_NS), read_stage(metas[0]))
        (verdict,) = judge_requests(Judged(found.cohort, found.whole), [slo])
        unsure += "start-up" in str(verdict.cause)
    assert unsure <= 1  # 4 where both had to be sure at 5 %
    assert parse_slo(slo.text).quantile == 0.95


@pytest.mark.parametrize(
    ("crossing", "said", "drawn"),
    [
        ("pooled", "an estimated ", "an estimated "),
        ("lower_bound", "at least ", "at least "),
        ("saturated", "at most ", ""),
        ("measured", "", ""),
    ],
)
def test_what_kind_of_figure_the_usable_rate_is_stands_in_card_and_chart(
    crossing: str, said: str, drawn: str
) -> None:
    summary = open_sweep()
    summary["capacity"] |= {"crossing": crossing, "capacity_rps": 6.4, "c_max": 34.0}
    value = {f.label: f.value for f in findings(read_summary(summary))}
    assert value["Capacity"] == f"{said}6.40 req/s"
    assert value["C_max"] == f"{drawn}34.0 in flight"
    for chart, text in (
        (latency_by_rate, "6.40 requests/s"),
        (latency_by_concurrency, "34.0 requests in flight"),
    ):
        made = chart(read_summary(summary))
        assert made.title == f"The SLOs hold up to {drawn}{text}"


def test_a_predicted_run_tells_of_no_client() -> None:
    summary = open_sweep() | {"predicted": True}
    (client,) = [f for f in findings(read_summary(summary)) if f.label == "Load generator"]
    assert (client.value, client.note) == (
        "kept up",
        "in virtual time every request leaves when it is due",
    )
    (client,) = [
        f
        for f in findings(read_summary(summary | {"predicted": False}))
        if f.label == "Load generator"
    ]
    assert "late at p99" in client.note
