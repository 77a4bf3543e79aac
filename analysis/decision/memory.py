"""The memory floor: how many GPUs a model and its load need before any speed is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ampacity.analysis.decision.model import DecisionError, ModelShape
from ampacity.simulator.models.catalog import BYTES_PER_ELEMENT, Hardware, kv_copies

ACTIVATION_SHARE = 0.2  # of the weights in 16 bits; an assumption
OVERHEAD_SHARE = 0.075  # of the GPU memory, for framework and graphs: 5 to 10 %; an assumption
HEADROOMS = (0.3, 0.5)


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters that are kept on the GPUs: ``slots`` of ``bytes_each``."""

    slots: int = 0
    bytes_each: float = 0.0

    @property
    def bytes(self) -> float:
        return self.slots * self.bytes_each


NO_ADAPTERS = Adapters()


@dataclass(frozen=True)
class Needed:
    """Bytes that one instance keeps; ``overhead`` None: a share of each GPU's memory."""

    weights: float
    kv: float
    activations: float
    adapters: float = 0.0
    overhead: float | None = None

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.activations + self.adapters + (self.overhead or 0.0)


@dataclass(frozen=True)
class Floor:
    """The GPUs of one instance by memory alone, for a ``headroom`` (0.3: 30 % more than needed).

    ``tensor_parallel`` is the lowest valid degree that has these GPUs; None: the heads have no
    divisor as large.
    """

    headroom: float
    gpus: int
    tensor_parallel: int | None


@dataclass(frozen=True)
class Fit:
    """Does it fit: what is needed, the GPUs for it, and what the KV pool then holds.

    ``sequences``: the most sequences in the KV pool of the instance, by the name of a length.
    """

    needed: Needed
    floors: tuple[Floor, ...]
    degrees: tuple[int, ...]
    gpus: int
    pool_bytes: float
    sequences: Mapping[str, int] = field(default_factory=dict)


def element_bytes(precision: str) -> float:
    """Return the bytes of one number at a precision. Raises DecisionError."""
    if precision not in BYTES_PER_ELEMENT:
        raise DecisionError(
            f"precision {precision!r} (--weights, --kv) is none of {', '.join(BYTES_PER_ELEMENT)}"
        )
    return BYTES_PER_ELEMENT[precision]


def memory_needed(
    shape: ModelShape,
    sequences: float,
    tokens: float,
    *,
    weights: str = "fp16",
    kv: str = "fp16",
    adapters: Adapters = NO_ADAPTERS,
) -> Needed:
    """Return the bytes of an instance that holds ``sequences`` of ``tokens`` tokens each."""
    return Needed(
        weights=shape.parameters * element_bytes(weights),
        kv=sequences * shape.kv_bytes(tokens, element_bytes(kv)),
        activations=ACTIVATION_SHARE * shape.parameters * element_bytes("fp16"),
        adapters=adapters.bytes,
    )


def gpus_needed(needed: Needed, gpu_bytes: float, headroom: float = 0.0) -> int:
    """Return the fewest GPUs whose memory holds what is needed with a headroom.

    ceil(total x (1 + headroom) / usable memory of a GPU); the framework's share comes off each GPU
    unless ``needed.overhead`` states it in bytes.
    """
    usable = gpu_bytes * (1 - (OVERHEAD_SHARE if needed.overhead is None else 0.0))
    return max(1, math.ceil(needed.total * (1 + headroom) / usable - 1e-9))


def valid_degrees(heads: int) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that split the attention heads evenly, rising."""
    return tuple(n for n in range(1, heads + 1) if heads % n == 0)


def floor_of(needed: Needed, gpu_bytes: float, heads: int, headroom: float = 0.0) -> Floor:
    """Return the GPUs by memory, and the lowest valid tensor-parallel degree that has as many."""
    gpus = gpus_needed(needed, gpu_bytes, headroom)
    degree = next((n for n in valid_degrees(heads) if n >= gpus), None)
    return Floor(headroom, gpus, degree)


def kv_pool_bytes(needed: Needed, gpu_bytes: float, gpus: int) -> float:
    """Return what is left for the KV cache on ``gpus`` GPUs; 0 where the model does not fit."""
    share = OVERHEAD_SHARE if needed.overhead is None else 0.0
    return max(0.0, gpus * gpu_bytes * (1 - share) - (needed.total - needed.kv))


def sequences_held(pool_bytes: float, sequence_bytes: float) -> int:
    """Return how many sequences of one length the KV pool holds at a time."""
    return math.floor(pool_bytes / sequence_bytes + 1e-9)


def does_it_fit(
    shape: ModelShape,
    needed: Needed,
    hardware: Hardware,
    lengths: Mapping[str, float],
    *,
    kv: str = "fp16",
    gpus: int | None = None,
) -> Fit:
    """Return the floors without and with headroom, and the sequences that the KV pool holds.

    ``lengths``: tokens of a sequence by name (p50, p95, p99). ``gpus`` of the instance; None: those
    of the lowest degree that fits. Raises DecisionError where no degree has enough memory.
    """
    floors = tuple(
        floor_of(needed, hardware.memory_bytes, shape.heads, headroom)
        for headroom in (0.0, *HEADROOMS)
    )
    count = gpus or floors[0].tensor_parallel
    if count is None:
        raise DecisionError(
            f"{shape.name} needs {floors[0].gpus} GPUs {hardware.name} by memory: more than its "
            f"{shape.heads} heads can be split over; take a larger GPU or a lower precision"
        )
    pool = kv_pool_bytes(needed, hardware.memory_bytes, count)
    copies = kv_copies(shape.kv_heads, count)
    held = {
        name: sequences_held(pool, copies * shape.kv_bytes(tokens, element_bytes(kv)))
        for name, tokens in lengths.items()
        if tokens > 0
    }
    return Fit(needed, floors, valid_degrees(shape.heads), count, pool, held)
