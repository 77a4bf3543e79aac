"""Convert result files of other tools to a run directory with one clock for all stages."""

import hashlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ampacity
from ampacity.files import read_bytes, read_text, why
from ampacity.imports import aiperf, genai_bench, guidellm, sglang_bench, vllm_bench
from ampacity.imports.results import (
    CONNECTING,
    FAILURES_LEFT_OUT,
    ImportedFileError,
    Request,
    Result,
    Stage,
)
from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US, RequestRecord
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.workloads.text import mended

FORMATS: dict[str, ModuleType] = {
    "vllm": vllm_bench,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "genai-bench": genai_bench,
    "sglang": sglang_bench,
}
LARGEST_BYTES = 2**30
LONGEST_S = 1e7  # of a stage
_ORIGIN_NS, _BETWEEN_NS = 1_000_000_000, 60_000_000_000  # of the clock that stages are laid out on


_NULL = (  # entries of run.json that only ampacity's own runs have
    *("status_reason", "ended_utc", "clock", "seed", "salt", "workers", "warmup_requests"),
    *("host", "fleet_inputs"),
)


def read_file(path: Path, format_name: str | None = None) -> Result:
    """Read a result file of any known tool. Raises ImportedFileError with one line."""
    if format_name is not None and format_name not in FORMATS:
        raise ImportedFileError(f"--format {format_name!r} is not known: {', '.join(FORMATS)}")
    document = _load(path)
    allowed = [FORMATS[format_name]] if format_name else list(FORMATS.values())
    module = next((m for m in allowed if m.recognises(document)), None)
    if module is None:
        wanted = ", ".join(m.TOOL for m in allowed)
        hint = "; give profile_export.jsonl" if path.name == aiperf.SETTINGS_NAME else ""
        raise ImportedFileError(f"{path} is no result of {wanted}{hint}")
    where = f"{path}: "
    beside = [_settings(path)] if module is aiperf else []
    result: Result = module.read(document, where, *beside)
    if not any(stage.requests for stage in result.stages):
        raise ImportedFileError(f"{path}: {result.tool} measured no request in it")
    return result


def _load(path: Path) -> Any:
    """Return a JSON document, or the list of the rows of a JSONL file; no lone surrogates."""
    try:
        text = read_text(path, LARGEST_BYTES)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ImportedFileError(f"{path} cannot be read: {why(error)}") from error
    try:
        document = mended(json.loads(text))
        return [document] if path.suffix == ".jsonl" else document
    except (ValueError, RecursionError) as whole:
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                if line.strip():
                    rows.append(mended(json.loads(line)))
            except (ValueError, RecursionError) as error:
                cause, at = (error, f" line {number}:") if rows else (whole, "")
                raise ImportedFileError(
                    f"{path}:{at} neither JSON nor JSON lines: {cause}"
                ) from None
        return rows


def _settings(path: Path) -> dict[str, Any] | None:
    beside = path.with_name(aiperf.SETTINGS_NAME)
    found = _load(beside) if beside.is_file() else None
    return found if isinstance(found, dict) else None


def write_run(
    out: Path,
    paths: Sequence[Path],
    results: Sequence[Result],
    slos: list[dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """Write a run directory with the stages of ``results``, all of one tool.

    ``facts``: further entries of run.json. Raises ImportedFileError, RunDirError.
    """
    tools = {r.tool for r in results}
    if len(tools) > 1:
        raise ImportedFileError(
            f"files of {' and '.join(sorted(tools))} in one run: "
            "import each tool by itself, then compare"
        )
    records: list[RequestRecord] = []
    stages: list[dict[str, Any]] = []
    start_ns = _ORIGIN_NS
    for stage in (s for r in results for s in r.stages):
        made, meta = _lay_out(stage, len(stages), start_ns, len(records))
        records += made
        stages.append(meta)
        start_ns = meta["drained_ns"] + _BETWEEN_NS
    with RunWriter(out, _meta(out, paths, results, stages, slos) | facts) as writer:
        for record in records:
            writer.append(record)
        writer.finish()


def _lay_out(
    stage: Stage, index: int, start_ns: int, first_id: int
) -> tuple[list[RequestRecord], dict[str, Any]]:
    """Return the records of a stage from ``start_ns`` on, and its entry in run.json."""
    due = [_due(r) for r in stage.requests]
    origin_s = min(due)
    _check_times(stage, due, index)
    order = sorted(range(len(due)), key=due.__getitem__)
    records = [
        _record(stage.requests[i], index, first_id + number, origin_s, start_ns)
        for number, i in enumerate(order)
    ]
    ends = [r.ended_ns for r in records if r.ended_ns is not None]
    last_ns, drained_ns = records[-1].scheduled_ns, max([records[-1].scheduled_ns + 1, *ends])
    n = len(records)
    if stage.concurrency is None:
        end_ns = last_ns + max(1, round((last_ns - start_ns) / (n - 1))) if n > 1 else drained_ns
    else:  # users that begin only once are busy until the end
        end_ns = last_ns + 1 if n > 2 * stage.concurrency else drained_ns
    return records, {
        "index": index,
        "kind": "open" if stage.concurrency is None else "closed",
        "offered_rps": stage.offered_rps,
        "concurrency": stage.concurrency,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "scheduled_requests": n,
        "drained_ns": max(end_ns, drained_ns),
        "ended_early": None,
        "audit": None,
    }


def _check_times(stage: Stage, due: Sequence[float], index: int) -> None:
    """Raise ImportedFileError where request times contradict each other or the duration.

    Tools end their clocks in different ways; milliseconds taken for seconds are far off.
    """
    lasts = (r.ended_s or r.e2e_s or 0.0 for r in stage.requests)
    most_s = LONGEST_S if stage.duration_s is None else min(2 * stage.duration_s + 2.0, LONGEST_S)
    found_s = max(d + last for d, last in zip(due, lasts, strict=True)) - min(due)
    if found_s > most_s:
        raise ImportedFileError(
            f"stage {index} lasts {found_s:g} s by its requests' times, more than {most_s:g} s: "
            "the file is damaged or contradicts its duration"
        )
    for r in stage.requests:
        end_s = min((t for t in (r.e2e_s, r.ended_s) if t is not None), default=math.inf)
        if max(r.ttft_s or 0.0, math.fsum(r.gaps_s or ()), r.e2e_s or 0.0) > 1.05 * end_s + 0.1:
            raise ImportedFileError(
                f"stage {index}: the tokens of a request take longer than its {end_s:g} s: "
                "the file contradicts itself"
            )


def _due(request: Request) -> float:
    return request.started_s if request.scheduled_s is None else request.scheduled_s


def _record(
    r: Request, stage: int, request_id: int, origin_s: float, start_ns: int
) -> RequestRecord:
    started_ns = start_ns + round((r.started_s - origin_s) * 1e9)

    def after(duration_s: float | None) -> int | None:
        return None if duration_s is None else started_ns + round(duration_s * 1e9)

    at_us: list[int] = []
    if r.gaps_s is not None and r.ttft_s is not None:
        times_s = itertools.accumulate((r.ttft_s, *r.gaps_s))
        at_us = [min(round(at_s * 1e6), CHUNK_AT_MAX_US) for at_s in times_s]
    ended_s = r.ended_s if r.ended_s is not None else r.e2e_s
    return RequestRecord(
        request_id,
        stage,
        start_ns + round((_due(r) - origin_s) * 1e9),
        r.status,
        worker=0,
        dispatched_ns=started_ns if r.slip_known else None,
        started_ns=started_ns,
        first_token_ns=after(r.ttft_s),
        first_answer_ns=after(r.ttft_s) if not r.reasoning_tokens else None,
        last_token_ns=after(r.e2e_s),
        ended_ns=after(ended_s),
        http_status=r.http_status,
        error=r.error,
        input_tokens=r.input_tokens,
        output_tokens=r.output_tokens,
        cached_tokens=r.cached_tokens,
        reasoning_tokens=r.reasoning_tokens,
        token_source=r.token_source,
        chunk_at_us=at_us,
    )


def _meta(
    out: Path,
    paths: Sequence[Path],
    results: Sequence[Result],
    stages: list[dict[str, Any]],
    slos: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return run.json; what the tool's files do not hold is null."""
    first = results[0]
    digests = [hashlib.sha256(read_bytes(p, LARGEST_BYTES)).hexdigest() for p in paths]
    files = [{"name": p.name, "sha256": d} for p, d in zip(paths, digests, strict=True)]
    lengths = {"kind": "imported", "text": "as the other tool chose them"}
    notes = list(dict.fromkeys(note for r in results for note in r.notes))
    return {
        "run_id": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
        "name": out.name,
        "experiment": "import",
        "status": "complete",
        "tool": {"name": "ampacity", "version": ampacity.__version__},
        "started_utc": first.started_utc,
        "endpoint": {
            "url": first.url and re.sub(r"//[^/@]*@", "//", first.url),
            "api": first.api,
            "model": first.model,
            "server": None,
        },
        "locked": dict.fromkeys(("engine", "engine_version", "quantization", "hardware")),
        "workload": {
            "name": first.workload or "not known",
            "source": ", ".join(p.name for p in paths),
            "arrivals": first.arrivals,
            "trace": None,
            "input_tokens": lengths,
            "output_tokens": lengths,
            "tokenizer": None,
            "prompts": "as the other tool made them",
        },
        "slos": slos,
        "notes": notes,
        "imported": _imported(first) | {"files": files},
        "stages": stages,
    } | dict.fromkeys(_NULL)


def _imported(result: Result) -> dict[str, Any]:
    definitions = (CONNECTING, *result.definitions, FAILURES_LEFT_OUT)
    return {
        "tool": result.tool,
        "tool_version": result.version,
        "definitions": [{"what": w, "theirs": t, "ours": o} for w, t, o in definitions],
        "missing": dict(result.missing),
    }
