"""Options of simulated engines, generated from the simulator's own settings."""

from typing import Annotated, Any, get_args

import msgspec
import typer

from ampacity.cli.options import Command, gathers, option
from ampacity.simulator.engine.options import DEPLOYED, SCHEDULING
from ampacity.simulator.server.face import HELP, Face
from ampacity.values import option as option_name

Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Model and hardware. 'ampacity simulate --preset list' lists them. "
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
    kinds: dict[type, Any] = {tuple: str | None, type(None): float | None}
    options = []
    for field in msgspec.structs.fields(Face):
        default, flag = field.default, option_name(field.name)
        metavar = "A,B" if default == () else None
        if isinstance(default, str):
            metavar = "|".join(get_args(field.type))
        if default is True:
            flag += f"/{option_name('no_' + field.name)}"
        options.append(
            option(
                field.name,
                kinds.get(type(default), type(default)),
                None if default == () else default,
                flag,
                metavar=metavar,
                help=HELP[field.name],
                rich_help_panel="How answers look and are cut into chunks",
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
