"""The report as one HTML file that needs no network: the decision first, then its evidence.

Charts are Vega-Lite with their runtime (0.9 MB) in the page; until it runs, without scripts and on
paper there is the same picture as SVG.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ampacity.analysis.contract.limits import Limit
from ampacity.analysis.contract.summary import Summary, to_json
from ampacity.analysis.decision.guardrails import guardrails
from ampacity.analysis.next_run import (
    again,
    check_command,
    decide_command,
    same_stages,
    sweep_instead,
)
from ampacity.analysis.other_limits import AtLimit
from ampacity.analysis.timeline import Timeline
from ampacity.reports.charts.burst import phases_table
from ampacity.reports.charts.curves import charts
from ampacity.reports.charts.families import curve_tables
from ampacity.reports.charts.marks import Chart
from ampacity.reports.charts.timeline import timeline_chart
from ampacity.reports.pages.around_limit import around_limit
from ampacity.reports.pages.findings import TRUST, error_bound, findings
from ampacity.reports.pages.limits import limits_with_figures, rails_of
from ampacity.reports.pages.page import embedded_json, render_page, write_page
from ampacity.reports.pages.screen import judged_table
from ampacity.reports.pages.soak import soak_table
from ampacity.reports.pages.trust import by_severity, doubts, origin, steady
from ampacity.reports.pages.what_if import what_if
from ampacity.reports.render import tables
from ampacity.reports.render.events import events_table
from ampacity.reports.render.figures import (
    by_load,
    count,
    ended_otherwise,
    exact,
    failures,
    failures_by_cause,
    share,
    significant,
)
from ampacity.reports.render.sessions import session_findings, session_tables
from ampacity.reports.render.table import Rows, Table
from ampacity.reports.render.traffic import lengths_line, side_title, traffic_table, workload_facts
from ampacity.reports.render.windows import windows_table

NOT_GIVEN = "not given"
STATUS_WORDS = {
    "running": "The run was still going, or was killed, when this report was written.",
    "interrupted": "The run was interrupted.",
    "budget": "The run ended at its budget.",
    "errors": "The run ended at its limit of errors.",
    "aborted": "The run was aborted.",
}


@dataclass(frozen=True)
class Beyond:
    """Findings that a report shows beyond the summary, from the records of the run.

    ``limits``: the capacity at other limits of the SLO that binds. ``hardware``: how far the run is
    from its hardware; None: model or GPU are not known.
    """

    timeline: Timeline | None = None
    limits: Sequence[AtLimit] = ()
    directory: str = "RUN"
    hardware: str | None = None


def report_charts(summary: Summary, timeline: Timeline | None) -> list[Chart]:
    """Return the charts of a report, in their order."""
    over_time = [timeline_chart(timeline, summary)] if timeline else []
    return [*over_time, *charts(summary)]


def render_report(summary: Summary, meta: Mapping[str, Any], beyond: Beyond | None = None) -> str:
    """Return the whole page; ``meta`` is run.json. All text is shown escaped."""
    beyond = beyond or Beyond()
    found = [*findings(summary), *session_findings(summary)]
    choices = what_if(summary, beyond.limits, beyond.directory)
    judged = judged_table(summary, by_load(summary.stages))
    return render_page(
        "report.html.j2",
        report_charts(summary, beyond.timeline),
        title=f"{meta.get('name') or 'run'} – ampacity",
        verdict=summary.verdict,
        predicted=summary.predicted,
        simulated=summary.simulated,
        warnings=by_severity(summary, meta),
        limits=limits_with_figures(summary.limits),
        hardware=beyond.hardware,
        untold=_by_reason([limit for limit in summary.limits if limit.holds is None]),
        subject=_subject(summary, meta),
        partial=partial_reason(summary, meta),
        decision=[finding for finding in found if finding.label not in TRUST],
        trust=[
            *origin(summary, meta),
            *sorted((f for f in found if f.label in TRUST), key=lambda f: TRUST.index(f.label)),
            *([] if summary.burst else [steady(summary)]),
        ],
        doubts=doubts(summary, meta),
        next_command=summary.next_command,
        rails=_rails(summary),
        what_if=choices,
        fleet_data=embedded_json(choices["data"]) if choices else None,
        phases=phases_table(summary.burst) if summary.burst else None,
        soak=soak_table(summary.soak) if summary.soak else None,
        sweep=sweep_instead(meta) if summary.burst else None,
        judged=judged and judged.last_second(),
        around_limit=around_limit(summary),
        fewer_arrived=_fewer_arrived(summary),
        stages=tables.stages_table(summary),
        bound=error_bound(summary),
        slos=tables.slo_table(summary),
        accepted=tables.accepted_table(summary),
        curves=curve_tables(summary),
        families=[
            (f.lengths, tables.stages_table(replace(summary, stages=f.stages)))
            for f in summary.families
        ],
        percentiles=tables.all_percentiles(summary),
        assumption=summary.interval_assumption,
        lengths=tables.lengths_table(summary),
        traffic=traffic_table(summary),
        windows=windows_table(summary, meta),
        events=events_table(summary, meta),
        server=tables.server_table(summary),
        sessions=session_tables(summary),
        itl_reason=_itl_reason(summary),
        errors=_errors_sentence(summary),
        workload=_workload_facts(summary.workload),
        **_commands(summary, meta),
        provenance=_provenance(meta),
        imported=tables.imported_tables(summary.imported),
        embedded=embedded_json(to_json(summary)),
    )


def write_report(
    path: Path, summary: Summary, meta: Mapping[str, Any], beyond: Beyond | None = None
) -> Path:
    """Write the report to ``path``, as a whole, and return the path."""
    write_page(path, render_report(summary, meta, beyond))
    return path


def partial_reason(summary: Summary, meta: Mapping[str, Any]) -> str | None:
    """Return why the run is not whole, in a line; None for a complete run."""
    status = str(meta.get("status", "complete"))
    reason = summary.partial or (meta.get("status_reason") if status != "complete" else None)
    if reason:
        text = str(reason).strip().rstrip(".")
        return f"{text[:1].upper()}{text[1:]}."
    if status == "complete":
        return None
    return STATUS_WORDS.get(status, f"The run's status is {status}.")


def _subject(summary: Summary, meta: Mapping[str, Any]) -> list[str]:
    """Return what was measured, where, when and with what: the line under the verdict."""
    endpoint = meta.get("endpoint") or {}
    slos = ", ".join(slo.text for slo in summary.slos)
    started = str(meta.get("started_utc") or "").replace("T", " ").replace("Z", " UTC")
    facts = [meta.get("name"), endpoint.get("model"), endpoint.get("url"), started]
    sent = lengths_line(summary.workload)
    return [str(part) for part in (*facts, sent, slos and f"SLO {slos}") if part]


def _itl_reason(summary: Summary) -> str:
    held = (stage.itl_s.reason for stage in by_load(summary.stages))
    reasons = dict.fromkeys(reason for reason in held if reason)
    return f": {'; '.join(reasons)}" if reasons else ""


def _errors_sentence(summary: Summary) -> str:
    errors, total = summary.errors, summary.requests
    if not total:
        return "No request was recorded."
    failed = failures(errors)
    text = f"{count(failed)} failed: {failures_by_cause(summary)}" if failed else "none failed"
    ends = "; ".join([*ended_otherwise(errors), text])
    return f"Of {count(total)} requests of the whole run {ends}."


def _workload_facts(workload: Mapping[str, Any]) -> list[tuple[str, str]]:
    realised = workload.get("realised") or {}
    lengths = {
        side: _plain((workload.get(f"{side}_tokens") or {}).get("text"))
        for side in ("input", "output")
    }
    return [
        ("Workload", _plain(workload.get("name"))),
        ("Source", _plain(workload.get("source"))),
        ("Arrivals", _plain(workload.get("arrivals"))),
        ("Trace", _plain(workload.get("trace"), "none")),
        (side_title(workload, "input", ", planned"), lengths["input"]),
        ("Output tokens, planned", lengths["output"]),
        *workload_facts(workload),
        ("Prompts", _plain(workload.get("prompts"))),
        ("Tokenizer", _plain(workload.get("tokenizer"))),
        ("Cached share of input tokens", _known(realised, "cached_token_share", share)),
        ("Tokens per chunk", _known(realised, "tokens_per_chunk", significant)),
        ("Tokens counted by", _plain(realised.get("token_source"), "nothing")),
    ]


def _known(holder: Mapping[str, Any], name: str, text: Any) -> str:
    if holder.get(name) is None:
        return f"not known: {holder.get(f'{name}_reason') or 'the server does not say'}"
    return str(text(holder[name]))


def _plain(value: Any, empty: str = NOT_GIVEN) -> str:
    """Return a value of run.json as words."""
    if value is None or value == {} or value == []:
        return empty
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    return ", ".join(_plain(v) for v in value) if isinstance(value, list) else str(value)


def _provenance(meta: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return groups of facts with which the run can be repeated or doubted."""
    tool, clock, host = (
        meta.get("tool") or {},
        meta.get("clock") or {},
        dict(meta.get("host") or {}),
    )
    memory = host.pop("memory_bytes", None)
    run = [
        ("Run", f"{_plain(meta.get('name'))} ({_plain(meta.get('run_id'))})"),
        ("Experiment", _plain(meta.get("experiment"))),
        ("Status", _plain(meta.get("status"))),
        ("Tool", f"{_plain(tool.get('name'))} {_plain(tool.get('version'))}"),
        ("Started (UTC)", _plain(meta.get("started_utc"))),
        ("Ended (UTC)", _plain(meta.get("ended_utc"))),
        ("Seed", _plain(meta.get("seed"))),
        ("Salt", _plain(meta.get("salt"))),
        ("Workers", _plain(meta.get("workers"))),
        ("Warm-up requests", _plain(meta.get("warmup_requests"), "found from the data")),
        ("Notes", "; ".join(map(str, meta.get("notes") or [])) or "none"),
        ("SLOs", ", ".join(str(s.get("text")) for s in meta.get("slos") or []) or "none"),
        (
            "Clock",
            f"CLOCK_MONOTONIC {_plain(clock.get('monotonic_ns'))} ns "
            f"was {_plain(clock.get('utc'))}",
        ),
    ]
    host_facts = _facts(host)
    if isinstance(memory, int | float):
        host_facts.append(("Memory", f"{memory / 2**30:.1f} GiB"))
    # an input that was not given has a default, named where it is used
    given = {k: v for k, v in (meta.get("fleet_inputs") or {}).items() if v is not None}
    return [
        ("Run", run),
        ("Locked variables", _facts(meta.get("locked"))),
        ("Endpoint", _facts(meta.get("endpoint"))),
        ("Seen of the endpoint before the load", _diagnosis(meta.get("diagnosis"))),
        ("Load generator's host", host_facts),
        ("Inputs of the fleet size", _facts(given)),
    ]


def _diagnosis(findings: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, str]]:
    """Return the probe's diagnosis, a line for each finding."""
    if findings is None:
        return [("Diagnosis", NOT_GIVEN)]
    return [
        (_words(str(f["name"])), f"{f['verdict']}: {f['found']} → {f['means']}") for f in findings
    ]


def _facts(held: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [(_words(name), _plain(value)) for name, value in (held or {}).items()]


def _by_reason(limits: Sequence[Limit]) -> dict[str, list[str]]:
    """Return the titles of limits by why they cannot be told."""
    found: dict[str, list[str]] = {}
    for limit in limits:
        found.setdefault(str(limit.reason).removeprefix("cannot tell: "), []).append(limit.title)
    return found


def _fewer_arrived(summary: Summary) -> str:
    """Return ``125 at 127 req/s`` for the open stages to which 1 % fewer came than was planned."""
    return ", ".join(
        f"{significant(stage.arrived_rps)} at {stage.name}"
        for stage in by_load(summary.stages)
        if stage.offered_rps and stage.arrived_rps < 0.99 * stage.offered_rps
    )


def _rails(summary: Summary) -> Table:
    """Return the limits to set in front of an instance, where a capacity was found."""
    found = summary.capacity.capacity_rps is not None and not summary.burst
    set_ = guardrails(summary, safety=summary.fleet.safety_factor)
    rows = Rows("Limits", rails_of(set_, summary.fleet) if found else [])
    rows.words("limit of one instance", lambda rail: rail.name)
    rows.words("set in", lambda rail: rail.place)
    rows.words("set to", lambda rail: rail.value)
    rows.words("what comes beyond", lambda rail: rail.beyond)
    rows.words("why", lambda rail: rail.why)
    table = rows.done()
    names = {"concurrency_limit": "requests in flight", "queue_depth": "queue"}
    for name in (n for n in names if found and n in set_.missing):
        table.footnote(f"no limit of the {names[name]}: {set_.missing[name]}")
    return table


def _commands(summary: Summary, meta: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the run's own command, the one that plays its loads again, and a release's check."""
    held = meta.get("command_line")
    words = [str(word) for word in held] if isinstance(held, list) else []
    decide = decide_command(summary, meta) if words else None
    return {
        "command_line": again(words, {}) if words else _plain(held),
        "same_stages": same_stages(words, meta),
        "check": check_command(summary, meta) if words else None,
        "decide": None if decide == summary.next_command else decide,
    }


def _words(name: str) -> str:
    special = {
        "url": "URL",
        "api": "API",
        "cpus": "CPUs",
        "cpu_model": "CPU model",
        "uvloop": "uvloop",
    }
    special |= {"gpu_hour_usd": "GPU hour (USD)", "peak_rps": "Peak (requests/s)"}
    return special.get(name, name.replace("_", " ").capitalize())
