"""The one sentence at the top of the report."""

from collections.abc import Sequence

from ampacity.analysis.capacity.fleet import instances_text
from ampacity.analysis.capacity.knee import at_knee
from ampacity.analysis.capacity.levels import number_text
from ampacity.analysis.capacity.limit import DOWN_IN_EACH, NOT_SHOWN
from ampacity.analysis.capacity.search import shortfall
from ampacity.analysis.contract.burst import Burst
from ampacity.analysis.contract.capacity import Capacity
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import SloLimit, Summary
from ampacity.analysis.slo import parse_slo, verdict_word
from ampacity.analysis.stage_warnings import longer
from ampacity.analysis.warnings import TOO_LONG_SHARE
from ampacity.loadgen.rundir.records import FAILED_KINDS

MANY_FAIL = 0.1  # of the requests of the lowest load
STATUS_WORDS = {
    "unfinished": "were cut off unfinished",
    "cancelled": "were cancelled by the workload",
    "too_long": "were longer than the model's context",
}


def write_verdict(summary: Summary) -> str:
    """Return the verdict in words, from a summary with all other figures."""
    sentence = led(summary, _finding(summary))
    lacking = shortfall(summary.search, sentence) if summary.search else None
    if command := summary.next_command:
        lacking = f"This is likely to find one: {command}"
    return " ".join(filter(None, [sentence, lacking, _too_long(summary)]))


def led(summary: Summary, sentence: str = "") -> str:
    """Return a sentence behind what qualifies it: of a part, a prediction, a simulated server."""
    origin = "Predicted" if summary.predicted else "Simulated server" * summary.simulated
    for words in (summary.partial and f"Partial run ({summary.partial})", origin):
        if words:
            sentence = f"{words}: {sentence[:1].lower()}{sentence[1:]}"
    return sentence


def _too_long(summary: Summary) -> str | None:
    """Return the share of requests beyond the model's context, where it is more than a few."""
    n, of = summary.errors.get("too_long", 0), summary.requests
    if n <= TOO_LONG_SHARE * of:
        return None
    return (
        f"{n:,} of {of:,} requests ({n / of:.1%}) were longer than the model's context and are "
        "left out of every figure."
    )


def _finding(summary: Summary) -> str:
    outages, other = _outages(summary), other_load(summary) or _failures(summary)
    if outages and summary.capacity.reason == DOWN_IN_EACH:
        return outages
    return " ".join(filter(None, [outages, other, _of_the_load(summary)]))


def other_load(summary: Summary) -> str:
    """Warn that the load was not as planned, so that no capacity of the workload follows."""
    found = [text.partition(":")[0] for text in off_plan(summary).values()]
    return f"Not the load that was planned. {'. '.join(found)}." if found else ""


def off_plan(summary: Summary) -> dict[str, str]:
    """Return the warnings that the load was not as planned, by code."""
    given = summary.workload.get("input_plan", "requested") != "requested"  # texts, and no lengths
    codes = ("inputs_off", "strangers", *([] if given else ["lengths_off"]))
    return {w.code: w.text for w in summary.warnings if w.code in codes}


def _failures(summary: Summary) -> str:
    """Warn that many requests failed already at the lowest load."""
    open_stages = [s for s in summary.stages if s.requests and not s.outage]
    if not open_stages:
        return ""
    lowest = min(open_stages, key=lambda s: s.offered_rps or s.concurrency_set or 0)
    # a server that has too much to do is slow; a quota has its own sentence
    of_no_load = FAILED_KINDS - {"timeout", "rate_limited" if summary.quota else ""}
    counts = {kind: n for kind, n in lowest.errors.items() if n and kind in of_no_load}
    failed = sum(counts.values())
    if not MANY_FAIL * lowest.requests < failed < lowest.requests:  # all: there is no finding
        return ""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items(), key=lambda c: -c[1]))
    return (
        f"{failed / lowest.requests:.0%} of the requests failed at the lowest load ({kinds}): "
        "find out why before measuring."
    )


def _outages(summary: Summary) -> str:
    """Return one sentence per stage with an outage."""
    sentences = []
    for stage in summary.stages:
        if not stage.outage or stage.client_limited:
            continue
        several = len(summary.stages) > 1
        where = f"At {stage.name} the endpoint was" if several else "Endpoint"
        judged = summary.slos and not summary.burst
        verdict = f", {outage_verdict(stage)}" if judged else ""
        sentences.append(f"{where} {stage.outage.text}{verdict}.")
    return " ".join(sentences)


def outage_verdict(stage: Stage) -> str:
    """Return the verdict with and without an outage: ``SLO violated; outside of it met``."""
    assert stage.outage is not None
    met, outside = stage.slo_met, stage.outage.outside
    alike = met is outside.slo_met
    with_it = "met all the same" if met else verdict_word(met)
    without = verdict_word(outside.slo_met) + (" as well" if alike and not met else "")
    why = [f"{v.slo}: {v.cause}" for v in outside.slo_verdicts if v.cause]
    reasons = f" ({'; '.join(why)})" if outside.slo_met is None and why else ""
    return f"SLO {with_it}; outside of it {without}{reasons}"


def _of_the_load(summary: Summary) -> str:
    stages, capacity = summary.stages, summary.capacity
    if not summary.requests:
        return "Nothing was measured: no request was recorded."
    answered = [s.ok for s in stages]
    answered += [phase.ok for phase in summary.burst.phases] if summary.burst else []
    if not any(answered):
        return _nothing_answered(summary)
    if summary.quota and summary.quota.binds and not summary.burst:
        return f"No capacity is named: {capacity.reason}."
    if all(s.client_limited for s in stages):
        down = next((f"the endpoint was {s.outage.text}; " for s in stages if s.outage), "")
        return (
            f"No finding: {down}the client could not keep up at any load, so the server's limit was "
            "not measured."
        )
    if summary.burst:
        return _burst(summary.burst)
    if not summary.slos:
        return _without_slo(summary)
    return _nothing_usable(summary) if capacity.capacity_rps is None else _usable(summary)


def _without_slo(summary: Summary) -> str:
    """Return the highest rate that was carried, where the stages are long enough to show one."""
    counted = [s for s in summary.stages if not s.client_limited]
    answers_s = [s.e2e_s.p50 or 0.0 for s in counted]
    if all(
        s.stable is not False and s.window.end_s < 2 * answer_s
        for s, answer_s in zip(counted, answers_s, strict=True)
    ):
        return (
            f"Too short to tell: an answer takes {number_text(min(answers_s))} s and no stage is "
            f"twice as long, so no rate is known. {longer(summary)}."
        )
    best = max(counted, key=lambda s: s.achieved_rps)
    if not best.achieved_rps:
        return (
            "Too short to tell: no answer ended in the part of the load that is judged, so no rate "
            f"is known. {longer(summary)}."
        )
    tokens = best.output_tokens_per_s
    and_tokens = "" if tokens is None else f" and {number_text(tokens)} output tokens/s"
    return (
        f"Up to {number_text(best.achieved_rps)} requests/s{and_tokens} were carried; no "
        "SLO was given, so no capacity is named."
    )


def _burst(burst: Burst) -> str:
    base, high = burst.phases[0], burst.phases[1]
    until_s = burst.known_until_s
    if high.end_s <= high.start_s:
        return (
            f"Nothing is known of the burst: what is known of the run ends {number_text(until_s)} "
            "s after its start, in the base phase."
        )
    length = number_text(high.end_s - high.start_s)
    sentence = (
        f"A burst from {number_text(base.offered_rps)} to {number_text(high.offered_rps)} "
        f"requests/s for {length} s"
    )
    recovery_s, low_s = burst.recovery_s, burst.recovery_ci_s[0]
    did, harm = [], burst.harm
    if burst.peak_ttft_s is not None:
        did.append(f"took TTFT up to {_duration(burst.peak_ttft_s)}")
        if burst.peak_ttft_s <= (base.ttft_s.max or 0.0):
            did[0] += f" (the base load up to {_duration(base.ttft_s.max or 0.0)})"
    if harm.burst:
        did.append(f"was not carried: {harm.burst.reason}")
    sentence = " ".join([sentence, *did[:1], *(f"and {more}" for more in did[1:])])
    if recovery_s is not None:
        when = f"{number_text(recovery_s)} s after the burst" if recovery_s else "when it ended"
        sentence += f"; the endpoint recovered {when}"
    else:
        least = f"not for {number_text(low_s)} s, and " if low_s else ""
        sentence += f"; when it recovered is not known: {least}{burst.recovery_reason}"
    if harm.after:
        sentence += f"; requests due after that still suffered: {harm.after.reason}"
    if harm.base:
        sentence += f"; the base load alone was not carried: {harm.base.reason}"
    return sentence + _burst_losses(burst)


def _burst_losses(burst: Burst) -> str:
    """Return the part of the sentence on SLO misses, losses, and the limit on the recovery."""
    parts = []
    if burst.slo_misses is not None:
        of_base = burst.slo_misses_of_base
        would = (
            f" ({number_text(of_base)} would at the base load's share)" if of_base >= 0.5 else ""
        )
        parts.append(f"{burst.slo_misses} requests violated an SLO{would}")
    cut = f", {burst.unfinished} cut off unfinished" if burst.unfinished else ""
    parts.append(f"{burst.lost or 'none'} {'was' if burst.lost < 2 else 'were'} lost{cut}")
    if held := burst.max_recovery:
        limit = number_text(held.limit_s)
        parts.append(f"the limit of {limit} s to get over it is {held.verdict}")
    if (until_s := burst.known_until_s) is not None:
        parts.append(f"nothing is known from {number_text(until_s)} s after the start on")
    return "".join(f"; {part}" for part in parts) + "."


def _duration(time_s: float) -> str:
    return f"{number_text(1e3 * time_s)} ms" if 0 < time_s < 1 else f"{number_text(time_s)} s"


def _nothing_answered(summary: Summary) -> str:
    """Return the verdict on a run in which no request of a window was answered."""
    total, errors = summary.requests, dict(summary.errors)
    lost = sum(s.missing for s in summary.stages)
    answered = total - sum(errors.values())
    if not summary.stages:
        return (
            f"Nothing is judged: of {total} requests there are records, and of no stage to which "
            "they belong."
        )
    errors["unfinished"] = max(0, errors["unfinished"] - lost)
    status, worst = max(errors.items(), key=lambda item: item[1])
    ended = f"{worst} of {total} {STATUS_WORDS.get(status, f'ended as {status}')}"
    windows = [stage.window for stage in summary.stages]
    if answered and all(0 < w.end_s <= w.start_s for w in windows):
        return (
            f"Every stage ended within its ramp, which does not count: {answered} of {total} "
            "requests were answered."
        )
    if answered:
        return (
            f"No request that was due in a stage's window was answered, {answered} of {total} "
            "in the whole run were"
        ) + (f": {ended}. Start at a much lower load." if worst else ".")
    if lost:
        known = f" ({ended})" if worst else ""
        return (
            f"No record of an answer was left: {lost} of {total} requests have no record{known}, "
            "so nothing is judged."
        )
    return f"No request was answered: {ended}."


def _usable(summary: Summary) -> str:
    """Return capacity, C_max and fleet, each with its interval."""
    capacity = summary.capacity
    parts = [_carries(summary), _c_max(capacity)]
    if capacity.c_max_basis == "closed":
        parts.append(
            "users wait for the server there: open arrivals violate the SLO at a lower rate"
        )
    if where := at_knee(summary):
        parts.append(f"it lies {where}: run below it")
    fleet = summary.fleet
    if fleet.instances is not None and (peak := fleet.peak_rps) is not None:
        need = "needs" if peak == 1 else "need"
        gpus = f", {fleet.gpus:,} GPUs," if fleet.tensor_parallel > 1 else ""
        factor = fleet.safety_factor
        reserve = f" with a safety factor of {factor:g}" if factor > 1 else ""
        sized = instances_text(fleet.instances, fleet.instances_ci)
        peak_text = f"{peak:,.0f}" if peak >= 1000 else number_text(peak)
        parts.append(f"{peak_text} req/s {need} {sized}{gpus}{reserve}")
    return "; ".join(parts) + "."


def _carries(summary: Summary) -> str:
    capacity = summary.capacity
    low, high = capacity.capacity_rps_ci or (None, None)
    crossing, closed = capacity.crossing, capacity.c_max_basis == "closed"
    verified = capacity.verified_rps
    rate = f"{number_text(capacity.capacity_rps)} req/s"
    if crossing == "lower_bound":
        loop = " in a closed loop" if closed else ""
        return (
            f"One instance carries at least {rate}{loop} with {_limits(summary.slos)}; no "
            "stage violated the SLO"
        )
    least = {"saturated": "at most ", "measured": ""}.get(crossing, "an estimated ")
    loop = " in a closed loop" if closed and crossing != "saturated" else ""
    known = [f"between {_between(low, high, 'and')}"]
    if crossing == "pooled":
        known = [f"95 % interval {_between(low, high, 'to')}"]
    if crossing == "saturated":
        known = ["there the closed loop saturates"]
    if verified:
        known.append(f"verified to {number_text(verified)}")
    elif crossing == "pooled" and not summary.predicted:
        known.append("no stage alone verifies a load")
    texts = [capacity.binding_slo, *capacity.binding_or]
    binding = [next(s for s in summary.slos if s.text == text) for text in texts]
    others = [slo for slo in summary.slos if slo not in binding]
    notes = ["which of them breaks first cannot be told"] if len(binding) > 1 else []
    notes += [_not_binding(others)] if others else []
    said = f" ({'; '.join(notes)})" if notes else ""
    return (
        f"One instance carries {least}{rate}{loop} ({'; '.join(known)}) with "
        f"{_limits(binding)}{said}"
    )


def _not_binding(slos: Sequence[SloLimit]) -> str:
    if len(slos) > 1:
        return f"{len(slos)} other SLOs do not limit it"
    return f"{_limits(slos)} does not limit it"


def _c_max(capacity: Capacity) -> str:
    """Return C_max in words: ``C_max 65 (55 to 80) in flight``."""
    value, (low, high) = capacity.c_max, capacity.c_max_ci or (None, None)
    if value is None:
        return f"C_max is not known: {capacity.reason}"
    said = number_text(value)
    if capacity.crossing == "lower_bound":
        said = f"at least {said}"
    elif capacity.crossing != "saturated" and low is not None and low != high:
        said += f" ({_between(low, high, 'to')})"
    paused = capacity.c_max_basis == "closed" and round(value) != capacity.users
    return f"C_max {said} in flight" + (f" ({capacity.users} users)" if paused else "")


def _between(low: float | None, high: float | None, word: str) -> str:
    ends = ["an unknown lower end" if low is None else number_text(low)]
    return f" {word} ".join([*ends, "an unknown upper end" if high is None else number_text(high)])


def _nothing_usable(summary: Summary) -> str:
    capacity = summary.capacity
    limits = _limits(summary.slos)
    if capacity.capacity_rps_ci is None:
        return f"No verdict on {limits}: {capacity.reason}."
    low, high = capacity.capacity_rps_ci
    said = (
        f"is below {number_text(high)}"
        if not low
        else f"lies between {number_text(low)} and {number_text(high)} (95 %)"
    )
    rest = str(capacity.reason).removeprefix(NOT_SHOWN)  # which the sentence begins with
    joined = ": " if rest == capacity.reason else ""
    return (
        f"No stage alone was shown to meet {limits}; the capacity {said} requests/s{joined}{rest}."
    )


def _limits(slos: Sequence[SloLimit]) -> str:
    return " and ".join(parse_slo(slo.text).bound_text for slo in slos)
