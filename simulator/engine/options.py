"""The configuration of an engine, and the settings that the command line offers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.steptime import StepTime

ROUTINGS = ("round-robin", "least-request", "prefix-hash", "session-sticky")
POLICIES = ("fcfs", "prefill-priority", "decode-priority")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: K = `tokens` drafts a step, accepted with probability a = `acceptance`.

    A draft is accepted only if all before it are. A step gives 1 to K + 1 tokens,
    (1 - a^(K+1)) / (1 - a) on average (Leviathan, Kalman, Matias, "Fast Inference from Transformers
    via Speculative Decoding", ICML 2023, eq. 1), and computes K + 1 for each request. draft_s: time
    to draft in each step.
    """

    tokens: int
    acceptance: float
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.acceptance <= 1 or self.draft_s < 0:
            raise SimulatorError(
                f"speculation: needs tokens >= 1, acceptance in [0, 1] and draft_s >= 0, got {self}"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The limits and the policy of the scheduler, with vLLM's names. kv_blocks None: no limit.

    Policies: "fcfs" decodes in every step and spends the rest of the token budget on prompts, in
    order of arrival; "prefill-priority" decodes only when no prompt can be computed;
    "decode-priority" admits new prompts only when nothing decodes. static_batching:
    decode-priority, and the slot of a finished request is computed until the whole batch has
    finished.
    """

    name: str
    step_time: StepTime
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    kv_blocks: int | None = None
    block_tokens: int = 16
    policy: str = "fcfs"
    static_batching: bool = False
    prefix_caching: bool = False
    speculation: Speculation | None = None
    max_loras: int | None = None  # adapters loaded at once; None: adapters cost nothing
    adapter_load_s: float = 0.0  # added to the step in which an adapter is loaded
    seed: int = 0  # of the random numbers: accepted drafts

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_tokens"):
            if getattr(self, field) < 1:
                raise SimulatorError(
                    f"{self.name}: {field} must be at least 1, got {getattr(self, field)}"
                )
        if self.policy not in POLICIES:
            raise SimulatorError(
                f"{self.name}: unknown policy {self.policy!r}; known: {', '.join(POLICIES)}"
            )
        if self.max_loras is not None and self.max_loras < 1:
            raise SimulatorError(f"{self.name}: max_loras must be at least 1, got {self.max_loras}")
        if self.adapter_load_s and (self.max_loras is None or not self.adapter_load_s > 0):
            raise SimulatorError(
                f"{self.name}: adapter_load_s must be >= 0 and needs max_loras, "
                f"got {self.adapter_load_s} and {self.max_loras}"
            )
        per_sequence = 1 if self.speculation is None else self.speculation.tokens + 1
        if self.max_num_batched_tokens < self.max_num_seqs * per_sequence:
            raise SimulatorError(
                f"{self.name}: max_num_batched_tokens ({self.max_num_batched_tokens}) must be at "
                f"least max_num_seqs ({self.max_num_seqs}) times {per_sequence}, or a step could "
                "not decode every request"
            )
        if self.kv_blocks is not None and self.kv_blocks * self.block_tokens < self.max_model_len:
            raise SimulatorError(
                f"{self.name}: the KV cache holds {self.kv_blocks * self.block_tokens} tokens, "
                f"less than max_model_len {self.max_model_len}; lower max_model_len or "
                "use more memory"
            )


def finite(text: str) -> float:
    """Parse a finite number. Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def _switch(text: str) -> bool:
    return bool(("off", "on").index(text))


def _speculation(text: str) -> Speculation:
    drafts, acceptance, *draft_s = text.split(":")
    return Speculation(int(drafts), finite(acceptance), *map(finite, draft_s))


Settings = dict[str, tuple[Callable[[str], Any], str, str]]
"""By name: parser of a value, its metavar, help text."""
SCHEDULING: Settings = {
    "max_num_seqs": (int, "N", "Maximum number of sequences in a batch."),
    "max_num_batched_tokens": (int, "N", "Maximum number of tokens in a step."),
    "policy": (str, "|".join(POLICIES), "Order of prefill and decode in the scheduler."),
    "static_batching": (
        _switch,
        "on|off",
        "Start a new batch only when the whole batch before it has finished.",
    ),
    "prefix_caching": (_switch, "on|off", "Reuse the KV blocks of equal prefixes."),
    "speculation": (
        _speculation,
        "K:A[:S]",
        "Speculative decoding: K drafts a step, acceptance rate A, S seconds to draft.",
    ),
    "max_loras": (
        int,
        "N",
        "Maximum number of LoRA adapters loaded at once. Default: adapters cost nothing.",
    ),
    "adapter_load_s": (finite, "S", "Time to load an adapter, in seconds."),
}
DEPLOYED: Settings = {
    "replicas": (int, "N", "Number of replicas, engines behind a router."),
    "routing": (
        str,
        "|".join(ROUTINGS),
        "Choice of the replica for a request; sessions are told apart by X-Session-Id.",
    ),
    "prefill_replicas": (
        int,
        "N",
        "Additional engines for prefill; the others then only decode. Default: none.",
    ),
    "transfer_gbs": (
        finite,
        "GB/s",
        "Bandwidth for copying KV entries from prefill to decode engines. Default: 50.",
    ),
}
