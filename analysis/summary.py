"""The whole summary of a run: docs/summary.md."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from ampacity.analysis.burst.summarise import summarise_burst
from ampacity.analysis.capacity.families import class_curves, describe_family, split_lengths
from ampacity.analysis.capacity.fleet import Traffic, carried_by, fleet_of
from ampacity.analysis.capacity.goodput_peak import peak_goodput
from ampacity.analysis.capacity.knee import find_knee
from ampacity.analysis.capacity.levels import QUOTA_SHARE, number_text, refused_share
from ampacity.analysis.capacity.limit import find_capacity, met_by_all
from ampacity.analysis.capacity.search import summarise_search
from ampacity.analysis.contract.capacity import Capacity, Fleet
from ampacity.analysis.contract.limits import Quota
from ampacity.analysis.contract.part import Part, plain
from ampacity.analysis.contract.stage import Server, Stage
from ampacity.analysis.contract.summary import Audit, Summary, read_summary
from ampacity.analysis.limits.quota import find_quota
from ampacity.analysis.limits.table import find_limits
from ampacity.analysis.load_names import name_stages, planned_name
from ampacity.analysis.metrics.impossible import check_losses, check_records
from ampacity.analysis.metrics.lengths import deviations, mean_tokens, realised
from ampacity.analysis.metrics.odd_answers import models_asked, odd_answers
from ampacity.analysis.metrics.requests import Requests
from ampacity.analysis.network import network_share
from ampacity.analysis.next_run import next_command
from ampacity.analysis.sessions import NO_SESSIONS, summarise_sessions
from ampacity.analysis.slo import Slo, slo_from_dict
from ampacity.analysis.stage.analyse import RunRecords, analyse_stage, read_records
from ampacity.analysis.stage.goodput import offline_throughput
from ampacity.analysis.stage.littles_law import against_server, foreign_requests, gap_of_run
from ampacity.analysis.stage.server import server_figures, without_figures
from ampacity.analysis.stage_warnings import Facts, never_all_users, repeated_undisturbed
from ampacity.analysis.stats.intervals import ASSUMPTION
from ampacity.analysis.traffic import compare_sharing, summarise_traffic
from ampacity.analysis.verdict import write_verdict
from ampacity.analysis.warnings import find_warnings
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.meta import StageMeta
from ampacity.loadgen.rundir.records import KINDS

SCHEMA_VERSION = 2
EXAMPLE_CHARS = 200
NO_CAPACITY = {  # by an entry of run.json
    "burst": "a burst is no steady load, so it names no capacity: a search or a sweep does",
    "soak": "a soak has one load, so it names no capacity: a search or a sweep does",
}
SIMULATOR = "ampacity-simulator"  # what the embedded simulator answers to /version


def summarise(run: Run, labels: Mapping[int, bool] | None = None) -> Summary:
    """Return the summary of a run, complete or not; ``labels``: id -> accepted.

    Raises SloError or RecordsError on a broken run.
    """
    check_records(run)
    partial = partial_of(run)
    run, others = split_lengths(run)
    meta = run.meta
    slos = [slo_from_dict(s) for s in meta.get("slos") or []]
    metas, records, stages = _judge_stages(run, slos, labels)
    quota = find_quota(run.requests, stages)
    capacity = _capacity(meta, stages, slos, quota)
    stages = [structs.replace(s, slo_met_by_all=met_by_all(s, capacity)) for s in stages]
    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": "",
        "partial": partial,
        "predicted": bool(meta.get("predicted", False)),
        "simulated": (meta.get("locked") or {}).get("engine_version") == SIMULATOR,
        "imported": _imported(meta),
        "warnings": [],
        "diagnosis": meta.get("diagnosis"),
        "network": network_share(meta.get("endpoint") or {}, stages),
        "workload": _workload(meta.get("workload") or {}, realised(run.requests, records.requests)),
        "slos": [slo.as_dict() for slo in slos],
        **_counts(records.requests, metas),
        "error_examples": _examples(records.requests, run.requests),
        "stages": stages,
        "knee": find_knee([s for s in stages if refused_share(s) < QUOTA_SHARE]),
        "capacity": capacity,
        "interval_assumption": ASSUMPTION,
        "goodput": peak_goodput(stages, slos),
        "classes": [] if meta.get("burst") else class_curves(stages, slos),
        "families": [
            describe_family(lengths, judged, of_part.requests, slos)
            for lengths, part in others.items()
            for _, of_part, judged in [_judge_stages(part, slos, labels)]
        ],
        "offline": offline_throughput(stages, slos, meta.get("fleet_inputs") or {}),
        "audit": audit_of(metas, stages, imported=bool(meta.get("imported"))),
        "sharing": compare_sharing(records.requests, metas),
        "traffic": summarise_traffic(records, metas, meta.get("workload") or {}),
        "sessions": summarise_sessions(records, metas, stages, slos),
        "littles_law": gap_of_run(capacity, stages, slos),
        "fleet": _fleet(meta, capacity, stages, records),
    }
    if quota is not None:
        summary["quota"] = quota
    _add_optional_parts(summary, run, metas, records, slos)
    return _concluded(read_summary(_plain(summary)), run, metas, records)


def _concluded(found: Summary, run: Run, metas: list[StageMeta], records: RunRecords) -> Summary:
    """Return a summary with its warnings, verdict, limits and next command."""
    odd = odd_answers(run.requests, records.requests, models_asked(run.meta))
    began_s = (metas[0].from_s or 0.0) if metas else 0.0  # of a window of a soak
    events = run.meta.get("events") or ()
    facts = Facts(found, deviations(records.requests), odd, began_s, events)
    found = structs.replace(found, warnings=find_warnings(facts))
    found = structs.replace(found, verdict=write_verdict(found))
    command = found.next_command or next_command(found, run.meta, str(run.path))
    return structs.replace(found, next_command=command, limits=find_limits(found))


def _fleet(
    meta: Mapping[str, Any], capacity: Capacity, stages: Sequence[Stage], records: RunRecords
) -> Fleet:
    sent, received = mean_tokens(records.requests, stages)
    inputs = meta.get("fleet_inputs") or {}
    found = fleet_of(
        None if inputs.get("peak_rps") is None else Traffic(inputs["peak_rps"]),
        carried_by(capacity, stages, sent, received),
        inputs.get("tensor_parallel") or 1,
        inputs.get("safety_factor"),
        inputs.get("gpu_hour_usd"),
    )
    return structs.replace(found, input_tokens_mean=sent, output_tokens_mean=received)


def _add_optional_parts(
    summary: dict[str, Any],
    run: Run,
    metas: list[StageMeta],
    records: RunRecords,
    slos: list[Slo],
) -> None:
    """Add the parts that only some kinds of run have, and the reasons of those that are null."""
    meta = run.meta
    if retries := int(np.count_nonzero(records.requests.attempt)):
        summary["retries"] = retries
    if meta.get("spent_usd") is not None:
        summary["spent_usd"] = meta["spent_usd"]
    if meta.get("seams"):
        summary["seams"] = meta["seams"]
    if meta.get("burst") and metas:
        stage = _undisturbed(metas)
        summary["burst"] = summarise_burst(meta["burst"], stage, records, slos, run.server)
    if meta.get("next_command"):
        summary["next_command"] = str(meta["next_command"])
    if meta.get("search"):
        summary["search"] = summarise_search(meta["search"], summary["stages"], slos)
    if not summary["sessions"]:
        summary["sessions_reason"] = NO_SESSIONS
    if summary["diagnosis"] is None:
        summary["diagnosis_reason"] = "no probe's diagnosis is in run.json"


def _workload(described: Mapping[str, Any], came: dict[str, Any]) -> dict[str, Any]:
    """Return the workload as described and realised.

    Given texts are sent as they are: their estimated length is no plan to deviate from.
    """
    if described.get("input_plan", "requested") != "requested":
        came = {**came, "input_deviation": None}
    return {**described, "realised": came}


def _capacity(
    meta: Mapping[str, Any], stages: Sequence[Stage], slos: list[Slo], quota: Quota | None
) -> Capacity:
    if why := next((why for kind, why in NO_CAPACITY.items() if meta.get(kind)), None):
        return structs.replace(find_capacity([], slos), reason=why)
    found = find_capacity(stages, slos)
    if quota is None or not quota.binds:
        return found
    met = (
        f"; up to {number_text(found.verified_rps)} req/s met the SLOs"
        if found.verified_rps
        else ""
    )
    why = f"the endpoint's {quota.text} was met first, so that of its hardware is not known{met}"
    known = {"verified_rps": found.verified_rps, "violated_rps": found.violated_rps}
    return structs.replace(find_capacity([], slos), **known, reason=why)


def _without_verdict(stage: Stage) -> Stage:
    """Return a stage with a burst in it without a verdict: its requests are at no one load."""
    why = "a burst is no steady load: its phases count the requests that met the SLOs"
    return structs.replace(stage, slo_met=None, slo_met_reason=why, slo_verdicts=[])


def read_stages(run: Run) -> tuple[list[StageMeta], RunRecords]:
    """Return (entries of run.json's stages, the run's records)."""
    metas, origin_ns = run.stages, run.origin_ns
    records = read_records(run.requests, origin_ns, run.meta, run.before)
    if not run.complete:
        metas = [_as_far_as_it_came(m, run.requests) for m in metas]
    check_losses(run, metas)
    return metas, records


def warmup_of(meta: Mapping[str, Any]) -> int | None:
    """Return the warm-up that run.json sets, in requests of each stage."""
    return None if meta.get("warmup_requests") is None else int(meta["warmup_requests"])


def _judge_stages(
    run: Run, slos: list[Slo], labels: Mapping[int, bool] | None
) -> tuple[list[StageMeta], RunRecords, list[Stage]]:
    """Return (entries of run.json's stages, the run's records, its stages)."""
    meta = run.meta
    metas, records = read_stages(run)
    warmup, prices = warmup_of(meta), meta.get("fleet_inputs")
    thinks = (meta.get("locked") or {}).get("think_s")
    stages = []
    for of_stage in metas:
        stage = analyse_stage(
            records,
            of_stage,
            slos,
            warmup,
            run_complete=run.complete,
            labels=labels,
            fleet_inputs=prices,
        )
        server = _server(run, stage, of_stage)
        compared = against_server(stage.concurrency, server)
        law = structs.replace(stage.littles_law, server=compared)
        if server is not None and (why := foreign_requests(law)):
            server = without_figures(server, why)
        pauses = thinks or of_stage.sessions is not None or never_all_users(stage)
        pauses = stage.kind == "closed" and bool(pauses)
        stages.append(structs.replace(stage, server=server, littles_law=law, users_pause=pauses))
    stages = name_stages(stages)
    return metas, records, [_without_verdict(s) for s in stages] if meta.get("burst") else stages


def _undisturbed(metas: list[StageMeta]) -> StageMeta:
    """Return, of stages that repeat one load, the last with a client that kept up and no cut.

    A stage that was killed has no audit: where none is left, a whole one is taken.
    """

    def odd(m: StageMeta) -> tuple[bool, bool]:
        cut = bool(m.ended_early or not m.drained_ns)
        return cut or bool(m.audit and m.audit.client_limited), cut

    return min(reversed(metas), key=odd)


def _server(run: Run, stage: Stage, meta: StageMeta) -> Server | None:
    """Return the server's own gauges over the window of the stage."""
    window_ns = [meta.start_ns + round(s * 1e9) for s in (stage.window.start_s, stage.window.end_s)]
    return server_figures(run.server, *window_ns)


def _as_far_as_it_came(stage: StageMeta, table: pa.Table) -> StageMeta:
    """Return a killed stage without the requests that were never due.

    Requests are numbered as they are due, so those up to the highest recorded number had been due.
    """
    if stage.drained_ns:
        return stage
    ids = table.filter(pc.equal(table["stage"], stage.index))["request_id"]
    due = pc.max(ids).as_py() - pc.min(ids).as_py() + 1 if len(ids) else 0
    planned = stage.scheduled_requests
    if stage.played_sessions or stage.sessions:
        # later turns are due when the earlier ones end: no number tells
        due = planned = len(ids)
    return structs.replace(stage, scheduled_requests=due if planned is None else min(due, planned))


def _counts(requests: Any, metas: list[StageMeta]) -> dict[str, Any]:
    """Return scheduled requests by kind; those whose record was lost in a kill: unfinished."""
    first = requests.take(requests.attempt == 0)
    counts = first.status_counts()
    counts.pop("ok")
    per_stage = {m.index: int(np.count_nonzero(first.stage == m.index)) for m in metas}
    lost = sum(max(0, (m.scheduled_requests or 0) - per_stage[m.index]) for m in metas)
    counts["unfinished"] += lost
    return {"requests": len(first) + lost, "errors": counts}


def _examples(requests: Requests, table: pa.Table) -> dict[str, str]:
    """Return the error of the first request of each kind."""
    found = {}
    for kind in KINDS:
        rows = requests.row[requests.has_status(kind)]
        text = table["error"][int(rows[0])].as_py() if len(rows) else None
        if text and kind != "ok":
            found[kind] = text[:EXAMPLE_CHARS]
    return found


def partial_of(run: Run) -> str | None:
    status, reason = run.meta.get("status"), run.meta.get("status_reason")
    if run.complete and status in ("complete", None):
        return run.damage and f"not whole: {run.damage}"
    if stages := run.stages:  # the last one was going on, or was over
        over = stages[-1].drained_ns and not stages[-1].ended_early
        part = "window" if run.meta.get("soak") else "stage"
        at = f" {'after' if over else 'at'} {part} {len(stages) - 1} ({planned_name(stages[-1])})"
    else:
        at = " before any stage was written"
    if run.going_s is not None:
        return (
            f"still running{at}, last written {run.going_s:.0f} s ago: only what had been "
            "recorded by then is here"
        )
    words = {"running": "killed", "budget": "ended by its budget"}
    word, why = words.get(str(status), str(status)), f": {reason}" if reason else ""
    if status == "errors":
        word, why = "ended", f" by {reason}"
    elif reason and str(reason).startswith(f"{word} "):  # "interrupted by Ctrl-C"
        why = str(reason).removeprefix(word)
    if not run.complete or status == "running":
        why += f": only what had been recorded is here{f'; {run.damage}' if run.damage else ''}"
    return f"{word}{at}{why}"


def _imported(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tool of an imported run, its own definitions, and what it left out."""
    held = meta.get("imported")
    return held and {
        "tool_version": None,
        **held,
        "files": held.get("files") or [],
        "definitions": held.get("definitions") or [],
        "missing": held.get("missing") or {},
        "notes": meta.get("notes") or [],
    }


def audit_of(metas: Sequence[StageMeta], stages: Sequence[Stage], *, imported: bool) -> Audit:
    """Return the client's audit over the stages that it did not limit, or all if it limited each."""
    limited = [s.index for s in stages if s.client_limited]
    repeated = [s.index for s in repeated_undisturbed(stages)]
    counted = [s for s in stages if not s.client_limited] or stages
    audits = {m.index: m.audit for m in metas if m.audit}
    of_counted = [audits[s.index] for s in counted if s.index in audits]

    def worst(values: Iterable[float | None]) -> float | None:
        return max((v for v in values if v is not None), default=None)

    slips = [s.slip_s.p99 for s in counted if s.slip_s.p99 is not None]
    unknown = "the other tool's files do not say whether its client kept up"
    return Audit(
        slip_p99_s=max(slips, default=None),
        loop_lag_p99_s=worst(a.loop_lag_p99_s for a in of_counted),
        receive_delay_p99_s=worst(a.receive_delay_p99_s for a in of_counted),
        dated_by_kernel=bool(of_counted) and all(a.dated_by_kernel for a in of_counted),
        coalesced_share=worst(a.coalesced_share for a in of_counted),
        cpu_fraction=worst(a.cpu_fraction for i, a in audits.items() if i not in repeated),
        client_limited=None if imported else len(limited) > len(repeated),
        client_limited_reason=unknown if imported else None,
        client_limited_stages=limited,
        repeated_stages=repeated,
    )


def _plain(value: Any) -> Any:
    """Convert a value to JSON's own types; non-finite numbers become null."""
    if isinstance(value, Part):
        value = plain(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
