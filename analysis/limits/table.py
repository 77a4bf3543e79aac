"""Find what limits an endpoint, and what to change first: a closed table of rules over a summary.

Each rule reads figures of the summary and answers yes, no, or "cannot tell, because X was not
measured". Several may hold: causes come before symptoms, and what shows at a lower load before what
shows at a higher one, as it ends the range in which the SLOs hold.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from ampacity.analysis.contract.limits import Evidence, Limit
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.limits import checks
from ampacity.analysis.limits.curve import CannotTell, Curve, Rule

SYMPTOMS = {"queueing", "plateau"}  # of any engine near or beyond its throughput
NO_CAUSES = {*SYMPTOMS, "client_limited"}
FALLS, STAYS = 0.5, 0.9  # of a figure, at a rate of about half


def find_limits(summary: Summary) -> tuple[Limit, ...]:
    """Return the answer of every rule: those that hold first, causes before symptoms."""
    curve = Curve(summary)
    found = [_answer(rule, curve) for rule in RULES]
    order = {True: 0, None: 1, False: 2}
    load = {stage.name: stage.offered_rps or 0.0 for stage in summary.stages}

    def rank(limit: Limit) -> tuple[int, bool, float, float]:
        stages = [load[e.stage] for e in limit.evidence if e.stage in load]
        symptom = limit.rule in SYMPTOMS
        return order[limit.holds], symptom, min(stages, default=0.0), -limit.strength

    ranked = sorted(found, key=rank)
    causes = (one for one in ranked if one.holds and one.rule not in NO_CAUSES)
    cause = next(causes, None)
    return tuple(_below(cause, limit) if cause else limit for limit in ranked)


def _below(cause: Limit, limit: Limit) -> Limit:
    """Return a symptom that holds with the lever of its cause, anything else as it is."""
    if limit.rule not in SYMPTOMS or not limit.holds:
        return limit
    return replace(limit, lever=f"what the first cause says: {cause.lever}")


def _answer(rule: Rule, curve: Curve) -> Limit:
    found, reason = None, None
    try:
        found = rule.check(curve)
    except CannotTell as missing:
        reason = f"cannot tell: {missing}"
    tested = found.tested if found else ()
    return Limit(
        rule=rule.name,
        holds=None if reason else found is not None,
        title=(found and found.title) or rule.title,
        lever=rule.lever,
        refuted_by=rule.refuted_by,
        evidence=found.evidence if found else (),
        strength=found.strength if found else 0.0,
        reason=reason,
        tested=tested,
        refuted=_refuted(tested),
    )


def _refuted(tested: Sequence[Evidence]) -> bool | None:
    """Return whether a figure that should fall with the rate stays; None: it falls by less."""
    at = [e.value for e in tested[:2] if isinstance(e.value, float)]
    if len(at) < 2 or FALLS * at[1] < at[0] < STAYS * at[1]:
        return None
    return at[0] > FALLS * at[1]


RULES = (
    Rule(
        "client_limited",
        "The load generator could not keep up",
        checks.client,
        "give the client more cores (--cpus, --workers) or stop what runs beside it",
        "the same load with two workers shows the same latency",
    ),
    Rule(
        "quota",
        "The endpoint refuses requests above a rate: a quota or a limiter, not the engine",
        checks.quota,
        "ask for a higher quota, or size by the carried rate; retries only add load",
        "the refusals stay when the rate is halved",
    ),
    Rule(
        "queueing",
        "Requests queue: P99 of TTFT grows far more than the steps do",
        checks.queueing,
        "send each instance less, or add an instance: no engine setting shortens a queue",
        "TTFT stays when the rate is halved",
    ),
    Rule(
        "prefill_bound",
        "The engine is busy with prompts",
        checks.prefill_bound,
        "raise the share of cached prefixes first; then more compute (TP, prefill instances)",
        "prompts half as long carry the same rate",
    ),
    Rule(
        "decode_bound",
        "The engine is busy with decoding",
        checks.decode_bound,
        "quantise weights or KV cache (fewer bytes a step); then more memory bandwidth",
        "answers half as long carry the same rate",
    ),
    Rule(
        "prefill_interference",
        "Prompts of others stretch single tokens: the tail of ITL, not its median",
        checks.interference,
        "a smaller token budget of a step (chunked prefill); then prefill apart from decoding",
        "the tail stays with short prompts at the same token rate",
    ),
    Rule(
        "slow_prefill_alone",
        "TTFT is too high even where the endpoint is nearly idle",
        checks.slow_alone(("ttft", "first_answer")),
        "the prefix hit rate first, then a higher TP degree",
        "a request alone on the endpoint meets the limit",
    ),
    Rule(
        "slow_decode_alone",
        "Time between tokens is too high even where the endpoint is nearly idle",
        checks.slow_alone(checks.LATENCY_OF_TOKENS),
        "speculative decoding, or quantised weights; then a higher TP degree",
        "a request alone on the endpoint meets the limit",
    ),
    Rule(
        "plateau",
        "Throughput no longer follows the load",
        checks.plateau,
        "quantise the KV cache or the weights before buying hardware",
        "twice that load achieves more than 10 % more",
    ),
    Rule(
        "both_slos",
        "TTFT and token latency are violated at the same load",
        checks.both_slos,
        "prefill and decoding on separate instances (disaggregation)",
        "one of the two is met at that load with another token budget",
    ),
    Rule(
        "kv_pressure",
        "The KV cache is full: requests wait for it or are preempted",
        checks.kv_pressure,
        "a KV cache in FP8, shorter max_tokens, or fewer sequences at once",
        "preemptions stay with half of the sequences",
    ),
    Rule(
        "prefix_cache",
        "Fewer prompt tokens come from the prefix cache than the workload allows",
        checks.prefix_cache,
        "route by prefix, keep the shared part first in the prompt, give the cache more room",
        "the server reports the planned share on one instance",
    ),
    Rule(
        "slow_class",
        "One class waits longer than others with prompts as long (adapters that are paged?)",
        checks.slow_class,
        "more adapter slots on the GPU, or instances for that class",
        "the class alone is as slow",
    ),
    Rule(
        "speculation",
        "Few drafted tokens are accepted",
        checks.speculation,
        "fewer drafts a step, a better draft model, or none: rejected drafts cost steps",
        "tokens/s fall without speculation",
    ),
    Rule(
        "batch_capped",
        checks.CAPPED,
        checks.batch_capped,
        "double max_num_seqs, and run the same rates again",
        "with a higher max_num_seqs no more requests run at once, or no more are answered a second",
    ),
    Rule(
        "replicas",
        "Two kinds of requests, fast and slow: one replica is slower or fuller than others",
        checks.two_kinds,
        "look at each replica's own metrics; route by load (least requests), not in turn",
        "requests to one replica alone are of both kinds",
    ),
    Rule(
        "held_back",
        "Tokens are held back on their way",
        checks.held_back,
        "switch off buffering in the gateway (proxy_buffering off, flush each event)",
        "the engine's own port shows the same chunks",
    ),
    Rule(
        "drift",
        "The tail moves on through a stage at a constant load",
        checks.drift,
        "look for what grows: fragments of memory, a cache, the heat of the cards; longer stages",
        "a second run of the stage shows no trend",
    ),
)
