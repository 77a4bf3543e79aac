"""``vllm bench serve --save-result --save-detailed``: one JSON object with parallel lists over the requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ampacity.imports.results import (
    Fields,
    ImportedFileError,
    Request,
    Result,
    Stage,
    agree,
    failure_status,
    mean,
    seconds,
)

TOOL = "vllm bench serve"
_CHAT_FIRST = (
    "First token",
    "the first message with a choice, of a chat the empty one that only names the role",
    "the first message with text, reasoning or a tool call",
)
_ITL = ("ITL", "gap between messages, whatever tokens they hold", "per token; raw gaps are ICL")
_TPOT = (
    "TPOT",
    "(latency - TTFT) / (output tokens - 1)",
    "divided by the tokens after the first chunk",
)


def recognises(document: Any) -> bool:
    return (
        isinstance(document, Mapping)
        and "total_token_throughput" in document
        and "duration" in document
    )


def read(document: Mapping[str, Any], where: str) -> Result:
    """Raises ImportedFileError."""
    top = Fields(document, where)
    if "ttfts" not in document:
        raise ImportedFileError(
            f"{where}no single requests are in this result of {TOOL}: run it again with --save-detailed"
        )
    starts = _starts(top)
    n = len(starts)
    ttfts = seconds(top.array("ttfts", n), f"{where}ttfts")
    lists = [seconds(g, f"{where}itls[{i}]") for i, g in enumerate(top.array("itls", n))]
    errors, inputs, outputs = (
        top.array("errors", n),
        top.array("input_lens", n),
        top.array("output_lens", n),
    )
    waits = (
        seconds(top.array("queue_times", n), f"{where}queue_times")
        if "queue_times" in document
        else None
    )
    rate, limit = _rate(top), top.tokens("max_concurrency")
    closed = rate is None  # there, waiting for one's turn is no lateness
    requests = []
    for i in range(n):
        row = Fields({"input": inputs[i], "output": outputs[i]}, f"{where}request {i}: ")
        scheduled = None if waits is None or closed else starts[i] - waits[i]
        if errors[i]:
            text = str(errors[i])
            requests.append(
                Request(
                    starts[i],
                    failure_status(text),
                    scheduled,
                    ended_s=0.0,
                    gaps_s=[],
                    input_tokens=row.tokens("input"),
                    error=text[-300:],
                )
            )
            continue
        # a failure without a word, as of a status line without a reason, has no first chunk
        failed = ttfts[i] == 0 and not lists[i]
        e2e = None if failed else ttfts[i] + math.fsum(lists[i])
        requests.append(
            Request(
                starts[i],
                "http_error" if failed else "ok",
                scheduled,
                ttft_s=None if failed else ttfts[i],
                e2e_s=e2e,
                ended_s=0.0 if failed else None,
                gaps_s=lists[i],
                input_tokens=row.tokens("input"),
                output_tokens=None if failed else row.tokens("output"),
            )
        )
    done = [r for r in requests if r.status == "ok"]
    agree(
        top,
        completed=len(done),
        total_output_tokens=sum(r.output_tokens or 0 for r in done),
        mean_ttft_ms=1e3 * mean([r.ttft_s or 0.0 for r in done]),
        mean_itl_ms=1e3 * mean([g for r in done for g in r.gaps_s or ()]),
    )
    stage = Stage(requests, rate, (limit or n) if closed else None, top.number("duration"))
    backend = top.text("backend") or top.text("endpoint_type") or ""
    return Result(
        TOOL,
        [stage],
        [*([_CHAT_FIRST] if "chat" in backend else []), _ITL, _TPOT],
        _missing(waits is not None),
        model=top.text("model_id"),
        api="chat" if "chat" in backend else "completions",
        started_utc=_utc(top.text("date")),
        workload=top.text("label"),
        arrivals="closed loop" if closed else _arrivals(top),
        notes=_notes(requests, rate, limit, waits is not None),
    )


def _starts(top: Fields) -> list[float]:
    if "start_times" not in top.held:
        raise ImportedFileError(
            f"{top.where}start_times are missing: this version of {TOOL} does not write them, use a newer one"
        )
    return seconds(top.array("start_times"), f"{top.where}start_times")


def _rate(top: Fields) -> float | None:
    """Requests per second; None: as fast as it goes."""
    value = top.held.get("request_rate")
    if value in ("inf", None) or value == math.inf:
        return None
    rate = top.needed("request_rate")
    if rate <= 0:
        raise top.error("request_rate", "above 0")
    return rate


def _arrivals(top: Fields) -> str:
    if top.text("ramp_up_strategy"):
        return f"{top.text('ramp_up_strategy')} ramp"
    burstiness = top.number("burstiness")
    return "poisson" if burstiness in (None, 1.0) else f"gamma, burstiness {burstiness:g}"


def _missing(waits: bool) -> dict[str, str]:
    found = {
        "dispatched_ns": "the schedule is not in the file: how late the client was cannot be told",
        "chunk_tokens": "tokens per message are not in the file",
        "output_tokens_planned": "not in the file",
        "cached_tokens": "not in the file",
        "headers_ns": "not in the file",
        "token_source": "the server's usage or the client's tokenizer: the file does not say which",
    }
    return (
        found
        if waits
        else {**found, "scheduled_ns": "taken as the start: this version has no queue_times"}
    )


def _notes(
    requests: list[Request], rate: float | None, limit: int | None, waits: bool
) -> list[str]:
    notes = []
    answers = [r for r in requests if r.status == "ok" and r.output_tokens]
    extra = sum(len(r.gaps_s or ()) == r.output_tokens for r in answers)
    if answers and extra >= 0.9 * len(answers):
        notes.append(
            f"{extra} of {len(answers)} answers have one message more than tokens: the first one is most likely the role, so TTFT here is "
            "earlier than the first token"
        )
    if rate is not None and limit:
        told = (
            "is counted from the schedule on" if waits else "is not in the file and hides the queue"
        )
        notes.append(
            f"An open loop held to {limit} in flight: the time that requests waited for their turn {told}"
        )
    if rate is None and not limit:
        notes.append(
            "Sent all at once (rate inf, no limit): shown as a closed loop of that many requests"
        )
    if len(answers) < len(requests):
        notes.append(
            "When a failed request ended is not in the file: it is taken to end as it starts"
        )
    return notes


def _utc(date: str | None) -> str | None:
    """``20261128-023422`` in the client's local time, which is all that the file has."""
    try:
        return f"{datetime.strptime(date or '', '%Y%m%d-%H%M%S'):%Y-%m-%dT%H:%M:%S}"
    except ValueError:
        return None
