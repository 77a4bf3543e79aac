"""What follows for a benchmark's figures from what an endpoint showed of itself. Pure."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from ampacity.analysis.warnings import LENGTHS_OFF_SHARE
from ampacity.experiments.doctor import DoctorResult
from ampacity.experiments.stages.preflight import typical_lengths
from ampacity.loadgen.probe.diagnosis import (
    METRICS,
    Case,
    Facts,
    Finding,
    answer_facts,
    choose,
    duration_text,
    seconds_between,
    stream_cases,
    text_cases,
)
from ampacity.workloads.prompts.tokenizers import WORD_TOKENIZERS

SPEEDUP = 2.0  # of a repeated prompt's TTFT that only a cache explains
SPEEDUP_MIN_S = 0.005  # less may be noise
SLOW_CLIENT_S = 0.001
NETWORK_SHARE = 0.25  # of a short answer's TTFT, from which on the way there is no detail
FEW_CONNECTIONS = 1000


def checkup(seen: DoctorResult) -> tuple[list[Finding], Facts]:
    """The checks, in the order of a request's life, and the numbers that they rest on."""
    f = _facts(seen)
    text = text_cases(f) if f["api"] != "embeddings" else {}
    checks = choose(_way(f) | stream_cases(f) | text | _prompt(f) | _machine(f))
    return [_repeated(check, f) if check.name == "stream" else check for check in checks], f


def _repeated(stream: Finding, f: Facts) -> Finding:
    """What is said of the stream, with how often it was so, and with what else this machine had to do."""
    found, means = stream.found, stream.means
    if f["answers"] > 1 and stream.verdict == "ok":
        found += f"; {f['answers'] - f['answers_alike']} of {f['answers']} answers not, by chance"
    elif f["answers"] > 1:
        found += f"; so in {f['answers_alike']} of {f['answers']} answers"
    if f["busy_with"] and stream.verdict != "ok" and f["chunks"] > 1:
        means = (
            f"this machine was busy with other work ({', '.join(f['busy_with'])}), which may be all of it: stop that, and "
            f"repeat doctor. Else {means}"
        )
    return replace(stream, found=found, means=means)


def trusted(checks: list[Finding]) -> dict[str, bool]:
    """By metric: whether no check spoils it."""
    return {metric: all(metric not in check.spoils for check in checks) for metric in METRICS}


def _facts(seen: DoctorResult) -> Facts:
    settings, served, how, answer = (
        seen.settings,
        seen.probe.served,
        seen.probe.calibration,
        seen.answer,
    )
    short, again = seen.short, seen.again
    vocabulary = None if settings.tokenizer in WORD_TOKENIZERS else settings.tokenizer
    shown = answer_facts(
        answer,
        replace(seen.probe.shape, api=settings.api, extra=settings.extra_body),
        vocabulary,
        seen.thinks,
    )
    new_s, again_s = (
        seconds_between(r, "started_ns", "first_token_ns") or 0.0 for r in (short, again)
    )
    return shown | {
        "engine": served.engine,
        "engine_version": served.engine_version,
        "server": served.server,
        "gateway": served.gateway,
        "proxy": seen.proxy and f"{seen.proxy.host}:{seen.proxy.port}",
        "kept_alive": seen.kept_alive,
        "connections": settings.connections,
        "closed_unannounced": seen.closed_unannounced,
        "connect_s": seconds_between(short, "dispatched_ns", "connected_ns"),
        "failures": list(seen.failures),
        "asked": seen.asked,
        "round_trip_s": seen.probe.network.request_s,
        "tcp_connect_s": seen.probe.network.connect_s,
        "model": seen.probe.shape.model,
        "models": list(served.models),
        "max_model_len": served.max_model_len,
        "ttft_grew_s": shown["ttft_s"] - max(new_s, again_s),
        "input_tokens_wanted": typical_lengths(settings, None)[0],
        "input_tokens_planned": answer.input_tokens_planned or 0,
        "input_tokens": answer.input_tokens,
        "overhead_tokens": how.overhead_tokens if how.measured else None,
        "tokens_per_word": how.tokens_per_word if how.measured else None,
        "cached_tokens_new": max(short.cached_tokens or 0, answer.cached_tokens or 0),
        "cached_tokens_again": again.cached_tokens,
        "answers": seen.answers,
        "answers_alike": seen.alike,
        "busy_with": list(seen.busy_with),
        "ttft_new_s": new_s,
        "ttft_again_s": again_s,
        "gauges": list(seen.gauges),
        "timestamps": settings.timestamps,
        "connections_room": seen.room,
        "compiled": seen.compiled,
        "receive_delay_p50_s": median(seen.receive_delays_s) if seen.receive_delays_s else None,
        "receive_delay_max_s": max(seen.receive_delays_s, default=None),
    }


def _way(f: Facts) -> dict[str, list[Case]]:
    who = (
        " ".join(filter(None, (f["engine"], f["engine_version"])))
        or f["server"]
        or "an unnamed server"
    )
    way = "".join(
        f" through {name}"
        for name in (f["proxy"] and f"the proxy {f['proxy']}", f["gateway"])
        if name
    )
    found = f"{f['api']} over HTTP/1.1{way}, answered by {who}"
    broken = " although nothing said so" if f["closed_unannounced"] else ""
    new = f"TTFT from schedule and E2E: with the set-up of a connection ({duration_text(f['connect_s'])}); TTFT: without"
    trip_s, ttft_s = (
        f["round_trip_s"],
        min(filter(None, (f["ttft_new_s"], f["ttft_again_s"])), default=0.0),
    )
    trip = f"{duration_text(trip_s)} for the smallest request and its answer, {duration_text(f['tcp_connect_s'])} to connect"
    far = (trip_s or 0.0) > NETWORK_SHARE * ttft_s > 0
    others, longest = len(f["models"]) - 1, f["max_model_len"]
    context = f"; context {longest:,} tokens" if longest else ""
    return {
        "connection": [
            (
                f["failures"],
                "bad",
                f"{found}; {len(f['failures'])} of {f['asked']} requests failed ({'; '.join(dict.fromkeys(f['failures']))})",
                "a failed request counts as infinitely slow: a run shows how many there are",
                (),
            ),
            (
                f["connections"] == "new",
                "ok",
                f"{found}; a connection for each, as --connections new asks",
                new,
                (),
            ),
            (
                not f["kept_alive"],
                "note",
                f"{found}; the connection is closed after each answer{broken}",
                f"a run opens one for each request. {new}",
                (),
            ),
            (
                True,
                "ok",
                f"{found}; connections are kept alive",
                "TTFT, E2E: without the set-up of connections",
                (),
            ),
        ],
        "network": [
            (
                trip_s is None,
                "note",
                "the round trip could not be measured",
                "what the network adds to TTFT is not known",
                (),
            ),
            (
                far,
                "note",
                f"{trip}, {(trip_s or 0.0) / max(ttft_s, 1e-9):.0%} of a short answer's TTFT",
                "TTFT and E2E include the way there and back: compare only what is measured from the same place",
                (),
            ),
            (True, "ok", trip, "TTFT and E2E include it", ()),
        ],
        "model": [
            (
                others < 0,
                "note",
                f"{f['model']} is answered; there is no list of models",
                "that the figures are this model's rests on its name",
                (),
            ),
            (
                f["model"] not in f["models"],
                "bad",
                f"{f['model']} is answered, but the list has {', '.join(f['models'][:10])}",
                "the figures may be another model's: is this the one you mean?",
                (),
            ),
            (
                True,
                "ok",
                f"{f['model']} is served{f' beside {others} more' if others else ''}{context}",
                "the figures are this model's",
                (),
            ),
        ],
    }


def _prompt(f: Facts) -> dict[str, list[Case]]:
    planned, counted = f["input_tokens_planned"], f["input_tokens"] or 0
    silent = f["input_tokens"] is None
    said = (
        "the server does not say what it counts" if silent else f"{counted:,} counted by the server"
    )
    length = f"{planned:,} tokens planned, {said}"
    if f["tokens_per_word"]:
        length += (
            f": {f['overhead_tokens']} for its template, {f['tokens_per_word']:.3g} for a word"
        )
    new, again = f["cached_tokens_new"], f["cached_tokens_again"]
    unique = "a run's prompts are unique: none is cached unless the workload shares prefixes"
    new_s, again_s, wanted = f["ttft_new_s"], f["ttft_again_s"], f["input_tokens_wanted"]
    speed = "is no faster" if again_s else "has no TTFT to compare"
    if again_s and new_s > max(SPEEDUP * again_s, again_s + SPEEDUP_MIN_S):
        speed = f"takes {duration_text(again_s)} instead of {duration_text(new_s)}"
    if cut := f["max_model_len"] and wanted > planned:
        length += (
            f"; the workload's {wanted:,} are cut to the model's context of {f['max_model_len']:,}"
        )
    return {
        "input length": [
            (
                silent,
                "note",
                length,
                f"input lengths: in {'words' if f['vocabulary'] is None else f['vocabulary']}, the server's tokens may be others",
                (),
            ),
            (
                abs(counted - planned) > LENGTHS_OFF_SHARE * planned,
                "bad",
                length,
                "prompts are not as long as the workload has them",
                ("tokens",),
            ),
            (
                cut,
                "note",
                length,
                "a run cuts its requests too: they are not as long as the workload has them",
                (),
            ),
            (True, "ok", length, "planned input lengths are the server's own count", ()),
        ],
        "prompt cache": [
            (
                new > LENGTHS_OFF_SHARE * planned,
                "bad",
                f"{new:,} tokens of a prompt that was never sent before are said to be cached",
                "TTFT may be a cache's",
                ("ttft",),
            ),
            (
                again,
                "ok",
                f"{again or 0:,} tokens of a repeated prompt are cached",
                f"{unique}; the report has the share",
                (),
            ),
            (again == 0, "ok", "a repeated prompt is not cached", "TTFT: of whole prompts", ()),
            (
                True,
                "note",
                f"cached tokens are not said; a repeated prompt {speed}",
                f"{unique}; the report cannot tell the share",
                (),
            ),
        ],
    }


def _machine(f: Facts) -> dict[str, list[Case]]:
    """What is beside the answers: the server's gauges, this machine's clock and limits."""
    delay_s, room = f["receive_delay_p50_s"], f["connections_room"]
    remedy = (
        "taken out of all times"
        if f["timestamps"] == "kernel"
        else "--timestamps kernel takes it out"
    )
    busy = (
        f"while busy with other work ({', '.join(f['busy_with'])})"
        if f["busy_with"]
        else "while idle"
    )
    return {
        "metrics": [
            (
                f["gauges"],
                "ok",
                f"known gauges: {', '.join(f['gauges'])}",
                "the report has them beside the latencies",
                (),
            ),
            (
                True,
                "note",
                "no /metrics with a known gauge",
                "the server's queue and KV cache are not in the report; --metrics-url names another page",
                (),
            ),
        ],
        "clock": [
            (
                delay_s is None,
                "note",
                "no time stamps of the kernel on this way (TLS, a proxy, or not Linux)",
                "times are those of the read; what this machine adds is not measured",
                (),
            ),
            (
                True,
                "ok" if (delay_s or 0.0) <= SLOW_CLIENT_S else "note",
                f"reads are {duration_text(delay_s)} behind the kernel (median; at most {duration_text(f['receive_delay_max_s'])})",
                f"what this machine adds {busy}; {remedy}",
                (),
            ),
        ],
        "open files": [
            (room is None, "ok", "no limit", "no load is refused for want of connections", ()),
            (
                True,
                "ok" if (room or 0) >= FEW_CONNECTIONS else "note",
                f"room for {room or 0:,} connections in each process",
                "with more in flight requests fail: raise it with ulimit -n, or use --workers",
                (),
            ),
        ],
        "receive path": [
            (
                f["compiled"],
                "ok",
                "compiled",
                "one core receives tens of thousands of tokens a second",
                (),
            ),
            (
                True,
                "note",
                "in Python: it was installed without a C compiler, or this is no Linux",
                "a core receives half as many tokens a second; a run says when that was its limit",
                (),
            ),
        ],
    }
