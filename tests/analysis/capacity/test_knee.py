"""The knee: between which loads p99 parts from p50, whatever lies beyond; and where the asymptotic
bounds meet.
"""

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ampacity.analysis.capacity.knee import find_knee
from ampacity.analysis.stats.scalability import corner_of_bounds
from benchmarks.studies.knee_hits import sweep
from tests.support.contract import on_stages
from tests.support.repeats import often

find_knee = on_stages(find_knee)


def stage(
    load: float,
    ratio: float | None,
    *,
    users: bool = False,
    stable: bool = True,
    noise: float = 0.1,
) -> dict[str, Any]:
    """A stage of p50 0.1 s whose p99 is ``ratio`` times that, known to ``noise``; None: too short
    for a p99."""
    figures: dict[str, Any] = json.loads("""{"p50": 0.1, "p90": 0.14, "p95": 0.15,
        "p99": null, "p99_reason": "needs 299 requests, has 90"}""")
    if ratio is not None:
        p99 = 0.1 * ratio
        ends = [p99 * (1 - noise), p99 * (1 + noise)]
        figures |= {
            "p90": 0.14,
            "p95": min(p99, 0.15),
            "p99": p99,
            "p99_ci": ends,
            "p99_reason": None,
        }
    return {
        "kind": "closed" if users else "open",
        "offered_rps": None if users else load,
        "concurrency_set": load if users else None,
        "client_limited": False,
        "requests": 1000,
        "stable": stable,
        "concurrency": load if users else 2 * load,
        "achieved_rps": min(load, 200.0),
        "arrived_rps": min(load, 200.0) if users else load,
        "carried_rps": min(load, 200.0) if users else load,
        "ttft_from_schedule_s": figures,
        "e2e_from_schedule_s": figures,
    }


LOW = [(16, 2.9), (32, 3.0), (64, 3.0), (128, 3.1), (192, 3.2)]


@pytest.mark.parametrize("users", [True, False])
def test_the_knee_lies_between_the_loads_where_p99_parts_whatever_lies_beyond(users: bool) -> None:
    """p99/p50 goes from 3.2 to 99 between 192 and 256; past saturation p50 catches up and the ratio
    falls again."""
    stages = [stage(n, r, users=users) for n, r in [*LOW, (256, 99)]]
    knee = find_knee(stages)
    scale = 1 if users else 2
    assert knee.region == (192 * scale, 256 * scale)
    assert knee.region_rps == ((192, 200) if users else (192, 256))
    assert knee.reason is None
    definition = knee.methods["p99_p50_divergence"].definition
    assert "p99/p50 of ttft_from_schedule_s, 2 times the 3.00 of the lowest loads" in definition
    # 3.2 -> 99 passes 6 at ln(6/3.2)/ln(99/3.2) = 0.183 of the step, on a log scale
    assert knee.concurrency == pytest.approx(192 * scale * (256 / 192) ** 0.1832, rel=1e-3)
    for beyond in (
        [(384, 5.0), (512, 2.0), (768, 1.5)],
        [(384, None)],
        [(384, float("inf"))],
        [(384, 3.0), (500, 3.0), (600, 90.0)],
    ):
        more = [stage(n, r, users=users, stable=users) for n, r in beyond]
        assert replace(find_knee(more + stages), methods={}) == replace(knee, methods={})


def test_a_first_stage_without_p99_does_not_lift_the_level() -> None:
    """The lowest stage that has one gives p99's level; the lowest that has p95 alone makes p95 the
    one to judge by."""
    stages = [stage(8, None), *(stage(n, r) for n, r in [*LOW, (256, 99)])]
    for s, p95 in zip(stages, (0.15, 0.15, 0.15, 0.15, 0.16, 0.16, 2.0), strict=True):
        s["ttft_from_schedule_s"] |= {"p95": p95, "p90": p95 * 0.9}
    found = find_knee(stages)
    assert found.region[1] == 512
    assert found.region[0] >= 2 * 64  # 192 is below, and two loads before it may be quiet by chance
    assert "p95/p50" in found.methods["p99_p50_divergence"].definition
    stages[0]["ttft_from_schedule_s"] |= {"p95": None}
    assert find_knee(stages).region == (384, 512)


def test_a_ratio_in_doubt_widens_the_region_and_names_no_knee_alone() -> None:
    noisy = [stage(n, r) for n, r in LOW] + [stage(224, 7.0, noise=0.6), stage(256, 99)]
    assert find_knee(noisy).region == (384, 512)  # 2.8 to 11.2 lies on both sides of 6
    known = find_knee(noisy[:-1])
    assert (known.concurrency, known.region) == (None, None)
    assert (
        known.reason
        == "in doubt: p99/p50 of ttft_from_schedule_s is 3.00 at the lowest loads and 7.00 at 448 "
        "in flight, too few requests to tell if it has doubled: use longer stages"
    )


def test_failures_in_the_tail_are_a_knee_where_they_begin() -> None:
    failed = stage(256, None)
    failed["ttft_from_schedule_s"] |= {"p99_reason": "infinite: 9 of 300 requests failed"}
    found = find_knee([stage(n, r) for n, r in LOW] + [failed])
    assert found.region == (384, 512)
    assert found.concurrency == pytest.approx((384 * 512) ** 0.5)  # the middle of an infinite step


def test_the_region_is_that_of_all_stages_on_sweeps_of_a_batching_server() -> None:
    """600 sweeps on each server: docs/methods.md. True p95/p50 passes twice its low-load level at
    8.8 in flight."""
    named, held, n = 0, 0, often(6, 12)
    for k in range(n):
        stages, beyond = sweep("batch", np.random.default_rng([7, k]))
        knee, more = find_knee(stages), find_knee(stages + beyond)
        if knee.region is not None:
            assert more.region == knee.region
            named += 1
            held += knee.region[0] <= 8.8 <= knee.region[1]
    assert named >= n / 4
    assert held >= named - 1


def test_bounds_meet_at_demand_over_the_bottleneck() -> None:
    # bottleneck 0.1 s, 0.9 s elsewhere without queueing: N* = 1.0 / 0.1 = 10
    x = np.array([1, 2, 3, 5, 10, 20, 40, 80.0])
    y = np.minimum(10.0, x / 1.0)
    assert corner_of_bounds(x, y, saturated=False) == pytest.approx((10.0, 10.0))
    assert corner_of_bounds(x[:4], y[:4], saturated=False) is None  # still growing


def wide(load: float, ratio: float, **changes: Any) -> dict[str, Any]:
    """A stage whose p99 has no known upper end."""
    made = stage(load, ratio)
    low, _ = made["ttft_from_schedule_s"]["p99_ci"]
    figures = {**made["ttft_from_schedule_s"], "p99_ci": [low, None]}
    return made | {"ttft_from_schedule_s": figures, "e2e_from_schedule_s": figures} | changes


def test_one_quiet_load_counts_where_p99_is_known_and_two_where_only_p95_is() -> None:
    """3.0, 3.0, 3.0, 3.0, then 99: clearly below at 128, so that the region begins one load before;
    by p95 two."""
    loads = [(16, 3.0), (32, 3.0), (64, 3.0), (128, 3.0), (192, 99)]
    assert find_knee([wide(*one) for one in loads]).region_rps == (64, 192)

    def by_p95(load: float, ratio: float) -> dict[str, Any]:
        made = stage(load, None)
        figures = {**made["ttft_from_schedule_s"], "p90": 0.1 * ratio, "p95": 0.1 * ratio}
        return made | {"ttft_from_schedule_s": figures, "e2e_from_schedule_s": figures}

    assert find_knee([by_p95(*one) for one in loads]).region_rps == (32, 192)


def test_the_region_spans_what_arrived_by_chance() -> None:
    """Of the load that jammed 10 % more came than were offered, of the quiet one 5 % fewer."""
    stages = [stage(n, r) for n, r in LOW]
    stages[-1]["arrived_rps"] = 182.4
    jammed = stage(256, 99) | {"arrived_rps": 281.6}
    assert find_knee([*stages, jammed]).region_rps == (182.4, 281.6)


def test_a_knee_needs_four_stages() -> None:
    found = find_knee([stage(n, r) for n, r in LOW[:3]])
    assert (found.concurrency, found.reason) == (None, "needs 4 usable stages, has 3")
    limited = [stage(n, r) | {"client_limited": True} for n, r in LOW]
    assert find_knee(limited).concurrency is None


def test_no_knee_where_nothing_diverges() -> None:
    """All requests take ever longer, p50 as p99; nor does throughput bend."""
    found = find_knee([stage(2.0**i, 2.0) for i in range(6)])
    assert (found.concurrency, found.region, found.rps) == (None, None, None)
    assert str(found.reason).startswith("not reached: ")
    assert "still growing" in str(found.methods["bounds"].reason)
