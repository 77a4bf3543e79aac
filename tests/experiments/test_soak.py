"""``ampacity soak``: windows that follow each other without a gap, in flat memory."""

import asyncio
import io
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from ampacity.analysis.contract.summary import read_summary
from ampacity.config import make_settings
from ampacity.experiments.stages.live import LivePlayer
from ampacity.experiments.stages.rig import Rig
from ampacity.experiments.virtual.player import VirtualPlayer
from ampacity.experiments.virtual.predict import predict
from ampacity.experiments.windows import summarise_soak
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.files import load_run, part_of, read_meta
from ampacity.loadgen.rundir.records import SCHEMA
from ampacity.progress import Progress
from ampacity.reports.pages.run_report import Beyond, render_report
from ampacity.reports.pages.screen import render_screen
from ampacity.simulator.models.hardware import find_deployment
from ampacity.simulator.server.launch import start_in_process
from ampacity.workloads.schedule import endless_schedule
from tests.support.args import COMMAND, Command
from tests.support.servers.fault_server import FaultServer
from tests.support.waiting import wait_until

LOAD = "--rps 40 --input-tokens 20 --output-tokens 40 --slo ttft_p95=500ms"


@pytest.mark.real_time
def test_windows_follow_each_other_without_a_gap(
    tmp_path: Path, ampacity: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    with start_in_process("linear:0.02,0.0") as server:  # an answer takes 0.8 s
        words = f"soak {server.url} {LOAD} --duration 6s --window 2s --seed 5 --out".split()
        status = ampacity(*words, tmp_path / "run")
    run = load_run(tmp_path / "run")
    stages, table = run.meta["stages"], run.requests
    begin_ns = stages[0]["start_ns"]
    assert [(s["start_ns"] - begin_ns, s["from_s"]) for s in stages] == [
        (0, 0), (2_000_000_000, 2), (4_000_000_000, 4)
    ]  # fmt: skip
    # the same requests at the same times as with one window of the whole length
    workload = make_settings({"url": "http://x", "input_tokens": "20", "output_tokens": "40"})
    whole = endless_schedule(workload.workload, rate_rps=40.0, begin_s=0.0, end_s=6.0, seed=5)
    rows = table.sort_by("request_id").to_pydict()
    assert rows["request_id"] == list(range(len(whole)))
    due_s = (np.array(rows["scheduled_ns"]) - begin_ns) / 1e9
    assert due_s == pytest.approx(whole.scheduled_s, abs=1e-6)
    assert rows["stage"] == [int(s // 2) for s in whole.scheduled_s]
    assert set(rows["status"]) == {"ok"}
    # answers of a window end beside the next one's, and the seam delays nothing
    late_s = (np.array(rows["dispatched_ns"]) - np.array(rows["scheduled_ns"])) / 1e9
    assert np.median(late_s) < 0.005
    seam = (due_s % 2 < 0.3) & (due_s > 1)
    assert np.median(late_s[seam]) < 0.01
    over_the_seam = [
        i for i, ended in enumerate(rows["ended_ns"])
        if ended > stages[min(rows["stage"][i] + 1, 2)]["start_ns"] and rows["stage"][i] < 2
    ]  # fmt: skip
    assert len(over_the_seam) > 20
    assert capsys.readouterr().out.startswith("VERDICT   ")
    # what is in flight in a window is all that is, whichever window it was due in
    spans_s = [(np.array(rows[name]) - begin_ns) / 1e9 for name in ("started_ns", "ended_ns")]
    for judged in read_summary(tmp_path / "run" / "summary.json").stages:
        within_s = [2 * judged.index + at for at in (judged.window.start_s, judged.window.end_s)]
        began, ended = (np.clip(at_s, *within_s) for at_s in spans_s)
        mean = (ended - began).sum() / (within_s[1] - within_s[0])
        assert judged.concurrency == pytest.approx(mean, rel=1e-3)
    assert run.complete
    assert sorted(p.name for p in (tmp_path / "run").glob("requests*")) == [
        f"requests-w0000{k}.parquet" for k in range(3)
    ]
    assert run.server.num_rows >= 5  # a sample a second
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary.requests == len(whole)
    assert status == {"met": 0, "inconclusive": 3}[summary.soak.verdict]  # 3: a busy machine
    assert (summary.soak.windows, summary.soak.duration_s) == (3, pytest.approx(6.0))
    assert all(memory > 1e7 for memory in summary.soak.series["client memory"] if memory)
    # a checkpoint that was killed before it deleted the stream
    part = part_of(tmp_path / "run", 2)
    again = load_run(tmp_path / "run", 2).requests
    with (
        pa.OSFile(str(part.with_suffix(".arrows")), "wb") as file,
        pa.ipc.new_stream(file, SCHEMA) as stream,
    ):
        stream.write_table(again)
    assert load_run(tmp_path / "run").requests.num_rows == len(whole)
    # written once: another report reads no record of a window that is over
    for part in (tmp_path / "run").glob("requests-w0000[01].parquet"):
        part.write_bytes(b"no records")
    _, judged = summarise_soak(tmp_path / "run", read_meta(tmp_path / "run"))
    assert judged == summary
    assert not part.with_suffix(".arrows").exists()


def test_a_server_that_becomes_slower_in_virtual_time(tmp_path: Path) -> None:
    """30 windows of 30 s at 10 req/s; from the 15th on a step takes 25 ms and not 20."""
    load = {"url": "http://predicted.invalid/v1", "input_tokens": "10", "output_tokens": "8"}
    settings = make_settings({**load, "out": str(tmp_path / "run"), "slo": ["itl_p99=22ms"]})
    fast, slow = (find_deployment(f"linear:{step},0.0") for step in (0.02, 0.025))

    async def drive(rig: Rig) -> None:
        rig.note_down("soak", {"rate_rps": 10.0, "duration_s": 900.0, "window_s": 30.0})
        stages = rig._writer.meta["stages"]
        for window in range(30):
            assert isinstance(rig.player, VirtualPlayer)
            rig.player.deployment = fast if window < 15 else slow
            await rig.open_stage(10.0, 30.0)
            stages[-1]["from_s"] = 30.0 * window

    how: dict[str, Any] = {"drive": drive, "experiment": "soak"}
    path = asyncio.run(predict(settings, fast, ["ampacity"], Progress(quiet=True), **how))
    _, summary = summarise_soak(path, read_meta(path))
    found = {c.name: c for c in summary.soak.changes if c.after is not None}
    for name in ("ITL p50", "ITL p99", "E2E p50"):
        assert (found[name].verdict, found[name].window) == ("step", 15), name
        assert (found[name].after or 0) / (found[name].before or 1) == pytest.approx(1.25, rel=0.02)
    assert not found.keys() & {"answered", "output tokens", "KV cache used, most"}
    assert summary.soak.verdict == "violated"
    assert "Changed: " in summary.verdict
    assert "(window 15) from" in summary.verdict
    assert summary.next_command is None  # the command line was no soak
    console = Console(width=80, file=io.StringIO())
    render_screen(summary, console, path / "report.html")
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 23
    assert lines[0].startswith("VERDICT   violated    itl_p99=22ms: ")
    assert any("since 00:07:30 (window 15) from 20 ms to 25 ms" in line for line in lines)
    page = render_report(summary, read_meta(path), Beyond(directory=str(path)))
    section = page.partition('<section id="soak">')[2].partition("</section>")[0]
    assert "since 00:07:30 (window 15) from 20 ms to 25 ms" in section
    assert "no change" in section
    assert "<svg" in section


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_soak_that_is_ended_is_reported_and_goes_on(
    end: signal.Signals, tmp_path: Path, command: Command
) -> None:
    """In its second window: what was in flight is unfinished, and the rest is played after it."""
    run = tmp_path / "run"
    with FaultServer(gap_s=0.01) as server:
        load = "--rps 30 --duration 3s --window 1s --input-tokens 9 --output-tokens 4 --seed 2"
        process = subprocess.Popen(
            [*COMMAND, *f"soak {server.url} {load} --out".split(), run],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        wait_until((run / "requests-w00001.arrows").exists)
        process.send_signal(end)
        out = process.communicate(timeout=20)[0]
        assert process.returncode == (130 if end == signal.SIGTERM else -9)
        if end == signal.SIGTERM:
            assert "PARTIAL   interrupted at window 1" in out
            assert load_run(run).complete
            known = read_summary(run / "summary.json")
            assert known.requests == load_run(run).requests.num_rows
            assert str(known.next_command) == f"ampacity soak --resume {run}"
        else:
            command("report", run)
        command("soak --resume", run)
    meta, rows = read_meta(run), load_run(run).requests.sort_by("request_id").to_pydict()
    workload = make_settings(
        {"url": "http://x", "input_tokens": "9", "output_tokens": "4"}
    ).workload
    whole = endless_schedule(workload, rate_rps=30.0, begin_s=0.0, end_s=3.0, seed=2)
    assert rows["request_id"] == list(range(len(whole)))
    assert (meta["status"], len(meta["seams"])) == ("complete", 1)
    begin_s = [s["from_s"] for s in meta["stages"]]
    # where no record of the second window was written, it is played from its start
    assert begin_s[:2] == [0, 1]
    assert end == signal.SIGKILL or 1 < begin_s[2] < 2
    stage = [meta["stages"][i] for i in rows["stage"]]
    due_s = [
        of["from_s"] + (at - of["start_ns"]) / 1e9
        for of, at in zip(stage, rows["scheduled_ns"], strict=True)
    ]
    assert due_s == pytest.approx(whole.scheduled_s, abs=1e-6)
    summary = read_summary(run / "summary.json")
    assert (summary.requests, summary.partial) == (len(whole), None)
    assert len(summary.seams) == 1


def open_windows(run: Path) -> list[int]:
    """Return the windows that are not over, and of which something is recorded."""
    going = [s["index"] for s in read_meta(run)["stages"] if s["drained_ns"] is None]
    return [index for index in going if load_run(run, index).requests.num_rows]


def test_a_kill_while_two_windows_are_in_flight_loses_no_request(
    tmp_path: Path, command: Command
) -> None:
    """Answers take up to two windows, so the one before is not over when a kill comes."""
    run, lengths = tmp_path / "run", "--output-tokens uniform:min=1,max=6"
    with FaultServer(gap_s=0.4) as server:
        load = f"--rps 30 --duration 4s --window 1s --input-tokens 9 {lengths} --seed 2"
        process = subprocess.Popen(
            [*COMMAND, *f"soak {server.url} {load} --out".split(), run],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until((run / "requests-w00001.arrows").exists)
        wait_until(lambda: len(open_windows(run)) > 1)
        process.kill()
        process.wait()
        killed = open_windows(run)
        command("report", run)
        for path in (run / "run.json", *run.glob("requests*")):
            os.utime(path, (time.time() - 500, time.time() - 500))
        command("soak --resume", run)
    rows = load_run(run).requests.to_pydict()
    assert sorted(rows["request_id"]) == list(range(len(rows["request_id"])))
    settings = make_settings(
        {"url": "http://x", "input_tokens": "9", "output_tokens": lengths.split()[1]}
    )
    whole = endless_schedule(settings.workload, rate_rps=30.0, begin_s=0.0, end_s=4.0, seed=2)
    assert len(rows["request_id"]) == len(whole)
    cut = [stage for stage, s in zip(rows["stage"], rows["status"], strict=True) if s != "ok"]
    assert set(cut) == set(killed)
    assert len(killed) > 1
    (seam,) = read_meta(run)["seams"]
    assert seam["in_flight"] == len(cut) >= 10
    # older files, as of a copy, are no clock that was set; the run's beginning is known to 1 s
    assert seam["wall_gap_s"] == pytest.approx(seam["gap_s"], abs=1.1)
    assert not [*run.glob("*.arrows")]


def test_a_server_that_answers_nothing_ends_the_soak(tmp_path: Path, command: Command) -> None:
    refuses = {"nothing": ("", "")}
    with FaultServer(gap_s=0.01, refuses=refuses) as server:
        down = {"messages": ("503 Service Unavailable", "{}")}
        played = (tmp_path / "run" / "requests-w00000.arrows").exists
        threading.Thread(target=lambda: wait_until(played) and refuses.update(down)).start()
        words = f"soak {server.url} --rps 30 --duration 1h --window 1s --input-tokens 9 --output-tokens 4 --out"
        command(words, tmp_path / "run", status=2)
    meta = read_meta(tmp_path / "run")
    assert meta["status"] == "aborted"
    assert re.fullmatch(r"no request of window \d was answered", meta["status_reason"])
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary.errors["overloaded"] > 20


def test_a_budget_ends_the_soak_within_a_window(tmp_path: Path, command: Command) -> None:
    with FaultServer(gap_s=0.01) as server:
        words = f"soak {server.url} --rps 30 --duration 1h --window 1s --max-requests 40"
        command(words, "--input-tokens 9 --output-tokens 4 --out", tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.requests.num_rows == 40
    assert run.meta["status_reason"] == "--max-requests 40 is used up"
    assert run.meta["status"] == "budget"


def test_every_window_has_ten_minutes_for_its_answers(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one too."""
    drains_s, follow = [], LivePlayer.follow

    async def noted(self: LivePlayer, plan: StagePlan, *rest: Any) -> int:
        drains_s.append(plan.drain_s)
        return await follow(self, plan, *rest)

    monkeypatch.setattr(LivePlayer, "follow", noted)
    words = "--rps 30 --duration 2s --window 1s --input-tokens 9 --output-tokens 4"
    with FaultServer(gap_s=0.01) as server:
        command(f"soak {server.url} {words} --out", tmp_path / "run")
    assert drains_s == [600.0, 600.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--rps 0", "--rps 0: give a number above 0"),
        ("--rps 5 --duration 1m --window 2m", "--window 2m: give at least 1s, and at most"),
        ("--rps 5 --window 100ms", "--window 100ms: give at least 1s"),
        ("--rps 5 --workload agentic", "conversations cannot be cut into windows"),
        ("--rps 5 --arrivals ramp:from=0.2,to=1.8", "one steady rate"),
    ],
)
def test_what_cannot_be_soaked_is_refused(
    given: str, message: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command(f"soak http://127.0.0.1:1/v1 {given}", status=2)
    assert message in capsys.readouterr().err
