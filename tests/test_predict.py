"""``ampacity predict``: the same sweep and the same report, in virtual time."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ampacity.cli import main
from simulator.hardware import find_config
from simulator.truth import true_capacity


def predict(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> object:
    monkeypatch.setattr(sys, "argv", ["ampacity", "predict", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_finds_the_capacity_of_the_batching_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step time 10 ms + 1 ms × b, 16 slots, 100 tokens: saturates at 1/(100 (0.01/16 + 0.001)) = 6.154 requests/s."""
    run = tmp_path / "run"
    code = predict(
        monkeypatch, "--preset", "linear:0.01,0.001", "--max-num-seqs", "16", "--input-tokens", "10", "--output-tokens", "100",
        "--slo", "ttft_p95=1s", "--duration", "10m", "--out", run,
    )  # fmt: skip
    assert code == 0
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert found["predicted"] is True
    assert found["verdict"].startswith("Predicted: ")
    assert "redicted" in (run / "report.html").read_text()

    def requests_at(rate_rps: float, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1 / rate_rps, int(2000 * rate_rps)))
        return arrivals, np.full(len(arrivals), 10), np.full(len(arrivals), 100)

    truth = true_capacity(
        replace(find_config("linear:0.01,0.001"), max_num_seqs=16), requests_at, [("ttft", 0.95, 1.0)]
    )
    capacity = found["capacity"]
    assert truth.usable_rps < 6.154
    assert capacity["usable_rps"] == pytest.approx(truth.usable_rps, rel=0.08)
    low, high = capacity["usable_rps_ci"]
    assert low <= truth.usable_rps <= high
    past = max(found["stages"], key=lambda s: s["offered_rps"])
    assert past["achieved_rps"] == pytest.approx(
        6.154, rel=0.02
    )  # beyond saturation it serves its saturation rate


def test_token_times_are_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert predict(
        monkeypatch, "--preset", "linear:0.02,0", "--input-tokens", "10", "--output-tokens", "5", "--rates", "1",
        "--max-requests", "50", "--out", run,
    ) == 0  # fmt: skip
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    assert len(rows) == 50
    for row in rows:
        assert row["output_tokens"] == len(row["chunk_at_us"]) == 5
        gaps = np.diff(row["chunk_at_us"])
        assert np.all(np.abs(gaps - 20_000) <= 1)  # every step takes 20 ms, whatever the batch
    assert json.loads((run / "run.json").read_text())["status"] == "budget"


def test_closed_loop_is_the_closed_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C users without think time, C ≤ slots: X = C / (m (α + β C)) exactly (fixed lengths)."""
    run = tmp_path / "run"
    assert predict(
        monkeypatch, "--preset", "linear:0.01,0.001", "--max-num-seqs", "16", "--input-tokens", "10", "--output-tokens", "100",
        "--concurrency", "1,4,16", "--duration", "2m", "--warmup", "0", "--out", run,
    ) == 0  # fmt: skip
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    for stage, users in zip(found["stages"], (1, 4, 16), strict=True):
        assert stage["concurrency_set"] == users
        assert stage["achieved_rps"] == pytest.approx(users / (100 * (0.01 + 0.001 * users)), rel=0.02)
        assert stage["tpot_s"]["p50"] == pytest.approx(0.01 + 0.001 * users, rel=0.01)


def test_a_ramp_comes_before_the_duration_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps of 20 ms a request and 0.4 s of thought: 2 requests/s and user. Four begin at 0, 2.5, 5 and 7.5 s."""
    run = tmp_path / "run"
    assert predict(
        monkeypatch, "--preset", "linear:0.02,0", "--max-num-seqs", "16", "--input-tokens", "10", "--output-tokens", "5",
        "--concurrency", "4", "--think-time", "400ms", "--ramp", "10s", "--duration", "20s", "--out", run,
    ) == 0  # fmt: skip
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


def test_unknown_preset_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(monkeypatch, "--preset", "abacus") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "abacus" in err
