"""The lines that are printed while a run goes on."""

from typing import Any

import pyarrow as pa
import pytest

from ampacity.experiments.stages.rules import all_failed
from ampacity.live_panel import live_line
from ampacity.loadgen.plan import Live, LiveTimes
from ampacity.progress import stage_line
from tests.support.contract import on_stages
from tests.support.synthetic import request


def live(ttfts: int) -> Live:
    """TTFT of 0.1 s each; of a stage of 100 s at 6 requests/s in the mean."""
    found = Live(3, "open", 6.0, 0.0, 100.0, times=LiveTimes())
    for i in range(ttfts):
        found.count(request(i, 0.0))
    found.flush()
    found.released, found.ended, found.failed = 90, 70, 2
    return found


@pytest.mark.parametrize(
    ("ttfts", "said"),
    [
        (4, "TTFT p50 – p99 –"),
        (5, "TTFT p50 100 ms p99 –"),  # 0.5^5 < 5 %: fewer do not prove a median
        (298, "TTFT p50 100 ms p99 –"),
        (299, "TTFT p50 100 ms p99 100 ms"),  # 0.99^299 < 5 %
    ],
)
def test_a_percentile_of_the_live_line_needs_as_many_requests_as_a_stages(
    ttfts: int, said: str
) -> None:
    expected = f", {said}, 2 errors, 80 s left"
    assert expected in live_line(live(ttfts), (20.0, 90, 70), (10.0, 60, 60))


def test_the_live_line_says_what_is_sent_now_beside_the_mean() -> None:
    """In a burst: 30 requests in 10 s sent, 10 ended."""
    assert live_line(live(0), (20.0, 90, 70), (10.0, 60, 60)).startswith(
        "stage 3: 6 req/s planned, 3.0 sent/s, 1.0 done/s, 20 in flight, "
    )


line_of = on_stages(stage_line)


def stage(
    verdicts: list[tuple[str, str | None]], met: bool | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "index": 0,
        "kind": "open",
        "offered_rps": 6.0,
        "requests": 70,
        "ttft_from_schedule_s": {"p50": 0.1},
        "itl_s": {},
        "errors": {},
        "stable": True,
        "client_limited": False,
        "lengths": None,
        "slo_met": met,
        "slo_verdicts": [{"verdict": verdict, "cause": cause} for verdict, cause in verdicts],
    } | more


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("p99 needs 299 requests", "too few requests"),
        ("slow gaps come in groups, so these are too few", "too few requests"),
        ("so near its limit that more requests are needed", "near its limit"),
        ("requests were cut off that may have met its limit or not", "cut off in flight"),
        (
            "the share of misses is on the edge of the SLO: no length is likely to decide",
            "on the edge",
        ),
        (
            "the first 5 requests, taken for a start-up, make the difference",
            "slow start-up (--warmup)",
        ),
        ("no request has a value", "no value"),
    ],
)
def test_the_line_of_a_stage_says_why_its_slo_is_inconclusive(cause: str, said: str) -> None:
    line = line_of(stage([("met", None), ("inconclusive", cause)]))
    assert line == (
        f"stage 0: 6 req/s, 70 requests, TTFT p50 100 ms p99 –, ITL p99 –, 0 errors, SLO "
        f"inconclusive ({said})"
    )


def test_the_line_of_a_stage_without_a_finding() -> None:
    assert line_of(stage([("met", None)], client_limited=True)).endswith(
        ", CLIENT LIMITED, no finding"
    )
    assert line_of(stage([])).endswith(", no SLO")
    assert line_of(stage([("met", None)], met=True)).endswith(", SLO met")


def test_the_line_of_a_burst_holds_no_verdict_of_one_load() -> None:
    whole = stage([("inconclusive", "too few requests")])
    assert "inconclusive" in line_of(whole)
    assert line_of(whole, burst=True).endswith("ITL p99 –, 0 errors")


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        (["unfinished"] * 3, "3 cut off unfinished"),
        (
            ["unfinished", "timeout", "reset"],
            "1 cut off unfinished; 2 failed, the first with timeout: why 1",
        ),
        (["reset", "ok"], None),
    ],
)
def test_a_request_that_was_cut_off_has_not_failed(statuses: list[str], said: str | None) -> None:
    errors = [f"why {i}" for i in range(len(statuses))]
    found = all_failed(pa.table({"status": statuses, "error": errors}), 3)
    assert found == (said and ("aborted", f"no request of stage 3 was answered: {said}"))
