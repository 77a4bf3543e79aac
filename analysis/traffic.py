"""What was sent, by stage and class.

How many, how they arrived, how long they were, what they shared, how they ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.metrics.lengths import spread
from ampacity.analysis.metrics.requests import Requests, ttft_s
from ampacity.analysis.stage.analyse import RunRecords


def summarise_traffic(
    records: RunRecords, metas: Sequence[Mapping[str, Any]], workload: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return ``traffic`` of the summary.

    One entry a stage, over all of its requests (attempt 0), the warm-up included.
    """
    first = records.requests.take(records.requests.attempt == 0)
    turn = records.table["turn"].fill_null(0).to_numpy()[first.row]
    found = []
    for meta in metas:
        here = first.stage == meta["index"]
        if here.any():
            own = first.take(here)
            found.append(
                {
                    "stage": meta["index"],
                    **_arrivals(own.dispatched_ns[turn[here] == 0]),
                    "classes": _classes(own, workload.get("classes") or []),
                }
            )
    return found


def _arrivals(dispatched_ns: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    """Return requests or sessions that began, and the coefficient of variation of the gaps between
    them as they were sent.
    """
    gaps = np.diff(np.sort(dispatched_ns[~np.isnan(dispatched_ns)]))
    known = len(gaps) >= 2 and gaps.mean() > 0
    return {
        "arrivals": len(dispatched_ns),
        "gap_cv": float(gaps.std() / gaps.mean()) if known else None,
    }


def _classes(requests: Requests, planned: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    total = sum(float(kind.get("weight") or 0) for kind in planned)
    shares = (
        {str(k.get("name")): float(k.get("weight") or 0) / total for k in planned} if total else {}
    )
    names = dict.fromkeys([*shares, *requests.class_.tolist()])
    return [
        _class(name, shares.get(name), requests.take(requests.class_ == name), len(requests))
        for name in names
    ]


def _class(name: str, planned: float | None, own: Requests, of: int) -> dict[str, Any]:
    ok = own.take(own.has_status("ok"))
    counts = own.status_counts()
    return {
        "name": name,
        "planned_share": planned,
        "share": len(own) / of,
        "requests": len(own),
        "ok": len(ok),
        "failed": int(own.failed.sum()),
        "cancelled": counts["cancelled"],
        "unfinished": counts["unfinished"],
        "input_tokens": spread(own.input_tokens),
        "output_tokens": spread(ok.output_tokens),
        "cached_share": ok.cached_share(),
        "ttft_from_schedule_s": spread(ttft_s(ok, from_schedule=True)),
    }


def compare_sharing(
    requests: Requests, metas: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """Compare each stage's planned share of cached input tokens with the server's.

    Planned: an infinite prefix cache. None where nothing was shared by design.
    """
    found = []
    for meta in metas:
        if meta.get("cached_share_planned") is None:
            continue
        share = requests.take(
            (requests.stage == meta["index"]) & requests.has_status("ok")
        ).cached_share()
        row = {"stage": meta["index"], "planned": meta["cached_share_planned"], "realised": share}
        if share is None:
            row["realised_reason"] = "the server does not report cached tokens"
        found.append(row)
    return found or None
