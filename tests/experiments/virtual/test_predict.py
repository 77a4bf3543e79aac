"""``ampacity predict``: the same sweep and the same report, in virtual time."""

import html
import json
import shlex
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ampacity.analysis.next_run import same_stages
from ampacity.experiments.virtual import playback as virtual
from ampacity.experiments.virtual import player
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.simulator.models.hardware import find_config
from benchmarks.servers.truth import true_capacity
from tests.support.args import Command, args_of
from tests.support.contract import summarise


@pytest.mark.slow
def test_finds_the_capacity_of_the_batching_server(tmp_path: Path, command: Command) -> None:
    """Step time 10 ms + 1 ms × b, 16 slots, 100 tokens: saturates at 1/(100 (0.01/16 + 0.001)) =
    6.154 requests/s."""
    run = tmp_path / "run"
    command(
        "predict --preset linear:0.01,0.001 --max-num-seqs 16 --input-tokens 10 "
        "--output-tokens 100 --slo ttft_p95=1s --duration 5m --out",
        run,
    )
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert found["predicted"] is True
    assert found["verdict"].startswith("Predicted: ")
    assert "redicted" in (run / "report.html").read_text()

    def requests_at(rate_rps: float, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1 / rate_rps, int(800 * rate_rps)))
        return arrivals, np.full(len(arrivals), 10), np.full(len(arrivals), 100)

    truth = true_capacity(
        replace(find_config("linear:0.01,0.001"), max_num_seqs=16),
        requests_at,
        [("ttft", 0.95, 1.0)],
        replications=2,
        tolerance=0.01,
    )
    capacity = found["capacity"]
    assert truth.capacity_rps < 6.154
    assert capacity["capacity_rps"] == pytest.approx(truth.capacity_rps, rel=0.08)
    low, high = capacity["capacity_rps_ci"]
    assert low <= truth.capacity_rps <= high
    past = max(found["stages"], key=lambda s: s["offered_rps"])
    # beyond saturation it serves its saturation rate
    assert past["achieved_rps"] == pytest.approx(6.154, rel=0.02)


@pytest.mark.parametrize("how", ["--duration 5s --seed 4", "--search --precision 30%"])
def test_the_loads_that_a_run_chose_are_played_again_request_by_request(
    how: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "REQUESTS_MIN", 1)
    load = "--input-tokens 10 --output-tokens lognormal:p50=100,p99=300 --slo ttft_p95=1s"
    command(
        f"predict --preset linear:0.01,0.001 --max-num-seqs 16 {load} {how} --out", tmp_path / "a"
    )
    meta = json.loads((tmp_path / "a/run.json").read_text())
    again = same_stages(meta["command_line"], meta)
    assert again
    assert again in html.unescape((tmp_path / "a/report.html").read_text())
    command(*shlex.split(again)[1:], "--out", tmp_path / "b")

    def sent(name: str) -> dict[str, Any]:
        run = load_run(tmp_path / name)
        start_ns = np.array([s["start_ns"] for s in run.meta["stages"]])
        due_ns = (
            run.requests["scheduled_ns"].to_numpy() - start_ns[run.requests["stage"].to_numpy()]
        )
        columns = ["stage", "request_id", "input_tokens_planned", "output_tokens_planned"]
        return {"due_ns": due_ns.tolist(), **run.requests.select(columns).to_pydict()}

    assert len(meta["stages"]) > 4
    assert sent("a") == sent("b")


def test_token_times_are_whole_steps(tmp_path: Path, command: Command) -> None:
    run = tmp_path / "run"
    command(
        "predict --preset linear:0.02,0 --input-tokens 10 --output-tokens 5 --rates 1 "
        "--max-requests 50 --out",
        run,
    )
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    assert len(rows) == 50
    for row in rows:
        assert row["output_tokens"] == len(row["chunk_at_us"]) == 5
        gaps = np.diff(row["chunk_at_us"])
        assert np.all(np.abs(gaps - 20_000) <= 1)  # every step takes 20 ms, whatever the batch
    assert json.loads((run / "run.json").read_text())["status"] == "budget"


def test_closed_loop_is_the_closed_form(tmp_path: Path, command: Command) -> None:
    """C users without think time, C ≤ slots: X = C / (m (α + β C)) exactly (fixed lengths)."""
    run = tmp_path / "run"
    command(
        "predict --preset linear:0.01,0.001 --max-num-seqs 16 --input-tokens 10 "
        "--output-tokens 100 --concurrency 1,4,16 --duration 2m --warmup 0 --out",
        run,
    )
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    for stage, users in zip(found["stages"], (1, 4, 16), strict=True):
        assert stage["concurrency_set"] == users
        expected = pytest.approx(users / (100 * (0.01 + 0.001 * users)), rel=0.02)
        assert stage["achieved_rps"] == expected
        assert stage["tpot_s"]["p50"] == pytest.approx(0.01 + 0.001 * users, rel=0.01)


def test_a_ramp_comes_before_the_duration_and_does_not_count(
    tmp_path: Path, command: Command
) -> None:
    """Five steps of 20 ms a request and 0.4 s of thought: 2 requests/s and user. Four begin at 0,
    2.5, 5 and 7.5 s."""
    run = tmp_path / "run"
    command(
        "predict --preset linear:0.02,0 --max-num-seqs 16 --input-tokens 10 "
        "--output-tokens 5 --concurrency 4 --think-time 400ms --ramp 10s --duration 20s "
        "--out",
        run,
    )
    told = json.loads((run / "run.json").read_text())
    assert told["locked"]["think_s"] == 0.4
    meta = told["stages"][0]
    assert (meta["ramp_s"], meta["end_ns"] - meta["start_ns"]) == (10.0, 30_000_000_000)
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    begun_s = np.array([row["scheduled_ns"] - meta["start_ns"] for row in rows]) / 1e9
    counts = np.histogram(begun_s, [0, 2.5, 5, 7.5, 10, 30])[0].tolist()
    assert counts == pytest.approx([5, 10, 15, 20, 160], abs=4)  # one more or less of each user
    stage = json.loads((run / "summary.json").read_text())["stages"][0]
    assert stage["window"]["start_s"] == pytest.approx(10.0, abs=0.5)
    assert stage["requests"] == pytest.approx(160, abs=4)
    assert stage["window"]["warmup_requests"] == pytest.approx(50, abs=4)
    assert stage["achieved_rps"] == pytest.approx(8.0, rel=0.02)
    assert (stage["concurrency_set"], stage["concurrency"]) == (4, pytest.approx(0.8, rel=0.02))


# -- a run that is stopped ------------------------------------------------------------------

FIXED = args_of(
    "--preset linear:0.02,0 --input-tokens 10 --output-tokens 5 --slo itl_p99=50ms --duration 2m"
)
"""Five steps of 20 ms, whatever the batch."""


def stopped(
    monkeypatch: pytest.MonkeyPatch, run: Path, by: Callable[..., object], *how_: object
) -> None:
    """Let ``by`` happen while the engine plays the second stage."""
    play = virtual.play

    def playing(*given: Any, **how: Any) -> Any:
        if json.loads((run / "run.json").read_text())["stages"]:
            by(*how_)
        return play(*given, **how)

    monkeypatch.setattr("ampacity.experiments.virtual.player.play", playing)


@pytest.mark.parametrize(
    ("load", "named", "number", "name"),
    [
        (("--rates", "2,3,4"), "2 req/s", signal.SIGINT, "Ctrl-C"),
        (("--concurrency", "2,3,4"), "2 users", signal.SIGTERM, "SIGTERM"),
        (tuple(args_of("--lengths p50,p90 --rates 2")), "2 req/s", signal.SIGHUP, "SIGHUP"),
    ],
)
def test_a_signal_leaves_the_stages_that_were_finished(
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    load: tuple[str, ...],
    named: str,
    number: int,
    name: str,
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # these tests run under nohup
        signal.signal(number, signal.SIG_DFL)
    run, before = tmp_path / "run", signal.getsignal(number)
    stopped(monkeypatch, run, signal.raise_signal, number)
    command("predict", *FIXED, *load, "--out", run, status=130)
    assert signal.getsignal(number) is before
    meta, found = (json.loads((run / file).read_text()) for file in ("run.json", "summary.json"))
    assert (meta["status"], meta["status_reason"]) == ("interrupted", f"interrupted by {name}")
    assert [s["drained_ns"] is not None for s in meta["stages"]] == [True]
    assert found["partial"] == f"interrupted after stage 0 ({named}) by {name}"
    assert len(found["stages"]) == 1
    assert found["stages"][0]["slo_met"] is True
    assert found["requests"] == meta["stages"][0]["scheduled_requests"]
    assert found["partial"] in found["verdict"]


def test_a_stopped_search_says_what_it_lacks(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    stopped(monkeypatch, run, signal.raise_signal, signal.SIGTERM)
    command("predict", *FIXED, "--search --out", run, status=130)
    found = json.loads((run / "summary.json").read_text())
    assert [step["stage"] for step in found["search"]["path"]] == [0]
    assert "interrupted after stage 0" in found["verdict"]
    assert "was not reached" in found["verdict"]
    assert found["search"]["reason"] == "interrupted by SIGTERM"


def test_a_kill_leaves_the_stages_that_were_finished_as_they_were(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at once in the second stage; the first is judged as in a run that has no other."""
    whole, run = tmp_path / "whole", tmp_path / "killed"
    command("predict", *FIXED, "--rates 2 --out", whole)

    def interrupt() -> None:
        raise KeyboardInterrupt

    stopped(monkeypatch, run, interrupt)
    command("predict", *FIXED, "--rates 2,3 --out", run, status=130)
    loaded = load_run(run)
    assert not loaded.complete
    assert loaded.meta["status"] == "running"
    found = json.loads(json.dumps(summarise(loaded)))
    assert found["partial"] == "killed after stage 0 (2 req/s): only what had been recorded is here"
    (stage,) = json.loads((whole / "summary.json").read_text())["stages"]
    stage["server"] = stage["littles_law"]["server"] = None  # kept until the end of a run only
    assert found["stages"] == [stage]


def test_a_stage_that_takes_long_says_that_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampacity.progress.AT_WORK_EVERY_S", 0.001)
    said, twice = [], threading.Event()

    class AnswerContent(Progress):
        def note(self, text: str) -> None:
            said.append(text)
            if len(said) == 2:
                twice.set()

    with AnswerContent(Console(quiet=True)).at_work("stage 3"):
        assert twice.wait(10)
    assert said[0] == "stage 3: at work for 0 s"


def test_unknown_preset_is_one_line(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command("predict --preset abacus", status=2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "abacus" in err


def test_predictions_have_ids_of_their_own_and_the_same_one_twice_is_no_evidence_of_noise(
    tmp_path: Path, command: Command, capsys: Any
) -> None:
    """Two that begin in the same second are two runs; of one seed they are equal to the last
    digit."""
    ids = []
    for name, seed in (("a", 1), ("again", 1), ("other", 2)):
        words = tuple(
            args_of("--preset linear:0.02,0 --input-tokens 10 --output-tokens 5 --rates 2")
        )
        command("predict", *words, "--max-requests 300 --seed", seed, "--out", tmp_path / name)
        ids.append(json.loads((tmp_path / name / "run.json").read_text())["run_id"])
    assert len(set(ids)) == 3
    capsys.readouterr()
    command("baseline", tmp_path / "a", tmp_path / "again", "-o", tmp_path / "b.json", status=2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "they are one run and show no noise from run to run; give each its own --seed" in err
    command("baseline", tmp_path / "a", tmp_path / "other", "-o", tmp_path / "b.json")
