"""What is measured: how each client is started on one load, and how its own account of it is read.

``ampacity`` and ``raw`` (raw_protocol.py) are matched with the server request by request. Any other
tool is a command template; what it costs and what reaches the server is measured, what it prints is
not interpreted.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.load.matching import DoctorResult

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Load:
    """One open-loop Poisson load."""

    rate_rps: float
    duration_s: float
    input_tokens: int = 16
    output_tokens: int = 128
    running_usage: bool = (
        False  # the server counts tokens in every chunk, which makes it longer by a third
    )
    timestamps: str = "kernel"  # of ampacity
    cacert: Path | None = None  # of a server with TLS
    options: tuple[str, ...] = ()  # further ones of ampacity


@dataclass(frozen=True)
class Account:
    """What a client recorded: requests by X-Request-Id, and what it says about itself."""

    seen: dict[str, DoctorResult]
    about: dict[str, Any]


@dataclass(frozen=True)
class Client:
    """``command(url, load, out)`` starts it; ``read(out)`` gives its account, where it keeps one
    that we read."""

    name: str
    command: Callable[[str, Load, Path], list[str]]
    read: Callable[[Path], Account] | None


def ampacity(words: list[str] | None = None, workers: int = 1) -> Client:
    """Return this tool, run by its command line; ``words`` start it."""
    start = words or [str(Path(sys.executable).with_name("ampacity"))]

    def command(url: str, load: Load, out: Path) -> list[str]:
        stream_options = {"include_usage": True, "continuous_usage_stats": load.running_usage}
        return [
            *start,
            "run",
            url,
            "--rates",
            f"{load.rate_rps:g}",
            "--duration",
            f"{load.duration_s:g}s",
            "--arrivals",
            "poisson",
            "--input-tokens",
            str(load.input_tokens),
            "--output-tokens",
            str(load.output_tokens),
            "--out",
            str(out),
            "--extra-body",
            json.dumps({"stream_options": stream_options}),
            "--timestamps",
            load.timestamps,
            *(["--workers", str(workers)] if workers > 1 else []),
            *(["--cacert", str(load.cacert)] if load.cacert else []),
            *load.options,
        ]

    return Client("ampacity" if workers == 1 else f"{workers} workers", command, read_run)


def raw() -> Client:
    """Return the bare Protocol on uvloop."""

    def command(url: str, load: Load, out: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "benchmarks.load.raw_protocol",
            url,
            "--rate",
            f"{load.rate_rps:g}",
            "--duration",
            f"{load.duration_s:g}",
            "--output-tokens",
            str(load.output_tokens),
            "--out",
            f"{out}.npz",
            *(["--running-usage"] if load.running_usage else []),
            *(["--cacert", str(load.cacert)] if load.cacert else []),
        ]

    return Client("raw", command, read_raw)


def peer(name: str, template: str) -> Client:
    """Return another tool; {url}, {root}, {rate}, {duration}, ... and {out} are filled in."""

    def command(url: str, load: Load, out: Path) -> list[str]:
        filled = template.format(
            url=url,
            root=url.removesuffix("/v1"),
            rate=f"{load.rate_rps:g}",
            duration=f"{load.duration_s:g}",
            requests=round(load.rate_rps * load.duration_s),
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            out=out,
        )
        return shlex.split(filled)

    return Client(name, command, None)


def read_run(path: Path) -> Account:
    """Read requests.parquet and the audit in run.json of the last stage."""
    meta = json.loads((path / "run.json").read_text(encoding="utf-8"))
    stage = meta["stages"][-1]
    columns = ["request_id", "scheduled_ns", "started_ns", "chunk_at_us", "chunk_tokens", "status"]
    table = pq.read_table(
        path / "requests.parquet", columns=columns, filters=[("stage", "=", stage["index"])]
    )
    seen = {}
    statuses: dict[str, int] = {}
    for row in table.to_pylist():
        statuses[row["status"]] = statuses.get(row["status"], 0) + 1
        at_ns = np.array(row["chunk_at_us"] or [], dtype=np.int64) * 1000 + (row["started_ns"] or 0)
        if row["chunk_tokens"]:
            at_ns = np.repeat(at_ns, row["chunk_tokens"])
        started_ns = row["started_ns"] or row["scheduled_ns"]
        seen[f"{meta['run_id']}-{row['request_id']}"] = DoctorResult(
            started_ns, at_ns, row["scheduled_ns"]
        )
    audit = stage["audit"]
    slip_s = audit["slip_p99_s"]
    return Account(
        seen,
        {
            "statuses": statuses,
            "scheduled": stage["scheduled_requests"],
            "stages_run": len(meta["stages"]),
            "load_ns": (stage["start_ns"], stage["drained_ns"]),
            "slip_p99_ms": None if slip_s is None else slip_s * 1e3,
            "client_limited": audit["client_limited"],
            "client_limited_reason": audit["client_limited_reason"],
            "audit": audit,
        },
    )


def read_raw(path: Path) -> Account:
    """Read the stamps of raw_protocol.py."""
    with np.load(f"{path}.npz") as stamps:
        requests, token_ns = stamps["requests"], stamps["token_ns"]
    pieces = np.split(token_ns, np.cumsum(requests[:, 3])[:-1]) if len(requests) else []
    seen = {
        f"raw-{number}": DoctorResult(int(started), at_ns, int(scheduled))
        for (number, scheduled, started, _), at_ns in zip(requests, pieces, strict=True)
    }
    return Account(seen, {"scheduled": len(seen)})
