"""Chart specs: what is drawn, from the summary alone; every spec passes Altair's own schema."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import pytest

from ampacity.analysis.contract import stage as contract
from ampacity.analysis.contract.capacity import Search
from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.analysis.load_names import name_stages
from ampacity.analysis.timeline import Timeline
from ampacity.reports.charts import distributions, draw
from ampacity.reports.charts.curves import (
    charts,
    errors_by_stage,
    latency_by_concurrency,
    latency_by_rate,
)
from ampacity.reports.charts.marks import Chart, linear_axis, log_axis, log_ticks
from ampacity.reports.charts.palette import COLOURS, light, style_sheet
from ampacity.reports.charts.rates import achieved_by_offered, goodput_by_load
from ampacity.reports.charts.svg import SVG, write_svgs
from ampacity.reports.charts.timeline import timeline_chart
from tests.support import sample_summary
from tests.support.contract import blank, struct_of

EVERY = (
    "latency-rate latency-concurrency achieved ttft-percentiles itl-percentiles goodput "
    "errors input-tokens output-tokens"
).split()


def chart_of(draw: Callable[[Summary], Chart | None], summary: dict[str, Any]) -> Chart:
    chart = draw(read_summary(summary))
    assert chart is not None
    return chart


@cache
def drawn(name: str) -> list[Chart]:
    return charts(read_summary(sample_summary.ALL[name]()))


def layers(chart: Chart | None, mark: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The layers of a mark type: the mark and its rows."""
    data = chart.spec["datasets"]
    return [
        (x["mark"], data[x["data"]["name"]])
        for x in chart.spec["layer"]
        if x["mark"]["type"] == mark
    ]


def texts(chart: Chart | None, mark: str) -> list[str]:
    return [row["text"] for _, rows in layers(chart, mark) for row in rows if "text" in row]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("open_sweep", set()),
        ("closed_sweep", {"achieved", "errors"}),
        ("no_slos", {"goodput"}),
        (
            "one_stage",
            set("latency-rate latency-concurrency achieved itl-percentiles goodput errors".split()),
        ),
        (
            "all_failed",
            {"latency-rate", "latency-concurrency", "ttft-percentiles", "itl-percentiles"},
        ),
    ],
)
def test_what_the_summary_lacks_is_left_out(name: str, missing: set[str]) -> None:
    assert [chart.name for chart in drawn(name)] == [n for n in EVERY if n not in missing]


@pytest.mark.parametrize("name", ["open_sweep", "all_failed"])
def test_every_spec_is_valid_and_has_words(name: str) -> None:
    for chart in drawn(name):
        spec = chart.spec | {"datasets": {}}  # the rows are free of rules, and slow to walk through
        (alt.LayerChart if "layer" in spec else alt.Chart).from_dict(spec, validate=True)
        assert chart.title
        assert len(chart.alt) > 30
        assert chart.keys


def test_each_chart_is_written_as_a_picture(tmp_path: Path) -> None:
    specs = {chart.name: chart.spec for chart in drawn("open_sweep")[:2]}
    paths = write_svgs(tmp_path / "new", specs)
    assert [path.stem for path in paths] == [*specs]
    assert [ElementTree.parse(path).getroot().tag for path in paths] == [f"{{{SVG}}}svg"] * 2


def test_the_stages_of_a_timeline_are_named_where_there_is_room() -> None:
    """Of 1,000 steps of 0.1 s a second has 9 of 898 pixels; "30 req/s" takes 49, 5.5 s."""
    stages = [(0.0, "15 req/s"), (50.0, "30 req/s"), (54.0, "60 req/s"), (56.0, "90 req/s")]
    timeline = Timeline(0.1, [1.0] * 1000, [1.0] * 1000, {}, [(1.0, 0.2)], 1, stages, {})
    chart = timeline_chart(timeline, read_summary(sample_summary.open_sweep()))
    alt.VConcatChart.from_dict(chart.spec, validate=True)
    named = chart.spec["datasets"]["stages"]
    assert [row["label"] for row in named] == ["15 req/s", "30 req/s", "", "90 req/s"]


def test_an_empty_summary_has_no_charts() -> None:
    assert charts(read_summary(blank(Summary))) == []


def test_the_curve_draws_ttft_and_e2e_where_they_are_known() -> None:
    chart = latency_by_rate(read_summary(sample_summary.open_sweep()))
    lines = layers(chart, "line")
    # p50, p95, p99 of each; p99 lacks stage 0 (few) and stage 7 (infinite)
    assert [len(rows) for _, rows in lines] == [8, 8, 6, 8, 8, 6, 8, 8, 8]
    # where the capacity stands too: at the rate offered, of which the highest achieves 7.02
    assert [row["x"] for row in lines[0][1]] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 9.0]
    assert lines[0][1][0]["y"] == pytest.approx(0.101)
    dashes = [mark.get("strokeDash") for mark, _ in lines]
    assert dashes == [[5, 4], None, None, [5, 4], None, [2, 2], [5, 4], None, None]
    assert [mark["color"] for mark, _ in lines[::3]] == [light(m) for m in ("ttft", "e2e", "itl")]


def test_the_curve_emphasises_what_is_judged_and_switches_percentiles() -> None:
    chart = latency_by_rate(read_summary(sample_summary.open_sweep()))  # ttft_p99=2s, itl_p99=100ms
    widths = [mark["strokeWidth"] for mark, _ in layers(chart, "line")]
    assert widths == [1.3, 1.3, 3.5, 1.3, 1.3, 1.3, 1.3, 1.3, 3.5]
    assert [(p["name"], p["value"]) for p in chart.spec["params"]] == [
        ("show_p50", True),
        ("show_p95", False),
        ("show_p99", True),
    ]
    assert chart.off == ["show_p95"]
    judged = [key for key in chart.keys if "judged" in key.label]
    assert [(key.label, key.switch) for key in judged] == [
        ("TTFT p99 (judged)", "show_p99"),
        ("ITL p99 (judged)", "show_p99"),
    ]
    filters = {
        layer["transform"][0]["filter"] for layer in chart.spec["layer"] if "transform" in layer
    }
    assert filters == {"show_p50", "show_p95", "show_p99"}


def test_the_curve_marks_knee_usable_rate_limit_and_infinite_p99() -> None:
    chart = latency_by_rate(read_summary(sample_summary.open_sweep()))
    bands = [rows[0] for _, rows in layers(chart, "rect")]
    assert [(b["x"], b["x2"]) for b in bands] == [(5.4, 6.7), (6.0, 7.0)]
    rules = [rows[0] for _, rows in layers(chart, "rule") if "text" in rows[0]]
    assert [r["text"] for r in rules] == [
        "SLO ttft_p99=2s",
        "SLO itl_p99=100ms",
        "capacity 6.40 req/s (6.00 to 7.00)",
    ]
    assert (rules[0]["y"], rules[2]["x"]) == (2.0, 6.4)
    assert "9 req/s: TTFT p99 infinite: 27 of 600 requests failed" in texts(chart, "point")
    assert chart.title == "The SLOs hold up to 6.40 requests/s"
    labels = [key.label for key in chart.keys]
    assert "knee region 5.40 to 6.70 req/s" in labels
    assert "no steady state: requests in flight keep growing" in labels


def test_p99_bars_are_the_interval_of_the_summary() -> None:
    summary = sample_summary.open_sweep()
    rules = layers(latency_by_rate(read_summary(summary)), "rule")
    bars = [rows for _, rows in rules if "text" not in rows[0]]
    low, high = summary["stages"][1]["ttft_from_schedule_s"]["p99_ci"]
    assert bars[0][0] == {"x": 2.0, "y": low, "y2": high}


def test_an_interval_with_an_open_side_reaches_the_edge() -> None:
    summary = sample_summary.open_sweep()
    summary["capacity"]["capacity_rps_ci"] = [6.0, None]
    summary["stages"][3]["ttft_from_schedule_s"]["p99_ci"] = [0.4, None]
    chart = latency_by_rate(read_summary(summary))
    band = layers(chart, "rect")[1][1][0]
    assert band["x"] == 6.0
    assert band["x2"] > 7.02
    bars = [rows for _, rows in layers(chart, "rule") if "text" not in rows[0]]
    p99 = summary["stages"][3]["ttft_from_schedule_s"]["p99"]
    assert bars[0][2] == {"x": 4.0, "y": 0.4, "y2": p99}  # the known half only


@pytest.mark.parametrize(
    ("slo", "quantile", "drawn_tail"),
    [("ttft_p95=2s", 0.95, "p95"), ("ttft_p90=2s", 0.9, "p90"), ("ttft_p50=2s", 0.5, "p50")],
)
def test_the_curve_draws_the_percentile_that_is_judged(
    slo: str, quantile: float, drawn_tail: str
) -> None:
    summary = sample_summary.open_sweep()
    summary["slos"] = [{"metric": "ttft", "quantile": quantile, "limit_s": 2.0, "text": slo}]
    chart = chart_of(latency_by_rate, summary)
    assert f"TTFT {drawn_tail} (judged)" in [key.label for key in chart.keys]
    assert f"show_{drawn_tail}" not in chart.off
    held = summary["stages"][2]["ttft_from_schedule_s"]
    (wide,) = [rows for mark, rows in layers(chart, "line") if mark["strokeWidth"] > 3]
    assert held[drawn_tail] in [row["y"] for row in wide]
    assert f"TTFT p50 {round(1e3 * 0.101)} ms and {drawn_tail}" in chart.alt
    other = {"metric": "ttft", "quantile": 0.99, "limit_s": 3.0, "text": "ttft_p99=3s"}
    summary["slos"].append(other)
    both = chart_of(latency_by_rate, summary)
    assert "TTFT p99 (judged)" in [key.label for key in both.keys]


def test_a_stage_without_a_percentile_is_named_in_the_caption() -> None:
    known = chart_of(latency_by_rate, sample_summary.open_sweep())
    assert "Not drawn: TTFT p99 at 1 req/s, 9 req/s (reasons in the tables)." in known.caption
    summary = sample_summary.open_sweep()
    summary["stages"] = summary["stages"][1:7]
    few = {"p99": None, "p99_reason": "needs 299 requests, has 40"}
    summary["stages"][0]["ttft_from_schedule_s"] |= few
    chart = chart_of(latency_by_rate, summary)
    assert chart.caption.endswith("Not drawn: TTFT p99 at 2 req/s (needs 299 requests, has 40).")


def test_the_knee_is_a_strip_below_the_band_of_the_usable_rate() -> None:
    chart = latency_by_rate(read_summary(sample_summary.open_sweep()))
    (knee_look, (knee,)), (usable_look, (usable,)) = layers(chart, "rect")
    assert knee["y"] == usable["y"]
    # 3 % of the logarithmic axis
    assert knee["y2"] == pytest.approx(usable["y"] * (usable["y2"] / usable["y"]) ** 0.03)
    assert (knee_look["opacity"], usable_look["opacity"]) == (1, 0.17)
    assert knee_look["color"] != usable_look["color"]
    assert {key.label.split()[0]: key.shape for key in chart.keys}["knee"] == "strip"


def test_bands_lie_below_the_data() -> None:
    chart = chart_of(latency_by_rate, sample_summary.open_sweep())
    kinds = [layer["mark"]["type"] for layer in chart.spec["layer"]]
    assert kinds[:2] == ["rect", "rect"]
    assert "rect" not in kinds[2:]


def test_c_max_is_marked_over_concurrency() -> None:
    chart = chart_of(latency_by_concurrency, sample_summary.closed_sweep())
    assert "C_max 16.0 in flight (16.0 to 32.0)" in texts(chart, "rule")
    assert chart.title == "The SLOs hold up to 16.0 requests in flight"


def test_titles_without_capacity_claim_nothing() -> None:
    chart = chart_of(latency_by_rate, sample_summary.no_slos())
    assert chart.title == "Latency against the offered rate"


def test_titles_say_where_a_bound_is_only_a_bound() -> None:
    summary = sample_summary.open_sweep()
    summary["capacity"]["crossing"] = "lower_bound"
    summary["slos"] = summary["slos"][:1]
    chart = chart_of(latency_by_rate, summary)
    assert chart.title == "The SLO holds up to at least 6.40 requests/s"


def test_achieved_says_what_the_endpoint_keeps_up_with() -> None:
    chart, dead = (
        achieved_by_offered(read_summary(sample_summary.open_sweep())),
        achieved_by_offered(read_summary(sample_summary.all_failed())),
    )
    assert chart.title == "Keeps up with 7 requests/s offered, not with 9"
    assert dead.title == "Achieved against offered rate"
    summary = sample_summary.open_sweep()
    summary["stages"] = summary["stages"][:4]
    kept = chart_of(achieved_by_offered, summary)
    assert kept.title == "The achieved rate follows every rate offered"
    summary["stages"][3]["window"]["settled"] = False
    drifting = chart_of(achieved_by_offered, summary)
    assert drifting.title == "Keeps up with 3 requests/s offered, not surely with 4"


def test_client_limited_stages_are_crosses() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][7]["client_limited"] = True
    crosses = [
        rows
        for mark, rows in layers(achieved_by_offered(read_summary(summary)), "point")
        if mark["shape"] == "cross"
    ]
    assert [row["x"] for rows in crosses for row in rows] == [9.0]


def test_goodput_over_offered_rate_has_the_diagonal_and_the_peak() -> None:
    chart = goodput_by_load(read_summary(sample_summary.open_sweep()))
    diagonal, curve = (rows for _, rows in layers(chart, "line"))
    assert all(row["x"] == row["y"] for row in diagonal)
    assert curve[7]["y"] == pytest.approx(0.05 * 7.02)
    assert chart.title == "Goodput peaks at 6.56 requests/s, at 7 offered"
    closed = chart_of(goodput_by_load, sample_summary.closed_sweep())
    assert len(layers(closed, "line")) == 1


def test_quantile_curves_use_one_over_one_minus_q() -> None:
    summary = sample_summary.open_sweep()
    curve = {"q": [0.0, 0.5, 0.9, 0.99, 0.995, 1.0], "value": [0.1, 0.2, 0.3, 0.4, None, 9.0]}
    summary["stages"] = [summary["stages"][0] | {"curves": {"ttft_from_schedule_s": curve}}]
    ((_, rows),) = layers(distributions.ttft_percentiles(read_summary(summary)), "line")
    # null and q = 1 are left out
    assert [row["x"] for row in rows] == pytest.approx([1, 2, 10, 100])
    assert [row["y"] for row in rows] == [0.1, 0.2, 0.3, 0.4]
    expected = "SLO ttft_p99=2s: at most 2.00 s at p99"
    assert expected in texts(distributions.ttft_percentiles(read_summary(summary)), "point")


def test_itl_names_each_stage_and_dashes_the_unsteady_one() -> None:
    chart = distributions.itl_percentiles(read_summary(sample_summary.open_sweep()))
    assert [k.label for k in chart.keys] == [
        "SLO itl_p99=100ms",
        *(f"{n} req/s" for n in range(1, 8)),
        "9 req/s, no steady state",
    ]
    expected = [False] * 7 + [True]
    assert [bool(mark.get("strokeDash")) for mark, _ in layers(chart, "line")] == expected


def test_at_most_eight_curves_with_the_first_and_the_last() -> None:
    assert distributions.chosen(list(range(12))) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert distributions.chosen([1, 2]) == [1, 2]


def test_errors_are_stacked_by_cause() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][7]["errors"] |= {"http_error": 3, "something_new": 2}
    chart = chart_of(errors_by_stage, summary)
    rows = chart.spec["datasets"]["errors"]
    assert [(r["stage"], r["x"], r["x2"]) for r in rows] == [
        ("9 req/s", 0, 3),
        ("9 req/s", 3, 30),
        ("9 req/s", 30, 32),
    ]
    assert chart.title == "Of 4,320 requests in the windows 32 failed"
    assert [key.label for key in chart.keys] == ["http_error", "timeout", "something_new"]


def test_what_was_cut_off_is_no_error() -> None:
    summary = sample_summary.open_sweep()
    summary["stages"][7]["errors"] |= {"unfinished": 12, "cancelled": 1}
    chart = chart_of(errors_by_stage, summary)
    assert chart.title == (
        "Of 4,320 requests in the windows 12 cut off unfinished; 1 cancelled by the workload; "
        "27 failed"
    )
    assert [key.label for key in chart.keys] == [
        "timeout",
        "cut off unfinished",
        "cancelled by the workload",
    ]
    summary["stages"][7]["errors"] = {"unfinished": 12}
    cut = chart_of(errors_by_stage, summary)
    assert cut.title == "Of 4,320 requests in the windows 12 cut off unfinished; none failed"


def test_two_stages_of_the_same_load_keep_a_bar_each() -> None:
    summary = sample_summary.all_failed()
    for stage in summary["stages"]:
        stage |= {"offered_rps": 1.0, "name": ""}
    named = name_stages([struct_of(contract.Stage, s) for s in summary["stages"]])
    for stage, renamed in zip(summary["stages"], named, strict=True):
        stage["name"] = renamed.name
    chart = chart_of(errors_by_stage, summary)
    assert [r["stage"] for r in chart.spec["datasets"]["errors"]] == [
        "1 req/s (stage 0)",
        "1 req/s (stage 1)",
    ]


def test_lengths_planned_and_realised() -> None:
    chart = distributions.output_lengths(read_summary(sample_summary.open_sweep()))
    planned, received = (rows for _, rows in layers(chart, "point"))
    assert [row["name"] for row in planned] == "p1 p5 p10 p25 p50 p75 p90 p95 p99".split()
    assert (planned[4]["x"], received[4]["x"]) == (160, 151)
    gone = distributions.input_lengths(read_summary(sample_summary.all_failed()))
    assert gone.title == "Input lengths: planned, none counted by the server"
    assert (
        distributions.input_lengths(read_summary(sample_summary.one_stage() | {"workload": {}}))
        is None
    )


def test_axes() -> None:
    assert log_ticks(0.08, 3) == [0.1, 0.2, 0.5, 1.0, 2.0]
    assert log_ticks(0.001, 10000) == [0.001, 0.01, 0.1, 1, 10, 100, 1000, 10000]
    axis = log_axis("t", [0.0, 5.0])
    assert axis.low < 5 < axis.high
    assert axis.high / axis.low > 3
    assert (linear_axis("t", [0.0]).low, linear_axis("t", [0.0]).high) == (0.0, 1.06)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""
    dark, bright = sorted([luminance(a), luminance(b)])
    return (bright + 0.05) / (dark + 0.05)


def test_colours_are_unique_and_legible_on_both_papers() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    hexes = [pair[0] for pair in COLOURS.values()]
    assert len(set(hexes)) == len(hexes)
    text = ("ink", "muted", "good", "bad", "unsure")  # WCAG AA for text, on cards as well
    assert min(contrast(COLOURS[n][0], "#f6f7f9") for n in text) > 4.5
    assert min(contrast(COLOURS[n][1], "#1c2127") for n in text) > 4.5
    lines = ("ttft", "e2e", "usable", "planned", "knee", *(f"step{i}" for i in range(1, 8)))
    assert min(contrast(COLOURS[n][0], "#ffffff") for n in lines) > 3  # WCAG AA for graphics
    assert min(contrast(COLOURS[n][1], "#14171b") for n in lines) > 3


def test_the_style_sheet_recolours_every_colour() -> None:
    css = style_sheet()
    for name, (bright, dark) in COLOURS.items():
        assert f"--{name}:{bright};" in css
        assert f"--{name}:{dark};" in css
        assert f'svg [stroke="{bright}"]{{stroke:var(--{name})}}' in css


def test_the_curves_of_a_search_leave_the_stages_out_that_only_bracket() -> None:
    """Leave out stages of 43 requests, cut short, or with hardly more answers than in flight."""
    summary = sample_summary.open_sweep() | {"search": blank(Search)}
    for stage in summary["stages"]:
        stage["concurrency"] = 5.0
    assert len(curve_of(summary)) == 8
    summary["stages"][2]["requests"] = 43
    summary["stages"][3]["ended_early"] = "--max-requests 5000 is used up"
    summary["stages"][4] |= {"concurrency": 100.0, "achieved_rps": 4.8}
    left_out = [summary["stages"][i]["offered_rps"] for i in (2, 3, 4)]
    loads = [row["x"] for row in curve_of(summary)]
    assert loads == sorted(
        s["offered_rps"] for s in summary["stages"] if s["offered_rps"] not in left_out
    )
    chart = achieved_by_offered(read_summary(summary))
    hollow = [
        (mark, [row["x"] for row in rows])
        for mark, rows in layers(chart, "point")
        if mark["shape"] == "square"
    ]
    assert [(mark["filled"], xs) for mark, xs in hollow] == [(False, left_out)]
    expected = "no steady state, or too short to show one: no part of the curve"
    assert expected in [key.label for key in chart.keys]
    summary["stages"] = [s for s in summary["stages"] if s["stable"]]
    shorter = chart_of(achieved_by_offered, summary)
    assert shorter.title == "The achieved rate follows every rate offered up to 7 requests/s"


def curve_of(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The points that are joined, but for the diagonal's."""
    return layers(achieved_by_offered(read_summary(summary)), "line")[1][1]


def test_a_sweep_of_short_stages_keeps_its_curve() -> None:
    summary = sample_summary.open_sweep()
    for stage in summary["stages"]:
        stage["requests"] = 43
    assert len(curve_of(summary)) == 8
    summary["stages"][0]["stable"] = None  # too short to tell
    assert len(curve_of(summary)) == 7


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no scheduling policies here")
def test_the_drawing_process_leaves_the_policy_of_a_client_under_chrt(tmp_path: Path) -> None:
    """Under a real-time policy on one core the engine's threads would spin until the time limit.

    SCHED_BATCH stands for it: it is inherited alike, and anyone may set it.
    """
    stub = "def vegalite_to_svg(spec): import os; return os.sched_getscheduler(0)\n"
    (tmp_path / "vl_convert.py").write_text(stub.replace(": ", ":\n    ", 1))
    batch = partial(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0))
    done = subprocess.run(
        [sys.executable, "-P", draw.__file__],
        input=json.dumps({"specs": [{}], "runtime": False}),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=batch,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert json.loads(done.stdout)["svg"] == [os.SCHED_OTHER]
