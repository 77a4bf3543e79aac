"""Engine configurations made of an accelerator and a model.

Well-tuned kernels reach 0.8 of the peak bandwidth in decoding and 0.5 of the peak compute in
prefill on large models. These are assumptions: fit them to your engine
(`ampacity.simulator.models.calibrate`) before you rely on absolute figures.
"""

import re
from dataclasses import replace
from typing import Any

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.deployment import Deployment, Transfer
from ampacity.simulator.engine.options import DEPLOYED, SCHEDULING, EngineConfig, Settings, finite
from ampacity.simulator.engine.steptime import Linear, Roofline
from ampacity.simulator.models.catalog import BYTES_PER_ELEMENT, HARDWARE, MODELS, Hardware, Model

ALL_REDUCE_LATENCY_S = 10e-6  # of one all-reduce of a small tensor over NVLink; an assumption
MEMORY_SHARE = 0.9  # of the device memory that the engine may use (vLLM's --gpu-memory-utilization)
LIMITS = ("max_num_seqs", "max_num_batched_tokens")
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
    """Return the step time of a model on `tensor_parallel` devices.

    All-reduce: two per layer; ring algorithm, 2(t-1)/t of the tensor over the link (Thakur et al.
    2005), plus a fixed latency each. overhead_s: scheduling and launch per step, an assumption.
    KV entries kept on several devices are read on each.
    """
    communication_s_per_token = 0.0
    if tensor_parallel > 1:
        share = 2 * (tensor_parallel - 1) / tensor_parallel
        tensor_bytes = model.width * BYTES_PER_ELEMENT["fp16"]
        communication_s_per_token = 2 * model.layers * tensor_bytes * share / hardware.link_bytes_s
        overhead_s += 2 * model.layers * ALL_REDUCE_LATENCY_S
    return Roofline(
        weight_bytes=(model.parameters - model.routed_parameters) * BYTES_PER_ELEMENT[precision],
        kv_bytes_per_token=model.kv_bytes_per_token(BYTES_PER_ELEMENT[kv_precision])
        * model.kv_copies(tensor_parallel),
        flops_per_token=2 * model.active_parameters,
        flops_per_pair=4 * model.layers * model.heads * model.head_size,
        bandwidth_bytes_s=hardware.bandwidth_bytes_s * hardware.bandwidth_factor * tensor_parallel,
        compute_flops=hardware.peak_flops(precision) * hardware.compute_factor * tensor_parallel,
        overhead_s=overhead_s,
        communication_s_per_token=communication_s_per_token,
        expert_bytes=model.routed_parameters * BYTES_PER_ELEMENT[precision],
        expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
    )


def engine_config(
    name: str,
    hardware: Hardware,
    model: Model,
    *,
    tensor_parallel: int = 1,
    max_model_len: int | None = None,
    block_tokens: int = 16,
    **options: Any,
) -> EngineConfig:
    """Return an engine whose KV pool fills the free device memory.

    options: LIMITS, and those of `roofline`. Raises SimulatorError if no memory is left or the
    attention heads cannot be split evenly.
    """
    if model.heads % tensor_parallel:
        raise SimulatorError(
            f"{name}: {model.heads} attention heads of {model.name} cannot be split over "
            f"{tensor_parallel} devices; take a divisor of {model.heads}"
        )
    free = tensor_parallel * (hardware.memory_bytes * MEMORY_SHARE - ACTIVATION_BYTES)
    limits = {limit: options.pop(limit) for limit in LIMITS if limit in options}
    step_time = roofline(hardware, model, tensor_parallel=tensor_parallel, **options)
    free -= step_time.weight_bytes + step_time.expert_bytes
    blocks = int(free // (block_tokens * step_time.kv_bytes_per_token))
    if blocks < 1:
        precision = options.get("precision", "fp16")
        raise SimulatorError(
            f"{name}: {model.name} in {precision} does not fit on "
            f"{tensor_parallel} x {hardware.name}"
        )
    wanted_len = model.max_model_len if max_model_len is None else max_model_len
    return EngineConfig(
        name=name,
        step_time=step_time,
        max_model_len=min(wanted_len, blocks * block_tokens),
        kv_blocks=blocks,
        block_tokens=block_tokens,
        **limits,
    )


def linear_config(
    alpha_s: float,
    beta_s: float,
    prefill_s: float = 0.0,
    *,
    max_num_seqs: int = 256,
    max_model_len: int = 1 << 20,
) -> EngineConfig:
    """Return the server alpha + beta * b with max_num_seqs slots, no KV limit, no token budget."""
    return EngineConfig(
        name="linear",
        step_time=Linear(alpha_s, beta_s, prefill_s),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=1 << 40,
        max_model_len=max_model_len,
    )


# Settings of MODEL@HARDWARE, in addition to options.SCHEDULING and DEPLOYED.
BUILT: Settings = {
    **dict.fromkeys(("weights", "kv"), (str, "NUMBER", "")),
    **dict.fromkeys(("bandwidth_factor", "compute_factor", "overhead_s"), (finite, "NUMBER", "")),
    "max_model_len": (int, "NUMBER", ""),
}


def find_config(name: str) -> EngineConfig:
    """Return an engine by name: `BASE[,SETTING=VALUE...]`. Raises SimulatorError.

    BASE: a preset, `MODEL@[Nx]HARDWARE` or `linear:ALPHA_S,BETA_S[,PREFILL_S]`. Settings: those of
    SCHEDULING, and with MODEL@HARDWARE those of BUILT.
    """
    deployment = find_deployment(name)
    if deployment.engines > 1:
        raise SimulatorError(
            f"preset {name!r}: must be one engine here, without {', '.join(DEPLOYED)}"
        )
    return deployment.config


def find_deployment(name: str) -> Deployment:
    """Return engines by name: see `find_config`; takes the settings of DEPLOYED too."""
    base = ",".join(part for part in name.split(",") if "=" not in part)
    composed = "@" in base
    settings = (BUILT if composed else {}) | SCHEDULING | DEPLOYED
    found: dict[str, Any] = {}
    for part in name.split(","):
        key, equals, value = part.partition("=")
        if key not in settings:
            if not equals:
                continue
            raise SimulatorError(
                f"preset {name!r}: unknown setting in {part!r}; known: {', '.join(settings)}"
            )
        read, written, text = settings[key]
        try:
            found[key] = read(value)
        except (ValueError, TypeError) as error:
            raise SimulatorError(
                f"preset {name!r}: cannot read {part!r}; write {key}={written}. {text}"
            ) from error
    if composed:
        config = _compose(base, {key: found[key] for key in found if key in BUILT or key in LIMITS})
    else:
        config = _named(base)
    if name != config.name:
        scheduling = {key: found[key] for key in found if key in SCHEDULING}
        config = replace(config, name=name, **scheduling)
    return _deployment(config, **{key: found[key] for key in found if key in DEPLOYED})


def _deployment(
    config: EngineConfig,
    prefill_replicas: int = 0,
    transfer_gbs: float | None = None,
    **options: Any,
) -> Deployment:
    if not prefill_replicas:
        if transfer_gbs is not None:
            raise SimulatorError(f"{config.name}: transfer_gbs needs prefill_replicas of 1 or more")
        return Deployment(config, **options)
    transfer_gbs = 50.0 if transfer_gbs is None else transfer_gbs
    step_time = config.step_time
    kv_bytes = step_time.kv_bytes_per_token if isinstance(step_time, Roofline) else 0.0
    if not transfer_gbs > 0:
        raise SimulatorError(f"{config.name}: transfer_gbs must be > 0, got {transfer_gbs}")
    transfer = Transfer(kv_bytes, transfer_gbs * 1e9)
    return Deployment(
        config, **options, prefill=config, prefill_replicas=prefill_replicas, transfer=transfer
    )


def _compose(base: str, options: dict[str, Any]) -> EngineConfig:
    model_name, _, place = base.partition("@")
    count, card_name = devices(place)
    if model_name not in MODELS:
        raise SimulatorError(
            f"preset {base!r}: unknown model {model_name!r}; known: {', '.join(MODELS)}"
        )
    if card_name not in HARDWARE or count < 1:
        raise SimulatorError(
            f"preset {base!r}: unknown hardware {place!r}; known: {', '.join(HARDWARE)}"
        )
    fields = (("weights", "precision"), ("kv", "kv_precision"))
    precisions = {field: options.pop(key, "fp16") for key, field in fields}
    for given in precisions.values():
        if given not in BYTES_PER_ELEMENT:
            raise SimulatorError(
                f"preset {base!r}: {given!r} is none of {', '.join(BYTES_PER_ELEMENT)}"
            )
    factors = {f: options.pop(f) for f in ("bandwidth_factor", "compute_factor") if f in options}
    card = replace(HARDWARE[card_name], **factors)
    return engine_config(
        base, card, MODELS[model_name], tensor_parallel=count, **precisions, **options
    )


def devices(place: str) -> tuple[int, str]:
    """Return (number, name) of ``4xh100``; one where no number is given."""
    match = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", place)
    return (int(match[1] or 1), match[2]) if match else (1, "")


def made_of(name: str) -> tuple[Model, Hardware, dict[str, str]] | None:
    """Return (model, accelerator, its settings as text) of an engine by name; None: linear."""
    parts = [part for one in name.split(",") for part in _PRESETS.get(one, one).split(",")]
    model, _, place = parts[0].partition("@")
    card = HARDWARE.get(devices(place)[1])
    if model not in MODELS or card is None:
        return None
    settings = (part.partition("=") for part in parts[1:])
    return MODELS[model], card, {key: value for key, _, value in settings}


def _named(name: str) -> EngineConfig:
    if name in PRESETS:
        return PRESETS[name]
    kind, _, numbers = name.partition(":")
    if kind == "linear":
        try:
            alpha_s, beta_s, *rest = (finite(number) for number in numbers.split(","))
            (prefill_s,) = rest or [0.0]
        except ValueError as error:
            raise SimulatorError(
                f"preset {name!r}: write linear:ALPHA_S,BETA_S[,PREFILL_S]"
            ) from error
        return linear_config(alpha_s, beta_s, prefill_s)
    known = ", ".join(sorted(PRESETS))
    raise SimulatorError(
        f"unknown preset {name!r}; known: {known}, MODEL@[Nx]HARDWARE, or "
        "linear:ALPHA_S,BETA_S[,PREFILL_S]"
    )


# Light on the CPU in real time: 64 slots, steps of some 9 ms (`demo`) and 4.5 ms (`demo-l40s`, which
# is that of `ampacity demo`: twice the requests in the same time).
_PRESETS = {
    "demo": "qwen2.5-1.5b@l4,weights=fp8,max_num_seqs=64,max_num_batched_tokens=2048,"
    "max_model_len=8192",
    "demo-l40s": "qwen2.5-1.5b@l40s,weights=fp8,max_num_seqs=64,max_num_batched_tokens=2048,"
    "max_model_len=8192",
    "qwen2.5-1.5b-l4": "qwen2.5-1.5b@l4,max_num_batched_tokens=2048",
    "llama3-8b-l4": "llama3-8b@l4,max_num_batched_tokens=2048",
    "llama3-8b-a100": "llama3-8b@a100-80",
    "llama3-8b-h100": "llama3-8b@h100",
    "llama3-70b-4xh100": "llama3-70b@4xh100",
    "llama3-70b-fp8-2xh100": "llama3-70b@2xh100,weights=fp8",
    "llama3-8b-h200": "llama3-8b@h200",
    "llama3-8b-mi300x": "llama3-8b@mi300x",
    "llama3-8b-int4-t4": "llama3-8b@t4,weights=int4,max_num_batched_tokens=2048",
    "llama3-70b-4xa100": "llama3-70b@4xa100-80",
    "llama3-70b-2xh200": "llama3-70b@2xh200",
    "llama3-70b-2xmi300x": "llama3-70b@2xmi300x",
    "llama3-70b-fp8-b200": "llama3-70b@b200,weights=fp8,kv=fp8",
    "qwen3-32b-2xh100": "qwen3-32b@2xh100",
    "deepseek-v3-fp8-8xh200": "deepseek-v3@8xh200,weights=fp8",
    "deepseek-v3-fp8-8xb200": "deepseek-v3@8xb200,weights=fp8",
}
PRESETS: dict[str, EngineConfig] = {}
PRESETS.update({name: replace(find_config(made), name=name) for name, made in _PRESETS.items()})
