"""The duration of one step: a roofline model, or alpha + beta * b, which has closed forms."""

from dataclasses import dataclass

from ampacity.simulator import SimulatorError


@dataclass(frozen=True, slots=True)
class Linear:
    """alpha_s + beta_s * sequences + prefill_s * prompts: a batching server with closed forms."""

    alpha_s: float
    beta_s: float = 0.0
    prefill_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.alpha_s, self.beta_s, self.prefill_s) < 0 or self.alpha_s + self.beta_s <= 0:
            raise SimulatorError(
                "linear step time: alpha_s, beta_s and prefill_s must be >= 0 and not all 0"
            )

    def seconds(
        self, sequences: int, tokens: int, kv_tokens: int, attended_pairs: float, prompts: int
    ) -> float:
        """Return the duration of one step, in seconds.

        sequences: requests in the batch; tokens: tokens computed, decode and prefill; kv_tokens: KV
        entries read or written; attended_pairs: (query token, context token) pairs; prompts:
        prefills that end in the step.
        """
        return self.alpha_s + self.beta_s * sequences + self.prefill_s * prompts


@dataclass(frozen=True, slots=True)
class Roofline:
    """max(bytes moved / bandwidth, operations / compute) + overhead + all-reduce.

    Bytes: the weights once a step and the KV entries of the batch. Operations: two per active
    parameter and token, and those of the attention. `bandwidth_bytes_s` and `compute_flops` are
    effective values of the whole tensor-parallel group. Williams, Waterman, Patterson, "Roofline",
    CACM 52(4), 2009.

    Experts: n tokens that each choose k of a layer's E experts, uniformly and independently, use
    E (1 - (1 - k/E)^n) of them on average; that share of expert_bytes is read. expert_share: k/E.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_pair: float
    bandwidth_bytes_s: float
    compute_flops: float
    overhead_s: float = 0.0
    communication_s_per_token: float = 0.0
    expert_bytes: float = 0.0  # of all routed experts; not part of weight_bytes
    expert_share: float = 0.0

    def __post_init__(self) -> None:
        if not (min(self.bandwidth_bytes_s, self.compute_flops) > 0 and self.overhead_s >= 0):
            raise SimulatorError(
                "roofline: effective bandwidth and compute must be > 0, the overhead >= 0"
            )

    def seconds(
        self, sequences: int, tokens: int, kv_tokens: int, attended_pairs: float, prompts: int
    ) -> float:
        """Return the duration of one step, in seconds; see `Linear.seconds`."""
        moved = self.weight_bytes + self.kv_bytes_per_token * kv_tokens
        if self.expert_bytes:
            moved += self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** tokens)
        memory_s = moved / self.bandwidth_bytes_s
        compute_s = (
            self.flops_per_token * tokens + self.flops_per_pair * attended_pairs
        ) / self.compute_flops
        longer_s = memory_s if memory_s > compute_s else compute_s
        return longer_s + self.overhead_s + self.communication_s_per_token * tokens


StepTime = Linear | Roofline
