"""Virtual time with requests that wait for others, virtual users and shared prefixes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ampacity.cli import main
from ampacity.experiments.virtual import player
from ampacity.experiments.virtual.playback import play
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.models.hardware import linear_config
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import Schedule, open_schedule
from tests.support.args import Command

STEP_10_MS = Deployment(linear_config(0.010, 0.0))
# with a cache without limits
INSTANT = Deployment(replace(linear_config(1e-7, 0.0), prefix_caching=True))

SESSIONS = """
name: agents
input_tokens: 300
output_tokens: lognormal:p50=50,p99=200
sessions:
  turns: 3
  history: {history}
  think_ms: lognormal:p50=2000,p99=9000
  limit_tokens: 4000
  summary_tokens: 500
  steps:
    calls: lognormal:p50=3,p99=9
    result_tokens: lognormal:p50=200,p99=1000
    branches: {{share: 0.3, width: 3, task_tokens: 400}}
prefixes:
  - {{name: system, tokens: 805}}
  - {{name: tools, tokens: 700, pool: 3, zipf: 1}}
"""
SHARING = """
name: sharing
input_tokens: lognormal:p50=1000,p99=4000
output_tokens: 20
prefixes: {cached_share: 0.5, pool: 20, zipf: 1}
"""


def tree(sessions: int) -> Schedule:
    """In each session 0 ← 1 (pause 2 s) and 0, 1 ← 2 (pause 0.5 s); answers of 5, 3 and 1
    tokens."""
    n = 3 * sessions
    after = [k for s in range(sessions) for k in (3 * s, 3 * s, 3 * s + 1)]
    starts = np.cumsum([0, *[0, 1, 2] * sessions])
    return Schedule(
        np.tile([1.0, 3.0, 3.5], sessions),
        np.full(n, 8),
        np.tile([5, 3, 1], sessions),
        0,
        session=np.repeat(np.arange(sessions), 3),
        turn=np.tile([0, 1, 2], sessions).astype(np.int32),
        think_s=np.tile([0.0, 2.0, 0.5], sessions),
        after_start=starts,
        after=np.array(after),
    )


def test_a_request_is_sent_a_pause_after_the_last_end_that_it_waits_for() -> None:
    """Steps of 10 ms: 1 to 1.05; 3.05 to 3.08; 3.58 to 3.59."""
    played = play(STEP_10_MS, tree(1), seed=0)
    assert played.schedule.scheduled_s == pytest.approx([1.0, 3.05, 3.58])
    assert played.outcome.finish_s == pytest.approx([1.05, 3.08, 3.59])
    assert (played.begun, played.cut) == (1, ())


def test_what_is_due_too_late_is_not_sent_and_its_session_is_cut() -> None:
    played = play(STEP_10_MS, tree(1), seed=0, until_s=3.5)
    assert played.schedule.scheduled_s == pytest.approx([1.0, 3.05])
    assert (played.begun, played.cut) == (1, (0,))


def test_a_user_begins_a_session_when_his_last_is_over() -> None:
    """A session takes 0.05 + 2 + 0.03 + 0.5 + 0.01 = 2.59 s; one user, pause 1 s: they begin at 0,
    3.59, 7.18 s."""
    played = play(
        STEP_10_MS, tree(5), seed=0, users=1, users_until_s=8.0, until_s=60.0, think_s=1.0
    )
    begins = played.schedule.scheduled_s[played.schedule.turn == 0]
    assert begins == pytest.approx([0.0, 3.59, 7.18])
    assert (played.begun, played.cut, played.used_up) == (3, (), False)
    two = play(STEP_10_MS, tree(5), seed=0, users=2, users_until_s=90.0, think_s=1.0)
    begins = two.schedule.scheduled_s[two.schedule.turn == 0]
    assert begins == pytest.approx([0.0, 0.5, 3.59, 4.09, 7.18])  # spread over one pause
    assert two.used_up


@pytest.mark.parametrize("history", ["answers", "planned"])
def test_the_engine_finds_what_an_infinite_cache_would(history: str, tmp_path: Path) -> None:
    """Of every single prompt, when answers take no time: conversations, branches, compaction,
    pools."""
    for name, text in (("sessions", SESSIONS.format(history=history)), ("sharing", SHARING)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        schedule = open_schedule(
            load_workload(str(file)), rate_rps=2.0, duration_s=300.0, seed=5, stage=0
        )
        played = play(INSTANT, schedule, seed=0, answers_told=history == "answers")
        assert len(played.schedule) == len(schedule) > 400
        planned = schedule.planned_cached_tokens(answers_too=history == "answers")
        assert planned.sum() > 0.4 * schedule.input_tokens.sum()
        if history == "answers" and schedule.continues is not None:
            before = schedule.continues
            known = schedule.input_tokens[before] + schedule.output_tokens[before]
            # the last token of an answer is never computed on: a block that ends with it is not in
            # the cache
            planned = planned - 16 * ((before >= 0) & (known % 16 == 0))
        assert played.outcome.cached_tokens.tolist() == planned.tolist()


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """A workload file of agents' sessions."""
    (tmp_path / "agents.yaml").write_text(SESSIONS.format(history="answers"))
    return tmp_path / "agents.yaml"


def test_predict_plays_sessions_and_says_what_the_cache_found(
    tmp_path: Path, agents: Path, command: Command
) -> None:
    run = tmp_path / "run"
    command(
        "predict --preset llama3-8b-h100 --prefix-caching --workload",
        agents,
        "--rates 2 --max-requests 400 --out",
        run,
    )
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    (stage,) = summary["sessions"]["stages"]
    assert stage["sessions"] == stage["complete"] > 5
    for sharing in summary["sharing"]:
        assert sharing["planned"] > 0.6
        assert sharing["realised"] == pytest.approx(sharing["planned"], abs=0.02)
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    assert len({row["request_id"] for row in rows}) == len(rows)
    ends: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda r: r["scheduled_ns"]):
        assert row["status"] == "ok"
        assert row["turn"] == 0 or row["scheduled_ns"] >= min(ends[row["session_id"]])
        ends.setdefault(row["session_id"], []).append(row["ended_ns"])


def test_who_waits_for_more_than_71_minutes_gives_up(tmp_path: Path, command: Command) -> None:
    """1,000 answers of 10 s one after the other: request k ends 10 + 9.9 k s after it was sent.

    The rows have room for 4,294.967 s: 433 of them end in that time, of the next one there are 8
    tokens then."""
    run = tmp_path / "run"
    command(
        "predict --preset linear:1.0,0 --max-num-seqs 1 --input-tokens 10 --output-tokens "
        "10 --rates 10 --arrivals constant --max-requests 1000 --out",
        run,
    )
    rows = sorted(
        pq.read_table(run / "requests.parquet").to_pylist(), key=lambda row: row["request_id"]
    )
    assert [row["status"] for row in rows] == ["ok"] * 433 + ["unfinished"] * 567
    assert len(rows[433]["chunk_at_us"]) == 8
    assert rows[-1]["chunk_at_us"] == []
    expected = pytest.approx(4294.967, abs=1e-3)
    assert (rows[-1]["ended_ns"] - rows[-1]["scheduled_ns"]) / 1e9 == expected


def test_pools_that_do_not_fit_are_told_once_by_show_and_by_a_run(
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, run = tmp_path / "w.yaml", tmp_path / "run"
    file.write_text("input_tokens: 58\noutput_tokens: 3\nprefixes: [{name: a, tokens: 100000}]")
    told = (
        "a fits whole into 0% of the prompts that are to have it, 100.0% of all prompts have "
        "some of it (100.0% are described), p50 50 of 100,000 tokens"
    )
    command("predict --preset demo --workload", file, "--rates 1,2 --max-requests 4000 --out", run)
    meta = json.loads((run / "run.json").read_text())
    expected = [f"stage 0: prefixes: {told}: lengthen input_tokens or shorten the pools"]
    assert meta["notes"] == expected
    assert len(meta["stages"]) == 2
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["ampacity", "workload", "show", str(file)])
    with pytest.raises(SystemExit):
        main()
    assert told in capsys.readouterr().out


def test_a_search_over_sessions_is_refused(
    tmp_path: Path, agents: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command("predict --preset demo --search --slo ttft_p99=1s --workload", agents, status=2)
    assert "without --search" in capsys.readouterr().err


def test_sessions_that_never_fit_the_context_are_refused(
    tmp_path: Path, agents: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each begins with 1,505 shared tokens."""
    command(
        "predict --preset llama3-8b@h100,max_model_len=1000 --workload",
        agents,
        "--rates 1 --out",
        tmp_path / "run",
        status=2,
    )
    assert "context of 1000 tokens" in capsys.readouterr().err


def test_a_stage_longer_than_a_year_is_refused_before_anything_is_written(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command("predict --preset demo --rates 1,1e-9 --out", tmp_path / "run", status=2)
    assert "1e-09 requests/s" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_the_context_cuts_is_counted(tmp_path: Path, command: Command) -> None:
    """Prompts of 9,000 tokens do not fit the 8,192 of Llama-3 beside answers of 10: all 20 are
    shortened to 8,182."""
    run = tmp_path / "run"
    command(
        "predict --preset llama3-8b-h100 --input-tokens 9000 --output-tokens 10 --rates 1 "
        "--arrivals constant --duration 5m --max-requests 20 --out",
        run,
    )
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    assert {row["input_tokens"] for row in rows} == {8182}
    counted = json.loads((run / "run.json").read_text())["workload"]["clipped_to_context"]
    assert counted == player.REQUESTS_MIN  # of the schedule, before --max-requests
