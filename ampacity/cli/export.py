"""``ampacity export``: the tables and histograms of a run as files for other programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampacity.cli import options as o
from ampacity.cli.output import writing

if TYPE_CHECKING:
    from ampacity.analysis.metrics.observations import Observations
    from ampacity.frames import Run

Write = Callable[[Path], object]
LEVELS = ("min", 50, 90, 95, 99, 99.9, "max")


def export(
    run: o.RunDir,
    out: Annotated[Path, o.opt("DIR", "Output: folder.", "-o", "--out", show_default=False)],
    csv: Annotated[bool, o.opt(None, "Write CSV, a file for each table.", "--csv")] = False,
    parquet: Annotated[
        bool, o.opt(None, "Write Parquet, a file for each table.", "--parquet")
    ] = False,
    hgrm: Annotated[
        bool,
        o.opt(None, "Write each stage's latencies as HdrHistogram percentiles, in ms.", "--hgrm"),
    ] = False,
    overwrite: Annotated[bool, o.opt(None, "Replace files that exist.", "--overwrite")] = False,
) -> None:
    """Export the tables and histograms of a run for other programs. A file for each.

    ampacity export runs/x --csv -o exported

    ampacity export runs/x --parquet --hgrm -o exported
    """
    from ampacity.frames import load, tables
    from ampacity.loadgen.rundir.files import RunDirError
    from ampacity.values import ConfigError

    if not (csv or parquet or hgrm):
        raise ConfigError("say what to write: --csv, --parquet or --hgrm")
    if (out / "run.json").exists():  # requests.parquet is a name of its own records, too
        raise RunDirError(f"{out} is a run directory, whose records stay: name another folder")
    loaded = load(run)
    files: dict[str, Write] = {}
    for name, frame in tables(loaded, LEVELS).items() if csv or parquet else ():
        if csv:
            files[f"{name}.csv"] = partial(frame.to_csv, index=False)
        if parquet:
            files[f"{name}.parquet"] = partial(frame.to_parquet, index=False)
    if hgrm:
        files |= _histograms(loaded)
    taken = [name for name in files if (out / name).exists()]
    if taken and not overwrite:
        raise RunDirError(
            f"{out / taken[0]} exists: --overwrite replaces it, or name another folder"
        )
    with writing(out, own=True):
        out.mkdir(parents=True, exist_ok=True)
    for name, write in files.items():
        with writing(out / name, own=True):
            write(out / name)
        typer.echo(out / name)


def _histograms(run: Run) -> dict[str, Write]:
    """Return a file for each stage and latency that has values, without the failed requests."""
    return {
        f"stage-{index}-{name}.hgrm": partial(_write_histogram, o)
        for index, observed in run.observed().items()
        for name, o in observed.items()
        if len(o.values)
    }


def _write_histogram(o: Observations, path: Path) -> None:
    from ampacity.analysis.metrics.hdr import percentile_text

    path.write_bytes(percentile_text(o.values, o.weights))
