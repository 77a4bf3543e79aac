"""Recorded agent sessions against the simulator with a prefix cache: six over a real socket, 60 (in
`make test-long` 200) in virtual time.

benchmarks.workloads.replay_sessions has 200 over a real socket."""

from pathlib import Path

import pytest

from benchmarks.workloads.replay_sessions import chosen, replay, replay_virtually
from tests.support.repeats import often


@pytest.mark.slow
def test_many_sessions_are_replayed_turn_for_turn(tmp_path: Path) -> None:
    """With every pause as recorded, 16 sessions at once: by the trace's own counts 92.519 % of the
    tokens (of 200 sessions 93.174 %) are those of the turn before, in blocks of 64."""
    sessions = often(60, 200)
    requests, own_share, pauses = {60: (1085, 0.92519, 1015), 200: (4306, 0.93174, 4074)}[sessions]
    held = chosen(sessions, 100_000)
    found = replay_virtually(held, users=16, folder=tmp_path)
    assert found["played_whole"] == found["sessions"] == sessions
    assert found["requests"] == sum(map(len, held.values())) == requests
    assert abs(found["wire_share"] - found["own_share"]) < 0.01
    assert found["own_share"] == pytest.approx(own_share, abs=5e-6)
    assert found["pauses"] == pauses
    assert found["pause_off_s"] < 1e-3
    assert found["in_order"]


def test_recorded_sessions_are_replayed_turn_for_turn(tmp_path: Path) -> None:
    held = chosen(6, 16_000)
    found = replay(held, users=6, max_think_s=0.05, folder=tmp_path)
    assert found["played_whole"] == found["sessions"] == 6
    assert found["requests"] == sum(map(len, held.values()))
    assert abs(found["wire_share"] - found["own_share"]) < 0.01
    assert found["own_share"] > 0.5
    assert found["pauses"] > 10
    # each pause is as recorded, to the nanosecond, from the end of the answer before
    assert found["pause_off_s"] == 0.0
    assert found["in_order"]
    run = found["run"]
    assert run["status"] == "complete"
    assert run["stages"][0]["sessions"] == {"begun": 6, "cut": []}
    assert run["workload"]["trace"]["sessions"] == 6
    assert abs(run["stages"][0]["cached_share_planned"] - found["own_share"]) < 0.01
    assert run["workload"]["prompts"].startswith("made-up text of the recorded lengths")
    assert any("pauses within sessions are cut to 0.05 s" in note for note in run["notes"])
