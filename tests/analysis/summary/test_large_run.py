"""A run that is too large to hold is read column by column and stage by stage: the same figures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.metrics import chunks
from ampacity.analysis.metrics.requests import RecordsError
from ampacity.analysis.other_limits import capacity_at_limits
from ampacity.analysis.summary import summarise
from ampacity.analysis.timeline import timeline_of
from ampacity.loadgen.rundir import parquet
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord
from tests.support.synthetic import Stage, at_ns, make_run, queue_sweep, request

SLOS = ("ttft_p95=500ms", "itl_p99=50ms", "icl_p90=50ms", "fluidity_p90=1s+50ms", "a:tpot_p50=50ms")


def mixed(rng: np.random.Generator, first: int, start_s: float, *, freeze: bool) -> Stage:
    """A stage with what records may have: classes, retries, sessions, chunks of several tokens,
    failures, answers cut off or without a count, and a server that stands still."""
    records: list[RequestRecord] = []
    for i in range(300):
        at_s, k = start_s + 0.05 * i, int(rng.integers(1, 9))
        kind = str(
            rng.choice(["ok", "http_error", "unfinished", "cancelled"], p=[0.9, 0.04, 0.04, 0.02])
        )
        more: dict[str, Any] = {"class_": "ab"[i % 2], "status": kind}
        if kind == "http_error":
            more |= {"ttft_s": None, "http_status": 429, "error": "slow down"}
            records.append(request(first + i, at_s, attempt=1, gaps_s=[0.01] * k))
        elif i % 5 == 0:
            more["chunk_tokens"] = rng.integers(0, 4, k + 1).tolist()
        elif i % 7 == 0:
            more |= {"output_tokens": k + 1, "token_source": "chunks"}
        gaps_s = rng.lognormal(-4, 0.7, k)
        if freeze and start_s + 5 < at_s < start_s + 8:
            more["start_delay_s"] = start_s + 8 - at_s
        session = {"session_id": f"{first}-{i // 3}", "turn": i % 3}
        records.append(request(first + i, at_s, gaps_s=gaps_s, **more, **session))
    audit = {"dated_by_kernel": False, "stalls": [[0, at_ns(start_s + 2), at_ns(start_s + 2.2)]]}
    return Stage(records, 15.0, start_s=start_s, extra={"audit": audit})


def kinds(path: Path) -> None:
    rng = np.random.default_rng(3)
    make_run(path, [mixed(rng, 300 * k, 40.0 * k, freeze=k == 1) for k in range(3)], SLOS)


def swept(path: Path) -> None:
    stages = queue_sweep(np.random.default_rng(1), [5, 10, 19], 30, service_rps=20)
    stages[1].extra["lengths"] = "p99"
    make_run(path, stages, SLOS)


def findings(path: Path) -> list[Any]:
    run = load_run(path)
    summary = summarise(run, {k: k % 3 > 0 for k in range(0, 600, 2)})
    return [summary, capacity_at_limits(run, summary), timeline_of(run)]


@pytest.mark.parametrize("made", [kinds, swept])
def test_a_large_run_has_the_figures_of_a_small_one(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the tokens of a stage are too many to hold."""
    made(tmp_path / "run")
    whole = findings(tmp_path / "run")
    monkeypatch.setattr(parquet, "HELD_BYTES", 0)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 64)
    monkeypatch.setattr(parquet, "ROWS_BACK", 10)
    monkeypatch.setattr(chunks, "PART_CHUNKS", 100)
    assert isinstance(load_run(tmp_path / "run").requests, parquet.StoredRecords)
    for held_values in (600, 10**6):
        monkeypatch.setattr(parquet, "HELD_VALUES", held_values)
        assert findings(tmp_path / "run") == whole


def test_what_no_run_writes_is_found_in_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [request(k, float(k), gaps_s=[0.01] * 4) for k in range(40)]
    records[33].chunk_at_us = [5, 4]
    make_run(tmp_path / "run", [Stage(records, 40.0)])
    monkeypatch.setattr(parquet, "HELD_BYTES", 0)
    with pytest.raises(RecordsError, match=r"row 33: chunk_at_us is \[5, 4\]"):
        summarise(load_run(tmp_path / "run"))
