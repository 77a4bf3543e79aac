"""The final screen of every command: it fits 80 x 24, and its answer is first."""

import io
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from ampacity.analysis.contract import stage as contract
from ampacity.analysis.contract.stage import StageClass
from ampacity.analysis.contract.summary import SloLimit, Summary, read_summary
from ampacity.analysis.next_run import (
    again,
    check_command,
    decide_command,
    next_command,
    same_stages,
)
from ampacity.analysis.summary import summarise
from ampacity.analysis.validate import Finding as Assumption
from ampacity.analysis.validate import Validation
from ampacity.cli.judge.validate import _screen as validate_screen
from ampacity.cli.measure.doctor import _screen as doctor_screen
from ampacity.loadgen.probe.diagnosis import Finding
from ampacity.loadgen.rundir.files import Run, load_run
from ampacity.reports.pages.screen import NOTES, render_screen
from ampacity.reports.render.table import Cell, Column, Table
from ampacity.reports.render.tables import stages_table
from ampacity.reports.render.terminal import Entry, Screen, print_table, show, spark
from tests.analysis.burst.test_burst import burst_run
from tests.support.args import Command, args_of
from tests.support.compared_runs import stage as compared
from tests.support.compared_runs import ttfts
from tests.support.contract import blank, struct_of
from tests.support.sample_summary import ALL, no_slos, open_sweep
from tests.support.synthetic import make_run, queue_sweep

WIDTHS = (60, 80, 120, 200)
COMMAND = ["ampacity", "sweep", "http://h/v1", "--model", "M", "--slo", "ttft_p95=1s"]
RATES = [1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 9.5]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sweep and a search of an M/M/1 queue, a burst, and runs to compare."""
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(2)
    path = [{"stage": i, "offered_rps": rate, "why": "narrow"} for i, rate in enumerate(RATES)]
    search = {"precision": 0.05, "reached": False, "path": path, "more_requests": 4000}

    def swept(name: str, **meta: Any) -> None:
        stages = queue_sweep(rng, RATES, 60.0, service_rps=10.0)
        make_run(folder / name, stages, ["ttft_p95=1s", "itl_p99=50ms"], **meta)

    swept("sweep", command_line=COMMAND, fleet_inputs={"peak_rps": 1000.0, "gpu_hour_usd": 2.5})
    swept("search", search=search, command_line=["ampacity", "search", *COMMAND[2:]])
    swept("partial", predicted=True, status="interrupted", status_reason="interrupted by Ctrl-C")
    burst_run(folder / "burst")
    for name, scale in (("a", 1.0), ("b", 1.2), ("c", 1.0)):
        made = compared(ttfts(ord(name), scale=scale))
        make_run(folder / name, [made], ["ttft_p99=2s"], run_id=name)
    return {path.name: path for path in folder.iterdir()}


CASES = {
    "sweep": ("report {sweep}", 0, "CAPACITY"),
    "search": ("report {search}", 0, "CAPACITY"),
    "partial": ("report {partial}", 0, "CAPACITY"),
    "burst": ("report {burst}", 0, "RECOVERED 10.1 s after the burst"),
    "run": ("report {a}", 0, "CAPACITY"),
    "compare": ("compare {a} {b}", 0, "WINNER    A"),
    "compare alike": ("compare {a} {c}", 0, "WINNER    no significant difference"),
    "plan": ("plan {sweep} --peak-rps 120 --gpu-hour 2.5 --prices {prices}", 0, "FLEET     "),
    "plan of tiers": (
        "plan --peak-rps 90 --tier small={sweep},0.7,H100,2.5 --tier large={search},0.3,2xH200,4",
        0,
        "FLEET     ",
    ),
    "gate": ("gate {b} --baseline {base}", 1, "VERDICT   regression"),
    "gate passed": ("gate {a} --baseline {base}", 0, "VERDICT   pass"),
    "baseline": ("baseline {a} {c} -o {out}.json", 0, "BASELINE  "),
    "predict": (
        "predict --preset linear:0.01,0.001 --input-tokens 10 --output-tokens 5 --rates 1,2 "
        "--duration 5s --slo ttft_p50=1s --out {out}",
        0,
        "CAPACITY",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_screen_fits_at_every_width_and_the_answer_is_first(
    name: str,
    runs: dict[str, Path],
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("ampacity.reports.pages.run_report.write_report", lambda *_: None)
    monkeypatch.setattr("ampacity.analysis.other_limits.capacity_at_limits", lambda *_: [])
    kept: dict[Path, Summary] = {}  # one analysis of a run for all widths

    def once(run: Run, *_: Any) -> Summary:
        return kept.get(run.path) or kept.setdefault(run.path, summarise(run))

    for user in ("analysis.summary", "analysis.change.judged", "experiments.sizing"):
        monkeypatch.setattr(f"ampacity.{user}.summarise", once)
    if "gate" in name:
        command("baseline", runs["a"], "-o", tmp_path / "base")
        capsys.readouterr()
    line, status, answer = CASES[name]
    (tmp_path / "prices").write_text("model,input,output\nhosted,0.5,1.5\nother,1,2\n")
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        files = {name: tmp_path / name for name in ("base", "prices")}
        places = {**runs, **files, "out": tmp_path / str(width)}
        command(line.format(**places), status=status)
        assert_fits(capsys.readouterr().out, width, answer)


def assert_fits(text: str, width: int, answer: str) -> None:
    lines = text.splitlines()
    assert text.startswith(answer)
    loose = ("NEXT", "REPORT", "/")  # a command and a path are never cut
    assert max(cell_len(x) for x in lines if not x.startswith(loose)) <= width
    assert all(x == x.rstrip() for x in lines)
    assert "\x1b" not in text
    if width == 80:
        assert sum(math.ceil(max(cell_len(x), 1) / width) for x in lines) <= 24


def shown(screen: Screen, width: int) -> str:
    out = io.StringIO()
    show(screen, Console(file=out, width=width))
    return out.getvalue()


def rendered(summary: dict[str, Any], width: int = 80, **options: Any) -> str:
    out = io.StringIO()
    render_screen(read_summary(summary), Console(file=out, width=width, **options), "r/report.html")
    return out.getvalue()


def test_the_screen_of_a_burst_says_what_each_figure_is_of(runs: dict[str, Path]) -> None:
    """The queue of 15/s in front of 10/s: 5.1 s, 50 in flight, against 0.1 s at the base."""
    out = io.StringIO()
    render_screen(summarise(load_run(runs["burst"])), Console(file=out, width=120))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    peak = r"of the burst or before recovery \(base median 100 ms\); (\d+) in flight at once"
    (found,) = filter(None, (re.fullmatch(rf"PEAK TTFT (\S+) s {peak}", x) for x in lines))
    assert float(found[1]) == pytest.approx(5.1, abs=0.1)
    assert int(found[2]) == pytest.approx(50, abs=2)
    drawn = [line for line in lines if line.startswith(("TTFT p50", "IN FLIGHT", "│base"))]
    assert " 100 ms to " in drawn[0]
    assert re.search(r" bin means 0\.\d+ to \d", drawn[1])
    assert drawn[2].endswith("│recovery bins of 2 s")


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor_and_validate_fit(width: int) -> None:
    words = ["ok"] * 10 + ["note", "bad", "bad", "bad"]
    checks = [Finding(f"check {i}", v, "found " * 20, "means", ()) for i, v in enumerate(words)]
    command = args_of("ampacity doctor http://h/v1 --model M --json")
    trusted = {"ttft": True, "itl": False}
    text = shown(doctor_screen(checks, trusted, command), width)
    assert_fits(text, width, "TRUSTED   TTFT\nUNTRUSTED ITL\n")
    assert "NEXT      ampacity sweep http://h/v1 --model M --slo interactive\n" in text
    verdicts = {"ttft": "met", "itl": "violated", "e2e": "inconclusive"}
    base = blank(Assumption) | {
        "benchmark": 0.1,
        "production": 0.2,
        "production_bounds": [0.1, 0.3],
    }
    found = msgspec.convert(
        blank(Validation)
        | {
            "violated": ["itl_p99"],
            "findings": [
                base | {"name": f"{n}_p99", "verdict": v, "assumption": "as fast"}
                for n, v in verdicts.items()
            ],
        },
        Validation,
    )
    stage = struct_of(contract.Stage, {"index": 0, "achieved_rps": 5.0})
    observed: Any = type("Production", (), {"source": "page", "rps": None, "notes": ["a note"]})
    text = shown(validate_screen(Path("run"), found, stage, observed), width)
    assert_fits(text, width, "VERDICT   1 assumption violated: itl_p99")
    assert text.index("✗  itl_p99") < text.index("✓  ttft_p99") < text.index("?  e2e_p99")


@pytest.mark.parametrize(
    ("verified", "told"),
    [(6.0, "verified to 6.00 by a single stage"), (None, "from all stages together")],
)
def test_an_estimate_says_up_to_which_load_it_is_verified(
    verified: float | None, told: str
) -> None:
    """The capacity is the estimate on the screen, as it is in summary.json."""
    summary = open_sweep()
    held = {"crossing": "pooled", "capacity_rps_ci": [6.0, 7.0], "verified_rps": verified}
    summary["capacity"] |= held | {"estimate_rps": 6.4, "estimate_rps_ci": [6.0, 7.0]}
    first = rendered(summary, 120).splitlines()[0].rstrip()
    assert first == f"CAPACITY  6.40 req/s estimated    95 % 6.00–7.00, {told}"


def test_the_screen_of_a_sweep() -> None:
    """Of open_sweep: capacity 6.4 in (6, 7), 25 instances of 4 GPUs for 120 requests/s."""
    assert rendered(open_sweep()).splitlines()[:13] == [
        "CAPACITY  6.40 req/s interpolated    between 6.00–7.00",
        "C_MAX     34.2 in flight    between 28.0–44.0",
        "LIMIT     ttft_p99 ≤ 2 s    breaks first; itl_p99 ≤ 100 ms never violated",
        "FLEET     100 GPUs for 120 req/s    25 instances (24 to 26): 19 for the peak,",
        "          safety 1.3, $2.31 per million output tokens at full load",
        "req/s  TTFT p99  ITL p99  in flight  goodput  failed  SLO",
        # 1.1 × (120 + 179) at 1/s, 1.1 × (600 + 900) at 7/s, 3.1 s of warm-up: 332 s and 239 s
        "    1         –  61.0 ms       2.70     1.00       0  ? inconclusive: run 6 min",
        "    2    319 ms  28.9 ms       5.60     2.00       0  ✓ met",
        "    3    362 ms  33.1 ms       9.10     3.00       0  ✓ met",
        "    4    427 ms  38.3 ms       13.4     4.00       0  ✓ met",
        "    5    767 ms  45.3 ms       19.2     5.00       0  ✓ met",
        "    6    1.77 s  56.3 ms       28.4     5.94       0  ✓ met",
        "    7    2.10 s  61.0 ms       44.0     6.56       0  ? inconclusive: run 4 min",
    ]


def test_a_stage_that_a_budget_cut_lacks_requests_not_time() -> None:
    """1.1 × (5 + 54) requests at 40/s take 1.6 s, and the stage lasted a minute."""
    summary = open_sweep()
    stage = summary["stages"][0]
    stage |= {"requests": 5, "offered_rps": 40.0}
    stage["slo_verdicts"][0]["more_requests"] = 54
    assert "? inconclusive: 54 more requests" in rendered(summary)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_summary_fits(name: str, width: int) -> None:
    assert_fits(rendered(ALL[name](), width), width, "CAPACITY")


def test_a_long_table_keeps_the_ends_and_what_is_near_the_capacity(
    runs: dict[str, Path], command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command("report", runs["search"])
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("req/s"))
    loads = [float(line.split()[0]) for line in lines[head + 1 : head + 9]]
    assert loads == sorted(loads)
    assert (loads[0], loads[-1]) == (RATES[0], RATES[-1])
    # TTFT of M/M/1 is exponential: p95 is 1 s at 10 - ln 20 = 7.0 requests/s
    assert {6.0, 6.5, 7.0} <= set(loads)
    assert lines[head + 9] == "4 more with --summary full"
    drawn = next(line for line in lines if line.startswith("BRACKET"))
    assert drawn.index("✓") < drawn.index("◆") < drawn.index("✗")
    assert "═" in drawn


def test_sparklines() -> None:
    assert spark([0, 1, 2, 4, 8, 7.9, None], 7) == "▁▂▃▅██ "
    assert spark([1, 2, 8, 4], 2) == "▃█"  # the highest of each part
    assert spark([0.0, 0.0], 10) == "▁▁"


def test_every_warning_has_a_short_note() -> None:
    from ampacity.analysis.warnings import RULES

    assert set(NOTES) | {"imported"} == set(RULES)
    assert all(len(note or "") <= 140 for note in NOTES.values())


LEAST = {"capacity": open_sweep()["capacity"] | {"crossing": "lower_bound"}}
TOO_HIGH = open_sweep()["capacity"] | {"capacity_rps": None, "lower_loads": [1.1, 2.1, 1200.0]}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "--rates 7 --duration 4m"),  # (600 + 900) / 7 x 1.1 s, and 3.1 s of warm-up: 239 s
        ({"slos": []}, "--model M --slo ttft_p99=2s --slo tpot_p99=100ms"),
        ({"audit": {"client_limited": True, "cpu_fraction": 0.9}, **LEAST}, "--workers 4"),
        ({"audit": {"client_limited": True, "cpu_fraction": 0.1}, **LEAST}, "--cpus 4-7"),
        ({"audit": {"client_limited": True, "cpu_fraction": 0.1}}, "--rates 7 --duration 4m"),
        ({**LEAST}, "--rates 12.8,25.6"),  # twice and four times the bound of 6.4
        ({"capacity": TOO_HIGH}, "--slo ttft_p95=1s --rates 1.1,2.1,1200"),
        ({"next_command": "as noted"}, None),
    ],
)
def test_the_next_command(changed: dict[str, Any], expected: str | None) -> None:
    summary = open_sweep() | changed
    if expected is not None:
        line = [*COMMAND, "--out", "x"]
        meta = {"command_line": line, "workers": 2, "host": {"cpus": 8}}
        found = next_command(struct_of(Summary, summary), meta, "runs/x")
        assert found.startswith("ampacity sweep http://h/v1 --model M ")
        assert found.endswith(expected), found
        assert "--out" not in found


def test_a_run_without_slo_whose_stages_were_too_short_is_repeated_twice_as_long() -> None:
    summary = open_sweep() | {"slos": [], "warnings": [{"code": "drift", "text": "it drifts"}]}
    line = [*COMMAND, "--duration", "5s"]
    found = next_command(struct_of(Summary, summary), {"command_line": line}, "runs/x")
    assert found == f"{' '.join(COMMAND[:5])} --duration 10s --slo ttft_p99=2s --slo tpot_p99=100ms"


FLEET = "--peak-rps 9 --safety 2 --rates 1,2 --precision 5% --out x".split()


@pytest.mark.parametrize(
    ("line", "capacity", "expected"),
    [
        (
            [*COMMAND, *FLEET],
            {"verified_rps": 5.5},
            f"{' '.join(COMMAND[2:])} --rates 5.5 --max-duration 10m",
        ),
        (
            COMMAND,
            {"verified_rps": None, "capacity_rps_ci": [6.12, 7.1]},
            "--slo ttft_p95=1s --rates 4 --max-duration 10m",
        ),
        (
            ["ampacity", "demo"],
            {"verified_rps": 100.0},
            "http://YOUR-SERVER/v1 --slo ttft_p95=1s --workload chat --rates 100 --max-duration 10m",
        ),
        ([*COMMAND, "-c", "x.yaml"], {"verified_rps": 5.5}, None),
        (["ampacity", "burst", *COMMAND[2:]], {"verified_rps": 5.5}, None),
    ],
)
def test_a_release_is_checked_at_a_load_that_holds(
    line: list[str], capacity: dict[str, Any], expected: str | None
) -> None:
    """Verified, else the highest that met the SLOs by all stages together: 4/s. A load that no
    stage had, as the low end of the interval, is none."""
    summary = open_sweep()
    for stage in summary["stages"][2:4]:
        stage["slo_met_by_all"] = True
    summary["capacity"] |= capacity
    summary["slos"] = [slo | {"text": "ttft_p95=1s"} for slo in summary["slos"][:1]]
    found = check_command(struct_of(Summary, summary), {"command_line": line})
    if expected is None:
        assert found is None
        return
    assert found.startswith("ampacity check http")
    assert found.endswith(expected), found


def test_every_open_load_within_the_interval_is_decided_by_one_command() -> None:
    """3 s and 1.1 × 1,590 / 6 = 292 s; 3 s and 1.1 × 1,130 / 7 = 178 s; whole minutes, upwards."""
    summary = open_sweep()
    for stage, more in ((summary["stages"][5], 530), (summary["stages"][6], 70)):
        stage |= {"slo_met": None, "requests": 1060}
        stage["window"] |= {"start_s": 3.0}
        stage["slo_verdicts"][0] |= {"verdict": "inconclusive", "more_requests": more}
    for line in (COMMAND, ["ampacity", "demo"]):
        found = decide_command(struct_of(Summary, summary), {"command_line": line})
        assert found == f"{' '.join(line)} --rates 6,7 --duration 5m,4m"
    searched = decide_command(
        struct_of(Summary, summary), {"command_line": ["ampacity", "search", "u"]}
    )
    assert searched is None


def test_a_used_up_budget_becomes_what_was_planned_or_is_doubled() -> None:
    partial = "ended by its budget at stage 1 (2 req/s): --max-tokens 50000 is used up"
    summary = struct_of(Summary, open_sweep() | {"partial": partial})
    line = [*COMMAND, "--max-tokens", "50000", "--max-cost=0.5"]
    found = next_command(summary, {"command_line": line}, "runs/x")
    assert found == f"{' '.join(COMMAND)} --max-cost 1 --max-tokens 100000"
    meta = {"command_line": line, "planned": {"requests": 700, "tokens": 141_200, "cost": 0.3}}
    found = next_command(summary, meta, "runs/x")  # 141,200 in two digits; the cost fitted in
    assert found == f"{' '.join(COMMAND)} --max-cost 1 --max-tokens 150000"
    assert next_command(summary, {"command_line": COMMAND}, "runs/x") is None


def test_a_run_that_was_interrupted_is_resumed() -> None:
    summary = struct_of(Summary, open_sweep() | {"partial": "interrupted at stage 1"})
    found = next_command(summary, {"command_line": COMMAND}, "runs/x")
    assert found == "ampacity sweep --resume runs/x"


@pytest.mark.parametrize(("repeated", "metrics"), [([], {}), ([7], {"itl": "late"}), ([7], {})])
def test_a_client_that_was_the_limit_has_a_note_with_the_remedy(
    repeated: list[int], metrics: dict[str, str]
) -> None:
    """No note where the one stage was repeated; one without marked rows where figures are late."""
    summary = open_sweep()
    busiest = [{"name": "backup", "cores": 0.97}]
    summary["stages"][7] |= {"client_limited": True, "client_limited_reason": "late"}
    summary["stages"][7] |= {"busiest": busiest}
    summary["stages"][6] |= {"client_limited_metrics": metrics, "busiest": busiest}
    summary["audit"] |= {"cpu_fraction": 0.05, "client_limited": not repeated}
    summary["audit"] |= {"client_limited_stages": [7], "repeated_stages": repeated}
    warned = bool(metrics or not repeated)
    summary["warnings"] = [{"code": "client_limited", "text": "long"}] * warned
    text = " ".join(rendered(summary).split())
    other = "other work on this machine (backup 0.97 cores)"
    note = f"NOTE Stop (or nice) {other}, or pin the client with --cpus"
    assert (note in text) is warned
    assert "stages marked so" not in text


def test_after_the_demo_comes_a_sweep_of_ones_own_server() -> None:
    found = next_command(
        read_summary(open_sweep()), {"command_line": ["ampacity", "demo"]}, "runs/x"
    )
    assert found == "ampacity sweep http://YOUR-SERVER/v1 --slo ttft_p99=2s --slo itl_p99=100ms"


def test_in_flight_at_a_lower_bound_is_a_lower_bound_too() -> None:
    text = rendered(open_sweep() | LEAST)
    assert "CAPACITY  at least 6.40 req/s" in text
    assert "C_MAX     at least 34.2 in flight" in text


def test_a_stage_that_all_stages_decide_says_so() -> None:
    summary = open_sweep()
    summary["stages"][6] |= {"slo_met_by_all": True}
    assert "✓ met (all stages together)" in rendered(summary)


def test_a_growing_queue_alone_is_named_as_the_violation() -> None:
    """The one verdict of the last stage is met, so the queue is the whole reason."""
    summary = open_sweep()
    summary["stages"][7] |= {"stable": False, "slo_met": False}
    for verdict in summary["stages"][7]["slo_verdicts"]:
        verdict["verdict"] = "met"
    assert "✗ queue grew" in rendered(summary)
    table = stages_table(read_summary(summary))
    assert table.rows[7][-1].text == "queue grew"


def test_a_command_is_made_again() -> None:
    words = ["ampacity", "sweep", "u", "--rates=1,2", "-o", "x", "--closed", "--model", "a b"]
    changes = {"--rates": "3", "--slo": "ttft_p95=1s"}
    text = "ampacity sweep u --model 'a b' --rates 3 --slo ttft_p95=1s"
    assert again(words, changes, ["--closed"]) == text
    assert again(["ampacity", "demo", "-o", "x"], {"--max-duration": "10m"}) == "ampacity demo"


def played(*stages: dict[str, Any], experiment: str = "search") -> dict[str, Any]:
    """run.json of stages that begin at 7 s, each 12.5 s long."""
    times = {"start_ns": 7_000_000_000, "end_ns": 19_500_000_000}
    return {
        "experiment": experiment,
        "stages": [{"index": i, **times, **s} for i, s in enumerate(stages)],
    }


def test_the_stages_that_a_run_chose_are_named_in_their_order() -> None:
    """A stage that was repeated counts once; a closed loop's ramp comes on top of its length."""
    words = "ampacity search u --precision 5% --closed --max-duration 9m --seed 7 -o x".split()
    fast, slow = ({"kind": "open", "offered_rps": rate} for rate in (200.0, 12.345))
    meta = played(fast | {"schedule": 0}, slow | {"schedule": 1}, slow | {"schedule": 1})
    loads = "--rates 200,12.345 --duration 12.5s,12.5s"
    assert same_stages(words, meta) == f"ampacity sweep u --seed 7 {loads}"
    demo = same_stages(["ampacity", "demo"], played(fast, slow, experiment="demo"))
    assert demo == f"ampacity demo {loads}"
    seeded = same_stages(["ampacity", "demo"], {**played(fast, slow, experiment="demo"), "seed": 0})
    assert seeded == f"ampacity demo {loads} --seed 0"
    ramped = played({"kind": "closed", "concurrency": 8, "ramp_s": 2.0}, experiment="sweep")
    users = same_stages(["ampacity", "sweep", "u"], ramped)
    assert users == "ampacity sweep u --concurrency 8 --duration 10.5s"


@pytest.mark.parametrize(
    ("words", "stages", "experiment"),
    [
        ("sweep u --rates 3", [{"kind": "open", "offered_rps": 3.0}], "sweep"),
        ("burst u", [{"kind": "open", "offered_rps": 3.0}], "burst"),
        ("sweep u", [{"kind": "open", "offered_rps": 3.0, "lengths": "p99"}], "sweep"),
        ("search u", [{"kind": kind} for kind in ("open", "closed")], "search"),
        ("sweep u", [], "sweep"),
        ("", [{"kind": "open", "offered_rps": 3.0}], "sweep"),
    ],
)
def test_loads_that_were_given_or_fit_in_no_option_are_not_named(
    words: str, stages: list[dict[str, Any]], experiment: str
) -> None:
    assert same_stages(["ampacity", *words.split()], played(*stages, experiment=experiment)) is None


HOSTILE = "<script>alert(1)</script>\x1b[2J\x1b]0;x\x07\r\n[bold]"


def _classes() -> dict[str, Any]:
    summary = open_sweep()
    names = [f"class-{i}" for i in range(200)]
    limits = [blank(SloLimit) | slo for slo in ALL["one_stage"]()["slos"][:1]]
    summary["slos"] = [
        {**limits[0], "class": n, "text": f"{n}:ttft_p99=2s", "metric": "ttft", "quantile": 0.99}
        for n in names
    ]
    kind = blank(StageClass)
    for stage in summary["stages"]:
        base = stage["slo_verdicts"][0]
        stage["classes"] = dict.fromkeys(names, kind)
        stage["slo_verdicts"] = [{**base, "slo": f"{n}:ttft_p99=2s"} for n in names]
    summary["capacity"] |= {"binding_slo": "class-7:ttft_p99=2s"}
    return summary


HOSTILE_SUMMARIES: dict[str, Callable[[], dict[str, Any]]] = {
    "model": lambda: open_sweep() | {"next_command": shlex.join([*COMMAND[:4], HOSTILE])},
    "long model": lambda: open_sweep() | {"next_command": shlex.join([*COMMAND[:4], "m" * 5000])},
    "error": lambda: open_sweep() | {"error_examples": {"timeout": HOSTILE}},
    "verdict": lambda: no_slos() | {"verdict": HOSTILE, "partial": HOSTILE},
    "classes": _classes,
    "warning": lambda: open_sweep() | {"warnings": [{"code": "new", "text": HOSTILE * 9}] * 5},
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", HOSTILE_SUMMARIES)
def test_hostile_text_is_text(name: str, width: int) -> None:
    text = rendered(HOSTILE_SUMMARIES[name](), width)
    assert_fits(text, width, "CAPACITY")
    assert not {c for c in text if not c.isprintable()} - {"\n"}
    if name in ("model", "error"):
        assert "<script>" in text
    if name == "long model":
        assert "NEXT      next_command in summary.json: too long to show" in text


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8"])
def test_any_encoding_prints_with_the_columns_aligned(encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    render_screen(read_summary(open_sweep()), Console(file=file, width=80))
    file.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("req/s"))
    marks = [line[lines[head].index("SLO")] for line in lines[head + 1 : head + 9]]
    assert marks == list("?✓✓✓✓✓?✗" if encoding == "utf-8" else "?+++++?x")
    assert ("<=" in lines[2]) == (encoding != "utf-8")


def test_no_colour_and_colour() -> None:
    plain, coloured = (
        rendered(open_sweep(), 80, force_terminal=True, no_color=off) for off in (True, False)
    )
    assert "\x1b[32m" in coloured
    assert "[32m" not in plain


def test_a_long_last_column_is_wrapped_where_there_is_room_and_never_cut_in_a_word() -> None:
    """40 columns, of which 8 and a gap are the name's: 30 are left, five words of 5 letters."""
    columns = [Column("check", text=True), Column("found", text=True, cut=True)]
    rows = [[Cell("number-" + str(i)), Cell("abcde " * 8)] for i in range(3)]
    out = io.StringIO()
    console = Console(file=out, width=40)
    print_table(console, Table("", columns, rows), spare=2)
    five, three = " ".join(["abcde"] * 5), " ".join(["abcde"] * 3)
    assert out.getvalue().splitlines() == [
        "check     found",
        f"number-0  {five}",
        f"          {three}",
        f"number-1  {five}",
        f"          {three}",
        f"number-2  {' '.join(['abcde'] * 4)} …",  # the fifth would leave no place for the mark
    ]
    text = shown(Screen([Entry("E", "x")], Table("", columns, rows)), 40)
    assert "…" not in text


def test_an_answer_that_is_cut_ends_with_a_word() -> None:
    texts = [Entry(f"E{i}", "abcdefg " * 30) for i in range(12)]
    lines = shown(Screen(texts), 80).splitlines()
    assert all(line.endswith(" abcdefg …") for line in lines)


def test_a_screen_that_does_not_fit_gives_every_answer_fewer_lines() -> None:
    answers = [Entry(f"E{i}", "word " * 60) for i in range(12)]
    lines = shown(replace(Screen(answers), notes=["note " * 60] * 5), 80).splitlines()
    assert len(lines) <= 23
    assert [line.split()[0] for line in lines if line[:1] == "E"] == [f"E{i}" for i in range(12)]
    assert lines[-1].endswith("+ 2 more with --summary full") or "…" in lines[-1]


def test_a_limit_that_a_figure_is_over_without_a_verdict_is_in_doubt() -> None:
    summary = open_sweep()
    itl = next(v for v in summary["stages"][6]["slo_verdicts"] if v["slo"] == "itl_p99=100ms")
    itl |= {"verdict": "inconclusive", "value_s": 0.101}
    assert "itl_p99 ≤ 100 ms in doubt at 7 req/s" in rendered(summary, 120)
    itl |= {"value_s": 0.0999}
    assert "itl_p99 ≤ 100 ms never violated" in rendered(summary, 120)


@pytest.mark.parametrize(
    ("unfinished", "met", "missed"), [(0, None, "4.90%"), (3, None, "≤ 4.90%"), (3, False, "4.90%")]
)
def test_what_was_cut_off_may_have_met_the_slo(
    unfinished: int, met: bool | None, missed: str
) -> None:
    """At 7/s 95.1 % met it; a queue that grows is cut off in each run."""
    summary = open_sweep()
    summary["stages"][6]["errors"]["unfinished"] = unfinished
    summary["stages"][6]["slo_met"] = met
    (row,) = [line for line in rendered(summary, 200).splitlines() if line.strip().startswith("7 ")]
    assert f" {missed} " in row
    assert ("≤ 4.90%" in row) is ("≤" in missed)
