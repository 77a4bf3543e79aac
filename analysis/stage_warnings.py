"""Rules for the warnings about single stages: the client, outages, steady state, drift, chunks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Audit, Summary
from ampacity.analysis.metrics.cohort import IN_ONE_PIECE
from ampacity.analysis.metrics.lengths import Deviation
from ampacity.analysis.metrics.odd_answers import CONTRADICTED, OddAnswers
from ampacity.analysis.stage.littles_law import foreign_requests
from ampacity.analysis.stage.throughput import is_figure, steady_state

RESENT_SHARE = 0.01  # of the requests; above it, a race with idle timeouts is no explanation
USERS_SHARE = 0.9  # of the users set: fewer at most in flight means that some never started
SOME_WHOLE = 0.01  # of the answers; above it, those that came in one piece are named
MORE_THAN_ONE = 1.05  # tokens per chunk
UNCOUNTED_SHARE = 0.01  # of the answers, above which it is said
IDLE_CPU_FRACTION = 0.5  # of a core: below it the client's own work did not hold it up

Stages = Sequence[Stage]


@dataclass(frozen=True)
class Facts:
    """A summary with all figures, and results of ``analysis.metrics`` that it does not hold."""

    summary: Summary
    deviations: tuple[Deviation, Deviation] = Deviation(), Deviation()  # inputs, outputs
    odd: OddAnswers = field(default_factory=OddAnswers)
    began_s: float = 0.0  # of a window of a soak, in the time of the soak
    events: Sequence[str] = ()  # of the run, in run.json

    @property
    def stages(self) -> Stages:
        return self.summary.stages

    @property
    def counted(self) -> Stages:
        """Return the stages that are findings: not unstable, not limited by the client."""
        return [s for s in self.stages if s.stable is not False and not s.client_limited]


Rule = Callable[[Facts], str | None]


def repeated_undisturbed(stages: Stages) -> list[Stage]:
    """Return the client-limited stages whose load was later repeated without a limited client."""
    level = attrgetter("kind", "offered_rps", "concurrency_set")
    return [
        s
        for i, s in enumerate(stages)
        if s.client_limited
        and any(level(t) == level(s) and not t.client_limited for t in stages[i + 1 :])
    ]


def is_replay(summary: Summary) -> bool:
    return bool(summary.workload.get("trace"))


def longer(summary: Summary) -> str:
    """Return the advice for getting more requests at the same load."""
    if summary.imported:
        return "Measure longer with that tool"
    if summary.search:
        return "A finer --precision takes longer stages"
    return "Replay a longer trace" if is_replay(summary) else "Use a longer --duration"


def at_loads(stages: Stages, at: str = "At") -> str:
    """Return the names of the stages' loads, ascending: ``At 4 req/s, 8 req/s``."""
    in_order = sorted(stages, key=lambda s: (s.kind, s.offered_rps or s.concurrency_set or 0))
    return f"{at} {', '.join(dict.fromkeys(s.name for s in in_order))}"


def _each_reason(stages: Stages, reason_of: Callable[[Stage], str | None]) -> str:
    """Return each distinct reason after the loads that share it."""
    by_reason: dict[str | None, list[Stage]] = {}
    for stage in stages:
        by_reason.setdefault(reason_of(stage), []).append(stage)
    return "; ".join(f"{at_loads(held, 'at')}: {why}" for why, held in by_reason.items())


def client_limited(facts: Facts) -> str | None:
    repeated = repeated_undisturbed(facts.stages)
    limited = [s for s in facts.stages if s.client_limited and s not in repeated]
    partly = [s for s in facts.stages if s.client_limited_metrics and not s.client_limited]
    parts = []
    if limited:
        reasons = _each_reason(limited, lambda s: s.client_limited_reason)
        parts.append(
            f"This machine could not keep up with the schedule {reasons}. Nothing measured there "
            "is a finding."
        )
    if partly:
        reasons = _each_reason(partly, lambda s: "; ".join(s.client_limited_metrics.values()))
        parts.append(f"The client itself was late {reasons}. Those figures are left out.")
    if not parts:
        return None
    return " ".join([*parts, client_relief(facts.summary.audit, [*limited, *partly])])


def client_relief(audit: Audit, limited: Stages) -> str:
    """Return what helps the client; more workers help only where its CPU was busy."""
    reasons, cpu_fraction = [str(s.client_limited_reason) for s in limited], audit.cpu_fraction
    if any("for want of" in reason for reason in reasons):
        return "Raise the limit that 'ampacity doctor' names (ulimit -n), or use more machines."
    if any(reason.startswith("worker ") for reason in reasons):
        return "Find out what ended that process or node (memory?)."
    if cpu_fraction is not None and cpu_fraction < IDLE_CPU_FRACTION:
        return (
            f"Stop (or nice) other work on this machine{_busiest(limited)}, or pin the client with --cpus: "
            f"its CPU was idle ({cpu_fraction:.0%} of a core), so others held it up."
        )
    stop = "Stop (or nice) other work on this machine, or use" if cpu_fraction is None else "Use"
    return f"{stop} a faster client, or more --workers where the command has them."


def _busiest(limited: Stages) -> str:
    """Return the three processes with the highest CPU use in any of the stages."""
    cores: dict[str, float] = {}
    for process in chain.from_iterable(s.busiest for s in limited):
        cores[process.name] = max(process.cores, cores.get(process.name, 0.0))
    top = sorted(cores.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {used:.2g} cores" for name, used in top)
    return f" ({named})" if named else ""


def outage(facts: Facts) -> str | None:
    down = [(s, s.outage.text) for s in facts.stages if s.outage and not s.client_limited]
    if not down:
        return None
    each = "; ".join(f"{at_loads([s], 'at')} {text}" for s, text in down)
    return (
        f"The endpoint gave no sign of life for a while ({each}). An SLO violated by an outage "
        "says nothing about that load, unless no higher load met it. Check the server's log, and "
        "run it again."
    )


def unstable_lowest(facts: Facts) -> str | None:
    open_stages = [s for s in facts.stages if s.kind == "open" and s.requests]
    lowest = min(open_stages, key=lambda s: s.offered_rps or 0, default=None)
    if lowest is None or lowest.stable is not False or lowest.client_limited or lowest.outage:
        return None
    advice = "Stretch the trace (--time-scale)" if is_replay(facts.summary) else "Offer less"
    return (
        f"Even the lowest load of {lowest.offered_rps:.3g} requests/s has no steady state "
        f"({lowest.stable_reason}). {advice}."
    )


def never_settled(facts: Facts) -> str | None:
    sessions = facts.summary.sessions.stages if facts.summary.sessions else []
    median_s = {s.index: s.session_s.p50 for s in sessions if s.session_s.p50}
    counted = [
        s
        for s in facts.stages
        if s.stable is not False and (is_figure(s) or not facts.summary.search)
    ]
    short = [s for s in counted if s.window.end_s < median_s.get(s.index, 0.0)]
    unsettled = [s for s in counted if not s.window.settled and s not in short]
    parts = []
    if unsettled:
        parts.append(
            f"{at_loads(unsettled)} no steady state was shown: it never settled, so the figures "
            "are still drifting."
        )
    if short:
        parts.append(
            f"{at_loads(short)} the stage is shorter than a session, so first turns weigh more "
            "than later ones."
        )
    if not parts:
        return None
    advice = longer(facts.summary)
    if median_s:
        advice += f" of a few sessions (the median one takes {max(median_s.values()):.3g} s)"
    return " ".join([*parts, f"{advice}."])


def resent(facts: Facts) -> str | None:
    n, sent = (sum(s.resent for s in facts.stages), sum(s.requests for s in facts.stages))
    if not n:
        return None
    share = n / max(sent, 1)
    why = (
        "the server drops connections that it said it would keep, or requests on them"
        if share > RESENT_SHARE
        else "it was closing the connection just then, as servers do with idle ones"
    )
    return (
        f"{n:,} of {sent:,} requests ({share:.1%}) were sent a second time: a kept-alive "
        "connection ended before the first byte of the answer. They are timed from their "
        f"schedule; {why}. With --connections new none is sent twice, and a drop is a failure."
    )


def unsolicited(facts: Facts) -> str | None:
    n = sum(s.unsolicited for s in facts.stages)
    if not n:
        return None
    return (
        f"On idle connections something came {n:,} times that no request had asked for; each was "
        "closed. A server that answers twice, or sends an error of its own as it closes, gives some "
        "requests an answer that is not theirs: look for such a proxy or duplicate."
    )


def drift(facts: Facts) -> str | None:
    moved = [s for s in facts.counted if s.drift.drifting]
    if not moved:
        return None
    most = max(moved, key=lambda s: abs(math.log(s.drift.change or 1.0)))
    d = most.drift
    return (
        f"{at_loads(moved)} the slow tail moved all along: p99 of TTFT went from "
        f"{d.p99_first_s:.3g} s in the first third to {d.p99_last_s:.3g} s in the last "
        f"({at_loads([most], 'at')}). The figures are averages over that; look for a cache that "
        "fills, memory, or heat."
    )


def two_modes(facts: Facts) -> str | None:
    found = [s for s in facts.counted if s.modes.two]
    if not found:
        return None
    m = found[-1].modes
    return (
        f"{at_loads(found)} requests took one of two times: median E2E {m.fast_p50_s:.3g} s, "
        f"and {m.slow_p50_s:.3g} s in {m.slow_share:.0%} of the stage "
        f"{at_loads(found[-1:], 'at')}, back and forth ({m.switches} switches). No single "
        "percentile describes that; look for neighbours on the machine, clocks, or replicas that "
        "differ."
    )


def too_short(facts: Facts) -> str | None:
    short = [s for s in facts.stages if s.stable is None and s.requests]
    if not short:
        return None
    reasons = _each_reason(short, lambda s: s.stable_reason)
    return f"Stability is not known {reasons}. {longer(facts.summary)}."


def littles_law(facts: Facts) -> str | None:
    off = [s for s in facts.stages if steady_state(s)[0] == "not shown" and s.window.settled]
    if not off:
        return None
    worst = max(off, key=lambda s: abs((s.littles_law.consistency or 1.0) - 1))
    return (
        f"{at_loads(off)} no steady state was shown "
        f"(L ÷ λW = {worst.littles_law.consistency:.2f} {at_loads([worst], 'at')}): the "
        "number of requests in flight kept moving one way. Expected near saturation; a longer "
        "stage tells."
    )


def foreign_load(facts: Facts) -> str | None:
    sampled = [s for s in facts.stages if s.server and s.server.samples]
    said = [(s, why) for s in sampled if (why := foreign_requests(s.littles_law))]
    if not said:
        return None
    return (
        f"{at_loads([s for s, _ in said])} {said[0][1]}: another client uses it, it goes on with "
        "requests that this run gave up, or the page is another server's. Its figures are left out, "
        "and name no cause."
    )


def not_streamed(facts: Facts) -> str | None:
    whole = [s for s in facts.stages if IN_ONE_PIECE in (s.ttft_s.reason or "")]
    if not whole and facts.odd.whole > SOME_WHOLE * facts.odd.good:
        return (
            f"{facts.odd.whole:,} of {facts.odd.good:,} answers came in one piece: their TTFT is their "
            "E2E, and they have no ITL, so both are those of a mixture. Find what holds these back (a "
            "proxy, a replica that does not stream), or judge by e2e."
        )
    if not whole:
        return None
    reason = str(whole[0].ttft_s.reason).partition(":")[0]
    return (
        f"{at_loads(whole)} nothing was streamed ({reason}): TTFT equals E2E, and ITL and TPOT "
        "are not known, so none is given and no SLO on them is judged. Judge by e2e, or find what "
        "buffers the stream (a proxy, compression, a server that does not stream)."
    )


def speculation(facts: Facts) -> str | None:
    """Warn where the server drafts tokens for prompts that are, or may be, made-up words."""
    workload = facts.summary.workload
    trace = workload.get("trace") or {}
    recorded, requests = trace.get("recorded_prompts") or 0, trace.get("requests") or 1
    made_up = requests - recorded
    shares = [(s, s.server.spec_acceptance_rate) for s in facts.stages if s.server]
    known = [(s, share) for s, share in shares if share is not None]
    if not known or workload.get("prompt_file") or made_up < 0.01 * requests:
        return None
    some = f" (in {made_up:,} of {requests:,} requests)" if recorded else ""
    ends = dict.fromkeys(f"{end(share for _, share in known):.0%}" for end in (min, max))
    return (
        f"{at_loads([s for s, _ in known])} the server drafted tokens ahead and accepted "
        f"{' to '.join(ends)} of them, on prompts of random words{some}. Real text is easier or harder "
        "to guess, so its ITL, TPOT, tokens/s and capacity are others: measure them with "
        "--prompts FILE, your own prompts, before a speculating engine is judged or compared."
    )


def uncounted(facts: Facts) -> str | None:
    """Warn where answers of the load have no count of tokens, and the probe's had one."""
    workload = facts.summary.workload
    sources = workload["realised"]["token_source"]
    n, of = sources.get("chunks", 0), sum(sources.values())
    had_usage = (workload.get("tokenizer") or {}).get("method") == "usage"
    if n <= UNCOUNTED_SHARE * of or (n == of and not had_usage):
        return None
    since_s = facts.began_s + (facts.odd.usage_lost_ns or 0.0) / 1e9
    if facts.odd.usage_lost_ns is not None and since_s > 0:
        return (
            f"From {since_s:.1f} s on the answers have no usage, or none that can be true: tokens "
            f"are chunks from there on ({n:,} of {of:,} answers), and whether their lengths are as "
            "planned is not known."
        )
    if not had_usage:
        return None
    return (
        f"{n:,} of {of:,} answers have no count of tokens, or none that can be true, although the "
        "probe's had one: whether their lengths are as planned is not known."
    )


def tokens_per_chunk(facts: Facts) -> str | None:
    ratio = facts.summary.workload["realised"]["tokens_per_chunk"]
    unknown = [s for s in facts.stages if "unknown" in (s.itl_s.reason or "")]
    if not unknown or CONTRADICTED in facts.odd.impossible:
        return None
    names = {"icl_s": "inter-chunk latency (ICL)", "tpot_s": "TPOT"}
    given = [name for key, name in names.items() if all(getattr(s, key).n for s in unknown)]
    missing = ["per-token latency (ITL)"]
    missing += ["TPOT"] if "TPOT" not in given else []
    missing += ["tokens/s"] if any(s.output_tokens_per_s is None for s in unknown) else []
    verbs = ["is" if len(listed) == 1 else "are" for listed in (missing, given)]
    ratio_text = f" ({ratio:.3g} tokens per chunk)" if ratio and ratio > MORE_THAN_ONE else ""
    given_text = f"; {' and '.join(given)} {verbs[1]}" if given else ""
    return (
        f"Chunks are not tokens{ratio_text} and the server does not report how many each holds: "
        f"{', '.join(missing)} {verbs[0]} not given{given_text}."
    )


def never_all_users(stage: Stage) -> bool:
    """Return whether a closed stage never had all of its users in flight."""
    most, users = float(stage.concurrency_max), float(stage.concurrency_set or 0)
    return stage.kind == "closed" and most < USERS_SHARE * users


def users_missing(facts: Facts) -> str | None:
    pauses = any(s.users_pause and not never_all_users(s) for s in facts.stages)
    few = [s for s in facts.stages if never_all_users(s) and s.requests]
    if facts.summary.sessions or pauses or not few:
        return None
    each = "; ".join(
        f"{s.concurrency_set:g} users were set, and never more than {s.concurrency_max} in flight"
        for s in few
    )
    return (
        f"{each}: the run ended before all had begun, or something lets fewer in. C_max is what "
        "was in flight. Use more requests or a longer --duration."
    )
