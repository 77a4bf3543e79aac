"""``ampacity size``: from measured runs to a decision, in thirteen steps."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.judge.engine import ENGINE, engine_of
from ampacity.cli.judge.plan import FLEET, show_part, sizing_of
from ampacity.cli.output import write_text

if TYPE_CHECKING:
    from ampacity.analysis.decision.memory import Adapters

Runs = Annotated[list[Path], o.arg("Run directories, one for each candidate.")]
STATED = o.options(
    {
        "wait_budget": (str, "T", "What a first token may wait in a queue."),
        "cold_start": (str, "T", "Time from start to first answer of an instance."),
        "link": (float, "GBIT", "Link between instances in Gbit/s, for disaggregation."),
        "draft_tokens": (int, "K", "Tokens that a step drafts (speculation)."),
        "lora_slots": (
            str,
            "SLOTSxMB",
            "LoRA adapters kept on the GPUs and the size of each in MB, e.g. 4x100.",
        ),
    }
)


@o.shares(("peak_rps", "tp", "gpu_hour", "safety", "slo"))
@o.gathers("fleet", FLEET)
@o.gathers("engine", ENGINE)
@o.gathers("stated", STATED)
def size(
    raw: dict[str, Any],
    fleet: dict[str, Any],
    engine: dict[str, Any],
    stated: dict[str, Any],
    runs: Runs,
    html: o.Html = None,
    json: o.Json = False,
) -> None:
    """Decide in thirteen steps: does it fit, what limits it, how many, at what cost.

    ampacity size runs/search --model-config Llama-3-8B/config.json --gpu h100

    ampacity size runs/search --peak-rps 120 --gpu-hour 2.5

    Exit status: 0 done, 2 bad input, or no run from which a fleet for the peak can be sized.
    """
    from ampacity.analysis.capacity.fleet import NO_PEAK
    from ampacity.cli import EXIT_USAGE
    from ampacity.experiments.decide import Stated, decide
    from ampacity.experiments.rerun import command_line
    from ampacity.reports.pages.size import size_page, size_screen, size_text
    from ampacity.values import ConfigError, option, parse_duration

    for name in stated.keys() & {"link", "draft_tokens"}:
        if not 0 < stated[name] < math.inf:
            raise ConfigError(f"{option(name)} {stated[name]}: give a number above 0")
    link = stated.get("link")
    wait, start = (
        parse_duration(stated[name], option(name)) if name in stated else None
        for name in ("wait_budget", "cold_start")
    )
    known = Stated(
        sizing_of(raw, **fleet),
        engine=engine_of(engine),
        wait_budget_s=wait,
        cold_start_s=start,
        link_bits_s=1e9 * link if link else None,
        draft_tokens=stated.get("draft_tokens"),
        adapters=_adapters(stated.get("lora_slots")),
        command=shlex.join(command_line(sys.argv)),
    )
    decision = decide(runs, known)
    if html is not None:
        write_text(html, size_page(decision))
    show_part(decision, size_text(decision, html), size_screen(decision, html), json)
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
