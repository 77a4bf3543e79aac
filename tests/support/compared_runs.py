"""Runs made up for the tests of a comparison, and its rows and quantiles by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampacity.analysis.change.judged import prepare
from ampacity.analysis.change.results import Comparison, Line, QuantileChange
from ampacity.analysis.compare.pairs import ComparedRun
from tests.support.synthetic import Stage, make_run, request

RATE = 20.0
Floats = np.ndarray[Any, np.dtype[np.float64]]


def ttfts(seed: int, n: int = 1000, scale: float = 1.0) -> Floats:
    return scale * np.random.default_rng(seed).lognormal(np.log(0.1), 0.3, n)


def stage(
    values: Sequence[float] | Floats,
    rate: float = RATE,
    *,
    gap_s: float = 0.01,
    failed: Sequence[int] = (),
    status: str = "http_error",
    **options: Any,
) -> Stage:
    """Evenly spaced requests with these TTFTs, five tokens each; the ``failed`` ones fail."""
    records = [
        request(i, i / rate, ttft_s=None, status=status, output_tokens_planned=5)
        if i in failed
        else request(i, i / rate, ttft_s=float(t), gaps_s=[gap_s] * 4)
        for i, t in enumerate(values)
    ]
    return Stage(records, len(values) / rate, offered_rps=rate, **options)


def arm(
    path: Path,
    stages: Stage | list[Stage],
    slos: Sequence[str] = (),
    *,
    gpus: int = 1,
    usd: float | None = None,
    **meta: Any,
) -> ComparedRun:
    made = make_run(
        path,
        stages if isinstance(stages, list) else [stages],
        slos,
        **({"run_id": path.name} | meta),
    )
    return ComparedRun(path.name.upper(), prepare(made, limited_too=True), gpus, usd)


def rows(result: Comparison) -> dict[str, Line]:
    return {r.name: r for r in result.scorecard}


def quantiles(result: Comparison, metric: str) -> dict[float, QuantileChange]:
    table = next(s for s in result.shift if s.metric == metric)
    return {q.q: q for q in table.quantiles}


def later(made: Stage, start_s: float, first_id: int) -> Stage:
    """The stage at another time of its run."""
    made.start_s = start_s
    for r in made.records:
        r.request_id += first_id
        for field in (
            "scheduled_ns dispatched_ns connected_ns started_ns sent_ns first_token_ns "
            "first_answer_ns last_token_ns ended_ns"
        ).split():
            setattr(r, field, getattr(r, field) + round(start_s * 1e9))
    return made
