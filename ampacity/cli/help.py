"""The help of commands: the options used most, in one screen; all of them with ``--help-all``."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

from ampacity.cli.measure.resume import COMMANDS, resumed
from ampacity.settings import GROUPS

SHOWN_MAX = 9
ALL = "--help-all"
HELP = ["-h", "--help", ALL]
HEADLINE_MAX = 68
# what --help shows of a command with more than SHOWN_MAX options: the first of these, then its own
FIRST = (
    *("config", "preset", "model", "baseline", "gpu", "model_config", "wait_for_start", "rate"),
    *("base_rps", "factor", "base_duration", "burst_duration", "max_recovery", "rounds", "trace"),
    *("rps", "rates", "concurrency", "duration", "window", "max_duration"),
    *("precision", "search", "workload"),
    *("slo", "tolerance", "max_samples", "junit", "markdown", "profile", "out", "json"),
    *(
        "resume",
        "host",
        "port",
        "faults",
        "calibrate",
        "html",
        "peak_rps",
        "gpu_hour",
        "api_key_env",
    ),
)
_ORDER = ["Endpoint", "", *GROUPS[1:]]  # "": the command's own


def record(param: Any, context: Any) -> tuple[str, str]:
    """Return the name and the text of an option or argument; typer adds the default."""
    name, text = param.get_help_record(context)
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
    text = re.sub(r"\[default: \((.+)\)", r"[default: \1", " ".join(text.split()))
    return name, text.replace("; required]", "]").replace("[required]", "(required)")


def options(command: Any, context: Any) -> list[Any]:
    """Return the options of a command without those that only print and exit."""
    return [
        p for p in command.get_params(context) if p.param_type_name == "option" and not p.is_eager
    ]


def shown(command: Any, context: Any) -> list[Any]:
    """Return the options that ``--help`` shows, in the order of use."""
    every = options(command, context)
    if len(every) > SHOWN_MAX:
        ranks = {name: rank for rank, name in enumerate(FIRST)}
        own = [p for p in every if p.name in ranks or not p.rich_help_panel]
        every = sorted(own, key=lambda p: ranks.get(p.name, len(FIRST)))
    return [p for _, params in _by_group(every[:SHOWN_MAX]) for p in params]


def _by_group(every: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield groups of options in the order of use."""
    found: dict[str, list[Any]] = {name: [] for name in _ORDER}
    for param in every:
        found.setdefault(param.rich_help_panel or "", []).append(param)
    yield from ((name, params) for name, params in found.items() if params)


def _brief(param: Any, context: Any) -> tuple[str, str]:
    """Return the record with the first sentence only."""
    name, text = record(param, context)
    extra = re.search(r" (\[.*\]|\(required\))$", text)
    sentence = re.split(r"(?<!e\.g)\. ", text)[0].removesuffix(".")
    return name, sentence if not extra or sentence.endswith(extra[0]) else sentence + extra[0]


def parts(command: Any) -> tuple[list[str], list[str]]:
    """Return the paragraphs and the examples of a command's docstring."""
    found = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    examples = [text for text in found if text.startswith("ampacity ")]
    return [text for text in found if text not in examples], examples


class Command(TyperCommand):
    """A command whose ``--help`` fits a screen."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names here, not in contexts: a command keeps those of its first context."""
        return HELP

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and refuse options that stand twice: the last would win in silence."""
        ctx.meta[ALL] = ALL in args
        if any(word.partition("=")[0] == "--resume" for word in args) and self.name in COMMANDS:
            args = resumed(self.name, args)
        given = self.make_parser(ctx).parse_args(args=list(args))[2]
        for param in options(self, ctx):
            if given.count(param) > 1 and not (param.multiple or param.is_flag):
                raise BadParameter(f"it stands {given.count(param)} times: keep one", ctx, param)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        about, examples = parts(self)
        given = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        usage = " ".join([ctx.command_path, "[OPTIONS]", *(record(p, ctx)[0] for p in given)])
        formatter.write(f"Usage: {usage}\n\n")
        for text in about:
            formatter.write_text(text)
        formatter.write_paragraph()
        formatter.write("".join(f"  {example}\n" for example in examples))
        formatter.write_paragraph()
        every = options(self, ctx)
        if not ctx.meta[ALL]:
            rows = [_brief(p, ctx) for p in [*given, *shown(self, ctx)]]
            with formatter.indentation():
                formatter.write_dl([*rows, (ALL, f"Show every option ({len(every)}), in full.")])
            return
        for group, params in (*([("Arguments", given)] if given else []), *_by_group(every)):
            with formatter.section(group or "Options"):
                formatter.write_dl([record(p, ctx) for p in params])


class Group(TyperGroup):
    """A group of commands whose ``--help`` has one line for each."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        return HELP

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"{ctx.command_path}: {self.help}\n\n")
        rows = [(name, _headline(self.commands[name])) for name in self.commands]
        width = max(len(name) for name, _ in rows) + 2
        formatter.write("".join(f"{name:<{width}}{text}\n" for name, text in rows))
        also = "" if ctx.parent else "  -V: version.  --install-completion"
        formatter.write(f"{ctx.command_path} COMMAND --help: options, examples.{also}\n")


def _headline(command: Any) -> str:
    """Return the first sentence, or what of it fits a line."""
    text = parts(command)[0][0].split(". ")[0].removesuffix(".")
    return text if len(text) <= HEADLINE_MAX else text[:HEADLINE_MAX].rpartition(", ")[0]
