"""``ampacity compare``: two or more comparable runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ampacity.cli import EXIT, EXIT_USAGE
from ampacity.cli import options as o
from ampacity.cli.output import console, print_json, shown, write_text, writing

if TYPE_CHECKING:
    from ampacity.analysis.change.results import Comparison, Setting

T = TypeVar("T")


Force = Annotated[
    bool,
    o.opt(None, "Compare runs that are not comparable; the result lists what differs.", "--force"),
]
Tp = Annotated[
    list[str] | None,
    o.opt("RUN=N", "GPUs per instance. Of a run, e.g. B=4, or N for all. Default: the run's."),
]
GpuHour = Annotated[
    list[str] | None,
    o.opt(
        "RUN=USD",
        "Price of one GPU for one hour. Of a run, e.g. A=2.5, or USD for all. Default: the run's.",
    ),
]
Labels = Annotated[
    list[str] | None,
    o.opt(
        "RUN=FILE", "Accepted answers, as JSONL or CSV. Of a run, as 'ampacity report' reads them."
    ),
]


def compare(
    runs: Annotated[list[Path], o.arg("Run directories; they are called A, B, C and so on.")],
    force: Force = False,
    tp: Tp = None,
    gpu_hour: GpuHour = None,
    labels: Labels = None,
    html: o.Html = None,
    markdown: o.Markdown = None,
    csv: o.Csv = None,
    json: o.Json = False,
) -> None:
    """Compare capacity, cost and latency of runs. Only significant differences win a line.

    ampacity compare runs/vllm runs/sglang --html compare.html

    ampacity compare runs/vllm runs/sglang --gpu-hour 2.5 --tp B=2
    """
    from ampacity.analysis.change.comparable import differences
    from ampacity.analysis.compare.pairs import compared_run
    from ampacity.analysis.compare.scorecard import compare as compare_runs
    from ampacity.cli.experiment import read_labels

    names = [chr(ord("A") + i) for i in range(len(runs))]
    options = (tp, "--tp", int), (gpu_hour, "--gpu-hour", float), (labels, "--labels", Path)
    given: list[dict[str, Any]] = [
        per_run(texts, names, runs, flag, kind) for texts, flag, kind in options
    ]
    gpus_of, price_of, labels_of = given
    accepted = {name: read_labels(path) for name, path in labels_of.items()}
    compared = [
        compared_run(name, path, gpus_of.get(name), price_of.get(name), accepted.get(name))
        for name, path in zip(names, runs, strict=True)
    ]
    unlike = differences([run.judged for run in compared])
    if unlike and not force:
        _refuse(unlike, names)
    show(compare_runs(compared), html, markdown, csv, as_json=json)


def _refuse(unlike: Sequence[Setting], names: Sequence[str]) -> None:
    """Print to stderr what differs and what helps, and exit with EXIT_USAGE."""
    from ampacity.analysis.change.comparable import by_option
    from ampacity.analysis.next_run import again
    from ampacity.experiments.rerun import command_line
    from ampacity.reports.render.plain import printable

    differing = by_option(unlike)
    lines = [f"ampacity: the runs are not comparable, they differ in {', '.join(differing)}"]
    for option, values in differing.items():
        pairs = (f"{name} {value}" for name, value in zip(names, values, strict=True))
        lines.append(f"  {option}: {'; '.join(pairs)}")
    if "--model" in differing:
        lines.append(
            "  one model under two names: serve it under one (vLLM's --served-model-name M, "
            "ampacity simulate --model M)"
        )
    lines.append(f"NEXT      {again([*command_line(sys.argv), '--force'], {})}")
    print(*(printable(line) for line in lines), sep="\n", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE)


def per_run(
    texts: Sequence[str] | None,
    names: Sequence[str],
    runs: Sequence[Path],
    flag: str,
    convert: Callable[[str], T],
) -> dict[str, T]:
    """Return {run: value} of ``B=4``, ``vllm=4`` (a directory's name) or ``4`` (all runs).

    Raises CompareError.
    """
    from ampacity.analysis.change.judged import CompareError
    from ampacity.values import LARGEST

    found: dict[str, T] = {}
    for text in texts or []:
        which, equals, content = text.rpartition("=")
        targets = [
            name
            for name, run in zip(names, runs, strict=True)
            if not equals or which in (name, run.name, str(run))
        ]
        try:
            value = convert(content)
            in_range = isinstance(value, Path) or 0 < float(str(value)) <= LARGEST
            if not targets or not in_range:
                raise ValueError
        except ValueError:
            raise CompareError(
                f"{flag} {text}: write RUN=VALUE with a run of {', '.join(names)} or a "
                f"directory's name, and a value above 0, at most {LARGEST:g}"
            ) from None
        found |= dict.fromkeys(targets, value)
    return found


def show(
    result: Comparison,
    html: Path | None,
    markdown: Path | None,
    csv: Path | None,
    *,
    as_json: bool,
    next_command: str | None = None,
) -> None:
    """Write the requested files and print the comparison; ``next_command`` instead of its own.

    An A/B exits with 2 if nothing can be compared, and with 3 if its sides did other work. Raises
    RunDirError where a file cannot be written.
    """
    from dataclasses import replace

    from ampacity.reports.change import compare as written
    from ampacity.reports.render.terminal import show as screen

    if markdown:
        write_text(markdown, written.comparison_markdown(result))
    if csv:
        write_text(csv, written.comparison_csv(result))
    if html:
        with writing(html):
            written.write_comparison_page(html, result)
    if as_json:
        print_json(result.as_dict())
    else:
        if shown.full:
            written.render_comparison(result, console())
        else:
            made = written.comparison_screen(result)
            following = next_command or made.next_command
            screen(replace(made, next_command=following), console())
        files = {"comparison": html, "Markdown": markdown, "CSV": csv}
        for what, path in files.items():
            if path:
                print(f"{what}: {path}")
    if result.interleaved_pairs is not None and not result.compared:
        raise typer.Exit(EXIT_USAGE)
    if result.interleaved_pairs is not None and result.other_work:
        raise typer.Exit(EXIT["inconclusive"])
