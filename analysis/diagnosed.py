"""Effects of the probe's diagnosis of the endpoint on the verdicts of its run.

Whether it streams is decided by all answers of the run (ampacity.analysis.metrics.cohort), not by
the probe's one.
"""

from collections.abc import Mapping
from typing import Any

from ampacity.analysis.slo import METRICS


def certain(meta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the findings of run.json's ``diagnosis`` that certainly spoil a figure."""
    return [f for f in meta.get("diagnosis") or [] if f["verdict"] == "bad" and f.get("spoils")]


def spoilt_by(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return, by SLO metric, why no verdict can rest on it."""
    found: dict[str, str] = {}
    for finding in certain(meta):
        if finding["name"] == "stream":
            continue
        reason = f"{finding['found']}: {finding['means']} (see: ampacity doctor)"
        for name, metric in METRICS.items():
            if {name, *metric.rests_on} & {*finding["spoils"]}:
                found.setdefault(name, reason)
    return found
