"""Read ``sglang.bench_serving --output-file F --output-details``: parallel lists, one object a run.

Runs that append to the same file are the stages of one import. The file has no start times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.imports.results import (
    FAILURE_ENDS,
    Fields,
    ImportedFileError,
    Lists,
    Request,
    Result,
    Stage,
    agree,
    failure_status,
    layout_note,
    mean,
    read_lists,
    starts_of_users,
)

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
        Fields(run, where if len(held) == 1 else f"{where}run {i}: ")
        for i, run in enumerate(held, 1)
    ]
    detailed = [run for run in runs if "ttfts" in run.held]
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
    backend, server = first.text("backend") or "", first.object("server_info")
    streamed = any(r.ttft_s is not None for stage in stages for r in stage.requests)
    return Result(
        TOOL,
        stages,
        _DEFINITIONS,
        _MISSING | ({} if streamed else _NOT_STREAMED),
        version=server.text("version"),
        model=server.text("served_model_name") or server.text("model_path"),
        workload=first.text("dataset_name"),
        api="chat" if backend.endswith("chat") else "completions",
        notes=list(dict.fromkeys(notes)),
        arrivals=", ".join(dict.fromkeys(map(_arrivals, detailed))),
    )


def _figures(run: Fields) -> str:
    """Return the totals of a run without details, for a user who has nothing else."""
    found = [f"{run.tokens('completed') or 0} requests in {run.number('duration') or 0:.4g} s"]
    found += [f"{name} {value:.4g}" for name in _EACH_MS if (value := run.number(name)) is not None]
    return ", ".join(found)


def _arrivals(run: Fields) -> str:
    if run.held.get("request_rate") == "trace":
        return "trace"
    return "closed loop" if run.request_rate() is None else "poisson"


def _stage(run: Fields, notes: list[str]) -> Stage:
    lists = read_lists(run)
    n = len(lists.ttfts)
    if not n:
        raise ImportedFileError(f"{run.where}there is no request in it")
    status = _statuses(run, lists)
    done = [i for i in range(n) if status[i] == "ok"]
    counted = [i for i in range(n) if status[i] in ("ok", "empty")]
    _check_totals(run, lists, counted)
    has_one_token = all((lists.rows[i].tokens("output") or 0) <= 1 for i in done)
    streamed = any(lists.gaps[i] for i in done) or has_one_token
    if not streamed:
        notes.append("The answers were not streamed: TTFT, ITL and TPOT are not known, E2E is")
    if len(counted) < n:
        notes.append(FAILURE_ENDS)
    e2es = [ttft + math.fsum(gaps) for ttft, gaps in zip(lists.ttfts, lists.gaps, strict=True)]
    rate, limit = run.request_rate(), run.tokens("max_concurrency") or None
    duration = run.number("duration")
    closed = rate is None and run.held.get("request_rate") != "trace"
    users = limit or n
    starts = starts_of_users(e2es, users) if closed else _evenly(e2es, duration or 0.0)
    requests = [
        _request(lists, i, status[i], starts[i], e2es[i], streamed=streamed) for i in range(n)
    ]
    how = f"over {users} users who never pause" if closed else "at equal distances"
    if limit and not closed:
        how += f"; held to {limit} in flight, and how long a request waited is not in the file"
    rps = (run.number("completed") or 0) / (duration or math.inf)
    notes.append(layout_note(TOOL, how, run.number("request_throughput") or rps, duration))
    return Stage(requests, None if closed else rate, users if closed else None, duration)


def _statuses(run: Fields, lists: Lists) -> list[str]:
    errors = lists.errors
    # an answer without a token: successful by the run's own count, or failed without a message
    is_success = run.tokens("completed") == len(errors) - sum(map(bool, errors))
    silent = "empty" if is_success else "http_error"
    return [
        failure_status(str(error)) if error else "ok" if ttft or gaps else silent
        for error, ttft, gaps in zip(errors, lists.ttfts, lists.gaps, strict=True)
    ]


def _check_totals(run: Fields, lists: Lists, counted: Sequence[int]) -> None:
    agree(
        run,
        completed=len(counted),
        total_output_tokens=sum(lists.rows[i].tokens("output") or 0 for i in counted),
        mean_ttft_ms=1e3 * mean([lists.ttfts[i] for i in counted]) if counted else 0.0,
    )
    if not run.number("accept_length"):  # with speculation its own ITL is by its tokenizer
        gaps = [g for i in counted for g in lists.gaps[i]]
        agree(run, mean_itl_ms=1e3 * mean(gaps or [0.0]))


def _request(
    lists: Lists, i: int, status: str, start: float, e2e: float, *, streamed: bool
) -> Request:
    row, error, ok = lists.rows[i], lists.errors[i], status == "ok"
    return Request(
        start,
        status,
        ttft_s=lists.ttfts[i] if ok and streamed else None,
        e2e_s=e2e if ok else None,
        ended_s=e2e if ok else 0.0,
        gaps_s=lists.gaps[i] if streamed else None,
        input_tokens=row.tokens("input"),
        output_tokens=row.tokens("output") if ok else None,
        cached_tokens=row.tokens("cached"),
        error=str(error)[-300:] if error else None,
    )


def _evenly(e2es: Sequence[float], duration_s: float) -> list[float]:
    """Return starts at equal distances; the last answer ends with the run."""
    last = max(duration_s - e2es[-1], 0.0)
    return [last * i / max(len(e2es) - 1, 1) for i in range(len(e2es))]
