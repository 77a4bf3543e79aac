"""Figures that must not contradict each other: bounds that are marked, the knee beside the
capacity, curves at other lengths.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ampacity.analysis.capacity.families import lengths_out_of_order
from ampacity.analysis.capacity.fleet import instances_text
from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.analysis.stage_warnings import Facts
from ampacity.analysis.warnings import find_warnings
from ampacity.progress import stage_line
from ampacity.reports.charts.curves import latency_by_rate
from ampacity.reports.pages.run_report import render_report
from ampacity.reports.render.figures import percentile_text, seconds
from ampacity.reports.render.tables import percentile_table, slo_table, stages_table
from tests.support.args import COMMAND
from tests.support.contract import struct_of, summarise
from tests.support.sample_summary import open_sweep
from tests.support.synthetic import Stage, make_run, request


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([0.5, 1.2], "857 ms"),
        ([0.5, None], "≥ 857 ms"),
        ([None, None], "≥ 857 ms"),
        (None, "857 ms"),
    ],
)
def test_a_figure_without_an_upper_end_is_marked(
    ends: list[float | None] | None, text: str
) -> None:
    assert percentile_text(0.857, ends, seconds) == text


def test_a_p99_of_unknown_upper_end_is_marked_wherever_it_is_shown() -> None:
    summary = open_sweep()
    stage = summary["stages"][3]
    stage["ttft_from_schedule_s"] |= {
        "p99": 0.857,
        "p99_ci": [0.5, None],
        "p99_ci_reason": "too short",
    }
    stage["slo_verdicts"][0] |= {"value_s": 0.857, "value_s_ci": [0.5, None]}
    for table, head in (
        (stages_table(read_summary(summary)), "TTFT p99"),
        (percentile_table(read_summary(summary), "ttft_from_schedule_s"), "p99"),
        (slo_table(read_summary(summary)), "value"),
    ):
        column = [c.head for c in table.columns].index(head)
        shown = [row[column].text for row in table.rows]
        assert shown.count("≥ 857 ms") == 1
        assert "857 ms" not in shown
    chart = latency_by_rate(read_summary(summary))
    texts = [
        row["text"] for rows in chart.spec["datasets"].values() for row in rows if "text" in row
    ]
    assert sum("TTFT p99 ≥ 857 ms" in text for text in texts) == 1
    page = render_report(read_summary(summary), {}).replace(r"\u2265", "≥")  # of a chart's JSON
    assert "857 ms" in page
    assert re.findall(r"(?<!≥ )857 ms", page) == []
    stage |= {"lengths": None}
    assert "p99 ≥ 857 ms" in stage_line(read_summary(summary).stages[3])


@pytest.mark.parametrize("encoding", ["ascii", "cp437"])
def test_no_encoding_of_stdout_ends_a_report(encoding: str, tmp_path: Path) -> None:
    stages = [Stage([request(i, i * 0.1) for i in range(400)], 40.0, offered_rps=10.0)]
    make_run(tmp_path / "run", stages, ["ttft_p99=1s"], warmup_requests=0)
    words = [*COMMAND, "report", str(tmp_path / "run")]
    done = subprocess.run(
        words, check=False, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    mark = "ttft_p99 ≤ 1 s" if encoding == "cp437" else "ttft_p99 <= 1 s"
    assert mark in done.stdout.decode(encoding)


@pytest.mark.parametrize(
    ("usable", "where"), [(5.3, None), (6.0, "within"), (6.9, "within"), (7.2, "above")]
)
def test_a_usable_rate_in_or_above_the_knee_region_is_said(
    usable: float, where: str | None, tmp_path: Path
) -> None:
    stages = [Stage([request(i, i * 0.1) for i in range(400)], 40.0, offered_rps=10.0)]
    summary = summarise(make_run(tmp_path / "run", stages, ["ttft_p99=1s"], warmup_requests=0))
    summary["knee"] |= {"region_rps": [5.4, 6.7]}
    summary["capacity"]["capacity_rps"] = usable
    found = find_warnings(Facts(read_summary(summary)))
    said = [w.text for w in found if w.code == "knee_region"]
    assert [f"lies {where} the knee region of 5.4 to 6.7 req/s: " in text for text in said] == [
        True
    ] * (where is not None)


def test_shorter_requests_that_keep_less_are_said() -> None:
    def curves(
        own: list[float | None], p50: list[float | None], p99: list[float | None]
    ) -> Summary:
        given = {
            "fleet": {"input_tokens_mean": 1200.0, "output_tokens_mean": 260.0},
            "capacity": {"capacity_rps_ci": own},
            "families": [
                {
                    "lengths": "p50",
                    "input_tokens": 1020,
                    "output_tokens": 130,
                    "capacity": {"capacity_rps_ci": p50},
                },
                {
                    "lengths": "p99",
                    "input_tokens": 4142,
                    "output_tokens": 601,
                    "capacity": {"capacity_rps_ci": p99},
                },
            ],
        }
        return struct_of(Summary, given)

    assert lengths_out_of_order(curves([2.0, 3.0], [4.0, 5.0], [0.1, 0.2])) is None
    # the intervals overlap
    assert lengths_out_of_order(curves([2.0, 3.0], [1.0, 2.5], [0.1, 0.2])) is None
    assert lengths_out_of_order(curves([2.0, None], [1.0, None], [0.1, None])) is None
    text = lengths_out_of_order(curves([2.0, 3.0], [1.0, 1.9], [0.1, 0.2]))
    assert text is not None
    assert (
        "p50 lengths up to 1.9 requests/s at most, the workload's own lengths up to 2 at least"
        in text
    )
    assert "p99" not in text


def test_the_fleet_is_the_same_in_every_output(tmp_path: Path) -> None:
    stages = [
        Stage(
            [request(2000 * k + i, 200 * k + i / rate, stage=k, ttft_s=ttft) for i in range(1200)],
            1200 / rate,
            200.0 * k,
            rate,
        )
        for k, (rate, ttft) in enumerate([(10.0, 0.1), (20.0, 2.0)])
    ]
    inputs = {"peak_rps": 95.0, "tensor_parallel": 1, "safety_factor": 1.5, "gpu_hour_usd": None}
    run = make_run(
        tmp_path / "run", stages, ["ttft_p99=1s"], warmup_requests=0, fleet_inputs=inputs
    )
    summary = summarise(run)
    low, high = summary["capacity"]["capacity_rps_ci"]
    assert 9 < low < 10 < high == 20.0  # the load beyond the gap, exactly
    ends = [math.ceil(math.ceil(95 / rate) * 1.5) for rate in (high, low)]
    assert summary["fleet"]["instances_ci"] == ends
    said = instances_text(summary["fleet"]["instances"], summary["fleet"]["instances_ci"])
    assert said.endswith(f" ({ends[0]} to {ends[1]})")
    words = [sys.executable, "-m", "ampacity", "plan", str(tmp_path / "run")]
    told, found = (
        subprocess.run([*words, *more], capture_output=True, check=True, text=True).stdout
        for more in ([], ["--json"])
    )
    assert f"need {said} with a safety factor of 1.5" in summary["verdict"]
    assert told.startswith(f"FLEET     {said}, ")
    assert json.loads(found)["instances_ci"] == ends
    assert said in render_report(read_summary(summary), run.meta)
