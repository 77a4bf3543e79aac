"""``sglang.bench_serving --output-file F --output-details``: one JSON object a run, with parallel lists over its requests.

Runs that append to the same file are the stages of one import. When a request began is not in the file.
"""

from __future__ import annotations

import heapq
import math
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
    mean,
    seconds,
)

TOOL = "SGLang bench_serving"
_OWN = {"backend", "duration", "completed", "total_output_tokens_retokenized"}
_ITL = (
    "ITL",
    "gap between messages with text; of its own API, a message's gap shared equally among its tokens",
    "per token; raw gaps are ICL",
)
_TPOT = (
    "TPOT",
    "(end of the response - TTFT) / (output tokens - 1): the end includes usage and [DONE]",
    "to the last token",
)
_E2E = ("E2E", "to the end of the response", "to the last token")
_EACH_MS = "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms"


def recognises(document: Any) -> bool:
    runs = document if isinstance(document, list) else [document]
    return bool(runs) and all(isinstance(run, Mapping) and run.keys() >= _OWN for run in runs)


def read(document: Mapping[str, Any] | list[Mapping[str, Any]], where: str) -> Result:
    """One stage for each run with details. Raises ImportedFileError."""
    held = document if isinstance(document, list) else [document]
    runs = [
        Fields(run, where if len(held) == 1 else f"{where}run {i}: ")
        for i, run in enumerate(held, 1)
    ]
    detailed = [run for run in runs if "ttfts" in run.held]
    if not detailed:
        told = "; ".join(_figures(run) for run in runs[:3])
        raise ImportedFileError(
            f"{where}no single requests are in this result of {TOOL} ({told}): run it again with --output-details"
        )
    notes = []
    if len(detailed) < len(runs):
        notes.append(
            f"{len(runs) - len(detailed)} of {len(runs)} runs in the file have no single requests (no --output-details) and are left out"
        )
    stages = [_stage(run, notes) for run in detailed]
    first = detailed[0]
    backend, server = first.text("backend") or "", first.object("server_info")
    streamed = any(r.ttft_s is not None for stage in stages for r in stage.requests)
    return Result(
        TOOL,
        stages,
        [_ITL, _TPOT, _E2E],
        _MISSING | ({} if streamed else _NOT_STREAMED),
        version=server.text("version"),
        model=server.text("served_model_name") or server.text("model_path"),
        workload=first.text("dataset_name"),
        api="chat" if backend.endswith("chat") else "completions",
        notes=list(dict.fromkeys(notes)),
        arrivals=", ".join(dict.fromkeys(_arrivals(run) for run in detailed)),
    )


_MISSING = {
    "scheduled_ns": "no times in the file, only durations: laid out in the order of the file",
    "dispatched_ns": "the schedule is not in the file: how late the client was cannot be told",
    "chunk_tokens": "tokens per message are not in the file",
    "output_tokens_planned": "not in the file",
    "headers_ns": "not in the file",
    "last_token_ns": "first token and the gaps after it, added up",
    "token_source": "the server's usage, or the length asked for where it sent none: the file does not say which",
}
_NOT_STREAMED = {
    "first_token_ns": "the answers were not streamed: what the file calls TTFT is the whole answer"
}


def _figures(run: Fields) -> str:
    """What a run without details says of itself, for the user who has nothing else."""
    found = [f"{run.tokens('completed') or 0} requests in {run.number('duration') or 0:.4g} s"]
    found += [f"{name} {value:.4g}" for name in _EACH_MS if (value := run.number(name)) is not None]
    return ", ".join(found)


def _rate(run: Fields) -> float | None:
    """Requests per second; None: as fast as it goes, or by the times of a trace."""
    value = run.held.get("request_rate")
    if value in ("inf", "trace", None) or value == math.inf:
        return None
    rate = run.needed("request_rate")
    if rate <= 0:
        raise run.error("request_rate", "above 0")
    return rate


def _arrivals(run: Fields) -> str:
    traced = run.held.get("request_rate") == "trace"
    return "trace" if traced else "closed loop" if _rate(run) is None else "poisson"


def _stage(run: Fields, notes: list[str]) -> Stage:
    ttfts = seconds(run.array("ttfts"), f"{run.where}ttfts")
    n = len(ttfts)
    gaps = [seconds(g, f"{run.where}itls[{i}]") for i, g in enumerate(run.array("itls", n))]
    columns = [run.array(name, n) for name in ("errors", "input_lens", "output_lens")]
    cached = run.array("cached_tokens", n) if "cached_tokens" in run.held else [None] * n
    if not n:
        raise ImportedFileError(f"{run.where}there is no request in it")
    errors, inputs, outputs = columns
    rows = [
        Fields(
            {"input": inputs[i], "output": outputs[i], "cached": cached[i]},
            f"{run.where}request {i}: ",
        )
        for i in range(n)
    ]
    # an answer without a token: a success by its own count, or a failure without a word
    silent = "empty" if run.tokens("completed") == n - sum(map(bool, errors)) else "http_error"
    status = [
        failure_status(str(errors[i])) if errors[i] else "ok" if ttfts[i] or gaps[i] else silent
        for i in range(n)
    ]
    done = [i for i in range(n) if status[i] == "ok"]
    counted = [i for i in range(n) if status[i] in ("ok", "empty")]
    agree(
        run,
        completed=len(counted),
        total_output_tokens=sum(rows[i].tokens("output") or 0 for i in counted),
        mean_ttft_ms=1e3 * mean([ttfts[i] for i in counted]) if counted else 0.0,
    )
    if not (run.number("accept_length") or 0):  # with speculation its own ITL is by its tokenizer
        agree(run, mean_itl_ms=1e3 * mean([g for i in counted for g in gaps[i]] or [0.0]))
    streamed = any(gaps[i] for i in done) or all((rows[i].tokens("output") or 0) <= 1 for i in done)
    if not streamed:
        notes.append("The answers were not streamed: TTFT, ITL and TPOT are not known, E2E is")
    if len(counted) < n:
        notes.append(
            "When a failed request ended is not in the file: it is taken to end as it starts"
        )
    e2es = [ttfts[i] + math.fsum(gaps[i]) for i in range(n)]
    rate, limit, duration = (
        _rate(run),
        run.tokens("max_concurrency") or None,
        run.number("duration"),
    )
    closed = rate is None and run.held.get("request_rate") != "trace"
    users = limit or n
    starts = _in_turn(e2es, users) if closed else _evenly(e2es, duration or 0.0)
    requests = [
        Request(
            starts[i],
            status[i],
            ttft_s=ttfts[i] if status[i] == "ok" and streamed else None,
            e2e_s=e2es[i] if status[i] == "ok" else None,
            ended_s=e2es[i] if status[i] == "ok" else 0.0,
            gaps_s=gaps[i] if streamed else None,
            input_tokens=rows[i].tokens("input"),
            output_tokens=rows[i].tokens("output") if status[i] == "ok" else None,
            cached_tokens=rows[i].tokens("cached"),
            error=str(errors[i])[-300:] if errors[i] else None,
        )
        for i in range(n)
    ]
    notes.append(_laid_out(run, closed, users, limit))
    return Stage(requests, None if closed else rate, users if closed else None, duration)


def _in_turn(e2es: Sequence[float], users: int) -> list[float]:
    """Starts of requests of which each waits until one of ``users`` is free: the order in which a semaphore lets them in."""
    free, starts = [0.0] * min(users, len(e2es)), []
    for lasts in e2es:
        starts.append(heapq.heappop(free))
        heapq.heappush(free, starts[-1] + lasts)
    return starts


def _evenly(e2es: Sequence[float], duration_s: float) -> list[float]:
    """Starts at equal distances, the last so that its answer ends with the run."""
    last = max(duration_s - e2es[-1], 0.0)
    return [last * i / max(len(e2es) - 1, 1) for i in range(len(e2es))]


def _laid_out(run: Fields, closed: bool, users: int, limit: int | None) -> str:
    how = f"over {users} users who never pause" if closed else "at equal distances"
    held = (
        ""
        if closed or not limit
        else f"; held to {limit} in flight, and how long a request waited for its turn is not in the file"
    )
    return (
        f"When a request began is not in the file: they are laid out in its order, {how}{held}. Percentiles are as measured; rates, steady "
        f"state, drift and requests in flight are only as good as that. What {TOOL} measured over all: "
        f"{run.number('request_throughput') or (run.number('completed') or 0) / (run.number('duration') or math.inf):.4g} requests/s in "
        f"{run.number('duration') or 0:.4g} s"
    )
