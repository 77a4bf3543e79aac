"""``ampacity size``: from measured runs to a decision, in thirteen steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.judge.engine import ENGINE, engine_of
from ampacity.cli.judge.plan import FLEET, sizing_of
from ampacity.cli.output import print_part, write_text

if TYPE_CHECKING:
    from ampacity.analysis.decision.memory import Adapters

Runs = Annotated[
    list[Path], typer.Argument(help="Run directories, one for each candidate.", show_default=False)
]
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
@o.gathers("engine", ENGINE)
def size(
    raw: dict[str, Any],
    fleet: dict[str, Any],
    engine: dict[str, Any],
    runs: Runs,
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

    Exit status: 0 done, 2 bad input, or no run from which a fleet for the peak can be sized.
    """
    from ampacity.analysis.capacity.fleet import NO_PEAK
    from ampacity.cli import EXIT_USAGE
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
        engine=engine_of(engine),
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
    else:
        typer.echo(size_text(decision))
        if html is not None:
            typer.echo(f"report: {html}")
    if all(one.plan_missing not in (None, NO_PEAK) for one in decision.candidates):
        raise typer.Exit(EXIT_USAGE)  # a fleet was asked for, as plan ends


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
