"""Read genai-bench's JSON of one run: totals, and the durations of each request without starts."""

from collections.abc import Mapping
from typing import Any

from ampacity.imports import results
from ampacity.imports.table import Column, Record, requests_of

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

_FIELDS = {
    "input_tokens": Column("num_input_tokens", "tokens"),
    "output_tokens": Column("num_output_tokens", "tokens"),
    "reasoning_tokens": Column("num_reasoning_tokens", "tokens"),
    "http_status": Column("error_code", "tokens"),
    "error": Column("error_message", "text"),
}


def recognises(document: Any) -> bool:
    keys = {"aggregated_metrics", "individual_request_metrics"}
    return isinstance(document, Mapping) and keys <= document.keys()


def read(document: Mapping[str, Any], where: str) -> results.Result:
    """Return the run as one closed-loop stage. Raises ImportedFileError."""
    top = Record(document, where)
    users = top.get("aggregated_metrics.num_concurrency", "tokens") or 0
    if users < 1:
        raise results.ImportedFileError(
            f"{where}aggregated_metrics.num_concurrency is not above 0: "
            f"only closed-loop runs of {TOOL} are read"
        )
    table = top.rows("individual_request_metrics")
    frame = table.read(_FIELDS)
    unit = 1e-3 if top.get("_time_unit", "text") == "ms" else 1.0
    ok = frame.http_status.isna()
    texts, codes = frame.error.fillna(""), frame.http_status.where(frame.http_status < 600, 0)
    frame["status"] = "ok"
    frame.loc[~ok, "status"] = list(map(results.failure_status, texts[~ok], codes[~ok]))
    for field, path in (("ttft_s", "ttft"), ("e2e_s", "e2e_latency")):
        frame[field] = table.column(Column(path, unit=unit), needed=ok).where(ok)
    table.refuse(frame.ttft_s > frame.e2e_s, "ttft", "at most e2e_latency")
    frame["error"] = texts.str[:300].where(~ok)
    frame["http_status"] = codes.where(codes >= 400)
    for field in ("output_tokens", "reasoning_tokens"):
        frame[field] = frame[field].where(ok)
    frame["ended_s"] = frame.e2e_s.fillna(0.0)
    frame["started_s"] = results.starts_of_users(list(frame.ended_s), users)
    total = "aggregated_metrics."
    top.check(
        {
            f"{total}num_completed_requests": ok.sum(),
            f"{total}stats.num_output_tokens.sum": frame.output_tokens.sum(),
        }
    )
    duration = top.get(f"{total}run_duration")
    rps = top.get(f"{total}requests_per_second") or 0
    return results.Result(
        TOOL,
        [results.Stage(requests_of(frame), None, users, duration)],
        _DEFINITIONS,
        _MISSING,
        workload=top.get(f"{total}scenario", "text"),
        arrivals="closed loop",
        notes=[results.layout_note(TOOL, f"over {users} users who never pause", rps, duration)],
    )
