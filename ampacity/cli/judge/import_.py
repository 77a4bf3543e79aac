"""``ampacity import``: a run directory from another tool's results."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ampacity.cli import options as o

Format = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="vllm, sglang, aiperf, guidellm or genai-bench. Default: from the content.",
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Requests at the start of each level that are not counted. Default: found from the "
        "data.",
        min=0,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="DIR", help="Run directory. Default: runs/<time>-import-<file>."
    ),
]


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Results of one tool; each file has one or more load levels.",
            show_default=False,
        ),
    ],
    format: Format = None,
    slo: o.Slos = None,
    warmup: Warmup = None,
    out: Out = None,
    json: o.Json = False,
) -> None:
    """Make a run directory from another tool's results.

    Reads results of vllm bench serve, SGLang's bench_serving, aiperf, guidellm and genai-bench.

    ampacity import vllm-4rps.json vllm-8rps.json --slo ttft_p99=2s
    """
    from ampacity.analysis.slo import parse_slos
    from ampacity.cli.experiment import command_line, finish
    from ampacity.imports.into_run import read_file, write_run

    slos = [s.as_dict() for s in parse_slos(slo or [])]
    results = [read_file(path, format) for path in files]
    out = out or Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-import-{files[0].stem}"
    meta = {"command_line": command_line(sys.argv), "warmup_requests": warmup}
    write_run(out, files, results, slos, meta)
    finish(out, as_json=json)
