"""Responses, Messages and embeddings over a real socket, with the load generator as client."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.probe.ask import ask
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import parse_endpoint
from ampacity.loadgen.send.protocols import Api, Dialect, RequestShape
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.faults import Plan
from ampacity.simulator.server.protocol import CHAT_OVERHEAD_TOKENS
from ampacity.simulator.server.server import Server
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS
from tests.support.args import args_of
from tests.support.simulator.simulated_server import FAST, served
from tests.support.simulator.simulated_server import run as run_within

STREAMED: tuple[Api, ...] = ("responses", "messages")
WORDS_IN, TOKENS_OUT = 20, 12


def asked(
    api: Api, *, tokens: int = TOKENS_OUT, stream: bool = True, **options: Any
) -> RequestRecord:
    """The record of one request to a simulator with these options."""
    found: list[RequestRecord] = []

    async def main() -> None:
        async with served(FAST, **options) as (_, url, _session):
            endpoint = parse_endpoint(f"{url}/v1")
            client = Client(endpoint, endpoint.addresses(), None)
            maker = RequestMaker(endpoint, PromptMaker(WORDS, "s"), "run")
            extra = {} if stream else {"stream": False}
            shape = RequestShape(api, "tiny", Dialect(), extra)
            found.append(await ask(client, api, maker.numbered(shape, WORDS_IN, tokens)))
            await client.close()

    run_within(main)
    return found[0]


@pytest.mark.parametrize("api", STREAMED)
def test_an_answer_has_the_tokens_asked_for_each_in_an_event_of_its_own(api: Api) -> None:
    record = asked(api)
    assert (record.status, record.error) == ("ok", None)
    assert (record.input_tokens, record.output_tokens) == (
        WORDS_IN + CHAT_OVERHEAD_TOKENS,
        TOKENS_OUT,
    )
    assert len(record.chunk_at_us) == TOKENS_OUT
    assert record.finish_reason == ("length" if api == "responses" else "max_tokens")
    assert record.first_answer_ns == record.first_token_ns
    assert record.first_event_ns is not None
    # eleven steps of 2 ms, were the machine idle
    assert record.chunk_at_us[-1] - record.chunk_at_us[0] > 4_000


@pytest.mark.parametrize("api", STREAMED)
def test_thinking_comes_first_in_its_own_events(api: Api) -> None:
    record = asked(api, face=Face(reasoning_share=0.5))
    assert (record.status, len(record.chunk_at_us)) == ("ok", TOKENS_OUT)
    assert (record.first_answer_ns - record.started_ns) // 1000 == record.chunk_at_us[6]
    # Anthropic does not count it apart
    assert record.reasoning_tokens == (6 if api == "responses" else None)


@pytest.mark.parametrize("api", STREAMED)
def test_all_of_it_may_be_thinking_or_come_in_large_chunks_or_be_no_stream(api: Api) -> None:
    assert asked(api, face=Face(reasoning_share=1.0)).first_answer_ns is None
    coarse = asked(api, face=Face(chunk_tokens=4, reasoning_share=0.5))
    assert (coarse.status, coarse.output_tokens) == ("ok", TOKENS_OUT)
    assert coarse.first_answer_ns is not None
    whole = asked(api, stream=False, face=Face(reasoning_share=0.5))
    assert (whole.status, whole.output_tokens) == ("ok", TOKENS_OUT)
    assert len(set(whole.chunk_at_us)) == 1


@pytest.mark.parametrize("api", STREAMED)
@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("error_in_stream", "stream_error", "injected fault"),
        ("truncated", "truncated", ""),
        ("reset_stream", "truncated", ""),
        ("garbage", "protocol_error", "not JSON"),
        ("503", "http_error", "HTTP 503: injected fault"),
    ],
)
def test_faults_are_those_of_the_api(api: Api, fault: str, status: str, said: str) -> None:
    record = asked(api, faults=Plan(errors={fault: 1.0}))
    assert (record.status, said in (record.error or "")) == (status, True), record.error


def test_embeddings_take_a_prefill_and_say_what_they_counted() -> None:
    record = asked("embeddings")
    assert (record.status, record.finish_reason) == ("ok", "stop")
    assert (record.input_tokens, record.output_tokens) == (WORDS_IN, None)
    assert (record.last_token_ns or 0) - (record.started_ns or 0) > 1_500_000


@pytest.mark.parametrize(
    ("given", "vectors", "tokens"),
    [("one", 1, 1), (["one two", "three"], 2, 3), ([[1, 2], [3]], 2, 3), ([1, 2, 3], 1, 3)],
)
def test_every_input_of_embeddings_has_a_vector(given: Any, vectors: int, tokens: int) -> None:
    async def main() -> None:
        async with served(FAST) as (_, url, session):
            async with session.post(f"{url}/v1/embeddings", json={"input": given}) as response:
                found = await response.json()
            assert [one["index"] for one in found["data"]] == list(range(vectors))
            assert found["usage"]["prompt_tokens"] == tokens

    run_within(main)


def test_what_is_missing_is_refused_and_a_key_may_be_anthropics() -> None:
    async def main() -> None:
        async with served(FAST, api_key="k") as (_, url, session):
            cases: list[tuple[str, dict[str, Any], str]] = [
                ("messages", {"messages": [{"role": "user", "content": "x"}]}, "body.max_tokens"),
                ("responses", {"max_output_tokens": 4}, "body.messages"),
                ("embeddings", {"model": "tiny"}, "body.input"),
            ]
            for api, body, said in cases:
                async with session.post(f"{url}/v1/{api}", json=body) as response:
                    assert response.status == 401
                for header in ({"X-Api-Key": "k"}, {"Authorization": "Bearer k"}):
                    async with session.post(
                        f"{url}/v1/{api}", json=body, headers=header
                    ) as response:
                        assert (response.status, said in await response.text()) == (400, True)
            body = json.loads("""{"max_tokens": 2, "system": "be brief",
                "stop_sequences": ["never said"], "messages": [{"role": "user",
                "content": [{"type": "text", "text": "two words"}]}, {"role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "f",
                "input": {"q": "x"}}]}, {"role": "user", "content": [{"type": "tool_result",
                "tool_use_id": "a", "content": "three words here"}]}]}""")
            async with session.post(
                f"{url}/v1/messages", json=body, headers={"X-Api-Key": "k"}
            ) as response:
                found = await response.json()
            # be brief, two words, {"q":"x"}, three words here
            assert found["usage"]["input_tokens"] == CHAT_OVERHEAD_TOKENS + 2 + 2 + 1 + 3

    run_within(main)


# -- whole runs ------------------------------------------------------------------------------------


@contextmanager
def simulator(**options: Any) -> Iterator[str]:
    """Its base URL; on a loop of its own."""
    loop, server = asyncio.new_event_loop(), Server(FAST, model_name="tiny", **options)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(10)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("api", [*STREAMED, "embeddings"])
def test_a_run_and_doctor_work_with_every_api(
    api: Api, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    with simulator() as url:
        lengths = ("--api", api, "--input-tokens", "20", "--output-tokens", "12")
        assert (
            ampacity(
                "run",
                url,
                *lengths,
                *args_of("--rates 20 --duration 2s --slo e2e_p50=2s --out"),
                tmp_path / "run",
            )
            == 0
        )
        capsys.readouterr()
        assert ampacity("doctor", url, *lengths, "--json") == 0
    checks = {c["name"]: c["verdict"] for c in json.loads(capsys.readouterr().out)["checks"]}
    run = load_run(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(run.requests["status"].to_pylist()) == {"ok"}
    assert {f["verdict"] for f in run.meta["diagnosis"]} <= {"ok", "note"}
    assert checks["stream"] == checks["input length"] == "ok"
    realised = summary["workload"]["realised"]
    # the template's tokens are measured and left out
    assert realised["input_tokens"]["sent"]["p50"] == 20
    if api != "embeddings":
        assert realised["output_tokens"]["received"]["p50"] == 12
        assert summary["stages"][0]["ttft_s"]["p50"] is not None


@pytest.mark.parametrize("api", STREAMED)
def test_conversations_grow_as_planned_in_every_api(
    api: Api, tmp_path: Path, ampacity: Any
) -> None:
    profile = tmp_path / "talk.yaml"
    profile.write_text(
        "name: talk\nsource: test\ninput_tokens: 30\noutput_tokens: 12\nsessions: {turns: 3}\n"
    )
    with simulator() as url:
        assert ampacity(
            "run",
            url,
            "--api",
            api,
            "--workload",
            profile,
            *args_of("--rates 12 --duration 2s --out"),
            tmp_path / "run",
        ) in (0, 3)
    table = load_run(tmp_path / "run").requests
    for planned, sent, status in zip(
        *(table[n].to_pylist() for n in ("input_tokens_planned", "input_tokens", "status")),
        strict=True,
    ):
        if status == "ok":
            assert sent == planned


def test_the_exchange_is_told_of_after_its_secrets_are_gone() -> None:
    """What hears an answer sees the record that is kept."""
    heard: list[Exchange] = []

    async def main() -> None:
        async with served(FAST) as (_, url, _session):
            endpoint = parse_endpoint(f"{url}/v1")
            client = Client(endpoint, endpoint.addresses(), None)
            maker = RequestMaker(endpoint, PromptMaker(WORDS, "s"), "run")
            shape = RequestShape("chat", "other")
            record = await ask(client, "chat", maker.numbered(shape, 5, 2), heard.append)
            assert heard[0].record is record
            assert record.status == "http_error"
            await client.close()

    run_within(main)
