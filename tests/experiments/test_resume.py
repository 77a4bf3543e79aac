"""A run that is cut off: what is kept of it, and how it goes on (docs/crash-safety.md)."""

import asyncio
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import ampacity
from ampacity.analysis.contract.summary import to_json
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.analysis.summary import summarise
from ampacity.cli.measure.resume import resumed
from ampacity.config import make_settings
from ampacity.experiments.stages import preflight, resume
from ampacity.experiments.stages.resume import check_resumable, resumed_meta
from ampacity.loadgen.drive.cut import rest_of
from ampacity.loadgen.drive.in_flight import InFlightNotes
from ampacity.loadgen.plan import StagePlan, record_of
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir import write
from ampacity.loadgen.rundir.files import Run, RunDirError, load_run, read_answers
from ampacity.loadgen.rundir.meta import fault_of
from ampacity.loadgen.rundir.records import SCHEMA, RequestRecord
from ampacity.loadgen.rundir.write import RunWriter, take_up
from ampacity.simulator.server.launch import Started
from ampacity.values import ConfigError
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import Schedule, open_schedule
from tests.support.args import COMMAND, args_of
from tests.support.processes import kills
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import Call
from tests.support.synthetic import run_meta, summary_of, warned
from tests.support.waiting import wait_until

S = 1_000_000_000


SEAM = json.loads("""{"after_stage": 0, "reason": "killed", "resumed_utc": "", "gap_s": 5.0,
    "wall_gap_s": 5.0, "in_flight": 1}""")


def record(number: int, **more: Any) -> RequestRecord:
    return RequestRecord(number, 0, number, "ok", ended_ns=number + 1, **more)


# -- the rest of a stage ------------------------------------------------------------------


def plan_of(kind: Any, scheduled_s: list[float], duration_s: float, **more: Any) -> StagePlan:
    lengths = np.full(len(scheduled_s), 5)
    columns = {name: more.pop(name) for name in ("after_start", "after", "session") if name in more}
    schedule = Schedule(np.array(scheduled_s), lengths, lengths, first_request_id=10, **columns)
    return StagePlan(3, kind, schedule, duration_s, **more)


@pytest.mark.parametrize(
    ("plan", "gone", "elapsed_s", "ids", "due_s", "length_s"),
    [
        (plan_of("open", [0, 1, 2, 3, 4], 6.0), [10, 11, 12], 2.5, [13, 14], [0.5, 1.5], 3.5),
        # an id that has no record was not sent; it was due before, so it is due at once
        (plan_of("open", [0, 1, 2, 3], 6.0), [10, 11], 2.2, [12, 13], [0.0, 0.8], 3.8),
        # users that still rise: the ramp is run again, and what is measured is not shortened
        (plan_of("closed", [0] * 4, 10.0, ramp_s=2.0), [10, 12], 1.0, [13], [0.0], 10.0),
        (plan_of("closed", [0] * 4, 10.0, ramp_s=2.0), [10, 11], 5.0, [12, 13], [0, 0], 7.0),
        # 12 waits for 11, whose answer is lost: it is not sent
        (
            plan_of(
                "open",
                [0, 1, 1, 3],
                4.0,
                after_start=np.array([0, 0, 0, 1, 1]),
                after=np.array([1]),
            ),
            [10, 11],
            2.0,
            [13],
            [1.0],
            2.0,
        ),
    ],
    ids=["open", "not sent", "ramp", "closed", "sessions"],
)
def test_the_rest_of_a_stage_keeps_its_ids_and_times(
    plan: StagePlan,
    gone: list[int],
    elapsed_s: float,
    ids: list[int],
    due_s: list[float],
    length_s: float,
) -> None:
    rest = rest_of(plan, gone, elapsed_s)
    assert (rest.index, rest.schedule.ids.tolist()) == (4, ids)
    assert rest.schedule.scheduled_s.tolist() == pytest.approx(due_s)
    assert rest.duration_s == pytest.approx(length_s)


@pytest.mark.parametrize(("gone", "elapsed_s"), [([10, 11], 1.5), ([10], 2.0)])
def test_of_a_stage_that_was_played_nothing_is_left(gone: list[int], elapsed_s: float) -> None:
    assert rest_of(plan_of("open", [0, 1], 2.0), gone, elapsed_s) is None


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
    with pytest.raises(ValueError, match=expected) as caught:
        resumed(command, arguments)
    assert type(caught.value) in (ConfigError, RunDirError)
    assert "\n" not in str(caught.value)


def state(tmp_path: Path, *, complete: bool = True, ended_ns: int = 1, **meta: Any) -> Run:
    known = {
        "tool": {"version": ampacity.__version__},
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


CUT = [{"index": 0, "start_ns": 0, "drained_ns": 5, "ended_early": "worker 0 died"}]


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
            writer.append(record(1))
    foreign = (tmp_path / "other/requests.arrows").rename(tmp_path / "run/requests-0.arrows")
    with pytest.raises(RecordsError, match=r"arrows: row 1: .* second time") as e:
        check_resumable(load_run(tmp_path / "run"))
    assert str(foreign) in str(e.value)


def test_a_window_that_was_about_to_begin_is_no_restart_of_the_machine(tmp_path: Path) -> None:
    """It is written down half a second before."""
    start_ns = time.monotonic_ns() + S // 2
    begins = {"index": 0, "start_ns": start_ns, "end_ns": start_ns + S, "drained_ns": None}
    run = state(tmp_path, complete=False, stages=[begins])
    (tmp_path / "run.json").write_text("{}")
    check_resumable(run)
    assert resumed_meta(run, run.meta)["seams"][0]["gap_s"] == 0


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
    (tmp_path / "run.json").write_text("{}")
    os.utime(tmp_path / "run.json", (time.time() - 5, time.time() - 5))
    measured = {"workload": {"name": "w", "tokenizer": {"error": 0.2}}}
    now_s = time.time() + stepped_s
    monkeypatch.setattr(resume.time, "time", lambda: now_s)
    meta = resumed_meta(run, run.meta | measured)
    (seam,) = meta["seams"]
    assert (seam["after_stage"], seam["reason"]) == (0, "killed")
    assert seam["gap_s"] == pytest.approx(5, abs=1)
    assert seam["wall_gap_s"] == pytest.approx(5 + stepped_s, abs=1)
    assert meta["stages"][0]["interrupted"]
    text = str(warned(summary_of(tmp_path, seams=[seam]), "resumed"))
    assert "after stage 0 (killed; 5 s later" in text
    assert (f"wall clock off by {stepped_s:+,.0f} s" in text) == bool(stepped_s)


def test_before_the_first_stage_the_clock_of_run_json_says_when(tmp_path: Path) -> None:
    """Nothing was recorded: the gap is not the time since the machine started."""
    began = {"clock": {"monotonic_ns": time.monotonic_ns() - 6 * S}, "stages": []}
    run = replace(state(tmp_path, complete=False, **began), requests=SCHEMA.empty_table())
    (tmp_path / "run.json").write_text("{}")
    assert resumed_meta(run, run.meta)["seams"][0]["gap_s"] == pytest.approx(6, abs=1)


def test_a_run_that_was_killed_in_its_last_write_can_be_read_once_it_was_resumed(
    tmp_path: Path,
) -> None:
    """Its status is that of a run that is over, which has no reason."""
    run = state(tmp_path, complete=False, status="complete")
    (tmp_path / "run.json").write_text("{}")
    meta = resumed_meta(run, run.meta)
    assert fault_of(meta) is None
    assert meta["seams"][0]["reason"] == "killed"


def test_a_resume_that_was_refused_is_no_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off at 100 s, refused at 103 s and 108 s, resumed at 110 s, cut off and resumed again."""
    (tmp_path / "run.json").write_text("{}")
    clock = SimpleNamespace(s=103.0)
    monkeypatch.setattr(resume.time, "time", lambda: clock.s)
    monkeypatch.setattr(resume.time, "monotonic_ns", lambda: int(clock.s * S))
    run = state(tmp_path, status="aborted", status_reason="Ctrl-C", ended_ns=100 * S)
    written_s = 100.0
    for clock.s in (103.0, 108.0, 110.0):
        os.utime(tmp_path / "run.json", (written_s, written_s))
        meta = resumed_meta(run, run.meta | {"status": "running"})
        run = state(tmp_path, **meta, ended_ns=100 * S)
        written_s = clock.s
    (seam,) = meta["seams"]
    assert (seam["reason"], seam["gap_s"], seam["wall_gap_s"]) == ("Ctrl-C", 10.0, 10.0)
    clock.s = 130.0
    again = resumed_meta(state(tmp_path, **meta, ended_ns=120 * S), meta)["seams"]
    assert [(s["reason"], s["gap_s"]) for s in again] == [("Ctrl-C", 10.0), ("killed", 10.0)]


# -- the directory --------------------------------------------------------------------------


def test_two_processes_never_write_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "ENDING_MAX_S", 0.1)
    with (
        RunWriter(tmp_path / "run", run_meta([])) as writer,
        pytest.raises(RunDirError, match="still being written, by another process"),
        take_up(writer.path),
    ):
        pass
    with (
        take_up(writer.path),
        pytest.raises(RunDirError, match="still being"),
        take_up(writer.path),
    ):
        pass


@pytest.mark.parametrize("finish", [True, False], ids=["ended cleanly", "killed"])
def test_a_directory_that_goes_on_holds_every_record_once(finish: bool, tmp_path: Path) -> None:
    path, server = tmp_path / "run", pa.table({"at_ns": pa.array([1]), "running": [2.0]})
    with RunWriter(path, run_meta([])) as writer:
        writer.append(record(1))
        if finish:
            writer.finish(server)
    (path / "answers-0.jsonl").write_bytes(b'{"request_id": 1}\n{"request')
    with take_up(path) as held, RunWriter(path, {**held.run.meta, "seams": [SEAM]}, held) as writer:
        writer.append(record(2))
        assert writer.worker_stream(0).name == "requests-resumed1-0.arrows"
        writer.finish(pa.table({"at_ns": pa.array([9]), "waiting": [1.0]}))
    run = load_run(path)
    assert run.requests["request_id"].to_pylist() == [1, 2]
    assert [number for number, _ in read_answers(path)] == [1]
    assert run.server["at_ns"].to_pylist() == ([1, 9] if finish else [9])
    assert not list(path.glob("*.arrows"))


def test_a_resume_that_ended_at_once_takes_nothing_with_it(tmp_path: Path) -> None:
    """It is no seam of its own: what it had recorded of the cut stays."""
    with RunWriter(tmp_path / "run", run_meta([])) as writer:
        writer.append(record(1))
    for number in (2, 3):
        with take_up(writer.path) as held:
            meta = {**held.run.meta, "seams": [SEAM]}
            with RunWriter(writer.path, meta, held) as again:
                again.append(record(number))
    assert sorted(load_run(writer.path).requests["request_id"].to_pylist()) == [1, 2, 3]


def test_what_was_in_flight_is_recorded_once_and_only_as_long_as_it_is(tmp_path: Path) -> None:
    """Request 11 was answered after the note; 12 has a token, 13 is sent for the second time."""
    plan = plan_of("open", [0, 1, 2, 3], 9.0, session=np.array([-1, -1, 7, -1]))
    flying = [(1, 0, None), (2, 0, 2_600), (3, 1, None)]
    in_flight: dict[Exchange, int] = {}
    for index, attempt, token_ns in flying:
        sent = record_of(plan, index, 1_000 * index)
        sent.dispatched_ns, sent.started_ns, sent.attempt = (
            1_000 * index + 1,
            1_000 * index + 2,
            attempt,
        )
        sent.target, sent.turn = "b:1", None
        exchange = Exchange(sent, b"", lambda _: None)
        exchange._answer.chunk_at_ns.extend([token_ns] if token_ns else [])
        in_flight[exchange] = index
    notes = InFlightNotes(plan, in_flight, ["a:1", "b:1"], 4)
    path = tmp_path / "run"
    with RunWriter(path, run_meta([])) as writer:
        writer.append(RequestRecord(13, 3, 3_000, "reset", ended_ns=3_001))
        writer.note(*notes.take())
        writer.append(RequestRecord(11, 3, 1_000, "ok", ended_ns=9_000))
    expected = [
        (12, 0, "unfinished", "3-7", 2_000, 2_001, 2_002, 2_600),
        (13, 1, "unfinished", None, 3_000, 3_001, 3_002, None),
    ]
    names = ("request_id", "attempt", "status", "session_id", "scheduled_ns", "dispatched_ns")
    names += ("started_ns", "first_token_ns")
    rows = load_run(path).requests.to_pylist()[2:]
    assert [tuple(row[name] for name in names) for row in rows] == expected
    same = {
        (r["stage"], r["worker"], r["target"], r["class"], r["input_tokens_planned"]) for r in rows
    }
    assert same == {(3, 4, "b:1", "default", 5)}
    with take_up(path) as held, RunWriter(path, {**held.run.meta, "seams": [SEAM]}, held) as writer:
        assert len(list(path.glob("in-flight-*"))) == 0
        writer.note(*notes.take())
        in_flight.clear()
        writer.note(*notes.take())  # all have ended
        writer.finish()
    assert sorted(path.iterdir()) == [path / "requests.parquet", path / "run.json"]
    assert load_run(path).requests["request_id"].to_pylist() == [11, 12, 13, 13]


def test_a_disk_that_stalls_holds_up_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records wait in memory, and are all there once the disk answers."""
    monkeypatch.setattr(write, "STALL_MAX_S", 0.2)
    answers, count = threading.Event(), 20 * write.FLUSH_ROWS
    with RunWriter(tmp_path / "run", run_meta([])) as writer:
        writer.later(answers.wait)
        began_s = time.thread_time()
        wall_s = time.monotonic()
        for number in range(count):
            writer.append(record(number))
        writer.write_meta()
        assert time.monotonic() - wall_s < 10 * (time.thread_time() - began_s) + 0.5
        writer.wait()  # at a stage's end it is waited for, but not for ever
        assert "the disk did not answer for 0.2 s" in str(writer.failed)
        writer.failed = None
        answers.set()
        monkeypatch.setattr(write, "STALL_MAX_S", 30.0)
    assert load_run(tmp_path / "run").requests.num_rows == count


# -- limits of the machine ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("malloc of size 64 failed"), "no memory is left"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory is left"),
        (RuntimeError("can't start new thread"), "no memory is left"),
        (ImportError("x.so: failed to map segment from shared object"), "no memory is left"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
    ids=str,
)
def test_what_the_machine_lacks_is_one_line(
    error: Exception,
    expected: str,
    ampacity: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(**_: Any) -> None:
        raise error

    monkeypatch.setattr("ampacity.cli.app.app", fails)
    assert ampacity("report", "x") == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_too_little_memory_is_refused_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "address_space", lambda: 1 << 30)
    with pytest.raises(ConfigError, match=r"limited to 1024 MiB .*ulimit -v 2097152"):
        preflight.prepare_machine(make_settings({"url": "http://x/v1"}))


# -- whole runs, which are cut off ----------------------------------------------------------

LOAD = args_of("--rates 40 --duration 4s --workload chat-short --slo ttft_p95=1s")


def as_scheduled() -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return what an uninterrupted run of LOAD sends, by its seed."""
    drawn = open_schedule(
        load_workload("chat-short"), rate_rps=40.0, duration_s=4.0, seed=1, stage=0
    )
    lengths = zip(drawn.input_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)
    return {(0, k): (*both, 1) for k, both in enumerate(lengths)}


@pytest.mark.parametrize(
    ("how", "workers", "status"),
    [
        (signal.SIGKILL, 1, -signal.SIGKILL),
        (signal.SIGKILL, 2, -signal.SIGKILL),
        (signal.SIGTERM, 1, 130),
        (signal.SIGHUP, 1, 130),
    ],
    ids=["kill", "kill with workers", "SIGTERM", "SIGHUP"],
)
@pytest.mark.real_time
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_run_that_is_cut_off_goes_on_with_the_same_requests(
    how: signal.Signals, workers: int, status: int, server: Started, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = kills.start("run", server.url, *LOAD, "--workers", workers, "--out", run)
    kills.wait_for_stage(run, random.Random(f"{how}{workers}").uniform(1.0, 3.5))
    if how == signal.SIGKILL:
        killed_ns = kills.kill(process)
    else:
        process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    if status == -signal.SIGKILL:
        gone_s = kills.lost_s(run, killed_ns)
        assert gone_s is None or gone_s < 1.0
    kept = kills.by_id(run)
    status, out, err = kills.finished("run", "--resume", run, "--json")
    assert status == 0, err
    assert kills.planned(run) == as_scheduled()
    assert kept.items() <= kills.by_id(run).items()
    summary = json.loads(out)
    assert summary["partial"] is None
    assert warned(summary, "resumed") in {w["text"] for w in summary["warnings"]}
    assert (run / "report.html").is_file()
    status, _, err = kills.finished("run", "--resume", run)
    assert (status, "nothing is left to resume" in err, err.count("\n")) == (2, True, 1)


class HangsFrom(FaultServer):
    """Answers the first ten requests of a load; it hangs with all others."""

    async def _answer(self, call: Call) -> bool:
        number = call.request.headers.get("x-request-id", "").rpartition("-")[2]
        if number.isdigit() and int(number) >= 10:
            await asyncio.sleep(3600)
        return await super()._answer(call)


@pytest.mark.real_time
@pytest.mark.parametrize("workers", [1, 2])
def test_a_kill_while_the_server_hangs_keeps_what_was_sent(workers: int, tmp_path: Path) -> None:
    """What the server let hang is judged as a Ctrl-C's: by its time so far, as a minimum."""
    run, load = tmp_path / "run", args_of("--rates 20 --duration 30s --slo e2e_p50=500ms")
    lengths = args_of("--input-tokens 30 --output-tokens 5 --arrivals constant")
    with HangsFrom(gap_s=0.002) as server:
        process = kills.start(
            "run", server.url, *load, *lengths, "--workers", workers, "--out", run
        )
        # more than the answered ones hang, and the last record is older than the last note
        wait_until(lambda: noted(run) >= 25, 60.0)
        kills.kill(process)
        process.communicate(timeout=60)
        ids = [r.headers.get("x-request-id", "") for r in server.requests]
    arrived = {number.rpartition("-")[2] for number in ids}
    rows = load_run(run).requests.sort_by("request_id").to_pylist()
    assert [row["status"] for row in rows[:10]] == ["ok"] * 10
    assert {row["status"] for row in rows[10:]} == {"unfinished"}
    assert {str(row["request_id"]) for row in rows[10:]} <= arrived
    assert len(rows) == len({row["request_id"] for row in rows}) >= 10 + 25
    assert min(row["ended_ns"] - row["scheduled_ns"] for row in rows[10:20]) > 10**9 * 14 / 20
    assert {row["worker"] for row in rows} == set(range(workers))
    summary = to_json(summarise(load_run(run)))
    assert summary["errors"]["unfinished"] == len(rows) - 10
    assert summary["stages"][0]["slo_verdicts"][0]["verdict"] != "met"


def noted(run: Path) -> int:
    """Return how many requests in flight are noted in a run that is going on."""
    if not (run / "run.json").is_file() or not list(run.glob("requests*.arrows")):
        return 0
    return load_run(run).requests.num_rows - 10


@pytest.mark.real_time
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_whose_disk_is_full_goes_on_once_there_is_room(
    workers: int, server: Started, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["run", server.url, *LOAD, "--workers", str(workers), "--out", str(run)]
    limited = ["bash", "-c", 'ulimit -f 24; exec "$@"', "-", *COMMAND, *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "aborted"
    if workers > 1:  # the findings come before what cannot be written
        assert "PARTIAL   aborted" in done.stdout
    assert 0 < len(kills.planned(run)) < len(as_scheduled())
    status, _, err = kills.finished("run", "--resume", run)
    assert status == 0, err
    assert kills.planned(run) == as_scheduled()


@pytest.mark.real_time
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_client_that_is_suspended_is_no_finding(server: Started, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = kills.start("run", server.url, *LOAD, "--out", run)
    kills.wait_for_stage(run, 1.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # the subject: a pause longer than any lateness that is passed over
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found = json.loads((run / "summary.json").read_text())
    assert "late" in found["stages"][0]["client_limited_reason"]
    assert len(found["stages"]) > 1


@pytest.mark.real_time
@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is in use cannot be removed")
def test_a_run_whose_folder_is_removed_ends_in_one_line(server: Started, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = kills.start("run", server.url, *LOAD, "-q", "--out", run)
    kills.wait_for_stage(run, 0.5)
    shutil.rmtree(run)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"{run}/" in err
    assert "No such file or directory" in err
    assert err.count("\n") == 1


@pytest.mark.real_time
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_few_descriptors_are_enough_and_a_full_stdout_hides_nothing(
    server: Started, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["run", server.url, *LOAD, "-q", "--out", str(run)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", *COMMAND, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert b"No space left on device" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert kills.planned(run) == as_scheduled()
    assert kills.stages_of(run)[0]["audit"]["shortages"] == 0


def test_each_event_in_the_document_names_a_test_of_ours() -> None:
    tests = Path(__file__).parents[1]
    text = (tests.parent / "docs" / "crash-safety.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)` \|", text)
    ours = "".join(file.read_text(encoding="utf-8") for file in tests.rglob("test_*.py"))
    assert len(named) == text.count("\n| ") - 1  # one in each row but the head
    assert [name for name in named if f"def {name}(" not in ours] == []


def test_pairs_of_an_ab_leave_out_a_stage_in_two_parts() -> None:
    from ampacity.analysis.compare.pairs import _by_round

    metas = {
        0: {"schedule": 0},
        1: {"schedule": 1},  # the first part ended early, and is not among the stages
        2: {"schedule": 1, "continues": 1},
        3: {"schedule": 2},
    }
    run: Any = SimpleNamespace(
        stages=[SimpleNamespace(index=i) for i in (0, 2, 3)],
        judged=SimpleNamespace(meta_of=lambda stage: metas[stage.index]),
    )
    assert {place: s.index for place, s in _by_round(run).items()} == {0: 0, 2: 3}
