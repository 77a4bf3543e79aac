"""What follows for a benchmark's figures from what an endpoint showed of itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import pyarrow as pa

from ampacity.experiments.conduct import typical_lengths
from ampacity.experiments.doctor import Seen
from ampacity.progress import seconds
from analysis.caveats import LENGTHS_OFF_SHARE
from analysis.metrics import read_chunks, read_requests, visible_tokens
from loadgen.records import RequestRecord, to_batch
from workloads.tokenizers import WORD_TOKENIZERS

METRICS = ("ttft", "itl", "icl", "tpot", "e2e", "tokens")
OF_STREAM = METRICS[:4]
TOGETHER_S = 0.001  # an event so long before the first token came with it
HELD_BACK = 0.33  # of an answer's time: its first token is so much later than a shorter answer's
HELD_BACK_MIN_S = 0.02
BUNCHED = 0.1  # share of the chunks that share a read with the one before; share of TTFT or TPOT that bunches may change
FINE_S = 0.002  # bunches so close matter to nobody
SEVERAL = 1.02  # tokens per chunk that are more than one
SPEEDUP = 2.0  # of a repeated prompt's TTFT that only a cache explains
SPEEDUP_MIN_S = 0.005  # less may be noise
SLOW_CLIENT_S = 0.001
FEW_CONNECTIONS = 1000
OF_LENGTH = ("max_", "min_tokens", "ignore_eos", "stop")  # options, by how they begin

Facts = dict[str, Any]
Case = tuple[Any, str, str, str, Sequence[str]]  # whether it is so, and the rest of a Check


@dataclass(frozen=True)
class Check:
    """One line. ``verdict``: ok, note or bad; ``spoils``: which of METRICS are not to be trusted."""

    name: str
    verdict: str
    found: str
    means: str
    spoils: tuple[str, ...]


def checkup(seen: Seen) -> tuple[list[Check], Facts]:
    """The checks, in the order of a request's life, and the numbers that they rest on."""
    f = _facts(seen)
    cases = _way(f) | _stream(f) | (_text(f) if f["api"] != "embeddings" else {}) | _prompt(f) | _machine(f)
    first = {name: next(case for case in those if case[0]) for name, those in cases.items()}
    if first["stream"][1] == "bad":
        first.pop("first event", None)  # the first is the last
    checks = [Check(name, *case[1:4], tuple(case[4])) for name, case in first.items()]
    return checks, f


def trusted(checks: list[Check]) -> dict[str, bool]:
    """By metric: whether no check spoils it."""
    return {metric: all(metric not in check.spoils for check in checks) for metric in METRICS}


def _facts(seen: Seen) -> Facts:
    settings, served, how, answer = seen.settings, seen.probe.served, seen.probe.calibration, seen.answer
    short, again, at_us = seen.short, seen.again, list(answer.chunk_at_us)
    reads = sorted(set(at_us))
    ttft_s, new_s, again_s = (_s(r, "started_ns", "first_token_ns") or 0.0 for r in (answer, short, again))
    table = pa.Table.from_batches([to_batch([answer])])
    requests = read_requests(table, 0)
    chunks = read_chunks(table, requests)  # as the report will have it
    known = bool(chunks.known[0])
    tokens = float(chunks.tokens_in()[0]) if known else answer.output_tokens or 0
    return {
        "api": settings.api, "engine": served.engine, "engine_version": served.engine_version, "server": served.server,
        "proxy": seen.proxy and f"{seen.proxy.host}:{seen.proxy.port}", "kept_alive": seen.kept_alive, "connections": settings.connections,
        "closed_unannounced": seen.closed_unannounced, "connect_s": _s(short, "dispatched_ns", "connected_ns"), "failures": list(seen.failures),
        "model": seen.probe.shape.model, "models": list(served.models), "max_model_len": served.max_model_len,
        "output_tokens_asked": answer.output_tokens_planned or 0, "output_tokens": answer.output_tokens or 0, "finish_reason": answer.finish_reason,
        "max_tokens_field": seen.probe.shape.dialect.max_tokens_field, "ignore_eos_taken": seen.probe.shape.dialect.ignore_eos,
        "chunks": len(at_us), "reads": len(reads), "read_gap_p50_s": median([b - a for a, b in pairwise(reads)] or [0]) / 1e6,
        "span_s": _s(answer, "first_token_ns", "last_token_ns") or 0.0, "lasts_s": _s(answer, "started_ns", "last_token_ns") or 0.0,
        "ttft_s": ttft_s, "ttft_grew_s": ttft_s - max(new_s, again_s), "first_event_s": _s(answer, "started_ns", "first_event_ns"),
        "early_s": _s(answer, "first_event_ns", "first_token_ns") or 0.0,
        "token_source": answer.token_source, "tokens_per_chunk": tokens / max(len(at_us), 1), "chunk_tokens_known": known,
        "vocabulary": None if settings.tokenizer in WORD_TOKENIZERS else settings.tokenizer,
        "tokens_visible": int(visible_tokens(requests)[0]) if answer.output_tokens else 0, "reasoning_tokens": answer.reasoning_tokens or 0, "first_answer_s": _s(answer, "started_ns", "first_answer_ns"),
        "reasoning_sent": answer.first_answer_ns != answer.first_token_ns,
        "extra_body": sorted(settings.extra_body), "input_tokens_wanted": typical_lengths(settings, None)[0],
        "input_tokens_planned": answer.input_tokens_planned or 0, "input_tokens": answer.input_tokens,
        "overhead_tokens": how.overhead_tokens if how.measured else None, "tokens_per_word": how.tokens_per_word if how.measured else None,
        "cached_tokens_new": max(short.cached_tokens or 0, answer.cached_tokens or 0), "cached_tokens_again": again.cached_tokens,
        "ttft_new_s": new_s, "ttft_again_s": again_s,
        "gauges": list(seen.gauges), "timestamps": settings.timestamps, "connections_room": seen.room, "compiled": seen.compiled,
        "receive_delay_p50_s": median(seen.receive_delays_s) if seen.receive_delays_s else None, "receive_delay_max_s": max(seen.receive_delays_s, default=None),
    }  # fmt: skip


def _s(record: RequestRecord, begin: str, end: str) -> float | None:
    a, b = getattr(record, begin), getattr(record, end)
    return None if a is None or b is None else float(b - a) / 1e9


def _way(f: Facts) -> dict[str, list[Case]]:
    who = " ".join(filter(None, (f["engine"], f["engine_version"]))) or f["server"] or "an unnamed server"
    found = f"{f['api']} over HTTP/1.1{' through the proxy ' + f['proxy'] if f['proxy'] else ''}, answered by {who}"
    broken = " although nothing said so" if f["closed_unannounced"] else ""
    new = f"TTFT from schedule and E2E: with the set-up of a connection ({seconds(f['connect_s'])}); TTFT: without"
    others, longest = len(f["models"]) - 1, f["max_model_len"]
    context = f"; context {longest:,} tokens" if longest else ""
    return {"connection": [
        (f["failures"], "bad", f"{found}; requests that failed and were sent again: {len(f['failures'])} ({'; '.join(dict.fromkeys(f['failures']))})", "a failed request counts as infinitely slow: a run shows how many there are", ()),
        (f["connections"] == "new", "ok", f"{found}; a connection for each, as --connections new asks", new, ()),
        (not f["kept_alive"], "note", f"{found}; the connection is closed after each answer{broken}", f"a run opens one for each request. {new}", ()),
        (True, "ok", f"{found}; connections are kept alive", "TTFT, E2E: without the set-up of connections", ()),
    ], "model": [
        (others < 0, "note", f"{f['model']} is answered; there is no list of models", "that the figures are this model's rests on its name", ()),
        (f["model"] not in f["models"], "bad", f"{f['model']} is answered, but the list has {', '.join(f['models'][:10])}", "the figures may be another model's: is this the one you mean?", ()),
        (True, "ok", f"{f['model']} is served{f' beside {others} more' if others else ''}{context}", "the figures are this model's", ()),
    ]}  # fmt: skip


def _stream(f: Facts) -> dict[str, list[Case]]:
    """A longer answer's first token comes no later than a short one's, else it was held back, or waited by chance."""
    tokens, gap_s = f"{f['output_tokens']} tokens in {f['chunks']} chunks", f["read_gap_p50_s"]
    grew_s = f["ttft_grew_s"]
    bunched = f["reads"] < (1 - BUNCHED) * f["chunks"]
    share = gap_s / max(f["span_s"], 1e-9)
    changed = {"itl": True, "icl": True, "ttft": gap_s > BUNCHED * f["ttft_s"], "tpot": share > BUNCHED}
    spoilt = [metric for metric, much in changed.items() if much]
    return {"stream": [
        (f["api"] == "embeddings", "ok", "vectors are not streamed", "E2E is what there is", OF_STREAM),
        (not f["chunks"], "bad", f"no text came; tokens counted all the same: {f['output_tokens']}", "TTFT, ITL, TPOT: none", OF_STREAM),
        (max(f["output_tokens"], f["chunks"]) < 2, "note", "a single token: whether it streams cannot be seen", "ITL, TPOT: none", OF_STREAM[1:]),
        (f["chunks"] < 2, "bad", f"not streamed: {f['output_tokens']} tokens in one piece, after {seconds(f['lasts_s'])}", "TTFT is E2E; no ITL, no TPOT: judge by e2e", OF_STREAM),
        (f["reads"] == 1, "bad", f"held back: {tokens} in one read, {seconds(f['lasts_s'])} after the request", "something buffers the stream (a proxy, compression): TTFT is E2E, ITL and TPOT are the buffer's; judge by e2e", OF_STREAM),
        (grew_s > max(HELD_BACK_MIN_S, HELD_BACK * f["lasts_s"]), "note", f"may be held back: {tokens} within {seconds(f['span_s'])}, the first {seconds(grew_s)} later than that of a short answer", "a buffer whose TTFT grows with the answer (a proxy, compression), or this request waited by chance: repeat doctor; if it stays, judge by e2e", OF_STREAM),
        (bunched and gap_s < FINE_S, "ok", f"{tokens} came in {f['reads']} reads, {seconds(gap_s)} apart", f"TTFT, ITL, ICL: right to within {seconds(gap_s)}", ()),
        (bunched, "note", f"bunched: {tokens} came in {f['reads']} reads, {seconds(gap_s)} apart", f"TTFT: up to {seconds(gap_s)} too long; ITL, ICL: 0 within a bunch, too long between two; TPOT: right to within {share:.0%}", spoilt),
        (True, "ok", f"{tokens}, {seconds(f['span_s'])} from the first to the last", "TTFT, ICL: of tokens as they are made", ()),
    ]}  # fmt: skip


def _text(f: Facts) -> dict[str, list[Case]]:
    """What is in the answer's events."""
    vocabulary, ratio = f["vocabulary"], f"{f['tokens_per_chunk']:.3g} tokens in a chunk"
    sources = {"usage": "usage at the end", "usage_per_chunk": "usage in each chunk", "logprobs": "logprobs"}
    source = sources.get(f["token_source"], "unknown")
    by_chunks = f["token_source"] == "chunks"
    asked, got, chunks = f["output_tokens_asked"], f["output_tokens"], f["chunks"]
    taken, counted, answer_s = f["ignore_eos_taken"], f["reasoning_tokens"], f["first_answer_s"]
    length = f"{asked} tokens asked for, {got} answered, finish reason {f['finish_reason']}"
    ends = "answers end where the model ends them: compare only runs with answers as long"
    as_asked = chunks == asked != got and not f["chunk_tokens_known"]
    doubts = {
        f"{got} tokens counted, and no text came": not chunks,
        f"{counted} reasoning tokens of {got} in all": counted > got,
        f"{f['tokens_visible']} tokens for {chunks} chunks with text": f["tokens_visible"] < chunks,
        f"{got} tokens counted, {asked} asked for, and as many chunks came": as_asked,
    }
    doubt = next((why for why, so in doubts.items() if so and not by_chunks), "")
    tells = "the server's count can be believed" if doubt else "chunks tell"
    own = [name for name in f["extra_body"] if name.startswith(OF_LENGTH)]
    return {"first event": [
        (f["early_s"] < TOGETHER_S, "ok", f"with the first text, {seconds(f['ttft_s'])} after the request", "TTFT: the same by any definition", ()),
        (True, "ok", f"without text, {seconds(f['first_event_s'])} after the request; the first text {seconds(f['early_s'])} later", f"TTFT: trusted, it is the first text's ({seconds(f['ttft_s'])}); a tool that takes any event for a token reports {seconds(f['early_s'])} less", ()),
    ], "token counts": [
        (doubt, "bad", f"{source}: {doubt}", "the server's count or its stream is wrong: ITL, TPOT, tokens/s say nothing", ("itl", "tpot", "tokens")),
        (by_chunks and vocabulary, "note", f"no usage: --tokenizer {vocabulary} counts the text", "ITL, TPOT, tokens/s: right if that is the model's vocabulary", ()),
        (by_chunks, "bad", "no usage: chunks are taken for tokens", "ITL, TPOT, tokens/s: of chunks, not of tokens; name the model's vocabulary with --tokenizer", ("itl", "tpot", "tokens")),
        (not f["chunk_tokens_known"], "note", f"{source}; {ratio} on average, how many in which is not said", "ITL: not given, chunks are no tokens; ICL, TPOT: trusted; --tokenizer with the model's vocabulary may tell", ("itl",)),
        (f["tokens_per_chunk"] > SEVERAL, "ok", f"{source}; {ratio} on average", "ITL: a chunk's gap is shared out among its tokens; ICL: what a reader sees", ()),
        (True, "ok", f"{source}; one token in a chunk", "ITL: of tokens; tokens/s: the server's own count", ()),
    ], "output length": [
        (own and got != asked, "note", f"{length}; --extra-body has {', '.join(own)}", "your own option decides, not the plan", ("tokens",) if got > asked else ()),
        (doubt or (got != asked and by_chunks), "note", f"{length}, as far as {tells}", "whether planned output lengths are kept cannot be said", ()),
        (got > asked, "bad", f"{length}: {f['max_tokens_field']} is not obeyed", "the load is another one than planned", ("tokens",)),
        (got < asked and f["finish_reason"] == "length", "note", f"{length}: the server has a limit of its own", "answers are shorter than planned", ()),
        (got < asked, "note", f"{length}: ignore_eos is {'not obeyed' if taken else 'refused'}", ends, ()),
        (not taken, "note", f"{length}; ignore_eos is refused", ends, ()),
        (True, "ok", length, "planned output lengths are kept", ()),
    ], "reasoning": [
        (counted > got, "note", f"{counted} tokens are counted, of {got} in all", "cannot be: see token counts", ()),
        (not counted and not f["reasoning_sent"], "ok", "none", "TTFT: the answer's first token" if chunks else "TTFT: none", ()),
        (not f["reasoning_sent"], "note", f"{counted} tokens are counted and not sent", "TTFT: with the thinking; ITL, TPOT: of the visible tokens", ()),
        (True, "note", f"comes first; {f'the answer after {seconds(answer_s)}' if answer_s else 'no answer within these tokens'}", "TTFT: the first reasoning token; for the answer's there is --slo first_answer_p99=T", ()),
    ]}  # fmt: skip


def _prompt(f: Facts) -> dict[str, list[Case]]:
    planned, counted = f["input_tokens_planned"], f["input_tokens"] or 0
    silent = f["input_tokens"] is None
    said = "the server does not say what it counts" if silent else f"{counted:,} counted by the server"
    length = f"{planned:,} tokens planned, {said}"
    if f["tokens_per_word"]:
        length += f": {f['overhead_tokens']} for its template, {f['tokens_per_word']:.3g} for a word"
    new, again = f["cached_tokens_new"], f["cached_tokens_again"]
    unique = "a run's prompts are unique: none is cached unless the workload shares prefixes"
    new_s, again_s, wanted = f["ttft_new_s"], f["ttft_again_s"], f["input_tokens_wanted"]
    speed = "is no faster" if again_s else "has no TTFT to compare"
    if again_s and new_s > max(SPEEDUP * again_s, again_s + SPEEDUP_MIN_S):
        speed = f"takes {seconds(again_s)} instead of {seconds(new_s)}"
    if cut := f["max_model_len"] and wanted > planned:
        length += f"; the workload's {wanted:,} are cut to the model's context of {f['max_model_len']:,}"
    return {"input length": [
        (silent, "note", length, f"input lengths: in {'words' if f['vocabulary'] is None else f['vocabulary']}, the server's tokens may be others", ()),
        (abs(counted - planned) > LENGTHS_OFF_SHARE * planned, "bad", length, "prompts are not as long as the workload has them", ("tokens",)),
        (cut, "note", length, "a run cuts its requests too: they are not as long as the workload has them", ()),
        (True, "ok", length, "planned input lengths are the server's own count", ()),
    ], "prompt cache": [
        (new > LENGTHS_OFF_SHARE * planned, "bad", f"{new:,} tokens of a prompt that was never sent before are said to be cached", "TTFT may be a cache's", ("ttft",)),
        (again, "ok", f"{again or 0:,} tokens of a repeated prompt are cached", f"{unique}; the report has the share", ()),
        (again == 0, "ok", "a repeated prompt is not cached", "TTFT: of whole prompts", ()),
        (True, "note", f"cached tokens are not said; a repeated prompt {speed}", f"{unique}; the report cannot tell the share", ()),
    ]}  # fmt: skip


def _machine(f: Facts) -> dict[str, list[Case]]:
    """What is beside the answers: the server's gauges, this machine's clock and limits."""
    delay_s, room = f["receive_delay_p50_s"], f["connections_room"]
    remedy = "taken out of all times" if f["timestamps"] == "kernel" else "--timestamps kernel takes it out"
    return {"metrics": [
        (f["gauges"], "ok", f"known gauges: {', '.join(f['gauges'])}", "the report has them beside the latencies", ()),
        (True, "note", "no /metrics with a known gauge", "the server's queue and KV cache are not in the report; --metrics-url names another page", ()),
    ], "clock": [
        (delay_s is None, "note", "no time stamps of the kernel on this way (TLS, a proxy, or not Linux)", "times are those of the read; what this machine adds is not measured", ()),
        (True, "ok" if (delay_s or 0.0) <= SLOW_CLIENT_S else "note", f"reads are {seconds(delay_s)} behind the kernel (median; at most {seconds(f['receive_delay_max_s'])})", f"what this machine adds while idle; {remedy}", ()),
    ], "open files": [
        (room is None, "ok", "no limit", "no load is refused for want of connections", ()),
        (True, "ok" if (room or 0) >= FEW_CONNECTIONS else "note", f"room for {room or 0:,} connections in each process", "with more in flight requests fail: raise it with ulimit -n, or use --workers", ()),
    ], "receive path": [
        (f["compiled"], "ok", "compiled", "one core receives tens of thousands of tokens a second", ()),
        (True, "note", "in Python: it was installed without a C compiler, or this is no Linux", "a core receives half as many tokens a second; a run says when that was its limit", ()),
    ]}  # fmt: skip
