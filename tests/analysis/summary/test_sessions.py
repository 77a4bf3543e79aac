"""Session metrics on a case worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.sessions import NO_SESSIONS
from tests.support.contract import summarise
from tests.support.synthetic import Stage, make_run, request


def turn(number: int, session: int, turn: int, at_s: float, lasts_s: float, **columns: Any) -> Any:
    """A turn of 2 tokens: the first halfway through. ``input_tokens`` 100 for each turn so far, 64
    of them cached."""
    columns = {"input_tokens": 100 * (turn + 1), "cached_tokens": 64 * turn} | columns
    return request(
        number,
        at_s,
        ttft_s=lasts_s / 2,
        gaps_s=[lasts_s / 2],
        session_id=f"0-{session}",
        turn=turn,
        **columns,
    )


def by_hand() -> list[Any]:
    return [
        # 0: begins at 1, turns of 1 s, 2 s of pause: [1, 2] [4, 5] -> 4 s, of which busy 2 s
        turn(0, 0, 0, 1.0, 1.0),
        turn(3, 0, 1, 4.0, 1.0),
        # 1: begins at 2; two helpers at once: [2, 3] [3, 5] [3, 4] [5, 6] -> 4 s, all of it busy
        turn(1, 1, 0, 2.0, 1.0),
        turn(4, 1, 1, 3.0, 2.0),
        turn(5, 1, 2, 3.0, 1.0),
        turn(6, 1, 3, 5.0, 1.0),
        # 2: begins at 3; its second turn fails, its third is given up
        turn(2, 2, 0, 3.0, 1.0),
        turn(7, 2, 1, 5.0, 1.0, status="timeout"),
        turn(8, 2, 2, 6.0, 1.0, status="cancelled"),
        # 3: begins at 6, its second turn violates the SLO: [6, 7] [7, 11] -> 5 s
        turn(9, 3, 0, 6.0, 1.0),
        turn(10, 3, 1, 7.0, 4.0),
        # 4: begins at 8, was cut off by the end of the run
        turn(11, 4, 0, 8.0, 1.0),
        # 5: begins behind the stage's end: of no cohort
        turn(12, 5, 0, 12.0, 1.0),
    ]


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    stage = Stage(
        by_hand(),
        10.0,
        extra={"sessions": {"begun": 6, "cut": ["0-4"]}, "cached_share_planned": 0.5},
    )
    return summarise(make_run(tmp_path / "run", [stage], ["e2e_p50=2s"], warmup_requests=0))


def test_a_case_worked_out_by_hand(summary: dict[str, Any]) -> None:
    (stage,) = summary["sessions"]["stages"]
    assert {name: stage[name] for name in ("sessions", "complete", "failed", "cut")} == json.loads("""{"sessions": 5,
        "complete": 3, "failed": 1, "cut": 1}""")
    assert stage["arrived_per_s"] == pytest.approx(0.5)  # 5 in 10 s
    # complete ones take 4, 4 and 5 s; a failed one is infinite, one cut off after 1 s is longer
    # than that
    assert stage["session_s"]["n"] == 5
    assert stage["session_s"]["infinite"] == 1
    assert stage["session_s"]["censored"] == 1
    assert stage["session_s"]["mean"] == pytest.approx(13 / 3)
    assert stage["session_s"]["p50_bounds"] == pytest.approx([4.0, 5.0])
    assert stage["busy_s"]["mean"] == pytest.approx((2 + 4 + 5) / 3)
    # met: sessions 0 and 1; 2 failed, 3 was too slow, 4 is not over
    assert stage["goodput_per_s"] == pytest.approx(0.2)
    assert stage["attainment"] == pytest.approx(0.4)


def test_sessions_at_once(summary: dict[str, Any]) -> None:
    (stage,) = summary["sessions"]["stages"]
    # open in [0, 10]: 0 for 4 s, 1 for 4, 2 from 3 to its last end at 7, 3 from 6 to 10, 4 for 1
    assert stage["concurrent"]["mean"] == pytest.approx((4 + 4 + 4 + 4 + 1) / 10)
    assert stage["concurrent"]["max"] == 3  # at 4.5: sessions 0, 1, 2


def test_tokens_and_turns(summary: dict[str, Any]) -> None:
    (stage,) = summary["sessions"]["stages"]
    # complete: 100 + 200; 100 + 200 + 300 + 400; 100 + 200
    assert stage["input_tokens"]["mean"] == pytest.approx((300 + 1000 + 300) / 3)
    assert stage["largest_prompt_tokens"]["max"] == 400
    assert stage["output_tokens"]["p50"] == 4
    assert stage["requests"]["mean"] == pytest.approx(8 / 3)
    first, second, third, fourth = stage["per_turn"]
    assert [t["turns"] for t in stage["per_turn"]] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert [t["requests"] for t in stage["per_turn"]] == [5, 4, 2, 1]
    assert [t["ok"] for t in stage["per_turn"]] == [5, 3, 1, 1]
    assert [first["cached_share"], second["cached_share"]] == pytest.approx([0.0, 64 / 200])
    assert second["e2e_from_schedule_s"]["p50"] == pytest.approx(2.0)  # of 1, 2 and 4
    assert third["ttft_from_schedule_s"]["mean"] == pytest.approx(0.5)
    assert fourth["input_tokens"]["mean"] == 400


def test_planned_sharing_stands_beside_the_realised(summary: dict[str, Any]) -> None:
    # good answers: 6 first turns of 100, 3 second ones of 200 with 64, a third with 128 and a
    # fourth with 192
    realised = (3 * 64 + 128 + 192) / (600 + 600 + 300 + 400)
    assert summary["sharing"] == [{"stage": 0, "planned": 0.5, "realised": pytest.approx(realised)}]


def test_how_many_sessions_fit_is_said_or_why_not(tmp_path: Path) -> None:
    def run(name: str, slos: list[str]) -> Any:
        records = [
            turn(2 * i + k, i, k, 0.05 * i + 0.2 * k, 0.1) for i in range(200) for k in (0, 1)
        ]
        stage = Stage(records, 10.0, extra={"sessions": {"begun": 200, "cut": []}})
        return summarise(make_run(tmp_path / name, [stage], slos, warmup_requests=0))["sessions"][
            "fit"
        ]

    fit = run("met", ["e2e_p90=1s"])
    # 20 sessions/s of 0.3 s each, but for the ends of the window
    assert fit["stage"] == 0
    assert fit["concurrent_sessions"] == pytest.approx(20 * 0.3, rel=0.02)
    assert fit["sessions_per_s"] == pytest.approx(20.0)
    assert run("violated", ["e2e_p90=10ms"])["reason"] == "no stage met the SLOs"
    assert run("none", [])["reason"] == "no SLO given"


def test_no_sessions_no_section(tmp_path: Path) -> None:
    summary = summarise(
        make_run(tmp_path / "run", [Stage([request(i, 0.1 * i) for i in range(50)], 5.0)])
    )
    assert summary["sessions"] is None
    assert summary["sessions_reason"] == NO_SESSIONS
    assert summary["sharing"] is None


def test_a_killed_run_says_that_it_does_not_know_what_was_cut(tmp_path: Path) -> None:
    stage = Stage(by_hand(), 10.0, scheduled_requests=100, extra={"played_sessions": True})
    summary = summarise(make_run(tmp_path / "run", [stage], killed=True, status="running"))
    assert "not come to its end" in summary["sessions"]["stages"][0]["cut_reason"]
    assert summary["requests"] == 13  # what was due of the rest, nobody knows: nothing is made up
