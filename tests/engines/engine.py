"""Engines that no one here wrote, each in a process of its own."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

START_LIMIT_S = 60.0
SLOTS = 8
MEAN_LENGTH_TOKENS = 32  # of natural answers


def need(*packages: str) -> None:
    """Skip where a package of the dev extra is missing, as on platforms without a wheel of
    xllamacpp."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: no engine to test against")


@dataclass(frozen=True)
class Engine:
    """A server that is up. ``process`` is there to be killed by a test that wants that."""

    root: str  # without /v1
    model: str
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


@contextmanager
def serve_llamacpp(model: Path, log: Path) -> Iterator[Engine]:
    """llama.cpp on ``model`` in a process of its own, which ends with this one."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("serve_llamacpp.py")),
        str(model),
        "tiny",
        str(SLOTS),
    ]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        watch = threading.Timer(START_LIMIT_S, process.kill)  # ends the reading below
        watch.start()
        try:
            lines = (line.split() for line in process.stdout)
            address = next((words[1] for words in lines if words[:1] == ["listening"]), None)
            watch.cancel()
            assert address, f"llama.cpp did not start: {log.read_text()[-2000:]}"
            yield Engine(root=address, model="tiny", process=process)
        finally:
            watch.cancel()
            process.kill()
