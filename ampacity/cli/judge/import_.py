"""``ampacity import``: a run directory from another tool's results."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from ampacity.cli import options as o

Format = Annotated[
    str | None,
    o.opt("NAME", "vllm, sglang, aiperf, guidellm or genai-bench. Default: from the content."),
]


@o.shares(("slo", "warmup", "out"))
def import_(
    raw: dict[str, Any],
    files: Annotated[
        list[Path],
        o.arg("Results of one tool; each file has one or more load levels.", metavar="FILE..."),
    ],
    format: Format = None,
    json: o.Json = False,
) -> None:
    """Make a run directory from another tool's results.

    Reads results of vllm bench serve, SGLang's bench_serving, aiperf, guidellm and genai-bench.

    ampacity import vllm-4rps.json vllm-8rps.json --slo ttft_p99=2s

    ampacity import profile_export.jsonl --format aiperf --warmup 50
    """
    from ampacity.analysis.slo import parse_slos
    from ampacity.cli.experiment import finish
    from ampacity.experiments.rerun import command_line
    from ampacity.imports.into_run import read_file, write_run

    slos = [s.as_dict() for s in parse_slos(raw.get("slo", []))]
    results = [read_file(path, format) for path in files]
    out = (
        raw.get("out") or Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-import-{files[0].stem}"
    )
    meta = {"command_line": command_line(sys.argv), "warmup_requests": raw.get("warmup")}
    write_run(out, files, results, slos, meta)
    finish(out, as_json=json)
