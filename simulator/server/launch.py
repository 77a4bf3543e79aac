"""Start the simulated server in its own process, and stop it."""

import os
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import msgspec

import ampacity
from ampacity.simulator import SimulatorError

_READY = re.compile(r"listening on (http://\S+/v1) model (.*)")


@dataclass(frozen=True, slots=True)
class Started:
    """A running server; a context manager that stops it."""

    process: "subprocess.Popen[bytes]"
    url: str  # http://127.0.0.1:PORT/v1
    model: str

    def stop(self, timeout_s: float = 5.0) -> None:
        """Terminate the process; kill it if it does not exit in time. Idempotent."""
        with self.process as process:  # its pipes are closed, and it is waited for
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def start_in_process(preset: str = "demo", *, timeout_s: float = 30.0, **options: Any) -> Started:
    """Start `python -m ampacity.simulator.server.server` and wait until it listens.

    options: further fields of server.Start. The child exits when this process is gone. Raises
    SimulatorError with the child's message if it does not start in time.
    """
    start = msgspec.json.encode({"preset": preset, **options}).decode()
    command = [sys.executable, "-P", "-m", "ampacity.simulator.server.server", start]
    # the child imports this package, whatever its working directory has
    here = str(Path(ampacity.__file__).resolve().parent.parent)
    paths = [here, os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [here]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then stops the child
        )
        try:
            found = _READY.fullmatch(_first_line(process, timeout_s))
            if found:
                return Started(process, found[1], found[2])
            raise SimulatorError(
                f"the simulator did not start: {_last_line(errors) or 'no answer in time'}"
            )
        except BaseException:
            Started(process, "", "").stop()
            raise


def _first_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> str:
    """Return the child's first line on stdout, '' if it exits; kill it after the timeout."""
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        return process.stdout.readline().decode("utf-8", "replace").strip()
    finally:
        timer.cancel()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""
