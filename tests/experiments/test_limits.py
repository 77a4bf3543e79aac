"""Rules against illnesses: each rule finds the engine that has its illness, and no other.

The runs are predicted: a simulated engine in virtual time, whose settings make it ill. Rows of
ILLNESSES are the matrix of docs/diagnosis.md.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ampacity.analysis.contract.figures import Curve
from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.limits.table import RULES, find_limits
from ampacity.analysis.summary import summarise
from ampacity.config import make_settings
from ampacity.experiments.virtual.predict import predict
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.simulator.models.hardware import find_deployment

OVERLOAD = {"queueing", "plateau"}  # what any engine shows beyond its throughput
ILLNESSES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    # name: (engine, load, rules that hold)
    "healthy": (
        "llama3-8b-h100",
        {"input_tokens": 500, "output_tokens": 100, "rates": "2,8,16"}
        | {"slo": ["ttft_p95=500ms", "tpot_p95=50ms"]},
        set(),
    ),
    "prompts of 4,000 tokens at 12/s": (
        "llama3-8b-h100",
        {"input_tokens": 4000, "output_tokens": 20, "rates": "0.5,4,12", "slo": ["ttft_p95=500ms"]},
        OVERLOAD | {"prefill_bound"},
    ),
    "answers of 400 tokens at 80/s": (
        "llama3-8b-h100,max_num_seqs=2048",
        {"input_tokens": 50, "output_tokens": 400, "rates": "0.5,40,80", "slo": ["tpot_p95=12ms"]},
        {"decode_bound", "plateau"},
    ),
    "long prompts between short ones": (
        "llama3-8b-h100",
        {"input_tokens": "lognormal:p50=800,p99=7000", "output_tokens": 200, "rates": "0.5,4,8"}
        | {"slo": ["itl_p99=40ms", "ttft_p95=2s"]},
        {"prefill_interference"},
    ),
    "an SLO on TTFT below one prompt": (
        "llama3-8b-h100",
        {"input_tokens": 6000, "output_tokens": 50, "rates": "0.3,1", "slo": ["ttft_p95=50ms"]},
        {"slow_prefill_alone"},
    ),
    "an SLO on TPOT below one step": (
        "llama3-8b-h100",
        {"input_tokens": 500, "output_tokens": 100, "rates": "0.3,2", "slo": ["tpot_p95=5ms"]},
        {"slow_decode_alone"},
    ),
    "prefill and decoding in each other's way": (
        "llama3-8b-h100",
        {"input_tokens": 2000, "output_tokens": 200, "rates": "0.5,5,10"}
        | {"slo": ["ttft_p95=200ms", "tpot_p95=25ms"]},
        {"both_slos", "prefill_bound"},
    ),
    "a KV cache of a small card": (
        "llama3-8b-l4",
        {"input_tokens": 300, "output_tokens": 700, "rates": "0.05,0.6,1.2"}
        | {"slo": ["tpot_p95=200ms"]},
        OVERLOAD | {"kv_pressure"},
    ),
    "eight sequences at most": (
        "llama3-8b-h100,max_num_seqs=8",
        {"input_tokens": 300, "output_tokens": 200, "rates": "0.5,3,6", "slo": ["ttft_p95=500ms"]},
        OVERLOAD | {"batch_capped"},
    ),
    "drafts that are rejected": (
        "llama3-8b-h100,speculation=4:0.3:0.002",
        {"input_tokens": 300, "output_tokens": 200, "rates": "0.5,4", "slo": ["ttft_p95=500ms"]},
        {"speculation"},
    ),
    "shared prompts without a prefix cache": (
        "llama3-8b-h100",
        {"workload": "agentic", "rates": "0.05", "slo": ["ttft_p95=3s"]},
        {"prefix_cache"},
    ),
}


def summary_of(engine: str, load: dict[str, Any], folder: Path, seed: int = 1) -> Summary:
    """Predict a run and return its summary."""
    given = {"url": "http://predicted.invalid/v1", "duration": "30s", "out": str(folder)}
    settings = make_settings({**given, **load, "seed": seed})
    quiet = Progress(Console(file=io.StringIO()))
    path = asyncio.run(predict(settings, find_deployment(engine), ["ampacity"], quiet))
    return summarise(load_run(path))


def holding(limits: Sequence[Limit]) -> set[str]:
    return {limit.rule for limit in limits if limit.holds}


@pytest.mark.parametrize("illness", list(ILLNESSES))
def test_the_rules_that_hold_are_those_of_the_illness(illness: str, tmp_path: Path) -> None:
    engine, load, expected = ILLNESSES[illness]
    limits = summary_of(engine, load, tmp_path / "run").limits
    assert holding(limits) == expected
    for limit in limits:
        assert limit.lever
        assert limit.refuted_by
        assert limit.evidence or not limit.holds
        assert limit.reason or limit.holds is not None
    ranked = [limit.holds for limit in limits]
    assert ranked == sorted(ranked, key=[True, None, False].index)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    engine, load, _ = ILLNESSES["healthy"]
    return summary_of(engine, load, tmp_path_factory.mktemp("healthy") / "run")


def _with_stage(summary: Summary, number: int, **changes: Any) -> Summary:
    """Return the summary with some fields of one stage replaced."""
    stages = list(summary.stages)
    stages[number] = msgspec.structs.replace(stages[number], **changes)
    return msgspec.structs.replace(summary, stages=stages)


def test_a_slow_replica_of_eight_is_seen_in_the_curve_of_tpot(healthy: Summary) -> None:
    """One request of eight goes to a replica whose steps take 1.5 times as long."""
    stage = healthy.stages[0]
    curve = stage.curves["tpot_s"]
    slower = [
        v if v is None or q < 0.875 else 1.5 * v for q, v in zip(curve.q, curve.value, strict=True)
    ]
    ill = _with_stage(healthy, 0, curves={**stage.curves, "tpot_s": Curve(q=curve.q, value=slower)})
    (found,) = [limit for limit in find_limits(ill) if limit.holds]
    assert found.rule == "replicas"
    step, share = (e.value for e in found.evidence)
    assert step == pytest.approx(1.5, rel=0.05)
    assert share == pytest.approx(0.13, abs=0.02)


def test_a_busy_client_is_no_limit_of_the_server(healthy: Summary) -> None:
    ill = _with_stage(healthy, 1, client_limited=True, client_limited_reason="lag p99 40 ms")
    (found,) = [limit for limit in find_limits(ill) if limit.holds]
    assert found.rule == "client_limited"
    assert found.evidence[0].value == "lag p99 40 ms"


def test_what_was_not_measured_cannot_be_told(healthy: Summary) -> None:
    """Without the server's metrics three rules cannot tell; a rule that needs none answers."""
    blind = healthy
    for number in range(len(healthy.stages)):
        blind = _with_stage(blind, number, server=None)
    told = {limit.rule: limit for limit in find_limits(blind)}
    for rule in ("kv_pressure", "batch_capped", "speculation"):
        assert told[rule].holds is None
        assert "the server's own metrics were not read" in (told[rule].reason or "")
    assert told["queueing"].holds is False


def test_every_rule_is_in_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"`{rule.name}`" in text, rule.name
    for illness in ILLNESSES:
        assert f"| {illness} |" in text, illness
