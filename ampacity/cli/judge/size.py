"""``ampacity size``: from measured runs to a decision, in thirteen steps."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import print_json, write_text

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
    int | None, typer.Option(metavar="N", help="Attention heads. Default: the KV heads.")
]
Gpu = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="GPU: a100-40, a100-80, h100, h200, b200, mi300x, l40s, ..."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="P",
        help="Precision: fp16, bf16, fp8, int8, int4 or nvfp4. Default: the checkpoint's, "
        "else fp16.",
    ),
]
Kv = Annotated[str, typer.Option(metavar="P", help="Precision of the KV cache.")]
ProfileFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Profile from 'ampacity workload fit': traffic and lengths."),
]
PriceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Prices of hosted APIs in USD per million tokens: CSV with the columns model, input, "
        "output and, where there are such, cached and cache_write.",
    ),
]
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


@o.shares(("peak_rps", "tp", "gpu_hour", "safety"))
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
    profile: ProfileFile = None,
    prices: PriceFile = None,
    wait_budget: WaitBudget = None,
    cold_start: ColdStart = None,
    link: Link = None,
    html: o.Html = None,
    json: o.Json = False,
) -> None:
    """Decide in thirteen steps: does it fit, what limits it, how many, at what cost.

    ampacity size runs/search --model-config Llama-3-8B --gpu h100

    ampacity size runs/search --peak-rps 120 --gpu-hour 2.5
    """
    from ampacity.analysis.decision.model import plain_model, read_model
    from ampacity.analysis.decision.money import read_prices
    from ampacity.cli.experiment import command_line
    from ampacity.experiments.decide import Stated, crossover, decide
    from ampacity.reports.pages.size import size_page, size_text
    from ampacity.values import ConfigError, parse_duration

    five = {"--params": params, "--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    shape = None
    if model_config is not None and any(value is not None for value in (*five.values(), heads)):
        raise ConfigError("--model-config has the shape: drop --params, --layers and the like")
    if model_config is not None:
        shape = read_model(model_config)
    elif params and layers and kv_heads and head_dim:
        shape = plain_model(params, layers, kv_heads, head_dim, heads)
    elif any(five.values()):
        lacking = ", ".join(name for name, value in five.items() if not value)
        raise ConfigError(f"{lacking} must be given too (or --model-config)")
    stated = Stated(
        raw,
        gpu=gpu,
        shape=shape,
        weights=weights.lower() if weights else None,
        kv=kv.lower(),
        profile=profile,
        prices=read_prices(prices) if prices else {},
        wait_budget_s=parse_duration(wait_budget, "--wait-budget") if wait_budget else None,
        cold_start_s=parse_duration(cold_start, "--cold-start") if cold_start else None,
        link_bits_s=1e9 * link if link else None,
        command=shlex.join(command_line(sys.argv)),
    )
    found = [decide(run, stated) for run in runs]
    note = crossover(found)
    if html is not None:
        write_text(html, size_page(found, note))
    if json:
        print_json([one.plain() for one in found])
        return
    typer.echo(size_text(found, note))
    if html is not None:
        typer.echo(f"report: {html}")
