"""A burst whose queue can be worked out by hand: the fluid model of one server that takes 0.1 s for
each request.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ampacity.analysis.burst.advice import find_harm
from ampacity.analysis.burst.recovery import Level, _Base, slower_p
from ampacity.analysis.burst.timeline import fallen_s
from ampacity.analysis.contract.burst import Burst, Harm
from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.next_run import next_command
from ampacity.analysis.slo import parse_slo
from ampacity.loadgen.rundir.files import Run
from ampacity.reports.charts.burst import burst_findings, burst_queue, burst_ttft
from ampacity.reports.pages.run_report import render_report
from tests.support.contract import summarise
from tests.support.synthetic import Stage, at_ns, cohort, make_run, request

PLAN = json.loads("""{"base_rps": 5.0, "factor": 3.0, "base_s": 30.0, "burst_s": 10.0,
    "recovery_s": 50.0, "shape": "step"}""")


def burst_run(
    path: Path,
    *,
    service_s: float = 0.1,
    fail_above_s: float = np.inf,
    recovery_s: float = 50.0,
    cut_s: float | None = None,
    kill_s: float = np.inf,
    stuck: tuple[float, float] = (0.0, 0.0),
) -> Run:
    """5/s for 30 s, 15/s for 10 s, 5/s again, evenly spaced, in front of one server in order of
    arrival.

    ``cut_s``: Ctrl-C, then; ``kill_s``: what is not answered by then has no record. ``stuck``:
    nothing is begun then."""
    end = 40 + recovery_s
    times = np.concatenate(
        [np.arange(0, 30, 0.2), np.arange(30, 40, 1 / 15), np.arange(40, end, 0.2)]
    )
    free, records = 0.0, []
    for i, t in enumerate(times[times < (cut_s or end)].tolist()):
        if stuck[0] <= max(free, t) < stuck[1]:
            free = stuck[1]
        if max(free, t) + service_s > kill_s:
            break
        if cut_s and max(free, t) + service_s > cut_s:
            records.append(request(i, t, ttft_s=None, status="unfinished", ended_ns=at_ns(cut_s)))
            continue
        if max(free, t) + service_s - t > fail_above_s:  # refused: it would wait too long
            records.append(request(i, t, ttft_s=None, status="http_error"))
            continue
        free = max(free, t) + service_s
        records.append(request(i, t, ttft_s=free - t))
    early = "interrupted by Ctrl-C" if cut_s else None
    stage = Stage(records, cut_s or end, offered_rps=len(records) / end, ended_early=early)
    how = {"burst": PLAN | {"recovery_s": recovery_s}, "warmup_requests": 0, "experiment": "burst"}
    return make_run(path, [stage], ["ttft_p99=2s"], killed=kill_s < np.inf, **how)


def test_the_fluid_model_says_when_it_is_over(tmp_path: Path) -> None:
    summary = summarise(burst_run(tmp_path / "run"))
    b = summary["burst"]
    (stage,) = summary["stages"]  # it has no one load: the phases count the misses
    assert (stage["slo_met"], stage["slo_verdicts"]) == (None, [])
    assert "its phases count" in stage["slo_met_reason"]
    assert "Goodput peaks" not in render_report(read_summary(summary), {})
    # (15 - 10) x 10 s = 50 pile up, the last of the burst waits 50 x 0.1 s, and 50 / (10 - 5) = 10
    # s drain it
    assert [p["requests"] for p in b["phases"]] == [150, 150, 250]
    assert b["peak_ttft_s"] == pytest.approx(5.1, abs=0.1)
    assert b["peak_ttft_at_s"] == pytest.approx(40, abs=0.2)
    assert b["peak_in_flight"] == pytest.approx(50, abs=2)
    assert b["resolution_s"] == 2.0
    # nobody is there any more once the 150th of the burst and the 50 after it are served: 10 s
    # after its end
    assert b["recovery_s"] == pytest.approx(10, abs=0.3)
    assert b["base_level"]["in_flight"] == pytest.approx(0.5, abs=0.01)
    # more than 0.5 + 2 sqrt(0.5) = 1.9 are there until the queue is down to one: (50 - 1) / 5
    assert b["recovery_ci_s"] == [pytest.approx(9.7, abs=0.3), b["recovery_s"]]
    assert b["backlog"]["served_rps"] == pytest.approx(10, rel=0.03)
    assert b["backlog"]["base_waiting"] == pytest.approx(0.5, abs=0.01)  # Little: 5/s x 0.1 s
    assert b["backlog"]["at_end_of_burst"] == pytest.approx(49.5, abs=1)
    assert b["backlog"]["drained"] is True
    assert b["backlog"]["drained_s"] == pytest.approx(9.9, abs=0.3)
    assert b["backlog"]["fall_rps"] == pytest.approx(5, abs=0.2)
    assert b["backlog"]["further_s"] is None
    # TTFT passes 2 s once 20 wait: 4 s into the burst, until the queue is down to 20 again, 6 s
    # after it
    misses = [p["slo_misses"] for p in b["phases"]]
    assert misses[0] == 0
    assert misses[1] == pytest.approx(6 * 15, abs=4)
    assert misses[2] == pytest.approx(6 * 5, abs=3)
    assert b["slo_misses"] == misses[1] + misses[2]
    assert (b["lost"], b["unfinished"]) == (0, 0)
    # 2 s less the 0.1 s that an idle server takes may be waited: 15 x 10 / (10 + 1.9) would have
    # been enough
    assert b["headroom"]["needed_rps"] == pytest.approx(150 / 11.9, rel=0.01)
    assert b["headroom"]["factor"] == pytest.approx(150 / 11.9 / 10, rel=0.03)
    assert b["headroom"]["enough"] is False
    assert b["breaker"]["max_depth"] == pytest.approx(19, abs=1)  # 1.9 s x 10/s
    depth = b["breaker"]["max_depth"]
    assert b["breaker"]["open_at"] == [depth * 8 // 10, depth * 9 // 10]
    assert "burst" in summary["verdict"]
    assert "10" in summary["verdict"]


def test_a_server_with_room_to_spare_shows_nothing(tmp_path: Path) -> None:
    b = summarise(burst_run(tmp_path / "run", service_s=0.05))["burst"]
    assert b["recovery_s"] == pytest.approx(0, abs=0.1)
    assert b["backlog"]["drained"] is True
    assert b["backlog"]["served_rps"] is None
    assert b["headroom"]["enough"] is True
    assert b["slo_misses"] == 0
    # what the server can do was not seen: 20/s, of which 15 were asked
    assert (b["breaker"]["open_at"], b["breaker"]["rate_rps"]) == (None, None)
    assert "at least 15 req/s" in b["breaker"]["reason"]


def even(rates: tuple[float, float, float]) -> list[float]:
    """Evenly spaced moments: 30 s, 10 s and 50 s at each of the rates."""
    spans = zip((0, 30, 40), (30, 40, 90), rates, strict=True)
    return [t for a, b, rate in spans for t in np.arange(a, b, 1 / rate).tolist()]


def burst_of(path: Path, records: list[Any]) -> dict[str, Any]:
    stage = Stage(records, 90, offered_rps=len(records) / 90)
    how = {"burst": PLAN, "warmup_requests": 0, "experiment": "burst"}
    return summarise(make_run(path, [stage], ["ttft_p99=2s"], **how))


FAILED = {"ttft_s": None, "status": "http_error"}


def burst_with(path: Path, how: Callable[[int, float], dict[str, Any]]) -> dict[str, Any]:
    """5/s, 15/s and 5/s; ``how`` says of request i, due at t, how it differs from the others."""
    return burst_of(path, [request(i, t, **how(i, t)) for i, t in enumerate(even((5, 15, 5)))])


@pytest.mark.parametrize("in_base", [0, 1])
def test_with_no_request_in_its_base_a_burst_is_not_compared_with_it(
    tmp_path: Path, in_base: int
) -> None:
    """15/s in front of a server of 10/s; before that nothing, or one request in the first fifth,
    which is left out."""
    free, records = 0.0, []
    for i, t in enumerate([0.0, *even((5, 15, 0.5))[150:]][1 - in_base :]):
        free = max(free, t) + 0.1
        records.append(request(i, t, ttft_s=free - t))
    summary = burst_of(tmp_path / "run", records)
    b = summary["burst"]
    assert [p["requests"] for p in b["phases"]] == [in_base, 150, 25]
    few = "the settled base phase has 0 requests: 30 are needed to know what to come back to"
    assert (b["base_level"], b["recovery_s"], b["recovery_ci_s"]) == ({}, None, [None, None])
    assert b["recovery_reason"] == few
    assert f"; when it recovered is not known: {few};" in summary["verdict"]
    assert "base load" not in summary["verdict"]
    assert b["backlog"]["base_waiting"] is None
    assert b["backlog"]["drained_s"] == pytest.approx(50 / (10 - 0.5), abs=0.3)
    found = {f.label: f for f in burst_findings(msgspec.convert(b, Burst))}
    assert "base load" not in " ".join(f.note for f in found.values())
    assert "when the burst ended; none did 5" in found["Backlog"].note
    for draw, what in ((burst_ttft, "TTFT"), (burst_queue, "The count in flight")):
        chart = draw(read_summary(summary))
        assert chart.title == f"{what}: when the endpoint recovered is not known"
    # what the limit of 2 s leaves for a wait is not known, so neither is what would have been
    # enough
    assert (b["headroom"]["needed_rps"], b["headroom"]["factor"]) == (None, None)
    assert b["headroom"]["reason"].endswith("of 150 requests missed ttft_p99=2s")
    assert b["breaker"]["reason"] == (
        "too few requests were answered in the base phase to know how long one may wait within "
        "ttft_p99=2s"
    )
    ttft = b["phases"][2]["ttft_s"]  # as of a stage: p95 needs 59 (0.95^59 < 5 %)
    most = pytest.approx(5.1, abs=0.1)
    assert ttft == {"n": 25, "p50": pytest.approx(0.1), "p95": None, "max": most}


def test_more_in_flight_at_a_higher_rate_is_no_queue(tmp_path: Path) -> None:
    # 0.1 s to the first token and 2 s in all, at any rate: 10 in flight become 30, and 1.5 of them
    # wait, as Little has it
    b = burst_with(tmp_path / "run", lambda i, t: {"gaps_s": [1.9]})["burst"]
    assert b["peak_in_flight"] == pytest.approx(30, abs=1)
    assert b["backlog"]["at_end_of_burst"] <= 1.5
    assert (b["backlog"]["served_rps"], b["backlog"]["drained_s"]) == (None, None)
    assert (b["headroom"]["enough"], b["breaker"]["open_at"]) == (True, None)
    assert b["recovery_s"] == pytest.approx(2, abs=0.3)  # the last of the burst ends 2 s after it


def test_requests_pile_up_in_flight_without_a_queue(tmp_path: Path) -> None:
    """An answer takes 1 s, but one in three of the burst ends at 52 s.

    One of 15 has its first token after 3 s, the others after 0.1 s."""
    records = []
    for i, t in enumerate(even((5, 15, 5))):
        long = 30 <= t < 40 and i % 3 == 0
        ttft_s, end_s = 3.0 if long and i % 15 == 0 else 0.1, 52 - t if long else 1.0
        records.append(request(i, t, ttft_s=ttft_s, gaps_s=[end_s - ttft_s]))
    summary = burst_of(tmp_path / "run", records)
    b = summary["burst"]
    assert b["backlog"]["served_rps"] is None
    assert b["backlog"]["piled_up"] == 60  # 5/s for 10 s, and 10/s for 1 s
    # 10/s for 9 s, and the last 5 of the base
    text = "requests pile up in flight: 60 at most, 9.5/s answered of 15 offered"
    assert b["backlog"]["reason"] == text
    found = {f.label: f for f in burst_findings(msgspec.convert(b, Burst))}
    assert (found["Backlog"].value, found["Backlog"].state) == ("60 in flight", "bad")
    assert "by how much is not known" in found["Headroom"].note
    assert "limit those in flight" in b["breaker"]["reason"]
    command = "ampacity burst http://h/v1 --base-rps 5 --burst-duration 10s --slo ttft_p99=2s"
    meta = {"command_line": command.split()}
    sweep = "ampacity sweep http://h/v1 --slo ttft_p99=2s"
    assert next_command(read_summary(summary | {"partial": None}), meta, "run") == sweep
    page = render_report(read_summary(summary), meta)
    assert "Run a sweep to see what limits it:</p>" in page
    assert f'id="sweep-command">{sweep}<' in page
    assert "Nothing that this run shows" not in page


def test_what_fails_without_a_queue_is_not_enough_head_room(tmp_path: Path) -> None:
    some = lambda i, t: FAILED if 30 <= t < 40 and i % 3 == 0 else {}  # noqa: E731
    summary = burst_with(tmp_path / "run", some)
    b = summary["burst"]
    assert b["lost"] == 50
    held = b["headroom"]["enough"], b["headroom"]["reason"]
    assert held == (False, "in the burst 50 of 150 requests failed")
    assert "was not carried: 50 of 150 requests failed" in summary["verdict"]
    assert burst_findings(msgspec.convert(b, Burst))[4].value == "not enough"
    # of 15/s 10 are answered, and 2 s less the base's 0.1 may be waited: 19
    assert b["breaker"]["rate_rps"] == pytest.approx(10, rel=0.02)
    assert b["breaker"]["max_depth"] == pytest.approx(19, abs=1)


@pytest.mark.parametrize("until_s", [40, 90])
def test_a_burst_of_which_nothing_is_answered_was_not_carried(
    tmp_path: Path, until_s: float
) -> None:
    summary = burst_with(tmp_path / "run", lambda i, t: FAILED if 30 <= t < until_s else {})
    assert summary["burst"]["headroom"]["enough"] is False
    assert summary["burst"]["breaker"]["open_at"] is None
    assert "was not carried: 150 of 150 requests failed" in summary["verdict"]
    assert "not known: nothing of the burst was answered" in summary["verdict"]


def test_a_burst_after_which_requests_go_on_failing_is_not_got_over(tmp_path: Path) -> None:
    # from 30 s on each third fails, to the end: of the 250 due after the burst numbers 300, 303 ...
    # 549
    summary = burst_with(tmp_path / "run", lambda i, t: FAILED if t >= 30 and i % 3 == 0 else {})
    assert "TTFT of those due since is above the base's: 33% against 0%" in summary["verdict"]


def test_a_server_that_dies_after_the_burst_had_no_known_head_room(tmp_path: Path) -> None:
    summary = burst_with(tmp_path / "run", lambda i, t: FAILED if t >= 40 else {})
    held = summary["burst"]["headroom"]
    assert (held["enough"], held["reason"]) == (None, "the burst was not seen to end")


def test_a_base_that_is_too_short_is_why_the_rest_is_not_known(tmp_path: Path) -> None:
    # the settled 24 s hold 4.8 answers of 5 s: 5/s of them are 25 in flight, once the first are
    # there
    b = burst_with(tmp_path / "run", lambda i, t: {"gaps_s": [4.9]})["burst"]
    assert b["recovery_reason"] == (
        "the base phase is too short to know what to come back to: it lasts 4.8 mean answer times, "
        "10 are needed; raise --base-duration"
    )
    why = "the base phase is too short to know when the burst is over"
    assert (b["headroom"]["enough"], b["headroom"]["reason"]) == (None, why)


def test_a_base_whose_requests_in_flight_vary_is_too_short() -> None:
    in_flight = Level(mean=2.0, half=1.0, spread=1.0)  # 1 of 2 is ± 50 %
    base = _Base(24.0, 120, in_flight, in_flight, 2.0, np.ones(120))
    assert base.too_short() == (
        "the base phase is too short to know what to come back to: its mean of 2 in flight is "
        "known to ± 50 % only, ± 45 % is needed; raise --base-duration"
    )
    assert _Base(24.0, 120, in_flight, Level(2.0, 0.9, 1.0), 2.0, np.ones(120)).too_short() is None


@pytest.mark.parametrize(
    ("tokens", "in_base", "expected"),
    [
        (1, 10, "had 10% of the planned tokens, those to the base 100%"),
        (20, 10, "had 200% of the planned tokens, those to the base 100%"),
        (5, 10, "had 50% of the planned tokens, those to the base 100%"),
        (5, 5, None),  # as short in the base: the same work, which the warning on lengths names
        (9, 10, None),  # a tenth less is within what a plan may be missed by
    ],
)
def test_a_burst_whose_answers_are_of_other_lengths_shows_no_headroom(
    tmp_path: Path, tokens: int, in_base: int, expected: str | None
) -> None:
    """Ten tokens are planned for each; nobody waits."""

    def how(_: int, t: float) -> dict[str, Any]:
        counted = tokens if 30 <= t < 40 else in_base
        return {"output_tokens_planned": 10, "output_tokens": counted, "chunk_tokens": [counted]}

    b = burst_with(tmp_path / "run", how)["burst"]
    if expected is None:
        assert (b["headroom"]["enough"], b["recovery_reason"]) == (True, None)
        return
    assert (b["headroom"]["enough"], b["recovery_s"], b["recovery_ci_s"]) == (
        None,
        None,
        [None, None],
    )
    assert b["headroom"]["reason"] == b["recovery_reason"]
    assert b["recovery_reason"].startswith(f"answers to the burst {expected}: it was not the work")


def test_a_delay_is_neither_a_queue_nor_enough(tmp_path: Path) -> None:
    # each of the burst takes 3 s, however many there are: 45 wait, 15/s are answered
    slow = lambda i, t: {"ttft_s": 3.0 if 30 <= t < 40 else 0.1}  # noqa: E731
    b = burst_with(tmp_path / "run", slow)["burst"]
    assert b["backlog"]["served_rps"] is None
    assert "a delay, no queue" in b["backlog"]["reason"]
    assert b["headroom"]["enough"] is False
    assert "150 of 150 requests missed ttft_p99=2s" in b["headroom"]["reason"]
    assert b["breaker"]["open_at"] is None


@pytest.mark.parametrize(("failed", "harmed"), [(23, False), (24, True)])
def test_harm_is_more_than_the_base_share_and_chance(failed: int, harmed: bool) -> None:
    # 10 of 100 fail in the base: of 100 more 10 are expected, and 3 sqrt(10 x (1 + 100/100)) = 13.4
    # by chance
    def part(n: int) -> Any:
        return cohort(
            *(request(i, i * 0.1, status="http_error" if i < n else "ok") for i in range(100))
        )

    found = find_harm(part(failed), part(10), [])
    assert (found is not None) is harmed
    base_alone = find_harm(part(10), part(0), [])  # 1 % allowed: 1 + 3 sqrt(1 x 2) = 5.2
    assert base_alone == Harm(slo="error_rate=1%", reason="10 of 100 requests failed")
    assert find_harm(part(10), part(0), [parse_slo("error_rate=10%")]) is None


def test_what_the_workload_cancelled_is_left_out(tmp_path: Path) -> None:
    left = {"ttft_s": None, "status": "cancelled"}
    b = burst_with(tmp_path / "run", lambda i, t: {} if i % 3 else left)["burst"]
    assert (b["slo_misses"], b["slo_misses_of_base"], b["headroom"]["enough"]) == (0, 0, True)
    assert [(p["slo_misses"], p["slo_attainment"]) for p in b["phases"]] == [(0, 1.0)] * 3
    assert b["phases"][1]["ttft_s"]["n"] == 100


def test_a_percentile_that_unfinished_requests_reach_into_is_not_known(tmp_path: Path) -> None:
    # 60 of the burst's 150 were cut off at 100 s, as old as 60 s: rank 75 is an answer's, rank 143
    # is not
    cut = {"ttft_s": None, "status": "unfinished", "ended_ns": at_ns(100)}
    some = lambda i, t: cut if 30 <= t < 40 and i % 5 < 2 else {}  # noqa: E731
    summary = burst_with(tmp_path / "run", some)
    phase = summary["burst"]["phases"][1]
    assert phase["ttft_s"] == {"n": 150, "p50": pytest.approx(0.1), "p95": None, "max": None}
    assert phase["e2e_s"]["p95"] is None
    assert "60 requests violated an SLO; none was lost, 60 cut off unfinished" in summary["verdict"]


def test_a_slow_request_long_after_the_burst_is_not_blamed_on_it(tmp_path: Path) -> None:
    times = even((5, 15, 5))
    late = next(i for i, t in enumerate(times) if t >= 80)
    early = next(i for i, t in enumerate(times) if t >= 35)
    slow_s = {10: 0.9, early: 0.5, late: 0.7}  # one of the base's is the slowest of all
    summary = burst_with(tmp_path / "run", lambda i, t: {"ttft_s": slow_s.get(i, 0.1)})
    b = summary["burst"]
    assert (b["peak_ttft_s"], b["later_ttft_s"]) == pytest.approx((0.5, 0.7))
    assert b["later_ttft_at_s"] == pytest.approx(80, abs=0.01)
    assert "TTFT up to 500 ms (the base load up to 900 ms)" in summary["verdict"]
    note = burst_findings(msgspec.convert(b, Burst))[0].note
    assert "700 ms of one due 80.0 s after the start" in note


def test_answers_in_one_piece_wait_until_they_are_there(tmp_path: Path) -> None:
    # 0.2 s each at any rate, and no first token: what is in flight is all that is known
    whole = {"first_token_ns": None, "gaps_s": [0.1]}
    summary = burst_with(tmp_path / "run", lambda i, t: whole)
    assert summary["burst"]["recovery_s"] == pytest.approx(0.2, abs=0.2)
    assert "the endpoint recovered" in summary["verdict"]
    assert summary["burst"]["backlog"]["served_rps"] is None


def test_what_the_base_load_breaks_is_told_beside_what_the_burst_broke(tmp_path: Path) -> None:
    # every tenth request takes 3 s at any rate: 15 of the base's 150, and so 40 of the 400 that
    # follow
    summary = burst_with(tmp_path / "run", lambda i, t: {"ttft_s": 0.1 if i % 10 else 3.0})
    b = summary["burst"]
    assert (b["slo_misses"], b["slo_misses_of_base"]) == (40, pytest.approx(40))
    assert "40 requests violated an SLO (40 would at the base load's share)" in summary["verdict"]
    note = burst_findings(msgspec.convert(b, Burst))[3].note
    told = "of the base 15 violated an SLO (at that share 40.0 would here)"
    assert note == f"of those due from the burst on; not counted: {told}"


def test_a_count_has_fallen_when_no_more_than_the_level_are_left() -> None:
    # of three that wait at 10 s one each leaves at 11, 14 and 15 s; one more is due at 12 s and
    # leaves at 16 s
    at, left = np.array([8.0, 8.5, 9.0, 12.0]), np.array([11.0, 14.0, 15.0, 16.0])
    assert fallen_s(at, left, 3.0, 10.0, 20.0) == 0.0
    assert fallen_s(at, left, 2.9, 10.0, 20.0) == 1.0
    assert fallen_s(at, left, 1.0, 10.0, 20.0) == 5.0  # at 12 s there are three again
    assert fallen_s(at, left, 0.0, 10.0, 20.0) == 6.0
    assert fallen_s(at, left, 0.0, 10.0, 15.5) is None  # while there was load


def test_slow_requests_are_compared_by_parts() -> None:
    # of parts of 20 a tenth is slow before, three tenths since: no spread between parts, so the
    # binomial one of 0.2:
    # sqrt(2 x 0.16 / 160) = 0.0447, t = 0.2 / 0.0447 = 4.47 with 14 degrees of freedom: p = 0.00026
    before, since = (np.tile(np.arange(20) < n, 8) for n in (2, 6))
    assert slower_p(before, since) == pytest.approx(0.00026, rel=0.05)
    assert slower_p(since, before) == 1.0
    # in one part all are slow, in the others none: 1/8 against none, with s / sqrt(8) = 1/8 and the
    # binomial sqrt(0.0625 x 0.9375 / 160) = 0.019: t(14) = 0.125 / 0.1265 = 0.99
    jam = np.repeat(np.arange(8) == 3, 20)
    assert slower_p(np.zeros(160, bool), jam) == pytest.approx(0.17, abs=0.001)


def test_slower_after_the_burst_is_not_got_over(tmp_path: Path) -> None:
    # the queue is gone at once, but each request takes 0.15 s to its first token instead of 0.1
    late = lambda i, t: {"ttft_s": 0.15 if t >= 40 else 0.1}  # noqa: E731
    b = burst_with(tmp_path / "run", late)["burst"]
    assert b["recovery_s"] is None
    said = "TTFT of those due since is above the base's: 100% against 0% take more than 0.11 s"
    assert said in b["recovery_reason"]
