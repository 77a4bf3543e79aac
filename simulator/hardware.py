"""Accelerators, models, and the engine configurations made of them.

Effective factors are assumptions, not measurements: 0.8 of the peak bandwidth in decoding and 0.5 of the
peak compute in prefill are what well-tuned kernels reach on large models; fit them to your engine before
you rely on absolute figures.
"""

from dataclasses import dataclass

from simulator import SimulatorError
from simulator.engine import EngineConfig
from simulator.steptime import Linear, Roofline

BYTES_PER_ELEMENT = {"fp16": 2.0, "fp8": 1.0}
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One accelerator. Peaks are the data sheet's, dense (without sparsity); factors scale them to effective."""

    name: str
    peak_flops_fp16: float
    peak_flops_fp8: float
    bandwidth_bytes_s: float
    memory_bytes: float
    link_bytes_s: float  # to its peers, one direction
    bandwidth_factor: float = 0.8
    compute_factor: float = 0.5

    def peak_flops(self, precision: str) -> float:
        return self.peak_flops_fp8 if precision == "fp8" else self.peak_flops_fp16


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer with grouped-query attention. active_parameters: used per token (MoE)."""

    name: str
    parameters: float
    active_parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    max_model_len: int

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """Key and value of every layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_per_element

    def sequences_in(self, pool_bytes: float, tokens: int, bytes_per_element: float = 2.0) -> int:
        """Sequences of that many tokens whose KV entries fit into a pool."""
        return int(pool_bytes // (tokens * self.kv_bytes_per_token(bytes_per_element)))


# NVIDIA A100 80 GB SXM data sheet (2021): 312 TFLOPS FP16, no FP8 unit (FP8 weights compute at FP16 speed),
# 2,039 GB/s, NVLink 600 GB/s both directions.
A100_80 = Hardware("A100-80", 312e12, 312e12, 2.039e12, 80 * GIB, 300e9)
# NVIDIA H100 SXM data sheet (2023), halved where it says "with sparsity": 989 TFLOPS FP16, 1,979 FP8,
# 3.35 TB/s, NVLink 900 GB/s both directions.
H100 = Hardware("H100", 989.4e12, 1978.9e12, 3.35e12, 80 * GIB, 450e9)
# NVIDIA L4 data sheet (2023), halved where it says "with sparsity": 121 TFLOPS FP16, 242.5 FP8, 300 GB/s,
# 24 GB (22.5 GiB with ECC), PCIe 4.0 x16.
L4 = Hardware("L4", 121e12, 242.5e12, 0.3e12, 22.5 * GIB, 32e9)

# Meta, "The Llama 3 Herd of Models" (2024), table 3, and the models' config.json.
LLAMA3_8B = Model("llama3-8b", 8.03e9, 8.03e9, 32, 32, 8, 128, 8192)
LLAMA3_70B = Model("llama3-70b", 70.6e9, 70.6e9, 80, 64, 8, 128, 8192)
# Qwen2.5 technical report (2024), table 1, and the model's config.json.
QWEN25_1_5B = Model("qwen2.5-1.5b", 1.54e9, 1.54e9, 28, 12, 2, 128, 32768)

ALL_REDUCE_LATENCY_S = 10e-6  # of one all-reduce of a small tensor over NVLink; an assumption
MEMORY_SHARE = 0.9  # of the device memory that the engine may use (vLLM's --gpu-memory-utilization)
ACTIVATION_BYTES = 2e9  # kept free on each device for activations and graphs; an assumption


def roofline(
    hardware: Hardware,
    model: Model,
    *,
    precision: str = "fp16",
    kv_precision: str = "fp16",
    tensor_parallel: int = 1,
    overhead_s: float = 2e-3,
) -> Roofline:
    """Step time of a model on `tensor_parallel` devices.

    All-reduce: two per layer; ring algorithm, 2(t-1)/t of the tensor over the link (Thakur et al. 2005),
    plus a fixed latency each. overhead_s: scheduling and launch per step, an assumption.
    """
    communication_s_per_token = 0.0
    if tensor_parallel > 1:
        share = 2 * (tensor_parallel - 1) / tensor_parallel
        tensor_bytes = model.heads * model.head_size * BYTES_PER_ELEMENT["fp16"]
        communication_s_per_token = 2 * model.layers * tensor_bytes * share / hardware.link_bytes_s
        overhead_s += 2 * model.layers * ALL_REDUCE_LATENCY_S
    return Roofline(
        weight_bytes=model.active_parameters * BYTES_PER_ELEMENT[precision],
        kv_bytes_per_token=model.kv_bytes_per_token(BYTES_PER_ELEMENT[kv_precision]),
        flops_per_token=2 * model.active_parameters,
        flops_per_pair=4 * model.layers * model.heads * model.head_size,
        bandwidth_bytes_s=hardware.bandwidth_bytes_s * hardware.bandwidth_factor * tensor_parallel,
        compute_flops=hardware.peak_flops(precision) * hardware.compute_factor * tensor_parallel,
        overhead_s=overhead_s,
        communication_s_per_token=communication_s_per_token,
    )


def engine_config(
    name: str,
    hardware: Hardware,
    model: Model,
    *,
    precision: str = "fp16",
    kv_precision: str = "fp16",
    tensor_parallel: int = 1,
    overhead_s: float = 2e-3,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    max_model_len: int | None = None,
    block_tokens: int = 16,
) -> EngineConfig:
    """An engine with the KV pool that the device memory leaves. Raises SimulatorError if nothing is left."""
    free = tensor_parallel * (hardware.memory_bytes * MEMORY_SHARE - ACTIVATION_BYTES)
    free -= model.parameters * BYTES_PER_ELEMENT[precision]
    blocks = int(free // (block_tokens * model.kv_bytes_per_token(BYTES_PER_ELEMENT[kv_precision])))
    if blocks < 1:
        raise SimulatorError(
            f"{name}: {model.name} in {precision} does not fit on {tensor_parallel} x {hardware.name}"
        )
    wanted_len = model.max_model_len if max_model_len is None else max_model_len
    return EngineConfig(
        name=name,
        step_time=roofline(
            hardware,
            model,
            precision=precision,
            kv_precision=kv_precision,
            tensor_parallel=tensor_parallel,
            overhead_s=overhead_s,
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(wanted_len, blocks * block_tokens),
        kv_blocks=blocks,
        block_tokens=block_tokens,
    )


def linear_config(
    alpha_s: float,
    beta_s: float,
    prefill_s: float = 0.0,
    *,
    max_num_seqs: int = 256,
    max_model_len: int = 1 << 20,
) -> EngineConfig:
    """The batching server alpha + beta * b with B = max_num_seqs slots: no KV limit, no token budget."""
    return EngineConfig(
        name="linear",
        step_time=Linear(alpha_s, beta_s, prefill_s),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 40,
        max_model_len=max_model_len,
    )


PRESETS: dict[str, EngineConfig] = {
    config.name: config
    for config in (
        # Small enough to be light on the CPU in real time: 64 slots and steps of about 8 to 10 ms.
        engine_config(
            "demo",
            L4,
            QWEN25_1_5B,
            precision="fp8",
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_model_len=8192,
        ),
        engine_config("qwen2.5-1.5b-l4", L4, QWEN25_1_5B, max_num_batched_tokens=2048),
        engine_config("llama3-8b-l4", L4, LLAMA3_8B, max_num_batched_tokens=2048),
        engine_config("llama3-8b-a100", A100_80, LLAMA3_8B),
        engine_config("llama3-8b-h100", H100, LLAMA3_8B),
        engine_config("llama3-70b-4xh100", H100, LLAMA3_70B, tensor_parallel=4),
        engine_config("llama3-70b-fp8-2xh100", H100, LLAMA3_70B, precision="fp8", tensor_parallel=2),
    )
}


def find_config(name: str) -> EngineConfig:
    """A preset by name, or `linear:ALPHA_S,BETA_S[,PREFILL_S]`. Raises SimulatorError."""
    if name in PRESETS:
        return PRESETS[name]
    kind, _, numbers = name.partition(":")
    if kind == "linear":
        try:
            alpha_s, beta_s, *rest = (float(number) for number in numbers.split(","))
            (prefill_s,) = rest or [0.0]
        except ValueError as error:
            raise SimulatorError(f"preset {name!r}: write linear:ALPHA_S,BETA_S[,PREFILL_S]") from error
        return linear_config(alpha_s, beta_s, prefill_s)
    known = ", ".join(sorted(PRESETS))
    raise SimulatorError(f"unknown preset {name!r}; known: {known}, or linear:ALPHA_S,BETA_S[,PREFILL_S]")
