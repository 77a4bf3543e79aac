"""A run directory that a resumed run takes up: each record is kept, once."""

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ampacity.loadgen.drive.in_flight import InFlightNotes
from ampacity.loadgen.plan import record_of
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir import write
from ampacity.loadgen.rundir.files import RunDirError, load_run, read_answers
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import RunWriter, take_up
from tests.support.stage_driving import plan_of
from tests.support.synthetic import run_meta

SEAM = json.loads("""{"after_stage": 0, "reason": "killed", "resumed_utc": "", "gap_s": 5.0,
    "wall_gap_s": 5.0, "in_flight": 1}""")


def record(number: int, **more: Any) -> RequestRecord:
    return RequestRecord(number, 0, number, "ok", ended_ns=number + 1, **more)


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
        sent.dispatched_ns, sent.started_ns = 1_000 * index + 1, 1_000 * index + 2
        sent.attempt, sent.target, sent.turn = attempt, "b:1", None
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
    columns = ("stage", "worker", "target", "class", "input_tokens_planned")
    same = {tuple(row[name] for name in columns) for row in rows}
    assert same == {(3, 4, "b:1", "default", 8)}
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


def test_halves_of_files_that_a_kill_left_are_removed(tmp_path: Path) -> None:
    """Those of processes that run, and files of other names, stay."""
    with subprocess.Popen(["true"]) as gone:
        pass
    with RunWriter(tmp_path / "run", run_meta([])) as writer:
        writer.append(record(1))
    (writer.path / "windows").mkdir()
    names = "run.json", "requests.parquet", "report.html", "in-flight-0-0.arrows", "windows/0.json"
    halves = [(writer.path / n).with_name(f".{Path(n).name}.{gone.pid}") for n in names]
    kept = [writer.path / f".{n}" for n in (f"run.json.{os.getpid()}", f"mine.txt.{gone.pid}")]
    for path in (*halves, *kept):
        path.touch()
    with take_up(writer.path):
        assert [path for path in (*halves, *kept) if path.exists()] == kept
