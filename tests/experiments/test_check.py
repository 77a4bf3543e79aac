"""``ampacity check``: one load against absolute limits, ended as soon as they are decided."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ampacity.analysis.change.results import CheckResult
from ampacity.analysis.summary import summarise
from ampacity.config import make_settings
from ampacity.experiments.check import ALPHAS, LOOKS, check, result_of
from ampacity.experiments.virtual.predict import predict
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.reports.change.gate import check_screen, gate_markdown, junit_xml, workflow_commands
from ampacity.simulator.models.hardware import find_deployment
from ampacity.simulator.server.launch import start_in_process
from benchmarks.servers import limit_at
from benchmarks.studies.check_rates import checked
from tests.support.args import Command, args_of
from tests.support.repeats import often
from tests.support.servers.fault_server import FaultServer
from tests.support.synthetic import Stage, make_run, request

LOAD = {"url": "http://predicted.invalid/v1", "input_tokens": "10", "output_tokens": "20"}


def checked_in_virtual_time(tmp_path: Path, slos: list[str], **raw: Any) -> CheckResult:
    """A step takes 10 ms + 1 ms for each of b in the batch: TTFT is 11 ms at least, at 10 req/s 3
    are in flight, and no queue forms."""
    given = {**LOAD, "rates": "10", "duration": "10m", "out": str(tmp_path / "run"), "slo": slos}
    settings = make_settings({**given, **raw})
    engine = find_deployment("linear:0.01,0.001")
    how: dict[str, Any] = {"drive": check, "experiment": "check"}
    path = asyncio.run(predict(settings, engine, ["ampacity"], Progress(), **how))
    return result_of(summarise(load_run(path)), str(path))


def test_the_looks_spend_five_per_cent_in_all() -> None:
    assert sum(ALPHAS) == pytest.approx(0.05)
    assert len(ALPHAS) == len(LOOKS) + 1
    # 0.05 ln(1 + (e - 1) 0.01), Pocock's spending at 1 % of the time
    assert ALPHAS[0] == pytest.approx(0.00085187, abs=1e-6)


def test_far_from_the_limit_it_ends_early_on_either_side(tmp_path: Path) -> None:
    met = checked_in_virtual_time(tmp_path / "met", ["ttft_p95=250ms", "goodput=90%"])
    assert met.verdict == "met"
    assert [c.verdict for c in met.checks] == ["met", "met"]
    assert isinstance(met.duration_s, float)
    assert met.duration_s <= 0.25 * 600
    assert met.sentence.startswith("Met at 10 req/s: ttft_p95=250ms, goodput=90%, after ")
    violated = checked_in_virtual_time(tmp_path / "violated", ["ttft_p95=8ms", "itl_p99=1s"])
    assert violated.verdict == "violated"
    assert violated.duration_s == pytest.approx(0.01 * 600)  # the first look
    assert [c.verdict for c in violated.checks if c.name == "ttft_p95=8ms"] == ["violated"]
    assert violated.checks[0].candidate >= 0.011
    stage = json.loads((tmp_path / "violated" / "run" / "run.json").read_text())["stages"][0]
    assert stage["decided_early"] == "violated: ttft_p95=8ms"
    assert "alpha" not in stage


@pytest.mark.parametrize(
    ("columns", "said", "verdict"),
    [
        ({"output_tokens": 2, "output_tokens_planned": 4}, "Answers were 50% shorter", "error"),
        ({"output_tokens": 6, "output_tokens_planned": 4}, "Answers were 50% longer", "error"),
        ({"input_tokens": 30}, "Prompts were 70% shorter", "error"),
        ({"answered_by": "a cache"}, "100 of 100 answers", "skipped"),
        ({}, "", None),
    ],
)
def test_a_check_of_another_load_than_the_planned_one_says_so(
    columns: dict[str, Any], said: str, verdict: str | None, tmp_path: Path
) -> None:
    """Other lengths are inconclusive; another name may be an alias, and is only said."""
    rows = [request(i, i / 8, gaps_s=[0.01], **columns) for i in range(100)]
    run = make_run(tmp_path / "run", [Stage(rows, 12.5, offered_rps=8.0)], ["ttft_p50=1s"])
    found = result_of(summarise(run), str(run.path))
    assert found.verdict == ("inconclusive" if verdict == "error" else "met")
    notes = check_screen(found, None, "report.html").notes
    assert [note.startswith(said) for note in notes] == [True] * bool(said)
    cases = ElementTree.fromstring(junit_xml(found)).iter("testcase")
    told = {case.get("name"): element.tag for case in cases for element in case}
    of_slo = "error" if verdict == "error" else "system-out"
    assert told == {"ttft_p50=1s": of_slo} | ({"load": verdict} if verdict else {})


def test_a_check_names_what_failed_and_what_was_cut_off(tmp_path: Path) -> None:
    """Of 100 requests 12 time out and 1 hangs when the run ends."""
    how = {"timeout": range(50, 62), "unfinished": range(99, 100)}
    rows = [
        request(i, i / 8, ttft_s=None, status=status) if status else request(i, i / 8)
        for i in range(100)
        for status in [next((s for s, at in how.items() if i in at), "")]
    ]
    run = make_run(tmp_path / "run", [Stage(rows, 12.5, offered_rps=8.0)], ["ttft_p50=1s"])
    found = result_of(summarise(run), str(run.path))
    said = "Of 100 requests 12 failed (timeout 12) and 1 was cut off unfinished."
    assert found.notes[0] == said
    assert said.rstrip(".") in gate_markdown(found).replace("\\", "")
    assert check_screen(found, None, "report.html").notes[0] == said


def test_too_short_to_tell_is_inconclusive_and_says_how_long_it_takes(tmp_path: Path) -> None:
    found = checked_in_virtual_time(tmp_path, ["ttft_p99=250ms"], duration="20s")
    assert found.verdict == "inconclusive"
    assert "more requests would decide: --max-duration" in found.sentence
    stage = json.loads((tmp_path / "run" / "run.json").read_text())["stages"][0]
    assert stage["alpha"] == pytest.approx(ALPHAS[-1])  # what ampacity report judges it by
    assert ElementTree.fromstring(junit_xml(found)).get("errors") == "1"
    (warning,) = workflow_commands(found)
    assert warning.startswith("::warning title=ampacity check::ttft_p99=250ms at 10 req/s")
    assert "| ttft_p99=250ms at 10 req/s |" in gate_markdown(found)
    assert gate_markdown(found).startswith("## ❔ ampacity check")
    screen = check_screen(found, None, "report.html")
    assert screen.answers[0].text == "inconclusive at 10 req/s"
    assert screen.answers[0].aside.endswith(found.sentence.rpartition(": ")[2])


def test_over_all_looks_a_verdict_at_the_limit_is_rarely_wrong() -> None:
    """An M/M/1 queue that just keeps its p95 at this load: either verdict is wrong in at most 5 %
    of the checks: more than 2 of 12 have a chance of 2 %, as more than 4 of 30. Far below it few
    requests decide."""
    n, most = often(12, 30), often(2, 4)
    slo = limit_at("mm1", 0.7, 0.95)
    words = [checked("mm1", 0.7, slo, 1000, seed)[0] for seed in range(n)]
    assert words.count("met") <= most
    assert words.count("violated") <= most
    low = [checked("mm1", 0.2, slo, 1000, seed) for seed in range(often(3, 5))]
    assert {word for word, _ in low} == {"met"}
    assert max(share for _, share in low) <= 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--rates 5", "a check needs a limit"),
        ("--slo ttft_p95=1s", "a check is made at one load"),
        ("--rates 5,6 --slo ttft_p95=1s", "a check is made at one load"),
        ("--rates 5 --slo goodput=95%", "goodput counts requests that meet the other SLOs"),
        ("--rates 5 --slo ttft_p95=1s --arrivals ramp:from=0.2,to=1.8", "one steady rate"),
        ("--rates 5 --slo ttft_p95=1s", "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_checked_is_an_error_in_the_files_of_ci_too(
    given: str, message: str, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--junit", tmp_path / "check.xml", "--markdown", tmp_path / "check.md")
    url = "check http://127.0.0.1:1/v1 --out"
    command(url, tmp_path / "run", given, *files, status=2)
    assert message in capsys.readouterr().err
    root = ElementTree.fromstring((tmp_path / "check.xml").read_text())
    assert (root.get("tests"), root.get("errors")) == ("1", "1")
    assert message in (tmp_path / "check.xml").read_text()
    assert (tmp_path / "check.md").read_text().startswith("## ❌ ampacity check")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "json"), [("--junit /dev/full", ""), ("--markdown /no/such/folder/x.md", "--json")]
)
def test_a_file_that_cannot_be_written_hides_no_verdict(
    file: str, json: str, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every answer takes 20 ms: decided at the first look, after 1 % of the time."""
    load = "--rates 100 --max-duration 20s --input-tokens 4 --output-tokens 2 --slo e2e_p50=5ms"
    with FaultServer(gap_s=0.01) as server:
        command(f"check {server.url} {load} {file} {json} --out", tmp_path / "run", status=2)
    told = capsys.readouterr()
    assert "verdict" in told.out.lower()
    assert f"ampacity: {file.split()[1]} cannot be written: " in told.err


LATE = ("--slo", "ttft_p50=1m")


@pytest.mark.real_time
@pytest.mark.parametrize(("slo", "status"), [("error_rate=50%", 0), ("error_rate=1%", 1)])
def test_in_real_time(
    slo: str,
    status: int,
    tmp_path: Path,
    ampacity: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A client that other work on this machine disturbed is inconclusive, and tries again. A
    quarter of the answers are errors; the limit on TTFT makes a late client harmless."""
    load = args_of("--input-tokens 10 --output-tokens 10 --rates 60 --max-duration 20s --json")
    with start_in_process("demo", faults={"errors": {"503": 0.25}}) as server:
        for attempt in range(4):
            out = tmp_path / str(attempt)
            ended = ampacity("check", server.url, *load, "--slo", slo, *LATE, "--out", out)
            found = json.loads(capsys.readouterr().out)
            if ended != 3:
                break
    assert ended == status
    assert found["verdict"] == ("violated" if status else "met")
    assert found["duration_s"] < 15
    assert found["run"] == str(out)
    assert (out / "report.html").stat().st_size > 1000
