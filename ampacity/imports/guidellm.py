"""Read guidellm's ``benchmarks.json``: benchmarks, each with its requests by how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ampacity.imports.results import Result, Stage, failure_status
from ampacity.imports.table import Column, Record, requests_of

if TYPE_CHECKING:
    import pandas as pd

TOOL = "guidellm"
_MODALITIES = "text", "image", "video", "audio"
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


_MISSING = {
    "chunk_at_us": "only the first and the last token of an answer have times in the file",
    "chunk_tokens": "tokens per chunk are not in the file",
    "output_tokens_planned": "not in the file",
    "headers_ns": "not in the file",
}
_TIMES = "info.timings."
_FIELDS = {
    "started_s": Column((f"{_TIMES}request_start", f"{_TIMES}resolve_start")),
    "scheduled_s": Column(f"{_TIMES}targeted_start"),
    "ttft_s": Column(f"{_TIMES}first_token_iteration"),
    "e2e_s": Column(f"{_TIMES}last_token_iteration"),
    "ended_s": Column(
        tuple(_TIMES + n for n in ("request_end", "resolve_end", "last_token_iteration"))
    ),
    "input_tokens": Column("input_metrics.total_tokens", "tokens"),
    "output_tokens": Column("output_metrics.total_tokens", "tokens"),
    "cached_tokens": Column("input_metrics.cached_tokens", "tokens"),
    "error": Column("info.error", "text"),
}


def recognises(document: Any) -> bool:
    if not isinstance(document, Mapping) or not isinstance(document.get("benchmarks"), list):
        return False
    return all(
        isinstance(b, Mapping) and "requests" in b and "metrics" in b
        for b in document["benchmarks"]
    )


def read(document: Mapping[str, Any], where: str) -> Result:
    """Return one stage for each benchmark that has requests. Raises ImportedFileError."""
    top = Record(document, where)
    notes: list[str] = []
    benchmarks = [
        Record(benchmark, f"{where}benchmarks[{i}].")
        for i, benchmark in enumerate(top.get("benchmarks", "objects", needed=True))
    ]
    stages = [_stage(benchmark, notes) for benchmark in benchmarks]
    kinds = {b.get("config.strategy.type_", "text") or "not known" for b in benchmarks}
    backend = "config.spec.backend." if top.has("config.spec.backend.model") else "args."  # < 0.6
    return Result(
        TOOL,
        [stage for stage in stages if stage.requests],
        _DEFINITIONS,
        _MISSING,
        version=top.get("metadata.guidellm_version", "text"),
        notes=notes,
        model=top.get(f"{backend}model", "text"),
        url=top.get(f"{backend}target", "text"),
        arrivals=", ".join(sorted(kinds)),
    )


def _stage(benchmark: Record, notes: list[str]) -> Stage:
    import pandas as pd

    kind = benchmark.get("config.strategy.type_", "text")
    is_open = kind in ("constant", "poisson", "trace")
    found = {
        n: _requests(benchmark, n, is_open)
        for n in _ENDS
        if benchmark.get(f"requests.{n}", "any") is not None
    }
    for name in ("successful", "errored"):
        total, listed = f"metrics.request_totals.{name}", len(found.get(name, ()))
        if listed < (benchmark.get(total) or 0):  # more: those of the warm-up
            benchmark.check({total: listed})
    frame = pd.concat(found.values()) if found else pd.DataFrame(columns=["started_s"])
    unsent = frame.started_s.isna()
    if unsent.any():
        notes.append(f"{unsent.sum()} requests of {kind} were never sent and are left out")
    requests = requests_of(frame[~unsent].sort_values("started_s", kind="stable"))
    parts = ("duration", "warmup_duration", "cooldown_duration")
    duration_s = sum(benchmark.get(part) or 0 for part in parts) or None
    if is_open:
        return Stage(requests, benchmark.get("config.strategy.rate") or None, None, duration_s)
    limits = (
        benchmark.get(f"config.strategy.{n}", "tokens") for n in ("streams", "max_concurrency")
    )
    users = 1 if kind == "synchronous" else next(filter(None, limits), len(requests))
    return Stage(requests, None, users, duration_s)


def _requests(benchmark: Record, end: str, is_open: bool) -> pd.DataFrame:
    """Return the fields of the requests that ended in one way; not sent: without a start."""
    import pandas as pd

    table = benchmark.rows(f"requests.{end}")
    frame = table.read(_FIELDS)
    started, due = frame.started_s, frame.scheduled_s.fillna(frame.started_s)
    for name in ("first_token_iteration", "last_token_iteration", "request_end"):
        early = table.column(_TIMES + name) < started
        table.refuse(early, _TIMES + name, "at or after the start")
    for field in ("ttft_s", "e2e_s", "ended_s"):
        frame[field] = (frame[field] - started).clip(lower=0.0)
    frame["scheduled_s"] = due.clip(upper=started) if is_open else None
    frame["slip_known"] = is_open
    for side in ("input", "output"):
        parts = [table.column(f"{side}_metrics.{k}_tokens", "tokens") for k in _MODALITIES]
        total = pd.concat(parts, axis=1).sum(axis=1, min_count=1)
        frame[f"{side}_tokens"] = frame[f"{side}_tokens"].fillna(total)
    counted = frame.output_tokens.notna()
    chunks = table.column(f"{_TIMES}token_iterations", "tokens")
    frame["output_tokens"] = frame.output_tokens.fillna(chunks)
    frame["token_source"] = counted.map({True: "usage", False: "chunks"})
    texts = frame.error.fillna("").astype(str)
    codes = texts.str.extract(r"error '([45]\d\d) ", expand=False).astype("Int64")
    frame["http_status"] = codes
    frame["status"] = _ENDS[end] or list(map(failure_status, texts, codes.fillna(0)))
    frame["error"] = texts.str[-300:].where(frame.error.notna())
    return frame
