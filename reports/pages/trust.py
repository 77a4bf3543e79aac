"""Show if a run can be trusted: steady state, and warnings with the command that mends each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.next_run import again, relieved
from ampacity.analysis.stage.throughput import steady_state
from ampacity.durations import duration_text, rounded_up
from ampacity.reports.render.figures import DASH, Finding, by_load, counted, length
from ampacity.reports.render.traffic import lengths_line

GRAVE = frozenset(
    [
        "partial",
        "no_requests",
        "client_limited",
        "outage",
        "errors",
        "unstable_lowest",
        "non_monotone",
        "inputs_off",
        "lengths_off",
        "cut_short",
        "strangers",
        "unsolicited",
        "not_streamed",
        "imported",
    ]
)
"""Codes whose run may say something else than it seems to; the others bound what it says."""
LONGER = ["never_settled", "drift", "too_few_requests", "too_short", "non_monotone", "littles_law"]
THIS_HOST = re.compile(r"https?://(localhost|127\.[\d.]+|\[::1\])(?![^:/])")
REPEATED = ("run", "sweep", "search", "predict")  # commands with the options that mend


@dataclass(frozen=True)
class Shown:
    code: str
    text: str
    grave: bool
    command: str | None


def by_severity(summary: Summary, meta: Mapping[str, Any]) -> list[Shown]:
    """Return the warnings, grave ones first; ``meta`` is run.json."""
    found = [
        Shown(w.code, w.text, w.code in GRAVE, _mending(w.code, summary, meta))
        for w in summary.warnings
    ]
    return sorted(found, key=lambda warning: not warning.grave)


def origin(summary: Summary, meta: Mapping[str, Any]) -> list[Finding]:
    """Return what answered, where that is no server of its own, and what was sent."""
    found, values, notes = [], [], []
    if summary.predicted or summary.simulated:
        values.append("simulated")
        notes.append("the figures are those of no engine, model or GPU")
    url = (meta.get("endpoint") or {}).get("url")
    if not summary.predicted and THIS_HOST.match(str(url)):
        values.append("on the client's host")
        tunnel = ", unless this is a tunnel" * (not summary.simulated)
        notes.append(
            f"server and client share its CPUs{tunnel}: the server's use was not measured, so whether "
            "the machine was the limit is not known"
        )
    if values:
        found.append(Finding("Server", ", ".join(values), None, "; ".join(notes), "unsure"))
    return [*found, _workload(summary)]


def _workload(summary: Summary) -> Finding:
    """Return what was sent, and how far it is an assumption."""
    held = summary.workload
    sent = {"arrivals": "arrivals {}", "prompts": "prompts {}", "source": "{}"}
    if all(stage.kind == "closed" for stage in summary.stages):
        del sent["arrivals"]  # users do not wait for those
    parts = [lengths_line(held)]
    parts += [text.format(held[key]) for key, text in sent.items() if held.get(key)]
    assumed = _assumed(summary)
    if assumed:
        parts.append(
            "whether yours is like it is not known: replay a log of your own with --trace, "
            "or fit one with ampacity workload fit"
        )
    note = "; ".join(part for part in parts if part)
    return Finding(
        "Workload", str(held.get("name") or DASH), None, note, "unsure" if assumed else ""
    )


def _assumed(summary: Summary) -> bool:
    return str(summary.workload.get("source") or "").startswith("an assumption")


def doubts(summary: Summary, meta: Mapping[str, Any]) -> str:
    """Return in a sentence what speaks against buying on the figures of a run."""
    grave = [w.code for w in summary.warnings if w.code in GRAVE]
    if summary.predicted:
        never = ["nothing was measured"]
    else:
        never = ["a simulator answered"] if summary.simulated else []
    never += [f"{counted(len(grave), 'grave warning')} below"] if grave else []
    held, url = summary.capacity, (meta.get("endpoint") or {}).get("url")
    others = {
        "the workload is an assumption": _assumed(summary),
        "server and client share a machine": not summary.predicted and THIS_HOST.match(str(url)),
        "no stage alone verifies a load": held.crossing == "pooled" and not held.verified_rps,
        f"it is one run{_length(summary)}: other days and machines are not in it": not summary.predicted,
    }
    less = [text for text, holds in others.items() if holds]
    lead = "Do not buy on these figures" if never else "Before you buy on these figures"
    return f"{lead}: {'; '.join([*never, *less])}."


def steady(summary: Summary) -> Finding:
    """Return in how many stages the requests in flight were shown not to grow."""
    states = [(s.name, steady_state(s)[0]) for s in by_load(summary.stages)]
    others = [f"{name}: {state}" for name, state in states if state != "yes"]
    value = f"{len(states) - len(others)} of {counted(len(states), 'stage')}"
    cuts = [s.window.warmup_requests for s in summary.stages if steady_state(s)[0] == "yes"]
    grew = others or ["requests in flight did not keep growing"]
    note = "; ".join([*grew, *([_cut(min(cuts), max(cuts))] if cuts else [])])
    return Finding("Steady state", value, None, note, "unsure" if others else "good")


def _cut(least: int, most: int) -> str:
    ends = f"{least}" if least == most else f"{least} to {most}"
    return f"the first {ends} requests of a steady stage are cut as warm-up"


def _mending(code: str, summary: Summary, meta: Mapping[str, Any]) -> str | None:
    """Return the command that mends a warning: the run's own with another option; None: none."""
    held = meta.get("command_line")
    words = [str(word) for word in held] if isinstance(held, list) else []
    if words[1:2] not in [[name] for name in REPEATED] or any("***" in word for word in words):
        return None
    if code == "too_few_requests":
        return summary.next_command
    if code in LONGER:
        return again(words, {"--duration": duration_text(rounded_up(2 * _longest_s(meta)))})
    if code == "client_limited":
        return relieved(words, meta, summary.audit.cpu_fraction)
    if code in ("too_long", "beyond_context"):
        return f"{again(words, {}, ['--fit-context'])} --fit-context"
    return None


def _length(summary: Summary) -> str:
    """Return `` of 2 min``, the stages as long as they were played; empty where there is none."""
    played_s = sum(stage.window.end_s for stage in summary.stages)
    return f" of {length(rounded_up(played_s))}" if played_s > 0 else ""


def _longest_s(meta: Mapping[str, Any]) -> float:
    """Return the length of the longest stage, in s."""
    known = [s for s in meta.get("stages") or [] if s.get("start_ns") and s.get("end_ns")]
    return max((round((s["end_ns"] - s["start_ns"]) * 1e-9, 1) for s in known), default=30.0)
