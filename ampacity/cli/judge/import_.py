"""``ampacity import``: results of other tools as a run directory, for report, compare and gate."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ampacity.cli import options as o


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Results of one tool; each file is a load level or more.",
            show_default=False,
        ),
    ],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="vllm, sglang, aiperf, guidellm or genai-bench. Default: seen from the content.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo", metavar="METRIC_pQ=LIMIT", help="What to judge the results by; repeatable."
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            metavar="N",
            help="Requests to leave out at the start of each level. Default: found from the data.",
            min=0,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Run directory. Default: runs/<time>-<file>.",
            show_default=False,
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Make a run directory from results of vllm bench serve, SGLang's bench_serving, aiperf, guidellm or genai-bench.

    ampacity import vllm-4rps.json vllm-8rps.json --slo ttft_p99=2s
    """
    from ampacity.analysis.slo import parse_slos
    from ampacity.cli.experiment import command_line, finish
    from ampacity.imports.into_run import read_file, write_run

    slos = [s.as_dict() for s in parse_slos(slo or [])]
    results = [read_file(path, format_name) for path in files]
    out = out or Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-import-{files[0].stem}"
    write_run(
        out,
        files,
        results,
        slos,
        {"command_line": command_line(sys.argv), "warmup_requests": warmup},
    )
    finish(out, as_json=json)
