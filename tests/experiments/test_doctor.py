"""``ampacity doctor``: the right verdict for servers whose truth is known."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampacity.cli import main
from ampacity.config import make_settings
from ampacity.experiments.checkup import checkup, trusted
from ampacity.experiments.doctor import DoctorResult, _busy_with
from ampacity.loadgen.probe.network import RoundTrip
from ampacity.loadgen.probe.results import Calibration, ProbeResult, Served
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.launch import start_in_process
from tests.support.args import args_of
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import FAULTS, Call, close_mid_stream, ok

pytestmark = pytest.mark.real_time  # needs the machine to itself

Doctor = Callable[..., tuple[object, str, str]]


@pytest.fixture
def doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Doctor:
    """(exit status, stdout, stderr) of the command, which leaves no file behind."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["ampacity", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not list(tmp_path.iterdir())
        return ended.value.code, *capsys.readouterr()

    return call


def examined(
    doctor: Doctor, url: str, *arguments: str
) -> tuple[dict[str, str], list[str], dict[str, Any]]:
    """Verdicts by check, metrics that are not to be trusted, facts."""
    code, out, _ = doctor(url, "--json", *arguments)
    assert code == 0
    found = json.loads(out)
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    return verdicts, [name for name, fine in found["trusted"].items() if not fine], found["facts"]


# -- servers whose truth is known ------------------------------------------------------------------

# the fault server counts every prompt as 5 tokens
LENGTHS = tuple(args_of("--input-tokens 5 --output-tokens 32"))


@pytest.mark.parametrize(
    ("fault", "verdicts", "spoiled"),
    [
        (
            "ok",
            json.loads("""{"connection": "ok", "stream": "ok", "token counts": "ok",
                "output length": "ok", "metrics": "note"}"""),
            [],
        ),
        (
            "not_streamed",
            {"stream": "bad", "output length": "note", "input length": "note"},
            ["ttft", "itl", "icl", "tpot"],
        ),
        ("gzipped", {"stream": "bad", "token counts": "ok"}, ["ttft", "itl", "icl", "tpot"]),
        (
            "no_done",
            {"token counts": "bad", "output length": "note", "input length": "note"},
            ["itl", "tpot", "tokens"],
        ),
        ("close_after_answer", {"connection": "note", "stream": "ok"}, []),
    ],
)
def test_what_a_faulty_server_streams(
    fault: str, verdicts: dict[str, str], spoiled: list[str], doctor: Doctor
) -> None:
    with FaultServer(gap_s=0.005, models=(f"fault:{fault}",)) as server:
        found, not_trusted, facts = examined(
            doctor, server.url, "--model", f"fault:{fault}", *LENGTHS
        )
        asked = [r for r in server.requests if r.method == "POST"]
    if facts["chunks"] == 32 and 1 < facts["reads"] < 29:
        pytest.skip(f"other work held this client up: 32 chunks in {facts['reads']} reads")
    assert verdicts.items() <= found.items()
    assert not_trusted == spoiled
    assert found["model"] == "ok"
    assert len(asked) <= 27
    assert facts["kept_alive"] is (fault != "close_after_answer")


def test_a_name_that_is_not_listed_and_answered_all_the_same(doctor: Doctor) -> None:
    with FaultServer(gap_s=0.002) as server:
        code, out, _ = doctor(server.url, "--model", "fault:ok", *LENGTHS)
    assert code == 0
    assert "bad" in next(
        line for line in out.splitlines() if "fault:ok is answered, but the list has m" in line
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "n"], "--model n"),
        (args_of("--model m --api-key-env AMPACITY_TEST_KEY"), "refuses the API key (HTTP 401"),
        (args_of("--model m --concurrency 100000"), "open files"),
    ],
)
def test_what_cannot_be_benchmarked_is_one_line(
    arguments: list[str], said: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPACITY_TEST_KEY", "sk-wrong-0815")
    monkeypatch.setattr("ampacity.experiments.stages.preflight.room_for_connections", lambda: 1000)
    with FaultServer(api_key="sk-right" if "--api-key-env" in arguments else None) as server:
        code, out, err = doctor(server.url, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert "0815" not in err


def test_a_request_that_fails_is_sent_once_more(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of 33 tokens breaks off the first time, or always; the probe asks for none that is
    as long.
    """
    broken: list[float] = []

    async def play(call: Call) -> bool:
        if call.request.tokens == 33 and len(broken) < limit:
            broken.append(0)
            return await close_mid_stream(call)
        return await ok(call)

    monkeypatch.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=play))
    monkeypatch.setattr("ampacity.experiments.doctor.ANSWER_TOKENS", (33, 256))
    for limit in (1, 2):
        broken.clear()
        with FaultServer() as server:
            code, out, err = doctor(server.url, *LENGTHS)
        if limit == 1:
            assert code == 0
            assert re.search(
                "(?m)^bad +connection .* 1 of [0-9]+ requests failed [(]truncated", out
            )
        else:
            assert (code, out) == (2, "")
            assert "5 input and 33 output tokens failed twice as truncated" in err


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_first_request_that_fails_is_no_verdict(
    fails: int, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two 500s are counted and said; three in a row are the server's answer."""
    broken: list[float] = []

    async def play(call: Call) -> bool:
        if len(broken) < fails:
            broken.append(0)
            return await FAULTS["empty_500"].play(call)
        return await ok(call)

    monkeypatch.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=play))
    with FaultServer() as server:
        code, out, err = doctor(server.url, *LENGTHS)
        asked = sum(r.path.endswith("/chat/completions") for r in server.requests)
    if fails == 3:
        assert (code, out) == (2, "")
        assert "a first small request failed 3 of 3 times as http_error" in err
    else:
        assert code == 0
        assert f"{fails} of {asked} requests failed (http_error" in out


def test_a_probe_request_that_fails_later_is_counted_too(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of all fails: the probe goes on without it, and it is said."""
    seen: list[float] = []

    async def play(call: Call) -> bool:
        seen.append(0)
        return await (FAULTS["empty_500"].play if len(seen) == 2 else ok)(call)

    monkeypatch.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=play))
    with FaultServer() as server:
        code, out, _ = doctor(server.url, *LENGTHS)
        asked = sum(r.path.endswith("/chat/completions") for r in server.requests)
    assert code == 0
    assert f"1 of {asked} requests failed (http_error" in out


def test_the_simulator_with_a_face_of_which_everything_is_known(doctor: Doctor) -> None:
    """Chunks of 4 tokens but for the first, 1 + 31/4 = 9 of them; a role chunk before the prefill
    of 400 tokens.
    """
    face = Face(chunk_tokens=4, usage="end", early_role=True, prompt_tokens_details=True)
    with start_in_process("demo,prefix_caching=on", face=face) as server:
        found, spoiled, facts = examined(
            doctor, server.url, *args_of("--input-tokens 400 --output-tokens 32")
        )
    assert spoiled == ["itl"]
    # how late this machine reads is its own: a busy one is told so
    assert found == dict.fromkeys(found, "ok") | {"token counts": "note", "clock": found["clock"]}
    assert (facts["chunks"], facts["chunk_tokens_known"], facts["token_source"]) == (
        9,
        False,
        "usage",
    )
    assert (facts["output_tokens"], facts["input_tokens"], facts["overhead_tokens"]) == (32, 400, 8)
    assert facts["early_s"] > 0.001
    assert facts["cached_tokens_new"] == 0
    # whole blocks of 16, the last token always computed: 24 of 25
    assert facts["cached_tokens_again"] == 384
    assert {"running", "waiting", "kv_cache_usage"} <= set(facts["gauges"])


def test_a_gateway_that_flushes_now_and_then_and_says_nothing_of_tokens(doctor: Doctor) -> None:
    face = Face(flush_ms=100, usage="none", reasoning_share=0.5)
    with start_in_process("demo", face=face) as server:
        found, spoiled, facts = examined(
            doctor, server.url, *args_of("--input-tokens 50 --output-tokens 64")
        )
    assert found["stream"] == "note"
    assert facts["read_gap_p50_s"] == pytest.approx(0.1, rel=0.5)
    assert spoiled == ["ttft", "itl", "icl", "tpot", "tokens"]
    assert found["reasoning"] == "note"


# -- the judgement, by hand ------------------------------------------------------------------------


def record(
    ttft_s: float, chunk_gaps_s: list[float], *, asked: int, tokens: int, **more: Any
) -> RequestRecord:
    at_us = [round(1e6 * (ttft_s + sum(chunk_gaps_s[:k]))) for k in range(len(chunk_gaps_s) + 1)]
    made = RequestRecord(
        0,
        0,
        0,
        "ok",
        dispatched_ns=0,
        connected_ns=0,
        started_ns=0,
        first_event_ns=at_us[0] * 1000,
        first_token_ns=at_us[0] * 1000,
        first_answer_ns=at_us[0] * 1000,
        last_token_ns=at_us[-1] * 1000,
        http_status=200,
        finish_reason="length",
        input_tokens_planned=100,
        input_tokens=100,
        output_tokens_planned=asked,
        output_tokens=tokens,
        token_source="usage",
        chunk_at_us=at_us,
    )
    return replace(made, **more)


def seen(answer: RequestRecord, *, short_ttft_s: float) -> DoctorResult:
    short = record(short_ttft_s, [0.01] * 3, asked=4, tokens=4)
    probe = ProbeResult(
        Served(("m",)),
        RequestShape("chat", "m"),
        Calibration(1.0, 0, True),
        short,
        network=RoundTrip(0.0001, 0.001),
    )
    settings = make_settings({"url": "http://127.0.0.1:9/v1"})
    return DoctorResult(
        settings,
        probe,
        answer,
        short,
        short,
        (),
        24,
        True,
        False,
        None,
        (2e-5,),
        ("running",),
        2000,
        compiled=True,
    )


def verdict(answer: RequestRecord, name: str, short_ttft_s: float = 0.1) -> tuple[str, list[str]]:
    checks, _ = checkup(seen(answer, short_ttft_s=short_ttft_s))
    found = next(check for check in checks if check.name == name)
    return found.verdict, [metric for metric, fine in trusted(checks).items() if not fine]


@pytest.mark.parametrize(
    ("ttft_s", "gaps_s", "short_ttft_s", "expected"),
    [
        (0.1, [0.01] * 31, 0.1, ("ok", [])),
        # the first token comes 0.27 s later than the short answer's, of 0.4 s: a buffer, or one
        # wait in a queue
        (0.37, [0.001] * 31, 0.1, ("note", ["ttft", "itl", "icl", "tpot"])),
        # held for its 32 tokens of 10 ms and replayed over as long: 0.28 s later than that of 4, of
        # 0.69 s
        (0.38, [0.01] * 31, 0.1, ("note", ["ttft", "itl", "icl", "tpot"])),
        (
            0.022,
            [0.0005] * 31,
            0.005,
            ("ok", []),
        ),  # 17 ms of 37.5 are more than a third, and may be noise
        (0.2, [0.01] * 31, 0.1, ("ok", [])),  # 0.1 s of 0.51 s are less than a third
        (0.4, [0.0] * 31, 0.1, ("bad", ["ttft", "itl", "icl", "tpot"])),
        # a prompt that takes 20 s with an answer of 0.16 s is none that was held back
        (20.0, [0.005] * 31, 20.0, ("ok", [])),
        # 80 ms between bunches are much of a TTFT of 0.1 s and nothing of one of 20 s; a third of
        # the time of 4 bunches,
        # a fifteenth of that of 16
        (0.1, ([0.0] * 7 + [0.08]) * 3 + [0.0] * 7, 0.1, ("note", ["ttft", "itl", "icl", "tpot"])),
        (20.0, ([0.0] * 7 + [0.08]) * 3 + [0.0] * 7, 20.0, ("note", ["itl", "icl", "tpot"])),
        (20.0, [0.0, 0.08] * 15 + [0.0], 20.0, ("note", ["itl", "icl"])),
        (0.02, [0.0, 0.0005] * 15 + [0.0], 0.02, ("ok", [])),  # 0.5 ms matter to nobody
    ],
)
def test_whether_chunks_come_as_they_are_made(
    ttft_s: float, gaps_s: list[float], short_ttft_s: float, expected: tuple[str, list[str]]
) -> None:
    answer = record(ttft_s, gaps_s, asked=32, tokens=32)
    assert verdict(answer, "stream", short_ttft_s) == expected


@pytest.mark.parametrize(
    ("more", "name", "expected"),
    [
        (
            {"output_tokens": 40, "chunk_at_us": list(range(0, 400_000, 10_000))},
            "output length",
            ("bad", ["tokens"]),
        ),
        # 32 chunks as asked, and another number of tokens; more chunks than tokens; more reasoning
        # than tokens
        ({"output_tokens": 224}, "token counts", ("bad", ["itl", "tpot", "tokens"])),
        ({"output_tokens": 224}, "output length", ("note", ["itl", "tpot", "tokens"])),
        (
            {"chunk_at_us": list(range(0, 640_000, 10_000))},
            "token counts",
            ("bad", ["itl", "tpot", "tokens"]),
        ),
        ({"reasoning_tokens": 96}, "reasoning", ("note", ["itl", "tpot", "tokens"])),
        (
            {"reasoning_tokens": 96, "first_answer_ns": None},
            "token counts",
            ("bad", ["itl", "tpot", "tokens"]),
        ),
        # 40 tokens in 20 chunks: several in each, nothing to doubt
        (
            {
                "output_tokens": 40,
                "output_tokens_planned": 40,
                "chunk_at_us": list(range(0, 200_000, 10_000)),
            },
            "token counts",
            ("note", ["itl"]),
        ),
        (
            {"output_tokens": 20, "chunk_at_us": list(range(0, 200_000, 10_000))},
            "output length",
            ("note", []),
        ),
        ({"input_tokens": 150}, "input length", ("bad", ["tokens"])),
        ({"input_tokens": 109}, "input length", ("ok", [])),
        ({"cached_tokens": 90}, "prompt cache", ("bad", ["ttft"])),
        ({"first_answer_ns": 300_000_000}, "reasoning", ("note", [])),
        ({"first_answer_ns": None}, "reasoning", ("note", [])),
        (
            {"reasoning_tokens": 8, "output_tokens": 40},
            "token counts",
            ("ok", ["tokens"]),
        ),  # hidden: 32 are visible
        ({"first_event_ns": 40_000_000}, "first event", ("ok", [])),
        (
            {"token_source": "usage_per_chunk", "chunk_tokens": [2] * 32, "output_tokens": 63},
            "token counts",
            ("ok", ["tokens"]),
        ),
    ],
)
def test_what_the_answer_says_of_its_tokens(
    more: dict[str, Any], name: str, expected: tuple[str, list[str]]
) -> None:
    assert verdict(record(0.1, [0.01] * 31, asked=32, tokens=32, **more), name) == expected


def test_an_answer_that_ends_by_itself_counts_an_end_token_that_no_chunk_has() -> None:
    """33 tokens in 32 chunks, ended by "stop": one token in each; by "length" nobody knows which
    chunk had two.
    """
    for finish_reason, known, ratio in (("stop", True, 1.0), ("length", False, 33 / 32)):
        answer = record(0.1, [0.01] * 31, asked=64, tokens=33, finish_reason=finish_reason)
        checks, facts = checkup(seen(answer, short_ttft_s=0.1))
        assert (facts["chunk_tokens_known"], facts["tokens_per_chunk"]) == (known, ratio)
        said = next(check.found for check in checks if check.name == "output length")
        assert ("ignore_eos is not obeyed" in said) is (finish_reason == "stop")


def test_tokens_without_text_and_vectors_have_no_latency_of_a_stream() -> None:
    hidden = replace(
        record(0.1, [0.01] * 3, asked=4, tokens=4),
        chunk_at_us=[],
        first_token_ns=None,
        last_token_ns=None,
        first_answer_ns=None,
    )
    for name in ("stream", "token counts"):
        assert verdict(hidden, name) == ("bad", ["ttft", "itl", "icl", "tpot", "tokens"])
    vector = replace(hidden, output_tokens=None, token_source=None, last_token_ns=100_000_000)
    asked = seen(vector, short_ttft_s=0.1)
    checks, _ = checkup(replace(asked, settings=replace(asked.settings, api="embeddings")))
    assert [c.name for c in checks] == json.loads("""["connection", "network", "model",
        "stream", "input length", "prompt cache", "metrics", "clock", "open files",
        "receive path"]""")
    assert [c.name for c in checks if c.verdict != "ok"] == ["prompt cache"]
    assert [metric for metric, fine in trusted(checks).items() if fine] == ["e2e", "tokens"]


def test_the_first_event_is_told_with_what_another_tool_would_report() -> None:
    """A role at 40 ms and text at 100 ms: 60 ms less."""
    answer = record(0.1, [0.01] * 31, asked=32, tokens=32, first_event_ns=40_000_000)
    checks, _ = checkup(seen(answer, short_ttft_s=0.1))
    said = next(check for check in checks if check.name == "first event")
    assert "40 ms after the request; the first text 60 ms later" in said.found
    assert said.means.endswith("reports 60 ms less")


def found(name: str, given: DoctorResult) -> str:
    return next(f"{c.verdict} {c.found} → {c.means}" for c in checkup(given)[0] if c.name == name)


@pytest.mark.parametrize(
    ("options", "more", "name", "expected"),
    [
        # 5 of 32: by the user's own option, or else by the server
        (
            {"extra_body": {"max_tokens": 5}},
            {"output_tokens": 5, "chunk_at_us": [0, 1, 2, 3, 4]},
            "output length",
            "note .*extra-body has max_tokens → your own",
        ),
        (
            {"extra_body": {"top_p": 1}},
            {"output_tokens": 5, "chunk_at_us": [0, 1, 2, 3, 4]},
            "output length",
            "note .*a limit of its own",
        ),
        ({"extra_body": {"ignore_eos": True}}, {}, "output length", "ok .*lengths are kept"),
        (
            {"input_tokens": 8000, "output_tokens": 32},
            {},
            "input length",
            "note .*the workload's 8,000 are cut to the model's context of 200",
        ),
        ({"input_tokens": 100, "output_tokens": 32}, {}, "input length", "ok .*server"),
        ({}, {}, "clock", "ok .*while idle; taken out of all times$"),
        ({"timestamps": "read"}, {}, "clock", "ok .*--timestamps kernel takes it out$"),
    ],
)
def test_what_was_asked_for_is_not_the_servers_doing(
    options: dict[str, Any], more: dict[str, Any], name: str, expected: str
) -> None:
    given = seen(record(0.1, [0.01] * 31, asked=32, tokens=32, **more), short_ttft_s=0.1)
    given = replace(
        given,
        settings=make_settings({"url": "http://127.0.0.1:9/v1", **options}),
        probe=replace(given.probe, served=Served(("m",), max_model_len=200)),
    )
    assert re.match(expected, found(name, given))


@pytest.mark.parametrize(
    ("new_s", "again_s", "said"),
    [
        (0.1, 0.02, "takes 20 ms instead of 100 ms"),
        (0.1, 0.06, "is no faster"),
        (0.003, 0.001, "is no faster"),
    ],
)
def test_a_repeated_prompt_is_faster_by_half_and_by_more_than_noise(
    new_s: float, again_s: float, said: str
) -> None:
    given = seen(record(0.1, [0.01] * 31, asked=32, tokens=32), short_ttft_s=new_s)
    again = record(again_s, [0.01] * 3, asked=4, tokens=4)
    assert f"a repeated prompt {said} →" in found("prompt cache", replace(given, again=again))


@pytest.mark.parametrize(("compiled", "verdict"), [(True, "ok"), (False, "note")])
def test_it_says_whether_the_receive_path_was_compiled(compiled: bool, verdict: str) -> None:
    given = seen(record(0.1, [0.01] * 31, asked=32, tokens=32), short_ttft_s=0.1)
    assert found("receive path", replace(given, compiled=compiled)).startswith(verdict)


def test_failures_are_counted_and_each_kind_is_said_once() -> None:
    given = seen(record(0.1, [0.01] * 31, asked=32, tokens=32), short_ttft_s=0.1)
    said = found(
        "connection",
        replace(given, failures=("reset: gone", "reset: gone", "timeout: 9 s"), asked=24),
    )
    assert "3 of 24 requests failed (reset: gone; timeout: 9 s) →" in said


# -- chance, and a busy machine --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "verdict", "said"),
    [(1, "ok", "1 of 2 answers not, by chance"), (3, "bad", "so in 3 of 3 answers")],
)
def test_a_stream_that_is_not_as_it_should_be_is_asked_for_again(
    held: int, verdict: str, said: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ``held`` answers of 33 tokens come in one write; the probe asks for none that is as
    long.
    """
    left = [held]

    async def play(call: Call) -> bool:
        if call.request.tokens == 33 and left[0]:
            left[0] -= 1
            await asyncio.sleep(0.05)
            await call.head()
            await call.chunk(call.whole())
            await call.send(b"0\r\n\r\n")
            return True
        return await ok(call)

    monkeypatch.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=play))
    monkeypatch.setattr("ampacity.experiments.doctor.ANSWER_TOKENS", (33, 256))
    with FaultServer(gap_s=0.005) as server:
        _, out, _ = doctor(server.url, "--json", *LENGTHS)
    (stream,) = [check for check in json.loads(out)["checks"] if check["name"] == "stream"]
    assert (stream["verdict"], left) == (verdict, [0])
    assert said in stream["found"]


@pytest.mark.parametrize("busy", [(), ("make 1.9 cores",)])
def test_a_busy_machine_is_named_before_a_proxy(busy: tuple[str, ...]) -> None:
    """32 chunks in 4 reads, 80 ms apart: coalesced. A good stream is good however busy the machine
    was.
    """
    bunches = record(0.1, [0.0] * 7 + ([0.08] + [0.0] * 7) * 3, asked=32, tokens=32)
    for answer, bad in ((bunches, True), (record(0.1, [0.01] * 31, asked=32, tokens=32), False)):
        checks, _ = checkup(replace(seen(answer, short_ttft_s=0.1), busy_with=busy))
        (stream,) = [check for check in checks if check.name == "stream"]
        assert (stream.verdict != "ok") is bad
        assert ("make 1.9 cores" in stream.means) is (bad and bool(busy))
        assert stream.means.startswith("this machine was busy") is (bad and bool(busy))


def test_what_takes_most_of_the_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores, in 10 s: 19 s of make are 1.9 cores, and 12 s are no more than 1.2, which is
    not most.
    """
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for used_s, said in ((19.0, ("make 1.9 cores", "sh 0.1 cores")), (12.0, ())):
        after = {7: ("make", 100 + used_s), 8: ("sh", 1.0)}
        monkeypatch.setattr("ampacity.experiments.doctor.cpu_seconds", lambda after=after: after)
        assert _busy_with({7: ("make", 100.0)}, 10.0) == said
