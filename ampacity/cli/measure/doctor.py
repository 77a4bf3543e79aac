"""``ampacity doctor``: check how an endpoint streams, and which metrics can be trusted."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ampacity.cli import options as o

SETTINGS = (
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
)
NAMES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "icl": "ICL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "tokens": "tokens/s",
}


@o.shares(SETTINGS)
def doctor(
    url: o.Url,
    raw: dict[str, Any],
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")
    ] = False,
) -> None:
    """Check how an endpoint streams and which of its metrics can be trusted, with at most 31 requests.

    ampacity doctor http://127.0.0.1:8000/v1 --model M
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ampacity.cli.output import print_json
    from ampacity.config import make_settings
    from ampacity.experiments.checkup import checkup, trusted
    from ampacity.experiments.doctor import REQUESTS_MAX, examine
    from ampacity.experiments.stages.conduct import run_event_loop
    from ampacity.loadgen.send.protocols import printable
    from ampacity.progress import Progress
    from ampacity.values import ConfigError

    settings = make_settings({"url": url, **raw})
    if settings.replicas:
        raise ConfigError(f"url {url}: one endpoint at a time")
    seen = run_event_loop(examine(settings, Progress()))
    checks, facts = checkup(seen)
    metrics = trusted(checks)
    if json:
        print_json(
            {
                "url": seen.settings.endpoint.url,
                "requests_max": REQUESTS_MAX,
                "checks": [asdict(check) for check in checks],
                "trusted": metrics,
                "facts": facts,
            }
        )
        return
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        if not console.is_terminal:  # one line per check, for grep
            line = (
                f"{check.verdict:5} {check.name:14} {printable(check.found, 1000)} → {check.means}"
            )
            console.print(Text(line), soft_wrap=True)
            continue
        style = {"ok": "green", "note": "yellow", "bad": "bold red"}[check.verdict]
        table.add_row(
            Text(check.verdict, style), Text(check.name, "bold"), Text(printable(check.found, 1000))
        )
        table.add_row("", "", Text(f"→ {check.means}", "dim"))
    if table.row_count:
        console.print(table)
    for good, label in ((True, "Trusted"), (False, "Not trusted")):
        names = [NAMES[metric] for metric, fine in metrics.items() if fine is good]
        if names:
            console.print(Text(f"{label}: {', '.join(names)}"))
