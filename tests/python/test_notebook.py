"""``ampacity.predict``, ``sweep`` and ``compare`` from a running event loop; the notebook of the docs."""

import ast
import asyncio
import inspect
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ampacity as public
from ampacity.analysis.change.judged import CompareError
from ampacity.notebook import _words
from ampacity.simulator.server.launch import start_in_process
from tests.support.args import COMMAND
from tests.support.synthetic import Stage, fixed, make_run

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


async def execute(sources: list[str], names: dict[str, Any]) -> None:
    """Run cells one after the other, as a notebook's kernel does: in its running event loop."""
    for source in sources:
        code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(waiting := eval(code, names)):
            await waiting


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a notebook draw no pictures, as those of other tests."""

    def start(words: list[str], **how: Any) -> subprocess.Popen[str]:
        assert words[1:3] == ["-m", "ampacity"]
        return subprocess.Popen([*COMMAND, *words[3:]], **how)

    known = {"Popen": start, "PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
    monkeypatch.setattr("ampacity.notebook.subprocess", SimpleNamespace(**known))


@pytest.mark.slow
def test_the_notebook_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    asyncio.run(execute(cells(), names))
    a, b = names["a100"], names["h100"]
    assert a.summary.predicted
    assert a.summary.capacity.capacity_rps < b.summary.capacity.capacity_rps
    assert "B is better in capacity" in names["comparison"].sentence
    drawn = names["chart"].to_dict()["datasets"]
    assert {row["percentile"] for rows in drawn.values() for row in rows} == {"p50", "p95"}
    other = make_run(tmp_path / "other", [Stage(fixed(400, 0.1), 40.0, offered_rps=10.0)])
    with pytest.raises(CompareError, match=r"they differ in .*--output-tokens"):
        public.compare(a, other.path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slo": ["a", "b"], "max_in_flight": 3}, "--slo|a --slo|b --max-in-flight|3"),
        ({"rates": [1, 2.5], "concurrency": (4,)}, "--rates|1,2.5 --concurrency|4"),
        ({"sticky": True, "fit_context": False, "timeout": None}, "--sticky"),
        ({"lock": {"hardware": "H100"}, "header": "A: b"}, "--lock|hardware=H100 --header|A: b"),
        ({"extra_body": {"top_k": 1}}, '--extra-body|{"top_k": 1}'),
    ],
)
def test_options_become_those_of_the_command(options: Mapping[str, Any], words: str) -> None:
    assert "|".join(_words(options)) == words.replace(" --", "|--")


def test_what_the_command_refuses_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(public.CommandError, match="unknown preset 'nothing'"):
        public.predict("nothing", out=tmp_path / "x")
    with pytest.raises(public.CommandError, match="'None'"):
        public.predict(None, quiet=True)
    assert "unknown preset" in capsys.readouterr().err
    with pytest.raises(public.CommandError, match="cannot connect to"):
        public.sweep("http://127.0.0.1:1/v1", rates=2, out=tmp_path / "y", quiet=True)
    assert capsys.readouterr().err == ""


def test_a_sweep_within_a_running_loop(tmp_path: Path) -> None:
    async def cell() -> public.Run:
        return public.sweep(
            server.url, rates=[20], duration="2s", workload="chat-short", out=tmp_path / "run"
        )

    with start_in_process("demo") as server:
        run = asyncio.run(cell())
    assert run.summary.requests == len(run.requests) > 10
    assert run.meta["command_line"][:2] == ["ampacity", "sweep"]
