"""Run every ending of the fault server, and write docs/reliability.md's tables from what came of it.

``python -m tests.long.fault_matrix`` takes about half an hour and needs the machine to itself. How an
ending is counted is found for each of them in one stage; what a command makes of it, in a run of
that command: the endpoint answers the probe well, and every request of the load with the ending.
"""

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ampacity.analysis.summary import summarise
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord, kind_of
from tests.support.processes.command_lines import run_here
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import FAULTS, Call
from tests.support.stage_driving import served_stage

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- generated: {} -->\n", "<!-- end -->\n"
# a lax limit on TTFT: what else runs on this machine shall not matter
LOAD = "--input-tokens 5 --output-tokens 4 --timeout 1s --quiet --slo error_rate=10% --slo ttft_p50=20s"
LAX = " ".join(f"--tolerance {q}=1000%" for q in ("p10", "p50", "p90", "p99"))
COMMANDS = {  # each with stages as short as they may be
    "run": "run U --rates 180 --duration 2s",
    "check": "check U --rates 20 --max-duration 6s",
    "sweep": "sweep U --rates 30,40 --duration 2s",
    "search": "search U --max-duration 12s",
    "burst": "burst U --base-rps 20 --base-duration 5s --burst-duration 2s --recovery-duration 6s"
    " --max-recovery 4s",
    "ab": "ab GOOD U --rates 40 --duration 1s --rounds 2",
}
SOME = ("run", "check")
TRIES = 2  # of a command that found this machine too busy


class Matrix(FaultServer):
    """Answers the probe well, and every so many-th request of the load as ``fault`` says."""

    fault, every, _loaded = "ok", 1, 0

    async def _answer(self, call: Call) -> bool:
        probes = "probe" in call.request.headers.get("x-request-id", "")
        self._loaded += not probes
        hit = not probes and self._loaded % self.every == 0
        call.request.fault = self.fault if hit else "ok"
        return await super()._answer(call)


Counted = dict[str, tuple[str, RequestRecord]]
"""Kind and record of a request with each ending."""


def counted() -> Counted:
    how: dict[str, Any] = {"limits": Limits(total_s=3.0, idle_s=1.0), "drain_s": 30.0}
    found: Counted = {}
    for name in FAULTS:  # each in a stage of its own: some keep a server busy
        result, _ = served_stage([0.0], [name], **how)
        record = result.records[0]
        found[name] = kind_of(record.status, record.http_status), record
    return found


def of_each_kind(kinds: Counted) -> dict[str, str]:
    """Return the first ending of each kind."""
    found: dict[str, str] = {}
    for name in FAULTS:
        found.setdefault(kinds[name][0], name)
    return found


def cell(command: str, fault: str, folder: Path, every: int = 1) -> str:
    """Return what a command makes of an endpoint that fails so: ``1 violated``."""
    for attempt in range(TRIES):
        out = folder / f"{command}-{fault}-{every}-{attempt}"
        with Matrix(gap_s=0.02) as server, Matrix(gap_s=0.02) as good:
            server.fault, server.every = fault, every
            line = COMMANDS[command].replace("U", server.url).replace("GOOD", good.url)
            words = [*line.split(), *LOAD.split(), "--model", "m", "--out", str(out)]
            status = run_here(words).status
        run = load_run(out / "b" if command == "ab" else out)
        stages = summarise(run).stages
        if stages and not stages[0].client_limited:
            break
    met = {stage.slo_met for stage in stages}
    verdict = "met" if True in met else "violated" if False in met else "inconclusive"
    if command == "burst":  # of the recovery, by its exit status
        verdict = {0: "met", 1: "violated"}.get(status, "inconclusive")
    ended = "" if run.meta["status"] == "complete" else f", {run.meta['status']}"
    return f"{status} {verdict}{ended}"


def gate(fault: str, folder: Path) -> str:
    """Gate the run with this ending by one of a good endpoint, made a moment ago."""
    baseline = folder / f"{fault}.json"
    run_here(f"baseline {max(folder.glob('run-ok-1-*'))} -o {baseline}".split())
    run = max(folder.glob(f"run-{fault}-1-*"))
    words = {0: "no regression", 1: "regression", 2: "refused", 3: "inconclusive"}
    line = f"gate {run} --baseline {baseline} --slo error_rate=10% {LAX}"
    status = run_here(line.split()).status
    return f"{status} {words[status]}"


def row(fault: str) -> list[str]:
    """Return what each command makes of an endpoint that fails so."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if fault != "ok":
            cell("run", "ok", folder)
        cells = [cell(command, fault, folder) for command in COMMANDS]
        return [*cells, gate(fault, folder)]


def matrix(kinds: Counted, jobs: int) -> list[list[str]]:
    """Return a row for each ending, those that are counted alike together."""
    rows = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for fault, cells in zip(FAULTS, pool.map(row, FAULTS), strict=True):
            rows.append([f"`{kinds[fault][0]}`", fault, *cells])
            print(*rows[-1], sep=" | ", flush=True)
    order = list(of_each_kind(kinds))
    return sorted(rows, key=lambda cells: order.index(cells[0].strip("`")))


def third(kinds: Counted, folder: Path) -> list[list[str]]:
    """Return what SOME make of an endpoint that answers every third request so."""
    return [
        [f"`{kind}`", *(cell(command, fault, folder, 3) for command in SOME)]
        for kind, fault in of_each_kind(kinds).items()
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def put(text: str, name: str, content: str) -> str:
    """Replace the generated part of this name."""
    before, _, rest = text.partition(BEGIN.format(name))
    return before + BEGIN.format(name) + "\n" + content + "\n" + END + rest.partition(END)[2]


def listed(kinds: Counted) -> str:
    rows = []
    for name in FAULTS:
        kind, record = kinds[name]
        tokens, http = record.output_tokens, record.http_status
        seen = ["" if value is None else str(value) for value in (http, tokens)]
        error = (record.error or "")[:90].replace("|", " ").replace("<", "&lt;")
        rows.append([f"`{name}`", *seen, f"`{kind}`", error])
    return table(["ending", "HTTP", "tokens", "counted as", "error of the record"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listed", action="store_true", help="only how each ending is counted")
    parser.add_argument("--jobs", type=int, default=3, help="endings at a time; each mostly waits")
    given, kinds = parser.parse_args(), counted()
    text = put(DOCS.read_text(encoding="utf-8"), "endings", listed(kinds))
    if not given.listed:
        rows = matrix(kinds, given.jobs)
        with tempfile.TemporaryDirectory() as folder:
            thirds = third(kinds, Path(folder))
        text = put(text, "commands", table(["counted as", "ending", *COMMANDS, "gate"], rows))
        text = put(text, "third", table(["counted as", *SOME], thirds))
    DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
