"""The run directory: what is written survives a kill, and faults are reported in one line."""

import dataclasses
import errno
import gc
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.analysis.summary import partial_of
from ampacity.loadgen.drive.in_flight import InFlightNotes
from ampacity.loadgen.plan import StagePlan, record_of
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir import files
from ampacity.loadgen.rundir.records import (
    CHUNK_AT_MAX_US,
    FAILED_STATUSES,
    SCHEMA,
    SCHEMA_VERSION,
    STATUSES,
    RequestRecord,
    to_batch,
)
from ampacity.loadgen.rundir.write import FLUSH_ROWS, RunWriter
from ampacity.workloads.schedule import Schedule
from tests.support.repeats import often

META: dict[str, Any] = {"run_id": "r", "status": "running", "stages": []}


def record(i: int, **more: Any) -> RequestRecord:
    chunks = {"chunk_at_us": [i, i + 1], "chunk_tokens": [1, 2]}
    return RequestRecord(i, 0, i * 1000, "ok", **chunks, **more)


# -- the columns --------------------------------------------------------------------------------


def test_a_row_keeps_every_value_and_every_null() -> None:
    values: dict[str, Any] = {
        f.name: number
        for number, f in enumerate(dataclasses.fields(RequestRecord))
        if "int | None" in str(f.type) or f.type == "int"
    }
    texts = (
        "class_ session_id target error finish_reason token_source server_request_id answered_by"
    ).split()
    values |= {name: f"{name} é\n" for name in texts}
    values |= {f.name: 0.25 for f in dataclasses.fields(RequestRecord) if "float" in str(f.type)}
    values |= {"request_id": 2**40, "scheduled_ns": 2**60, "status": "timeout"}
    values |= {"chunk_at_us": [0, CHUNK_AT_MAX_US], "chunk_tokens": [1, 1], "retry_after_s": 0.5}
    assert values.keys() == {f.name for f in dataclasses.fields(RequestRecord)}
    least = RequestRecord(request_id=0, stage=0, scheduled_ns=0, status="shed")
    rows = to_batch([RequestRecord(**values), least]).to_pylist()
    assert rows[0] == {name.rstrip("_"): value for name, value in values.items()}
    never = dict.fromkeys(("attempt", "worker", "request_id", "stage", "scheduled_ns"), 0)
    never |= {"class": "default", "chunk_at_us": [], "status": "shed"}
    assert rows[1] == {**dict.fromkeys(rows[0]), **never}


def test_what_counts_as_failed() -> None:
    assert set(STATUSES) - FAILED_STATUSES == {"ok", "unfinished", "cancelled", "too_long"}
    assert len(STATUSES) == len(set(STATUSES)) == 13


# -- a run that ends well --------------------------------------------------------------------


def test_finish_turns_the_stream_into_parquet_by_request_and_attempt(tmp_path: Path) -> None:
    order = list(range(1300))  # more than two batches
    random.Random(1).shuffle(order)
    with RunWriter(tmp_path / "run", META) as writer:
        for i in order:
            writer.append(record(i))
        writer.append(record(7, attempt=1))
        writer.meta["status"] = "complete"
        writer.finish(pa.table({"at_ns": pa.array([1], pa.int64()), "running": [2.0]}))
    run = files.load_run(tmp_path / "run")
    assert run.complete
    assert run.meta["status"] == "complete"
    assert run.meta["schema_version"] == SCHEMA_VERSION
    assert run.requests.schema.equals(SCHEMA)
    ids = run.requests["request_id"].to_pylist()
    assert ids == sorted([*range(1300), 7])
    assert run.requests["attempt"].to_pylist()[7:9] == [0, 1]
    assert run.server.to_pylist() == [{"at_ns": 1, "running": 2.0}]
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {"requests.parquet", "run.json", "server.parquet"}


def test_a_run_without_a_request_or_telemetry_is_a_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", META) as writer:
        writer.finish()
    run = files.load_run(tmp_path / "run")
    assert (run.requests.num_rows, run.server, run.complete) == (0, None, True)


def test_an_error_in_the_run_keeps_what_was_measured(tmp_path: Path) -> None:
    def broken() -> None:
        with RunWriter(tmp_path / "run", META) as writer:
            writer.append(record(1))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        broken()
    run = files.load_run(tmp_path / "run")
    assert not run.complete
    assert run.requests["request_id"].to_pylist() == [1]


def test_an_existing_run_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("run", "file"):
        with pytest.raises(files.RunDirError, match="choose another --out"):
            RunWriter(tmp_path / name, META)
    (tmp_path / "empty").mkdir()
    with RunWriter(tmp_path / "empty", META) as writer:
        writer.finish()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


# -- a run that is killed -----------------------------------------------------------------

_CHILD = """
import os, signal, sys
from pathlib import Path
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import RunWriter
writer = RunWriter(Path(sys.argv[1]), {"status": "running", "stages": []})
for i in range(int(sys.argv[2])):
    writer.append(RequestRecord(i, 0, i, "ok", chunk_at_us=list(range(i % 50))))
writer.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("appended", "kept"), [(10, 0), (FLUSH_ROWS, FLUSH_ROWS), (5 * FLUSH_ROWS + 17, 5 * FLUSH_ROWS)]
)
def test_after_kill_9_every_flushed_batch_is_read(tmp_path: Path, appended: int, kept: int) -> None:
    path = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), str(appended)], timeout=60, check=False
    )
    assert done.returncode == -9
    run = files.load_run(path)
    assert (run.complete, run.going_s) == (False, None)
    assert run.requests["request_id"].to_pylist() == list(range(kept))
    assert run.requests["chunk_at_us"].to_pylist() == [list(range(i % 50)) for i in range(kept)]


def test_a_running_run_differs_from_a_killed_one(tmp_path: Path) -> None:
    """By its writer's lock, whatever the age of its files; a kill releases the lock."""
    path = tmp_path / "run"
    with RunWriter(path, META) as writer:
        for file in path.iterdir():
            os.utime(file, (time.time() - 90, time.time() - 90))
        assert files.load_run(path).going_s == pytest.approx(90, abs=30)
        assert files.load_run(path).going_s is not None  # the reader took nothing from the writer
        stream = path / "requests.arrows"
        shutil.copy(stream.rename(path / "requests-resumed12.arrows"), stream)  # resumed often
        assert files.load_run(path).going_s is not None
        (path / "requests-resumed12.arrows").rename(stream)
        writer.finish()
        assert files.load_run(path).going_s is None
    with RunWriter(tmp_path / "other", META) as writer:
        writer.append(record(1))
    other = files.load_run(tmp_path / "other")
    assert (other.going_s, other.complete) == (None, False)


def test_a_stream_torn_at_any_byte_gives_whole_batches_only(tmp_path: Path) -> None:
    """Three batches of two rows: wherever the file ends, 0, 2, 4 or 6 rows are read."""
    with RunWriter(tmp_path / "run", META) as writer:
        for batch in range(3):
            for row in range(2):
                writer.append(record(2 * batch + row))
            writer.flush()
    stream = tmp_path / "run" / files.STREAM_NAME
    data = stream.read_bytes()
    seen = set()
    for length in (*range(0, len(data), often(29, 7)), len(data)):
        stream.write_bytes(data[:length])
        run = files.load_run(tmp_path / "run")
        ids = run.requests["request_id"].to_pylist()
        assert (ids, run.damage) == (list(range(len(ids))), None)
        assert len(ids) % 2 == 0
        seen.add(len(ids))
    assert seen == {0, 2, 4, 6}


@pytest.mark.parametrize("zeros", [(0, 100), (-8, -4), (0, -1)], ids=["head", "values", "all"])
@pytest.mark.parametrize("batch", [1, 2], ids=["inside", "last"])
def test_a_damaged_block_of_a_stream_is_said_and_what_follows_is_read(
    tmp_path: Path, batch: int, zeros: tuple[int, int]
) -> None:
    """Of three batches of a row one is zero in part: its bytes are named, its row is lost."""
    ends = []
    with RunWriter(tmp_path / "run", META) as writer:
        stream = tmp_path / "run" / files.STREAM_NAME
        for i in range(3):
            ends.append(stream.stat().st_size)
            writer.append(record(i, answered_by="m"))
            writer.flush()
            writer.wait()
        ends.append(stream.stat().st_size)
    data = bytearray(stream.read_bytes()[: ends[3]])  # as after a kill
    begin, end = ends[batch : batch + 2]
    size = end - begin
    low, high = (begin + at % size for at in zeros)
    data[low:high] = bytes(high - low)
    if zeros == (-8, -4):
        data[low:high] = b"!!!!"  # there is padding
    stream.write_bytes(data)
    run = files.load_run(tmp_path / "run")
    assert run.requests["request_id"].to_pylist() == [i for i in range(3) if i != batch]
    lost = f"{size:,} bytes of {stream} cannot be read; what was recorded there is lost"
    assert run.damage == lost
    assert str(partial_of(run)).endswith(f"only what had been recorded is here; {lost}")


@pytest.mark.parametrize("name", [files.STREAM_NAME, "in-flight-0-0.arrows"])
def test_what_is_damaged_is_never_read_as_data(tmp_path: Path, name: str) -> None:
    """Three answered, two in flight: what is read is as it was written, and what is lost is said."""
    schedule = Schedule(np.arange(5) * 1.0, np.full(5, 20), np.full(5, 5), 0)
    plan = StagePlan(0, "open", schedule, 5.0)
    in_flight = {Exchange(record_of(plan, i, 1_000 * i), b"", lambda _: None): i for i in (3, 4)}
    with RunWriter(tmp_path / "run", META) as writer:
        for i in range(3):
            writer.append(record(i, answered_by="m"))
            writer.flush()
        writer.note(*InFlightNotes(plan, in_flight, [None], 0).take())
    whole = {row["request_id"]: row for row in files.load_run(writer.path).requests.to_pylist()}
    assert list(whole) == [0, 1, 2, 3, 4]
    stream = writer.path / name
    data, head_bytes = stream.read_bytes(), SCHEMA.serialize().size
    flipped = [(at, bytes([data[at] ^ 1 << at % 8])) for at in range(0, len(data), often(61, 23))]
    zeroed = [(at, bytes(512)) for at in range(0, len(data), 256)]
    for at, changed in [*flipped, *zeroed]:
        stream.write_bytes((data[:at] + changed + data[at + len(changed) :])[: len(data)])
        run = files.load_run(writer.path)
        rows = {row["request_id"]: row for row in run.requests.to_pylist()}
        assert all(row == whole[i] for i, row in rows.items()), at
        if name == files.STREAM_NAME:
            assert rows.keys() >= (set(range(5)) if at + len(changed) <= head_bytes else {3, 4}), at
            # one whose length is damaged may seem torn by a kill, if it is the last
            assert len(rows) == 5 or run.damage or rows.keys() >= {0, 1, 3, 4}, at
        else:
            assert rows.keys() == {0, 1, 2} if run.damage else len(rows) == 5, at


def test_a_limit_is_named_once_with_the_command_that_raises_it() -> None:
    """Arrow has the number and the words of an error twice in its message."""
    said = f"Error writing bytes to file. Detail: [errno {errno.EFBIG}] File too large"
    for error, reason in (
        (OSError(errno.EFBIG, said), "File too large (raise the limit: ulimit -f)"),
        (OSError(errno.ENOSPC, said), "No space left on device"),
    ):
        with (
            pytest.raises(files.RunDirError, match=f"x: {re.escape(reason)}$"),
            files.explained("x"),
        ):
            raise error


def test_nothing_hidden_stays_of_a_file_whose_writing_was_left(tmp_path: Path) -> None:
    def left() -> None:
        with files.replacing(tmp_path / "page") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        left()
    assert not list(tmp_path.iterdir())


def test_a_torn_tail_of_garbage_is_left_out(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", META) as writer:
        writer.append(record(1))
        writer.flush()
        writer.wait()
        stream = tmp_path / "run" / files.STREAM_NAME
        with stream.open("ab") as file:
            file.write(b"\xff\xff\xff\xff\x10\x00\x00\x00garbage!garbage!")
        assert files.read_stream(stream)["request_id"].to_pylist() == [1]


# -- what cannot be read ---------------------------------------------------------------------


def _good(path: Path) -> Path:
    with RunWriter(path, META) as writer:
        writer.append(record(1))
        writer.finish()
    return path


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(files.RunDirError) as caught:
        files.load_run(path)
    message = str(caught.value)
    assert "\n" not in message, message
    for word in (str(path), *words):
        assert word in message


def test_damaged_gauges_of_the_server_do_not_keep_the_run(tmp_path: Path) -> None:
    """What the error says mends it."""
    path = _good(tmp_path / "run")
    samples = path / "server.parquet"
    samples.write_bytes(b"")
    assert_refused(path, "server.parquet", f"not the server's own gauges: rm {samples}")
    samples.unlink()
    assert files.load_run(path).requests.num_rows == 1


def test_no_such_directory(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "is missing")
    assert_refused(tmp_path, "no run.json")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "cannot be read"),
        (b'{"schema_version": 1', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[]", "schema_version None"),
        (b'"x"', "schema_version None"),
        (b"{}", "schema_version None"),
        (b'{"schema_version": 2}', "schema_version 2"),
        (b'{"schema_version": "1"}', "schema_version '1'"),
    ],
)
def test_a_run_json_that_is_none(tmp_path: Path, content: bytes, word: str) -> None:
    path = _good(tmp_path / "run")
    (path / "run.json").write_bytes(content)
    assert_refused(path, "run.json", word)


def test_nothing_recorded(tmp_path: Path) -> None:
    path = _good(tmp_path / "run")
    (path / "requests.parquet").unlink()
    assert_refused(path, "neither requests.parquet nor requests.arrows")


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1", b"not a parquet file at all", pytest.param(b"PAR1" + b"\x00" * 100 + b"PAR1")],
)
@pytest.mark.parametrize("name", ["requests.parquet", "server.parquet"])
def test_garbage_instead_of_parquet(tmp_path: Path, name: str, content: bytes) -> None:
    path = _good(tmp_path / "run")
    (path / name).write_bytes(content)
    assert_refused(path, name, "cannot be read")


def test_parquet_cut_short(tmp_path: Path) -> None:
    path = _good(tmp_path / "run")
    data = (path / "requests.parquet").read_bytes()
    (path / "requests.parquet").write_bytes(data[: len(data) // 2])
    assert_refused(path, "requests.parquet", "cannot be read")


def _changed(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """Change the table of a good run's requests."""
    parquet = _good(path) / "requests.parquet"
    pq.write_table(change(pq.read_table(parquet)), parquet)
    return path


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = _changed(tmp_path / "run", lambda table: table.drop_columns(["last_token_ns"]))
    assert_refused(path, "requests.parquet", "'last_token_ns'")


def test_a_column_of_another_type_is_an_error_of_one_line(tmp_path: Path) -> None:
    index = SCHEMA.get_field_index("stage")
    path = _changed(tmp_path / "run", lambda t: t.set_column(index, "stage", pa.array(["zero"])))
    assert_refused(path, "requests.parquet", "column stage is of a wrong type")


def test_further_columns_are_ignored(tmp_path: Path) -> None:
    path = _changed(tmp_path / "run", lambda table: table.append_column("new", pa.array([1])))
    assert files.load_run(path).requests.schema.equals(SCHEMA)


# -- JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_never_holds_nan_and_the_old_file_stays(tmp_path: Path, value: float) -> None:
    path = tmp_path / "run.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"a": [{"b": value}]})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_json_is_utf_8_and_ends_with_a_line_end(tmp_path: Path) -> None:
    files.write_json(tmp_path / "x.json", {"name": "é→\N{CRAB}"})
    text = (tmp_path / "x.json").read_bytes()
    assert text.endswith(b"}\n")
    assert "é→\N{CRAB}".encode() in text


def test_json_is_as_pythons_own_and_leaves_nothing_to_collect() -> None:
    value = {"a": [[], {}, 1e-5, 10**25, -0.0, True, None, 'é\n\u2028"', 7.483200170099735e-05]}
    gc.collect()
    text = files.json_text(value)
    assert gc.collect() == 0
    assert text == json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.json_text([math.nan])
