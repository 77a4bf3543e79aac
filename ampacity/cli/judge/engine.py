"""Options that state a model and its GPUs: of ``size`` and of ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.experiments.decide import Engine

ENGINE = [
    o.option(
        "model_config",
        Path | None,
        None,
        metavar="FILE",
        help="The model's config.json, its folder, or a name: llama3-8b, llama3-70b or qwen3-32b. "
        "Default: the model of a prediction.",
    ),
    o.option(
        "gpu",
        str | None,
        None,
        metavar="NAME",
        help="GPU: a100-40, a100-80, h100, h200, b200, mi300x, l40s, l4, a10g or t4. Default: "
        "that of a prediction or of --lock hardware.",
    ),
    o.option(
        "weights",
        str | None,
        None,
        metavar="P",
        help="Precision: fp16, bf16, fp8, int8, int4 or nvfp4. Default: the checkpoint's, else "
        "fp16.",
    ),
    o.option(
        "kv",
        str | None,
        None,
        metavar="P",
        help="Precision of the KV cache. Default: that of a prediction, else fp16.",
    ),
    o.option("params", float | None, None, metavar="N", help="Parameters, e.g. 8.03e9."),
    o.option("layers", int | None, None, metavar="N", help="Layers."),
    o.option("kv_heads", int | None, None, metavar="N", help="KV heads."),
    o.option("head_dim", int | None, None, metavar="N", help="Size of a head."),
    o.option(
        "heads", int | None, None, metavar="N", help="Attention heads. Default: the KV heads."
    ),
]
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
