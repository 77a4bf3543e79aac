"""Measure how far a deployment is from what its hardware can do.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
A step of decoding reads all weights once and the KV cache of every sequence in the batch; its time
is at least these bytes over the bandwidth, and at least its operations over the peak compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.memory import element_bytes
from ampacity.analysis.decision.model import DecisionError, ModelShape
from ampacity.simulator.models.catalog import Hardware, kv_copies

HARDWARE_BOUND = 0.8  # from this share of the bandwidth on, software has little left to win
GB = 1e9


@dataclass(frozen=True)
class Instance:
    """A model on ``gpus`` GPUs, with the precisions of its weights and of its KV cache."""

    shape: ModelShape
    hardware: Hardware
    gpus: int = 1
    weights: str = "fp16"
    kv: str = "fp16"

    @property
    def bandwidth_bytes_s(self) -> float:
        return self.gpus * self.hardware.bandwidth_bytes_s

    @property
    def peak_flops(self) -> float:
        return self.gpus * self.hardware.peak_flops(self.weights)

    def step_bytes(self, batch: float, context: float) -> float:
        """Return the bytes that one decoding step of ``batch`` sequences reads."""
        weights = self.shape.weights_read(batch) * element_bytes(self.weights)
        cached = kv_copies(self.shape.kv_heads, self.gpus) * self.shape.kv_bytes(
            context, element_bytes(self.kv)
        )
        return weights + batch * cached

    def token_flops(self) -> float:
        """Return the operations for one token: two for each active parameter.

        Attention over the context is left out (Kaplan et al. 2020, section 2.1): a lower bound.
        """
        return 2.0 * self.shape.computed_parameters


@dataclass(frozen=True)
class Point:
    """A measured operating point of one instance. Lengths are means over its requests.

    ``tpot_s``: mean time between tokens of a request; rates with their 95 % interval.
    """

    output_tokens_per_s: Range
    tpot_s: float
    input_tokens: float
    output_tokens: float
    input_tokens_per_s: float | None = None

    @property
    def batch(self) -> float:
        """Return the mean number of sequences that decode at a time (Little's law), 1 at least."""
        return self.batch_at(self.output_tokens_per_s.value)

    def batch_at(self, tokens_per_s: float) -> float:
        return max(tokens_per_s * self.tpot_s, 1.0)

    @property
    def context(self) -> float:
        """Return the mean context of a sequence while it decodes."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class Use:
    """Use of the hardware at an operating point, and what it delivers per unit of it."""

    batch: float
    context: float
    intensity: float
    mbu: Range
    mfu: Range | None
    decode_floor_s: float
    prefill_floor_s: float
    tokens_per_s_per_gpu: Range
    tokens_per_gpu_hour: Range
    tokens_per_s_per_gb: Range


def ridge_flops_per_byte(hardware: Hardware, weights: str = "fp16") -> float:
    """Return peak operations / bandwidth: below this intensity the memory is the limit."""
    return hardware.peak_flops(weights) / hardware.bandwidth_bytes_s


def decode_floor_s(instance: Instance, batch: float, context: float) -> float:
    """Return the least time of a decoding step: the larger of bytes and operations over peaks."""
    memory_s = instance.step_bytes(batch, context) / instance.bandwidth_bytes_s
    return max(memory_s, batch * instance.token_flops() / instance.peak_flops)


def prefill_floor_s(instance: Instance, tokens: float) -> float:
    """Return the least time to compute a prompt of ``tokens``: operations over the peak."""
    weights = instance.shape.weights_read(tokens) * element_bytes(instance.weights)
    memory_s = weights / instance.bandwidth_bytes_s
    return max(tokens * instance.token_flops() / instance.peak_flops, memory_s)


def bandwidth_share(step_bytes: float, steps_per_s: float, bandwidth_bytes_s: float) -> float:
    """Return the model bandwidth utilisation (MBU): bytes read per second / peak bandwidth."""
    return step_bytes * steps_per_s / bandwidth_bytes_s


def use_of(instance: Instance, point: Point) -> Use:
    """Return what a measured point uses of its hardware.

    MBU = bytes of a step / (TPOT x bandwidth): a step gives each sequence of the batch one token.
    Its interval is that of the batch, which follows the rate; the error of TPOT is not in it.
    MFU = operations of all tokens of both kinds / peak (Chowdhery et al. 2022, PaLM, appendix B).
    Raises DecisionError where a share is above 1, which no hardware allows.
    """
    if not (point.tpot_s > 0 and point.output_tokens_per_s.value > 0):
        raise DecisionError("no tokens were measured: TPOT and output tokens/s must be above zero")
    rate = point.output_tokens_per_s
    moved = instance.step_bytes(point.batch, point.context)

    def used(tokens_per_s: float) -> float:
        step_bytes = instance.step_bytes(point.batch_at(tokens_per_s), point.context)
        return bandwidth_share(step_bytes, 1 / point.tpot_s, instance.bandwidth_bytes_s)

    mbu = rate.through(used)
    mfu = None
    if point.input_tokens_per_s is not None:
        per_output = 1 + point.input_tokens_per_s / rate.value
        mfu = rate.times(per_output * instance.token_flops() / instance.peak_flops)
    for name, share in (("bandwidth (MBU)", mbu), ("compute (MFU)", mfu)):
        if share is not None and share.value > 1:
            raise DecisionError(
                f"the measured rate would need {100 * share.value:.0f} % of the {name} of "
                f"{instance.gpus} x {instance.hardware.name}: check the number of GPUs, the model, "
                "its precision, and whether prompts were cached or tokens speculated"
            )
    gigabytes = instance.gpus * instance.hardware.memory_bytes / GB
    return Use(
        batch=point.batch,
        context=point.context,
        intensity=point.batch * instance.token_flops() / moved,
        mbu=mbu,
        mfu=mfu,
        decode_floor_s=decode_floor_s(instance, point.batch, point.context),
        prefill_floor_s=prefill_floor_s(instance, point.input_tokens),
        tokens_per_s_per_gpu=rate.times(1 / instance.gpus),
        tokens_per_gpu_hour=rate.times(3600 / instance.gpus),
        tokens_per_s_per_gb=rate.times(1 / gigabytes),
    )


def lever(use: Use) -> str:
    """Return what a use of the bandwidth leaves to do."""
    low, high = use.mbu.low, use.mbu.high
    at, *sides = (f"{100 * (end or 0.0):.0f}" for end in (use.mbu.value, low, high))
    ends = f" ({sides[0]} to {sides[1]} %)" if {*sides} != {at} and None not in (low, high) else ""
    used = f"{at} %{ends} of the bandwidth bound used"
    if low is not None and high is not None and low <= HARDWARE_BOUND < high:
        return f"{used}: {100 * HARDWARE_BOUND:.0f} % lies inside, so the lever cannot be told"
    if use.mbu.value > HARDWARE_BOUND:
        return f"{used}: hardware is the remaining lever"
    return f"{used}: software can still help"


def cost_floor_per_million(
    step_s: float, batch: float, usd_per_s: float, accepted: float = 1.0
) -> float:
    """Return the dollars per million output tokens at a step time; ``accepted``: share of use."""
    return step_s / batch * usd_per_s / accepted * 1e6


def speculated_tokens_per_step(draft: int, acceptance: float) -> float:
    """Return the expected tokens of a step that drafts ``draft`` tokens.

    (1 - a^(K+1)) / (1 - a) for an acceptance rate a of each draft token (Leviathan et al. 2023).
    """
    if acceptance >= 1:
        return draft + 1.0
    return (1 - acceptance ** (draft + 1)) / (1 - acceptance)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Return the idle share of a pipeline: (p - 1) / (m + p - 1) (Huang et al. 2019, GPipe)."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True)
class Crossover:
    """Two tensor-parallel degrees between which requests/s per GPU fall.

    ``certain``: their intervals do not meet.
    """

    lower: int
    higher: int
    lower_rps_per_gpu: Range
    higher_rps_per_gpu: Range

    @property
    def certain(self) -> bool:
        low, high = self.lower_rps_per_gpu.low, self.higher_rps_per_gpu.high
        return low is not None and high is not None and high < low


def tp_crossover(capacity_by_gpus: Mapping[int, Range]) -> Crossover | None:
    """Return the first step of the degree at which requests/s per GPU fall; None: at none."""
    degrees = sorted(capacity_by_gpus)
    per_gpu = {n: capacity_by_gpus[n].times(1 / n) for n in degrees}
    for lower, higher in pairwise(degrees):
        if per_gpu[higher].value < per_gpu[lower].value:
            return Crossover(lower, higher, per_gpu[lower], per_gpu[higher])
    return None
