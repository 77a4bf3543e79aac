"""``ampacity soak``: windows that follow each other without a gap, in flat memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.config import make_settings
from ampacity.experiments.windows import summarise_soak
from ampacity.loadgen.rundir.files import Run, load_run, read_meta
from ampacity.simulator.server.launch import start_in_process
from ampacity.workloads.schedule import endless_schedule
from tests.support.args import Command

LOAD = "--rps 40 --input-tokens 20 --output-tokens 40 --slo ttft_p95=500ms"


def soaked(command: Command, out: Path, how: str, status: int) -> Run:
    with start_in_process("linear:0.02,0.0") as server:  # an answer takes 0.8 s
        command(f"soak {server.url} {LOAD} {how} --seed 5 --out", out, status=status)
    return load_run(out)


@pytest.mark.real_time
def test_windows_follow_each_other_without_a_gap(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    run = soaked(command, tmp_path / "run", "--duration 6s --window 2s", status=0)
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
    screen = capsys.readouterr().out
    assert screen.startswith("VERDICT   met")
    assert "needs 24 windows, has 3" in screen
    assert run.complete
    assert sorted(p.name for p in (tmp_path / "run").glob("requests*")) == [
        f"requests-w0000{k}.parquet" for k in range(3)
    ]
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary.requests == len(whole)
    assert summary.soak is not None
    assert (summary.soak.windows, summary.soak.duration_s) == (3, pytest.approx(6.0))
    assert all(memory > 1e7 for memory in summary.soak.series["client memory"] if memory)
    # written once: another report reads no record of a window that is over
    for part in (tmp_path / "run").glob("requests-w0000[01].parquet"):
        part.unlink()
    _, again = summarise_soak(tmp_path / "run", read_meta(tmp_path / "run"))
    assert again == summary
