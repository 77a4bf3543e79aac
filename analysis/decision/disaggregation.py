"""Is prefill apart from decoding worth it: six conditions, each with its evidence."""

from __future__ import annotations

from collections.abc import Sequence

from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.decision.memory import element_bytes
from ampacity.analysis.decision.model import ModelShape
from ampacity.analysis.decision.money import transfer_s

LONG_PROMPT_TOKENS = 1000  # below this a prompt hardly stretches the steps of others
TRANSFER_SHARE = 0.1  # of the TTFT limit: what moving the KV cache may cost
LEAST_INSTANCES = 3  # of one pool each, and one to spare


class Condition(Part, frozen=True, kw_only=True):
    """One condition; ``holds`` None: not known, ``evidence`` says what is missing."""

    name: str
    holds: bool | None
    evidence: str


def readiness(
    summary: Summary,
    limits: Sequence[Limit],
    shape: ModelShape | None = None,
    link_bits_s: float | None = None,
    instances: int | None = None,
    kv: str = "fp16",
) -> list[Condition]:
    """Return the six conditions for prefill and decoding on instances of their own.

    ``kv``: precision of the KV cache that the link moves.
    """
    held = {limit.rule: limit for limit in limits}
    return [
        _interference(held),
        _long_prompts(summary),
        _two_slos(summary),
        _transfer(summary, shape, link_bits_s, element_bytes(kv)),
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


def _transfer(
    summary: Summary, shape: ModelShape | None, link_bits_s: float | None, element: float
) -> Condition:
    name = "the link moves a KV cache in time"
    limit_s = min(
        (s.limit_s for s in summary.slos if s.metric == "ttft" and s.limit_s), default=None
    )
    tokens = summary.fleet.input_tokens_mean
    if shape is None or link_bits_s is None or limit_s is None or tokens is None:
        needed = {"--model-config": shape, "--link": link_bits_s, "an SLO on TTFT": limit_s}
        needed["counted input tokens"] = tokens
        lacks = f"missing: {', '.join(what for what, held in needed.items() if held is None)}"
        return Condition(name=name, holds=None, evidence=lacks)
    needed_s = transfer_s(shape.kv_bytes(tokens, element), link_bits_s)
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
