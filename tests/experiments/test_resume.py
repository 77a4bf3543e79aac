"""How a run that was cut off goes on: its command line, its facts, its seams."""

import json
import re
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import ampacity
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.cli.measure.resume import resumed
from ampacity.experiments.stages import resume
from ampacity.experiments.stages.resume import check_resumable, resumed_meta
from ampacity.loadgen.rundir.files import Run, RunDirError, load_run
from ampacity.loadgen.rundir.meta import fault_of, read_stage
from ampacity.loadgen.rundir.records import SCHEMA, RequestRecord
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.values import ConfigError
from tests.support.args import args_of
from tests.support.synthetic import summary_of, warned

S = 1_000_000_000

# -- the command line -----------------------------------------------------------------------

BEGAN = [
    *args_of("ampacity sweep http://x/v1 --api-key-env OLD --slo ttft_p95=1s --json --out a -q"),
    *args_of("--max-duration=2m"),
]


def began(folder: Path, words: list[str]) -> Path:
    (folder / "run.json").write_text(json.dumps({"command_line": words}))
    return folder


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ("", "http://x/v1 --api-key-env OLD --slo ttft_p95=1s --max-duration=2m"),
        (
            "--api-key-file K --yes",
            "http://x/v1 --slo ttft_p95=1s --max-duration=2m --api-key-file K --yes",
        ),
        ("--json", "http://x/v1 --api-key-env OLD --slo ttft_p95=1s --max-duration=2m --json"),
    ],
)
def test_a_run_goes_on_as_it_began_but_for_its_key(given: str, first: str, tmp_path: Path) -> None:
    run = str(began(tmp_path, BEGAN))
    words = resumed("sweep", ["--resume", run, *given.split()])
    assert words == [*first.split(), "--out", run, "--resume", run]


@pytest.mark.parametrize(
    ("command", "given", "words", "expected"),
    [
        ("sweep", "--rates 5", BEGAN, "drop --rates; what .* --api-key-command, --api-key-header"),
        ("ab", "--rates 5", BEGAN, "drop --rates; what .* --api-key-env-b, --api-key-header"),
        ("sweep", "http://y/v1", BEGAN, "drop the other arguments"),
        ("run", "", BEGAN, "ampacity sweep --resume"),
        ("run", "", ["ampacity", "ab"], r"ampacity ab --resume {parent}$"),
        ("sweep", "", ["ampacity", "predict"], "start a new run"),
        ("sweep", "", [*BEGAN, "--header", "X-Key: ***"], "can be given again"),
        # no command that somebody wrote there is executed
        ("sweep", "", [*BEGAN, "--api-key-command", "echo k > HERE"], "can be given again"),
        ("sweep", "", [*BEGAN, "--api-key-command=echo k > HERE"], "can be given again"),
        ("sweep", "", [], "does not say how the run began"),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_one_line(
    command: str, given: str, words: list[str], expected: str, tmp_path: Path
) -> None:
    arguments = [f"--resume={began(tmp_path, words)}", *given.split()]
    expected = expected.replace("{parent}", str(tmp_path.parent))
    with pytest.raises(ValueError, match=expected) as caught:
        resumed(command, arguments)
    assert type(caught.value) in (ConfigError, RunDirError)
    assert "\n" not in str(caught.value)


def clock_of(ago_s: float) -> dict[str, Any]:
    """Return the clock of a run that began so long ago."""
    utc = f"{datetime.now(UTC) - timedelta(seconds=ago_s):%Y-%m-%dT%H:%M:%SZ}"
    return {"monotonic_ns": time.monotonic_ns() - int(ago_s * S), "utc": utc}


def state(tmp_path: Path, *, complete: bool = True, ended_ns: int = 1, **meta: Any) -> Run:
    known = {
        "tool": {"version": ampacity.__version__},
        "clock": clock_of(60),
        "endpoint": {"url": "u", "api": "chat", "model": "M", "answer_s": 1.0},
        "stages": [
            {"index": 0, "start_ns": 0, "end_ns": 9, "drained_ns": None, "ended_early": None}
        ],
        "status": "running",
        "status_reason": None,
        "notes": [],
        "workload": {"name": "w", "tokenizer": {"error": 0.1}},
        **dict.fromkeys(resume.SAME),
        **meta,
    }
    table = SCHEMA.empty_table().to_pylist()
    row = dict.fromkeys(("request_id", "stage", "attempt", "scheduled_ns"), 0)
    table.append(dict.fromkeys(SCHEMA.names) | row | {"ended_ns": ended_ns})
    return Run(tmp_path, known, pa.Table.from_pylist(table, schema=SCHEMA), None, complete)


CUT = [{"index": 0, "start_ns": 0, "end_ns": 5, "drained_ns": 5, "ended_early": "worker 0 died"}]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"status": "complete"}, "is over, nothing is left to resume"),
        (
            {"status": "budget", "status_reason": "--max-requests 5 is used up"},
            r"is over \(--max-requests 5 is used up\)",
        ),
        ({"status": "aborted", "status_reason": "no request was answered"}, "is over"),
        ({"tool": {"version": "0.0.1"}}, "was made by ampacity 0.0.1"),
        ({"endpoint": {"url": "u"}}, "an earlier state of it"),
        ({"ended_ns": 2**62}, "this machine was started again"),
        ({"status": "aborted", "stages": CUT}, ""),
        ({"status": "interrupted"}, ""),
        ({"status": "complete", "complete": False}, ""),  # killed while it was finished
    ],
)
def test_only_what_was_cut_off_here_and_by_this_version_goes_on(
    known: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    run = state(tmp_path, **known)
    if not expected:
        check_resumable(run)
        return
    with pytest.raises(RunDirError, match=expected):
        check_resumable(run)


def test_streams_of_two_runs_in_one_directory_are_refused_before_the_load(tmp_path: Path) -> None:
    """Request 1 is in both: a resume that played the rest first would mix them for good."""
    for name in ("run", "other"):
        with RunWriter(tmp_path / name, state(tmp_path).meta | {"stages": []}) as writer:
            writer.append(RequestRecord(1, 0, 1, "ok", ended_ns=2))
    foreign = (tmp_path / "other/requests.arrows").rename(tmp_path / "run/requests-0.arrows")
    with pytest.raises(RecordsError, match=r"arrows: row 1: .* second time") as e:
        check_resumable(load_run(tmp_path / "run"))
    assert str(foreign) in str(e.value)


def test_a_window_that_was_about_to_begin_is_no_restart_of_the_machine(tmp_path: Path) -> None:
    """It is written down half a second before."""
    start_ns = time.monotonic_ns() + S // 2
    begins = {"index": 0, "start_ns": start_ns, "end_ns": start_ns + S, "drained_ns": None}
    run = state(tmp_path, complete=False, stages=[begins])
    check_resumable(run)
    assert resumed_meta(run, run.meta)["seams"][0]["gap_s"] == 0


def test_what_was_lost_before_a_run_went_on_is_said_by_its_summary(tmp_path: Path) -> None:
    lost = "20 bytes of run/requests.arrows cannot be read; what was recorded there is lost"
    run = replace(state(tmp_path, events=["a stage was ended"]), damage=lost)
    again = resumed_meta(run, run.meta)
    assert again["events"] == ["a stage was ended", lost]
    assert resumed_meta(replace(run, meta=again), again)["events"] == again["events"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 2}, "seed would not be"),
        ({"workload": {"name": "v"}}, "workload.name would not be"),
        ({"workload": {"name": "w", "contents": {"trace": "0"}}}, "workload.contents would not"),
        ({"endpoint": {"url": "u", "api": "chat", "model": "N"}}, "endpoint.model would not be"),
    ],
)
def test_a_run_of_other_facts_does_not_go_on(
    change: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(RunDirError, match=expected):
        resumed_meta(state(tmp_path), state(tmp_path).meta | change)


@pytest.mark.parametrize("stepped_s", [3600.0, -3600.0, 0.0])
def test_a_wall_clock_that_was_set_is_told_from_a_pause(
    stepped_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap is that of the monotonic clock, whatever the wall clock says."""
    run = state(tmp_path, complete=False, ended_ns=time.monotonic_ns() - 5 * S)
    measured = {"workload": {"name": "w", "tokenizer": {"error": 0.2}}}
    now_s = time.time() + stepped_s
    monkeypatch.setattr(resume.time, "time", lambda: now_s)
    meta = resumed_meta(run, run.meta | measured)
    (seam,) = meta["seams"]
    assert (seam["after_stage"], seam["reason"]) == (0, "killed")
    assert seam["gap_s"] == pytest.approx(5, abs=1)
    assert seam["wall_gap_s"] == pytest.approx(5 + stepped_s, abs=1.1)  # the run's beginning: 1 s
    assert meta["stages"][0]["interrupted"]
    text = str(warned(summary_of(tmp_path, seams=[seam]), "resumed"))
    assert "after stage 0 (killed; 5 s later" in text
    off = re.search(r"wall clock off by ([-+,\d]+) s", text)
    assert float(off[1].replace(",", "") if off else 0) == pytest.approx(stepped_s, abs=1)


def test_before_the_first_stage_the_clock_of_run_json_says_when(tmp_path: Path) -> None:
    """Nothing was recorded: the gap is not the time since the machine started."""
    held = state(tmp_path, complete=False, stages=[], clock=clock_of(6))
    run = replace(held, requests=SCHEMA.empty_table())
    assert resumed_meta(run, run.meta)["seams"][0]["gap_s"] == pytest.approx(6, abs=1)


def test_a_run_that_was_killed_in_its_last_write_can_be_read_once_it_was_resumed(
    tmp_path: Path,
) -> None:
    """Its status is that of a run that is over, which has no reason."""
    run = state(tmp_path, complete=False, status="complete")
    meta = resumed_meta(run, run.meta)
    assert fault_of(meta) is None
    assert meta["seams"][0]["reason"] == "killed"


def test_a_resume_that_was_refused_is_no_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off at 100 s, refused at 103 s and 108 s, resumed at 110 s, cut off and resumed again."""
    clock = SimpleNamespace(s=103.0)
    monkeypatch.setattr(resume.time, "time", lambda: clock.s)
    monkeypatch.setattr(resume.time, "monotonic_ns", lambda: int(clock.s * S))
    began = {"clock": {"monotonic_ns": 0, "utc": "1970-01-01T00:00:00Z"}}
    run = state(tmp_path, status="aborted", status_reason="Ctrl-C", ended_ns=100 * S, **began)
    for clock.s in (103.0, 108.0, 110.0):
        meta = resumed_meta(run, run.meta | {"status": "running"})
        run = state(tmp_path, **meta, ended_ns=100 * S)
    (seam,) = meta["seams"]
    assert (seam["reason"], seam["gap_s"], seam["wall_gap_s"]) == ("Ctrl-C", 10.0, 10.0)
    clock.s = 130.0
    seam["wall_gap_s"] += 3600.0  # a clock that was set in the first gap is not told again
    monkeypatch.setattr(resume.time, "time", lambda: clock.s + 3600.0)
    again = resumed_meta(state(tmp_path, **meta, ended_ns=120 * S), meta)["seams"]
    told = [(s["reason"], s["gap_s"], s["wall_gap_s"]) for s in again]
    assert told == [("Ctrl-C", 10.0, 3610.0), ("killed", 10.0, 10.0)]


def test_pairs_of_an_ab_leave_out_a_stage_in_two_parts() -> None:
    from ampacity.analysis.compare.pairs import _by_round

    places = (
        {"schedule": 0},
        {"schedule": 1},  # the first part ended early, and is not among the stages
        {"schedule": 1, "continues": 1},
        {"schedule": 2},
    )
    metas = [read_stage({"start_ns": 0, "end_ns": 1, **place}) for place in places]
    run: Any = SimpleNamespace(
        stages=[SimpleNamespace(index=i) for i in (0, 2, 3)],
        judged=SimpleNamespace(meta_of=lambda stage: metas[stage.index]),
    )
    assert {place: s.index for place, s in _by_round(run).items()} == {0: 0, 2: 3}
