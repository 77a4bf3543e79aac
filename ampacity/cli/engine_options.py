"""Options of simulated engines, generated from the simulator's own settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from ampacity.cli.options import Command, gathers, option
from ampacity.simulator.engine.options import DEPLOYED, SCHEDULING
from ampacity.simulator.server.face import Face
from ampacity.values import option as option_name

Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        help="Model and hardware; 'ampacity simulate --preset list' lists them. "
        "Or MODEL@[Nx]HARDWARE[,SETTING=VALUE...], "
        "or linear:ALPHA_S,BETA_S[,PREFILL_S].",
    ),
]


def with_engine(command: Command) -> Command:
    """Give a command the options of an engine; its parameter ``engine`` gets those given."""
    options = []
    for panel, settings in (("Engine", SCHEDULING), ("Several engines", DEPLOYED)):
        for name, (_, written, text) in settings.items():
            if written == "on|off":
                options.append(option(name, bool, False, help=text, rich_help_panel=panel))
            else:
                options.append(
                    option(
                        name, str | None, None, metavar=written, help=text, rich_help_panel=panel
                    )
                )
    return gathers("engine", options)(command)


def full_preset(preset: str, engine: dict[str, Any]) -> str:
    """Return the preset with the settings given as options."""
    given = [
        f"{name}={'on' if value is True else value}"
        for name, value in engine.items()
        if value is not False
    ]
    return ",".join([preset, *given])


def with_face(command: Command) -> Command:
    """Give a command the options of the simulated answers; its parameter ``face`` gets them."""
    options = []
    for field in msgspec.structs.fields(Face):
        kind, meta = get_args(field.type)
        metavar = None
        if get_origin(kind) is Literal:
            kind, metavar = str, "|".join(get_args(kind))
        elif kind == tuple[str, ...]:
            kind, metavar = str | None, "A,B"
        elif kind is not bool and kind is not int:
            kind = float | None if field.default is None else float
        flags = option_name(field.name) + (
            f"/{option_name('no_' + field.name)}" if field.default is True else ""
        )
        panel = "How answers look and are cut into chunks"
        default = None if field.default == () else field.default
        options.append(
            option(
                field.name,
                kind,
                default,
                flags=flags,
                metavar=metavar,
                help=meta.description,
                rich_help_panel=panel,
            )
        )
    return gathers("face", options)(command)


def make_face(given: dict[str, Any]) -> Face:
    """Return the face with these options. Raises SimulatorError for values out of range."""
    from math import isfinite

    from ampacity.simulator import SimulatorError
    from ampacity.simulator.server.face import read_options

    for name, value in given.items():
        if isinstance(value, float) and not isfinite(value):  # JSON has no such number
            raise SimulatorError(f"{option_name(name)} {value}: give a finite number")

    if "adapters" in given:
        given = given | {"adapters": [name.strip() for name in given["adapters"].split(",")]}
    return read_options(msgspec.json.encode(given), Face, "face")
