"""``ampacity size``: from measured runs to a decision, in thirteen steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.judge.plan import FLEET, sizing_of
from ampacity.cli.output import print_part, write_text

if TYPE_CHECKING:
    from ampacity.analysis.decision.memory import Adapters
    from ampacity.analysis.decision.model import ModelShape

Runs = Annotated[
    list[Path], typer.Argument(help="Run directories, one for each candidate.", show_default=False)
]
ModelConfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The model's config.json, or its folder.")
]
SHAPE = [
    o.option("params", float | None, None, metavar="N", help="Parameters, e.g. 8.03e9."),
    o.option("layers", int | None, None, metavar="N", help="Layers."),
    o.option("kv_heads", int | None, None, metavar="N", help="KV heads."),
    o.option("head_dim", int | None, None, metavar="N", help="Size of a head."),
    o.option(
        "heads", int | None, None, metavar="N", help="Attention heads.", show_default="the KV heads"
    ),
]
NEEDED = ("params", "layers", "kv_heads", "head_dim")
Gpu = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="GPU: a100-40, a100-80, h100, h200, b200, mi300x, l40s, ..."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="P",
        help="Precision: fp16, bf16, fp8, int8, int4 or nvfp4.",
        show_default="the checkpoint's, else fp16",
    ),
]
Kv = Annotated[str, typer.Option(metavar="P", help="Precision of the KV cache.")]
WaitBudget = Annotated[
    str | None, typer.Option(metavar="T", help="What a first token may wait in a queue.")
]
Link = Annotated[
    float | None,
    typer.Option(
        metavar="GBIT", help="Link between instances in Gbit/s, for disaggregation.", min=1e-3
    ),
]
ColdStart = Annotated[
    str | None, typer.Option(metavar="T", help="Time from start to first answer of an instance.")
]
AdapterSlots = Annotated[
    str | None,
    typer.Option(
        "--lora-slots",
        metavar="SLOTSxMB",
        help="LoRA adapters kept on the GPUs and the size of each in MB, e.g. 4x100.",
    ),
]
DraftTokens = Annotated[
    int | None, typer.Option(metavar="K", help="Tokens that a step drafts (speculation).", min=1)
]


@o.shares(("peak_rps", "tp", "gpu_hour", "safety", "slo"))
@o.gathers("fleet", FLEET)
@o.gathers("numbers", SHAPE)
def size(
    raw: dict[str, Any],
    fleet: dict[str, Any],
    numbers: dict[str, Any],
    runs: Runs,
    gpu: Gpu = None,
    model_config: ModelConfig = None,
    weights: Weights = None,
    kv: Kv = "fp16",
    wait_budget: WaitBudget = None,
    cold_start: ColdStart = None,
    link: Link = None,
    draft_tokens: DraftTokens = None,
    adapters: AdapterSlots = None,
    html: o.Html = None,
    json: o.Json = False,
) -> None:
    """Decide in thirteen steps: does it fit, what limits it, how many, at what cost.

    ampacity size runs/search --model-config Llama-3-8B --gpu h100

    ampacity size runs/search --peak-rps 120 --gpu-hour 2.5
    """
    from ampacity.cli.experiment import command_line
    from ampacity.experiments.decide import Stated, decide
    from ampacity.reports.pages.size import size_page, size_text
    from ampacity.values import parse_duration

    wait, start = (
        parse_duration(text, name) if text else None
        for name, text in (("--wait-budget", wait_budget), ("--cold-start", cold_start))
    )
    stated = Stated(
        sizing_of(raw, **fleet),
        gpu=gpu,
        shape=_shape(model_config, numbers),
        weights=weights.lower() if weights else None,
        kv=kv.lower(),
        wait_budget_s=wait,
        cold_start_s=start,
        link_bits_s=1e9 * link if link else None,
        draft_tokens=draft_tokens,
        adapters=_adapters(adapters),
        command=shlex.join(command_line(sys.argv)),
    )
    decision = decide(runs, stated)
    if html is not None:
        write_text(html, size_page(decision))
    if json:
        print_part(decision)
        return
    typer.echo(size_text(decision))
    if html is not None:
        typer.echo(f"report: {html}")


def _adapters(text: str | None) -> Adapters:
    """Parse ``4x100`` to four slots of 100 MB; None: no adapters. Raises ConfigError."""
    from ampacity.analysis.decision.memory import NO_ADAPTERS, Adapters
    from ampacity.values import ConfigError

    if text is None:
        return NO_ADAPTERS
    found = re.fullmatch(r"([1-9]\d{0,5})x(\d{1,7}(?:\.\d+)?)", text)
    if found is None:
        raise ConfigError(f"--lora-slots {text}: write SLOTSxMB, e.g. 4x100 for 4 of 100 MB each")
    return Adapters(int(found[1]), 1e6 * float(found[2]))


def _shape(model_config: Path | None, numbers: dict[str, Any]) -> ModelShape | None:
    """Return the model of a config.json or of five numbers; None: neither was given."""
    from ampacity.analysis.decision.model import plain_model, read_model
    from ampacity.values import ConfigError, option

    if model_config is not None:
        if numbers:
            raise ConfigError("--model-config has the shape: drop --params, --layers and the like")
        return read_model(model_config)
    if not numbers:
        return None
    if lacking := [option(name) for name in NEEDED if not numbers.get(name)]:
        raise ConfigError(f"{', '.join(lacking)} must be given too (or --model-config)")
    return plain_model(parameters=numbers.pop("params"), **numbers)
