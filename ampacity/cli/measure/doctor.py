"""``ampacity doctor``: check how an endpoint streams, and which metrics can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ampacity.cli import options as o

if TYPE_CHECKING:
    from ampacity.loadgen.probe.diagnosis import Finding

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


@o.shares(SETTINGS)
def doctor(url: o.Url, raw: dict[str, Any], json: o.JsonResult = False) -> None:
    """Check how an endpoint streams and which metrics can be trusted, with at most 31 requests.

    ampacity doctor http://127.0.0.1:8000/v1 --model M
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
