"""What an engine may use and how it schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.steptime import StepTime

ROUTINGS = ("round-robin", "least-request", "prefix-hash", "session-sticky")
POLICIES = ("fcfs", "prefill-priority", "decode-priority", "deadline")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: `tokens` drafts a step, each accepted with probability `acceptance` if those before were.

    A step gives 1 to tokens + 1 tokens, (1 - a^(K+1)) / (1 - a) on average (Leviathan, Kalman, Matias, "Fast
    Inference from Transformers via Speculative Decoding", ICML 2023, eq. 1), and computes K + 1 for each
    request. draft_s: time to draft, a step.
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
    """What the scheduler may use. Limits carry vLLM's names; kv_blocks None means no limit.

    Policies: "fcfs" decodes in every step and gives prompts, in order of arrival, what the token budget leaves;
    "deadline" does the same in order of `Request.deadline_s`; "prefill-priority" lets decoding wait while any
    prompt can be computed; "decode-priority" takes new prompts, those that have arrived, only when nothing
    decodes any more. static_batching is decode-priority in which a finished request's place is computed on
    until the whole batch has finished.
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
    max_loras: int | None = None  # adapters on the device at once; None: adapters cost nothing
    adapter_load_s: float = 0.0  # added to the step in which an adapter is brought in
    seed: int = 0  # of what the engine draws: accepted drafts

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
                f"{self.name}: adapter_load_s must be >= 0 and needs max_loras, got {self.adapter_load_s} and {self.max_loras}"
            )
        per_sequence = 1 if self.speculation is None else self.speculation.tokens + 1
        if self.max_num_batched_tokens < self.max_num_seqs * per_sequence:
            raise SimulatorError(
                f"{self.name}: max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}) times {per_sequence}, or decoding could not advance "
                "every request"
            )
        if self.kv_blocks is not None and self.kv_blocks * self.block_tokens < self.max_model_len:
            raise SimulatorError(
                f"{self.name}: the KV cache holds {self.kv_blocks * self.block_tokens} tokens, less than "
                f"max_model_len {self.max_model_len}; lower max_model_len or use more memory"
            )


def finite(text: str) -> float:
    """Raises ValueError for what is no number, and for nan and inf."""
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
"""By name: how a value is read, how it is written, what it means."""
SCHEDULING: Settings = {
    "max_num_seqs": (int, "N", "Sequences decoded together at most."),
    "max_num_batched_tokens": (int, "N", "Token budget of one step."),
    "policy": (
        str,
        "|".join(POLICIES),
        "How the scheduler shares steps between prompts and decoding.",
    ),
    "static_batching": (
        _switch,
        "on|off",
        "A batch is filled only when the one before has finished.",
    ),
    "prefix_caching": (_switch, "on|off", "Keep KV blocks for equal prefixes."),
    "speculation": (
        _speculation,
        "K:A[:S]",
        "K drafts a step, each accepted with probability A, made in S s.",
    ),
    "max_loras": (int, "N", "LoRA adapters on the device at once. Default: they cost nothing."),
    "adapter_load_s": (finite, "S", "Time to bring an adapter in."),
}
DEPLOYED: Settings = {
    "replicas": (int, "N", "Engines behind a router."),
    "routing": (
        str,
        "|".join(ROUTINGS),
        "Which replica gets a request; a session is its X-Session-Id.",
    ),
    "prefill_replicas": (
        int,
        "N",
        "Further engines that compute the prompts; the others only decode. Default: none.",
    ),
    "transfer_gbs": (
        finite,
        "GB/s",
        "At which KV entries go from those to the others. Default: 50.",
    ),
}
