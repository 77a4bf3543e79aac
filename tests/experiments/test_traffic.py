"""What was planned, sent and received by class, worked out by hand, and how a workload is told in
words.
"""

import json
from pathlib import Path

import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.config import check_steady
from ampacity.progress import stage_line
from ampacity.reports.render.traffic import side_title, traffic_table, workload_facts
from ampacity.values import ConfigError
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule_file import read_schedule
from tests.support.contract import on_stages, summarise
from tests.support.synthetic import Stage, make_run, request

MIX = """
arrivals: constant
extra_body: {temperature: 0.7}
classes:
  chat: {weight: 3, input_tokens: 100, output_tokens: 10, cancel: {share: 0.1, after_ms: 600}, slo: [ttft_p90=2s]}
  code: {weight: 1, input_tokens: 50, output_tokens: 5, adapters: {name: "lora-{}", count: 3}, arrivals: "gamma:cv=3"}
"""
AGENT = """
input_tokens: 100
output_tokens: 10
sessions: {turns: 2, think_ms: 500, limit_tokens: 8000, summary_tokens: 30, steps: {calls: 3, result_tokens: 40}}
prefixes: [{name: tools, tokens: 300, pool: 4, zipf: 1, share: 0.5}]
"""


def test_classes_and_arrivals_of_a_stage_worked_out_by_hand(tmp_path: Path) -> None:
    records = [
        request(
            0, 0.0, class_="chat", ttft_s=0.1, gaps_s=[0.1], input_tokens=100, cached_tokens=50
        ),
        request(1, 1.0, class_="chat", ttft_s=None, status="cancelled", input_tokens=None),
        request(
            2, 3.0, class_="code", ttft_s=0.3, gaps_s=[0.1] * 4, input_tokens=50, cached_tokens=0
        ),
        request(
            3, 4.5, class_="chat", ttft_s=0.2, gaps_s=[0.1] * 3, input_tokens=200, cached_tokens=10
        ),
        request(4, 4.6, class_="chat", turn=1, session_id="0-3", ttft_s=None, status="http_error"),
    ]
    run = make_run(tmp_path / "run", [Stage(records, 6.0)], [], warmup_requests=0)
    run.meta["workload"] = {
        "classes": [{"name": "chat", "weight": 3}, {"name": "code", "weight": 1}]
    }
    (stage,) = summarise(run)["traffic"]
    # the later turn is no arrival; gaps of 1, 2 and 1.5 s: mean 1.5, variance 1/6
    assert stage["arrivals"] == 4
    assert stage["gap_cv"] == pytest.approx((1 / 6) ** 0.5 / 1.5)
    chat, code = stage["classes"]
    assert {
        name: chat[name]
        for name in ("planned_share", "share", "requests", "ok", "failed", "cancelled")
    } == {"planned_share": 0.75, "share": 0.8, "requests": 4, "ok": 2, "failed": 1, "cancelled": 1}
    assert chat["cached_share"] == pytest.approx(60 / 300)
    assert chat["output_tokens"]["p50"] == 2  # of answers of 2 and 4 tokens the lower one
    assert chat["ttft_from_schedule_s"]["max"] == pytest.approx(0.2)
    assert (code["planned_share"], code["share"], code["cached_share"]) == (0.25, 0.2, 0.0)
    table = traffic_table(read_summary(summarise(run)))
    assert [[cell.text for cell in row[1:8]] for row in table.rows] == [
        ["chat", "75.0%", "80.0%", "4", "2", "1", "1"],
        ["code", "25.0%", "20.0%", "1", "1", "0", "0"],
    ]


def test_a_mix_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(MIX)
    facts = dict(workload_facts(load_workload(str(path)).describe()))
    assert facts == {
        "Class chat": "75.0%; input fixed at 100; output fixed at 10; temperature 0.7; SLO "
        "ttft_p90=2s; "
        "10.0% leave after fixed at 600 (ms)",
        "Class code": "25.0%; input fixed at 50; output fixed at 5; arrivals gamma:cv=3; 3 "
        "models, lora-0 to lora-2; "
        "temperature 0.7",
    }


def test_sessions_and_prefixes_are_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(AGENT)
    described = load_workload(str(path)).describe()
    facts = dict(workload_facts(described))
    assert facts["Sessions"].startswith(
        "8 requests on average; turns fixed at 2; pause fixed at 500 (ms); tool calls"
    )
    assert (
        "compacted above 8,000 tokens; history of the real answers; a failed turn ends its session"
        in facts["Sessions"]
    )
    expected = "tools: fixed at 300 tokens, 4 texts (Zipf 1), in 50.0% of the prompts"
    assert facts["Shared prefixes"] == expected
    assert side_title(described, "input") == "First message, tokens"
    assert side_title(described, "output", ", planned") == "Output tokens, planned"
    cut = workload_facts({"clipped_to_context": 7, "turns_beyond_context": 2})
    assert [text for _, text in cut] == [
        "7 requests",
        "2 turns that would not fit the model's context",
    ]


@pytest.mark.parametrize(
    "arrivals", ["ramp:from=0.2,to=1.8", "steps:rates=1/2", "diurnal", "burst:factor=2,length=1s"]
)
def test_a_rate_that_changes_within_the_stage_is_refused_where_one_is_looked_for(
    arrivals: str,
) -> None:
    with pytest.raises(
        ConfigError, match="sweep looks for one steady rate; give it --arrivals poisson"
    ):
        check_steady(load_workload("chat").with_arrivals(arrivals), "sweep")


def test_processes_of_one_steady_rate_are_swept() -> None:
    for arrivals in ("poisson", "gamma:cv=3", "onoff:on=1s,off=2s", "mmpp:rates=1/8,stay=60s/5s"):
        steady = load_workload("chat").with_arrivals(arrivals)
        check_steady(steady, "sweep")
        assert list(steady.clocks) == [arrivals]


def test_the_clock_of_a_class_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(MIX.replace("gamma:cv=3", "diurnal"))
    with pytest.raises(ConfigError, match="arrivals diurnal"):
        check_steady(load_workload(str(path)), "search")


def test_a_replayed_schedule_says_what_its_prompts_share(tmp_path: Path) -> None:
    row = '{"scheduled_s": 0.5, "input_tokens": 40, "output_tokens": 3%s}\n'
    for name, more, told in (
        ("plain.jsonl", "", "unique"),
        ("shared.jsonl", ', "shared": [[7, 32]]', "shared prefixes as in the schedule"),
    ):
        path = tmp_path / name
        path.write_text(row % more)
        assert read_schedule(path).prompts == told


def test_who_was_cut_off_or_left_is_no_error_in_the_line_of_a_stage() -> None:
    stage = json.loads("""{"index": 0, "kind": "open", "offered_rps": 6.0, "requests": 70,
        "ttft_from_schedule_s": {}, "itl_s": {}, "errors": {"unfinished": 4, "cancelled": 5,
        "timeout": 2}, "stable": true, "client_limited": false, "lengths": null,
        "slo_verdicts": [], "slo_met": null}""")
    assert ", 2 errors, " in on_stages(stage_line)(stage)
