"""The typer application and its list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ampacity import __version__
from ampacity.cli import (
    ab,
    baseline,
    burst,
    compare,
    demo,
    gate,
    import_,
    plan,
    predict,
    report,
    run,
    search,
    simulate,
    sweep,
    validate,
    workload,
)

app = typer.Typer(
    name="ampacity",
    help="Load testing and SLO benchmarking for LLM inference endpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ampacity {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
app.command("sweep")(sweep.sweep)
app.command("search")(search.search)
app.command("burst")(burst.burst)
app.command("run")(run.run)
app.command("report")(report.report)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare)
app.command("ab")(ab.ab)
app.command("baseline")(baseline.baseline)
app.command("gate")(gate.gate)
app.command("validate")(validate.validate)
app.command("import")(import_.import_)
app.command("predict")(predict.predict)
app.command("simulate")(simulate.simulate)
app.add_typer(workload.app, name="workload")
