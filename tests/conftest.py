"""Fixtures that several test files share."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ampacity.simulator.server.launch import Started

from tests.support.args import QUICK_DRAW, Cli, Command, Result, args_of
from tests.support.drawn_here import DRAWN_HERE
from tests.support.repeats import often

settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="SAME_EXAMPLES"
    in os.environ,  # in CI, whose answer is that of the tree; else each run tries others
)
os.environ.pop("COLUMNS", None)  # xdist sets it for its workers: it would cut tables
settings.load_profile("busy")  # a machine that does other work fails no property test
# kept bytecode: else every process that a test starts compiles this package, half a second
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# one thread of linear algebra, or each small fit waits for the others' in a spin: 3 times the CPU
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# the command line is built once for all calls in this process: building it takes 40 ms
typer.main.get_command = functools.cache(typer.main.get_command)

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
ARGUMENTS = args_of(
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update",
    "--disable-sync --no-first-run",
)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Three processes for two cores, as many tests wait for a server; a core each in real time."""
    together = config.option.markexpr == "not real_time"
    return (os.cpu_count() or 1) * 3 // 2 if together else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of slow tests, so that no process ends long after the others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Leave what lasts until the end out of every collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def ampacity(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """The command line in this process: ``ampacity("gate", path)`` gives the exit status."""
    from ampacity.cli import main

    def call(*arguments: str | Path) -> object:
        monkeypatch.setattr(sys, "argv", ["ampacity", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return call


@pytest.fixture
def cli(ampacity: Callable[..., object], capfd: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process: its exit status and what it prints."""

    def call(*arguments: str | Path) -> Result:
        capfd.readouterr()
        status = ampacity(*arguments)
        return Result(status, *capfd.readouterr())

    return call


@pytest.fixture(autouse=True)
def quickly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw empty pictures, which saves 1.5 s a report, where a test is not about them; repeat no
    stage because this machine was busy, and collect no garbage before a stage (0.1 s, with all that
    the tests keep), where a test is not about time; predict stages of 600 requests, not 2,000."""
    marked = request.node.get_closest_marker
    monkeypatch.setattr("ampacity.experiments.virtual.player.REQUESTS_MIN", often(600, 2000))
    if marked("draws") is None:
        monkeypatch.setattr("ampacity.reports.charts.svg._DRAW", QUICK_DRAW)
        monkeypatch.setattr("ampacity.reports.charts.svg.subprocess", DRAWN_HERE)
    if marked("real_time") is None:
        monkeypatch.setattr("ampacity.experiments.stages.rig.REPEATS_MAX", 0)
        monkeypatch.setattr("ampacity.loadgen.audit.StageWatch.entered", 1)


@pytest.fixture
def command(ampacity: Callable[..., object]) -> Command:
    """``command("gate --html x", path, status=3)``: run a command line, check its exit status."""

    def call(*parts: object, status: int = 0) -> None:
        assert ampacity(*args_of(*parts)) == status

    return call


@pytest.fixture(scope="session")
def server() -> Iterator[Started]:
    """The simulator with its demo engine, in a process of its own."""
    from ampacity.simulator.server.launch import start_in_process

    with start_in_process("demo") as started:
        yield started


@pytest.fixture(scope="module", params=["compiled", "parsers"])
def hot_path_either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read with the compiled hot path, and without it."""
    from ampacity.loadgen.receive import hot_path

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "parsers":
            patch.setattr(hot_path, "read_ready", hot_path.read_ready_in_python)
            patch.setattr(hot_path, "COMPILED", False)
        elif not hot_path.COMPILED:
            pytest.skip("loadgen/receive/_hot_path.c was not built: no C compiler, or no Linux")
        yield


@pytest.fixture(scope="session")
def dated_by_the_kernel() -> Iterator[None]:
    """The kernel gives time stamps, from the first packet of the test to the end of the session."""
    from tests.support.servers.kernel_wires import stamping

    with stamping():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()
