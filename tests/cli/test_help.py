"""The help of every command: one screen, examples that parse, one name for one thing."""

import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ampacity.cli.app import app
from ampacity.cli.help import SHOWN_MAX, options, parts, shown
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.send.protocols import PROTOCOLS
from ampacity.settings import FIELDS, SETTINGS, Settings

LINES_MAX, COLUMNS_MAX = 24, 80
ROOT: Any = typer.main.get_command(app)


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name))


COMMANDS = {" ".join(path): command for path, command in _commands(ROOT)}
LEAVES = {name: c for name, c in COMMANDS.items() if not hasattr(c, "commands")}


def _output(*words: str, **env: str) -> str:
    result = CliRunner().invoke(app, list(words), prog_name="ampacity", env=env)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_fits_a_screen(name: str) -> None:
    lines = _output(*name.split(), "--help").splitlines()
    assert len(lines) <= LINES_MAX
    assert max(map(len, lines)) <= COLUMNS_MAX


@pytest.mark.parametrize("name", LEAVES)
def test_the_help_shows_the_most_used_and_help_all_shows_everything(name: str) -> None:
    command = LEAVES[name]
    context = typer.Context(command)
    few, every = shown(command, context), options(command, context)
    assert min(5, len(every)) <= len(few) <= SHOWN_MAX
    brief, full = (_output(*name.split(), option) for option in ("--help", "--help-all"))
    for option in every:
        assert re.search(rf"^  (-\w, )?{option.opts[-1]} ", full, re.M)
        assert bool(re.search(rf"^  (-\w, )?{option.opts[-1]} ", brief, re.M)) == (option in few)
    assert "╭" not in brief + full


@pytest.mark.parametrize("name", LEAVES)
def test_two_examples_that_parse(name: str) -> None:
    examples = parts(LEAVES[name])[1]
    assert len(examples) == 2
    for example in examples:
        words = shlex.split(re.split(r" [|>] ", example)[0])[1:]
        assert words[: len(name.split())] == name.split()
        LEAVES[name].make_context(name, words[len(name.split()) :])


def _clause(text: str) -> str:
    """Return what an option is: its help up to the first stop, comma or colon."""
    return re.split(r"[.,:;(]", text)[0].strip().lower()


def test_one_name_for_one_thing_and_one_thing_for_one_name() -> None:
    """By the first clause of the help, which says what the option is."""
    meanings, names = defaultdict(set), defaultdict(set)
    for command in LEAVES.values():
        for option in options(command, typer.Context(command)):
            meanings[option.opts[-1]].add(_clause(option.help))
            names[_clause(option.help)].add(option.opts[-1])
    assert {n: m for n, m in meanings.items() if len(m) > 1} == {}
    assert {m: n for m, n in names.items() if len(n) > 1} == {}


def test_every_api_that_can_be_spoken_can_be_chosen_and_is_named() -> None:
    assert list(ANSWERS) == list(PROTOCOLS)
    for api in PROTOCOLS:
        assert SETTINGS["api"].kind.read(api, "--api") == api
        assert api in SETTINGS["api"].help


def test_a_plain_default_is_shown_as_it_is_used() -> None:
    """From the declaration; what is no value (as "any") is written beside it."""
    assert "[default: 30s]" in _output("run", "--help")
    assert "[default: 8s]" in _output("demo", "--help")
    for name, default in {"idle_timeout": "2m", "seed": "1", "api": "chat", "retries": "0"}.items():
        assert SETTINGS[name].default == default
        assert getattr(Settings, FIELDS[name]) == SETTINGS[name].kind.read(default, name)


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_version(option: str) -> None:
    assert re.fullmatch(r"ampacity \d+\.\d+\.\d+\n", _output(option))


def test_completion_is_installed_and_completes(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path)}
    start = [sys.executable, "-c", "from ampacity.cli import main; main()"]
    asked = {"_AMPACITY_COMPLETE": "complete_bash", "COMP_WORDS": "ampacity sw", "COMP_CWORD": "1"}
    found = subprocess.run(start, env=env | asked, stdout=subprocess.PIPE, text=True, check=False)
    assert found.stdout.split() == ["sweep"]
    install = f"{shlex.join(start)} --install-completion; true"  # of the shell that runs it
    subprocess.run(["bash", "-c", install], env=env, check=True)
    assert "ampacity" in (tmp_path / ".bashrc").read_text()
