"""Options that state a model and its GPUs: of ``size`` and of ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.experiments.decide import Engine

ENGINE = o.options(
    {
        "model_config": (
            Path,
            "FILE",
            "The model's config.json. Its folder, or a name: llama3-8b, llama3-70b, qwen3-32b "
            "and others. Default: of a prediction.",
        ),
        "gpu": (
            str,
            "NAME",
            "GPU. a100-40, a100-80, h100, h200, b200, mi300x, l40s, l4, a10g or t4. "
            "Default: of a prediction, or --lock hardware.",
        ),
        "weights": (
            str,
            "P",
            "Precision. fp16, bf16, fp8, int8, int4 or nvfp4. Default: the checkpoint's, else fp16.",
        ),
        "kv": (str, "P", "Precision of the KV cache. Default: of a prediction, else fp16."),
        "params": (float, "N", "Parameters, e.g. 8.03e9."),
        "layers": (int, "N", "Layers."),
        "kv_heads": (int, "N", "KV heads."),
        "head_dim": (int, "N", "Size of a head."),
        "heads": (int, "N", "Attention heads. Default: the KV heads."),
    }
)
SHAPE = ("params", "layers", "kv_heads", "head_dim")


def engine_of(given: dict[str, Any]) -> Engine:
    """Return what the options state. Raises ConfigError, DecisionError."""
    from ampacity.analysis.decision.memory import element_bytes
    from ampacity.analysis.decision.model import plain_model, read_model
    from ampacity.experiments.decide import Engine
    from ampacity.simulator.models.catalog import HARDWARE
    from ampacity.values import ConfigError, option

    numbers = {name: given[name] for name in (*SHAPE, "heads") if name in given}
    stated = {name: given[name].lower() for name in ("gpu", "weights", "kv") if name in given}
    if (gpu := stated.get("gpu")) is not None and gpu not in HARDWARE:
        raise ConfigError(f"--gpu {gpu}: none of {', '.join(HARDWARE)}")
    for name in stated.keys() - {"gpu"}:
        element_bytes(stated[name])
    if path := given.get("model_config"):
        if numbers:
            raise ConfigError("--model-config has the shape: drop --params, --layers and the like")
        return Engine(**stated, shape=read_model(path))
    if not numbers:
        return Engine(**stated)
    if lacking := [option(name) for name in SHAPE if not numbers.get(name)]:
        raise ConfigError(f"{', '.join(lacking)} must be given too (or --model-config)")
    return Engine(**stated, shape=plain_model(parameters=numbers.pop("params"), **numbers))
