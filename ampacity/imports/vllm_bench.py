"""Read ``vllm bench serve --save-result --save-detailed``: a JSON object with parallel lists."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ampacity.imports.results import (
    FAILURE_ENDS,
    ImportedFileError,
    Result,
    Stage,
    failure_status,
)
from ampacity.imports.table import Record, read_lists, requests_of

if TYPE_CHECKING:
    import pandas as pd

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
_NEEDED = {
    "ttfts": f"no single requests are in this result of {TOOL}: run it again with --save-detailed",
    "start_times": f"start_times are missing: this version of {TOOL} does not write them, "
    "use a newer one",
}
_NO_WAITS = {"scheduled_ns": "taken as the start: this version has no queue_times"}


def recognises(document: Any) -> bool:
    return isinstance(document, Mapping) and document.keys() >= {
        "total_token_throughput",
        "duration",
    }


def read(document: Mapping[str, Any], where: str) -> Result:
    """Return the run as one stage. Raises ImportedFileError."""
    top = Record(document, where)
    for name, advice in _NEEDED.items():
        if not top.has(name):
            raise ImportedFileError(f"{where}{advice}")
    rate, limit = top.request_rate(), top.get("max_concurrency", "tokens")
    frame = _requests(top, is_open=rate is not None)
    has_waits = top.has("queue_times")
    backend = top.get("backend", "text") or top.get("endpoint_type", "text") or ""
    chat = "chat" in backend
    closed = (limit or len(frame)) if rate is None else None
    return Result(
        TOOL,
        [Stage(requests_of(frame), rate, closed, top.get("duration"))],
        [*([_CHAT_FIRST] if chat else []), *_DEFINITIONS],
        _MISSING | ({} if has_waits else _NO_WAITS),
        model=top.get("model_id", "text"),
        api="chat" if chat else "completions",
        started_utc=_utc(top.get("date", "text")),
        workload=top.get("label", "text"),
        arrivals="closed loop" if closed else _arrivals(top),
        notes=_notes(frame, rate, limit, has_waits),
    )


def _requests(top: Record, *, is_open: bool) -> pd.DataFrame:
    """Return the fields of the requests."""
    table, frame = read_lists(top, "start_times", "queue_times")
    frame["started_s"] = table.column("start_times", needed=True)
    if top.has("queue_times"):
        waits = table.column("queue_times", needed=True)
        if is_open:  # waiting for a free user is no lateness
            frame["scheduled_s"] = frame.started_s - waits
    # a failure without a message, as of a status line without a reason, has no first chunk
    ok = frame.error.isna() & ((frame.ttft_s > 0) | frame.gaps_s.astype(bool))
    done = frame[ok]
    top.check(
        {
            "completed": len(done),
            "total_output_tokens": done.output_tokens.sum(),
            "mean_ttft_ms": 1e3 * done.ttft_s.mean(),
            "mean_itl_ms": 1e3 * done.gaps_s.explode().mean(),
        }
    )
    frame["status"] = "ok"
    frame.loc[~ok, "status"] = [failure_status(e) for e in frame.error[~ok].fillna("")]
    frame["error"] = frame.error.str[-300:]
    frame["ended_s"] = frame.e2e_s.where(ok, 0.0)
    frame.loc[~ok, ["ttft_s", "e2e_s", "output_tokens"]] = None
    frame["gaps_s"] = [g if good else [] for g, good in zip(frame.gaps_s, ok, strict=True)]
    return frame.drop(columns="cached_tokens")


def _arrivals(top: Record) -> str:
    if ramp := top.get("ramp_up_strategy", "text"):
        return f"{ramp} ramp"
    burstiness = top.get("burstiness")
    return "poisson" if burstiness in (None, 1.0) else f"gamma, burstiness {burstiness:g}"


def _notes(
    requests: pd.DataFrame, rate: float | None, limit: int | None, has_waits: bool
) -> list[str]:
    notes = []
    answers = requests[(requests.status == "ok") & (requests.output_tokens > 0)]
    extra = (answers.gaps_s.map(len) == answers.output_tokens).sum()
    if extra and extra >= 0.9 * len(answers):
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
