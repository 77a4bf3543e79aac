"""Read ``sglang.bench_serving --output-file F --output-details``: parallel lists, one object a run.

Runs that append to the same file are the stages of one import. The file has no start times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampacity.imports.results import (
    FAILURE_ENDS,
    ImportedFileError,
    Result,
    Stage,
    failure_status,
    layout_note,
    starts_of_users,
)
from ampacity.imports.table import Record, read_lists, requests_of

if TYPE_CHECKING:
    import pandas as pd

TOOL = "SGLang bench_serving"
_OWN = {"backend", "duration", "completed", "total_output_tokens_retokenized"}
_DEFINITIONS = [
    (
        "ITL",
        "gap between messages with text; "
        "of its own API, a message's gap shared equally among its tokens",
        "per token; raw gaps are ICL",
    ),
    (
        "TPOT",
        "(end of the response - TTFT) / (output tokens - 1): the end includes usage and [DONE]",
        "to the last token",
    ),
    ("E2E", "to the end of the response", "to the last token"),
]
_MISSING = {
    "scheduled_ns": "no times in the file, only durations: laid out in the order of the file",
    "dispatched_ns": "the schedule is not in the file: how late the client was cannot be told",
    "chunk_tokens": "tokens per message are not in the file",
    "output_tokens_planned": "not in the file",
    "headers_ns": "not in the file",
    "last_token_ns": "first token and the gaps after it, added up",
    "token_source": "the server's usage, or the length asked for where it sent none: "
    "the file does not say which",
}
_NOT_STREAMED = {
    "first_token_ns": "the answers were not streamed: what the file calls TTFT is the whole answer"
}
_EACH_MS = "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms"


def recognises(document: Any) -> bool:
    runs = document if isinstance(document, list) else [document]
    return bool(runs) and all(isinstance(run, Mapping) and run.keys() >= _OWN for run in runs)


def read(document: Mapping[str, Any] | list[Mapping[str, Any]], where: str) -> Result:
    """Return one stage for each run with details. Raises ImportedFileError."""
    held = document if isinstance(document, list) else [document]
    runs = [
        Record(run, where if len(held) == 1 else f"{where}run {i}: ")
        for i, run in enumerate(held, 1)
    ]
    detailed = [run for run in runs if run.has("ttfts")]
    if not detailed:
        figures = "; ".join(_figures(run) for run in runs[:3])
        raise ImportedFileError(
            f"{where}no single requests are in this result of {TOOL} ({figures}): "
            "run it again with --output-details"
        )
    notes = []
    if len(detailed) < len(runs):
        notes.append(
            f"{len(runs) - len(detailed)} of {len(runs)} runs in the file have no single requests "
            "(no --output-details) and are left out"
        )
    stages = [_stage(run, notes) for run in detailed]
    first = detailed[0]
    backend = first.get("backend", "text") or ""
    streamed = any(r.ttft_s is not None for stage in stages for r in stage.requests)
    return Result(
        TOOL,
        stages,
        _DEFINITIONS,
        _MISSING | ({} if streamed else _NOT_STREAMED),
        version=first.get("server_info.version", "text"),
        model=first.get("server_info.served_model_name", "text")
        or first.get("server_info.model_path", "text"),
        workload=first.get("dataset_name", "text"),
        api="chat" if backend.endswith("chat") else "completions",
        notes=list(dict.fromkeys(notes)),
        arrivals=", ".join(dict.fromkeys(map(_arrivals, detailed))),
    )


def _figures(run: Record) -> str:
    """Return the totals of a run without details, for a user who has nothing else."""
    found = [f"{run.get('completed', 'tokens') or 0} requests in {run.get('duration') or 0:.4g} s"]
    found += [f"{name} {value:.4g}" for name in _EACH_MS if (value := run.get(name)) is not None]
    return ", ".join(found)


def _arrivals(run: Record) -> str:
    if run.get("request_rate", "any") == "trace":
        return "trace"
    return "closed loop" if run.request_rate() is None else "poisson"


def _stage(run: Record, notes: list[str]) -> Stage:
    _, frame = read_lists(run)
    n = len(frame)
    if not n:
        raise ImportedFileError(f"{run.where}there is no request in it")
    frame["status"] = _statuses(run, frame)
    ok, counted = frame.status == "ok", frame.status.isin(("ok", "empty"))
    _check_totals(run, frame[counted])
    streamed = frame.gaps_s[ok].astype(bool).any() or (frame.output_tokens[ok].fillna(0) <= 1).all()
    if not streamed:
        notes.append("The answers were not streamed: TTFT, ITL and TPOT are not known, E2E is")
    if not counted.all():
        notes.append(FAILURE_ENDS)
    rate, limit = run.request_rate(), run.get("max_concurrency", "tokens") or None
    duration = run.get("duration")
    closed = rate is None and run.get("request_rate", "any") != "trace"
    users = limit or n
    e2es = list(frame.e2e_s)
    frame["started_s"] = starts_of_users(e2es, users) if closed else _evenly(e2es, duration or 0.0)
    frame["ended_s"] = frame.e2e_s.where(ok, 0.0)
    frame["error"] = frame.error.str[-300:]
    frame.loc[~ok, ["ttft_s", "e2e_s", "output_tokens"]] = None
    if not streamed:
        frame[["ttft_s", "gaps_s"]] = None
    how = f"over {users} users who never pause" if closed else "at equal distances"
    if limit and not closed:
        how += f"; held to {limit} in flight, and how long a request waited is not in the file"
    rps = run.get("request_throughput") or (run.get("completed") or 0) / (duration or math.inf)
    notes.append(layout_note(TOOL, how, rps, duration))
    return Stage(requests_of(frame), None if closed else rate, users if closed else None, duration)


def _statuses(run: Record, frame: pd.DataFrame) -> list[str]:
    # an answer without a token: successful by the run's own count, or failed without a message
    is_success = run.get("completed", "tokens") == frame.error.isna().sum()
    silent = "empty" if is_success else "http_error"
    return [
        failure_status(error) if isinstance(error, str) else "ok" if ttft or gaps else silent
        for error, ttft, gaps in zip(frame.error, frame.ttft_s, frame.gaps_s, strict=True)
    ]


def _check_totals(run: Record, counted: pd.DataFrame) -> None:
    lasts_s, longest_s = run.get("duration"), counted.e2e_s.max()
    if lasts_s is not None and longest_s > lasts_s * (1 + 1e-6):
        raise ImportedFileError(
            f"{run.where}duration is {lasts_s:.6g} s, but a request took {longest_s:.6g} s: "
            "the file contradicts itself"
        )
    gaps = counted.gaps_s.explode().dropna()
    run.check(
        {
            "completed": len(counted),
            "total_output_tokens": counted.output_tokens.sum(),
            "mean_ttft_ms": 1e3 * counted.ttft_s.mean() if len(counted) else 0.0,
        }
    )
    if not run.get("accept_length"):  # with speculation its own ITL is by its tokenizer
        run.check({"mean_itl_ms": 1e3 * gaps.mean() if len(gaps) else 0.0})


def _evenly(e2es: Sequence[float], duration_s: float) -> list[float]:
    """Return starts at equal distances; the last answer ends with the run."""
    last = max(duration_s - e2es[-1], 0.0)
    return [last * i / max(len(e2es) - 1, 1) for i in range(len(e2es))]
