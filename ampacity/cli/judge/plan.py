"""``ampacity plan``: the instances, GPUs and cost that a peak load needs, from measured runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.cli.output import console, print_part, shown

if TYPE_CHECKING:
    from ampacity.experiments.sizing import Sizing
    from ampacity.reports.render.terminal import Screen

Run = Annotated[Path | None, o.arg("Run directory; none with --tier.")]
FLEET = [
    *o.options(
        {
            "profile": (
                Path,
                "FILE",
                "Profile from 'ampacity workload fit'. Busiest hour, mean and variance of the traffic.",
            ),
            "mean_rps": (float, "R", "Mean load in requests/s. For utilisation and costs."),
            "utilisation": (
                float,
                "U",
                "Mean load / what the fleet carries, e.g. 0.4. "
                "Default: from --mean-rps, else the profile's mean / busiest hour, else the peak all day.",
            ),
            "accepted": (float, "SHARE", "Share of results that are of use, e.g. 0.9."),
        }
    ),
    o.setting("prices", rich_help_panel=None),
]
Safety = Annotated[
    float | None,
    o.opt(
        "F",
        "Safety factor on the number of instances. Default: that of the run, else 1.2 where "
        "a profile shows stable peaks, else 1.5.",
    ),
]
TierOption = Annotated[
    list[str] | None,
    o.opt(
        "NAME=RUN,SHARE,GPU,PRICE",
        "A tier of the fleet, repeatable. Its run, its share of the requests, its GPU "
        "(4xH100: four an instance) and the price of a GPU-hour.",
    ),
]
ModeOption = Annotated[
    str | None,
    o.opt(
        "MODE",
        "How tiers share the requests. routing (one tier each), cascade (all to the first, "
        "the rest escalated), pools (every tier each: prefill, decoding). Default: routing.",
    ),
]


@o.shares(("peak_rps", "tp", "gpu_hour", "slo"))
@o.gathers("fleet", FLEET)
def plan(
    raw: dict[str, Any],
    fleet: dict[str, Any],
    run: Run = None,
    safety: Safety = None,
    tier: TierOption = None,
    mode: ModeOption = None,
    json: o.Json = False,
) -> None:
    """Size a fleet for a peak load, from the measured capacity of one instance.

    ampacity plan runs/search --peak-rps 120 --gpu-hour 2.50

    ampacity plan runs/search --profile traffic.yaml
    """
    from ampacity.experiments.sizing import plan_of_tiers, plan_run, read_judged
    from ampacity.reports.pages.plan import plan_screen, plan_text, tiers_screen, tiers_text
    from ampacity.values import ConfigError

    given = raw if safety is None else {**raw, "safety": safety}
    sizing = sizing_of(given, **fleet)
    if (run is None) == (not tier):
        raise ConfigError("give a run directory, or a --tier for each kind of instance")
    if tier:
        if alone := [name for name in ("tp", "gpu_hour") if name in raw]:
            raise ConfigError(f"--{alone[0].replace('_', '-')} is part of --tier: drop it")
        tiers = plan_of_tiers(tier, mode or "routing", sizing)
        show_part(tiers, tiers_text(tiers), tiers_screen(tiers), json)
        return
    if mode is not None or run is None:
        raise ConfigError("--mode is about tiers: give --tier too")
    loaded, summary = read_judged(run, sizing.slos)
    found = plan_run(run, loaded, summary, sizing)
    show_part(found, plan_text(found, summary), plan_screen(found, summary), json)


def show_part(part: object, text: str, screen: Screen, json: bool) -> None:
    """Print an answer; the full one's lines are cut to the terminal, and stay whole in a file."""
    from ampacity.reports.pages.plan import wrapped
    from ampacity.reports.render.terminal import show

    if json:
        print_part(part)
    elif shown.full:
        typer.echo(wrapped(text) if sys.stdout.isatty() else text)
    else:
        show(screen, console())


def sizing_of(
    raw: dict[str, Any],
    prices: Path | None = None,
    utilisation: float | None = None,
    accepted: float | None = None,
    **others: Any,
) -> Sizing:
    """Return what is stated for a fleet, from the options of ``plan`` and ``size``."""
    from ampacity.analysis.decision.money import read_prices
    from ampacity.analysis.slo import parse_slos
    from ampacity.experiments.sizing import Sizing
    from ampacity.values import SMALLEST, ConfigError

    for name, share in {"--utilisation": utilisation, "--accepted": accepted}.items():
        if share is not None and not SMALLEST <= share <= 1:
            raise ConfigError(f"{name} {share:g}: give a share above 0 and at most 1")
    return Sizing(
        raw,
        utilisation=utilisation,
        accepted=accepted,
        prices=read_prices(prices) if prices else {},
        slos=parse_slos(raw.pop("slo", [])),
        **others,
    )
