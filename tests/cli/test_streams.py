"""A reader of stdout or stderr that goes away is no error of what is measured: all is written, the
status is the run's.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampacity.simulator.server.launch import Started
from tests.support.args import COMMAND_ONCE, Cli, args_of
from tests.support.synthetic import Stage, make_run, request

# lines and flushes while the stage goes on
LINES = "import ampacity.progress as p; p.PLAIN_EVERY_S = 0.1; "


def leave(
    reader: int, writer: int, streams: str, arguments: list[str | Path], read: int, other: Path
) -> tuple[int, str]:
    """Exit status, and what the other stream holds, when the reader goes away after ``read`` times
    some bytes."""
    if not read:
        os.close(reader)
    with other.open("wb") as kept:
        process = subprocess.Popen(
            [*COMMAND_ONCE[:-1], LINES + COMMAND_ONCE[-1], *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=writer if "out" in streams else kept,
            stderr=writer if "err" in streams else kept,
            start_new_session=True,
        )
    try:
        os.close(writer)
        for _ in range(read):
            assert os.read(reader, 1000)
        if read:
            os.close(reader)
        return process.wait(60), other.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("streams", "read", "more"),
    [
        ("err", 0, ["--json"]),
        ("out", 1, []),  # goes away during the final print, or after it
        ("out err", 3, ["--workers", "2"]),  # in the middle: announcement and lines of the stage
    ],
)
def test_a_run_goes_on_without_its_reader(
    server: Started, tmp_path: Path, streams: str, read: int, more: list[str]
) -> None:
    run = tmp_path / "run"
    status, other = leave(
        *os.pipe(), streams, [*of_run(server, run), *more], read, tmp_path / "other"
    )
    assert_report_is_kept(run, status, other)
    if streams == "err":
        assert json.loads(other)["stages"]  # the stream that is read holds what it should
    if streams == "out":
        assert "stage 0: 10 req/s, " in other


@pytest.mark.skipif(sys.platform != "linux", reason="what a terminal says that went away")
def test_a_run_goes_on_without_its_terminal(server: Started, tmp_path: Path) -> None:
    run = tmp_path / "run"
    status, other = leave(*os.openpty(), "out err", of_run(server, run), 3, tmp_path / "other")
    assert_report_is_kept(run, status, other)


def of_run(server: Started, run: Path) -> list[str | Path]:
    return ["run", server.url, *args_of("--rates 10 --duration 1s --out"), run]


def assert_report_is_kept(run: Path, status: int, other: str) -> None:
    assert status == 0, other
    assert "Traceback" not in other
    assert "Exception ignored" not in other
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    assert json.loads((run / "summary.json").read_text())["stages"]  # more on a busy machine
    assert (run / "report.html").is_file()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """300 requests at 10/s with a TTFT of 100 ms."""
    records = [request(i, i / 10, ttft_s=0.1, gaps_s=[0.01] * 4) for i in range(300)]
    make_run(tmp_path / "run", [Stage(records, 30.0, offered_rps=10.0)])
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("command", "streams", "expected"),
    [
        ("--help", "out", 0),
        ("report RUN", "out err", 0),
        ("report RUN/no-such", "err", 2),
        ("workload sample chat -n 2000 --rates 5", "out", 0),  # more than a pipe holds
        ("gate RUN --baseline BASE", "out err", 1),
    ],
)
def test_the_status_is_that_of_the_command(
    made: Path, tmp_path: Path, command: str, streams: str, expected: int, ampacity: Any
) -> None:
    arguments: list[str | Path] = [
        word.replace("RUN", str(made)).replace("BASE", str(tmp_path / "b"))
        for word in command.split()
    ]
    if "gate" in command:
        assert ampacity("baseline", made, "-o", tmp_path / "b") == 0
        arguments += ["--slo", "ttft_p50=50ms"]
    status, other = leave(*os.pipe(), streams, arguments, 0, tmp_path / "other")
    assert status == expected, other
    assert "Traceback" not in other
    assert "Exception ignored" not in other


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_disk_that_is_full_is_an_error(made: Path) -> None:
    """What was asked for is not there: not to be mistaken for a reader that has seen enough."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND_ONCE, "report", made],
            stdout=full,
            stderr=subprocess.PIPE,
            # as some editors and build systems set them: no width, no date is told
            env=os.environ | {"COLUMNS": "0", "SOURCE_DATE_EPOCH": ""},
            timeout=60,
            check=False,
        )
    assert done.returncode != 0
    expected = f"No space left on device; 'ampacity report {made}' prints it\n"
    assert done.stderr.decode() == f"ampacity: the output cannot be written: {expected}"
    assert (made / "report.html").is_file()


def test_a_report_that_cannot_be_written_is_not_named(
    made: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one of an earlier state left beside the new summary, nor a part of the new one."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (made / "report.html").write_text("old")
    monkeypatch.setattr(Path, "replace", full)  # the last step of writing a page
    monkeypatch.setattr("ampacity.loadgen.rundir.files.write_json", lambda *_: None)
    told = cli("report", made)
    assert (told.returncode, told.stderr.strip()) == (
        2,
        f"ampacity: {made / 'report.html'} cannot be written: No space left on device",
    )
    assert "Up to 10 requests/s" in told.stdout
    assert "REPORT" not in told.stdout
    assert {path.name for path in made.iterdir()} == {"requests.parquet", "run.json"}
