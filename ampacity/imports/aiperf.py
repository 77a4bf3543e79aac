"""Read aiperf's ``profile_export.jsonl``, one object a request, and the settings file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ampacity.imports.results import ImportedFileError, Result, Stage, failure_status
from ampacity.imports.table import Column, Record, Table, requests_of

if TYPE_CHECKING:
    import pandas as pd

TOOL = "aiperf"
SETTINGS_NAME = "profile_export_aiperf.json"
_PARTS = "metadata", "metrics"
_DEFINITIONS = [
    (
        "ITL",
        "one mean per request: (latency - TTFT) / (output tokens - tokens of the first chunk)",
        "that is TPOT here; ITL is per token, over all gaps",
    ),
    (
        "Output tokens",
        "counted by the client's tokenizer unless configured otherwise",
        "the server's usage where the file has it, as here",
    ),
]


_MISSING = {
    "dispatched_ns": "the schedule is not in the file, only when a request was let go: "
    "how late the client was cannot be told",
    "chunk_tokens": "tokens per chunk are not in the file",
    "output_tokens_planned": "not in the file",
}


def _metric(name: str, kind: str = "number") -> Column:
    return Column(f"metrics.{name}.value", kind, f"metrics.{name}.unit")


def _tokens(*names: str) -> Column:
    return Column(tuple(f"metrics.{name}.value" for name in names), "tokens")


_FIELDS = {
    "ttft_s": _metric("time_to_first_token"),
    "e2e_s": _metric("request_latency"),
    "gaps_s": _metric("inter_chunk_latency", "durations"),
    "input_tokens": _tokens("usage_prompt_tokens", "input_sequence_length"),
    "output_tokens": _tokens("usage_completion_tokens", "output_sequence_length"),
    "reasoning_tokens": _tokens("reasoning_token_count"),
    "http_status": Column("error.code", "tokens"),
    "error": Column("error.message", "text"),
}


def recognises(records: Any) -> bool:
    if not isinstance(records, list) or not records:
        return False
    parts = [r.get(k) if isinstance(r, Mapping) else r for r in records[:5] for k in _PARTS]
    if not all(isinstance(part, Mapping) for part in parts):
        return False
    return "request_start_ns" in records[0]["metadata"]


def read(
    records: Sequence[Mapping[str, Any]], where: str, settings: Mapping[str, Any] | None
) -> Result:
    """Return one stage; ``settings``: the summary file, if any. Raises ImportedFileError."""
    table = Table(records, where, "record {}: ", first=1)
    warm = table.column("metadata.benchmark_phase", "any") == "warmup"
    table.frame = table.frame[~warm]
    if table.frame.empty:
        raise ImportedFileError(f"{where}only warm-up requests are in it")
    requests = requests_of(_requests(table))
    reported = Record(settings or {}, SETTINGS_NAME + ": ")
    reported.check({"request_latency.count": sum(r.status == "ok" for r in requests)})
    rate, concurrency, facts = _load(reported)
    notes = []
    if not settings:
        notes.append(f"{SETTINGS_NAME} is not beside the file: the load asked for is not known")
    if warm.any():
        notes.append(f"{warm.sum()} warm-up requests are left out")
    missing = dict(_MISSING)
    if all(r.gaps_s is None for r in requests):
        missing["chunk_at_us"] = "times of chunks are not in the file"
    closed = concurrency if rate is None else None
    if closed:
        facts["arrivals"] = "closed loop"
    return Result(
        TOOL, [Stage(requests, rate, closed)], _DEFINITIONS, missing, notes=notes, **facts
    )


def _requests(table: Table) -> pd.DataFrame:
    """Return the fields of requests; times count from the first start."""
    starts = table.column("metadata.request_start_ns", "ns", needed=True)
    ends = table.column("metadata.request_end_ns", "ns", needed=True)
    issued = table.column("metadata.credit_issued_ns", "ns")
    table.refuse(ends < starts, "metadata.request_end_ns", "at or after request_start_ns")
    frame = table.read(_FIELDS)
    kinds = table.column("error.type", "text")
    cancelled = table.column("metadata.was_cancelled", "any").fillna(False).astype(bool)
    failed = ~cancelled & (frame[["http_status", "error"]].notna().any(axis=1) | kinds.notna())
    ok = ~cancelled & ~failed
    texts = (kinds.fillna("") + " " + frame.error.fillna("")).str.strip()
    codes = frame.http_status.fillna(0)
    frame["status"] = ["ok" if good else "cancelled" for good in ok]
    frame.loc[failed, "status"] = list(map(failure_status, texts[failed], codes[failed]))
    frame["error"] = texts.str[:300].where(failed)
    frame["http_status"] = codes.where(failed & (codes >= 400))
    frame["started_s"] = (starts - starts.min()) / 1e9
    frame["scheduled_s"] = (issued.clip(upper=starts) - starts.min()) / 1e9
    frame["ended_s"] = (ends - starts) / 1e9
    frame["e2e_s"] = frame.e2e_s.where(ok)
    usage = table.column("metrics.usage_completion_tokens.value", "tokens").notna()
    frame["token_source"] = usage.map({True: "usage", False: "tokenizer"}).where(ok)
    return frame


def _load(settings: Record) -> tuple[float | None, int | None, dict[str, Any]]:
    """Return (requests per second, concurrency, further facts for Result) of the settings."""
    load, names = settings, settings.get("input_config.endpoint.model_names", "any")
    prefix = "input_config.loadgen."
    if settings.has("input_config.phases"):  # since schema 1.4
        phases = settings.get("input_config.phases", "objects", needed=True)
        phase = next((p for p in phases if p.get("kind") != "warmup"), None)
        if phase is not None:
            load, prefix = Record(phase, SETTINGS_NAME + ": input_config.phases: "), ""
        models = settings.get("input_config.models.items", "objects", needed=True)
        names = [m.get("name") for m in models]
    urls = settings.get("input_config.endpoint.urls", "any")
    arrivals = ("type", "arrival_pattern", "request_rate_mode")
    rates = (load.get(prefix + name) for name in ("rate", "request_rate"))
    return (
        next(filter(None, rates), None),
        load.get(prefix + "concurrency", "tokens") or None,
        {
            "version": settings.get("aiperf_version", "text"),
            "model": str(names[0]) if isinstance(names, list) and names else None,
            "url": str(urls[0])
            if isinstance(urls, list) and urls
            else settings.get("input_config.endpoint.url", "text"),
            "api": settings.get("input_config.endpoint.type", "text"),
            "started_utc": settings.get("start_time", "text"),
            "arrivals": next(filter(None, (load.get(prefix + a, "text") for a in arrivals)), None),
        },
    )
