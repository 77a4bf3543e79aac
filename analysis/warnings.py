"""The warnings of summary.json: a closed list of codes, each with its meaning and advice."""

import math
from collections.abc import Mapping

from ampacity.analysis import stage_warnings as of_stages
from ampacity.analysis.capacity.families import class_below, lengths_out_of_order
from ampacity.analysis.capacity.knee import knee_region
from ampacity.analysis.capacity.levels import stage_rate
from ampacity.analysis.contract.stage import SloVerdict, Stage
from ampacity.analysis.contract.summary import Summary, Warned
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.stage.server import NO_SHARE
from ampacity.analysis.stage_warnings import Facts, Rule, at_loads, is_replay, longer
from ampacity.loadgen.rundir.records import FAILED_KINDS

# shares of the requests, lengths or input tokens above which a code is reported
ERROR_SHARE = 0.01
TOO_LONG_SHARE = 0.01  # the verdict names them as well
BEYOND_CONTEXT_SHARE = 0.01
CACHED_SHARE = 0.05
WIDE_BRACKET = 1.25  # upper over lower end of the capacity's interval
CLOCK_OFF_S = 60.0  # of the gap where a run was resumed, between wall and monotonic clock
NAMED = 4  # of the finish reasons or origins of answers

OF_ENDPOINT = ("not_streamed", "diagnosis", "speculation", "strangers", "impossible_counts")
"""Codes about the endpoint, which also hold for whatever is compared with the run."""
OF_A_RUN = ("partial", "resumed", "events", "errors", "strangers")
"""Codes that a run of several parts has as a whole."""
_OF_A_STEADY_LOAD = ("never_settled", "drift", "two_modes", "littles_law")
OF_A_SWEEP = ("unstable_lowest", "too_few_requests", "too_short", "non_monotone")
_CHANGING_ARRIVALS = ("ramp", "steps", "diurnal", "burst")


def find_warnings(facts: Facts) -> list[Warned]:
    """Return the warnings of a summary with all figures."""
    expected = _expected(facts.summary)
    found = {code: rule(facts) for code, rule in RULES.items() if code not in expected}
    return [Warned(code=code, text=text) for code, text in found.items() if text]


def of_endpoint(summary: Summary) -> list[str]:
    """Return the texts of the warnings that hold for the endpoint itself."""
    return [w.text for w in summary.warnings if w.code in OF_ENDPOINT]


def _expected(summary: Summary) -> tuple[str, ...]:
    """Return the codes that this kind of run implies.

    A load that changes by design is not steady. A search chooses its own, often short, stages, and
    a burst names no capacity.
    """
    arrivals = str(summary.workload.get("arrivals") or "").partition(":")[0]
    burst = bool(summary.burst)
    codes = _OF_A_STEADY_LOAD if burst or arrivals in _CHANGING_ARRIVALS else ()
    return codes + (OF_A_SWEEP if burst or summary.search else ())


def _partial(facts: Facts) -> str | None:
    partial = facts.summary.partial
    return f"The run is partial: {partial}." if partial else None


def _resumed(facts: Facts) -> str | None:
    """Report each seam; a wall clock that was set in the gap is told from a pause."""
    parts = []
    for seam in facts.summary.seams:
        moved_s = seam.wall_gap_s - seam.gap_s
        clock = f", wall clock off by {moved_s:+,.0f} s" if abs(moved_s) > CLOCK_OFF_S else ""
        part = "window" if facts.summary.soak else "stage"
        where = (
            f"after {part} {seam.after_stage}" if seam.after_stage >= 0 else f"before any {part}"
        )
        parts.append(
            f"{where} ({seam.reason}; {seam.gap_s:,.0f} s later{clock}; {seam.in_flight} requests "
            "were known to be in flight)"
        )
    return f"The run was resumed {', and '.join(parts)}." if parts else None


def _events(facts: Facts) -> str | None:
    told = "; ".join(facts.events)
    return f"{told[0].upper()}{told[1:]}." if told else None


def _no_requests(facts: Facts) -> str | None:
    if facts.summary.requests:
        return None
    return "No request was recorded: there is nothing to judge."


def _imported(facts: Facts) -> str | None:
    imported = facts.summary.imported
    if not imported:
        return None
    differs = "; ".join(f"{d.what}: {d.theirs}" for d in imported.definitions)
    notes = "".join(f" {note}." for note in imported.notes)
    return (
        f"Measured by {imported.tool}, not by ampacity; compare only with imports of the "
        f"same tool. It differs in: {differs}.{notes}"
    )


def _errors(facts: Facts) -> str | None:
    errors, total = facts.summary.errors, facts.summary.requests
    counts = {status: n for status, n in errors.items() if n and status in FAILED_KINDS}
    failed = sum(counts.values())
    if not total or failed <= ERROR_SHARE * total:
        return None
    listed = ", ".join(f"{n} {k}" for k, n in sorted(counts.items(), key=lambda c: -c[1]))
    return (
        f"{failed} of {total} requests failed ({listed}); they count as infinitely slow. "
        "Check the server's log."
    )


def _too_long(facts: Facts) -> str | None:
    n, total = facts.summary.errors.get("too_long", 0), facts.summary.requests
    if not n:
        return None
    return (
        f"{n:,} of {total:,} requests ({n / total:.1%}) were refused because prompt and answer "
        "exceed the model's context. That says nothing of the server: they are left out of every "
        "percentile, rate and SLO. Use shorter lengths, --fit-context or a longer context."
    )


def _too_few_requests(facts: Facts) -> str | None:
    """Warn of inconclusive stages that leave the capacity unknown, or its bracket wide."""
    capacity = facts.summary.capacity
    interval, found = capacity.capacity_rps_ci, capacity.capacity_rps is not None
    bottom, top = interval or (None, None)
    if found and (top is None or top <= WIDE_BRACKET * (bottom or 0.0)):
        return None
    violated = [stage_rate(s) for s in facts.stages if s.slo_met is False and s.requests]
    if interval is None:
        top = min(violated, default=None)
    inconclusive = [
        (s, max(verdicts, key=_missing))
        for s in facts.stages
        if s.slo_met is None and not s.client_limited and s.requests
        if (bottom or 0.0) <= stage_rate(s) <= (top or math.inf)
        if (verdicts := _open_verdicts(s))
    ]
    if not inconclusive:
        return None
    stage, verdict = min(inconclusive, key=lambda one: _missing(one[1]))
    too_high = _missing(verdict)[0] and not found
    if too_high:
        stage, verdict = min(inconclusive, key=lambda one: stage_rate(one[0]))
    where = f" ({verdict.slo}: {verdict.reason})"
    if len(inconclusive) > 1:
        which = "even the lowest load seems too high" if too_high else "least is lacking"
        where = f"; {which} for {verdict.slo} at {stage.name}: {verdict.reason}"
    loads = at_loads([s for s, _ in inconclusive])
    return f"{loads} an SLO is inconclusive{where}. {_to_decide(facts.summary, stage, verdict)}."


def _open_verdicts(stage: Stage) -> list[SloVerdict]:
    """Return the inconclusive verdicts of a stage on metrics that are known."""
    return [
        v for v in stage.slo_verdicts if v.verdict == "inconclusive" and v.attainment is not None
    ]


def _missing(verdict: SloVerdict) -> tuple[bool, float]:
    """Return (whether it leans towards violated, the requests that decide it)."""
    share = verdict.attainment
    leans = share is not None and share < parse_slo(str(verdict.slo)).quantile
    return leans, verdict.more_requests or math.inf


def _to_decide(summary: Summary, stage: Stage, verdict: SloVerdict) -> str:
    """Return the advice with the requests and seconds that decide a verdict."""
    more, rate_rps = verdict.more_requests, stage.offered_rps or stage.achieved_rps
    if not more:
        return (
            "Longer stages may not decide it: lay the loads further apart or use a laxer limit or "
            "percentile"
        )
    time = f", {math.ceil(more / rate_rps):,} s of that load," if rate_rps else ""
    leaning = ", as violated if that share stays" if _missing(verdict)[0] else ""
    laxer = ", or use a laxer percentile" if is_replay(summary) else ""
    return f"{longer(summary)}: about {more:,} more requests{time} decide it{leaning}{laxer}"


def _non_monotone(facts: Facts) -> str | None:
    if not facts.summary.capacity.non_monotone:
        return None
    return (
        "An SLO was violated at a load below one at which it was met. The lower one is taken as "
        "the limit and the interval spans both; repeat it with longer stages."
    )


def _beyond_context(facts: Facts) -> str | None:
    workload = facts.summary.workload
    left_out = int(workload.get("turns_beyond_context") or 0)
    cut = int(workload.get("clipped_to_context") or 0)
    # a run that ended early sent fewer requests than the trace, which was checked as a whole
    in_trace = int((workload.get("trace") or {}).get("requests") or 0)
    planned = max(in_trace, facts.summary.requests + left_out)
    if left_out + cut <= BEYOND_CONTEXT_SHARE * planned:
        return None
    parts = [f"{left_out:,} of {planned:,} planned turns were left out"] if left_out else []
    parts += [f"{cut:,} of {planned - left_out:,} requests were shortened"] if cut else []
    return (
        f"{' and '.join(parts)}, because they do not fit the model's context: the load is smaller "
        "than the workload it is named for. Serve the model with a larger context, or use a "
        "workload with shorter prompts."
    )


def _inputs_off(facts: Facts) -> str | None:
    planned = facts.summary.workload["realised"]["input_deviation"]  # None: of given texts, too
    off = "" if planned is None else facts.deviations[0].text
    if not off:
        return None
    histories = ""
    if facts.summary.sessions and planned < 0:
        histories = (
            " Histories hold the actual answers: shorter answers, and turns without text, make "
            "shorter prompts."
        )
    return (
        f"Prompts were {off} in input tokens, by the server's count: this is another load than the "
        "one asked for; check whether the server cuts prompts, and give its own vocabulary to "
        f"--tokenizer.{histories}"
    )


def _lengths_off(facts: Facts) -> str | None:
    if not (off := facts.deviations[1].text):
        return None
    by_tokenizer = "tokenizer" in facts.summary.workload["realised"]["token_source"]
    own = ", or give the server's own vocabulary to --tokenizer: it counted"
    counted = own if by_tokenizer else ""
    return (
        f"Answers were {off} in output tokens: this is another load than the one asked for; make "
        f"the server take ignore_eos, or plan such lengths (--output-tokens){counted}."
    )


def _cut_short(facts: Facts) -> str | None:
    cut, answers = facts.odd.cut_short
    if not cut:
        return None
    return (
        f"{cut:,} of {answers:,} answers ended without a finish reason and with less than half of "
        "the usual text: something on the way may have cut them off and still ended them with "
        "[DONE]. They count as good: check their texts."
    )


def _unseen(facts: Facts) -> str | None:
    if not facts.odd.unseen or facts.summary.imported:  # another tool may keep no such times
        return None
    return (
        f"{facts.odd.unseen:,} of {facts.summary.requests:,} requests were answered without a "
        "visible token, only with counted ones (hidden reasoning, or special tokens): their "
        "TTFT is at least their E2E, and goodput does not count them. Plan longer answers, or "
        "switch the reasoning off."
    )


def _endings(facts: Facts) -> str | None:
    found, good = facts.odd.endings, facts.odd.good
    if not found:
        return None
    return (
        f"{sum(found.values()):,} of {good:,} answers ended neither by themselves nor at their limit "
        f"({_each(found)}): they may be cut, or hold another text than the model's. They count as "
        "good: check their texts."
    )


def _each(counts: Mapping[str, int]) -> str:
    more = f" and {len(counts) - NAMED} more" if len(counts) > NAMED else ""
    return ", ".join(f"{n:,} {name}" for name, n in [*counts.items()][:NAMED]) + more


def _impossible(facts: Facts) -> str | None:
    found = []
    if each := " and ".join(f"{n:,} count {what}" for what, n in facts.odd.impossible.items()):
        found.append(
            f"Of {facts.odd.good:,} answers {each}: the server's count is wrong, and left out as "
            "if it had not been reported."
        )
    said = "; ".join(s.server.reason or "" for s in facts.stages if s.server).split("; ")
    if no_shares := [text for text in dict.fromkeys(said) if NO_SHARE in text]:
        found.append(f"The server's metrics say what cannot be: {'; '.join(no_shares[:NAMED])}.")
    if uncounted := of_stages.uncounted(facts):
        found.append(uncounted)
    return " ".join(found) or None


def _strangers(facts: Facts) -> str | None:
    found, good = facts.odd.strangers, facts.odd.good
    if not found:
        return None
    return (
        f"{sum(found.values()):,} of {good:,} answers are, by their own account, not from the model that was "
        f"asked for ({_each(found)}): something on the way falls back, routes elsewhere or answers "
        "from a cache, and every figure mixes them. Switch it off, or measure each by itself."
    )


def _diagnosis(facts: Facts) -> str | None:
    """Report the probe's findings, without those that all answers together show better."""
    spoilt = (f for f in facts.summary.diagnosis or () if f.verdict == "bad" and f.spoils)
    found = [f for f in spoilt if f.name != "stream"]
    each = " ".join(f"{f.name}: {f.found} ({f.means})." for f in found)
    return f"Seen of the endpoint before the load: {each}" if found else None


def _cached(facts: Facts) -> str | None:
    workload = facts.summary.workload
    share = workload["realised"]["cached_token_share"]
    unique = workload.get("prompts") in (None, "unique")
    if share is None or share <= CACHED_SHARE or not unique:
        return None
    return (
        f"{share:.0%} of the input tokens came from the server's prefix cache although every "
        "prompt is unique: TTFT is lower than it would be without it. Look for a shared prefix "
        "or a response cache."
    )


def _closed_loop(facts: Facts) -> str | None:
    capacity = facts.summary.capacity
    if capacity.c_max_basis != "closed" or not capacity.capacity_rps:
        return None
    saturated = capacity.crossing == "saturated"
    ceiling = "It is the rate at which the loop saturates. " if saturated else ""
    return (
        "The capacity was found with a closed loop, in which users wait for the server: open "
        f"arrivals, which do not, violate the SLO at a lower rate. {ceiling}Size by an open loop "
        "(--rates, or ampacity search)."
    )


RULES: Mapping[str, Rule] = {
    "partial": _partial,
    "resumed": _resumed,
    "events": _events,
    "no_requests": _no_requests,
    "imported": _imported,
    "client_limited": of_stages.client_limited,
    "outage": of_stages.outage,
    "errors": _errors,
    "too_long": _too_long,
    "unstable_lowest": of_stages.unstable_lowest,
    "never_settled": of_stages.never_settled,
    "resent": of_stages.resent,
    "unsolicited": of_stages.unsolicited,
    "drift": of_stages.drift,
    "two_modes": of_stages.two_modes,
    "too_few_requests": _too_few_requests,
    "too_short": of_stages.too_short,
    "non_monotone": _non_monotone,
    "beyond_context": _beyond_context,
    "inputs_off": _inputs_off,
    "lengths_off": _lengths_off,
    "cut_short": _cut_short,
    "endings": _endings,
    "unseen": _unseen,
    "impossible_counts": _impossible,
    "foreign_load": of_stages.foreign_load,
    "strangers": _strangers,
    "not_streamed": of_stages.not_streamed,
    "diagnosis": _diagnosis,
    "speculation": of_stages.speculation,
    "tokens_per_chunk": of_stages.tokens_per_chunk,
    "cached": _cached,
    "littles_law": of_stages.littles_law,
    "class_below": lambda facts: class_below(facts.summary),
    "lengths_out_of_order": lambda facts: lengths_out_of_order(facts.summary),
    "knee_region": lambda facts: knee_region(facts.summary),
    "closed_loop": _closed_loop,
    "users_missing": of_stages.users_missing,
}
"""Every code with its rule, in the order of the report."""
