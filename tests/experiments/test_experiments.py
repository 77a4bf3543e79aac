"""Whole experiments through the command line, against the simulator in a process of its own."""

import html
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ampacity.config import make_settings
from ampacity.experiments.stages.budget import estimate
from ampacity.experiments.stages.conduct import conduct, run_event_loop
from ampacity.experiments.stages.rig import Rig
from ampacity.experiments.sweep import sweep
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.send.endpoint import is_loopback
from ampacity.progress import Progress
from ampacity.run_file import read_run_file
from ampacity.simulator.server.launch import Started, start_in_process
from tests.support.args import Cli, args_of
from tests.support.contract import summarise
from tests.support.processes.kills import start, wait_for_stage, workers_of
from tests.support.waiting import wait_until

KEY = "sk-never-to-be-written-4711"


def rows(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(run / "requests.parquet").to_pylist()
    return found


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_json_alone_on_stdout_with_the_designed_names(
    cli: Cli, server: Started, tmp_path: Path
) -> None:
    result = cli(
        "sweep",
        server.url,
        "--model",
        server.model,
        *args_of(
            "--workload chat --slo ttft_p99=500ms --slo itl_p99=100ms --rates 4,8 --duration "
            "3s --max-requests 30 --json --out"
        ),
        tmp_path / "run",
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == summary(tmp_path / "run")
    assert found["schema_version"] == 2
    for (
        name
    ) in "verdict workload slos stages knee capacity littles_law goodput fleet audit".split():
        assert name in found
    for (
        name
    ) in "ttft_s ttft_from_schedule_s itl_s icl_s tpot_s e2e_s goodput_rps slip_s errors".split():
        assert name in found["stages"][0]
    assert "NaN" not in result.stdout


def test_verdict_in_the_report_is_that_of_the_summary(
    cli: Cli, server: Started, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert (
        cli(
            "run",
            server.url,
            *args_of("--workload chat-short --concurrency 2,4 --duration 2s --out"),
            run,
        ).returncode
        == 0
    )
    page = (run / "report.html").read_text()
    shown = re.search(r'id="verdict"[^>]*>(.*?)<', page, re.S)
    assert " ".join(html.unescape(shown[1]).split()) == summary(run)["verdict"]
    assert {r["stage"] for r in rows(run)} >= {0, 1}  # a disturbed stage is played twice
    assert summary(run)["stages"][1]["kind"] == "closed"


def test_a_run_file_with_a_ramp(server: Started, tmp_path: Path) -> None:
    """Sessions of two users: 0.6 s that does not count comes before the 0.8 s that does."""
    workload, config = tmp_path / "w.yaml", tmp_path / "bench.yaml"
    workload.write_text("input_tokens: 20\noutput_tokens: 4\nsessions: {turns: 2}\n")
    config.write_text(
        f"url: {server.url}\nworkload: {workload}\nconcurrency: 2\nramp: 600ms\nduration: 800ms\n"
    )
    settings = make_settings({**read_run_file(config), "out": tmp_path / "run"})
    quiet = Progress(Console(file=io.StringIO()))
    run = run_event_loop(
        conduct(
            settings,
            experiment="run",
            drive=sweep,
            command_line=["ampacity", "run"],
            progress=quiet,
        )
    )
    meta = json.loads((run / "run.json").read_text())["stages"][0]
    assert (meta["ramp_s"], meta["end_ns"] - meta["start_ns"]) == (0.6, 1_400_000_000)
    stage = summarise(load_run(run))["stages"][0]
    assert stage["window"]["start_s"] >= 0.6
    # the others end a session that had begun
    played = [row for row in rows(run) if row["scheduled_ns"] < meta["end_ns"]]
    assert stage["requests"] + stage["window"]["warmup_requests"] == len(played)


def test_ctrl_c_in_the_middle_of_a_stage(server: Started, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        "run",
        server.url,
        *args_of("--rates 20 --duration 60s --workload chat-short --slo ttft_p95=1s --out"),
        run,
    )
    wait_for_stage(run, 1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    meta = json.loads((run / "run.json").read_text())
    assert meta["status"] == "interrupted"
    found = rows(run)
    assert len(found) == meta["stages"][0]["scheduled_requests"] > 10
    assert set(Counter(r["request_id"] for r in found).values()) == {1}
    assert {r["status"] for r in found} <= {"ok", "unfinished"}
    assert "interrupted" in summary(run)["partial"]
    assert "interrupted" in (run / "report.html").read_text()
    assert out.splitlines()[-1] == str(run)


def test_report_after_a_kill(cli: Cli, server: Started, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        "run", server.url, *args_of("--rates 80 --duration 60s --workload chat-short --out"), run
    )
    wait_for_stage(run, 1.5)
    wait_until(lambda: (run / "requests.arrows").stat().st_size >= 10_000)
    process.kill()
    process.communicate(timeout=30)
    assert not (run / "requests.parquet").exists()
    result = cli("report", run)
    assert result.returncode == 0, result.stderr
    found = summary(run)
    assert found["partial"]
    recorded = found["stages"][0]["ttft_s"]
    low, high = recorded.get("p50_bounds") or [recorded["p50"], recorded["p50"]]
    assert 0.005 < low <= high < 1  # what was in flight at the kill leaves bounds, not a guess
    assert found["requests"] < 2000  # of the 4,800 in the schedule most had never been due
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("load", "limit", "most"),
    [
        (["--rates", "20,40"], ["--max-requests", "25"], 25),
        (["--concurrency", "2,4"], ["--max-requests", "25"], 25),
        (["--rates", "20,40"], ["--max-tokens", "2000"], None),
        (["--concurrency", "2"], ["--max-tokens", "2000"], None),
    ],
)
def test_budget_ends_the_run_cleanly(
    cli: Cli, server: Started, tmp_path: Path, load: list[str], limit: list[str], most: int | None
) -> None:
    run = tmp_path / "run"
    result = cli(
        "run", server.url, *load, *limit, *args_of("--duration 5s --workload chat-short --out"), run
    )
    assert result.returncode == 0, result.stderr
    found = rows(run)
    assert {r["status"] for r in found} == {"ok"}
    meta = json.loads((run / "run.json").read_text())
    assert meta["status"] == "budget"
    assert limit[1] in meta["status_reason"]
    if most is not None:
        assert len(found) == most
    else:
        planned = sum(r["input_tokens_planned"] + r["output_tokens_planned"] for r in found)
        assert 1000 < planned <= 2000


def test_a_trace_too_short_for_its_slo_is_said_to_be_before_it_is_played(
    server: Started, tmp_path: Path
) -> None:
    log, said = tmp_path / "log.csv", io.StringIO()
    log.write_text("timestamp,input_tokens,output_tokens\n0,20,4\n0.1,20,4\n")
    settings = make_settings(
        {"url": server.url, "trace": log, "slo": "ttft_p95=1s", "out": tmp_path / "run"}
    )
    progress = Progress(Console(file=said))
    how: dict[str, Any] = {"command_line": ["ampacity", "run"], "progress": progress}
    run_event_loop(conduct(settings, experiment="run", drive=Rig.trace_stage, **how))
    before = said.getvalue().partition("\nstage 0")[0]
    assert (
        "the trace is too short for ttft_p95=1s: it takes 59 requests at least to be met, and has 2"
        in before
    )


def test_the_key_is_written_nowhere(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPACITY_TEST_KEY", KEY)
    with start_in_process("demo", api_key_env="AMPACITY_TEST_KEY") as guarded:
        result = cli(
            "run",
            guarded.url,
            *args_of("--rates 10 --duration 1s --workload chat-short --out"),
            tmp_path / "run",
            *args_of("--api-key-env AMPACITY_TEST_KEY --header"),
            "X-Tenant: hush-hush-0815",
        )
    assert result.returncode == 0, result.stderr
    everything = (
        result.stdout
        + result.stderr
        + "".join(p.read_bytes().decode("latin-1") for p in (tmp_path / "run").iterdir())
    )
    assert KEY not in everything
    assert "hush-hush" not in everything
    assert "X-Tenant: ***" in everything
    assert {r["status"] for r in rows(tmp_path / "run")} == {"ok"}


def test_an_endpoint_that_dies_ends_in_a_report_with_the_errors_counted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_in_process("demo") as doomed:
        process = start(
            "run",
            doomed.url,
            *args_of("--rates 20,40 --duration 4s --workload chat-short --out"),
            run,
        )
        wait_for_stage(run, 1.5)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err  # an outage
    assert re.search("ndpoint (was )?down from", summary(run)["verdict"])
    statuses = Counter(r["status"] for r in rows(run))
    assert statuses["ok"] > 5
    assert statuses["connect_error"] > 5
    assert set(statuses) <= {"ok", "connect_error", "truncated", "reset"}
    assert summary(run)["errors"]["connect_error"] == statuses["connect_error"]
    meta = json.loads((run / "run.json").read_text())
    assert sum(s["scheduled_requests"] for s in meta["stages"]) == sum(statuses.values())


def test_what_is_said_before_somebody_elses_machine_is_loaded() -> None:
    assert is_loopback(["127.0.0.1", "::1"])
    assert not is_loopback(["127.0.0.1", "10.0.0.7"])
    settings = make_settings(
        json.loads("""{"url": "http://10.0.0.7/v1", "rates": "2,4", "duration": "10s",
            "input_tokens": 100, "output_tokens": 50, "max_requests": 30}""")
    )
    text = estimate(settings, None)
    requests = int(text.partition("about ")[2].partition(" requests")[0])
    assert requests == pytest.approx(60, abs=30)  # (2 + 4) × 10, by chance
    assert f"{150 * requests:,} tokens" in text
    assert "--max-requests 30" in text


def test_help_needs_little_time() -> None:
    """Start-up is CPU-bound: the help must not load what measures or judges."""
    heavy = {"numpy", "pyarrow", "pandas", "scipy", "aiohttp", "altair", "jinja2"}
    code = f"import sys; import ampacity.cli.app; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize(("number", "how"), [(1, signal.SIGKILL), (2, signal.SIGABRT)], ids=str)
@pytest.mark.slow
def test_a_worker_that_is_killed_makes_its_stage_no_finding(
    number: int, how: signal.Signals, server: Started, tmp_path: Path
) -> None:
    """One, or both: what they had written is kept, the stage is repeated, and the run goes on."""
    run = tmp_path / "run"
    options = args_of("--rates 20,30 --duration 3s --workload chat-short --workers 2")
    process = start("run", server.url, *options, "--out", run)
    wait_for_stage(run, 1.5)
    streams = [run / f"requests-{worker}.arrows" for worker in range(2)]
    wait_until(lambda: all(each.is_file() and each.stat().st_size > 20_000 for each in streams))
    for pid in workers_of(process)[:number]:
        os.kill(pid, how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    meta = json.loads((run / "run.json").read_text())
    assert meta["status"] == "complete"
    lost, again, *others = meta["stages"]
    assert (lost["schedule"], again["schedule"]) == (0, 0)
    assert others[-1]["offered_rps"] == 30.0
    pattern = (
        r"worker (\d) died \((\w+)\) in stage 0: (\d+) of its requests are recorded, (\d+) are lost"
    )
    told = re.findall(pattern, lost["audit"]["client_limited_reason"])
    assert [(int(worker), name) for worker, name, *_ in told] == [
        (k, how.name) for k in range(number)
    ]
    written = [r for r in rows(run) if r["stage"] == 0]
    assert lost["scheduled_requests"] == len(written)
    for worker, _, recorded, missing in told:
        of_it = [r for r in written if r["worker"] == int(worker)]
        assert int(recorded) > 0
        assert len(of_it) == int(recorded) + int(missing)
