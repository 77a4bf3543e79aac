"""The live panel on real terminals: it holds nothing up, and it leaves nothing behind."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ampacity.analysis.slo import parse_slo
from ampacity.experiments.stages.conduct import AT_ONCE_S
from ampacity.live_panel import LivePanel, Outlook, lines_of, percentile
from ampacity.loadgen.plan import LIVE_TIMES, Live, LiveTimes
from ampacity.progress import Progress
from ampacity.simulator.server.launch import Started
from tests.support.args import COMMAND, args_of
from tests.support.synthetic import request
from tests.support.waiting import wait_until


def of_two_workers(ttfts_s: list[float], gaps_s: list[float]) -> Live:
    """The merged counters of two processes, which have half of the answers each."""
    live, parts = Live(), [Live(times=LiveTimes()) for _ in range(2)]
    for i, ttft_s in enumerate(ttfts_s):
        parts[i % 2].count(request(i, 0.0, ttft_s=ttft_s, gaps_s=gaps_s))
    for part in parts:
        part.flush()
        live.merge(part)
    return live


def panel(**changes: Any) -> LivePanel:
    """Of the second of four stages, 30 of its 60 s over: 40 requests/s, TTFT 1, 2 ... 100 ms.

    One in fifty gaps of each answer is 20 ms, the others are 10 ms."""
    live = of_two_workers([0.001 * i for i in range(1, 101)], [*[0.01] * 49, 0.02])
    began_s = time.monotonic() - 30
    live.stage, live.level, live.began_s, live.duration_s = 1, 40.0, began_s, 60.0
    live.released, live.ended, live.kinds = 1200, 1188, Counter(changes.pop("kinds", {}))
    generator: Any = SimpleNamespace(live=live)
    plan: Any = SimpleNamespace(index=1)
    slos = [parse_slo("itl_p99=50ms"), parse_slo("ttft_p95=90ms")]
    burst = {"base_s": 20.0, "burst_s": 20.0} if changes.pop("burst", None) else None
    return LivePanel(generator, plan, slos, Outlook(4, None, False, began_s - 60), burst)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_panel(width: int, encoding: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding=encoding) as file:
        console = Console(file=file, width=width, height=24, color_system=None, force_terminal=True)
        shown = panel(kinds={"ok": 1185, "timeout": 2, "reset": 1})
        text, lines = lines_of(shown, console)
    text.encode(encoding)
    rows = text.splitlines()
    assert {len(row) for row in rows} == {59} == {len(line) for line in lines}
    assert " stage 1 (2 of 4) " in rows[0]
    assert "40 req/s" in rows[0]
    assert " 50%  0:30 left" in rows[1]
    assert " 38%  about 2:30 left" in rows[2]  # 90 s of 240 s: 90 + 30 + 2 x 60
    figures = [
        re.fullmatch(r"(\w+ p\d+) +([\d.]+) ms of (\d+) ms.*", row[2:-2]) for row in rows[3:5]
    ]
    (ttft, ttft_ms, _), (itl, itl_ms, limit_ms) = (found.groups() for found in figures if found)
    assert (ttft, itl, limit_ms) == ("TTFT p95", "ITL p99", "50")
    assert [float(ttft_ms), float(itl_ms)] == [
        pytest.approx(95, rel=0.02),
        pytest.approx(20, rel=0.02),
    ]
    assert "in flight        12" in rows[5]
    assert "40.0 sent/s, 39.6 done/s" in rows[6]
    assert "timeout 2, reset 1" in rows[7]


def test_the_panel_of_an_ab_names_the_arm_and_counts_the_stages_of_both() -> None:
    """The other arm has run two stages: of eight this is the fourth, and 4 x 60 s + 30 s are left."""
    shown = panel()
    shown._outlook = Outlook(8, None, False, time.monotonic() - 210, arm="B", before=2)
    text, _ = lines_of(shown, Console(width=80, height=24))
    assert " B stage 1 (4 of 8) " in text
    assert " 44%  about 4:30 left" in text  # 210 of 480 s


def test_percentiles_of_each_metric_to_two_per_cent() -> None:
    """Of answers of 200 ms, then chunks of one token after 10 ms and of four after 40 ms."""
    live = Live(times=LiveTimes())
    for i in range(9):
        live.count(request(i, 0.0, ttft_s=0.2, gaps_s=[0.01, 0.04], chunk_tokens=[1, 1, 4]))
    live.flush()
    found = {metric: percentile(live, metric, 0.6) for metric in LIVE_TIMES}
    wanted = {"ttft": 0.2, "e2e": 0.25, "itl": 0.01, "tpot": 0.01, "icl": 0.04}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0.02)
    for i in range(9, 19):
        live.count(request(i, 0.0, ttft_s=None, status="timeout"))
    live.flush()
    assert percentile(live, "ttft", 0.6) == math.inf  # 10 of 19 failed
    assert percentile(live, "ttft", 0.999) is None  # too few
    assert percentile(Live(), "ttft", 0.5) is None  # nobody counts them


def test_a_low_terminal_gets_a_line() -> None:
    text, lines = lines_of(panel(), Console(width=80, height=10))
    assert text.startswith("stage 1 (2 of 4): 40 req/s planned, 40.0 sent/s")
    assert [len(line) <= 79 for line in lines] == [True]


def test_requests_that_were_given_up_are_not_done() -> None:
    """888 of 1,188 ended requests were answered within 30 s."""
    assert "40.0 sent/s, 29.6 done/s" in str(panel(kinds={"ok": 888, "unfinished": 300}).line())


def test_quiet_prints_nothing_and_notes_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet=True) as quiet:
        quiet.note("not this")
    with Progress() as progress:
        for i in range(50):
            progress.note(f"note {i}")
    assert capfd.readouterr().err.splitlines() == [f"note {i}" for i in range(50)]


def of_run(server: Started, out: Path, duration: str) -> list[str]:
    load = args_of(f"--rates 20 --duration {duration} --slo ttft_p95=1s --workload chat-short")
    return [*COMMAND, "run", server.url, *load, "--out", str(out)]


def test_a_stopped_terminal_does_not_hold_the_run_up(server: Started, tmp_path: Path) -> None:
    """Nobody reads the terminal, as after Ctrl-S: its buffer of 4 KiB is full after some paints."""
    reader, writer = os.openpty()
    with (tmp_path / "out").open("w") as out:
        command = of_run(server, tmp_path / "run", "3s")
        process = subprocess.Popen(command, stdout=out, stderr=writer, start_new_session=True)
    try:
        assert process.wait(90) == 0
        assert len(os.read(reader, 65536)) > 4000  # it was full
    finally:
        process.kill()
        os.close(writer)
        os.close(reader)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "complete"
    assert (tmp_path / "out").read_text().startswith("CAPACITY")


@pytest.mark.real_time
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_a_resize_leaves_no_debris_and_ctrl_c_ends_with_the_report(
    server: Started, tmp_path: Path, size: tuple[int, int]
) -> None:
    def tmux(*words: object) -> str:
        command = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def shown() -> str:
        return tmux("capture-pane", "-p", "-S", "-")

    def until(seen: Callable[[str], bool], within_s: float) -> str:
        return wait_until(lambda: text if seen(text := shown()) else "", within_s, shown)

    root = Path(__file__).parents[2]
    line = shlex.join(["env", f"PYTHONPATH={root}", *of_run(server, tmp_path / "run", "60s")])
    tmux("new-session", "-d", "-x", size[0], "-y", size[1], f"cd /; {line}; sleep 60")
    try:
        until(lambda text: "stage 0 (1 of 1)" in text, 30)
        for width in (size[0] - 7, 200, 61, *size[:1]):
            tmux("resize-window", "-x", width, "-y", size[1])
            for _ in range(2):  # drawn anew, and once more with all of the new width
                before = shown()
                until(lambda text: text != before, 5)  # noqa: B023 - awaited here
        text = until(lambda text: "TTFT" in text, 5)
        assert (text.count("╭"), text.count("╰"), text.count("in flight")) == (1, 1, 1)
        began_s = time.monotonic()
        tmux("send-keys", "C-c")
        text = until(lambda text: "REPORT" in text, 20)
        took_s = time.monotonic() - began_s
        report = tmp_path / "run" / "report.html"  # written after the screen, with its charts
        wait_until(report.is_file)
        lines = text.rstrip().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("CAPACITY"))
        assert len(lines) - first <= 23
        assert "╭" not in text
        assert took_s < 5  # about 1.5 s on an idle machine
    finally:
        tmux("kill-server")


def test_a_second_ctrl_c_leaves_at_once_and_names_what_writes_the_report(
    server: Started, tmp_path: Path
) -> None:
    command = of_run(server, tmp_path / "run", "60s")
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert any("sent/s" in line for line in process.stderr)  # the stage has begun
        process.send_signal(signal.SIGINT)
        assert any("(Ctrl-C again: leave without it)" in line for line in process.stderr)
        process.send_signal(signal.SIGSTOP)  # or the report may be there before the second one
        time.sleep(2 * AT_ONCE_S)  # the subject: another decision, not one signal sent twice
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        rest = process.stderr.read()
        assert process.wait(30) == 130
    assert f"'ampacity report {tmp_path / 'run'}' writes it" in rest
    assert not (tmp_path / "run" / "report.html").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["stages"]


def test_the_painter_is_a_thread_that_ends(capfd: pytest.CaptureFixture[str]) -> None:
    before, switch_s = threading.active_count(), sys.getswitchinterval()
    with Progress() as progress:
        progress.note("x")
        assert threading.active_count() == before + 1
    assert (threading.active_count(), sys.getswitchinterval()) == (before, switch_s)
