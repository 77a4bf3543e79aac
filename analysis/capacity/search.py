"""The summary of a search: the path that it took, and what it lacks to its precision."""

from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.capacity.levels import open_levels
from ampacity.analysis.capacity.pooled import estimate
from ampacity.analysis.contract.capacity import Search, SearchStep
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import Slo

TOO_EARLY = "; it is too early to say how many requests it takes"


def summarise_search(
    noted: Mapping[str, Any], stages: Sequence[Stage], slos: Sequence[Slo]
) -> Search:
    """Return the path that was taken, with what was known after each stage."""
    path = []
    for step in noted.get("path") or []:
        so_far = [s for s in stages if s.index <= step["stage"]]
        stage = next((s for s in so_far if s.index == step["stage"]), None)
        found = estimate(open_levels(so_far), slos)
        path.append(
            SearchStep(
                stage=step["stage"],
                offered_rps=step["offered_rps"],
                why=step["why"],
                requests=stage.requests + stage.window.warmup_requests if stage else None,
                slo_met=stage.slo_met if stage else None,
                capacity_rps=None if found is None else found.capacity_rps,
                capacity_rps_ci=None if found is None else found.capacity_rps_ci,
            )
        )
    return Search(
        precision=noted["precision"],
        reached=bool(noted.get("reached")),
        requests=sum(step.requests or 0 for step in path),
        more_requests=noted.get("more_requests"),
        reason=noted.get("ended") or "the search has not come to its end",
        path=path,
    )


def requests_in_all(sent: int, more: int) -> str:
    """Return the total of requests of a search, in words."""
    return f"about {float(f'{sent + more:.2g}'):,.0f} requests in all"


def shortfall(search: Search, verdict: str) -> str | None:
    """Return why the search missed its precision, and what it takes; None where it did not.

    The reason is left out where ``verdict`` gives it.
    """
    if search.reached:
        return None
    reason = search.reason.removesuffix(TOO_EARLY)
    why, takes = "" if reason in verdict else f": {reason}", search.reason.removeprefix(reason)
    if more := search.more_requests:
        takes = f"; {requests_in_all(search.requests, more)} would reach it"
    return f"The precision asked for, {100 * search.precision:.2g} %, was not reached{why}{takes}."
