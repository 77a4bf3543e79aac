"""Runs a command on one core and measures its whole process tree: CPU by the kernel's account,
memory by samples.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE_EVERY_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Metered:
    """One finished command. ``samples`` float64[n, 3]: monotonic s, CPU s so far, resident MB; of
    the whole tree."""

    launched_ns: int
    exited_ns: int
    returncode: int
    cpu_s: float  # user and system, all processes, from launch to exit
    samples: np.ndarray
    stdout: str
    stderr: str

    def cpu_between_s(self, begin_ns: int, end_ns: int) -> float:
        """Return the CPU seconds between two monotonic times."""
        if not len(self.samples):
            return 0.0
        at_s, cpu_s = self.samples[:, 0], self.samples[:, 1]
        begin, end = np.interp([begin_ns / 1e9, end_ns / 1e9], at_s, cpu_s)
        return float(end - begin)

    def resident_mb(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the largest sample between two monotonic times, MB (10^6 bytes)."""
        at_s = self.samples[:, 0] if len(self.samples) else np.empty(0)
        inside = (at_s >= begin_ns / 1e9) & (at_s <= end_ns / 1e9)
        return float(self.samples[inside, 2].max()) if inside.any() else None


def run_metered(
    command: list[str], *, core: int | None, ahead: bool, cwd: Path, timeout_s: float
) -> Metered:
    """Run ``command`` to its end on ``core`` (None: anywhere). Raises TimeoutError when it takes
    too long.

    ``ahead`` puts it before whatever else uses the core, where that is allowed."""
    if core is not None and shutil.which("taskset"):
        command = ["taskset", "-c", str(core), *command]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        launched_ns = time.monotonic_ns()
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            start_new_session=ahead,
        )
        if ahead:
            put_ahead(process.pid)
        samples: list[tuple[float, float, float]] = []
        ended = threading.Event()
        watch = threading.Thread(target=_sample, args=(process.pid, samples, ended), daemon=True)
        alarm = threading.Timer(timeout_s, process.kill)
        watch.start()
        alarm.start()
        _, status, usage = os.wait4(process.pid, 0)
        exited_ns = time.monotonic_ns()
        process.returncode = os.waitstatus_to_exitcode(status)
        alarm.cancel()
        ended.set()
        watch.join()
        if exited_ns - launched_ns > timeout_s * 1e9:
            raise TimeoutError(f"{command[0]} ... took more than {timeout_s:g} s")
        out.seek(0)
        err.seek(0)
        return Metered(
            launched_ns=launched_ns,
            exited_ns=exited_ns,
            returncode=process.returncode,
            cpu_s=usage.ru_utime + usage.ru_stime,
            samples=np.array(samples).reshape(-1, 3),
            stdout=out.read(),
            stderr=err.read(),
        )


def put_ahead(pid: int) -> None:
    """Give a process group of its own, and all that it starts, the weight of nice -20 (needs root).

    Not SCHED_FIFO: on one core a thread that spins for another would never end."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, -20)
    with contextlib.suppress(
        OSError
    ):  # where the kernel groups by session, only the group's own nice counts
        Path(f"/proc/{pid}/autogroup").write_text("-20")


def _sample(pid: int, samples: list[tuple[float, float, float]], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_EVERY_S):
        cpu_s = resident_bytes = 0.0
        found = False
        for each in _tree(pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
                # own, and of reaped children
                cpu_s += sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S
                resident_bytes += int(fields[21]) * _PAGE_BYTES
                found = True
        if found:
            samples.append((time.monotonic(), cpu_s, resident_bytes / 1e6))


def _tree(pid: int) -> list[int]:
    """Return the process and all its living descendants."""
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{each}/task"):
                children = Path(f"/proc/{each}/task/{task}/children").read_text()
                waiting += [int(child) for child in children.split()]
    return found
