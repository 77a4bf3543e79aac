"""The key figures of a summary, each as a line of words: value, interval, and what it rests on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ampacity.analysis.capacity.fleet import AT_USABLE, instances_text
from ampacity.reports.charts.burst import burst_findings
from ampacity.reports.charts.outage import outage_findings
from ampacity.reports.render.figures import (
    BOUNDS,
    DASH,
    Finding,
    counted,
    exact,
    gpu_price,
    interval,
    least_of,
    loads_of,
    offered_at,
    peak_text,
    rate,
    reason_of,
    seconds,
    share,
    significant,
)

CROSSING = {
    "measured": "a stage was measured at this load",
    "verified": "the highest load shown to meet the SLOs; the estimate from all stages is too wide",
    "interpolated": "interpolated between the stages on both sides of the limit",
    "saturated": "the closed loop saturates there: an upper limit",
    "pooled": "from all open stages together, each by what it is worth",
    "lower_bound": "a lower bound: no stage violated the SLO",
    "none": "no stage met the SLO",
}
CLOSED = "found with a closed loop, in which users wait for the server: open arrivals violate the SLO at a lower rate"
METHODS = {
    "p99_p50_divergence": "p99/p50 divergence",
    "bounds": "asymptotic bounds",
}
METRICS = {"ttft_from_schedule_s": "TTFT", "e2e_from_schedule_s": "E2E"}


def findings(summary: Mapping[str, Any]) -> list[Finding]:
    if summary.get("burst"):
        return [
            *outage_findings(summary),
            *burst_findings(summary["burst"]),
            *_network(summary.get("network") or {}),
            _client(summary),
        ]
    return [
        *outage_findings(summary),
        usable_rate(summary),
        _c_max(summary),
        _knee(summary.get("knee") or {}),
        _gap(summary.get("littles_law") or {}),
        _goodput(summary),
        _fleet(summary.get("fleet") or {}),
        *_network(summary.get("network") or {}),
        _client(summary),
    ]


def _sentence(*parts: str | None) -> str:
    return "; ".join(part.strip().rstrip(".") for part in parts if part)


def usable_rate(summary: Mapping[str, Any]) -> Finding:
    held = summary.get("capacity") or {}
    if held.get("capacity_rps") is None:
        return Finding("Capacity", DASH, None, reason_of(held, "capacity_rps"))
    first = [held.get("binding_slo"), *(held.get("binding_or") or [])]
    binding = f"bound by {' or '.join(first)}" if first[0] else None
    closed = CLOSED if held.get("c_max_basis") == "closed" else None
    verified = held.get("verified_rps")
    shown = verified and f"verified to {rate(verified)}, the highest load shown to meet every SLO"
    note = _sentence(binding, CROSSING.get(str(held.get("crossing"))), shown, closed)
    bounds = (
        None
        if held.get("crossing") == "saturated"
        else interval(held.get("capacity_rps_ci"), unit="req/s")
    )
    return Finding(
        "Capacity",
        BOUNDS.get(str(held.get("crossing")), "") + rate(held["capacity_rps"]),
        bounds and f"{_interval(held)} {bounds}",
        note,
    )


def _c_max(summary: Mapping[str, Any]) -> Finding:
    held = summary.get("capacity") or {}
    if held.get("c_max") is None:
        return Finding("C_max", DASH, None, reason_of(held, "c_max"))
    basis = {
        "open": "open loop: mean concurrency at the capacity",
        "closed": "closed loop: the set concurrency"
        if held.get("users") in (None, held["c_max"])
        else f"closed loop: mean concurrency of {counted(held['users'], 'user')}, who pause between requests",
    }.get(str(held.get("c_max_basis")), f"basis: {held.get('c_max_basis')}")
    bounds = interval(held.get("c_max_ci"), unit="in flight")
    value = f"{least_of(held)}{significant(held['c_max'])} in flight"
    other = held.get("closed") or {}
    if other.get("c_max") is not None:
        least = "at least " if other.get("crossing") == "lower_bound" else ""
        basis += f"; in a closed loop {least}{counted(other.get('users') or round(other['c_max']), 'user')} at {rate(other['capacity_rps'])}"
    return Finding("C_max", value, bounds and f"{_interval(held)} {bounds}", basis)


def _interval(capacity: Mapping[str, Any]) -> str:
    return "95 % interval" if capacity.get("crossing") == "pooled" else "interval"


def _knee(knee: Mapping[str, Any]) -> Finding:
    if knee.get("rps") is None and knee.get("concurrency") is None:
        return Finding("Knee", DASH, None, _in_words(reason_of(knee, "concurrency")))
    concurrency, rps = knee.get("concurrency"), knee.get("rps")
    at = [] if concurrency is None else [f"{significant(concurrency)} in flight"]
    at += [] if rps is None else [rate(rps)]
    spans = [(knee.get("region"), "in flight"), (knee.get("region_rps"), "req/s")]
    region = ", ".join(text for span, unit in spans if (text := interval(span, unit=unit)))
    methods = [_method(name, found) for name, found in (knee.get("methods") or {}).items()]
    note = _sentence(*methods, "a region between loads of the sweep, not a limit")
    return Finding("Knee", " at ".join(at), region and f"region {region}", note)


def _in_words(text: str) -> str:
    """``text`` without the names that the summary gives to methods and metrics."""
    for name, label in (METHODS | METRICS).items():
        text = re.sub(rf"(?<!asymptotic )\b{name}\b", label, text)
    return text


def _method(name: str, found: Mapping[str, Any]) -> str:
    label = METHODS.get(name, name.replace("_", " "))
    if found.get("concurrency") is None:
        return f"{label}: {_in_words(reason_of(found, 'concurrency'))}"
    return f"{label}: {significant(found['concurrency'])} in flight"


def _gap(law: Mapping[str, Any]) -> Finding:
    label = "Little's Law gap"
    if law.get("gap") is None:
        return Finding(label, DASH, None, reason_of(law, "gap"))
    state = {True: "good", False: "bad", None: "unsure"}[law.get("representative")]
    verdict = law.get("reason") or "representative: 2 or less"
    metric = str(law["limit_metric"]).upper()
    ceiling = (
        f"ceiling {rate(law['ceiling_rps'])} = C_max ÷ {metric} limit {exact(law['limit_s'])} s"
    )
    consistency = None
    if law.get("consistency") is not None:
        consistency = f"L ÷ λW is {significant(law['consistency'])}"
    counted_there = (law.get("server") or {}).get(
        "reason"
    )  # only where it is another figure than ours
    note = _sentence(verdict, ceiling, consistency, counted_there)
    return Finding(label, significant(law["gap"]), None, note, state)


def _goodput(summary: Mapping[str, Any]) -> Finding:
    goodput = summary.get("goodput") or {}
    if goodput.get("peak_rps") is None:
        return Finding("Goodput peak", DASH, None, reason_of(goodput, "peak_rps"))
    pooled = goodput.get("basis") == "pooled"
    note = _sentence(
        "from all open stages together; no stage need have been run there"
        if pooled
        else "of the best stage, which chance favours",
        f"at {offered_at(goodput)} req/s offered"
        if goodput.get("at_offered_rps") is not None
        else None,
        "requests that met every SLO",
        *(
            f"{s['text']} counts a request where {share(s['quantile'])} of its own gaps are within the limit, the verdict where that share "
            "of all gaps of the stage is: they may differ"
            for s in [s for s in summary.get("slos") or [] if s["metric"] in ("itl", "icl")][:1]
        ),
        "whether their answers were right stands under Accepted answers"
        if _is_accepted(summary)
        else None,
    )
    bounds = interval(goodput.get("peak_rps_ci"), unit="req/s")
    return Finding("Goodput peak", peak_text(goodput), bounds and f"95 % interval {bounds}", note)


def _is_accepted(summary: Mapping[str, Any]) -> bool:
    return any(
        (s.get("accepted") or {}).get("requests") is not None for s in summary.get("stages") or []
    )


def _fleet(fleet: Mapping[str, Any]) -> Finding:
    cost = fleet.get("cost_per_million_output_tokens")
    if cost is not None:
        price = gpu_price(fleet["tensor_parallel"], fleet["gpu_hour_usd"])
        cost = f"${significant(cost)} for a million output tokens of {AT_USABLE}, at {price}"
    if fleet.get("instances") is None:
        return Finding("Fleet", DASH, None, _sentence(reason_of(fleet, "instances"), cost))
    bear = "bears" if fleet["one_replica_down"] == 1 else "bear"
    sized = [
        f"for a peak of {exact(fleet['peak_rps'])} req/s",
        f"{counted(fleet['instances_before_safety'], 'instance')} × safety {exact(fleet['safety_factor'])}",
        f"{counted(fleet['tensor_parallel'], 'GPU')} an instance",
        f"{counted(fleet['one_replica_down'], 'instance')} {bear} the loss of one",
    ]
    value = f"{instances_text(fleet)}, {counted(fleet['gpus'], 'GPU')}"
    return Finding("Fleet", value, None, _sentence(*sized, cost))


def error_bound(summary: Mapping[str, Any]) -> str | None:
    """What the load generator itself adds to the percentiles, a sentence; None where that was not measured."""
    audit, worst = summary.get("audit") or {}, _worst(summary)
    kernel, lag = audit.get("receive_delay_p99_s"), audit.get("loop_lag_p99_s")
    if audit.get("dated_by_kernel") and audit.get("coalesced_share") is not None:
        return (
            "The kernel dates what arrives, so that the load generator's delay in reading adds nothing to these times; "
            f"{share(audit['coalesced_share'])} of the tokens were read together with the one before, which makes the gap between the two 0 ({worst})."
        )
    if kernel is not None:
        return f"The load generator adds at most {seconds(kernel)} to 99 of 100 of these times (p99 of read time − kernel time, {worst})."
    if lag is not None:
        return f"In one reading of a hundred {seconds(lag)} or more can be the load generator's own (p99 of its loop's lag, {worst})."
    return None


def _worst(summary: Mapping[str, Any]) -> str:
    """Whose figures the audit's are: of the stages that the client did not limit, but of all where it limited each."""
    limited = (summary.get("audit") or {}).get("client_limited_stages") or []
    some_count = any(s.get("index") not in limited for s in summary.get("stages") or [])
    return "worst stage that counts" if limited and some_count else "worst stage"


NETWORK_SHARE = 0.25  # of TTFT, from which on it is no detail


def _network(network: Mapping[str, Any]) -> list[Finding]:
    """The round trip beside TTFT; nothing where none was measured."""
    if network.get("request_s") is None:
        return []
    connecting = network.get("connect_s")
    part = network.get("share")
    note = _sentence(
        f"connecting takes {seconds(connecting)}" if connecting is not None else None,
        f"{share(part)} of the lowest TTFT p50 ({seconds(network['ttft_p50_s'])}), which includes it"
        if part is not None
        else network.get("share_reason"),
    )
    state = "unsure" if (part or 0.0) > NETWORK_SHARE else ""
    return [
        Finding(
            "Network",
            f"{seconds(network['request_s'])} for the smallest request",
            None,
            note,
            state,
        )
    ]


def _client(summary: Mapping[str, Any]) -> Finding:
    audit = summary.get("audit") or {}
    limited, again = audit.get("client_limited"), audit.get("repeated_stages") or []
    facts = []
    if audit.get("slip_p99_s") is not None:
        facts.append(
            f"requests left {seconds(audit['slip_p99_s'])} late at p99 in the {_worst(summary)}, its warm-up included"
        )
    if audit.get("loop_lag_p99_s") is not None:
        facts.append(f"loop lag p99 at most {seconds(audit['loop_lag_p99_s'])}")
    if audit.get("cpu_fraction") is not None:
        facts.append(f"CPU at most {share(audit['cpu_fraction'])} of a core")
    if limited is None:
        return Finding(
            "Load generator", DASH, None, _sentence(reason_of(audit, "client_limited"), *facts)
        )
    if not limited and summary.get("predicted"):
        return Finding(
            "Load generator",
            "kept up",
            None,
            "in virtual time every request leaves when it is due",
            "good",
        )
    if not limited:
        if again:
            facts.insert(
                0, f"disturbed by other work at {loads_of(summary, again)}, which was repeated"
            )
        return Finding("Load generator", "kept up", None, _sentence(*facts), "good")
    loads = loads_of(
        summary, [i for i in audit.get("client_limited_stages") or [] if i not in again]
    )
    what = f"nothing measured at {loads} is a finding" if loads else "its stages are no findings"
    return Finding("Load generator", "was the limit", None, _sentence(what, *facts), "bad")
