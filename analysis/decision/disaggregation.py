"""Prefill apart from decoding: six conditions, each with its evidence, and the two pools."""

from __future__ import annotations

from collections.abc import Sequence

from ampacity.analysis.capacity.fleet_figures import FleetInputs, fleet_figures
from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.memory import element_bytes
from ampacity.analysis.decision.money import transfer_s
from ampacity.analysis.decision.roofline import Instance
from ampacity.analysis.limits.curve import CannotTell, Curve

LONG_PROMPT_TOKENS = 1000  # below this a prompt hardly stretches the steps of others
TRANSFER_SHARE = 0.1  # of the TTFT limit: what moving the KV cache may cost
LEAST_INSTANCES = 3  # of one pool each, and one to spare


class Condition(Part, frozen=True, kw_only=True):
    """One condition; ``holds`` None: not known, ``evidence`` says what is missing."""

    name: str
    holds: bool | None
    evidence: str


class Pools(Part, frozen=True, kw_only=True):
    """Pools for prefill and for decoding, estimated from one run that did both.

    An instance that only computes prompts carries ``prefill_rps`` at most (always busy), one that
    only decodes ``decode_rps`` at least (at the batch of the run).
    """

    prefill_rps: float
    decode_rps: float
    prefill_instances: int
    decode_instances: int


def pools_of(
    summary: Summary, peak_rps: float, safety_factor: float
) -> tuple[Pools | None, str | None]:
    """Return (the pools for a peak, why they are not known), from the rates of the two phases.

    At the capacity an engine is always busy, for a share b with prompts and else with decoding
    (utilisation law): a prefill instance carries capacity / b, a decode one capacity / (1 - b).
    """
    capacity = summary.capacity.capacity_rps or 0.0
    curve = Curve(summary)
    try:
        near = min(curve.stages, key=lambda s: abs((s.achieved_rps or 0.0) - capacity))
        busy = curve.prefill_busy(near, 0.0)
    except CannotTell as missing:
        return None, f"cannot tell: {missing}"
    rate = near.achieved_rps or 0.0
    if not 0 < busy < 1:
        return None, f"prompts take {100 * busy:.0f} % of the time: no rate of both phases follows"
    rates = rate / busy, rate / (1 - busy)
    prefill, decode = (
        fleet_figures(
            FleetInputs(peak_rps=peak_rps, capacity_rps=each, safety_factor=safety_factor)
        ).instances
        for each in rates
    )
    return Pools(
        prefill_rps=rates[0],
        decode_rps=rates[1],
        prefill_instances=prefill,
        decode_instances=decode,
    ), None


def readiness(
    summary: Summary,
    limits: Sequence[Limit],
    instance: Instance | None = None,
    link_bits_s: float | None = None,
    instances: int | None = None,
) -> list[Condition]:
    """Return the six conditions for prefill and decoding on instances of their own."""
    held = {limit.rule: limit for limit in limits}
    return [
        _interference(held),
        _long_prompts(summary),
        _two_slos(summary),
        _transfer(summary, instance, link_bits_s),
        _enough_instances(instances),
        _few_cached(summary),
    ]


def _interference(held: dict[str, Limit]) -> Condition:
    rules = ("prefill_interference", "both_slos")
    found = [held[rule] for rule in rules if rule in held and held[rule].holds]
    evidence = (
        found[0].title if found else "neither the tail of ITL nor both SLOs at once are broken"
    )
    return Condition(name="prompts disturb decoding", holds=bool(found), evidence=evidence)


def _long_prompts(summary: Summary) -> Condition:
    mean = summary.fleet.input_tokens_mean
    if mean is None:
        return Condition(name="prompts are long", holds=None, evidence="no input tokens counted")
    text = f"{mean:,.0f} tokens on average; {LONG_PROMPT_TOKENS:,} or more count as long"
    return Condition(name="prompts are long", holds=mean >= LONG_PROMPT_TOKENS, evidence=text)


def _two_slos(summary: Summary) -> Condition:
    metrics = {slo.metric for slo in summary.slos}
    both = "ttft" in metrics and bool(metrics & {"itl", "icl", "tpot"})
    text = ", ".join(slo.text for slo in summary.slos) or "no SLO given"
    return Condition(name="TTFT and token latency both have an SLO", holds=both, evidence=text)


def _transfer(summary: Summary, instance: Instance | None, link_bits_s: float | None) -> Condition:
    name = "the link moves a KV cache in time"
    limit_s = min(
        (s.limit_s for s in summary.slos if s.metric == "ttft" and s.limit_s), default=None
    )
    tokens = summary.fleet.input_tokens_mean
    if instance is None or link_bits_s is None or limit_s is None or tokens is None:
        needed = {"--model-config": instance, "--link": link_bits_s, "an SLO on TTFT": limit_s}
        needed["counted input tokens"] = tokens
        lacks = f"missing: {', '.join(what for what, held in needed.items() if held is None)}"
        return Condition(name=name, holds=None, evidence=lacks)
    needed_s = transfer_s(instance.shape.kv_bytes(tokens, element_bytes(instance.kv)), link_bits_s)
    share = needed_s / limit_s
    text = (
        f"{1e3 * needed_s:.3g} ms for {tokens:,.0f} tokens, {100 * share:.2g} % of the TTFT limit"
    )
    return Condition(name=name, holds=needed_s <= TRANSFER_SHARE * limit_s, evidence=text)


def _enough_instances(instances: int | None) -> Condition:
    name = "the fleet is large enough for two pools"
    if instances is None:
        return Condition(name=name, holds=None, evidence="no fleet was sized (--peak-rps)")
    text = f"{instances} instances; {LEAST_INSTANCES} at least"
    return Condition(name=name, holds=instances >= LEAST_INSTANCES, evidence=text)


def _few_cached(summary: Summary) -> Condition:
    name = "few prompt tokens are cached"
    shares = [s.realised for s in summary.sharing or () if s.realised is not None]
    if not shares:
        return Condition(name=name, holds=None, evidence="the cached share is not known")
    share = max(shares)
    text = f"{100 * share:.0f} % are cached; caching makes prefill cheap where it runs"
    return Condition(name=name, holds=share < 0.5, evidence=text)
