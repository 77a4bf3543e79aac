"""Typer options that several commands have.

``@shares(...)`` gives a command settings of an experiment; it gets them as one dict ``raw``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.output import shown
from ampacity.settings import OUTPUT_PANEL, SETTINGS, SHARED
from ampacity.values import option as option_name

Command = Callable[..., None]
Url = Annotated[
    str,
    typer.Argument(
        help="Base URL of an OpenAI-compatible server, as http://127.0.0.1:8000/v1",
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print summary.json to stdout, and nothing else.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]

JsonResult = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
]
RunDir = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]
Slos = Annotated[
    list[str] | None, typer.Option("--slo", metavar="METRIC_pQ=LIMIT", help=SETTINGS["slo"].help)
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.")]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every figure as CSV.")]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Write Markdown.")]


class Amount(StrEnum):
    short = "short"
    full = "full"


def option(name: str, kind: Any, default: Any, **shown: Any) -> Parameter:
    """Return an option as a parameter of a command."""
    return _parameter(
        name, kind, default, typer.Option(shown.pop("flags", option_name(name)), **shown)
    )


def _parameter(name: str, kind: Any, default: Any, shown: Any) -> Parameter:
    annotation = Annotated[kind, shown]
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def shares(
    names: Iterable[str] = SHARED, but: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command the settings ``names``; its parameter ``raw`` gets those that were given.

    The options have no default: ``make_settings`` has it, so that an option overrides a run file.
    """
    options = []
    for name in names:
        if name not in but:
            setting = SETTINGS[name]
            flags = ["-o", "--out"] if name == "out" else [option_name(name)]
            shown = typer.Option(
                *flags,
                metavar=setting.kind.metavar,
                help=setting.help,
                rich_help_panel=setting.group,
                show_default=False,
            )
            options.append(_parameter(name, setting.kind.type | None, None, shown))
    return gathers("raw", options)


def gathers(into: str, options: list[Parameter]) -> Callable[[Command], Command]:
    """Give a command further options; its parameter ``into`` gets a dict of those with a value.

    Typer reads options from the signature, so the command gets a new one.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != into]

        @wraps(command)
        def with_options(**given: Any) -> None:
            gathered = {p.name: given[p.name] for p in options if given[p.name] not in (None, [])}
            command(**{into: gathered}, **{p.name: given[p.name] for p in own})

        parameters = [*(p.replace(kind=Parameter.KEYWORD_ONLY) for p in own), *options]
        with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate


def prints(command: Command) -> Command:
    """Give a command with a result ``--summary`` and ``--quiet``, which ``output.shown`` keeps."""
    if "json" not in signature(command).parameters:
        return command

    @wraps(command)
    def printing(printed: dict[str, Any], **given: Any) -> None:
        shown.full, shown.quiet = printed["summary"] is Amount.full, "quiet" in printed
        command(**given)

    summary = typer.Option(
        "--summary",
        metavar="short|full",
        help="What is printed: one screen, or every table.",
        rich_help_panel=OUTPUT_PANEL,
        show_default="short",
    )
    quiet = typer.Option("--quiet", "-q", help="Print no progress.", rich_help_panel=OUTPUT_PANEL)
    options = [
        _parameter("summary", Amount, Amount.short, summary),
        _parameter("quiet", bool | None, None, quiet),
    ]
    return gathers("printed", options)(printing)
