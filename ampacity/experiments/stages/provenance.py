"""Describe a run: the facts of run.json."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ampacity
from ampacity.config import fleet_inputs
from ampacity.files import digest
from ampacity.loadgen.host import host_facts
from ampacity.loadgen.probe.diagnosis import as_dicts
from ampacity.loadgen.probe.results import Calibration, ProbeResult
from ampacity.loadgen.send.forms import form_notes
from ampacity.loadgen.send.secrets import redact
from ampacity.loadgen.send.surrogates import map_texts
from ampacity.settings import Settings
from ampacity.workloads.archetypes import ARCHETYPES
from ampacity.workloads.arrivals.processes import arrivals_notes
from ampacity.workloads.replay import Replayed


def with_run(stage: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's entry of run.json with those of the run that a stage is judged with."""
    return {**stage, **{name: run.get(name) for name in ("diagnosis", "locked")}}


def happened(meta: dict[str, Any], text: str, tell: Callable[[str], None]) -> None:
    """Write down in run.json, once, what changes the meaning of figures, and tell it."""
    events = meta.setdefault("events", [])
    if text not in events:
        events.append(text)
        tell(text)


def utc_now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def run_meta(
    settings: Settings,
    probe: ProbeResult,
    run_id: str,
    salt: str,
    experiment: str,
    command_line: list[str],
    trace: Replayed | None,
) -> dict[str, Any]:
    """Return run.json at the start of a run (docs/run-directory.md)."""
    served, endpoint = probe.served, settings.endpoint
    secrets = (*(endpoint.keys.known if endpoint.keys else ()), *endpoint.hidden)
    hide = partial(redact, secrets=secrets)
    name = (
        f"{experiment}-{settings.workload.name}"
        if trace is None
        else f"{experiment}-{Path(trace.source).stem}"
    )
    return {
        "run_id": run_id,
        "name": name,
        "experiment": experiment,
        "status": "running",
        "status_reason": None,
        "tool": {"name": "ampacity", "version": ampacity.__version__},
        "command_line": map_texts(command_line, hide),
        "started_utc": utc_now(),
        "ended_utc": None,
        "clock": {"monotonic_ns": time.monotonic_ns(), "utc": utc_now()},
        "endpoint": {
            "url": endpoint.with_query(endpoint.url),
            "api": settings.api,
            "model": probe.shape.model,
            "certificate_checked": endpoint.scheme == "https" and not endpoint.tls.insecure,
            "server": served.server,
            "gateway": served.gateway,
            "keeps_alive": probe.keeps_alive,
            **probe.network.as_dict(),
        },
        "locked": map_texts(_locked(settings, probe), hide),
        "workload": _workload_meta(settings, trace, probe.calibration),
        "slos": [slo.as_dict() for slo in settings.slos],
        "seed": settings.seed,
        "salt": salt,
        "workers": settings.workers or 1,
        "source_addresses": list(settings.sources),
        "warmup_requests": settings.warmup_requests,
        "notes": [*probe.notes, *source_notes(settings, trace)],
        "diagnosis": as_dicts(probe.diagnosis),
        "stages": [],
        "host": host_facts(),
        "fleet_inputs": fleet_inputs(vars(settings)),
    }


def _locked(settings: Settings, probe: ProbeResult) -> dict[str, Any]:
    """Return the facts that must be equal for runs to be comparable."""
    return {
        "engine": probe.served.engine,
        "engine_version": probe.served.engine_version,
        "max_model_len": probe.served.max_model_len,
        "quantization": None,
        "hardware": None,
        "tensor_parallel": None,
        "prefix_caching": None,
        **settings.locked,
        "dialect": asdict(probe.shape.dialect),
        "extra_body": settings.extra_body,
        "limits": asdict(settings.limits),
        "connections": settings.connections,
        "timestamps": settings.timestamps,
        "think_s": settings.think_s,
    }


def source_notes(settings: Settings, trace: Replayed | None) -> tuple[str, ...]:
    """Return notes on what of a trace, prompt or arrivals file is not sent as it is in the file."""
    if trace is not None:
        entry = trace.schedule.entry
        entries: list[int] = [] if entry is None else np.unique(entry[entry >= 0]).tolist()
        return (*trace.notes, *form_notes(settings.api, trace.recorded, entries))
    clocks, prompts = arrivals_notes(settings.workload.clocks), settings.workload.prompts
    if prompts is None:
        return tuple(clocks)
    return (*prompts.file.notes, *form_notes(settings.api, prompts.file, ()), *clocks)


def _workload_meta(
    settings: Settings, trace: Replayed | None, calibration: Calibration
) -> dict[str, Any]:
    found: dict[str, Any] = settings.workload.describe()
    if trace is not None:
        lengths = {"kind": "trace", "text": f"as in {Path(trace.source).name}"}
        found.update(
            name=Path(trace.source).stem,
            source=Path(trace.source).name,
            arrivals="trace",
            input_tokens=lengths,
            output_tokens=lengths,
            trace={
                "file": Path(trace.source).name,
                "requests": len(trace.schedule),
                "time_scale": settings.time_scale,
                "think_scale": settings.think_scale,
                "max_think_s": settings.max_think if settings.max_think < math.inf else None,
                **(trace.counts or {}),
                "notes": list(trace.notes),
            },
        )
    else:
        found["trace"] = None
    found["contents"] = contents_of(settings)
    found["tokenizer"] = {"name": settings.tokenizer, **calibration.as_dict()}
    found["prompts"] = _prompts_text(settings) if trace is None else trace.prompts
    own_texts = settings.workload.prompts if trace is None else trace.recorded
    found["input_plan"] = "requested" if own_texts is None else "estimated from the texts"
    return found


def contents_of(settings: Settings) -> dict[str, str]:
    """Return the digest of each file that the load is made of, by its option."""
    vocabulary = Path(settings.tokenizer.removeprefix("hf:"))
    given = {
        "trace": settings.trace,
        "prompts": settings.prompts,
        "workload": None if settings.workload_name in ARCHETYPES else settings.workload_name,
        "tokenizer": vocabulary / "tokenizer.json" if vocabulary.is_dir() else vocabulary,
    }
    return {option: digest(path) for option, path in given.items() if path and Path(path).is_file()}


def _prompts_text(settings: Settings) -> str:
    """Return what prompts have in common, in words; ``unique``: nothing."""
    workload = settings.workload
    if workload.prompts is not None:
        text = f"{len(workload.prompts.file.entries)} from {Path(workload.prompts.file.path).name}"
        if settings.rates:
            most = max(rate * length_s for rate, length_s in settings.loads)
            begun = most / workload.prompts.mean_turns
            factor = workload.prompts.file.reuse_factor(round(begun))
            text += f", each sent {factor:.1f} times in the largest stage" if factor > 1 else ""
        return text
    if workload.sessions is not None:
        return "conversations that grow" + (", shared prefixes" if workload.prefixes else "")
    return "shared prefixes by design" if workload.prefixes else "unique"


def out_path(settings: Settings, experiment: str) -> Path:
    """Return the run directory: --out, or a name made of the time."""
    if settings.out is not None:
        return settings.out
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{experiment}"
