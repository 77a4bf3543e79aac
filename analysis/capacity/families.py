"""Further curves of one run: of each class of its workload, and of each length combination that was
swept.

What is found of a run rests on the stages of the workload itself. Stages with a ``lengths`` in
run.json, in which every request had the lengths of one quantile of its class, are a curve of their
own and touch nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.capacity.knee import find_knee
from ampacity.analysis.capacity.usable import MEASURED_RATIO, find_capacity
from ampacity.analysis.metrics.lengths import describe
from ampacity.analysis.metrics.requests import Requests
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.verdicts import slos_of
from ampacity.loadgen.rundir.files import Run

_CAPACITY = (
    "capacity_rps",
    "capacity_rps_ci",
    "c_max",
    "c_max_ci",
    "binding_slo",
    "binding_or",
    "crossing",
    "stage",
    "users",
    "reason",
)


def split_lengths(run: Run) -> tuple[Run, dict[str, Run]]:
    """Return the run with the stages of the workload itself, and one run for each of its other
    ``lengths``.
    """
    metas: dict[str | None, list[dict[str, Any]]] = {None: []}
    for position, meta in enumerate(run.meta.get("stages") or []):
        lengths, index = meta.get("lengths"), meta.get("index")
        metas.setdefault(None if lengths is None else str(lengths), []).append(
            {**meta, "index": position if index is None else int(index)}
        )
    if len(metas) == 1:
        return run, {}
    parts = {lengths: _with_stages(run, stages) for lengths, stages in metas.items()}
    return parts.pop(None), {str(lengths): part for lengths, part in parts.items()}


def _with_stages(run: Run, metas: list[dict[str, Any]]) -> Run:
    wanted = pa.array([meta["index"] for meta in metas], type=pa.int32())
    rows = run.requests.filter(pc.is_in(run.requests["stage"], value_set=wanted))
    return replace(run, requests=rows, meta={**run.meta, "stages": metas})


def describe_family(
    lengths: str, stages: Sequence[dict[str, Any]], requests: Requests, slos: Sequence[Slo]
) -> dict[str, Any]:
    """Return an entry of ``families``; ``requests`` are those of its stages."""
    first = requests.take(requests.attempt == 0)

    def tokens(rows: Requests) -> dict[str, Any]:
        sides = {
            "input_tokens": rows.input_tokens_planned,
            "output_tokens": rows.output_tokens_planned,
        }
        return {side: describe(planned)["p50"] for side, planned in sides.items()}

    names = sorted(set(first.class_))
    return {
        "lengths": lengths,
        **tokens(first),
        "classes": {
            name: tokens(first.take(first.class_ == name)) for name in names if len(names) > 1
        },
        "stages": list(stages),
        "capacity": find_capacity(stages, slos),
        "knee": find_knee(stages),
    }


def class_curves(stages: Sequence[dict[str, Any]], slos: Sequence[Slo]) -> list[dict[str, Any]]:
    """Return the highest load of all classes at which each class meets its SLOs."""
    names = dict.fromkeys(name for stage in stages for name in stage["classes"])
    found = []
    for name in names:
        own = [{**s, **_judged(s["classes"][name])} for s in stages if name in s["classes"]]
        capacity = find_capacity(own, slos_of(name, slos))
        found.append(
            {
                "name": name,
                "slos": [slo.text for slo in slos_of(name, slos)],
                **{figure: capacity[figure] for figure in _CAPACITY},
            }
        )
    return found


def class_below(summary: Mapping[str, Any]) -> str | None:
    """Warn of a class that violates its SLOs at the capacity of all requests together."""
    usable, said = summary["capacity"]["capacity_rps"], []
    for k in summary.get("classes") or [] if usable else ():
        name, rate, (low, high) = k["name"], k["capacity_rps"], k["capacity_rps_ci"] or (None, None)
        own = str(k["binding_slo"] or f"{name}:").startswith(
            f"{name}:"
        )  # an SLO of the whole run, too
        if rate is None and high and high <= usable:
            said.append(f"class {name} is shown to keep its SLOs at no load that was tried")
        elif rate and not own and MEASURED_RATIO * rate < usable:
            between = f" (between {low:.3g} and {high:.3g})" if low and high else ""
            said.append(
                f"class {name} keeps {k['binding_slo']} only up to {rate:.3g} requests/s of "
                f"all classes{between}"
            )
    if not said:
        return None
    return (
        f"Below the capacity of {usable:.3g} requests/s, at which an SLO without a class is kept "
        f"by all requests together: {'; '.join(said)}. "
        "Size by that rate, or give the class an SLO of its own (--slo CLASS:SLO)."
    )


def lengths_out_of_order(summary: Mapping[str, Any]) -> str | None:
    """Warn where shorter requests meet the SLOs only up to a lower load than longer ones.

    The workload's own requests count by their means, since their longest make the load.
    """
    own = {side: summary["fleet"][f"{side}_mean"] for side in ("input_tokens", "output_tokens")}
    curves = [("the workload's own lengths", own, summary["capacity"])]
    curves += [(f"{f['lengths']} lengths", f, f["capacity"]) for f in summary["families"]]
    said = []
    for (short, a, least), (long, b, most) in permutations(curves, 2):
        tokens = [(a[side] or 0, b[side] or 0) for side in own]
        ends = [c["capacity_rps_ci"] or (None, None) for c in (least, most)]
        high, low = ends[0][1], ends[1][0]
        if (
            all(x <= y for x, y in tokens)
            and any(x < y for x, y in tokens)
            and high
            and low
            and high < low
        ):
            said.append(
                f"{short} up to {high:.3g} requests/s at most, {long} up to {low:.3g} at least"
            )
    if not said:
        return None
    return (
        "Shorter requests keep the SLOs only up to a lower load than longer ones: "
        f"{'; '.join(said)}. "
        "Something else than their length differs (a cache that filled, other work on the "
        "machine): run the sweep again."
    )


def _judged(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: figures[key] for key in ("slo_met", "slo_met_reason", "slo_verdicts")}
