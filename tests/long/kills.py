"""Kill runs at random moments and resume them: ``python -m tests.long.kills``.

Prints for each kill the time of which no record is left, and how the resumed run's requests and
verdicts compare with those of a run that was not interrupted. The exit status is 1 if a bar is missed.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ampacity.analysis.contract.summary import Summary, read_summary
from ampacity.loadgen.rundir.files import load_run
from ampacity.simulator.server.launch import start_in_process
from tests.support.processes import kills

LOST_MAX_S = 1.0
SESSIONS = """
input_tokens: 30
output_tokens: 10
sessions: {turns: 3, think_ms: 200}
"""


@dataclass(frozen=True)
class Case:
    """A run that is killed. ``same``: which ids must be those of an uninterrupted run."""

    options: str
    length_s: float  # in which it is killed, from the first request on
    same: str = "all"
    victim: str = "parent"
    endpoints: int = 1


SHORT = "--workload chat-short --slo ttft_p95=1s"
CASES = {
    "grid": Case(f"run --rates 40,60 --duration 3s {SHORT}", 6.5),
    "workers": Case(f"run --rates 60,80 --duration 3s --workers 2 {SHORT}", 6.5),
    "worker dies": Case(f"run --rates 60 --duration 4s --workers 2 {SHORT}", 3.8, victim="worker"),
    "closed": Case(f"run --concurrency 6,12 --duration 3s {SHORT}", 6.5, "unique"),
    "sessions": Case("run --rates 30 --duration 5s --workload SESSIONS", 5.0, "begun"),
    "sweep": Case(f"sweep --max-duration 25s {SHORT}", 15.0, "kept"),
    "search": Case(f"search --max-duration 25s {SHORT}", 15.0, "kept"),
    "burst": Case(
        f"burst --base-rps 30 --base-duration 3s --burst-duration 2s --recovery-duration 3s {SHORT}",
        7.0,
        "kept",
    ),
    "ab": Case(f"ab --rates 40 --duration 2s --rounds 2 {SHORT}", 18.0, "all", endpoints=2),
    "server dies": Case(f"run --rates 40,60 --duration 3s {SHORT}", 5.0, victim="server"),
}


def _arguments(case: Case, urls: list[str], out: Path) -> list[str]:
    words = case.options.replace("SESSIONS", str(out.parent / "sessions.yaml")).split()
    return [words[0], *urls[: case.endpoints], *words[1:], "--out", str(out)]


def _runs(case: Case, out: Path) -> list[Path]:
    return [out / "a", out / "b"] if case.endpoints == 2 else [out]


def _faults(case: Case, whole: Path, out: Path, kept: list[dict[int, tuple[int, int]]]) -> str:
    """Return what is wrong with the requests of a resumed run; empty: nothing."""
    for before, expected, run in zip(kept, _runs(case, whole), _runs(case, out), strict=True):
        found = kills.planned(run)
        if any(times != 1 for *_, times in found.values()):
            return "an id has two records"
        if before.items() - kills.by_id(run).items():
            return "a record was lost, or has other lengths"
        if case.same == "all" and found != kills.planned(expected):
            return (
                f"{len(found)} ids, not the {len(kills.planned(expected))} of an uninterrupted run"
            )
        if case.same == "begun" and found.items() - kills.planned(expected).items():
            return "ids that an uninterrupted run has not"
        if told := _contradiction(*(read_summary_of(path) for path in (expected, run))):
            return told
    return ""


def read_summary_of(run: Path) -> Summary:
    return read_summary(json.loads((run / "summary.json").read_text()))


def _contradiction(whole: Summary, resumed: Summary) -> str:
    """Return which verdict or interval of a resumed run contradicts the uninterrupted one's."""
    met = {stage.name: stage.slo_met for stage in whole.stages}
    for stage in resumed.stages:
        if {stage.slo_met, met.get(stage.name)} == {True, False}:
            return f"{stage.name} is met in one run and violated in the other"
    ends = [summary.capacity.capacity_rps_ci for summary in (whole, resumed)]
    lows, highs = [[e[k] for e in ends if e and e[k] is not None] for k in (0, 1)]
    if lows and highs and max(lows) > min(highs):
        return f"the intervals of the capacity have nothing in common: {ends}"
    return ""


def _once(
    name: str, urls: list[str], whole: Path, out: Path, delay_s: float
) -> tuple[float | None, str]:
    """Kill one run and resume it; return (seconds lost, what is wrong)."""
    case = CASES[name]
    process = kills.start(*_arguments(case, urls, out))
    kills.wait_for_stage(_runs(case, out)[0], delay_s)
    killed_ns = kills.kill(process)
    process.communicate(timeout=120)
    running = [run for run in _runs(case, out) if kills.stages_of(run)]
    known = [s for run in running if (s := kills.lost_s(run, killed_ns)) is not None]
    kept = [kills.by_id(run) if kills.stages_of(run) else {} for run in _runs(case, out)]
    status, _, err = kills.finished(case.options.split()[0], "--resume", out, timeout_s=180)
    judged = (0, 1, 3) if case.endpoints == 1 else (0, 1, 2, 3)  # 2: a busy client, no comparison
    if status not in judged:
        return max(known, default=None), f"--resume exits with {status}: {err[-300:]}"
    return max(known, default=None), _faults(case, whole, out, kept)


def _by_itself(case: Case, out: Path, delay_s: float) -> tuple[float | None, str]:
    """Kill the server or a worker of a run that then ends: what was due has its record."""
    with start_in_process("demo") as server:
        process = kills.start(*_arguments(case, [server.url], out))
        kills.wait_for_stage(out, delay_s)
        if case.victim == "server":
            server.process.kill()
        else:
            kills.kill(process, case.victim)
        process.communicate(timeout=120)
    lacking = (
        sum(s["scheduled_requests"] for s in kills.stages_of(out)) - load_run(out).requests.num_rows
    )
    return 0.0, f"{lacking} requests have no record" if lacking else ""


def main() -> int:
    """Kill and resume; return the exit status."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--kills", type=int, default=50)
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("cases", nargs="*", default=list(CASES))
    options = given.parse_args()
    draw, bad, lost = random.Random(options.seed), 0, list[float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        start_in_process("demo") as one,
        start_in_process("demo") as two,
    ):
        urls = [one.url, two.url]
        (Path(folder) / "sessions.yaml").write_text(SESSIONS)
        wholes: dict[str, Path] = {}
        for number in range(options.kills):
            name = options.cases[number % len(options.cases)]
            case, out = CASES[name], Path(folder) / f"{number}"
            if name not in wholes:
                wholes[name] = Path(folder) / name.replace(" ", "-")
                kills.finished(*_arguments(case, urls, wholes[name]), timeout_s=180)
            delay_s = draw.uniform(0.1, case.length_s)
            try:
                if case.victim != "parent":
                    gone_s, fault = _by_itself(case, out, delay_s)
                else:
                    gone_s, fault = _once(name, urls, wholes[name], out, delay_s)
            except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                gone_s, fault = None, repr(error)
            late = gone_s is not None and gone_s > LOST_MAX_S
            bad += bool(fault or late)
            lost += [gone_s] if gone_s is not None else []
            shown = "no stage going on" if gone_s is None else f"{gone_s:.2f} s lost"
            told = fault or "requests and verdicts as uninterrupted"
            print(f"{number:3} {name:12} after {delay_s:5.2f} s: {shown:18} {told}", flush=True)
    most = max(lost, default=0.0)
    print(f"{options.kills} kills, {bad} bad; most lost {most:.2f} s of {len(lost)} in a stage")
    return int(bad > 0)


if __name__ == "__main__":
    began_s = time.monotonic()
    status = main()
    print(f"{time.monotonic() - began_s:.0f} s")
    sys.exit(status)
