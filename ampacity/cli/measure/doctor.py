"""``ampacity doctor``: check how an endpoint streams, and which metrics can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.loadgen.probe.diagnosis import Finding
    from ampacity.settings import Settings

SETTINGS = [
    "model",
    "api",
    "api_key_env",
    "header",
    "extra_body",
    "metrics_url",
    "workload",
    "input_tokens",
    "output_tokens",
    "tokenizer",
    "concurrency",
    "timeout",
    "connections",
    "timestamps",
]
NAMES = {
    metric: metric.upper() if metric != "tokens" else "tokens/s"
    for metric in ("ttft", "itl", "icl", "tpot", "e2e", "tokens")
}


WaitForStart = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="Wait up to T for an endpoint that is being started. Times its first answer only.",
        show_default=False,
    ),
]


@o.shares(SETTINGS)
def doctor(
    url: o.Url, raw: dict[str, Any], wait_for_start: WaitForStart = None, json: o.Json = False
) -> None:
    """Check how an endpoint streams and which metrics can be trusted. At most 31 requests.

    ampacity doctor http://127.0.0.1:8000/v1 --model M

    ampacity doctor http://127.0.0.1:8000/v1 --wait-for-start 10m
    """
    from dataclasses import asdict

    from ampacity.cli.output import print_json
    from ampacity.config import make_settings
    from ampacity.experiments.checkup import checkup, trusted
    from ampacity.experiments.doctor import REQUESTS_MAX, examine
    from ampacity.experiments.stages.conduct import run_event_loop
    from ampacity.progress import Progress
    from ampacity.values import ConfigError

    settings = make_settings({"url": url, **raw})
    if settings.replicas:
        raise ConfigError(f"url {url}: one endpoint at a time")
    if wait_for_start is not None:
        _time_cold_start(settings, wait_for_start, json)
        return
    seen = run_event_loop(examine(settings, Progress()))
    checks, facts = checkup(seen)
    metrics = trusted(checks)
    if json:
        result = {
            "url": seen.settings.endpoint.url,
            "requests_max": REQUESTS_MAX,
            "checks": [asdict(check) for check in checks],
            "trusted": metrics,
            "facts": facts,
        }
        print_json(result)
    else:
        _print(checks, metrics)


def _time_cold_start(settings: Settings, most: str, json: bool) -> None:
    """Time the start of an endpoint, and print it."""
    from dataclasses import asdict

    from ampacity.cli.output import print_json
    from ampacity.experiments.cold_start import measure_cold_start
    from ampacity.experiments.stages.conduct import run_event_loop
    from ampacity.progress import Progress
    from ampacity.values import parse_duration

    most_s = parse_duration(most, "--wait-for-start")
    found = run_event_loop(measure_cold_start(settings, most_s, Progress()))
    if json:
        print_json(asdict(found))
        return
    warm = f", TTFT then {found.warm_ttft_s:.3g} s" if found.warm_ttft_s is not None else ""
    typer.echo(
        f"first token {found.first_token_s:.1f} s after the start (models listed after "
        f"{found.models_s:.1f} s){warm}\n"
        f"start instances that long before the load comes: ampacity size RUN "
        f"--cold-start {found.first_token_s:.0f}s"
    )


def _print(checks: list[Finding], metrics: dict[str, bool]) -> None:
    """Print a table on a terminal, else one line per check, for grep."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ampacity.loadgen.send.protocols import printable

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    styles = {"ok": "green", "note": "yellow", "bad": "bold red"}
    for check in checks:
        found = printable(check.found, 1000)
        if not console.is_terminal:
            line = f"{check.verdict:5} {check.name:14} {found} → {check.means}"
            console.print(Text(line), soft_wrap=True)
            continue
        verdict = Text(check.verdict, styles[check.verdict])
        table.add_row(verdict, Text(check.name, "bold"), Text(found))
        table.add_row("", "", Text(f"→ {check.means}", "dim"))
    if table.row_count:
        console.print(table)
    for good, label in ((True, "Trusted"), (False, "Not trusted")):
        names = [NAMES[metric] for metric, fine in metrics.items() if fine is good]
        if names:
            console.print(Text(f"{label}: {', '.join(names)}"))
