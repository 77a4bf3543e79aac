"""The typer application and its list of commands."""

from typing import Annotated

import typer

from ampacity import __version__
from ampacity.cli import export, predict, simulate, workload
from ampacity.cli.help import Command, Group
from ampacity.cli.judge import baseline, compare, gate, import_, plan, report, size, validate
from ampacity.cli.measure import ab, burst, check, demo, doctor, run, search, soak, sweep
from ampacity.cli.options import prints

app = typer.Typer(
    name="ampacity",
    help="Load testing and SLO benchmarking for LLM inference endpoints.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ampacity {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


for command in (
    demo.demo,
    doctor.doctor,
    sweep.sweep,
    search.search,
    burst.burst,
    run.run,
    check.check,
    soak.soak,
    report.report,
    plan.plan,
    size.size,
    compare.compare,
    ab.ab,
    baseline.baseline,
    gate.gate,
    validate.validate,
    import_.import_,
    export.export,
    predict.predict,
    simulate.simulate,
):
    name = command.__name__.rstrip("_")
    app.command(name, cls=Command)(prints(command))
app.add_typer(workload.app, name="workload")
