"""``ampacity doctor``: the right verdict for servers whose truth is known."""

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampacity.cli import main
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.launch import start_in_process
from tests.support.args import args_of
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import FAULTS, Call, Play, close_mid_stream, ok

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


def play_instead(
    monkeypatch: pytest.MonkeyPatch, which: Callable[[Call], bool], play: Play, times: int = 99
) -> list[int]:
    """Play ``play`` in place of a good answer to the first ``times`` of ``which``; return how many
    are left."""
    left = [times]

    async def either(call: Call) -> bool:
        if not left[0] or not which(call):
            return await ok(call)
        left[0] -= 1
        return await play(call)

    monkeypatch.setitem(FAULTS, "ok", FAULTS["ok"]._replace(play=either))
    return left


def test_every_third_answer_in_one_body_is_seen(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three replicas does not stream: the long answer comes from one that does."""
    count = itertools.count(1)
    play_instead(monkeypatch, lambda _: next(count) % 3 == 2, FAULTS["not_streamed"].play, times=99)
    with FaultServer(gap_s=0.002) as server:
        found, spoiled, facts = examined(doctor, server.url, *LENGTHS)
    assert found["stream"] == "bad"
    assert spoiled[:4] == ["ttft", "itl", "icl", "tpot"]
    assert 0 < facts["bodies"] < facts["good"]


def test_a_request_that_fails_is_sent_once_more(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of 33 tokens breaks off the first time, or always; the probe asks for none that is
    as long."""
    monkeypatch.setattr("ampacity.experiments.doctor.ANSWER_TOKENS", (33, 256))
    for limit in (1, 2):
        play_instead(monkeypatch, lambda call: call.request.tokens == 33, close_mid_stream, limit)
        with FaultServer() as server:
            code, out, err = doctor(server.url, *LENGTHS)
        if limit == 1:
            assert code == 0
            said = "(?m)^bad +connection .* 1 of [0-9]+ requests failed [(]truncated"
            assert re.search(said, out)
        else:
            assert (code, out) == (2, "")
            assert "5 input and 33 output tokens failed twice as truncated" in err


@pytest.mark.parametrize(
    ("fails", "ends"),
    [({1}, None), ({1, 2}, None), ({2}, None), ({1, 2, 3}, "failed 3 of 3 times as http_error")],
)
def test_a_first_request_that_fails_is_no_verdict(
    fails: set[int], ends: str | None, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two 500s, also of a later request of the probe, are counted and said; three in a row
    are the server's answer."""
    numbers = itertools.count(1)
    play_instead(monkeypatch, lambda _: next(numbers) in fails, FAULTS["empty_500"].play)
    with FaultServer() as server:
        code, out, err = doctor(server.url, *LENGTHS)
        asked = sum(r.path.endswith("/chat/completions") for r in server.requests)
    if ends is None:
        assert code == 0
        assert f"{len(fails)} of {asked} requests failed (http_error" in out
    else:
        assert (code, out) == (2, "")
        assert f"a first small request {ends}" in err


def test_the_simulator_with_a_face_of_which_everything_is_known(doctor: Doctor) -> None:
    """Chunks of 4 tokens but for the first, 1 + 31/4 = 9 of them; a role chunk before the prefill
    of 400 tokens."""
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


@pytest.mark.parametrize(
    ("held", "busy", "verdict", "said"),
    [
        (1, (), "ok", "1 of 2 answers not, by chance → "),
        (2, (), "ok", "2 of 3 answers not, by chance → "),
        (
            3,
            (),
            "bad",
            "so in 3 of 3 answers → something buffers the stream (a proxy, compression)",
        ),
        (
            3,
            ("make 1.9 cores", "cc1 0.1 cores", "backup 0.1 cores"),
            "bad",
            "so in 3 of 3 answers → this machine was busy with other work (make 1.9 cores, "
            "cc1 0.1 cores, backup 0.1 cores), which may be the whole reason: stop that, and "
            "repeat doctor. Else something buffers the stream (a proxy, compression)",
        ),
        (1, ("make 1.9 cores",), "ok", "1 of 2 answers not, by chance → "),
    ],
)
def test_a_stream_that_is_not_as_it_should_be_is_asked_for_again(
    held: int,
    busy: tuple[str, ...],
    verdict: str,
    said: str,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first ``held`` answers of 33 tokens come in one write; the probe asks for none that is as
    long. What kept this machine busy is named before the endpoint is blamed, and not where the
    stream was good in the end."""

    async def at_once(call: Call) -> bool:
        await asyncio.sleep(0.05)
        await call.head()
        await call.chunk(call.whole())
        await call.send(b"0\r\n\r\n")
        return True

    long = lambda call: call.request.tokens == 33  # noqa: E731
    left = play_instead(monkeypatch, long, at_once, held)
    monkeypatch.setattr("ampacity.experiments.doctor._busy_with", lambda *_: busy)
    monkeypatch.setattr("ampacity.experiments.doctor.ANSWER_TOKENS", (33, 256))
    with FaultServer(gap_s=0.005) as server:
        _, out, _ = doctor(server.url, "--json", *LENGTHS)
    (stream,) = [check for check in json.loads(out)["checks"] if check["name"] == "stream"]
    assert (stream["verdict"], left) == (verdict, [0])
    assert said in f"{stream['found']} → {stream['means']}"
    assert ("busy" in stream["means"]) is (verdict == "bad" and bool(busy))
