"""Check each rule of what limits an endpoint: the figures that it reads, against its thresholds."""

from collections.abc import Callable, Sequence

from ampacity.analysis.capacity.levels import QUOTA_SHARE, refused_share
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.limits import Evidence
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.limits.curve import SATURATED, CannotTell, Curve, Found
from ampacity.analysis.metrics.cohort import HELD_BACK, IN_ONE_PIECE

# Thresholds. Where no source is named they are this project's own, checked by the matrix of rules
# and illnesses in the tests (docs/diagnosis.md).
TAIL_GROWTH = 3.0  # TTFT p99 against that of the lowest load
QUEUE_OVER_STEP = 3.0  # how much more TTFT p99 has grown than the median ITL
PREFILL_BUSY = 0.5  # share of its time that an engine computes prompts
DECODE_BUSY = 0.25
TAIL_OVER_MEDIAN = 4.0  # ITL p99 / p50: some steps are longer, because prompts are computed in them
KV_FULL = 0.95
PREEMPTED = (0.05, 0.10, 0.20)  # share of requests: pressure, heavy, cascade
CACHE_LEAST, CACHE_LACKS = 0.3, 0.1  # cached share below 30 %, or 10 points below the plan
ACCEPTANCE = (0.6, 0.5)  # speculative acceptance: little gain, loss
SLOW_CLASS = 2.0  # TTFT p50 of a class against the others'
STEP_BETWEEN_KINDS = 1.2  # of the TPOT of neighbouring percentiles; up to 1.06 on one engine
RARER_KIND = 0.04  # the least share of either kind
OF_A_KIND = 20  # requests: among fewer, neighbouring percentiles lie far apart by chance
CAPPED = "Requests wait although the KV cache has room"
FULL = 0.9  # of the most requests that ran at once, in the mean: a limit, no peak
POOL_FREE = 0.9  # KV use below this while requests wait: another limit holds them back
HELD_S = 0.01  # an answer that takes less is held back by nothing
LATENCY_OF_TOKENS = ("itl", "icl", "tpot")


def _seen(
    figure: str, value: float | str | None, stage: Stage | None = None, unit: str = ""
) -> Evidence:
    return Evidence(figure=figure, value=value, stage=stage.name if stage else None, unit=unit)


def _growth(at: Percentiles, low: Percentiles, quantile: str) -> float | None:
    above, base = getattr(at, quantile), getattr(low, quantile)
    return above / base if above is not None and base else None


def client(curve: Curve) -> Found | None:
    if not curve.summary.audit.client_limited:
        return None
    repeated = curve.summary.audit.repeated_stages
    limited = (s for s in curve.summary.stages if s.client_limited and s.index not in repeated)
    stage = next(limited, None)
    if stage is None:
        return None
    return Found(10.0, (_seen("client limited", stage.client_limited_reason, stage),))


def quota(curve: Curve) -> Found | None:
    """Requests are refused for their rate; what is carried stays the same at higher loads."""
    found = curve.summary.quota
    if found is None:
        return None
    stages = curve.summary.stages
    shares = [(refused_share(s), s) for s in stages]
    share, stage = max(shares, key=lambda pair: pair[0])
    evidence = (
        _seen("refused with 429 or 529", share, stage, "share"),
        _seen("carried requests/s", stage.carried_rps, stage),
        _seen("let through a minute", found.per_min or found.reason),
    )
    title = f"The endpoint refuses what exceeds a {found.text}: a limiter, not the engine"
    tested = curve.halved(stage, "refused", refused_share, "share")
    return Found(share / QUOTA_SHARE, evidence, title, tested)


def queueing(curve: Curve) -> Found | None:
    for stage in curve.stages[1:]:
        tail = _growth(stage.ttft_s, curve.low.ttft_s, "p99")
        step = _growth(stage.itl_s, curve.low.itl_s, "p50") or 1.0
        if tail is not None and tail >= TAIL_GROWTH and tail >= QUEUE_OVER_STEP * step:
            evidence = (
                _seen("TTFT p99 / that of the lowest load", tail, stage),
                _seen("ITL p50 / that of the lowest load", step, stage),
            )
            return Found(
                tail / TAIL_GROWTH,
                evidence,
                tested=curve.halved(stage, "TTFT p99", lambda s: s.ttft_s.p99, "s"),
            )
    return None


def prefill_bound(curve: Curve) -> Found | None:
    stage = curve.limited
    if stage is None:
        return None
    busy = curve.prefill_busy(stage, PREFILL_BUSY)
    if busy < PREFILL_BUSY:
        return None
    evidence = (_seen("share of time in prefill", busy, stage, "share"), *curve.beyond(stage))
    return Found(busy / PREFILL_BUSY, evidence)


def decode_bound(curve: Curve) -> Found | None:
    stage = curve.limited
    if stage is None or stage is curve.low:
        return None
    step = _growth(stage.itl_s, curve.low.itl_s, "p50")
    violated = {slo.metric for slo in curve.exceeded(stage)}
    slowed = step is not None and step >= 1.5
    if not (slowed or violated & set(LATENCY_OF_TOKENS)):
        return None
    busy = curve.prefill_busy(stage, DECODE_BUSY)
    if busy > DECODE_BUSY:
        return None
    evidence = (
        _seen("share of time in prefill", busy, stage, "share"),
        _seen("ITL p50 / that of the lowest load", step, stage),
        *curve.beyond(stage),
    )
    return Found(DECODE_BUSY / max(busy, 0.01), evidence)


def interference(curve: Curve) -> Found | None:
    """Long steps only while prompts are computed: the tail of ITL is broken, its median is not."""
    stage = curve.broken
    if stage is None or stage.itl_s.p50 is None or not stage.itl_s.p99:
        return None
    slos = [slo for slo in curve.exceeded(stage) if slo.metric in LATENCY_OF_TOKENS]
    ratio = stage.itl_s.p99 / stage.itl_s.p50
    within = [slo for slo in slos if slo.limit_s and stage.itl_s.p50 < slo.limit_s / 2]
    if not within or ratio < TAIL_OVER_MEDIAN:
        return None
    evidence = (
        _seen("ITL p99 / p50", ratio, stage),
        _seen("mean input tokens", curve.summary.fleet.input_tokens_mean),
        *curve.beyond(stage),
    )
    return Found(ratio / TAIL_OVER_MEDIAN, evidence)


def slow_alone(metrics: Sequence[str]) -> Callable[[Curve], Found | None]:
    """Return the check for an SLO that is violated although requests hardly meet."""

    def check(curve: Curve) -> Found | None:
        slo = next((s for s in curve.violated(curve.low) if s.metric in metrics), None)
        if slo is None:
            return None
        if not curve.idle:
            raise CannotTell(
                "no stage of a nearly idle endpoint (in flight at most 4): begin lower"
            )
        verdict = next(v for v in curve.low.slo_verdicts if v.slo == slo.text)
        over = verdict.value_s / slo.limit_s if verdict.value_s and slo.limit_s else 1.0
        return Found(over, (_seen(slo.text, verdict.value_s, curve.low, "s"),))

    return check


def plateau(curve: Curve) -> Found | None:
    stage = curve.saturated
    if stage is None or not stage.achieved_rps or not stage.offered_rps:
        return None
    evidence = (
        _seen("achieved / offered", stage.achieved_rps / stage.offered_rps, stage, "share"),
        _seen("output tokens/s", stage.output_tokens_per_s, stage),
    )
    return Found(SATURATED * stage.offered_rps / stage.achieved_rps, evidence)


def both_slos(curve: Curve) -> Found | None:
    """TTFT and token latency are violated at the same, lowest load, and hold at a lower one."""
    stage = curve.broken
    if stage is None or stage is curve.low:
        return None
    metrics = {slo.metric for slo in curve.exceeded(stage)}
    tokens = metrics & set(LATENCY_OF_TOKENS)
    if "ttft" not in metrics or not tokens:
        return None
    both = _seen("SLOs violated at once", f"ttft, {', '.join(sorted(tokens))}", stage)
    return Found(1.0, (both, *curve.beyond(stage)))


def kv_pressure(curve: Curve) -> Found | None:
    best: Found | None = None
    for stage, server in curve.with_server():
        share = (server.preemptions or 0.0) / stage.requests if stage.requests else 0.0
        full = (server.kv_cache_usage_max or 0.0) >= KV_FULL and (server.waiting or 0.0) >= 1
        if share < PREEMPTED[0] and not full:
            continue
        level = ("pressure", "heavy", "cascade")[sum(share >= p for p in PREEMPTED[1:])]
        evidence = (
            _seen("KV cache in use, most", server.kv_cache_usage_max, stage, "share"),
            _seen(f"preemptions per request ({level})", share, stage, "share"),
        )
        strength = max(share / PREEMPTED[0], 1.0)
        if best is None or strength > best.strength:
            best = Found(strength, evidence)
    return best


def prefix_cache(curve: Curve) -> Found | None:
    held = [s for s in curve.summary.sharing or () if s.planned]
    known = [s for s in held if s.realised is not None]
    if held and not known:
        raise CannotTell(f"cached tokens: {held[0].realised_reason or 'not reported'}")
    for sharing in known:
        planned, realised = sharing.planned or 0.0, sharing.realised or 0.0
        if planned < CACHE_LACKS:
            continue
        if realised < planned - CACHE_LACKS or (realised < CACHE_LEAST <= planned):
            name = curve.summary.stages[sharing.stage].name
            evidence = (
                Evidence(figure="cached share, planned", value=planned, stage=name, unit="share"),
                Evidence(figure="cached share, realised", value=realised, stage=name, unit="share"),
            )
            return Found(planned / max(realised, 0.01), evidence)
    return None


def slow_class(curve: Curve) -> Found | None:
    """One class waits for its first token longer than the others with prompts as long."""
    for stage in curve.stages:
        medians = {n: c.ttft_from_schedule_s.p50 for n, c in stage.classes.items()}
        known = {name: p50 for name, p50 in medians.items() if p50}
        if len(known) < 2:
            continue
        slowest = max(known, key=lambda name: known[name])
        others = sorted(p50 for name, p50 in known.items() if name != slowest)
        ratio = known[slowest] / others[len(others) // 2]
        if ratio >= SLOW_CLASS and _same_prompts(curve.summary, slowest):
            return Found(
                ratio / SLOW_CLASS,
                (_seen(f"TTFT p50 of class {slowest} / the others'", ratio, stage),),
            )
    return None


def _same_prompts(summary: Summary, name: str) -> bool:
    """Return whether a class has no longer prompts than the others, within a half."""
    for traffic in summary.traffic:
        means = {c.name: c.input_tokens.mean for c in traffic.classes}
        mine, others = means.pop(name, None), [m for m in means.values() if m]
        if mine and others:
            return mine <= 1.5 * max(others)
    return False


def speculation(curve: Curve) -> Found | None:
    rates = [(s, v.spec_acceptance_rate) for s, v in curve.with_server()]
    known = [(stage, rate) for stage, rate in rates if rate is not None]
    if not known:
        raise CannotTell("the server reports no speculative acceptance (or does not speculate)")
    stage, rate = min(known, key=lambda pair: pair[1])
    if rate >= ACCEPTANCE[0]:
        return None
    return Found(
        ACCEPTANCE[0] / max(rate, 0.01),
        (_seen("accepted of drafted tokens", rate, stage, "share"),),
    )


def batch_capped(curve: Curve) -> Found | None:
    """Requests wait although the KV pool has room: the number of sequences is limited."""
    for stage, server in curve.with_server():
        usage, waiting = server.kv_cache_usage_max, server.waiting
        if usage is None or waiting is None:
            raise CannotTell("the server reports no KV use or no waiting requests")
        if waiting < max(1.0, 0.1 * (server.running or 0.0)) or usage >= POOL_FREE:
            continue
        most = server.running_max
        if most is not None and (server.running or 0.0) < FULL * most:
            continue  # fewer ran, mostly: no number of sequences holds the others back
        if not (curve.idle and curve.prefill_busy(stage, PREFILL_BUSY) >= PREFILL_BUSY):
            evidence = (
                _seen("requests waiting, mean", waiting, stage),
                _seen("requests running, mean", server.running, stage),
                _seen("requests running, most", most, stage),
                _seen("KV cache in use, most", usage, stage, "share"),
            )
            alone = most and server.engines == 1
            title = (
                f"{CAPPED}: the engine probably runs at most {most:.0f} at once" if alone else None
            )
            return Found(POOL_FREE / max(usage, 0.01), evidence, title)
    return None


def two_kinds(curve: Curve) -> Found | None:
    """Some requests get their tokens slower than all others: a step in the curve of TPOT."""
    for stage in curve.stages:
        tpot = stage.curves.get("tpot_s")
        if tpot is None or stage.stable is False or not _short_prompts(stage):
            continue
        inside = [
            (high / low, q)
            for q, low, high in zip(tpot.q, tpot.value, tpot.value[1:], strict=False)
            if low and high and RARER_KIND <= q <= 1 - RARER_KIND
            if min(q, 1 - q) * stage.ok >= OF_A_KIND
        ]
        step, share = max(inside, default=(1.0, 0.0))
        if step >= STEP_BETWEEN_KINDS:
            evidence = (
                _seen("step in the curve of TPOT", step, stage),
                _seen("share of slower requests", 1 - share, stage, "share"),
            )
            return Found(step / STEP_BETWEEN_KINDS, evidence)
    return None


def _short_prompts(stage: Stage) -> bool:
    """Return whether the prompt of another request cannot by itself stretch a TPOT so far."""
    alone_s, whole_s = stage.ttft_s.p50, stage.e2e_s.p50
    return (
        alone_s is not None and whole_s is not None and alone_s < (STEP_BETWEEN_KINDS - 1) * whole_s
    )


def held_back(curve: Curve) -> Found | None:
    """Tokens that come in groups, although the engine makes one a step."""
    checks = curve.summary.diagnosis or ()
    probed = [_seen("stream", c.found) for c in checks if c.name == "stream" and c.verdict == "bad"]
    slow = [s for s in curve.kept_up if (s.e2e_s.p50 or HELD_S) >= HELD_S]
    reasons = [(s, s.icl_s.reason or "") for s in slow]
    seen = [_seen("chunks", r, s) for s, r in reasons if HELD_BACK in r or IN_ONE_PIECE in r]
    return Found(5.0, (*probed, *seen[:1])) if probed or seen else None


def drift(curve: Curve) -> Found | None:
    stage = next((s for s in curve.stages if s.drift.drifting and s.stable is not False), None)
    if stage is None:
        return None
    return Found(
        1.0 + abs(stage.drift.change or 0.0),
        (_seen("TTFT p99, change", stage.drift.change, stage, "share"),),
    )
