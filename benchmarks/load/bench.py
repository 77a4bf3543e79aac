"""What the load generator costs and how true it is, on one core, against a server that knows the
truth.

    python -m benchmarks.load.bench                     every scenario, this tool and the raw limit
    python -m benchmarks.load.bench 190 --duration 10   one of them, shorter
    python -m benchmarks.load.bench 190 --peer 'NAME=COMMAND with {url} {rate} {duration}'

README.md beside this file says what each figure means.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.load.clients import ROOT, Client, Load, ampacity, peer, raw
from benchmarks.load.matching import compare, load_seen_by_server
from benchmarks.load.meter import run_metered
from benchmarks.load.mock import exit_with, mock_server
from benchmarks.options import parser

TTFT_S, ITL_S = 0.050, 0.010
SERVER_LATE_MAX_MS = 1.0  # beyond it the server's core was not its own, and timing says little


@dataclass(frozen=True)
class Scenario:
    """One load, options of the server, and the bars: metric -> largest value allowed (a bool:
    exactly that)."""

    name: str
    load: Load
    bars: dict[str, float | bool]
    server: dict[str, float | int | str]
    tls: bool = False
    servers: int = 1  # used in turn: each has descriptors and ports of its own

    def over_tls(self) -> Scenario:
        """Return the same load over TLS 1.3; its CPU has a bar beside that of plain HTTP."""
        bars = {name: bar for name, bar in self.bars.items() if not name.startswith("cpu")}
        return replace(self, name=f"{self.name} TLS", bars=bars, tls=True)


_EVERY = {"never_arrived": 0, "arrived_twice": 0, "tokens_differ": 0}

SCENARIOS = (
    Scenario("20", Load(20, 20), {**_EVERY, "client_limited": False}, {}),
    Scenario(
        "190",
        Load(190, 60),
        {
            **_EVERY,
            "cpu_ms_per_1000_load": 12,
            "cpu_ms_per_1000": 16,
            "ttft_error_ms_p50": 0.15,
            "ttft_error_ms_p99": 0.5,
            "itl_error_ms_p99": 0.4,
            "rss_load_mb": 150,
            "client_limited": False,
        },
        {},
    ),
    Scenario(
        "190-usage", Load(190, 60, running_usage=True), _EVERY | {"client_limited": False}, {}
    ),
    Scenario(
        "190-read",
        Load(190, 60, timestamps="read"),
        {
            **_EVERY,
            "ttft_error_ms_p50": 0.15,
            "ttft_error_ms_p99": 0.5,
            "itl_error_ms_p99": 0.4,
            "client_limited": False,
        },
        {},
    ),
    Scenario(
        "600",
        Load(600, 20),
        {
            **_EVERY,
            "client_limited": False,
            "ttft_error_ms_p99": 1.5,
            "itl_error_ms_p99": 2.0,
            "arrival_late_ms_p99": 2.0,
        },
        {},
    ),
    Scenario(
        "400", Load(400, 20), {**_EVERY, "client_limited": False, "ttft_error_ms_p99": 0.5}, {}
    ),
    Scenario("700", Load(700, 10), {"client_limited": False, "arrival_late_ms_p99": 2.0}, {}),
    Scenario("beyond", Load(900, 10), {"client_limited": True}, {}),
    # 10,000 streams of 2 tokens/s: reached after 25 s, then 20,000 tokens/s
    Scenario(
        "10000",
        Load(400, 60, output_tokens=50),
        {**_EVERY, "client_limited": False, "itl_error_ms_p99": 1.0},
        {"itl_ms": 500},
    ),
    # the same number opened within 5 s, and closed within 5 s
    Scenario(
        "10000-at-once",
        Load(2000, 5, output_tokens=50),
        {**_EVERY, "client_limited": False, "itl_error_ms_p99": 1.0},
        {"itl_ms": 500},
    ),
    # 30,000 streams of 1 token/s, opened within 15 s, and closed within 15 s; no process has more
    # than 15,000, as the limit of descriptors may be 20,000
    Scenario(
        "30000",
        Load(
            *(2000, 15),
            output_tokens=30,
            options=("--workers", "2", "--source-address", "127.0.0.2-127.0.0.5"),
        ),
        {**_EVERY, "client_limited": False, "itl_error_ms_p99": 1.0},
        {"itl_ms": 1000},
        servers=2,
    ),
    Scenario(
        "pacing", Load(500, 10), {**_EVERY, "slip_p99_ms": 1.0, "arrival_late_ms_p99": 2.0}, {}
    ),
    Scenario(
        "stall",
        Load(50, 10),
        {**_EVERY, "arrival_late_ms_p99": 2.0},
        {"stall_after_requests": 150, "stall_s": 3.0},
    ),
)


def measure(
    client: Client, scenario: Scenario, cores: tuple[int, int] | None, ahead: bool
) -> dict[str, Any]:
    """Run one client on one scenario; every figure that could be had."""
    server_core, client_core = cores or (None, None)
    load = scenario.load
    itl_s = float(scenario.server.get("itl_ms", ITL_S * 1e3)) / 1e3
    with (
        tempfile.TemporaryDirectory(prefix="ampacity-bench-") as directory,
        contextlib.ExitStack() as running,
    ):
        out = Path(directory) / "run"
        options = {"ttft_ms": TTFT_S * 1e3, "itl_ms": ITL_S * 1e3, **scenario.server}
        mocks = [
            running.enter_context(mock_server(server_core, ahead, tls=scenario.tls, **options))
            for _ in range(scenario.servers)
        ]
        url, load = ",".join(m.url for m in mocks), replace(load, cacert=mocks[0].certificate)
        metered = run_metered(
            client.command(url, load, out),
            core=client_core,
            ahead=ahead,
            cwd=ROOT,
            timeout_s=2 * (load.duration_s + load.output_tokens * itl_s) + 180,  # repeated once
        )
        running.close()  # the servers write what they know
        served = {name: found for mock in mocks for name, found in mock.served.items()}
        result: dict[str, Any] = {"client": client.name, "scenario": scenario.name}
        if metered.returncode:
            failed = f"exit {metered.returncode}: {metered.stderr.strip()[-300:]}"
            return {**result, "failed": failed}
        account = client.read(out) if client.read else None
    everything = [s for found in served.values() for s in found]
    ours = everything if account is None else [s for n in account.seen for s in served.get(n, [])]
    at_server = load_seen_by_server(ours, TTFT_S + load.output_tokens * itl_s)
    if not ours:
        return {**result, "failed": "no request of the load arrived"}
    first_ns, last_ns = at_server.pop("first_arrival_ns"), at_server.pop("last_token_ns")
    tokens = at_server["tokens"]
    all_tokens = sum(len(s.token_ns) for s in everything)  # with probes and repeated stages
    load_cpu_s = metered.cpu_between_s(first_ns, last_ns)
    result |= {
        **at_server,
        "core_share": load_cpu_s / ((last_ns - first_ns) / 1e9),
        "cpu_ms_per_1000_load": load_cpu_s * 1e6 / max(tokens, 1),
        "cpu_ms_per_1000": metered.cpu_s * 1e6 / max(all_tokens, 1),
        "cpu_s": metered.cpu_s,
        "first_request_s": (min(s.arrival_ns for s in everything) - metered.launched_ns) / 1e9,
        "load_begins_s": (first_ns - metered.launched_ns) / 1e9,
        "exit_after_last_token_s": (metered.exited_ns - last_ns) / 1e9,
        "rss_load_mb": metered.resident_mb(first_ns, last_ns),
        "rss_mb": metered.resident_mb(metered.launched_ns, metered.exited_ns),
        "server": max((m.stats for m in mocks), key=lambda stats: float(stats["late_p99_ms"])),
    }
    if account is not None:
        result |= {**compare(account.seen, served), **account.about}
        if audit := account.about.get("audit"):
            begin_ns, end_ns = account.about["load_ns"]
            cpu_us = audit["cpu_fraction"] * (end_ns - begin_ns) / 1e3
            result["cpu_ms_per_1000_audit"] = cpu_us / max(tokens, 1)
    return result


def broken_bars(scenario: Scenario, result: dict[str, Any]) -> list[str]:
    """Return the bars that ``result`` misses, in words."""
    if "failed" in result:
        return [result["failed"]]
    found = []
    for metric, limit in scenario.bars.items():
        value = result.get(metric)
        kept = value is not None and (value is limit if isinstance(limit, bool) else value <= limit)
        if not kept:
            shown = f"{value:.3g}" if isinstance(value, float) else value
            found.append(f"{metric} {shown}, bar {limit}")
    return found


def cpu_ratio(
    results: list[dict[str, Any]], above: tuple[str, str], below: tuple[str, str]
) -> float:
    """Return the CPU under load of one (scenario, client) over that of another."""
    cpu = [
        sum(
            r.get("cpu_ms_per_1000_load", math.nan)
            for r in results
            if (r["scenario"], r["client"]) == which
        )
        for which in (above, below)
    ]
    return cpu[0] / cpu[1]


COLUMNS = (
    ("scenario", "scenario", "{}"),
    ("client", "client", "{}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
    ("core_share", "core", "{:.2f}"),
    ("cpu_ms_per_1000_load", "CPU load", "{:.1f}"),
    ("cpu_ms_per_1000", "CPU all", "{:.1f}"),
    ("ttft_error_ms_p50", "TTFT p50", "{:.3f}"),
    ("ttft_error_ms_p99", "p99", "{:.3f}"),
    ("itl_error_ms_p99", "ITL p99", "{:.3f}"),
    ("token_lag_ms_p99", "lag p99", "{:.3f}"),
    ("arrivals_per_s", "arr/s", "{:.1f}"),
    ("arrival_gap_cv", "CV", "{:.2f}"),
    ("arrival_late_ms_p99", "late p99", "{:.3f}"),
    ("slip_p99_ms", "slip p99", "{:.3f}"),
    ("never_arrived", "lost", "{}"),
    ("first_request_s", "start s", "{:.2f}"),
    ("rss_load_mb", "RSS load", "{:.0f}"),
    ("rss_mb", "RSS", "{:.0f}"),
    ("client_limited", "limited", "{}"),
)


def row(result: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    return ["–" if result.get(k) is None else shape.format(result[k]) for k, _, shape in COLUMNS]


def print_table(results: list[dict[str, Any]]) -> None:
    """Return all results as Markdown: CPU in ms per 1,000 tokens, errors in ms, RSS in MB."""
    rows = [[title for _, title, _ in COLUMNS], *[row(r) for r in results if "failed" not in r]]
    widths = [max(len(r[i]) for r in rows) for i in range(len(COLUMNS))]
    rows.insert(1, ["-" * width for width in widths])
    for cells in rows:
        print(
            "| "
            + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            + " |"
        )


def main() -> int:
    options = _options()
    chosen = [s for s in SCENARIOS if not options.scenarios or s.name in options.scenarios]
    if options.duration:
        chosen = [replace(s, load=replace(s.load, duration_s=options.duration)) for s in chosen]
    words = options.ampacity.split() if options.ampacity else None
    clients = [ampacity(words)]
    clients += [ampacity(words, workers=2)] if options.two_workers else []
    clients += [] if options.no_raw else [raw()]
    clients += [peer(*text.split("=", 1)) for text in options.peer]
    cores = (
        None
        if options.no_pin or (os.cpu_count() or 1) < 2
        else (options.server_core, options.client_core)
    )
    if cores:
        os.sched_setaffinity(0, {cores[0]})  # we sit beside the server, not beside what is measured
    results, broken = [], 0
    for plain in chosen:
        for _ in range(options.repeat):  # in turn: the machine's own speed changes
            for client in clients:
                for scenario in (plain, plain.over_tls()) if options.tls else (plain,):
                    result = measure(client, scenario, cores, options.ahead)
                    results.append(result)
                    broken += _tell(client, scenario, result)
    print_table(results)
    for scenario in chosen if options.tls else ():
        for client in clients:
            over = (f"{scenario.name} TLS", client.name), (scenario.name, client.name)
            ratio = cpu_ratio(results, *over)
            print(f"{scenario.name}, {client.name}: CPU over TLS / plain {ratio:.2f} (bar 1.6)")
    for scenario in chosen if options.two_workers else ():
        share = cpu_ratio(results, (scenario.name, "ampacity"), (scenario.name, "2 workers"))
        print(f"{scenario.name}: two workers carry {share:.0%} of what one does (bar 90%)")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if options.check and broken else 0


def _tell(client: Client, scenario: Scenario, result: dict[str, Any]) -> int:
    """Print missed bars and doubts to stderr; return the number of missed bars."""
    head = f"{scenario.name}, {client.name}:"
    if "server" in result and result["server"]["late_p99_ms"] > SERVER_LATE_MAX_MS:
        print(
            f"{head} the server itself was {result['server']['late_p99_ms']} ms late at p99",
            file=sys.stderr,
        )
    if client.name != "ampacity":
        if "failed" in result:
            print(f"{head} {result['failed']}", file=sys.stderr)
        return 0
    broken = broken_bars(scenario, result)
    print(
        f"{head} " + ("; ".join(f"BROKEN {b}" for b in broken) or "all bars kept"), file=sys.stderr
    )
    return len(broken)


def _options() -> argparse.Namespace:
    given = parser(__doc__, repeat=1, server_core=1, client_core=0)
    names = [s.name for s in SCENARIOS]
    given.add_argument(
        "scenarios", nargs="*", choices=[*names, []], help=f"of {', '.join(names)}; default: all"
    )
    given.add_argument("--duration", type=float, help="seconds, instead of each scenario's own")
    given.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another tool; repeatable",
    )
    given.add_argument("--tls", action="store_true", help="each load also over TLS 1.3")
    given.add_argument("--no-raw", action="store_true", help="leave the raw limit out")
    given.add_argument(
        "--two-workers", action="store_true", help="also with --workers 2, on the core of one"
    )
    given.add_argument(
        "--ampacity", metavar="COMMAND", help="how to start the tool; default: this environment's"
    )
    given.add_argument("--no-pin", action="store_true", help="let the kernel choose the cores")
    given.add_argument(
        "--ahead",
        action="store_true",
        help="raise the priority of server and client, where other work shares the cores (root)",
    )
    given.add_argument("--json", type=Path, metavar="FILE", help="every figure")
    given.add_argument("--check", action="store_true", help="exit 1 when a bar is broken")
    return given.parse_args()


if __name__ == "__main__":
    exit_with(main)
