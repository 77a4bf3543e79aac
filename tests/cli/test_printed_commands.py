"""Every command that the product prints to be pasted: the CLI's own parser takes it."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.compare.scorecard import compare
from ampacity.reports.change.compare import comparison_screen
from tests.cli.test_gate import base, made
from tests.cli.test_help import LEAVES
from tests.support.args import Command
from tests.support.compared_runs import arm, stage, ttfts

__all__ = ["base"]  # a fixture
PACKAGES = ("ampacity", "analysis", "loadgen", "reports", "simulator", "workloads")
ROOT = Path(__file__).parents[2]
NUMBERS = {"R": "1", "USD": "1", "N": "1"}  # placeholders


def parse(command: str) -> None:
    """Parse a command as the CLI does. Raises click's UsageError."""
    words = [NUMBERS.get(word, word) for word in shlex.split(command)]
    assert words[0] == "ampacity"
    name = " ".join(words[1:3]) if " ".join(words[1:3]) in LEAVES else words[1]
    LEAVES[name].make_context(name, words[1 + len(name.split()) :])


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a module; what is filled in is X, and a list of words one text."""
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr | ast.List):
            parts = one.values if isinstance(one, ast.JoinedStr) else one.elts
            words = [str(p.value) if isinstance(p, ast.Constant) else "X" for p in parts]
            yield ("" if isinstance(one, ast.JoinedStr) else " ").join(words)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _named() -> Iterator[tuple[str, str, str]]:
    """Yield (file, command, option) for each option that a text names after a command."""
    for path in (path for package in PACKAGES for path in (ROOT / package).glob("**/*.py")):
        for text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
            for command in re.split(r"(?=ampacity [a-z])", text)[1:]:
                words = re.split(r"[;'\"`()\n]|: ", command)[0].split()
                two = " ".join(words[1:3])
                name = two if two in LEAVES else words[1]
                if name in LEAVES:
                    for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", " ".join(words)):
                        yield path.name, name, option


def test_no_command_in_a_text_has_an_option_that_is_unknown() -> None:
    named = set(_named())
    assert ("steps.py", "ab", "--rates") in named
    assert ("validate.py", "plan", "--peak-rps") in named
    known = {name: {o for p in c.params for o in p.opts} for name, c in LEAVES.items()}
    assert [one for one in sorted(named) if one[2] not in known[one[1]]] == []


@pytest.mark.parametrize("given", ["", "--peak-rps 9 --gpu-hour 2 --tp 2 --gpu h100"])
def test_the_steps_of_size(given: str, tmp_path: Path, command: Command, capsys: Any) -> None:
    values = ttfts(1)
    arm(tmp_path / "run", [stage(values), stage(3 * values)], ["ttft_p95=200ms"])
    shape = "--params 8e9 --layers 32 --kv-heads 8 --head-dim 128" if given else ""
    no_fleet = 2 if "--peak-rps" in given else 0
    command("size", tmp_path / "run", given, shape, "--json", status=no_fleet)
    steps = json.loads(capsys.readouterr().out)["candidates"][0]["steps"]
    printed = [part for s in steps if s.get("command") for part in s["command"].split("; ")]
    assert len(printed) >= 3
    for text in printed:
        parse(text)


@pytest.mark.parametrize("tight", [True, False], ids=["regression", "inconclusive"])
def test_the_gate_is_repeated_as_it_was_given(
    tight: bool, tmp_path: Path, base: Path, command: Command, capsys: Any
) -> None:
    run = made(tmp_path / "slow", 1.1) if tight else made(tmp_path / "other", n=600, seed=2)
    given = f"--baseline {base} --slo ttft_p99=9s --tolerance ttft_p50=0.1%"
    command("gate", run, given, status=1 if tight else 3)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("NEXT")]
    more = "--summary full" if tight else "--max-samples 3"
    assert line.removeprefix("NEXT").strip() == f"ampacity gate {run} {given} {more}"
    parse(f"ampacity gate {run} {given} {more}")


@pytest.mark.parametrize("other", ["M", "L"])
def test_an_ab_is_the_next_step_only_for_one_model(other: str, tmp_path: Path) -> None:
    runs = [
        arm(
            tmp_path / name,
            stage(ttfts(i)),
            endpoint={"url": f"http://{name}/v1", "model": model},
            command_line=f"ampacity sweep http://{name}/v1 --model {model} --input-tokens 50 "
            "--duration 30s --rates 10,20 --slo ttft_p95=1s --out x".split(),
        )
        for i, (name, model) in enumerate({"a": "M", "b": other}.items())
    ]
    found = comparison_screen(compare(runs)).next_command
    if other != "M":
        assert found is None
        return
    words = "--model M --input-tokens 50 --slo ttft_p95=1s --rates 20"
    assert found == f"ampacity ab http://a/v1 http://b/v1 {words}"  # the workload of the runs
    parse(found)
