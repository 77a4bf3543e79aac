"""Read ``vllm bench serve --save-result --save-detailed``: a JSON object with parallel lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
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
    mean,
    read_lists,
)

TOOL = "vllm bench serve"
_CHAT_FIRST = (
    "First token",
    "the first message with a choice, of a chat the empty one that only names the role",
    "the first message with text, reasoning or a tool call",
)
_DEFINITIONS = [
    ("ITL", "gap between messages, whatever tokens they hold", "per token; raw gaps are ICL"),
    (
        "TPOT",
        "(latency - TTFT) / (output tokens - 1)",
        "divided by the tokens after the first chunk",
    ),
]
_MISSING = {
    "dispatched_ns": "the schedule is not in the file: how late the client was cannot be told",
    "chunk_tokens": "tokens per message are not in the file",
    "output_tokens_planned": "not in the file",
    "cached_tokens": "not in the file",
    "headers_ns": "not in the file",
    "token_source": "the server's usage or the client's tokenizer: the file does not say which",
}
_NO_WAITS = {"scheduled_ns": "taken as the start: this version has no queue_times"}


def recognises(document: Any) -> bool:
    return isinstance(document, Mapping) and document.keys() >= {
        "total_token_throughput",
        "duration",
    }


def read(document: Mapping[str, Any], where: str) -> Result:
    """Return the run as one stage. Raises ImportedFileError."""
    top = Fields(document, where)
    if "ttfts" not in document:
        raise ImportedFileError(
            f"{where}no single requests are in this result of {TOOL}: "
            "run it again with --save-detailed"
        )
    if "start_times" not in document:
        raise ImportedFileError(
            f"{where}start_times are missing: this version of {TOOL} does not write them, "
            "use a newer one"
        )
    starts = top.seconds("start_times")
    n = len(starts)
    lists = read_lists(top, n)
    waits = top.seconds("queue_times", n) if "queue_times" in document else None
    rate, limit = top.request_rate(), top.tokens("max_concurrency")
    closed = rate is None  # waiting for a free user is no lateness
    scheduled: list[float | None] = [None] * n
    if waits is not None and not closed:
        scheduled = [start - wait for start, wait in zip(starts, waits, strict=True)]
    requests = [_request(lists, i, starts[i], scheduled[i]) for i in range(n)]
    done = [r for r in requests if r.status == "ok"]
    agree(
        top,
        completed=len(done),
        total_output_tokens=sum(r.output_tokens or 0 for r in done),
        mean_ttft_ms=1e3 * mean([r.ttft_s or 0.0 for r in done]),
        mean_itl_ms=1e3 * mean([g for r in done for g in r.gaps_s or ()]),
    )
    backend = top.text("backend") or top.text("endpoint_type") or ""
    chat = "chat" in backend
    return Result(
        TOOL,
        [Stage(requests, rate, (limit or n) if closed else None, top.number("duration"))],
        [*([_CHAT_FIRST] if chat else []), *_DEFINITIONS],
        _MISSING | (_NO_WAITS if waits is None else {}),
        model=top.text("model_id"),
        api="chat" if chat else "completions",
        started_utc=_utc(top.text("date")),
        workload=top.text("label"),
        arrivals="closed loop" if closed else _arrivals(top),
        notes=_notes(requests, rate, limit, waits is not None),
    )


def _request(lists: Lists, i: int, start: float, scheduled: float | None) -> Request:
    ttft, gaps, row, error = lists.ttfts[i], lists.gaps[i], lists.rows[i], lists.errors[i]
    # a failure without a message, as of a status line without a reason, has no first chunk
    if error or (ttft == 0 and not gaps):
        return Request(
            start,
            failure_status(str(error)) if error else "http_error",
            scheduled,
            ended_s=0.0,
            gaps_s=[],
            input_tokens=row.tokens("input"),
            error=str(error)[-300:] if error else None,
        )
    return Request(
        start,
        "ok",
        scheduled,
        ttft_s=ttft,
        e2e_s=ttft + math.fsum(gaps),
        gaps_s=gaps,
        input_tokens=row.tokens("input"),
        output_tokens=row.tokens("output"),
    )


def _arrivals(top: Fields) -> str:
    if top.text("ramp_up_strategy"):
        return f"{top.text('ramp_up_strategy')} ramp"
    burstiness = top.number("burstiness")
    return "poisson" if burstiness in (None, 1.0) else f"gamma, burstiness {burstiness:g}"


def _notes(
    requests: list[Request], rate: float | None, limit: int | None, has_waits: bool
) -> list[str]:
    notes = []
    answers = [r for r in requests if r.status == "ok" and r.output_tokens]
    extra = sum(len(r.gaps_s or ()) == r.output_tokens for r in answers)
    if answers and extra >= 0.9 * len(answers):
        notes.append(
            f"{extra} of {len(answers)} answers have one message more than tokens: the first one "
            "is most likely the role, so TTFT here is earlier than the first token"
        )
    if rate is not None and limit:
        how = "is counted from the schedule on" if has_waits else "is not in the file"
        notes.append(
            f"An open loop held to {limit} in flight: "
            f"the time that requests waited for their turn {how}"
        )
    if rate is None and not limit:
        notes.append(
            "Sent all at once (rate inf, no limit): shown as a closed loop of that many requests"
        )
    if len(answers) < len(requests):
        notes.append(FAILURE_ENDS)
    return notes


def _utc(date: str | None) -> str | None:
    """Parse ``20261128-023422``, which is the client's local time."""
    try:
        return f"{datetime.strptime(date or '', '%Y%m%d-%H%M%S'):%Y-%m-%dT%H:%M:%S}"
    except ValueError:
        return None
