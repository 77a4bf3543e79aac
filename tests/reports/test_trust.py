"""Warnings by severity, each with the command that mends it; the numbers behind the sliders."""

from typing import Any

import pytest

from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.reports.pages.trust import by_severity, doubts, origin, steady
from ampacity.reports.pages.what_if import what_if
from ampacity.reports.render.events import events_table
from tests.support.sample_summary import all_failed, errors, open_sweep

STAGES = [{"start_ns": 1, "end_ns": 40_000_000_001}, {"start_ns": 5, "end_ns": 30_000_000_005}]
SWEEP = ["ampacity", "sweep", "http://a/v1", "--duration", "40s", "--rates=1,2"]


@pytest.mark.parametrize(
    ("code", "command_line", "command"),
    [
        ("too_short", SWEEP, "ampacity sweep http://a/v1 --rates=1,2 --duration 80s"),
        ("drift", [*SWEEP[:3], "--duration=40s"], "ampacity sweep http://a/v1 --duration 80s"),
        ("too_few_requests", SWEEP, "the next command"),
        ("client_limited", ["ampacity", "run", "it's"], "ampacity run 'it'\"'\"'s' --cpus 4-7"),
        ("too_long", ["ampacity", "run", "--out", "x"], "ampacity run --fit-context"),
        ("too_long", ["ampacity", "run", "--fit-context"], "ampacity run --fit-context"),
        ("errors", SWEEP, None),
        ("too_short", [*SWEEP, "--header", "X: ***"], None),
        ("too_short", ["ampacity", "demo"], None),
        ("too_short", None, None),
    ],
)
def test_a_warning_has_the_command_that_mends_it(
    code: str, command_line: Any, command: str | None
) -> None:
    meta = {"command_line": command_line, "stages": STAGES, "host": {"cpus": 8}}
    (shown,) = by_severity(warned(code), meta)
    assert shown.command == command


def warned(*codes: str) -> Summary:
    warnings = [{"code": code, "text": "x"} for code in codes]
    changes = {"warnings": warnings, "next_command": "the next command"}
    return read_summary(open_sweep() | changes)


def test_grave_warnings_come_first() -> None:
    found = by_severity(warned("knee_region", "errors", "too_short", "client_limited"), {})
    assert [w.code for w in found] == ["errors", "client_limited", "knee_region", "too_short"]
    assert [w.grave for w in found] == [True, True, False, False]


def test_stages_without_a_steady_state_are_named() -> None:
    found = steady(read_summary(open_sweep()))
    note = "9 req/s: no; the first 12 requests of a steady stage are cut as warm-up"
    assert (found.value, found.note, found.state) == ("7 of 8 stages", note, "unsure")


def test_the_sliders_begin_with_the_run_and_exist_only_with_a_capacity() -> None:
    summary = open_sweep()
    summary["fleet"] |= {"peak_rps": None, "gpu_hour_usd": None, "safety_factor": 1.5}
    shown = what_if(read_summary(summary), (), "runs/a b")
    assert shown["assumed"]
    assert [c.text for c in shown["controls"]] == ["64", "1.5", "0", ""]
    assert shown["command"] == "ampacity plan 'runs/a b'"
    assert shown["data"]["limits"][0]["capacity_rps"] == 6.4
    assert what_if(read_summary(all_failed()), (), "RUN") is None


def test_what_is_no_measurement_of_its_own_is_named() -> None:
    measured = {"name": "chat", "source": "fitted to a.csv"}
    assumed = {"name": "chat", "source": "an assumption, not a measurement"}
    kinds = [
        [
            f"{f.value} {f.state}"
            for f in origin(read_summary(open_sweep() | {**how, "workload": workload}), {})
        ]
        for how in ({"simulated": False}, {"simulated": True})
        for workload in (measured, assumed)
    ]
    assert kinds == [
        ["chat "],
        ["chat unsure"],
        ["simulated unsure", "chat "],
        ["simulated unsure", "chat unsure"],
    ]


@pytest.mark.parametrize(
    ("url", "predicted", "said"),
    [
        ("http://127.0.0.1:8000/v1", False, True),
        ("https://localhost/v1", False, True),
        ("http://[::1]:8000/v1", False, True),
        ("http://127.0.0.1:8000/v1", True, False),
        ("http://127.0.0.1.example/v1", False, False),
        ("http://localhost.example/v1", False, False),
        ("http://gpu-7:8000/v1", False, False),
    ],
)
def test_a_server_on_the_client_s_host_is_named(url: str, predicted: bool, said: bool) -> None:
    summary = read_summary(open_sweep() | {"predicted": predicted})
    shown = [f.value for f in origin(summary, {"endpoint": {"url": url}}) if f.label == "Server"]
    assert shown == ["simulated"] * predicted + ["on the client's host"] * said


@pytest.mark.parametrize(
    ("changes", "url", "lead", "reasons"),
    [
        ({}, "http://gpu-7/v1", "Before you buy", []),
        ({"simulated": True}, "http://gpu-7/v1", "Do not buy", ["a simulator answered"]),
        ({"predicted": True}, "http://localhost/v1", "Do not buy", ["nothing was measured"]),
        (
            {"workload": {"name": "chat", "source": "an assumption: short turns"}},
            "http://localhost:8000/v1",
            "Before you buy",
            ["the workload is an assumption", "server and client share a machine"],
        ),
        (
            {"warnings": [{"code": "errors", "text": "x"}]},
            "http://gpu-7/v1",
            "Do not buy",
            ["1 grave warning below"],
        ),
        ({"warnings": [{"code": "drift", "text": "x"}]}, "http://gpu-7/v1", "Before you buy", []),
    ],
)
def test_what_speaks_against_a_purchase_is_one_sentence(
    changes: dict[str, Any], url: str, lead: str, reasons: list[str]
) -> None:
    one_run = ["it is one run of 9 min: other days and machines are not in it"]  # 8 × 63.1 s
    one_run = [] if changes.get("predicted") else one_run
    found = doubts(read_summary(open_sweep() | changes), {"endpoint": {"url": url}})
    assert found == f"{lead} on these figures: {'; '.join([*reasons, *one_run])}."


def test_what_happened_stands_in_the_order_of_time() -> None:
    summary = open_sweep()
    first, second = summary["stages"][7], summary["stages"][1]
    first |= {"index": 0, "name": "9 req/s", "stable": False, "concurrency_max": 919}
    first |= {"errors": errors(reset=2, unfinished=3), "server": None, "outage": None}
    second |= {"index": 1, "name": "2 req/s", "stable": True, "concurrency": 2.5}
    second |= {"concurrency_max": 6, "errors": errors(), "server": None, "outage": None}
    windows = ({"start_s": 1.0, "end_s": 9.0}, {"start_s": 0.5, "end_s": 8.0})
    for stage, window in zip((first, second), windows, strict=True):
        stage["window"] |= window
    starts = [{"index": 0, "start_ns": 10**9}, {"index": 1, "start_ns": 31 * 10**9}]
    table = events_table(read_summary(summary | {"stages": [second, first]}), {"stages": starts})
    assert [[cell.text for cell in row] for row in table.rows] == [
        [
            "9 req/s",
            "1.0 to 9.0",
            "requests in flight kept growing, to 919; 2 failed; "
            "3 not answered when the stage had ended, cut off",
        ],
        ["2 req/s", "30.5 to 38.0", "2.50 in flight on average, 6 at most"],
    ]
