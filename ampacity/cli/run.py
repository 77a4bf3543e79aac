"""``ampacity run``: one load level, a trace replay, or whatever a run file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli import options as o


@o.shares(o.ALL)
def run(
    raw: dict[str, Any],
    url: Annotated[
        str | None,
        typer.Argument(
            help="Base URL, as http://127.0.0.1:8000/v1 (or 'url' in the run file)", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c", "--config", metavar="FILE", help="YAML run file: the options' own names; flags win."
        ),
    ] = None,
    trace: o.Trace = None,
    time_scale: o.TimeScale = None,
    trace_from: o.TraceFrom = None,
    trace_to: o.TraceTo = None,
    trace_keep: o.TraceKeep = None,
    trace_loop: o.TraceLoop = None,
    trace_as_written: o.TraceAsWritten = None,
    skip_bad_rows: o.SkipBadRows = None,
    json: o.Json = False,
) -> None:
    """Run one load level (--rates 5), a trace (--trace FILE), or the experiment of a run file (-c bench.yaml).

    ampacity run http://127.0.0.1:8000/v1 --model M --trace azure_conv.csv --time-scale 0.5
    """
    from ampacity.cli.experiment import run_experiment
    from ampacity.config import ConfigError, read_run_file
    from ampacity.experiments import sweep as experiment

    own = {
        "url": url, "trace": trace, "time_scale": time_scale, "trace_from": trace_from, "trace_to": trace_to,
        "trace_keep": trace_keep, "trace_loop": trace_loop, "trace_as_written": trace_as_written, "skip_bad_rows": skip_bad_rows,
    }  # fmt: skip
    raw = {**raw, **{name: value for name, value in own.items() if value is not None}}
    if config is not None:
        raw = {**read_run_file(config), **raw}
    elif not {"trace", "rates", "concurrency"} & raw.keys():
        raise ConfigError(
            "say what to run: --rates R, --concurrency N, --trace FILE or -c FILE ('ampacity sweep' finds the rates itself)"
        )
    drive = experiment.replay if raw.get("trace") else experiment.sweep
    run_experiment(raw, experiment="run", drive=drive, as_json=json)
