"""The traffic that was sent, by stage and class: arrivals, lengths, sharing, outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.contract.traffic import Sharing, Traffic, TrafficClass
from ampacity.analysis.metrics.lengths import spread
from ampacity.analysis.metrics.requests import Requests, ttft_s
from ampacity.analysis.stage.analyse import RunRecords
from ampacity.loadgen.rundir.meta import StageMeta


def summarise_traffic(
    records: RunRecords, metas: Sequence[StageMeta], workload: Mapping[str, Any]
) -> list[Traffic]:
    """Return one entry per stage over all of its requests (attempt 0), warm-up included.

    ``arrivals`` are requests or sessions that began, ``gap_cv`` is the coefficient of variation of
    the gaps between them as they were sent.
    """
    first = records.requests.take(records.requests.attempt == 0)
    turn = records.table["turn"].fill_null(0).to_numpy()[first.row]
    found = []
    for meta in metas:
        here = first.stage == meta.index
        if not here.any():
            continue
        own, begun_ns = first.take(here), first.dispatched_ns[here & (turn == 0)]
        gaps = np.diff(np.sort(begun_ns[~np.isnan(begun_ns)]))
        known = len(gaps) >= 2 and gaps.mean() > 0
        found.append(
            Traffic(
                stage=meta.index,
                arrivals=len(begun_ns),
                gap_cv=float(gaps.std() / gaps.mean()) if known else None,
                classes=_classes(own, workload.get("classes") or []),
            )
        )
    return found


def _classes(requests: Requests, planned: Sequence[Mapping[str, Any]]) -> list[TrafficClass]:
    weights = {str(kind.get("name")): float(kind.get("weight") or 0) for kind in planned}
    total = sum(float(kind.get("weight") or 0) for kind in planned)
    shares = {name: weight / total for name, weight in weights.items()} if total else {}
    found = []
    for name in dict.fromkeys([*shares, *requests.class_.tolist()]):
        own = requests.take(requests.class_ == name)
        ok, counts = own.take(own.has_status("ok")), own.status_counts()
        found.append(
            TrafficClass(
                name=name,
                planned_share=shares.get(name),
                share=len(own) / len(requests),
                requests=len(own),
                ok=len(ok),
                failed=int(own.failed.sum()),
                cancelled=counts["cancelled"],
                unfinished=counts["unfinished"],
                input_tokens=spread(own.input_tokens),
                output_tokens=spread(ok.output_tokens),
                cached_share=ok.cached_share(),
                ttft_from_schedule_s=spread(ttft_s(ok, from_schedule=True)),
            )
        )
    return found


def compare_sharing(requests: Requests, metas: Sequence[StageMeta]) -> list[Sharing] | None:
    """Compare each stage's planned share of cached input tokens with the server's.

    Planned: that of an infinite prefix cache, by the schedule. Realised: over the good answers.
    None where nothing was shared by design.
    """
    found = []
    for meta in metas:
        if (planned := meta.cached_share_planned) is None:
            continue
        ok = (requests.stage == meta.index) & requests.has_status("ok")
        share = requests.take(ok).cached_share()
        reason = "the server does not report cached tokens" if share is None else None
        row = Sharing(stage=meta.index, planned=planned, realised=share, realised_reason=reason)
        found.append(row)
    return found or None
