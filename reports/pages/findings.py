"""The key figures of a summary: value, interval, and what each rests on."""

from __future__ import annotations

import re
from math import ceil

from ampacity.analysis.capacity.fleet import NO_PEAK, instances_text
from ampacity.analysis.capacity.fleet_figures import FleetInputs, fleet_figures
from ampacity.analysis.capacity.fleet_figures import exact as as_written
from ampacity.analysis.capacity.levels import usd
from ampacity.analysis.contract.capacity import Fleet, Knee, KneeMethod, LittlesLawGap, LoopCapacity
from ampacity.analysis.contract.summary import Audit, Network, SloLimit, Summary
from ampacity.analysis.decision.inputs import is_wide
from ampacity.analysis.slo import GAP_METRICS
from ampacity.reports.charts.burst import burst_findings
from ampacity.reports.charts.outage import outage_findings
from ampacity.reports.pages.soak import soak_findings
from ampacity.reports.render.figures import (
    BOUNDS,
    DASH,
    NO_REASON,
    Finding,
    counted,
    exact,
    gpu_price,
    interval,
    least_of,
    loads_of,
    most_answered,
    offered_at,
    peak_basis,
    peak_text,
    rate,
    seconds,
    share,
    significant,
)

CROSSING = {
    "measured": "a stage was measured at this load",
    "verified": (
        "the highest load shown to meet the SLOs; the estimate from all stages is too wide"
    ),
    "interpolated": "interpolated between the stages on both sides of the limit",
    "saturated": "the closed loop saturates there: an upper limit",
    "pooled": (
        "from all open-loop stages together, those near the limit most; other days and machines are "
        "not in the interval"
    ),
    "lower_bound": "a lower bound: no stage violated the SLO",
    "none": "no stage met the SLO",
}
CLOSED = (
    "found with a closed loop, in which users wait for the server: open arrivals violate the SLO "
    "at a lower rate"
)
METHODS = {"p99_p50_divergence": "p99/p50 divergence", "bounds": "asymptotic bounds"}
SET_PEAK = "set a peak in What if? or with --peak-rps"
TRUST = ("Load generator", "Little's Law", "Network")
METRICS = {"ttft_from_schedule_s": "TTFT", "e2e_from_schedule_s": "E2E"}
NETWORK_SHARE = 0.25  # of TTFT, above which the network is highlighted


def findings(summary: Summary) -> list[Finding]:
    """Return what a decision rests on, then what tells whether to trust it (``TRUST``)."""
    found = outage_findings(summary)
    if summary.burst:
        found += burst_findings(summary.burst)
    elif summary.soak:
        found += soak_findings(summary)
    else:
        found += [
            usable_rate(summary),
            _fleet(summary.fleet, summary.capacity.verified_rps),
            _goodput(summary),
            _c_max(summary),
            _knee(summary.knee),
            _gap(summary.littles_law),
        ]
    return [*found, *_network(summary.network), _client(summary)]


def _sentence(*parts: str | None) -> str:
    return "; ".join(part.strip().rstrip(".") for part in parts if part)


def usable_rate(summary: Summary) -> Finding:
    """Return the capacity, the highest load that still meets the SLOs."""
    held = summary.capacity
    if held.capacity_rps is None:
        return Finding("Capacity", DASH, None, held.reason or NO_REASON)
    shown = None if held.crossing == "saturated" else held.capacity_rps_ci
    bounds = interval(shown, unit="req/s")
    bounds = bounds and f"{_interval(held)} {bounds}{most_answered(summary)}"
    value = BOUNDS.get(held.crossing, "") + rate(held.capacity_rps)
    verified = f"verified to {rate(held.verified_rps)}, the highest load shown to meet every SLO"
    wide = held.crossing == "pooled" and held.verified_rps and is_wide(held.capacity_rps, shown)
    if wide:
        value, bounds = f"{rate(held.verified_rps)} verified", f"{value}, {bounds}"
    note = _sentence(
        held.binding_slo and f"bound by {held.binding_text}",
        CROSSING[held.crossing],
        verified if held.verified_rps and not wide else None,
        CLOSED if held.c_max_basis == "closed" else None,
    )
    return Finding("Capacity", value, bounds, note)


def _c_max(summary: Summary) -> Finding:
    held, other = summary.capacity, summary.capacity.closed
    if held.c_max is None:
        return Finding("C_max", DASH, None, held.reason or NO_REASON)
    if held.c_max_basis == "open":
        basis = "open loop: mean concurrency at the capacity"
    elif held.users in (None, held.c_max):
        basis = "closed loop: the set concurrency"
    else:
        users = counted(held.users, "user")
        basis = f"closed loop: mean concurrency of {users}, who pause between requests"
    if other and other.c_max is not None:
        least = "at least " if other.crossing == "lower_bound" else ""
        users = counted(other.users or round(other.c_max), "user")
        basis += f"; in a closed loop {least}{users} at {rate(other.capacity_rps)}"
    bounds = interval(held.c_max_ci, unit="in flight")
    value = f"{least_of(held)}{significant(held.c_max)} in flight"
    return Finding("C_max", value, bounds and f"{_interval(held)} {bounds}", basis)


def _interval(capacity: LoopCapacity) -> str:
    return "95 % interval" if capacity.crossing == "pooled" else "interval"


def _knee(knee: Knee) -> Finding:
    if knee.rps is None and knee.concurrency is None:
        return Finding("Knee", "not found", None, _in_words(knee.reason or NO_REASON))
    at = [] if knee.concurrency is None else [f"{significant(knee.concurrency)} in flight"]
    at += [] if knee.rps is None else [rate(knee.rps)]
    spans = [interval(knee.region, unit="in flight"), interval(knee.region_rps, unit="req/s")]
    region = ", ".join(text for text in spans if text)
    methods = [_method(name, found) for name, found in knee.methods.items()]
    note = _sentence(*methods, "a region between loads of the sweep, not a limit")
    return Finding("Knee", " at ".join(at), region and f"region {region}", note)


def _in_words(text: str) -> str:
    """Replace the names that the summary gives to methods and metrics."""
    for name, label in (METHODS | METRICS).items():
        text = re.sub(rf"(?<!asymptotic )\b{name}\b", label, text)
    return text


def _method(name: str, found: KneeMethod) -> str:
    label = METHODS.get(name, name.replace("_", " "))
    if found.concurrency is None:
        return f"{label}: {_in_words(found.reason or NO_REASON)}"
    return f"{label}: {significant(found.concurrency)} in flight"


def _gap(law: LittlesLawGap) -> Finding:
    label = "Little's Law"
    looked = f"L ÷ λW = {significant(law.consistency)}" if law.consistency else None
    agree = (
        "1 where the number in flight is rate × time; the median of the stages whose queue did not "
        "grow to the end"
    )
    if law.gap is None:
        return Finding(label, looked or DASH, None, agree if looked else law.reason or NO_REASON)
    ceiling = f"{rate(law.ceiling_rps)} = C_max ÷ {str(law.limit_metric).upper()}"
    note = _sentence(
        law.reason or "representative: 2 or less",
        f"ceiling {ceiling} limit {exact(law.limit_s)} s",
        looked and f"{looked} ({agree})",
        law.server.reason if law.server else None,  # only where its figure is another than ours
    )
    state = {True: "good", False: "bad", None: "unsure"}[law.representative]
    return Finding(label, f"gap {significant(law.gap)}", None, note, state)


def _goodput(summary: Summary) -> Finding:
    goodput = summary.goodput
    if goodput.peak_rps is None:
        return Finding("Goodput peak", DASH, None, goodput.reason or NO_REASON)
    at = offered_at(goodput)
    gaps = next((slo for slo in summary.slos if slo.metric in GAP_METRICS), None)
    judged = any(s.accepted.requests is not None for s in summary.stages)
    note = _sentence(
        peak_basis(summary)
        if goodput.basis == "pooled"
        else "of the best stage, which chance favours",
        at and f"at {at} req/s offered",
        "counts requests that met every SLO",
        _gaps_counted(gaps) if gaps else None,
        "whether their answers were right stands under Accepted answers" if judged else None,
    )
    bounds = interval(goodput.peak_rps_ci, unit="req/s")
    return Finding("Goodput peak", peak_text(goodput), bounds and f"95 % interval {bounds}", note)


def _gaps_counted(slo: SloLimit) -> str:
    return (
        f"{slo.text} is applied to the gaps of each request here, and to all gaps of a stage in the "
        "verdict"
    )


def _fleet(fleet: Fleet, verified_rps: float | None) -> Finding:
    cost = None
    if fleet.cost_per_million_output_tokens is not None and fleet.gpu_hour_usd is not None:
        each = usd(fleet.cost_per_million_output_tokens)
        price = gpu_price(fleet.tensor_parallel, fleet.gpu_hour_usd)
        cost = f"{each} per million output tokens if every instance is always full, at {price}"
    if fleet.instances is None:
        why = SET_PEAK if fleet.reason == NO_PEAK else fleet.reason or NO_REASON
        return Finding("Fleet", DASH, None, _sentence(why, cost))
    sized = [
        f"{counted(fleet.instances_before_safety, 'instance')} for the peak of "
        f"{exact(fleet.peak_rps)} req/s, the rest is reserve (safety factor "
        f"{exact(fleet.safety_factor)})",
        _at_verified(fleet, verified_rps) or _with_one_more(fleet),
        f"{counted(fleet.tensor_parallel, 'GPU')} an instance",
        _one_down(fleet),
    ]
    value = instances_text(fleet.instances, fleet.instances_ci)
    if (fleet.tensor_parallel or 1) > 1:
        value += f", {counted(fleet.gpus, 'GPU')}"
    return Finding("Fleet", value, None, _sentence(*sized, cost))


def _at_verified(fleet: Fleet, verified_rps: float | None) -> str | None:
    """Return the instances at the verified load, where they are more than the interval's."""
    if not verified_rps or not fleet.peak_rps or not fleet.safety_factor:
        return None
    given = FleetInputs(
        peak_rps=fleet.peak_rps, capacity_rps=verified_rps, safety_factor=fleet.safety_factor
    )
    needed = fleet_figures(given).instances
    known = [n for n in (fleet.instances, *(fleet.instances_ci or ())) if n]
    return f"{needed:,} at the verified {rate(verified_rps)}" if needed > max(known) else None


def _with_one_more(fleet: Fleet) -> str | None:
    """Return the instances where the peak needs one more of them, and below which capacity."""
    before = fleet.instances_before_safety
    if not before or not fleet.peak_rps or not fleet.safety_factor:
        return None
    needed = ceil((before + 1) * as_written(fleet.safety_factor))
    reserve = f", with the reserve {needed:,}" if needed > before + 1 else ""
    return f"below {rate(fleet.peak_rps / before)} each the peak takes {before + 1:,}{reserve}"


def _one_down(fleet: Fleet) -> str:
    needed, bought = fleet.one_replica_down or 0, fleet.instances or 0
    if needed <= bought:
        return "enough to carry the peak with one down"
    return f"{counted(needed - bought, 'instance')} more to carry the peak with one down"


def error_bound(summary: Summary) -> str | None:
    """Return what the load generator adds to the percentiles, or None if not measured."""
    audit, worst = summary.audit, _worst(summary)
    if audit.dated_by_kernel and audit.coalesced_share is not None:
        return (
            "Timestamps come from the kernel: the client's read delay is excluded. "
            f"{share(audit.coalesced_share)} of the tokens were coalesced with the one before, "
            f"a gap of 0 ({worst})."
        )
    if audit.receive_delay_p99_s is not None:
        return (
            f"The load generator adds at most {seconds(audit.receive_delay_p99_s)} to 99 of 100 of "
            f"these times (p99 of read time − kernel time, {worst})."
        )
    if audit.loop_lag_p99_s is not None:
        return (
            f"In one reading of a hundred {seconds(audit.loop_lag_p99_s)} or more can be the load "
            f"generator's own (p99 of its loop's lag, {worst})."
        )
    return None


def _worst(summary: Summary) -> str:
    """Return which stages the audit is of: all, where the client limited each."""
    limited = summary.audit.client_limited_stages
    some_count = any(s.index not in limited for s in summary.stages)
    return "worst stage that counts" if limited and some_count else "worst stage"


def _network(network: Network) -> list[Finding]:
    """Return the round trip beside TTFT, where one was measured."""
    if network.request_s is None:
        return []
    connecting, part = network.connect_s, network.share
    lowest = f"the lowest TTFT p50 ({seconds(network.ttft_p50_s)}), which includes it"
    note = _sentence(
        f"connecting takes {seconds(connecting)}" if connecting is not None else None,
        network.share_reason if part is None else f"{share(part)} of {lowest}",
    )
    state = "unsure" if (part or 0.0) > NETWORK_SHARE else ""
    value = f"{seconds(network.request_s)} for the smallest request"
    return [Finding("Network", value, None, note, state)]


def _client(summary: Summary) -> Finding:
    audit, label = summary.audit, "Load generator"
    facts = _audit_facts(audit, _worst(summary))
    if audit.client_limited is None:
        reason = audit.client_limited_reason or NO_REASON
        return Finding(label, DASH, None, _sentence(reason, *facts))
    if not audit.client_limited:
        note = _sentence(*facts)
        if summary.predicted:
            note = "in virtual time every request leaves when it is due"
        elif audit.repeated_stages:
            loads = loads_of(summary, audit.repeated_stages)
            note = _sentence(f"disturbed by other work at {loads}, which was repeated", *facts)
        elif some := len(audit.client_limited_stages):
            left_out = f"{counted(some, 'window')} in which it did not are left out"
            note = _sentence(left_out, *facts)
        clean = not (summary.predicted or audit.repeated_stages or audit.client_limited_stages)
        return Finding(label, "kept up" + ", not disturbed" * clean, None, note, "good")
    limited = [i for i in audit.client_limited_stages if i not in audit.repeated_stages]
    loads = loads_of(summary, limited)
    what = f"nothing measured at {loads} is a finding" if loads else "its stages are no findings"
    return Finding(label, "was the limit", None, _sentence(what, *facts), "bad")


def _audit_facts(audit: Audit, worst: str) -> list[str]:
    facts = []
    if audit.slip_p99_s is not None:
        late = seconds(audit.slip_p99_s)
        facts.append(f"requests left {late} late at p99 in the {worst}, its warm-up included")
    if audit.loop_lag_p99_s is not None:
        facts.append(f"loop lag p99 at most {seconds(audit.loop_lag_p99_s)}")
    if audit.cpu_fraction is not None:
        facts.append(f"CPU at most {share(audit.cpu_fraction)} of a core")
    return facts
