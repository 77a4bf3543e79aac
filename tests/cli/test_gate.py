"""``ampacity baseline`` and ``ampacity gate``: exit states, CI outputs."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from msgspec.structs import replace

from ampacity.analysis.change.results import Check, GateResult
from ampacity.experiments.samples import Budget
from ampacity.reports.change.gate import chart, gate_markdown, junit_xml, workflow_commands
from ampacity.reports.change.gate_page import write_gate_page
from tests.support.args import Command, args_of
from tests.support.synthetic import Stage, make_run, request

ROOT = Path(__file__).parents[2]
RATE = 20.0


def made(path: Path, scale: float = 1.0, n: int = 1000, draw: int = 1, **meta: Any) -> Path:
    values = scale * np.random.default_rng(draw).lognormal(np.log(0.1), 0.3, n)
    records = [
        request(i, i / RATE, ttft_s=float(t), gaps_s=[0.01] * 4) for i, t in enumerate(values)
    ]
    make_run(path, [Stage(records, n / RATE, offered_rps=RATE)], **({"run_id": path.name} | meta))
    return path


@pytest.fixture
def base(tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> Path:
    command("baseline", made(tmp_path / "base"), "-o", tmp_path / "base.json")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "base.json")
    return tmp_path / "base.json"


def test_exit_status_says_the_answer(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    command("gate", made(tmp_path / "same"), "--baseline", base)
    page, slow = tmp_path / "gate.html", made(tmp_path / "slow", 1.1)
    command("gate --summary full", slow, "--baseline", base, "--html", page, status=1)
    assert capsys.readouterr().out.count("REGRESSION") >= 2
    assert '<h1 id="verdict">Regression: ' in page.read_text()
    other = made(tmp_path / "other", n=600, seed=2)
    command("gate", other, "--baseline", base, "--tolerance ttft_p50=0.1%", status=3)
    command("gate", made(tmp_path / "slo"), "--baseline", base, "--slo ttft_p50=50ms", status=1)


def test_a_baseline_prints_a_screen_and_the_whole_table_where_it_is_asked_for_or_redirected(
    tmp_path: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("baseline", made(tmp_path / "run"), "-o", tmp_path / "base.json")
    command(*line)
    redirected = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    command(*line, "--summary full")
    assert capsys.readouterr().out == redirected
    command(*line)
    short = capsys.readouterr().out
    held = json.loads((tmp_path / "base.json").read_text())["levels"]["20/s"]
    entries = held["quantiles"]
    finds = [100 * e["finds"]["same_schedule"]["now"] for e in entries.values()]
    tolerances = [e["tolerance"]["same_schedule"] or 1.0 for e in entries.values()]
    passing = [t for t in tolerances if t <= 0.15]
    assert f"1 run, {sum(held['requests']):,} requests\n" in short
    assert f"FINDS     +{min(finds):.2g} % to +{max(finds):.2g} %    slower" in short
    assert f"JUDGES    {len(passing)} quantiles" in short
    lines = short.splitlines()
    head = next(i for i, text in enumerate(lines) if text.startswith("loosest first"))
    assert f" {100 * max(passing):.3g} % " in lines[head + 1]
    assert all(f"  {name} " in redirected for name in entries)
    assert len(lines) < 24
    assert max(map(len, lines[:-1])) <= 80


def test_the_page_says_what_was_tested_with_a_comma_and_in_whole_rows(tmp_path: Path) -> None:
    slow = Check(
        "ttft_p50", "change", "20/s", "regression", 0.1, 0.12, 0.2, (0.1, 0.2), tolerance=0.05
    )
    checks = [replace(slow, shift=0.18), replace(slow, name="e2e_p50", verdict="pass")]
    result = GateResult(
        verdict="regression", sentence="Regression: x.", notes=[], untracked={}, checks=checks
    )
    write_gate_page(tmp_path / "gate.html", result, None)
    page = (tmp_path / "gate.html").read_text()
    assert "at equal load ttft_p50 at 20/s +18.0 %, not the change of the two figures" in page
    counted = "<dt>Checks</dt><dd>1 worse than allowed, 1 passed</dd>"
    assert f'<div class="long">{counted}' in page


@pytest.mark.parametrize("option", ["--html", "--junit", "--markdown"])
def test_no_file_of_a_run_or_a_baseline_is_overwritten(
    option: str, tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    run = made(tmp_path / "new")
    (run / "answers-0.jsonl").write_text("{}\n")
    link = tmp_path / "link.xml"
    link.symlink_to(run / "requests.parquet")
    for kept in (base, run / "run.json", run / "requests.parquet", run / "answers-0.jsonl", link):
        before = kept.read_bytes()
        command("gate", run, "--baseline", base, option, kept, status=2)
        assert f"{kept} may be of a run or a baseline: not overwritten" in capsys.readouterr().err
        assert kept.read_bytes() == before


@pytest.mark.parametrize("file", ["--junit /dev/full", "--markdown /no/such/folder/x.md"])
@pytest.mark.parametrize("json", ["", "--json"])
def test_a_file_that_cannot_be_written_hides_no_verdict(
    file: str, json: str, tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    """The verdict comes first, then the error; and the reason for no verdict is more than that."""
    command("gate", made(tmp_path / "slow", 1.1), "--baseline", base, file, json, status=2)
    told = capsys.readouterr()
    assert "regression" in told.out
    assert told.err.startswith(f"ampacity: {file.split()[1]} cannot be written: ")
    command("gate", tmp_path / "none", "--baseline", base, file, json, status=2)
    assert "no run directory" in capsys.readouterr().err


def test_a_baseline_replaces_no_other_file(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    run, summary = made(tmp_path / "run"), tmp_path / "run" / "summary.json"
    summary.write_text('{"schema_version": 1}')
    command("gate", run, "--baseline", summary, status=2)
    said = capsys.readouterr().err
    assert "is no baseline: make one with" in said
    assert f"-o {summary}" not in said  # who obeys loses nothing
    for held in ('{"schema_version": 1}', "not JSON"):
        for other, said in ((tmp_path / "x.json", "is no baseline and is"), (summary, "may be of")):
            other.write_text(held)
            command("baseline", run, "-o", other, status=2)
            assert f"{other} {said}" in capsys.readouterr().err
            assert other.read_text() == held
    whole = base.read_text()
    for held in (
        "",
        whole[: len(whole) // 2],
        whole.replace('"schema_version": 4', '"schema_version": 1'),
    ):
        base.write_text(held)
        command("baseline", tmp_path / "base", "-o", base)
        assert base.read_text() == whole


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"status": "aborted"}, "is aborted"),
        ({"endpoint": {"model": "N", "api": "chat"}}, "--model is N, in the baseline M"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_stands_in_the_files_too(
    tmp_path: Path, base: Path, command: Command, capsys: Any, change: dict[str, Any], says: str
) -> None:
    run = made(tmp_path / "run")
    meta = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(meta | change))
    junit, summary = tmp_path / "gate.xml", tmp_path / "gate.md"
    command("gate", run, "--baseline", base, "--junit", junit, "--markdown", summary, status=2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert says in err
    assert ElementTree.parse(junit).getroot().get("errors") == "1"
    assert "Cannot compare" in summary.read_text()


def test_a_candidate_that_was_never_written_is_no_pass(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    command("gate", tmp_path / "none", "--baseline", base, status=2)
    assert "no run directory" in capsys.readouterr().err
    command("gate", tmp_path / "base", "--baseline", tmp_path / "none.json", status=2)
    assert "ampacity baseline RUN" in capsys.readouterr().err


def test_a_truncated_requests_file_cannot_be_compared(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    run = made(tmp_path / "run")
    whole = (run / "requests.parquet").read_bytes()
    (run / "requests.parquet").write_bytes(whole[: len(whole) // 2])
    command("gate", run, "--baseline", base, status=2)
    assert capsys.readouterr().err.count("\n") == 1


def test_self_test_proves_that_the_gate_turns_red(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    command("gate", tmp_path / "base", "--baseline", base, "--self-test")
    assert "twice as slow is found" in capsys.readouterr().err
    blind = [a for m in ("ttft", "itl", "tpot", "e2e") for a in ("--tolerance", f"{m}=300%")]
    command("gate", tmp_path / "base", "--baseline", base, "--self-test", *blind, status=1)
    assert "FAILED" in capsys.readouterr().err


def test_a_fault_of_our_own_is_no_regression(
    tmp_path: Path, base: Path, command: Command, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1 is a regression; anything unexpected is 2, with its traceback, and stands in the CI's
    file."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("edges_s")

    monkeypatch.setattr("ampacity.analysis.gate.gate.judge_gate", fail)
    junit = tmp_path / "g.xml"
    command("gate", made(tmp_path / "same"), "--baseline", base, "--junit", junit, status=2)
    assert "KeyError: 'edges_s'" in capsys.readouterr().err
    assert ElementTree.parse(junit).getroot().get("errors") == "1"


def test_json_is_the_whole_answer(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    command("gate", made(tmp_path / "slow", 1.1), "--baseline", base, "--json", status=1)
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "regression"
    assert found["alpha"] == 0.05
    assert found["same_schedule"] is True
    worst = next(c for c in found["checks"] if c["name"] == "ttft_p50")
    assert worst["change"] == pytest.approx(0.1, abs=5e-3)
    low, high = worst["change_ci"]
    assert low < 0.1 < high


def test_further_samples_run_the_recorded_command_again(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    predict = args_of("predict --preset linear:0.01,0.001 --input-tokens 10 --output-tokens 20")
    command(*predict, "--rates 20 --max-requests 400 --seed 5 --out run")
    command("baseline run -o base.json")
    capsys.readouterr()
    tight = ("--tolerance", "ttft=0.01%")  # less than the noise that is assumed from run to run
    command("gate run --baseline base.json", *tight, "--max-samples 2 --json", status=3)
    found = json.loads(capsys.readouterr().out)
    assert (found["look"], found["looks"]) == (2, 2)
    assert found["candidate_runs"] == 2
    assert any(note.startswith("All 2 samples are taken; ") for note in found["notes"])
    command("gate run run-sample-2 --baseline base.json", *tight, "--max-samples 2", status=3)
    assert "NEXT" not in capsys.readouterr().out  # a third look was not planned
    again = json.loads((tmp_path / "run-sample-2" / "run.json").read_text())
    assert again["seed"] == 6  # with the same one virtual time would repeat itself
    assert again["command_line"][1:4] == ["predict", "--preset", "linear:0.01,0.001"]


def test_what_cannot_be_repeated_is_inconclusive_and_the_command_is_printed(
    tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    words = ["ampacity", "run", "URL", "--header", "X: ***"]
    secret = made(tmp_path / "h", n=600, seed=2, command_line=words)
    tight = ("--tolerance", "ttft_p50=0.1%", "--max-samples", "3")
    command("gate --summary full", secret, "--baseline", base, *tight, status=3)
    said = capsys.readouterr().out
    assert (
        f"ampacity run URL --header 'X: ***' --seed 3 --out {secret}-sample-2 && ampacity gate"
        in said
    )
    strange = made(tmp_path / "s", n=600, draw=2, seed=2, command_line=["rm", "-rf", "x"])
    command("gate", strange, "--baseline", base, *tight, status=3)
    assert "no command that can be repeated" in capsys.readouterr().out
    command(
        "gate",
        secret,
        strange,
        "--baseline",
        base,
        "--max-samples 2 --tolerance ttft_p50=0.1% --json",
        status=3,
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["look"], found["looks"], found["candidate_runs"]) == (2, 2, 2)


def test_the_budget_says_how_many_samples_there_can_be() -> None:
    """A run of 60 s and 1,000 tokens, one given: 200 s make 3 more, 2,500 tokens 2 more."""
    assert Budget(None, None, None).looks(1, 60.0, 1000) == 1
    assert Budget(None, 200.0, None).looks(1, 60.0, 1000) == 4
    assert Budget(None, 200.0, 2500).looks(1, 60.0, 1000) == 3
    assert Budget(2, 200.0, 2500).looks(1, 60.0, 1000) == 2
    assert Budget(None, 30.0, None).looks(1, 60.0, 1000) == 1


# --- what CI services read --------------------------------------------------------------------

CHECK = Check(
    name="ttft_p99",
    level="4/s",
    kind="change",
    verdict="regression",
    baseline=0.4,
    candidate=0.5,
    change=0.25,
    change_ci=(0.1, None),
    tolerance=0.1,
    reason="a | b <c> \x00 50 %\nx",
)
RESULT = GateResult(
    verdict="regression",
    sentence="Regression: ttft_p99.",
    notes=["one note"],
    untracked={"itl at 4/s": "unknown"},
    checks=[
        CHECK,
        replace(CHECK, name="itl_p50", verdict="pass"),
        replace(CHECK, name="e2e_p50", verdict="inconclusive"),
    ],
    stage_s={"4/s": 30.0, "8/s": 20.0},
)


def test_junit_counts_and_is_valid_xml_whatever_the_text() -> None:
    root = ElementTree.fromstring(junit_xml(RESULT))
    suite = root[0]
    assert root.tag == "testsuites"
    assert [suite.get(k) for k in ("tests", "failures", "errors", "skipped")] == "4 1 1 1".split()
    assert [case[0].tag for case in suite] == ["failure", "system-out", "error", "skipped"]
    assert suite[0].get("classname") == "gate.4/s"
    assert [case.get("time") for case in suite] == ["30.000"] * 4  # of the load, not of the test
    assert suite.get("time") == root.get("time") == "50.000"
    assert "50 %" in str(suite[0][0].get("message"))


def test_annotations_are_one_escaped_line_each() -> None:
    error, warning = workflow_commands(RESULT)
    assert error.startswith(
        "::error title=ampacity gate::ttft_p99 at 4/s REGRESSION: 400 ms → 500 ms, +25.0 %25"
    )
    assert warning.startswith("::warning ")
    assert "\n" not in error + warning
    assert "%0Ax" in error


def test_markdown_keeps_its_table_whatever_the_text() -> None:
    text = gate_markdown(RESULT)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}
    assert "\\<c>" in text
    assert "```text" in text


def test_a_far_tolerance_does_not_squeeze_the_chart() -> None:
    """Three times the largest change, 10 %, is the edge: 40 characters for 60 points, so 3 % are 2
    of them, and 75 % are outside."""
    checks = [
        replace(CHECK, name=name, change=change, change_ci=ci, tolerance=tolerance)
        for name, change, ci, tolerance in (
            ("ttft_p50", 0.03, (0.0, 0.06), 0.09),
            ("ttft_p99", 0.1, (-0.5, 0.5), 0.75),
        )
    ]
    p50, p99, axis = chart(replace(RESULT, checks=checks))
    assert p50 == "ttft_p50 at 4/s" + " " * 21 + "|-o-- !" + " " * 14 + "   +3.0 %"
    assert p99 == "ttft_p99 at 4/s " + "-" * 20 + "|------o------------>  +10.0 %"
    assert axis.split()[:5] == ["-30", "%", "0", "+30", "%"]
    assert axis.endswith("! tolerance, > further out")
    assert chart(replace(RESULT, checks=checks[:1]))[1].split()[:2] == ["-9", "%"]  # all of it fits
