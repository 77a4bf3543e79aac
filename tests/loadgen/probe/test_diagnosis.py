"""What the probe sees of an endpoint is kept in run.json, and neither run nor comparison claims
more than it allows."""

import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.diagnosed import spoilt_by
from ampacity.loadgen.probe.diagnosis import as_dicts, diagnose, spoilt, warnings
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.reports.pages.run_report import render_report
from tests.support.args import args_of
from tests.support.contract import summarise
from tests.support.servers.http_server import model_server, stream
from tests.support.synthetic import Stage, make_run, request

SLOS = ["ttft_p90=1s", "itl_p90=1s", "tpot_p90=1s", "e2e_p90=1s", "first_answer_p90=1s"]
Records = list[RequestRecord]


def in_one_piece(i: int, lasts_s: float = 0.08, **columns: Any) -> RequestRecord:
    """32 tokens in one chunk at the end."""
    return request(
        i, i * 0.05, ttft_s=lasts_s, **{"output_tokens": 32, "output_tokens_planned": 32} | columns
    )


def verdicts(path: Path, records: Records, **meta: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """(verdict of each metric, the summary)"""
    run = make_run(path, [Stage(records, len(records) * 0.05)], SLOS, **meta)
    found = summarise(load_run(run.path))
    judged = found["stages"][0]["slo_verdicts"]
    return {v["slo"].partition("_p")[0]: v["verdict"] for v in judged}, found


ONE_PIECE: dict[str, Callable[[int], RequestRecord]] = {
    "one JSON body, or one event": in_one_piece,
    "32 chunks in one read": lambda i: request(i, i * 0.05, ttft_s=0.08, gaps_s=[0.0] * 31),
    "one chunk, and nobody counts": lambda i: in_one_piece(
        i, output_tokens=1, token_source="chunks"
    ),
    "six of ten": lambda i: (
        in_one_piece(i) if i % 10 < 6 else request(i, i * 0.05, gaps_s=[0.01] * 31)
    ),
    "cut up by a gateway that had it whole": lambda i: request(
        i, i * 0.05, ttft_s=0.08, gaps_s=[0.00008] * 31
    ),
    "in two pieces at the end": lambda i: request(
        i, i * 0.05, ttft_s=0.08, gaps_s=[0.001], chunk_tokens=[16, 16]
    ),
    "an answer takes 1 ms": lambda i: in_one_piece(i, 0.001),
    "tokens not told at all": lambda i: in_one_piece(i, output_tokens=None, token_source=None),
}


@pytest.mark.parametrize("name", ONE_PIECE)
def test_what_was_not_streamed_has_no_ttft_and_no_slo_on_one_is_met(
    name: str, tmp_path: Path
) -> None:
    found, summary = verdicts(tmp_path / "run", [ONE_PIECE[name](i) for i in range(200)])
    assert found["ttft"] == found["first_answer"] == "inconclusive"
    assert found["e2e"] == "met"
    stage = summary["stages"][0]
    for figure in ("ttft_s", "ttft_from_schedule_s", "first_answer_s"):
        assert stage[figure]["p50"] is None
        assert "answers came in one piece" in stage[figure]["reason"]
    assert stage["slo_met"] is None
    assert summary["capacity"]["capacity_rps"] is None
    codes = {w["code"] for w in summary["warnings"]}
    assert "not_streamed" in codes
    assert not codes & {"too_few_requests", "tokens_per_chunk"}  # longer stages help nothing


STREAMED: dict[str, Callable[[int], RequestRecord]] = {
    "one token was asked for, and came": lambda i: request(i, i * 0.05, ttft_s=0.08),
    "four tokens of an answer of 1 ms": lambda i: request(
        i, i * 0.05, ttft_s=0.001, gaps_s=[0.0] * 3
    ),
    "four of ten in one piece": lambda i: (
        in_one_piece(i) if i % 10 < 4 else request(i, i * 0.05, gaps_s=[0.01] * 31)
    ),
    "quick tokens behind a long prompt": lambda i: request(
        i, i * 0.05, ttft_s=0.9, gaps_s=[0.001] * 31
    ),
    "a very fast engine": lambda i: request(i, i * 0.05, ttft_s=0.02, gaps_s=[0.0002] * 31),
    "two reads": lambda i: request(i, i * 0.05, gaps_s=[0.0] * 15 + [0.3] + [0.0] * 15),
}


@pytest.mark.parametrize("name", STREAMED)
def test_what_was_streamed_has_a_ttft(name: str, tmp_path: Path) -> None:
    found, summary = verdicts(tmp_path / "run", [STREAMED[name](i) for i in range(200)])
    assert found["ttft"] == "met"
    said = {w["code"]: w["text"] for w in summary["warnings"]}.get("not_streamed", "")
    assert said[:16] == ("80 of 200 answers" if name.startswith("four of ten") else "")[:16]


def test_neither_gate_nor_compare_claims_a_change_of_a_ttft_that_is_none(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """The answers of the candidate take twice as long: E2E is worse, and TTFT is not mentioned as
    a finding."""
    for name, lasts_s in (("base", 0.08), ("slow", 0.16)):
        records = [in_one_piece(i, lasts_s * (1 + i % 7 / 20)) for i in range(600)]
        make_run(
            tmp_path / name, [Stage(records, 30.0, offered_rps=20.0)], ["ttft_p90=1s"], run_id=name
        )
    assert ampacity("baseline", tmp_path / "base", "-o", tmp_path / "b.json") == 0
    untracked = json.loads((tmp_path / "b.json").read_text())["levels"]["20/s"]["untracked"]
    assert {"ttft", "itl"} <= set(untracked)
    capsys.readouterr()
    assert ampacity("gate", tmp_path / "slow", "--baseline", tmp_path / "b.json") == 1
    told = capsys.readouterr().out
    assert "e2e_p50" in told
    assert "nothing was streamed" in told
    assert ampacity("compare", tmp_path / "base", tmp_path / "slow") in (0, None)
    assert "nothing was streamed" in capsys.readouterr().out


# -- the probe's diagnosis
# --------------------------------------------------------------------------

SHAPE = RequestShape("chat", "m")


def bad(record: RequestRecord) -> list[str]:
    return [f.name for f in diagnose(record, SHAPE) if f.verdict == "bad"]


def test_one_answer_tells_what_is_wrong() -> None:
    whole = [0.01] * 31
    assert bad(request(0, 0.0, gaps_s=whole)) == []
    assert bad(in_one_piece(0)) == ["stream"]
    assert bad(request(0, 0.0, gaps_s=[0.0] * 31)) == ["stream"]
    assert bad(request(0, 0.0, gaps_s=[0.00008] * 31)) == ["stream"]
    assert bad(request(0, 0.0, gaps_s=whole, token_source="chunks")) == ["token counts"]
    # an end token alone, which has no text, is no wrong count; three tokens without text are
    silent: dict[str, Any] = {"chunk_at_us": []}
    silent |= dict.fromkeys(("first_token_ns", "first_answer_ns", "last_token_ns"))
    assert bad(request(0, 0.0, output_tokens=1, finish_reason="stop", **silent)) == []
    three = request(0, 0.0, output_tokens=3, finish_reason="stop", **silent)
    assert bad(three) == ["stream", "token counts"]
    # one chunk where 32 tokens were asked for, and nobody counts: in one piece, whatever it holds
    one = in_one_piece(0, output_tokens=1, token_source="chunks")
    assert bad(one) == ["stream", "token counts"]
    assert spoilt(diagnose(one, SHAPE))
    assert warnings(diagnose(one, SHAPE))[0].startswith(
        "stream: not streamed: the whole answer in one piece"
    )


def test_a_count_that_cannot_be_spoils_the_verdicts_that_rest_on_it(tmp_path: Path) -> None:
    """20 tokens by usage in 32 chunks with text: seen by the probe, and in every answer of the
    run."""
    records = [request(i, i * 0.05, gaps_s=[0.01] * 31, output_tokens=20) for i in range(200)]
    found, summary = verdicts(
        tmp_path / "run", records, diagnosis=as_dicts(diagnose(records[0], SHAPE))
    )
    met = dict.fromkeys(("ttft", "e2e", "first_answer"), "met")
    assert found == met | {"itl": "inconclusive", "tpot": "inconclusive"}
    text = next(w["text"] for w in summary["warnings"] if w["code"] == "diagnosis")
    assert "20 tokens for 32 chunks" in text
    assert summary["diagnosis"][0]["name"] == "stream"
    meta = {"diagnosis": summary["diagnosis"]}
    assert set(spoilt_by(meta)) == {"itl", "fluidity", "tpot"}


def test_a_run_of_before_there_was_a_diagnosis_is_judged_and_says_so(tmp_path: Path) -> None:
    found, summary = verdicts(
        tmp_path / "run", [request(i, i * 0.05, gaps_s=[0.01] * 31) for i in range(200)]
    )
    assert set(found.values()) == {"met"}
    assert summary["diagnosis"] is None
    assert "no probe" in summary["diagnosis_reason"]


# -- on a socket -----------------------------------------------------------------------------------


def whole_body(handler: BaseHTTPRequestHandler, number: int) -> None:
    time.sleep(0.02)
    choice = {"message": {"role": "assistant", "content": "x " * 8}, "finish_reason": "length"}
    usage = {"prompt_tokens": 4, "completion_tokens": 8}
    body = json.dumps({"choices": [choice], "usage": usage}).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def one_event(handler: BaseHTTPRequestHandler, number: int) -> None:
    time.sleep(0.02)
    choice = {"delta": {"content": "x " * 8}, "finish_reason": "length"}
    usage = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":8}}'
    stream(handler, json.dumps({"choices": [choice]}).encode(), usage)


@pytest.mark.parametrize("answer", [whole_body, one_event])
def test_a_server_that_does_not_stream_is_said_before_the_load_and_in_every_answer(
    answer: Callable[[BaseHTTPRequestHandler, int], None],
    tmp_path: Path,
    ampacity: Any,
    capsys: Any,
) -> None:
    with model_server(answer) as url:
        load = args_of("--rates 20 --duration 3s --input-tokens 4 --output-tokens 8")
        load += args_of("--slo ttft_p50=1s --slo e2e_p50=1s")
        assert ampacity("run", url, *load, "--out", tmp_path / "run") in (0, 3)
    told = capsys.readouterr()
    assert "stream: not streamed: 8 tokens in one piece" in told.err
    run = load_run(tmp_path / "run")
    stream_finding = next(f for f in run.meta["diagnosis"] if f["name"] == "stream")
    assert (stream_finding["verdict"], stream_finding["spoils"][0]) == ("bad", "ttft")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = {v["slo"]: v["verdict"] for v in summary["stages"][0]["slo_verdicts"]}
    assert found["ttft_p50=1s"] == "inconclusive"
    assert "carries at least" not in summary["verdict"]
    assert "not_streamed" in {w["code"] for w in summary["warnings"]}
    page = render_report(read_summary(summary), run.meta)
    assert "Seen of the endpoint before the load" in page
    assert "not streamed: 8 tokens in one piece" in page


# -- thinking in the text --------------------------------------------------------------------------


def thinking(ends_at: int) -> Callable[[BaseHTTPRequestHandler, int], None]:
    """16 tokens, 5 ms apart; token ``ends_at`` is the closing tag."""

    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        for k in range(16):
            time.sleep(0.005)
            text = {0: "<think>", ends_at: "</think>"}.get(k, " x")
            choice = {"delta": {"content": text}, "finish_reason": "length" if k == 15 else None}
            handler.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":16}}'
        handler.wfile.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")

    return answer


@pytest.mark.parametrize("ends_at", [9, 99])
def test_an_slo_on_the_first_answer_is_judged_behind_the_thinking_or_not_at_all(
    ends_at: int, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """The 11th token is the first of the answer: 50 ms after the first one. Where the thinking
    never ends there is none."""
    with model_server(thinking(ends_at)) as url:
        lengths = args_of("--input-tokens 4 --output-tokens 16")
        load = [*lengths, *args_of("--rates 20 --duration 3s --slo first_answer_p50=40ms")]
        assert ampacity("run", url, *load, "--out", tmp_path / "run") in (0, 3)
        capsys.readouterr()
        assert ampacity("doctor", url, *lengths, "--json") == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    line = next(c for c in checks if c["name"] == "reasoning")
    assert "ends with </think>" in line["found"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    kept = next(f for f in summary["diagnosis"] if f["name"] == "reasoning")
    assert (kept["verdict"], "ends with </think>" in kept["found"]) == ("note", True)
    stage = summary["stages"][0]
    verdict = stage["slo_verdicts"][0]["verdict"]
    if ends_at == 9:
        assert stage["first_answer_s"]["p50"] - stage["ttft_s"]["p50"] >= 0.05
        assert verdict == "violated"
    else:
        assert stage["first_answer_s"]["p50"] is None
        assert "ended while the model was still thinking" in stage["first_answer_s"]["reason"]
        assert verdict == "inconclusive"


@pytest.mark.parametrize(
    ("tokens", "counted", "spoils"),
    [
        # (chunks, tokens by usage, metrics) where 20 were asked for
        pytest.param(40, 40, {"itl", "icl", "tpot", "tokens"}, id="two choices, usage of both"),
        pytest.param(60, 60, {"itl", "icl", "tpot", "tokens"}, id="three choices, usage of all"),
        pytest.param(40, 20, {"itl", "tpot", "tokens"}, id="two choices, usage of one"),
        pytest.param(30, 30, {"tokens"}, id="a server with a length of its own"),
        pytest.param(20, 20, set(), id="one choice"),
    ],
)
def test_choices_that_nothing_tells_apart_spoil_what_lies_between_tokens(
    tokens: int, counted: int, spoils: set[str]
) -> None:
    """Interleaved, without an index, one finish reason (a gateway): only the length shows it."""
    answer = request(
        0, 0.0, gaps_s=[0.01] * (tokens - 1), output_tokens=counted, output_tokens_planned=20
    )
    found = diagnose(answer, SHAPE)
    assert {metric for f in found if f.verdict == "bad" for metric in f.spoils} == spoils
