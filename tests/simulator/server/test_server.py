"""The server over real sockets: vLLM's formats, errors, metrics, and real time."""

import asyncio
import dataclasses
import json
import re
import time
from typing import Any

import aiohttp
import pytest

from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.engine.options import Speculation
from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.text import WORDS
from tests.support.simulator.simulated_server import (
    CHAT,
    FAST,
    HELLO,
    PROMPT_TOKENS,
    events,
    metric,
    metrics,
    on_loop,
    served,
)

pytestmark = pytest.mark.real_time  # needs the machine to itself


@on_loop
async def test_chat_stream_chunk_by_chunk() -> None:
    async with served() as (_, url, session):
        payload = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True, "seed": 1}
        payload["stream_options"] = {"include_usage": True}
        *chunks, done = await events(session, f"{url}/v1/chat/completions", payload)
        assert done == "[DONE]"
        decoded = [json.loads(chunk) for chunk in chunks]
        identity = decoded[0]["id"]
        assert re.fullmatch(r"chatcmpl-[0-9a-f]{16}", identity)
        for chunk in decoded:
            assert chunk["id"] == identity
            assert (chunk["object"], chunk["model"]) == ("chat.completion.chunk", "tiny")
            assert abs(chunk["created"] - time.time()) < 60
        role, *texts, usage = decoded
        assert role["choices"] == json.loads("""[{"index": 0, "delta": {"role": "assistant",
            "content": ""}, "logprobs": null, "finish_reason": null}]""")
        assert len(texts) == 3
        assert [chunk["choices"][0]["delta"].keys() for chunk in texts] == [{"content"}] * 3
        assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [None, None, "length"]
        assert texts[2]["choices"][0]["stop_reason"] is None
        assert all(chunk["choices"][0]["delta"]["content"] in WORDS for chunk in texts)
        assert usage["choices"] == []
        assert usage["usage"] == {
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": PROMPT_TOKENS + 3,
            "completion_tokens": 3,
        }
        assert not any("usage" in chunk for chunk in texts)
        # The same seed gives the same words, streamed or not.
        async with session.post(
            f"{url}/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3, "seed": 1}
        ) as response:
            whole = await response.json()
        streamed = "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts)
        assert whole["choices"][0]["message"]["content"] == streamed


@on_loop
async def test_wire_framing_and_role_chunk_with_the_first_token() -> None:
    """One HTTP chunk for each event; the role event comes with the first token, not before."""
    async with served(linear_config(0.1, 0.0)) as (_, url, _session):
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        payload = json.dumps({"messages": HELLO, "max_tokens": 2, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(
            payload
        )
        for _ in range(2):  # twice over one connection: it stays usable
            sent_s = time.monotonic()
            writer.write(head + payload)
            headers = await reader.readuntil(b"\r\n\r\n")
            assert headers.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"transfer-encoding: chunked" in headers.lower()
            received = await reader.read(65536)
            assert time.monotonic() - sent_s >= 0.1  # no token before the end of the step
            assert b'"role"' in received
            assert b'"content":" ' in received
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(65536)
            framed = []
            while received != b"0\r\n\r\n":
                size, _, received = received.partition(b"\r\n")
                event, received = received[: int(size, 16)], received[int(size, 16) :]
                assert received.startswith(b"\r\n")
                received = received[2:]
                framed.append(event)
            assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in framed)
            assert [b'"role"' in event for event in framed] == [True, False, False, False]
            assert [b'"content":" ' in event for event in framed] == [False, True, True, False]
            assert framed[-1] == b"data: [DONE]\n\n"
        writer.close()
        await writer.wait_closed()


@on_loop
async def test_continuous_usage() -> None:
    async with served() as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 3, "stream": True}
        payload["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, _ = await events(session, f"{url}/v1/chat/completions", payload)
        counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [0, 1, 2, 3, 3]


@on_loop
async def test_completions_stream_and_whole() -> None:
    async with served() as (_, url, session):
        payload = {"model": "tiny", "prompt": "one two three", "max_tokens": 2, "seed": 7}
        *chunks, done = await events(session, f"{url}/v1/completions", payload | {"stream": True})
        assert done == "[DONE]"
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]
        async with session.post(f"{url}/v1/completions", json=payload) as response:
            whole = await response.json()
        assert whole["object"] == "text_completion"
        assert whole["choices"][0]["text"] == "".join(choice["text"] for choice in choices)
        assert whole["usage"]["prompt_tokens"] == 3
        assert whole["usage"]["completion_tokens"] == 2
        # Token ids; without max_tokens a completion has 16 tokens.
        async with session.post(f"{url}/v1/completions", json={"prompt": [300, 301]}) as response:
            usage = (await response.json())["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 16)


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_limits_on_the_answer(stream: bool) -> None:
    async def completion_tokens(session: aiohttp.ClientSession, url: str, **fields: Any) -> int:
        payload = {"messages": HELLO, "stream": stream} | fields
        if not stream:
            async with session.post(f"{url}/v1/chat/completions", json=payload) as response:
                body = await response.json()
                expected = body["usage"]["completion_tokens"]
                assert len(body["choices"][0]["message"]["content"].split()) == expected
                return int(body["usage"]["completion_tokens"])
        payload["stream_options"] = {"include_usage": True}
        return int(
            json.loads((await events(session, f"{url}/v1/chat/completions", payload))[-2])["usage"][
                "completion_tokens"
            ]
        )

    async with served(linear_config(1e-4, 0.0, max_model_len=50)) as (_, url, session):
        assert await completion_tokens(session, url, max_tokens=1) == 1
        assert await completion_tokens(session, url, max_completion_tokens=4, max_tokens=9) == 4
        assert (
            await completion_tokens(session, url, max_tokens=5, min_tokens=5, ignore_eos=True) == 5
        )
        # Without a limit the answer runs to the end of the context.
        assert await completion_tokens(session, url) == 50 - PROMPT_TOKENS


@on_loop
async def test_key_is_asked_for_under_v1_only() -> None:
    async with served(api_key="s3cret") as (_, url, session):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            async with session.get(f"{url}/v1/models", headers=headers) as response:
                assert (response.status, await response.json()) == (401, {"error": "Unauthorized"})
            async with session.post(
                url + CHAT, json={"messages": HELLO}, headers=headers
            ) as response:
                assert response.status == 401
        right = {"Authorization": "Bearer s3cret"}
        async with session.get(f"{url}/v1/models", headers=right) as response:
            assert response.status == 200
        assert (
            len(
                await events(
                    session,
                    url + CHAT,
                    {"messages": HELLO, "max_tokens": 1, "stream": True},
                    headers=right,
                )
            )
            == 3
        )
        for open_path in ("/health", "/metrics", "/version"):
            async with session.get(url + open_path) as response:
                assert response.status == 200


@on_loop
async def test_models_tokenize_version() -> None:
    async with served() as (_, url, session):
        async with session.get(f"{url}/v1/models") as response:
            (card,) = (await response.json())["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 4096)
        async with session.post(f"{url}/tokenize", json={"prompt": "a b c"}) as response:
            answer = await response.json()
        assert (answer["count"], len(answer["tokens"]), answer["max_model_len"]) == (3, 3, 4096)
        async with session.post(f"{url}/tokenize", json={"messages": HELLO}) as response:
            assert (await response.json())["count"] == PROMPT_TOKENS
        async with session.get(f"{url}/version") as response:
            assert "version" in await response.json()


@on_loop
async def test_request_id_header_is_used() -> None:
    async with served() as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 1}
        for given, expected in (("run-17", r"chatcmpl-run-17"), ('a"b', r"chatcmpl-[0-9a-f]{16}")):
            async with session.post(
                url + CHAT, json=payload, headers={"X-Request-Id": given}
            ) as response:
                assert re.fullmatch(expected, (await response.json())["id"])


@on_loop
async def test_metrics_move_and_count() -> None:
    # 2 slots, blocks of 16 tokens; the prompts have 10 tokens and the answers 4
    config = EngineConfig("m", FAST.step_time, 2, 1 << 20, 64, 100, 16)
    async with served(config) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 4, "stream": True}
        await asyncio.gather(*(events(session, url + CHAT, payload) for _ in range(5)))
        text = await metrics(session, url)
        assert metric(text, "vllm:prompt_tokens_total") == 5 * PROMPT_TOKENS
        assert metric(text, "vllm:generation_tokens_total") == 20
        assert metric(text, "vllm:request_success_total", finished_reason="length") == 5
        assert metric(text, "vllm:time_to_first_token_seconds_count") == 5
        assert metric(text, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 5
        assert metric(text, "vllm:inter_token_latency_seconds_count") == 15
        assert metric(text, "vllm:e2e_request_latency_seconds_count") == 5
        assert metric(text, "vllm:num_preemptions_total") == 0
        assert metric(text, "vllm:num_requests_running") == 0
        assert metric(text, "ampacity_simulator_lateness_seconds_count") >= 12
        assert metric(text, "ampacity_simulator_lateness_seconds", quantile="0.99") >= 0


@on_loop
async def test_drafts_are_counted() -> None:
    """All are accepted: the first token is the prompt's, then a step gives 4 drafts and its own."""
    config = dataclasses.replace(FAST, speculation=Speculation(4, 1.0, 0.0))
    async with served(config) as (_, url, session):
        await events(session, url + CHAT, {"messages": HELLO, "max_tokens": 11, "stream": True})
        text = await metrics(session, url)
        assert metric(text, "vllm:spec_decode_num_draft_tokens_total") == 8
        assert metric(text, "vllm:spec_decode_num_accepted_tokens_total") == 8


@on_loop
async def test_disconnect_frees_the_slot() -> None:
    config = EngineConfig("one", FAST.step_time, 1, 1 << 20, 2048, 200, 16)
    async with served(config) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 2000, "stream": True}
        response = await session.post(url + CHAT, json=payload)
        await response.content.readuntil(b"\n\n")
        text = await metrics(session, url)
        assert metric(text, "vllm:num_requests_running") == 1
        assert metric(text, "vllm:kv_cache_usage_perc") > 0
        waiting = asyncio.create_task(events(session, url + CHAT, payload | {"max_tokens": 2}))
        while metric(await metrics(session, url), "vllm:num_requests_waiting") == 0:
            await asyncio.sleep(0.005)
        response.close()  # the next one gets the only slot long before 2000 tokens
        assert len(await waiting) == 4
        text = await metrics(session, url)
        assert metric(text, "vllm:num_requests_running") == 0
        assert metric(text, "vllm:kv_cache_usage_perc") == 0
        assert metric(text, "vllm:request_success_total", finished_reason="abort") == 1
        assert metric(text, "vllm:generation_tokens_total") < 1500
