"""The mock server as a process: compiled, started on a core of its own, stopped, its truth read
back.
"""

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("mock_server.c")
STOP_TIMEOUT_S = 60.0
_CERTIFICATE = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=mock"
_NAME = "subjectAltName=IP:127.0.0.1"


class MockError(ValueError):
    """The mock server cannot be built or run here; one line that says why."""


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Exit with the status of ``main``; a MockError is one line, and status 2."""
    try:
        sys.exit(main())
    except MockError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)


@dataclass(frozen=True)
class Served:
    """What the server did for one request. Times are monotonic ns."""

    arrival_ns: int  # the request's last byte was read
    planned_tokens: int
    token_ns: npt.NDArray[np.int64]  # when send() was called for each token


@dataclass
class Mock:
    """A running mock server, and its truth once it has stopped."""

    url: str
    pid: int
    certificate: Path | None = None  # of a server with TLS
    # by X-Request-Id, one for each arrival
    served: dict[str, list[Served]] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)  # the server about itself


def unavailable() -> str | None:
    """Return why the mock server cannot run on this machine, or None."""
    if not sys.platform.startswith("linux"):
        return "the mock server needs Linux (epoll)"
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        return "the mock server needs a C compiler (cc)"
    return None


def build(directory: Path, tls: bool = False) -> Path:
    """Compile the server into ``directory``; ``tls`` needs libssl. Raises MockError."""
    if (why := unavailable()) is not None:
        raise MockError(why)
    compiler = shutil.which("cc") or shutil.which("gcc") or "clang"
    binary = directory / "mock_server"
    words = [compiler, "-O2", "-std=c11", "-Wall", "-Wextra", "-o", str(binary), str(SOURCE)]
    _run([*words, *(["-DTLS", "-lssl", "-lcrypto"] if tls else [])])
    return binary


def _run(command: list[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise MockError(f"{command[0]} failed: {made.stderr.strip().splitlines()[0]}")


def write_streams(path: Path, streams: Sequence[Sequence[tuple[int, bytes]]]) -> None:
    """Write streams that the server plays: pieces of (tokens, bytes), each sent at once.

    The first and the last piece of a stream have no tokens, all others have some."""
    with path.open("wb") as file:
        file.write(struct.pack("=I", len(streams)))
        for pieces in streams:
            file.write(struct.pack("=I", sum(tokens for tokens, _ in pieces)))
            for tokens, data in pieces:
                file.write(struct.pack("=II", tokens, len(data)) + data)


@contextlib.contextmanager
def mock_server(
    core: int | None = None, ahead: bool = False, *, tls: bool = False, **options: float | int | str
) -> Iterator[Mock]:
    """Run the server (``ttft_ms=50, itl_ms=10, stall_s=3, ...``) while the context lasts. Raises
    MockError.

    ``core`` pins it, ``ahead`` puts it before other work there, ``tls`` makes a certificate. When the context has ended,
    ``served`` and ``stats`` hold the truth."""
    with tempfile.TemporaryDirectory(prefix="ampacity-mock-") as directory:
        truth = Path(directory) / "truth.tsv"
        command = [str(build(Path(directory), tls)), "--truth", str(truth)]
        certificate = Path(directory) / "certificate.pem" if tls else None
        if certificate is not None:
            made = str(certificate)
            words = [*_CERTIFICATE.split(), "-addext", _NAME, "-keyout", made, "-out", made]
            _run(["openssl", *words])
            command += ["--tls", made]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        if ahead and os.geteuid() == 0 and shutil.which("chrt"):
            command = ["chrt", "-f", "1", *command]
        if core is not None and shutil.which("taskset"):
            command = ["taskset", "-c", str(core), *command]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port.isdigit():
                process.kill()
                raise MockError(f"the mock server did not start: {port}")
            scheme = "https" if tls else "http"
            mock = Mock(f"{scheme}://127.0.0.1:{port}/v1", process.pid, certificate)
            try:
                yield mock
            finally:
                process.terminate()
                text, _ = process.communicate(timeout=STOP_TIMEOUT_S)
        mock.stats = json.loads(text)
        mock.served = read_truth(truth)


def read_truth(path: Path) -> dict[str, list[Served]]:
    """Return the server's truth file (see ``mock_server.c``) by X-Request-Id."""
    served: dict[str, list[Served]] = {}
    with path.open(encoding="latin-1") as lines:
        for line in lines:
            name, arrival, planned, _ended, offsets = line.rstrip("\n").split("\t")
            token_ns = np.array(offsets.split(), dtype=np.int64) + int(arrival)
            served.setdefault(name, []).append(Served(int(arrival), int(planned), token_ns))
    return served
