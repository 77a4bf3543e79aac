"""Read genai-bench's JSON of one run: totals, and the durations of each request without starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ampacity.imports.results import (
    Fields,
    ImportedFileError,
    Request,
    Result,
    Stage,
    agree,
    failure_status,
    layout_note,
    starts_of_users,
)

TOOL = "genai-bench"
_DEFINITIONS = [
    (
        "TPOT",
        "(end of the response - first token) / (output tokens - 1): "
        "the end includes usage and [DONE]",
        "to the last token",
    ),
    ("E2E", "to the end of the response", "to the last token"),
    (
        "Output tokens",
        "the server's usage, else the client's tokenizer",
        "says which, for each request",
    ),
]
_MISSING = {
    "scheduled_ns": "no times in the file, only durations: laid out in order over the users",
    "chunk_at_us": "times of chunks are not in the file",
    "chunk_tokens": "tokens per chunk are not in the file",
    "last_token_ns": "taken as the end of the response",
    "output_tokens_planned": "not in the file",
    "token_source": "the server's usage or the client's tokenizer: the file does not say which",
}


def recognises(document: Any) -> bool:
    keys = {"aggregated_metrics", "individual_request_metrics"}
    return isinstance(document, Mapping) and keys <= document.keys()


def read(document: Mapping[str, Any], where: str) -> Result:
    """Return the run as one closed-loop stage. Raises ImportedFileError."""
    top = Fields(document, where)
    total = top.object("aggregated_metrics")
    users = total.tokens("num_concurrency") or 0
    if users < 1:
        raise ImportedFileError(
            f"{where}aggregated_metrics.num_concurrency is not above 0: "
            f"only closed-loop runs of {TOOL} are read"
        )
    unit = 1e-3 if top.text("_time_unit") == "ms" else 1.0
    requests = [_request(row, unit) for row in top.objects("individual_request_metrics")]
    starts = starts_of_users([r.ended_s or 0.0 for r in requests], users)
    requests = [replace(r, started_s=s) for r, s in zip(requests, starts, strict=True)]
    agree(total, num_completed_requests=sum(r.status == "ok" for r in requests))
    output = total.object("stats").object("num_output_tokens")
    agree(output, sum=sum(r.output_tokens or 0 for r in requests))
    duration, rps = total.number("run_duration"), total.number("requests_per_second") or 0
    return Result(
        TOOL,
        [Stage(requests, None, users, duration)],
        _DEFINITIONS,
        _MISSING,
        workload=total.text("scenario"),
        arrivals="closed loop",
        notes=[layout_note(TOOL, f"over {users} users who never pause", rps, duration)],
    )


def _request(row: Fields, unit: float) -> Request:
    code, text = row.tokens("error_code"), row.text("error_message") or ""
    if code is not None:
        http = code if 400 <= code <= 599 else None
        return Request(
            0.0,
            failure_status(text, http),
            ended_s=0.0,
            input_tokens=row.tokens("num_input_tokens"),
            http_status=http,
            error=text[:300],
        )
    ttft, e2e = row.needed("ttft") * unit, row.needed("e2e_latency") * unit
    if ttft > e2e:
        raise row.error("ttft", f"at most e2e_latency ({e2e:g} s)")
    return Request(
        0.0,
        "ok",
        ttft_s=ttft,
        e2e_s=e2e,
        ended_s=e2e,
        input_tokens=row.tokens("num_input_tokens"),
        output_tokens=row.tokens("num_output_tokens"),
        reasoning_tokens=row.tokens("num_reasoning_tokens"),
    )
