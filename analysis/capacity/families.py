"""Further curves of one run: of each class of its workload, and of each length combination.

The findings of a run rest on the stages of the workload itself. Stages with a ``lengths`` in
run.json, in which every request had the lengths of one quantile of its class, are a curve of their
own and touch nothing else.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from ampacity.analysis.capacity.knee import find_knee
from ampacity.analysis.capacity.limit import MEASURED_RATIO, find_capacity
from ampacity.analysis.contract.capacity import ClassCapacity, Family, FamilyTokens, Limit
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.metrics.lengths import describe
from ampacity.analysis.metrics.requests import Requests
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.verdicts import slos_of
from ampacity.loadgen.rundir.files import Run


def split_lengths(run: Run) -> tuple[Run, dict[str, Run]]:
    """Return the run with the stages of the workload itself, and a run for each ``lengths``."""
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
    lengths: str, stages: Sequence[Stage], requests: Requests, slos: Sequence[Slo]
) -> Family:
    """Return an entry of ``families``; ``requests`` are those of its stages."""
    first = requests.take(requests.attempt == 0)

    def tokens(rows: Requests) -> FamilyTokens:
        return FamilyTokens(
            input_tokens=describe(rows.input_tokens_planned)["p50"],
            output_tokens=describe(rows.output_tokens_planned)["p50"],
        )

    names, of_all = sorted(set(first.class_)), tokens(first)
    several = names if len(names) > 1 else []
    return Family(
        lengths=lengths,
        input_tokens=of_all.input_tokens,
        output_tokens=of_all.output_tokens,
        classes={name: tokens(first.take(first.class_ == name)) for name in several},
        stages=list(stages),
        capacity=find_capacity(stages, slos),
        knee=find_knee(stages),
    )


def class_curves(stages: Sequence[Stage], slos: Sequence[Slo]) -> list[ClassCapacity]:
    """Return the highest load of all classes at which each class meets its SLOs."""
    found = []
    for name in dict.fromkeys(name for stage in stages for name in stage.classes):
        own, judged = slos_of(name, slos), ("slo_met", "slo_met_reason", "slo_verdicts")
        of_class = [
            structs.replace(s, **{key: getattr(s.classes[name], key) for key in judged})
            for s in stages
            if name in s.classes
        ]
        capacity = find_capacity(of_class, own)
        figures = {field: getattr(capacity, field) for field in Limit.__struct_fields__}
        found.append(ClassCapacity(**figures, name=name, slos=[slo.text for slo in own]))
    return found


def class_below(summary: Summary) -> str | None:
    """Warn of a class that violates its SLOs at the capacity of all requests together."""
    capacity, lower = summary.capacity.capacity_rps, []
    for k in summary.classes if capacity else ():
        name, rate, (low, high) = k.name, k.capacity_rps, k.capacity_rps_ci or (None, None)
        # an SLO of the whole run binds each of its classes, too
        own = str(k.binding_slo or f"{name}:").startswith(f"{name}:")
        if rate is None and high and capacity and high <= capacity:
            lower.append(f"class {name} is shown to keep its SLOs at no load that was tried")
        elif rate and capacity and not own and MEASURED_RATIO * rate < capacity:
            between = f" (between {low:.3g} and {high:.3g})" if low and high else ""
            lower.append(
                f"class {name} keeps {k.binding_slo} only up to {rate:.3g} requests/s of "
                f"all classes{between}"
            )
    if not lower:
        return None
    return (
        f"Below the capacity of {capacity:.3g} requests/s, at which an SLO without a class is kept "
        f"by all requests together: {'; '.join(lower)}. "
        "Size by that rate, or give the class an SLO of its own (--slo CLASS:SLO)."
    )


def lengths_out_of_order(summary: Summary) -> str | None:
    """Warn where shorter requests meet the SLOs only up to a lower load than longer ones.

    The workload's own requests count by their means, since their longest make the load.
    """
    own = (summary.fleet.input_tokens_mean, summary.fleet.output_tokens_mean)
    curves = [("the workload's own lengths", own, summary.capacity)]
    curves += [
        (f"{f.lengths} lengths", (f.input_tokens, f.output_tokens), f.capacity)
        for f in summary.families
    ]
    wrong = []
    for (short, a, least), (long, b, most) in permutations(curves, 2):
        tokens = [(x or 0, y or 0) for x, y in zip(a, b, strict=True)]
        shorter = all(x <= y for x, y in tokens) and any(x < y for x, y in tokens)
        (_, high), (low, _) = (c.capacity_rps_ci or (None, None) for c in (least, most))
        if shorter and high and low and high < low:
            wrong.append(
                f"{short} up to {high:.3g} requests/s at most, {long} up to {low:.3g} at least"
            )
    if not wrong:
        return None
    return (
        "Shorter requests keep the SLOs only up to a lower load than longer ones: "
        f"{'; '.join(wrong)}. Something else than their length differs (a cache that filled, other "
        "work on the machine): run the sweep again."
    )
