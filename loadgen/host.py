"""Collect facts and limits of the machine that generates the load."""

import contextlib
import os
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ampacity.files import memory_bytes
from ampacity.loadgen.receive import hot_path

if sys.platform != "win32":
    import fcntl
    import resource

PROC_SYS = Path("/proc/sys")
BUSIEST = 3
BUSY_CORES = 0.02  # less is ignored


def host_facts() -> dict[str, Any]:
    """Return the facts about this machine that may matter to a reader of the report."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu_model": _cpu_model(),
        "memory_bytes": memory_bytes(),
        "uvloop": find_spec("uvloop") is not None,
        "compiled_receive_path": hot_path.COMPILED,
        "open_files_limit": open_files_limit(),
        "environment": changing_variables(),
    }


_CHANGING = re.compile(
    r"(ssl_cert_(file|dir)|openssl_conf|((https?|all|no)_proxy)|python.*|ld_(preload|library_path)"
    r"|malloc_.*|glibc_tunables|hostaliases|localdomain|res_options)",  # the last: name resolution
    re.IGNORECASE,
)


def changing_variables() -> list[str]:
    """Return the names of set variables that change a run; their values may be secret."""
    return sorted(name for name, value in os.environ.items() if value and _CHANGING.fullmatch(name))


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return {pid: (name, CPU s)} of other processes, without children; {} without /proc."""
    found: dict[int, tuple[str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, rest = (
                (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            )
            fields, pid = rest.split(), int(folder.name)
            if os.getpid() not in (pid, int(fields[1])):
                ticks = int(fields[11]) + int(fields[12])
                found[pid] = head.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK")
    return found


def cores_used(
    before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]], elapsed_s: float
) -> list[tuple[float, str]]:
    """Return (cores, name) of each process between two samples, the busiest first.

    Told apart by their pid: kernel threads and some servers change their names.
    """
    used = [
        ((total_s - before.get(pid, ("", 0.0))[1]) / max(elapsed_s, 1e-9), name)
        for pid, (name, total_s) in after.items()
    ]
    return sorted(used, key=lambda one: -one[0])


def busiest(used: list[tuple[float, str]]) -> list[dict[str, Any]]:
    """Return the ``BUSIEST`` of ``cores_used``, as run.json has them."""
    return [
        {"name": name, "cores": round(cores, 2)}
        for cores, name in used[:BUSIEST]
        if cores >= BUSY_CORES
    ]


def open_files_limit() -> int | None:
    """Return the soft limit of file descriptors; None if the system has none."""
    if sys.platform == "win32":
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def kernel_setting(name: str) -> list[int]:
    """Return the numbers of a setting by its name for sysctl; [] where there is none (not Linux)."""
    with contextlib.suppress(OSError, ValueError):
        text = PROC_SYS.joinpath(*name.split(".")).read_text(encoding="ascii")
        return [int(word) for word in text.split()]
    return []


def address_space() -> int | None:
    """Return the bytes that this process may map (``ulimit -v``); None: no limit is known."""
    if sys.platform == "win32":
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def raise_open_files_limit() -> int | None:
    """Raise the soft limit of file descriptors to the hard one; return the new limit."""
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return open_files_limit()


def widen_descriptor_table() -> None:
    """Grow the kernel's descriptor table of this process to ``TABLE_FILES`` or the limit.

    Linux doubles it at descriptor 256, 512, ..., which costs a process with threads 10 to 20 ms.
    """
    if sys.platform == "win32":
        return
    highest = min(open_files_limit() or TABLE_FILES, TABLE_FILES) - 1
    with open(os.devnull, "rb") as any_file, contextlib.suppress(OSError, ValueError):
        os.close(fcntl.fcntl(any_file, fcntl.F_DUPFD_CLOEXEC, highest))


TABLE_FILES = 65_536  # eight bytes each
OWN_FILES = 64  # libraries, records, telemetry, timers


def room_for_connections() -> int | None:
    """Return how many connections the limit of file descriptors allows; None: no limit."""
    limit = open_files_limit()
    unlimited = limit is None or limit == resource.RLIM_INFINITY
    return None if unlimited else max(int(limit or 0) - OWN_FILES, 0)


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or None
