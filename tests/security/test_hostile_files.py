"""Files that someone else made: no pipe is waited for, nothing exhausts the memory, nothing runs."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ampacity.analysis.metrics.requests import RecordsError
from ampacity.analysis.summary import summarise
from ampacity.files import MIB
from ampacity.loadgen.rundir.files import RunDirError, load_run
from ampacity.loadgen.rundir.records import SCHEMA
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.read import read_trace
from tests.support.args import COMMAND, args_of
from tests.support.processes.command_lines import Ended, run_all

URL = "http://127.0.0.1:9/v1 --model m"
PREDICT = "predict --preset linear:0.01,0 --input-tokens 10 --output-tokens 5 --rates 5"
READERS = {  # command lines that read FILE; RUN is a good run directory
    "trace": f"run {URL} --trace FILE.csv",
    "schedule": f"run {URL} --trace FILE.jsonl",
    "log to fit": "workload fit FILE.csv",
    "workload": "workload show FILE.yaml",
    "run file": "run -c FILE.yaml",
    "prompts": f"run {URL} --rates 1 --prompts FILE.jsonl",
    "prices": "plan RUN --peak-rps 5 --prices FILE.csv",
    "config.json": "size RUN --gpu h100 --peak-rps 5 --model-config FILE.json",
    "baseline": "gate RUN --baseline FILE.json",
    "labels": "report RUN --labels FILE.csv",
    "production": "validate RUN --production FILE.txt",
    "import": "import FILE.json",
    "faults": "simulate --preset demo --faults FILE.json",
    "key": f"run {URL} --rates 1 --api-key-file FILE.key",
    "cacert": "run https://127.0.0.1:9/v1 --rates 1 --cacert FILE.pem",
    "cert": "run https://127.0.0.1:9/v1 --rates 1 --cert FILE.pem",
    "tokenizer": f"run {URL} --rates 1 --tokenizer hf:FILE.json",
    "run.json": "report FOLDER/run.json",
    "records": "report FOLDER/requests.parquet",
    "server": "report FOLDER/server.parquet",
}


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("good") / "run"
    words = args_of(PREDICT, "--duration 5s --quiet --out", run)
    subprocess.run([*COMMAND, *words], check=True, capture_output=True)
    return run


def words_for(line: str, run: Path, tmp_path: Path, make: Callable[[Path], object]) -> list[str]:
    """Return a command line whose FILE, or file of a run directory FOLDER, ``make`` has made."""
    words = line.replace("RUN", str(run)).split()
    for i, word in enumerate(words):
        if word.startswith("FOLDER/"):
            folder = tmp_path / "damaged"
            folder.mkdir()
            name = word.removeprefix("FOLDER/")
            for path in run.iterdir():
                if path.is_file() and path.name != name:
                    (folder / path.name).write_bytes(path.read_bytes())
            make(folder / name)
            words[i] = str(folder)
        elif "FILE" in word:
            path = tmp_path / word.replace("hf:", "")
            make(path)
            words[i] = word.replace("FILE", str(tmp_path / "FILE"))
    return words


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(
    reader: str,
    kind: str,
    good_run: Path,
    tmp_path: Path,
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = words_for(READERS[reader], good_run, tmp_path, KINDS[kind])
    command(*words, status=2)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("ampacity: ")


@cache
def _newlines() -> bytes:
    return gzip.compress(b"\n" * 2**28, 1)


def packed(path: Path) -> None:
    """A few MiB of gzip that unfold to 6 GiB."""
    path.write_bytes(_newlines() * 24)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(40 << 30)


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 2_000_000)


def anchors(path: Path) -> None:
    """Ten levels, each with ten of the one before."""
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    path.write_text("\n".join(["l0: &l0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]", *levels]))


def merged_anchors(path: Path) -> None:
    levels = [f"l{i}: &l{i}\n  <<: [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    path.write_text("\n".join(["l0: &l0 {a: 1, b: 2, c: 3}", *levels]))


def long_number(path: Path) -> None:
    path.write_text(f"seed: 1{':1' * 500_000}\n")


def repeated_text(path: Path) -> None:
    """A column that stores one text of 1 MiB and says that it stands in 100,000 rows."""
    columns = {field.name: pa.nulls(100_000, field.type) for field in SCHEMA}
    columns["error"] = pa.DictionaryArray.from_arrays(np.zeros(100_000, np.int32), ["x" * MIB])
    pq.write_table(pa.table(columns), path)


BOMBS = {  # name: (reader, content, a part of the line)
    **{f"{r} of gzip": (r, packed, "MiB") for r in ("prompts", "prices", "run.json", "import")},
    **{
        f"sparse {r}": (r, sparse, "it has more than")
        for r in ("workload", "run file", "prompts", "prices", "config.json", "baseline", "labels")
    },
    **{
        f"sparse {r}": (r, sparse, "it has more than")
        for r in ("import", "faults", "key", "cacert", "cert", "run.json")
    },
    **{f"deep {r}": (r, deep, "") for r in ("config.json", "baseline", "import", "run.json")},
    **{f"deep {r}": (r, deep, "") for r in ("faults", "prompts", "schedule")},
    "anchors": ("workload", anchors, "unfolds into more than 1,000,000 values"),
    "merged anchors": ("run file", merged_anchors, "unfolds into more than 1,000,000 values"),
    "long number": ("run file", long_number, "a number of more than 100 characters"),
    "repeated text": ("records", repeated_text, ""),
    "sparse trace": ("trace", sparse, "more than 134,217,728 characters"),
    "sparse production": ("production", sparse, ""),
}
PEAK_MIB = 2200  # a line of a trace may have 256 Mi characters


def test_the_lines_of_a_trace_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few MiB of gzip hold gigabytes of them."""
    monkeypatch.setattr("ampacity.workloads.traces.formats.LINES_MAX", 1000)
    for name in ("t.csv.gz", "t.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"\n" * 2000))
        with pytest.raises(WorkloadError, match="more than 1,000 lines: split it"):
            read_trace(tmp_path / name)


def test_a_parquet_file_is_refused_by_its_footer(
    good_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampacity.loadgen.rundir.parquet.memory_bytes", lambda: 1000)
    with pytest.raises(RunDirError, match=r"it unfolds to 0\.0 GiB, the memory has"):
        load_run(good_run)


FLIPPED = """
import random, sys
from pathlib import Path
from ampacity.loadgen.rundir.files import RunDirError
from ampacity.loadgen.rundir.parquet import read_requests

good, path, draw, refused = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), random.Random(1), 0
footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
for _ in range(300):
    damaged = bytearray(good)
    damaged[draw.randrange(footer, len(good) - 8)] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged)
    try:
        read_requests(path)
    except RunDirError as error:
        refused += "histogram size mismatch" in str(error)
print(refused)
"""


def test_a_flipped_bit_in_the_footer_does_not_end_the_process(
    good_run: Path, tmp_path: Path
) -> None:
    """A damaged size of a histogram ends the process where pyarrow looks at a column first."""
    given = [good_run / "requests.parquet", tmp_path / "requests.parquet"]
    ran = subprocess.run(
        [sys.executable, "-c", FLIPPED, *given], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-500:]
    assert int(ran.stdout) > 0


@pytest.fixture(scope="module")
def read(good_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Return how each of BOMBS ended, read one after the other."""
    lines = {}
    for name, (reader, make, _) in BOMBS.items():
        lines[name] = words_for(READERS[reader], good_run, tmp_path_factory.mktemp("bomb"), make)
    return run_all(lines, tmp_path_factory.mktemp("lines") / "lines.json")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_one_line_within_the_memory_and_time(
    name: str, read: dict[str, Ended]
) -> None:
    ended = read[name]
    assert ended.status == 2, ended
    assert ended.err.count("\n") == 1, ended
    assert BOMBS[name][2] in ended.err
    assert ended.peak_mib < PEAK_MIB
    assert ended.took_s < 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_is_no_utf8_is_refused_or_left_out_and_said(
    good_run: Path, tmp_path: Path, stream: bool
) -> None:
    table = pq.read_table(good_run / "requests.parquet")
    texts = pa.array([b"a\xe3"] * table.num_rows, pa.binary()).view(pa.string())
    table = table.set_column(table.column_names.index("class"), "class", texts)
    (tmp_path / "run.json").write_bytes((good_run / "run.json").read_bytes())
    if stream:
        with (
            pa.OSFile(str(tmp_path / "requests.arrows"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as to,
        ):
            to.write_table(table)
        run = load_run(tmp_path)
        assert (run.requests.num_rows, "requests.arrows cannot be read" in str(run.damage)) == (
            0,
            True,
        )
        return
    pq.write_table(table, tmp_path / "requests.parquet")
    with pytest.raises(RunDirError, match=r"cannot be read: .*Invalid UTF8 sequence"):
        load_run(tmp_path)


@pytest.mark.parametrize(("planned", "refused"), [(1_002_000, False), (19_901_990, True)])
def test_requests_that_no_loss_explains_are_refused(
    good_run: Path, tmp_path: Path, planned: int, refused: bool
) -> None:
    """Each takes memory as if it had been recorded: 20 million take 6 GB."""
    run = tmp_path / "run"
    shutil.copytree(good_run, run)
    meta = json.loads((run / "run.json").read_text())
    meta["stages"][0]["scheduled_requests"] = planned
    (run / "run.json").write_text(json.dumps(meta))
    recorded = pq.read_table(run / "requests.parquet").num_rows
    if not refused:
        assert summarise(load_run(run)).errors["unfinished"] == planned - recorded
        return
    with pytest.raises(RecordsError) as error:
        summarise(load_run(run))
    begin = (
        f"{run / 'run.json'}: stage 0 has 19,901,990 scheduled requests, of which {recorded:,} are "
    )
    assert str(error.value).startswith(begin)
