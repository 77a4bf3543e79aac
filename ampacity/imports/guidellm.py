"""Read guidellm's ``benchmarks.json``: benchmarks, each with its requests by how they ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampacity.imports.results import Fields, Request, Result, Stage, agree, failure_status

TOOL = "guidellm"
_ENDS = {"successful": "ok", "incomplete": "unfinished", "errored": ""}
_DEFINITIONS = [
    (
        "ITL",
        "one mean per request: (last token - first token) / (output tokens - 1)",
        "that is TPOT here; ITL is per token, over all gaps",
    ),
    (
        "TPOT",
        "(last token - start) / output tokens: the first token's wait is inside",
        "without the first token",
    ),
    ("Clock", "wall clock (time.time): a step of it shifts latencies", "monotonic clock"),
    (
        "Unfinished requests",
        "kept apart as incomplete, in no percentile",
        "slower than the age at which they were cut off",
    ),
]


def recognises(document: Any) -> bool:
    if not isinstance(document, Mapping) or not isinstance(document.get("benchmarks"), list):
        return False
    return all(
        isinstance(b, Mapping) and "requests" in b and "metrics" in b
        for b in document["benchmarks"]
    )


def read(document: Mapping[str, Any], where: str) -> Result:
    """Return one stage for each benchmark that has requests. Raises ImportedFileError."""
    top = Fields(document, where)
    notes: list[str] = []
    benchmarks = top.objects("benchmarks")
    strategies = [b.object("config").object("strategy") for b in benchmarks]
    stages = [_stage(b, s, notes) for b, s in zip(benchmarks, strategies, strict=True)]
    backend = top.object("config").object("spec").object("backend")
    if not backend.held:  # before 0.6
        backend = top.object("args")
    return Result(
        TOOL,
        [stage for stage in stages if stage.requests],
        _DEFINITIONS,
        _MISSING,
        version=top.object("metadata").text("guidellm_version"),
        notes=notes,
        model=backend.text("model"),
        url=backend.text("target"),
        arrivals=", ".join(sorted({s.text("type_") or "not known" for s in strategies})),
    )


_MISSING = {
    "chunk_at_us": "only the first and the last token of an answer have times in the file",
    "chunk_tokens": "tokens per chunk are not in the file",
    "output_tokens_planned": "not in the file",
    "headers_ns": "not in the file",
}


def _stage(benchmark: Fields, strategy: Fields, notes: list[str]) -> Stage:
    kind = strategy.text("type_")
    listed = benchmark.object("requests")
    rows = [
        (status, row)
        for name, status in _ENDS.items()
        if isinstance(listed.held.get(name), list)
        for row in listed.objects(name)
    ]
    totals = benchmark.object("metrics").object("request_totals")
    for name, status in (("successful", "ok"), ("errored", "")):
        count = sum(of == status for of, _ in rows)
        if count < (totals.number(name) or 0):  # more: those of the warm-up
            agree(totals, **{name: count})
    is_open = kind in ("constant", "poisson", "trace")
    found = [r for r in (_request(status, row, is_open) for status, row in rows) if r is not None]
    if len(found) < len(rows):
        notes.append(
            f"{len(rows) - len(found)} requests of {kind} were never sent and are left out"
        )
    found.sort(key=lambda r: r.started_s)
    parts = ("duration", "warmup_duration", "cooldown_duration")
    duration_s = sum(benchmark.number(part) or 0 for part in parts) or None
    if is_open:
        return Stage(found, strategy.number("rate") or None, None, duration_s)
    streams = strategy.tokens("streams") or strategy.tokens("max_concurrency")
    users = 1 if kind == "synchronous" else streams or len(found)
    return Stage(found, None, users, duration_s)


def _request(status: str, row: Fields, arrives: bool) -> Request | None:
    """Return the request, or None where it was never sent."""
    info = row.object("info")
    t = info.object("timings")
    started = t.number("request_start") or t.number("resolve_start")
    if started is None:
        return None
    first, answer_end = t.number("first_token_iteration"), t.number("last_token_iteration")
    ended = t.number("request_end") or t.number("resolve_end") or answer_end
    for name in ("first_token_iteration", "last_token_iteration", "request_end"):
        at = t.number(name)
        if at is not None and at < started:
            raise t.error(name, "at or after the start")
    error = info.text("error")
    code = re.search(r"error '([45]\d\d) ", error or "")
    http_status = int(code[1]) if code else None
    output = row.object("output_metrics")
    tokens = _total(output)
    return Request(
        started,
        status or failure_status(error or "", http_status),
        min(t.number("targeted_start") or started, started) if arrives else None,
        slip_known=arrives,
        ttft_s=None if first is None else first - started,
        e2e_s=None if answer_end is None else answer_end - started,
        ended_s=None if ended is None else max(0.0, ended - started),
        input_tokens=_total(row.object("input_metrics")),
        output_tokens=t.tokens("token_iterations") if tokens is None else tokens,
        cached_tokens=row.object("input_metrics").tokens("cached_tokens"),
        http_status=http_status,
        token_source="chunks" if tokens is None else "usage",
        error=error and error[-300:],
    )


def _total(metrics: Fields) -> int | None:
    total = metrics.tokens("total_tokens")
    if total is not None:
        return total
    found = [metrics.tokens(f"{kind}_tokens") for kind in ("text", "image", "video", "audio")]
    known = [n for n in found if n is not None]
    return sum(known) if known else None
