"""Derive from an endpoint's examination what can be trusted in a benchmark of it. Pure."""

import math
from dataclasses import replace
from statistics import median

from ampacity.analysis.metrics.lengths import LENGTHS_OFF_SHARE
from ampacity.experiments.doctor import DoctorResult
from ampacity.experiments.stages.preflight import typical_lengths
from ampacity.loadgen.probe.diagnosis import Finding, answer_facts, choose, seconds_between
from ampacity.loadgen.probe.diagnosis_rules import (
    METRICS,
    OF_STREAM,
    Facts,
    duration_text,
    stream_cases,
    text_cases,
)
from ampacity.loadgen.probe.kernel_room import STREAMS, short_settings
from ampacity.loadgen.rundir.records import CACHE
from ampacity.workloads.prompts.tokenizers import WORD_TOKENIZERS

SPEEDUP = 2.0  # of a repeated prompt's TTFT, which only a cache explains
SPEEDUP_MIN_S = 0.005  # less may be noise
SLOW_CLIENT_S = 0.001
NETWORK_SHARE = 0.25  # of a short answer's TTFT, above which the network matters


def checkup(seen: DoctorResult) -> tuple[list[Finding], Facts]:
    """Return the checks, in the order of a request's life, and the numbers behind them."""
    f = _facts(seen)
    text = text_cases(f) if f["api"] != "embeddings" else {}
    answer = choose(stream_cases(f) | text)
    checks = [
        _connection(f),
        network(f),
        _model(f),
        *(_with_repeats(check, f) if check.name == "stream" else check for check in answer),
        _input_length(f),
        _prompt_cache(f),
        _metrics(f),
        _clock(f),
        _receive_path(f),
        *short_settings(f),
    ]
    return checks, f


def trusted(checks: list[Finding]) -> dict[str, bool]:
    """Return for each metric whether no check spoils it."""
    return {metric: all(metric not in check.spoils for check in checks) for metric in METRICS}


def _with_repeats(stream: Finding, f: Facts) -> Finding:
    """Add to the stream's finding how often it was seen, and what else kept this machine busy."""
    found, means = stream.found, stream.means
    if f["answers"] > 1 and stream.verdict == "ok":
        found += f"; {f['answers'] - f['answers_alike']} of {f['answers']} answers not, by chance"
    elif f["answers"] > 1:
        found += f"; so in {f['answers_alike']} of {f['answers']} answers"
    if f["busy_with"] and stream.verdict != "ok" and f["chunks"] > 1:
        means = (
            f"this machine was busy with other work ({', '.join(f['busy_with'])}), which may be "
            f"the whole reason: stop that, and repeat doctor. Else {means}"
        )
    if 0 < f["bodies"] < f["good"]:
        found += f"; {f['bodies']} of {f['good']} answers came as one body, not streamed"
        means = (
            "some replica or gateway does not stream: TTFT and ITL are of those that do, or mixed"
        )
        return Finding("stream", "bad", found, means, OF_STREAM)
    return replace(stream, found=found, means=means)


def _facts(seen: DoctorResult) -> Facts:
    settings, served, how = seen.settings, seen.probe.served, seen.probe.calibration
    answer, short, again = seen.answer, seen.short, seen.again
    vocabulary = None if settings.tokenizer in WORD_TOKENIZERS else settings.tokenizer
    shape = replace(seen.probe.shape, api=settings.api, extra=settings.extra_body)
    shown = answer_facts(answer, shape, vocabulary, seen.thinks)
    ttfts = (seconds_between(r, "started_ns", "first_token_ns") or 0.0 for r in (short, again))
    new_s, again_s = ttfts
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
        "bodies": seen.bodies,
        "good": seen.good,
        "round_trip_s": seen.probe.network.request_s,
        "tcp_connect_s": seen.probe.network.connect_s,
        "model": seen.probe.shape.model,
        "answered_by": [r.answered_by for r in (short, again, answer) if r.answered_by],
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
        "streams": _streams(seen),
        "workers": settings.workers or 1,
        "source_addresses": list(settings.sources),
        "here": seen.here,
        "connections_room": seen.room,
        "kernel": seen.kernel,
        "compiled": seen.compiled,
        "receive_delay_p50_s": median(seen.receive_delays_s) if seen.receive_delays_s else None,
        "receive_delay_max_s": max(seen.receive_delays_s, default=None),
    }


def _streams(seen: DoctorResult) -> int:
    """Return the answers in flight at the largest load that is named (Little's law), or STREAMS."""
    settings, answer = seen.settings, seen.answer
    answer_s = seconds_between(answer, "dispatched_ns", "last_token_ns") or 0.0
    longer = typical_lengths(settings, None)[1] / (answer.output_tokens_planned or 1)
    by_rate = math.ceil(max(settings.rates or (0.0,)) * answer_s * max(longer, 1.0))
    return max(settings.concurrency or (0,)) or by_rate or STREAMS


def _connection(f: Facts) -> Finding:
    who = " ".join(filter(None, (f["engine"], f["engine_version"]))) or f["server"]
    hops = filter(None, (f["proxy"] and f"the proxy {f['proxy']}", f["gateway"]))
    way = "".join(f" through {name}" for name in hops)
    found = f"{f['api']} over HTTP/1.1{way}, answered by {who or 'an unnamed server'}"
    new = (
        f"TTFT from schedule and E2E: with the set-up of a connection "
        f"({duration_text(f['connect_s'])}); TTFT: without"
    )
    if failures := f["failures"]:
        kinds = "; ".join(dict.fromkeys(failures))
        found = f"{found}; {len(failures)} of {f['asked']} requests failed ({kinds})"
        means = "a failed request counts as infinitely slow: a run shows how many there are"
        return Finding("connection", "bad", found, means, ())
    if f["connections"] == "new":
        found = f"{found}; a connection for each, as --connections new asks"
        return Finding("connection", "ok", found, new, ())
    if not f["kept_alive"]:
        silently = " although nothing announced it" if f["closed_unannounced"] else ""
        found = f"{found}; the connection is closed after each answer{silently}"
        return Finding("connection", "note", found, f"a run opens one for each request. {new}", ())
    means = "TTFT, E2E: without the set-up of connections"
    return Finding("connection", "ok", f"{found}; connections are kept alive", means, ())


def network(f: Facts) -> Finding:
    """Return the finding on the round trip, from the facts about it and the TTFTs."""
    trip_s = f["round_trip_s"]
    if trip_s is None:
        found = "the round trip could not be measured"
        return Finding("network", "note", found, "the network's share of TTFT is unknown", ())
    ttft_s = min(filter(None, (f["ttft_new_s"], f["ttft_again_s"])), default=0.0)
    found = (
        f"{duration_text(trip_s)} for the smallest request, "
        f"{duration_text(f['tcp_connect_s'])} to connect"
    )
    if trip_s > ttft_s > 0:
        found = f"{found}, longer than a short answer's TTFT ({duration_text(ttft_s)})"
        means = "the server works on the list of models: the network's share of TTFT is unknown"
        return Finding("network", "note", found, means, ())
    if trip_s > NETWORK_SHARE * ttft_s > 0:
        found = f"{found}, {trip_s / ttft_s:.0%} of a short answer's TTFT"
        means = (
            "TTFT and E2E include the way there and back: compare only what is measured from the "
            "same place"
        )
        return Finding("network", "note", found, means, ())
    return Finding("network", "ok", found, "TTFT and E2E include it", ())


def _model(f: Facts) -> Finding:
    return _answered_by(f) or _listed(f)


def _answered_by(f: Facts) -> Finding | None:
    """Return the finding on who answered by the answers' own account; None if it is the model."""
    model, names = f["model"], f["answered_by"]
    if CACHE in names:
        found = f"{names.count(CACHE)} of {len(names)} answers come from a cache of whole answers"
        return Finding("model", "bad", found, "the figures are the cache's", METRICS)
    if others := sorted({name for name in names if name != model}):
        found = f"{model} was asked for, {', '.join(others)} answers by its own account"
        means = "the figures are those of who answers: is it another name of the one you mean?"
        return Finding("model", "note", found, means, ())
    return None


def _listed(f: Facts) -> Finding:
    model, others, longest = f["model"], len(f["models"]) - 1, f["max_model_len"]
    if others < 0:
        found = f"{model} is answered; there is no list of models"
        means = "only its name says that the figures are this model's"
        return Finding("model", "note", found, means, ())
    if model not in f["models"]:
        found = f"{model} is answered, but the list has {', '.join(f['models'][:10])}"
        means = "the figures may be another model's: is this the one you mean?"
        return Finding("model", "bad", found, means, ())
    beside = f" beside {others} more" if others else ""
    context = f"; context {longest:,} tokens" if longest else ""
    return Finding(
        "model", "ok", f"{model} is served{beside}{context}", "the figures are this model's", ()
    )


def _input_length(f: Facts) -> Finding:
    planned, counted, wanted = (
        f["input_tokens_planned"],
        f["input_tokens"],
        f["input_tokens_wanted"],
    )
    by_server = (
        "the server does not report its count"
        if counted is None
        else f"{counted:,} counted by the server"
    )
    found = f"{planned:,} tokens planned, {by_server}"
    if f["tokens_per_word"]:
        found += f": {f['overhead_tokens']} for its template, {f['tokens_per_word']:.3g} for a word"
    cut = f["max_model_len"] and wanted > planned
    if cut:
        found += (
            f"; the workload's {wanted:,} are cut to the model's context of {f['max_model_len']:,}"
        )
    if counted is None:
        unit = "words" if f["vocabulary"] is None else f["vocabulary"]
        means = f"input lengths: in {unit}, the server's tokens may differ"
        return Finding("input length", "note", found, means, ())
    if abs(counted - planned) > LENGTHS_OFF_SHARE * planned:
        means = "prompts are not as long as the workload has them"
        return Finding("input length", "bad", found, means, ("tokens",))
    if cut:
        means = "a run cuts its requests too: they are not as long as the workload has them"
        return Finding("input length", "note", found, means, ())
    means = "planned input lengths are the server's own count"
    return Finding("input length", "ok", found, means, ())


def _prompt_cache(f: Facts) -> Finding:
    new, again = f["cached_tokens_new"], f["cached_tokens_again"]
    unique = "a run's prompts are unique: none is cached unless the workload shares prefixes"
    if new > LENGTHS_OFF_SHARE * f["input_tokens_planned"]:
        found = f"{new:,} tokens of a prompt that was never sent before are reported as cached"
        return Finding("prompt cache", "bad", found, "TTFT may be a cache's", ("ttft",))
    if again:
        found = f"{again:,} tokens of a repeated prompt are cached"
        return Finding("prompt cache", "ok", found, f"{unique}; the report has the share", ())
    if again == 0:
        found = "a repeated prompt is not cached"
        return Finding("prompt cache", "ok", found, "TTFT: of whole prompts", ())
    new_s, again_s = f["ttft_new_s"], f["ttft_again_s"]
    speed = "is no faster" if again_s else "has no TTFT to compare"
    if again_s and new_s > max(SPEEDUP * again_s, again_s + SPEEDUP_MIN_S):
        speed = f"takes {duration_text(again_s)} instead of {duration_text(new_s)}"
    found = f"no cached tokens reported; a repeated prompt {speed}"
    return Finding("prompt cache", "note", found, f"{unique}; the report cannot tell the share", ())


def _metrics(f: Facts) -> Finding:
    if f["gauges"]:
        found = f"known gauges: {', '.join(f['gauges'])}"
        return Finding("metrics", "ok", found, "the report has them beside the latencies", ())
    means = (
        "the server's queue and KV cache are not in the report; --metrics-url names another page"
    )
    return Finding("metrics", "note", "no /metrics with a known gauge", means, ())


def _clock(f: Facts) -> Finding:
    delay_s = f["receive_delay_p50_s"]
    if delay_s is None:
        found = "no kernel time stamps (not Linux)"
        means = "times are those of the read; what this machine adds is not measured"
        return Finding("clock", "note", found, means, ())
    found = (
        f"reads: median {duration_text(delay_s)} behind the kernel, most "
        f"{duration_text(f['receive_delay_max_s'])}"
    )
    kernel = f["timestamps"] == "kernel"
    remedy = "taken out of all times" if kernel else "--timestamps kernel takes it out"
    work = f"busy with other work ({', '.join(f['busy_with'])})" if f["busy_with"] else "idle"
    verdict = "ok" if delay_s <= SLOW_CLIENT_S else "note"
    return Finding("clock", verdict, found, f"what this machine adds while {work}; {remedy}", ())


def _receive_path(f: Facts) -> Finding:
    if f["compiled"]:
        means = "one core receives tens of thousands of tokens a second"
        return Finding("receive path", "ok", "compiled", means, ())
    found = "not compiled: it was installed without a C compiler, or this is not Linux"
    means = "a core receives half as many tokens a second; a run reports when that was its limit"
    return Finding("receive path", "note", found, means, ())
