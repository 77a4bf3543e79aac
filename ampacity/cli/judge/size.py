"""``ampacity size``: from measured runs to a decision, in thirteen steps."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.judge.plan import Accepted, MeanRps, PriceFile, Profile, Utilisation, sizing_of
from ampacity.cli.output import print_part, write_text

if TYPE_CHECKING:
    from ampacity.analysis.decision.model import ModelShape

Runs = Annotated[
    list[Path], typer.Argument(help="Run directories, one for each candidate.", show_default=False)
]
ModelConfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The model's config.json, or its folder.")
]
Params = Annotated[float | None, typer.Option(metavar="N", help="Parameters, e.g. 8.03e9.")]
Layers = Annotated[int | None, typer.Option(metavar="N", help="Layers.")]
KvHeads = Annotated[int | None, typer.Option(metavar="N", help="KV heads.")]
HeadDim = Annotated[int | None, typer.Option(metavar="N", help="Size of a head.")]
Heads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Attention heads.", show_default="the KV heads"),
]
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
    typer.Option(metavar="GBIT", help="Link between instances in Gbit/s, for disaggregation."),
]
ColdStart = Annotated[
    str | None, typer.Option(metavar="T", help="Time from start to first answer of an instance.")
]
DraftTokens = Annotated[
    int | None, typer.Option(metavar="K", help="Tokens that a step drafts (speculation).", min=1)
]


@o.shares(("peak_rps", "tp", "gpu_hour", "safety", "slo"))
def size(
    raw: dict[str, Any],
    runs: Runs,
    gpu: Gpu = None,
    model_config: ModelConfig = None,
    params: Params = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    weights: Weights = None,
    kv: Kv = "fp16",
    profile: Profile = None,
    mean_rps: MeanRps = None,
    utilisation: Utilisation = None,
    prices: PriceFile = None,
    accepted: Accepted = None,
    wait_budget: WaitBudget = None,
    cold_start: ColdStart = None,
    link: Link = None,
    draft_tokens: DraftTokens = None,
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

    five = {"--params": params, "--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    stated = Stated(
        sizing_of(raw, profile, mean_rps, utilisation, prices, accepted),
        gpu=gpu,
        shape=_shape(model_config, five, heads),
        weights=weights.lower() if weights else None,
        kv=kv.lower(),
        wait_budget_s=parse_duration(wait_budget, "--wait-budget") if wait_budget else None,
        cold_start_s=parse_duration(cold_start, "--cold-start") if cold_start else None,
        link_bits_s=1e9 * link if link else None,
        draft_tokens=draft_tokens,
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


def _shape(model_config: Path | None, five: dict[str, Any], heads: int | None) -> ModelShape | None:
    """Return the model of a config.json or of five numbers; None: neither was given."""
    from ampacity.analysis.decision.model import plain_model, read_model
    from ampacity.values import ConfigError

    given = [value for value in (*five.values(), heads) if value is not None]
    if model_config is not None:
        if given:
            raise ConfigError("--model-config has the shape: drop --params, --layers and the like")
        return read_model(model_config)
    if any(five.values()) and not all(five.values()):
        lacking = ", ".join(name for name, value in five.items() if not value)
        raise ConfigError(f"{lacking} must be given too (or --model-config)")
    shape = [*five.values(), heads]
    return plain_model(*shape) if all(five.values()) else None
