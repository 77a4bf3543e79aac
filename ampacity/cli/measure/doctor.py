"""``ampacity doctor``: check how an endpoint streams, and which metrics can be trusted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampacity.cli import options as o
from ampacity.settings import TLS_OPTIONS

if TYPE_CHECKING:
    from ampacity.loadgen.probe.diagnosis import Finding
    from ampacity.reports.render.terminal import Screen
    from ampacity.settings import Settings

SETTINGS = [
    "model",
    "api",
    "api_key_env",
    "api_key_file",
    "api_key_command",
    "api_key_header",
    "path",
    "header",
    *TLS_OPTIONS,
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
MOST_CHECKS = 16  # on a screen: all
NAMES = {
    metric: metric.upper() if metric != "tokens" else "tokens/s"
    for metric in ("ttft", "itl", "icl", "tpot", "e2e", "tokens")
}


WaitForStart = Annotated[
    str | None,
    o.opt(
        "T",
        "Wait up to T for an endpoint that is being started. Times its first answer only.",
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

    from ampacity.cli.output import console, print_json, shown
    from ampacity.config import make_settings
    from ampacity.experiments.checkup import checkup, trusted
    from ampacity.experiments.doctor import REQUESTS_MAX, examine
    from ampacity.experiments.rerun import command_line
    from ampacity.experiments.stages.conduct import run_event_loop
    from ampacity.progress import Progress
    from ampacity.reports.render.terminal import show
    from ampacity.values import ConfigError

    settings = make_settings({"url": url, **raw})
    if settings.replicas:
        raise ConfigError(f"url {url}: one endpoint at a time")
    if wait_for_start is not None:
        _time_cold_start(settings, wait_for_start, json)
        return
    with Progress(quiet=shown.quiet) as progress:
        seen = run_event_loop(examine(settings, progress))
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
        show(_screen(checks, metrics, command_line(sys.argv)), console())


def _time_cold_start(settings: Settings, most: str, json: bool) -> None:
    """Time the start of an endpoint, and print it."""
    from dataclasses import asdict

    from ampacity.cli.output import print_json, shown
    from ampacity.experiments.cold_start import measure_cold_start
    from ampacity.experiments.stages.conduct import run_event_loop
    from ampacity.progress import Progress
    from ampacity.values import parse_duration

    most_s = parse_duration(most, "--wait-for-start")
    with Progress(quiet=shown.quiet) as progress:
        found = run_event_loop(measure_cold_start(settings, most_s, progress))
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


def _screen(checks: list[Finding], metrics: dict[str, bool], command: list[str]) -> Screen:
    """Return which metrics can be trusted, the checks, and what the bad ones mean."""
    from ampacity.analysis.next_run import again
    from ampacity.loadgen.send.protocols import printable
    from ampacity.reports.render.table import Cell, Column, Rows
    from ampacity.reports.render.terminal import Entry, Screen

    answers = []
    for good, label in ((True, "TRUSTED"), (False, "UNTRUSTED")):
        names = [NAMES[metric] for metric, fine in metrics.items() if fine is good]
        if names:
            answers.append(Entry(label, ", ".join(names), state="good" if good else "bad"))
    ordered = sorted(checks, key=lambda check: ("bad", "note", "ok").index(check.verdict))
    rows = Rows("", ordered)
    states = {"ok": "good", "note": "unsure", "bad": "bad"}
    rows.column(
        Column("", text=True), lambda _, check: Cell(check.verdict, state=states[check.verdict])
    )
    rows.words("check", lambda check: check.name)
    found = Column("found", text=True, cut=True)
    rows.column(found, lambda _, check: Cell(printable(check.found, 1000)))
    rows.column(Column("means", "", 1, text=True), lambda _, check: Cell(f"→ {check.means}"))
    notes = [f"{c.name}: {c.means}" for c in ordered if c.verdict != "ok"]
    words = ["ampacity", "sweep", *command[2:]]
    secret = any("***" in word for word in words)
    following = None if secret else again(words, {"--slo": "interactive"})
    return Screen(answers, rows.done(), notes=notes, next_command=following, rows=MOST_CHECKS)
