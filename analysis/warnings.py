"""The warnings of summary.json: a closed list of codes, each with what it means and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ampacity.analysis.capacity.families import class_below, lengths_out_of_order
from ampacity.analysis.capacity.usable import number_text, stage_rate
from ampacity.analysis.diagnosed import certain
from ampacity.analysis.load_names import load_name
from ampacity.analysis.metrics.cohort import IN_ONE_PIECE
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.stage.throughput import is_figure, steady_state
from ampacity.loadgen.rundir.records import FAILED_STATUSES

ERROR_SHARE = 0.01
TOO_LONG_SHARE = 0.01  # of the requests, from which on the verdict names them
LENGTHS_OFF_SHARE = 0.1
BEYOND_CONTEXT_SHARE = 0.01
CACHED_SHARE = 0.05
RESENT_SHARE = 0.01  # of the requests: more is no race with the end of idle connections
WIDE_BRACKET = 1.25
USERS_SHARE = 0.9  # of the users that were set, in flight at most: fewer never were
IDLE_CPU_FRACTION = 0.5  # of a core: below it the client was not held up by its own work


def find_warnings(
    summary: Mapping[str, Any], output_deviation: float | None, cut_short: tuple[int, int] = (0, 0)
) -> list[dict[str, str]]:
    """Warnings for a summary whose figures are all in place; the others are of ``ampacity.analysis.metrics.lengths``."""
    stages: Sequence[dict[str, Any]] = summary["stages"]
    counted = [s for s in stages if s["stable"] is not False and not s["client_limited"]]
    realised = summary["workload"]["realised"]
    found = {
        "partial": f"The run is partial: {summary['partial']}." if summary["partial"] else None,
        "no_requests": None
        if summary["requests"]
        else "No request was recorded: there is nothing to judge.",
        "imported": _imported(summary.get("imported")),
        "client_limited": _client_limited(summary),
        "outage": _outage(stages),
        "errors": _errors(summary),
        "too_long": _too_long(summary),
        "unstable_lowest": _unstable_lowest(summary),
        "never_settled": _never_settled(summary),
        "resent": _resent(stages),
        "drift": _drift(counted),  # the tail moved on while averages stood still
        "two_modes": _two_modes(counted),
        "too_few_requests": _too_few(summary),  # an SLO could not be decided
        "too_short": _too_short(summary),  # a stage shorter than its requests
        "non_monotone": _non_monotone(summary["capacity"]),
        "beyond_context": _beyond_context(summary["workload"], summary["requests"]),
        "inputs_off": _inputs_off(realised["input_deviation"], bool(summary.get("sessions"))),
        "lengths_off": _lengths_off(output_deviation, realised["token_source"]),
        "cut_short": _cut_short(*cut_short),
        "not_streamed": _not_streamed(stages),
        "diagnosis": _diagnosis(summary),
        "speculation": _speculation(summary),
        "tokens_per_chunk": _tokens_per_chunk(summary),
        "cached": _cached(realised["cached_token_share"], summary["workload"].get("prompts")),
        "littles_law": _littles_law(stages),
        "class_below": class_below(summary),
        "lengths_out_of_order": lengths_out_of_order(summary),
        "knee_region": _knee_region(summary),
        "closed_loop": _closed_loop(summary["capacity"]),
        "users_missing": _users_missing(summary),
    }
    expected = _OF_A_STEADY_LOAD if _load_changes(summary) else ()
    if summary.get("burst") or "search" in summary:
        expected += _OF_A_SWEEP
    return [
        {"code": code, "text": text}
        for code, text in found.items()
        if text and code not in expected
    ]


OF_ENDPOINT = ("not_streamed", "diagnosis", "speculation")
"""Warnings that hold for what is compared with the run, too."""


def of_endpoint(summary: Mapping[str, Any]) -> list[str]:
    """What the endpoint is, that makes its figures mean something else."""
    return [w["text"] for w in summary["warnings"] if w["code"] in OF_ENDPOINT]


_OF_A_STEADY_LOAD: tuple[str, ...] = ("never_settled", "drift", "two_modes", "littles_law")
_OF_A_SWEEP = ("unstable_lowest", "too_few_requests", "too_short", "non_monotone")
"""A search weighs short stages, finds its loads itself, and its verdict says what it lacks; a burst names no capacity."""
_CHANGING = ("ramp", "steps", "diurnal", "burst")  # arrivals whose rate moves by design


def _load_changes(summary: Mapping[str, Any]) -> bool:
    """Whether the load moved within a stage because it was asked to."""
    arrivals = str((summary.get("workload") or {}).get("arrivals") or "")
    return bool(summary.get("burst")) or arrivals.partition(":")[0] in _CHANGING


def repeated_undisturbed(stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The client-limited stages whose load level was run again, later and without a limited client."""

    def level(stage: dict[str, Any]) -> tuple[Any, ...]:
        return stage["kind"], stage["offered_rps"], stage["concurrency_set"]

    return [
        s
        for i, s in enumerate(stages)
        if s["client_limited"]
        and any(level(t) == level(s) and not t["client_limited"] for t in stages[i + 1 :])
    ]


def _is_replay(summary: Mapping[str, Any]) -> bool:
    return bool(summary["workload"].get("trace"))


def longer(summary: Mapping[str, Any]) -> str:
    """How to get more requests at the same load."""
    if summary.get("imported"):
        return "Measure longer with that tool"
    if "search" in summary:
        return "A finer --precision takes longer stages"
    return "Replay a longer trace" if _is_replay(summary) else "Use a longer --duration"


def _imported(imported: Mapping[str, Any] | None) -> str | None:
    if not imported:
        return None
    differs = "; ".join(f"{d['what']}: {d['theirs']}" for d in imported.get("definitions") or [])
    said = "".join(f" {note}." for note in imported.get("notes") or [])
    return f"Measured by {imported.get('tool')}, not by ampacity; compare only with imports of the same tool. It differs in: {differs}.{said}"


def _client_limited(summary: Mapping[str, Any]) -> str | None:
    stages: Sequence[dict[str, Any]] = summary["stages"]
    repeated = repeated_undisturbed(stages)
    limited = [s for s in stages if s["client_limited"] and s not in repeated]
    partly = [
        {**s, "why": "; ".join(s["client_limited_metrics"].values())}
        for s in stages
        if s["client_limited_metrics"] and not s["client_limited"]
    ]
    said = []
    if limited:
        said.append(
            f"This machine could not keep up with the schedule {_each(limited, 'client_limited_reason')}. "
            "Nothing measured there is a finding."
        )
    if partly:
        said.append(
            f"The client itself was late {_each(partly, 'why')}. Those figures are left out."
        )
    return (
        f"{' '.join(said)} {_relief(summary['audit']['cpu_fraction'], limited + partly)}"
        if said
        else None
    )


def _relief(cpu_fraction: float | None, limited: Sequence[dict[str, Any]]) -> str:
    """What helps the client; more workers only where its CPU was busy, and nothing of it where sockets ran out."""
    if any("for want of" in str(s["client_limited_reason"]) for s in limited):
        return "Raise that limit of the operating system, or spread the load over more machines."
    if any(str(s["client_limited_reason"]).startswith("worker ") for s in limited):
        return "Find out what ended that process (memory?), and run it again."
    if cpu_fraction is not None and cpu_fraction < IDLE_CPU_FRACTION:
        return (
            f"Its CPU was idle ({cpu_fraction:.0%} of a core): other work on this machine held the client up{_others(limited)}. Pin it to "
            "cores of its own (--cpus), raise its priority (nice), or stop what else runs, and repeat."
        )
    return "Use more --workers or a faster client."


def _others(limited: Sequence[dict[str, Any]]) -> str:
    """The processes that took most of the CPU there, each by the most that it took in a stage."""
    most: dict[str, float] = {}
    for process in chain.from_iterable(s["busiest"] for s in limited):
        most[process["name"]] = max(process["cores"], most.get(process["name"], 0.0))
    named = sorted(most.items(), key=lambda item: -item[1])[:3]
    return (
        f" (busiest: {', '.join(f'{name} with {cores:.2g} cores' for name, cores in named)})"
        if named
        else ""
    )


def _outage(stages: Sequence[dict[str, Any]]) -> str | None:
    down = [s for s in stages if s["outage"] and not s["client_limited"]]
    if not down:
        return None
    each = "; ".join(f"{_at([s], 'at')} {s['outage']['text']}" for s in down)
    return (
        f"The endpoint gave no sign of life for a while ({each}). A stage whose SLOs this broke says nothing of its load, unless no "
        "higher one was met. Look at the server's log, and run it again."
    )


def _errors(summary: Mapping[str, Any]) -> str | None:
    counts = {k: n for k, n in summary["errors"].items() if n and k in FAILED_STATUSES}
    failed, total = sum(counts.values()), summary["requests"]
    if not total or failed <= ERROR_SHARE * total:
        return None
    listed = ", ".join(f"{n} {k}" for k, n in sorted(counts.items(), key=lambda c: -c[1]))
    return f"{failed} of {total} requests failed ({listed}); they count as infinitely slow. Look at the server's log."


def _too_long(summary: Mapping[str, Any]) -> str | None:
    n, total = summary["errors"].get("too_long", 0), summary["requests"]
    if not n:
        return None
    return (
        f"{n:,} of {total:,} requests ({n / total:.1%}) were refused because prompt and answer exceed the model's context. That says nothing "
        "of the server: they are left out of every percentile, rate and SLO. Use shorter lengths, --fit-context or a longer context."
    )


def _unstable_lowest(summary: Mapping[str, Any]) -> str | None:
    opened = sorted(
        (s for s in summary["stages"] if s["kind"] == "open" and s["requests"]),
        key=lambda s: s["offered_rps"] or 0,
    )
    if not opened or opened[0]["stable"] is not False or opened[0]["client_limited"]:
        return None
    lower = "Stretch the trace (--time-scale)" if _is_replay(summary) else "Offer less"
    return (
        f"Even the lowest load of {opened[0]['offered_rps']:.3g} requests/s has no steady state "
        f"({opened[0]['stable_reason']}). {lower}."
    )


def _never_settled(summary: Mapping[str, Any]) -> str | None:
    held = (summary.get("sessions") or {}).get("stages") or []
    lasts_s = {s["index"]: s["session_s"]["p50"] for s in held if s["session_s"]["p50"]}
    counted = [
        s
        for s in summary["stages"]
        if s["stable"] is not False and (is_figure(s) or "search" not in summary)
    ]
    short = [s for s in counted if s["window"]["end_s"] < lasts_s.get(s["index"], 0.0)]
    unsettled = [s for s in counted if not s["window"]["settled"] and s not in short]
    if not (short or unsettled):
        return None
    said = []
    if unsettled:
        said.append(
            f"{_at(unsettled)} no steady state was shown: it never settled, so the figures are still drifting."
        )
    if short:
        said.append(
            f"{_at(short)} the stage is shorter than a session, so the figures are of first turns more than of others."
        )
    enough = (
        f" of a few sessions (the median one takes {max(lasts_s.values()):.3g} s)"
        if lasts_s
        else ""
    )
    return f"{' '.join(said)} {longer(summary)}{enough}."


def _resent(stages: Sequence[Mapping[str, Any]]) -> str | None:
    resent, sent = (sum(s[of] for s in stages) for of in ("resent", "requests"))
    if not resent:
        return None
    share = resent / max(sent, 1)
    why = (
        "the server drops connections that it said it would keep, or requests on them"
        if share > RESENT_SHARE
        else "it was closing the connection just then, as servers do with idle ones"
    )
    return (
        f"{resent:,} of {sent:,} requests ({share:.1%}) were sent a second time: a kept-alive connection ended before a byte of "
        f"the answer. They are timed from their schedule; {why}. With --connections new none is sent twice, and a dropped one has failed."
    )


def _drift(stages: Sequence[dict[str, Any]]) -> str | None:
    moved = [s for s in stages if s["drift"]["drifting"]]
    if not moved:
        return None
    most = max(moved, key=lambda s: abs(math.log(s["drift"]["change"])))
    d = most["drift"]
    return (
        f"{_at(moved)} the slow tail moved all along: p99 of TTFT went from {d['p99_first_s']:.3g} s in the first third "
        f"to {d['p99_last_s']:.3g} s in the last ({_at([most], 'at')}). The figures are averages over that; look for a cache that fills, memory, or heat."
    )


def _two_modes(stages: Sequence[dict[str, Any]]) -> str | None:
    found = [s for s in stages if s["modes"]["two"]]
    if not found:
        return None
    m = found[-1]["modes"]
    return (
        f"{_at(found)} requests took one of two times: median E2E {m['fast_p50_s']:.3g} s, and {m['slow_p50_s']:.3g} s in "
        f"{m['slow_share']:.0%} of the stage {_at(found[-1:], 'at')}, back and forth ({m['switches']} switches). No single percentile describes that; look for "
        "neighbours on the machine, clocks, or replicas that differ."
    )


def _too_few(summary: Mapping[str, Any]) -> str | None:
    """Inconclusive stages matter where they leave the capacity unknown or its bracket wide; not above a broken one."""
    stages, interval = summary["stages"], summary["capacity"]["capacity_rps_ci"]
    found = summary["capacity"]["capacity_rps"] is not None
    if found and (interval[1] is None or interval[1] <= WIDE_BRACKET * interval[0]):
        return None
    broke = min(
        (stage_rate(s) for s in stages if s["slo_met"] is False and s["requests"]), default=None
    )
    bottom, top = (interval[0], interval[1]) if interval else (0.0, broke)
    inconclusive = [
        (s, max(open_verdicts, key=_lacking))
        for s in stages
        if s["slo_met"] is None
        and s["slo_verdicts"]
        and not s["client_limited"]
        and s["requests"]
        and bottom <= stage_rate(s) <= (top or math.inf)
        # a metric that is not known at all is not decided by more requests
        and (
            open_verdicts := [
                v
                for v in s["slo_verdicts"]
                if v["verdict"] == "inconclusive" and v["attainment"] is not None
            ]
        )
    ]
    if not inconclusive:
        return None
    stage, verdict = min(inconclusive, key=lambda one: _lacking(one[1]))
    too_high = _lacking(verdict)[0] and not found
    if too_high:
        stage, verdict = min(inconclusive, key=lambda one: stage_rate(one[0]))
    where = f"; {'even the lowest load seems too high' if too_high else 'least is lacking'} for {verdict['slo']} at {load_name(stage)}: {verdict['reason']}"
    named = where if len(inconclusive) > 1 else f" ({verdict['slo']}: {verdict['reason']})"
    return f"{_at([s for s, _ in inconclusive])} an SLO is inconclusive{named}. {_to_decide(summary, stage, verdict)}."


def _lacking(verdict: Mapping[str, Any]) -> tuple[bool, float]:
    """(whether a larger share misses it so far than it allows, requests that decide it): the first may yet be met."""
    share = verdict["attainment"]
    leans = share is not None and share < parse_slo(str(verdict["slo"])).quantile
    return leans, verdict["more_requests"] or math.inf


def _to_decide(
    summary: Mapping[str, Any], stage: Mapping[str, Any], verdict: Mapping[str, Any]
) -> str:
    """Requests and seconds that decide this verdict."""
    more, rate_rps = verdict["more_requests"], stage["offered_rps"] or stage["achieved_rps"]
    if not more:
        return "Longer stages may not decide it: lay the loads further apart or use a laxer limit or percentile"
    time = f", {math.ceil(more / rate_rps):,} s of that load," if rate_rps else ""
    broken = ", as violated if that share stays" if _lacking(verdict)[0] else ""
    advice = f"{longer(summary)}: about {more:,} more requests{time} decide it{broken}"
    return advice + (", or use a laxer percentile" if _is_replay(summary) else "")


def _too_short(summary: Mapping[str, Any]) -> str | None:
    short = [s for s in summary["stages"] if s["stable"] is None and s["requests"]]
    if not short:
        return None
    return f"Stability cannot be told {_each(short, 'stable_reason')}. {longer(summary)}."


def _non_monotone(capacity: Mapping[str, Any]) -> str | None:
    if not capacity["non_monotone"]:
        return None
    return (
        "An SLO broke at a load below one at which it held. The lower one is taken as the limit and the interval "
        "spans both; repeat it with longer stages."
    )


def _beyond_context(workload: Mapping[str, Any], sent: int) -> str | None:
    left_out, cut = (
        int(workload.get(f"{of}_context") or 0) for of in ("turns_beyond", "clipped_to")
    )
    # a run that ended early has sent fewer than a trace has, which was looked at as a whole
    planned = max(int((workload.get("trace") or {}).get("requests") or 0), sent + left_out)
    if left_out + cut <= BEYOND_CONTEXT_SHARE * planned:
        return None
    what = [f"{left_out:,} of {planned:,} planned turns were left out"] if left_out else []
    what += [f"{cut:,} of {planned - left_out:,} requests were shortened"] if cut else []
    return (
        f"{' and '.join(what)}, because they do not fit the model's context: the load is smaller than the workload it "
        "is named for. Serve the model with a larger context, or use a workload with shorter prompts."
    )


def _inputs_off(deviation: float | None, sessions: bool) -> str | None:
    if deviation is None or abs(deviation) <= LENGTHS_OFF_SHARE:
        return None
    histories = (
        " Histories hold what was answered: shorter answers, and turns that told nothing, make shorter prompts."
        if sessions and deviation < 0
        else ""
    )
    return (
        f"Prompts were {off_text(deviation)} in input tokens, by the server's count: the load is another one than asked for, and no "
        f"capacity of it.{histories} Look whether the server cuts prompts, and give its own vocabulary to --tokenizer."
    )


def _lengths_off(deviation: float | None, sources: Mapping[str, int]) -> str | None:
    if deviation is None or abs(deviation) <= LENGTHS_OFF_SHARE:
        return None
    counted = (
        ", or give the server's own vocabulary to --tokenizer: it counted"
        if "tokenizer" in sources
        else ""
    )
    return (
        f"Answers were {off_text(deviation)} in output tokens: the load is another one than asked for. "
        f"Make the server ignore the end-of-sequence token or fix lengths{counted}."
    )


def _cut_short(cut: int, answers: int) -> str | None:
    if not cut:
        return None
    return (
        f"{cut:,} of {answers:,} answers ended without a finish reason and with less than half of the usual text: something on "
        "the way may have cut them off and ended them with [DONE] all the same. They count as good: look into their texts."
    )


def off_text(deviation: float) -> str:
    """``74% shorter than planned``."""
    return f"{abs(deviation):.0%} {'longer' if deviation > 0 else 'shorter'} than planned"


def _not_streamed(stages: Sequence[dict[str, Any]]) -> str | None:
    whole = [s for s in stages if IN_ONE_PIECE in (s["ttft_s"].get("reason") or "")]
    if not whole:
        return None
    reason = str(whole[0]["ttft_s"]["reason"]).partition(":")[0]
    return (
        f"{_at(whole)} nothing was streamed ({reason}): TTFT is E2E and ITL and TPOT say nothing, so none is given and no SLO "
        "on them is judged. Judge by e2e, or find what buffers the stream (a proxy, compression, a server that does not stream)."
    )


def _diagnosis(summary: Mapping[str, Any]) -> str | None:
    """What the probe found wrong, but for what all of the answers tell better."""
    found = [f for f in certain(summary) if f["name"] != "stream"]
    if not found:
        return None
    return "Seen of the endpoint before the load: " + " ".join(
        f"{f['name']}: {f['found']} ({f['means']})." for f in found
    )


def _speculation(summary: Mapping[str, Any]) -> str | None:
    """Where the server drafts tokens and the prompts are made-up words, or may be: an imported run does not say."""
    accepted = [
        (s, s["server"]["spec_acceptance_rate"]) for s in summary["stages"] if s.get("server")
    ]
    seen = [(s, share) for s, share in accepted if share is not None]
    workload = summary["workload"]
    if (
        not seen
        or workload.get("prompt_file")
        or (workload.get("trace") or {}).get("recorded_prompts")
    ):
        return None
    low, high = min(share for _, share in seen), max(share for _, share in seen)
    share_text = f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    return (
        f"{_at([s for s, _ in seen])} the server drafted tokens ahead and accepted {share_text} of them, on prompts of random words. Real "
        "text is easier or harder to guess, so its ITL, TPOT, tokens/s and capacity are others: measure them with --prompts FILE, "
        "your own prompts, before a speculating engine is judged or compared."
    )


def _tokens_per_chunk(summary: Mapping[str, Any]) -> str | None:
    ratio = summary["workload"]["realised"]["tokens_per_chunk"]
    unknown = [s for s in summary["stages"] if "unknown" in (s["itl_s"].get("reason") or "")]
    if not unknown:
        return None
    ratio_text = f" ({ratio:.3g} tokens per chunk)" if ratio else ""
    given = [
        name
        for key, name in (("icl_s", "inter-chunk latency (ICL)"), ("tpot_s", "TPOT"))
        if all(s[key]["n"] for s in unknown)
    ]
    lacking = [
        *(["TPOT"] if "TPOT" not in given else []),
        *(["tokens/s"] if any(s["output_tokens_per_s"] is None for s in unknown) else []),
    ]
    none = f"per-token latency (ITL){''.join(f', {name}' for name in lacking)} {'are' if lacking else 'is'} not given"
    verb = "is" if len(given) == 1 else "are"
    return (
        f"Chunks are not tokens{ratio_text} and the server does not say how many each holds: {none}"
        + (f"; {' and '.join(given)} {verb}." if given else ".")
    )


def _cached(share: float | None, prompts: str | None) -> str | None:
    if share is None or share <= CACHED_SHARE or prompts not in (None, "unique"):
        return None
    return (
        f"{share:.0%} of the input tokens came from the server's prefix cache although every prompt is unique: "
        "first tokens are faster than they would be. Look for a shared prefix or a response cache."
    )


def _littles_law(stages: Sequence[dict[str, Any]]) -> str | None:
    off = [s for s in stages if steady_state(s)[0] == "not shown" and s["window"]["settled"]]
    if not off:
        return None
    worst = max(off, key=lambda s: abs(s["littles_law"]["consistency"] - 1))
    return (
        f"{_at(off)} no steady state was shown (L ÷ λW = {worst['littles_law']['consistency']:.2f} {_at([worst], 'at')}): the number "
        "of requests in flight kept moving one way. Expected near saturation; a longer stage tells."
    )


WIDEST_REGION = 2.0  # upper over lower end of a knee region, in requests/s
REGION_END = 1.05  # so near its upper end a rate is not above it


def _knee_region(summary: Mapping[str, Any]) -> str | None:
    """Where latency bends below the load at which the SLO does: no contradiction, but little is left above."""
    usable, region = summary["capacity"]["capacity_rps"], summary["knee"]["region_rps"]
    if not usable or not region or usable < region[0] or region[1] > WIDEST_REGION * region[0]:
        return None  # a region that wide names no load
    where = "within" if usable <= REGION_END * region[1] else "above"
    return (
        f"The capacity of {number_text(usable)} requests/s lies {where} the knee region of {number_text(region[0])} to "
        f"{number_text(region[1])}: there latency rises faster than the load, and a little more of it violates the SLO."
    )


def _closed_loop(capacity: Mapping[str, Any]) -> str | None:
    if capacity["c_max_basis"] != "closed" or not capacity["capacity_rps"]:
        return None
    most = (
        "It is the rate at which the loop saturates. "
        if capacity["crossing"] == "saturated"
        else ""
    )
    return (
        "The capacity was found with a closed loop, in which users wait for the server: open arrivals, which do not, "
        f"violate the SLO at a lower rate. {most}Size by an open loop (--rates, or ampacity search)."
    )


def users_missing(stage: Mapping[str, Any]) -> bool:
    """Whether a closed stage never had its users in flight."""
    at_most: float = stage["concurrency_max"]
    return stage["kind"] == "closed" and at_most < USERS_SHARE * float(
        stage["concurrency_set"] or 0
    )


def _users_missing(summary: Mapping[str, Any]) -> str | None:
    thinks = summary.get("sessions") or any(
        s["users_pause"] and not users_missing(s) for s in summary["stages"]
    )
    few = [s for s in summary["stages"] if users_missing(s) and s["requests"]]
    if thinks or not few:
        return None
    each = "; ".join(
        f"{s['concurrency_set']:g} users were set, and never more than {s['concurrency_max']} in flight"
        for s in few
    )
    return (
        f"{each}: the run ended before all had begun, or something lets fewer in. C_max is what was in flight. Use more requests or a "
        "longer --duration."
    )


def _at(stages: Sequence[dict[str, Any]], at: str = "At") -> str:
    """Stages by their loads, as the tables name them, from the lowest up."""
    in_order = sorted(
        stages, key=lambda s: (s["kind"], s["offered_rps"] or s["concurrency_set"] or 0)
    )
    return f"{at} {', '.join(dict.fromkeys(map(load_name, in_order)))}"


def _each(stages: Sequence[dict[str, Any]], reason: str) -> str:
    """Stages by their loads, each with its reason; those that share one stand together."""
    why = dict.fromkeys(s[reason] for s in stages)
    return "; ".join(f"{_at([s for s in stages if s[reason] == one], 'at')}: {one}" for one in why)
