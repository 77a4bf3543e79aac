"""What a figure rests on reaches the figure: chunks taken for tokens, prompts that were cut, users
who never came.
"""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.change.judged import prepare
from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.gate.baseline import make_baseline
from ampacity.config import make_settings
from ampacity.experiments.stages.provenance import contents_of
from ampacity.reports.pages.run_report import render_report
from ampacity.values import ConfigError
from tests.support.contract import summarise
from tests.support.synthetic import Stage, make_run, request


def answers(
    n: int = 400,
    *,
    planned: int = 100,
    chunks: int = 10,
    ends: str = "length",
    source: str = "chunks",
    **columns: Any,
) -> list[Any]:
    """20 requests/s, each answered in ``chunks`` chunks 20 ms apart where ``planned`` tokens were
    asked for."""
    counted = chunks if source == "chunks" else planned
    return [
        request(
            i,
            i / 20,
            ttft_s=0.1,
            gaps_s=[0.02] * (chunks - 1),
            output_tokens_planned=planned,
            output_tokens=counted,
            token_source=source,
            finish_reason=ends,
            **columns,
        )
        for i in range(n)
    ]


def judged(
    path: Path, records: list[Any], slos: Any = ("ttft_p95=2s",), **meta: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    summary = summarise(
        make_run(path, [Stage(records, 20.0, offered_rps=20.0)], slos, warmup_requests=0, **meta)
    )
    return summary, summary["stages"][0]


def codes(summary: dict[str, Any]) -> dict[str, str]:
    return {w["code"]: w["text"] for w in summary["warnings"]}


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_ten_tokens_a_chunk_that_nobody_counted_are_no_tokens(tmp_path: Path, ends: str) -> None:
    summary, stage = judged(tmp_path / "run", answers(ends=ends), ["ttft_p95=2s", "tpot_p95=50ms"])
    assert stage["icl_s"]["p50"] == pytest.approx(0.02)
    for name in ("itl_s", "tpot_s"):
        assert stage[name]["p50"] is None
        assert stage[name]["n"] == 0
    assert "the server does not say how many tokens" in stage["tpot_s"]["reason"]
    assert stage["output_tokens_per_s"] is None
    assert stage["output_tokens_per_s_reason"]
    assert stage["slo_verdicts"][1]["verdict"] == "inconclusive"
    said = codes(summary)
    assert "lengths_off" not in said  # today: answers 90 % shorter, ignore the end of sequence
    text = said["tokens_per_chunk"]
    assert "ITL), TPOT, tokens/s are not given; inter-chunk latency (ICL) is." in text
    assert summary["workload"]["realised"]["output_tokens"]["received"]["n"] == 0
    render_report(read_summary(summary), {})


def test_an_answer_that_a_kill_cut_off_is_none_without_a_count(tmp_path: Path) -> None:
    """Its usage would have come at its end; the whole ones have one."""
    cut = [replace(r, status="unfinished", token_source="chunks") for r in answers(40)[9:24]]
    usage = {"workload": {"tokenizer": {"method": "usage"}}}
    summary, _ = judged(tmp_path / "run", [*answers(9, source="usage"), *cut], **usage)
    assert summary["workload"]["realised"]["token_source"] == {"usage": 9}
    assert not any("no count of tokens" in text for text in codes(summary).values())


def test_a_server_that_sends_a_chunk_for_each_planned_token_sends_tokens(tmp_path: Path) -> None:
    summary, stage = judged(tmp_path / "run", answers(planned=10))
    assert stage["itl_s"]["p50"] == pytest.approx(0.02)
    assert stage["tpot_s"]["p50"] == pytest.approx(0.02)
    assert stage["output_tokens_per_s"] == pytest.approx(200, rel=0.05)
    assert not {"lengths_off", "tokens_per_chunk"} & codes(summary).keys()


def test_without_slos_the_verdict_names_no_tokens_that_nobody_counted(tmp_path: Path) -> None:
    summary, _ = judged(tmp_path / "run", answers(), [])
    assert "tokens/s" not in summary["verdict"]
    assert "requests/s were carried" in summary["verdict"]


def test_a_baseline_of_a_server_that_counts_nothing_tracks_what_it_can(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        [Stage(answers(), 20.0, offered_rps=20.0)],
        ["ttft_p95=2s"],
        warmup_requests=0,
    )
    content = make_baseline([prepare(run)])
    (level,) = content["levels"].values()
    assert level["output_tokens_per_s"] is None


def test_known_chunks_without_a_count_of_each_have_tpot_and_no_itl(tmp_path: Path) -> None:
    summary, stage = judged(tmp_path / "run", answers(source="usage"))
    assert stage["tpot_s"]["p50"] == pytest.approx(0.18 / 90)
    assert codes(summary)["tokens_per_chunk"].endswith(
        "per-token latency (ITL) is not given; inter-chunk latency (ICL) and TPOT are."
    )


@pytest.mark.parametrize(
    ("planned", "taken", "text"), [(2000, 512, "74% shorter"), (1000, 2000, "100% longer")]
)
def test_prompts_that_are_others_than_planned_are_no_clean_capacity(
    tmp_path: Path, planned: int, taken: int, text: str
) -> None:
    """A server that cuts prompts, and one whose tokens are half as long."""
    records = answers(source="usage", chunks=100, input_tokens_planned=planned, input_tokens=taken)
    summary, _ = judged(tmp_path / "run", records, ["error_rate=5%"])
    assert f"Prompts were {text} than planned" in codes(summary)["inputs_off"]
    assert summary["verdict"].startswith(
        f"Not the load that was planned. Prompts were {text} than planned"
    )
    as_planned, _ = judged(
        tmp_path / "ok",
        answers(source="usage", chunks=100, input_tokens_planned=taken, input_tokens=taken),
        ["error_rate=5%"],
    )
    assert "lengths_off" not in codes(as_planned)
    assert as_planned["verdict"].startswith("One instance")


def test_prompts_that_the_server_does_not_count_are_not_judged(tmp_path: Path) -> None:
    summary, _ = judged(tmp_path / "run", answers(source="usage", chunks=100, input_tokens=None))
    assert summary["workload"]["realised"]["input_deviation"] is None
    assert "lengths_off" not in codes(summary)


@pytest.mark.parametrize("option", ["max_requests", "max_in_flight"])
def test_users_that_can_never_be_in_flight_are_refused(option: str) -> None:
    load = {"url": "http://127.0.0.1:1/v1", "concurrency": "8,64"}
    name = option.replace("_", "-")
    with pytest.raises(
        ConfigError, match=f"--{name} 10: --concurrency 64 would never be in flight"
    ):
        make_settings(load | {option: 10})
    assert getattr(make_settings(load | {option: 64}), option) == 64


def test_users_that_were_set_and_never_in_flight_are_no_c_max(tmp_path: Path) -> None:
    """64 users, of whom an endpoint with room for 10 lets no more than 10 in: C_max is what was in
    flight, and it is said."""
    records = [request(i, 0.1 * (i // 10), ttft_s=0.02, gaps_s=[0.075]) for i in range(2000)]
    stage = Stage(records, 200 * 0.1, concurrency=64)
    summary = summarise(make_run(tmp_path / "run", [stage], ["ttft_p50=2s"], warmup_requests=0))
    assert summary["stages"][0]["concurrency_max"] == 10
    assert summary["capacity"]["c_max"] == pytest.approx(9.5, abs=0.5)
    assert "64 users were set" in codes(summary)["users_missing"]
    assert "never more than 10 in flight" in codes(summary)["users_missing"]


@pytest.mark.parametrize(
    ("option", "name", "text"),
    [
        ("trace", "t.jsonl", '{"timestamp": 0, "input_length": 9, "output_length": 9}'),
        ("prompts", "p.txt", "apple"),
        ("workload", "w.yaml", "{input_tokens: 9, output_tokens: 9}"),
    ],
)
def test_other_contents_of_a_file_of_the_same_name_are_another_load(
    option: str, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat").write_text("not the built-in workload of this name")
    found = []
    for content in (text, text + " "):
        (tmp_path / name).write_text(content)
        settings = make_settings({"url": "http://127.0.0.1/v1", option: str(tmp_path / name)})
        found.append(contents_of(settings))
        assert found[-1] == {option: sha256(content.encode()).hexdigest()[:16]}
    assert found[0] != found[1]
    assert not contents_of(make_settings({"url": "http://127.0.0.1/v1", "workload": "chat"}))
