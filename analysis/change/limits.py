"""What a gate judges without a comparison of latencies.

Steady state, errors, absolute limits, and brackets of the capacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.change.baseline import read_level
from ampacity.analysis.change.check import Check
from ampacity.analysis.change.comparable import Judged
from ampacity.analysis.slo import Slo, parse_slos
from ampacity.analysis.warnings import ERROR_SHARE

USABLE_TOLERANCE = 0.1


def sanity(run: Judged, name: str) -> list[Check]:
    """What no latency makes good: a load that the candidate does not carry, and errors."""
    stage = run.levels()[name][1]
    failures = read_level(run, name, 0).failed  # those of the warm-up too
    failed, share = int(failures.sum()), float(failures.mean()) if len(failures) else 1.0
    checks = []
    if stage["stable"] is False:
        reason = f"no steady state at this load any more: {stage['stable_reason']}"
        checks.append(Check("stability", "sanity", name, "regression", reason=reason))
    if share > ERROR_SHARE:
        reason = (
            f"{failed} of {len(failures)} requests failed or were cut off unfinished: "
            f"with more than {ERROR_SHARE:.0%} nothing passes"
        )
        checks.append(
            Check("errors", "sanity", name, "inconclusive", candidate=share, reason=reason)
        )
    return checks


def usable(base: Mapping[str, Any], run: Judged, tolerance: float) -> list[Check]:
    """Brackets of tested loads: worse where they do not overlap, no worse where the lower ends agree."""
    ours, theirs = run.summary["capacity"], base["capacity_rps"]
    if not theirs:
        return []
    rate = ours["capacity_rps"]
    check = Check("capacity_rps", "capacity", None, baseline=theirs["value"], candidate=rate)
    check.tolerance = tolerance
    bracket, least = ours["capacity_rps_ci"], theirs["bracket"][0] * (1 - tolerance)
    if rate:
        check.change = rate / theirs["value"] - 1
    if not bracket:
        check.reason = ours["reason"]
    elif bracket[0] is not None and bracket[0] >= least:
        check.verdict = "pass"
    elif bracket[1] is not None and bracket[1] <= least:
        check.verdict = "regression"
    else:
        check.reason = (
            "the tested loads lie too far apart to tell: use closer --rates or a longer --duration"
        )
    return [check]


def slos(base: Mapping[str, Any], runs: Sequence[Judged]) -> tuple[list[Check], dict[str, str]]:
    """(absolute limits, why some are not judged at a load). Any run may break one, any may meet it.

    In a sweep only at loads at which the baseline kept them; at the lowest where it kept one nowhere.
    """
    checks: list[Check] = []
    untracked: dict[str, str] = {}
    levels = base["levels"]
    lowest = min(
        levels, key=lambda name: levels[name]["offered_rps"] or levels[name]["concurrency"] or 0.0
    )
    for slo in runs[0].summary["slos"]:
        metric = slo["text"].partition("=")[0]
        known = {name: _baseline_s(level, metric) for name, level in levels.items()}
        kept = [name for name, s in known.items() if s is not None and s <= slo["limit_s"]] or [
            lowest
        ]
        unknown = f"the baseline does not hold {metric}: make it from runs with --slo {slo['text']}"
        for name, known_s in known.items():
            if name in kept:
                checks.append(_slo_check(slo["text"], name, runs, known_s, unknown))
            elif known_s is None:
                untracked[f"{slo['text']} at {name}"] = unknown
            else:
                missed = (
                    f"not judged at this load, the baseline did not keep it there ({known_s:.3g} s)"
                )
                untracked[f"{slo['text']} at {name}"] = missed
    return checks, untracked


def _baseline_s(level: Mapping[str, Any], metric: str) -> float | None:
    """What the baseline had at this load, s; None where it is not known."""
    tracked = level["quantiles"].get(metric, {}).get("value_s")
    found: float | None = level.get("slos", {}).get(metric, tracked)
    return found


def _slo_check(
    slo: str, name: str, runs: Sequence[Judged], known_s: float | None, unknown: str
) -> Check:
    found = [v for run in runs for v in run.levels()[name][1]["slo_verdicts"] if v["slo"] == slo]
    v = next((v for word in ("violated", "met") for v in found if v["verdict"] == word), found[-1])
    check = Check(
        slo, "slo", name, {"met": "pass", "violated": "violated"}.get(v["verdict"], "inconclusive")
    )
    check.baseline, check.candidate, check.more_requests = known_s, v["value_s"], v["more_requests"]
    check.reason = v["reason"] or (unknown if known_s is None else None)
    return check


def slos_of(base: Mapping[str, Any], given: Sequence[str]) -> list[Slo]:
    """The baseline's SLOs and those given; a limit that is given wins. Raises SloError."""
    wanted = {slo.name: slo for slo in parse_slos(base["slos"])}
    return list((wanted | {slo.name: slo for slo in parse_slos(given)}).values())
