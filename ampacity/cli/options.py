"""Typer options that several commands have.

``@shares(...)`` gives a command settings of an experiment; it gets them as one dict ``raw``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from ampacity.cli.measure.resume import COMMANDS
from ampacity.cli.output import shown
from ampacity.settings import OUTPUT, SETTINGS, SHARED
from ampacity.values import option as option_name

Command = Callable[..., None]


def opt(metavar: str | None, text: str, *flags: str, **more: Any) -> Any:
    """Return an option for ``Annotated``; a last "Default: X." of its text is its default."""
    text, _, otherwise = text.partition(" Default: ")
    if otherwise:
        more["show_default"] = otherwise.rstrip(".")
    return typer.Option(*flags, metavar=metavar, help=text, **more)


def arg(text: str, metavar: str | None = None) -> Any:
    """Return an argument for ``Annotated``."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


Url = Annotated[str, arg("Base URL of an OpenAI-compatible server. E.g. http://127.0.0.1:8000/v1")]
_print = partial(opt, rich_help_panel=OUTPUT)
Json = Annotated[bool, _print(None, "Print JSON, and nothing else.", "--json")]
RunDir = Annotated[Path, arg("Run directory.")]
Html = Annotated[Path | None, _print("FILE", "Write an HTML page.")]
Csv = Annotated[Path | None, _print("FILE", "Write CSV, every figure.")]
Markdown = Annotated[
    Path | None,
    _print("FILE", "Write Markdown. check and gate append it, e.g. to $GITHUB_STEP_SUMMARY."),
]
JUnit = Annotated[Path | None, _print("FILE", "Write JUnit XML.")]


class Amount(StrEnum):
    short = "short"
    full = "full"


Summary = Annotated[
    Amount,
    _print("short|full", "What is printed: one screen, or every table.", show_default="short"),
]


def option(name: str, kind: Any, default: Any, *flags: str, **shown: Any) -> Parameter:
    """Return an option as a parameter of a command; ``shown``: its help and what ``opt`` takes."""
    metavar, text = shown.pop("metavar", None), shown.pop("help")
    annotation = Annotated[kind, opt(metavar, text, *(flags or [option_name(name)]), **shown)]
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def options(named: Mapping[str, tuple[Any, str, str]]) -> list[Parameter]:
    """Return options without a default, from (type, metavar, help) by name."""
    return [
        option(name, kind | None, None, metavar=metavar, help=text)
        for name, (kind, metavar, text) in named.items()
    ]


def setting(name: str, **shown: Any) -> Parameter:
    """Return a setting as an option without a value of its own: an option overrides a run file."""
    declared = SETTINGS[name]
    flags = ["-o", "--out"] if name == "out" else [option_name(name)]
    text = {
        "metavar": declared.kind.metavar,
        "help": declared.help,
        "rich_help_panel": declared.group,
        "show_default": declared.default or False,
    }
    return option(name, declared.kind.type | None, None, *flags, **text | shown)


def shares(
    names: Iterable[str] = SHARED, but: Collection[str] = (), **defaults: str | bool
) -> Callable[[Command], Command]:
    """Give a command the settings ``names``; its parameter ``raw`` gets those that were given.

    The options have no value: ``make_settings`` has the default, which the help only shows.
    ``defaults``: those of the command.
    """
    wanted = [name for name in names if name not in but]
    shown = {name: {"show_default": text} for name, text in defaults.items()}
    return gathers("raw", [setting(name, **shown.get(name, {})) for name in wanted])


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
    """Give a command with a result the options that ``output.shown`` keeps."""
    if "json" not in signature(command).parameters:
        return command

    @wraps(command)
    def printing(printed: dict[str, Any], **given: Any) -> None:
        shown.full, shown.quiet = printed["summary"] is Amount.full, "quiet" in printed
        shown.resume = "resume" in printed
        command(**given)

    options = [
        Parameter("summary", Parameter.KEYWORD_ONLY, annotation=Summary, default=Amount.short),
        option(
            "quiet",
            bool | None,
            None,
            "-q",
            "--quiet",
            help="Print no progress.",
            rich_help_panel=OUTPUT,
        ),
    ]
    if command.__name__ in COMMANDS:
        options.append(
            option(
                "resume",
                Path | None,
                None,
                metavar="RUN",
                help="Go on with a run that was cut off, in its directory. Only options of "
                "the API key, --header, --yes, --json, --quiet and --summary can be given beside it.",
                rich_help_panel=OUTPUT,
            )
        )
    return gathers("printed", options)(printing)
