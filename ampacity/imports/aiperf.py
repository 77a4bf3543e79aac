"""Read aiperf's ``profile_export.jsonl``, one object a request, and the settings file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.imports.results import (
    Fields,
    ImportedFileError,
    Request,
    Result,
    Stage,
    agree,
    failure_status,
)

TOOL = "aiperf"
SETTINGS_NAME = "profile_export_aiperf.json"
_TO_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}
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
    rows = [Fields(r, f"{where}record {i}: ") for i, r in enumerate(records, start=1)]
    kept = [r for r in rows if r.object("metadata").held.get("benchmark_phase") != "warmup"]
    if not kept:
        raise ImportedFileError(f"{where}only warm-up requests are in it")
    first_ns = min(_ns(r.object("metadata"), "request_start_ns") for r in kept)
    requests = [_request(r, first_ns) for r in kept]
    reported = Fields(settings or {}, SETTINGS_NAME + ": ")
    agree(reported.object("request_latency"), count=sum(r.status == "ok" for r in requests))
    rate, concurrency, facts = _load(reported)
    notes = []
    if not settings:
        notes.append(f"{SETTINGS_NAME} is not beside the file: the load asked for is not known")
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} warm-up requests are left out")
    missing = {
        "dispatched_ns": "the schedule is not in the file, only when a request was let go: "
        "how late the client was cannot be told",
        "chunk_tokens": "tokens per chunk are not in the file",
        "output_tokens_planned": "not in the file",
    }
    if all(r.gaps_s is None for r in requests):
        missing["chunk_at_us"] = "times of chunks are not in the file"
    closed = concurrency if rate is None else None
    return Result(
        TOOL,
        [Stage(requests, rate, closed)],
        _DEFINITIONS,
        missing,
        notes=notes,
        arrivals="closed loop" if closed else facts.pop("arrivals", None),
        **facts,
    )


def _ns(metadata: Fields, name: str) -> int:
    value = metadata.held.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise metadata.error(name, "a time in ns")
    return value


def _request(row: Fields, first_ns: int) -> Request:
    metadata, metrics, failure = row.object("metadata"), row.object("metrics"), row.object("error")
    start_ns, end_ns = _ns(metadata, "request_start_ns"), _ns(metadata, "request_end_ns")
    if end_ns < start_ns:
        raise metadata.error("request_end_ns", "at or after request_start_ns")
    scheduled = None
    if metadata.held.get("credit_issued_ns") is not None:
        scheduled = min(_ns(metadata, "credit_issued_ns"), start_ns)
    status, error, code = "ok", None, None
    if metadata.held.get("was_cancelled"):
        status = "cancelled"
    elif failure.held:
        code = failure.tokens("code")
        error = f"{failure.text('type') or ''} {failure.text('message') or ''}".strip()
        status = failure_status(error, code)
    good = status == "ok"
    counted, usage = (
        _tokens(metrics, "output_sequence_length"),
        _tokens(metrics, "usage_completion_tokens"),
    )
    return Request(
        (start_ns - first_ns) / 1e9,
        status,
        None if scheduled is None else (scheduled - first_ns) / 1e9,
        ttft_s=_seconds(metrics, "time_to_first_token"),
        e2e_s=_seconds(metrics, "request_latency") if good else None,
        ended_s=(end_ns - start_ns) / 1e9,
        gaps_s=_gaps(metrics),
        input_tokens=_tokens(
            metrics, "input_sequence_length" if usage is None else "usage_prompt_tokens"
        ),
        output_tokens=counted if usage is None else usage,
        token_source=None if not good else "tokenizer" if usage is None else "usage",
        reasoning_tokens=_tokens(metrics, "reasoning_token_count"),
        http_status=code if code and code >= 400 else None,
        error=error and error[:300],
    )


def _seconds(metrics: Fields, name: str) -> float | None:
    metric = metrics.object(name)
    value = metric.number("value")
    return None if value is None else value * _unit(metric)


def _unit(metric: Fields) -> float:
    unit = metric.text("unit") or ""
    if unit not in _TO_SECONDS:
        raise metric.error("unit", f"one of {', '.join(_TO_SECONDS)}")
    return _TO_SECONDS[unit]


def _tokens(metrics: Fields, name: str) -> int | None:
    return metrics.object(name).tokens("value")


def _gaps(metrics: Fields) -> list[float] | None:
    metric = metrics.object("inter_chunk_latency")
    if not isinstance(metric.held.get("value"), list):
        return None
    factor = _unit(metric)
    return [Fields({"gap": g}, metric.where).needed("gap") * factor for g in metric.array("value")]


def _load(settings: Fields) -> tuple[float | None, int | None, dict[str, Any]]:
    """Return (requests per second, concurrency, further facts for Result) of the settings."""
    given = settings.object("input_config")
    endpoint, load = given.object("endpoint"), given.object("loadgen")
    names, urls = endpoint.held.get("model_names"), endpoint.held.get("urls")
    if "phases" in given.held:  # since schema 1.4
        load = next((p for p in given.objects("phases") if p.held.get("kind") != "warmup"), load)
        names = [m.text("name") for m in given.object("models").objects("items")]
    arrivals = load.text("type") or load.text("arrival_pattern") or load.text("request_rate_mode")
    rate = load.number("rate") or load.number("request_rate") or None
    return (
        rate,
        load.tokens("concurrency") or None,
        {
            "version": settings.text("aiperf_version"),
            "model": str(names[0]) if isinstance(names, list) and names else None,
            "url": str(urls[0]) if isinstance(urls, list) and urls else endpoint.text("url"),
            "api": endpoint.text("type"),
            "started_utc": settings.text("start_time"),
            "arrivals": arrivals,
        },
    )
