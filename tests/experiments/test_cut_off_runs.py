"""Runs that are cut off, or lack something of the machine (docs/crash-safety.md)."""

import asyncio
import errno
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.contract.summary import to_json
from ampacity.analysis.summary import summarise
from ampacity.config import make_settings
from ampacity.experiments.stages import preflight
from ampacity.loadgen.rundir.files import load_run
from ampacity.simulator.server.launch import Started
from ampacity.values import ConfigError
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import open_schedule
from tests.support.args import COMMAND, Cli, args_of
from tests.support.processes import kills
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import Call
from tests.support.synthetic import warned
from tests.support.waiting import wait_until

# -- whole runs, which are cut off ----------------------------------------------------------

LOAD = args_of("--rates 40 --duration 4s --workload chat-short --slo ttft_p95=1s")


def as_scheduled() -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return what an uninterrupted run of LOAD sends, by its seed."""
    drawn = open_schedule(
        load_workload("chat-short"), rate_rps=40.0, duration_s=4.0, seed=1, stage=0
    )
    lengths = zip(drawn.input_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)
    return {(0, k): (*both, 1) for k, both in enumerate(lengths)}


@pytest.mark.slow
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
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_run_that_is_cut_off_goes_on_with_the_same_requests(
    how: signal.Signals, workers: int, status: int, server: Started, cli: Cli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = kills.start("run", server.url, *LOAD, "--workers", workers, "--out", run)
    kills.wait_for_stage(run, random.Random(f"{how}{workers}").uniform(1.0, 2.5))
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
    resumed = cli("run", "--resume", run, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert kills.planned(run) == as_scheduled()
    assert kept.items() <= kills.by_id(run).items()
    summary = json.loads(resumed.stdout)
    assert summary["partial"] is None
    assert warned(summary, "resumed") in {w["text"] for w in summary["warnings"]}
    assert (run / "report.html").is_file()
    again = cli("run", "--resume", run)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "nothing is left to resume" in again.stderr


class HangsFrom(FaultServer):
    """Answers the first ten requests of a load; it hangs with all others."""

    async def _answer(self, call: Call) -> bool:
        number = call.request.headers.get("x-request-id", "").rpartition("-")[2]
        if number.isdigit() and int(number) >= 10:
            await asyncio.sleep(3600)
        return await super()._answer(call)


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


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_whose_disk_is_full_goes_on_once_there_is_room(
    workers: int, server: Started, cli: Cli, tmp_path: Path
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
    resumed = cli("run", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert kills.planned(run) == as_scheduled()


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


@pytest.mark.skipif(sys.platform == "win32", reason="a folder that is in use cannot be removed")
def test_a_run_whose_folder_is_removed_ends_in_one_line(server: Started, tmp_path: Path) -> None:
    run = tmp_path / "run"
    long = args_of("--rates 40 --duration 300s --workload chat-short")
    process = kills.start("run", server.url, *long, "-q", "--out", run)
    kills.wait_for_stage(run, 0.5)
    shutil.rmtree(run)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == f"ampacity: {run / 'requests.arrows'} was removed\n"


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
