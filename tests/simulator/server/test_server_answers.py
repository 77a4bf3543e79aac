"""What a request can ask of its answer, and how the face shows it; over real sockets."""

import asyncio
import json
import math
import re
import time
from dataclasses import replace
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.simulator.engine.engine import Engine, Speculation
from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.metrics import Histogram, Metrics
from ampacity.simulator.server.protocol import parse
from ampacity.simulator.server.realtime import LiveRequest
from ampacity.simulator.server.text import END_OF_TEXT, WORDS, characters
from tests.support.simulator.simulated_server import (
    CHAT,
    FAST,
    HELLO,
    PLAIN,
    PROMPT_TOKENS,
    events,
    metric,
    metrics,
    on_loop,
    served,
)
from tests.support.simulator.simulated_server import read_frames as read_together

pytestmark = pytest.mark.real_time  # needs the machine to itself

Session = aiohttp.ClientSession


async def ask(session: Session, url: str, payload: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=payload) as response:
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def chunks(session: Session, url: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
    *found, done = await events(session, url, payload | {"stream": True})
    assert done == "[DONE]"
    return [json.loads(one) for one in found]


def content(found: list[dict[str, Any]], index: int = 0, field: str = "content") -> list[str]:
    """The texts of one choice, chunk by chunk."""
    return [
        choice["delta"][field]
        for one in found
        for choice in one["choices"]
        if choice["index"] == index and field in choice["delta"] and "role" not in choice["delta"]
    ]


@on_loop
async def test_n_choices_are_interleaved_with_one_usage() -> None:
    async with served() as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 4, "n": 3, "seed": 1}
        found = await chunks(
            session, url + CHAT, payload | {"stream_options": {"include_usage": True}}
        )
        *texts, usage = found
        roles = [c["choices"][0]["index"] for c in texts if "role" in c["choices"][0]["delta"]]
        order = [c["choices"][0]["index"] for c in texts if "role" not in c["choices"][0]["delta"]]
        assert roles == [0, 1, 2]
        assert order == [0, 1, 2] * 4
        assert usage["usage"] == {
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": PROMPT_TOKENS + 12,
            "completion_tokens": 12,
        }
        whole = await ask(session, url + CHAT, payload)
        said = [choice["message"]["content"] for choice in whole["choices"]]
        assert said == ["".join(content(found, index)) for index in range(3)]
        assert len(set(said)) == 3
        text = await metrics(session, url)
        assert metric(text, "vllm:request_success_total", finished_reason="length") == 6
        assert metric(text, "vllm:request_params_n_sum") == 6  # 3 in each of 2 requests


@on_loop
async def test_several_prompts_in_one_completion() -> None:
    async with served() as (_, url, session):
        payload = {"prompt": ["a b", "c d e"], "max_tokens": 2, "n": 2}
        whole = await ask(session, url + PLAIN, payload)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["usage"]["prompt_tokens"] == 5
        assert whole["usage"]["completion_tokens"] == 8


@on_loop
async def test_stop_strings_end_the_answer_and_are_cut_off() -> None:
    async with served(linear_config(1e-4, 0.0, max_num_seqs=8)) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 30, "seed": 5}
        free = (await ask(session, url + CHAT, payload))["choices"][0]["message"]["content"]
        assert len(free) == 150
        stop = free[48:53]  # spans tokens 10 and 11
        at = free.index(stop)
        tokens = math.ceil((at + 5) / 5)
        payload |= {"stop": ["never", stop], "stream_options": {"include_usage": True}}
        found = await chunks(session, url + CHAT, payload)
        assert "".join(content(found)) == free[:at]
        last = found[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
        assert found[-1]["usage"]["completion_tokens"] == tokens
        # 4 characters are held back: they may begin a stop string
        seen = 0
        for number, piece in enumerate(content(found), 1):
            seen += len(piece)
            assert seen <= max(0, number * 5 - 4)
        whole = await ask(
            session, url + CHAT, {k: v for k, v in payload.items() if k != "stream_options"}
        )
        assert whole["choices"][0]["message"]["content"] == free[:at]
        assert whole["usage"]["completion_tokens"] == tokens
        text = await metrics(session, url)
        assert metric(text, "vllm:request_success_total", finished_reason="stop") == 2


@on_loop
async def test_answers_end_by_themselves_unless_told_not_to() -> None:
    face = Face(natural_tokens=8)
    async with served(linear_config(1e-4, 0.0, max_num_seqs=64), face=face) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 100}

        async def lengths(**fields: Any) -> list[tuple[int, str, int]]:
            found = await asyncio.gather(
                *(ask(session, url + CHAT, payload | fields) for _ in range(150))
            )
            return [
                (
                    one["usage"]["completion_tokens"],
                    one["choices"][0]["finish_reason"],
                    len(one["choices"][0]["message"]["content"]) // 5,
                )
                for one in found
            ]

        natural = await lengths()
        # The end-of-sequence token counts and has no text.
        assert all(words == tokens - (reason == "stop") for tokens, reason, words in natural)
        # Geometric with mean 8: standard deviation 7.5, of the mean of 150 0.61.
        assert abs(np.mean([tokens for tokens, _, _ in natural]) - 8) < 2.4
        assert {tokens for tokens, _, _ in await lengths(ignore_eos=True)} == {100}
        assert all(tokens > 20 for tokens, _, _ in await lengths(min_tokens=20))
        last = (await chunks(session, url + CHAT, payload))[-1]["choices"][0]
        assert (last["delta"], last["finish_reason"]) == ({"content": ""}, "stop")


@on_loop
async def test_logprobs_of_chat_and_completions() -> None:
    async with served() as (_, url, session):
        payload = {
            "messages": HELLO,
            "max_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "seed": 1,
        }
        found = await chunks(session, url + CHAT, payload)
        entries = [one["choices"][0]["logprobs"]["content"][0] for one in found[1:]]
        assert [entry["token"] for entry in entries] == content(found)
        for entry in entries:
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert len(entry["top_logprobs"]) == 2
            assert sum(math.exp(one["logprob"]) for one in entry["top_logprobs"]) <= 1
        whole = await ask(session, url + CHAT, payload)
        assert whole["choices"][0]["logprobs"]["content"] == entries
        whole = await ask(session, url + PLAIN, {"prompt": "a", "max_tokens": 3, "logprobs": 0})
        log = whole["choices"][0]["logprobs"]
        assert "".join(log["tokens"]) == whole["choices"][0]["text"]
        assert log["text_offset"] == [0, 5, 10]
        assert [
            dict([pair]) for pair in zip(log["tokens"], log["token_logprobs"], strict=True)
        ] == log["top_logprobs"]


@on_loop
async def test_the_end_token_is_in_the_logprobs() -> None:
    async with served(face=Face(natural_tokens=1)) as (_, url, session):
        whole = await ask(session, url + CHAT, {"messages": HELLO, "logprobs": True})
        (entry,) = whole["choices"][0]["logprobs"]["content"]
        assert (entry["token"], whole["choices"][0]["message"]["content"]) == (END_OF_TEXT, "")


@on_loop
async def test_adapters_are_models() -> None:
    async with served(face=Face(adapters=("sql", "legal"))) as (_, url, session):
        async with session.get(f"{url}/v1/models") as response:
            cards = (await response.json())["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("sql", "tiny"),
            ("legal", "tiny"),
        ]
        payload = {"model": "sql", "messages": HELLO, "max_tokens": 1}
        assert (await ask(session, url + CHAT, payload))["model"] == "sql"
        async with session.post(url + CHAT, json=payload | {"model": "x"}) as response:
            assert response.status == 404
            message = (await response.json())["error"]["message"]
        assert message.endswith("Valid aliases: tiny, sql, legal.")


@on_loop
async def test_prompt_details_and_prefix_cache() -> None:
    config = replace(FAST, prefix_caching=True, kv_blocks=1000)
    async with served(config, face=Face(prompt_tokens_details=True)) as (_, url, session):
        message = [{"role": "user", "content": "word " * 92}]  # 100 tokens: 6 full blocks of 16
        payload = {"messages": message, "max_tokens": 40, "seed": 1}
        first = await ask(session, url + CHAT, payload)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        second = await ask(session, url + CHAT, payload)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        # The next turn finds the answer too: 100 + 39 tokens with KV entries are 8 full blocks.
        said = first["choices"][0]["message"]["content"]
        turn = [
            *message,
            {"role": "assistant", "content": said},
            {"role": "user", "content": "go on"},
        ]
        options = {"include_usage": True}
        found = await chunks(
            session, url + CHAT, {"messages": turn, "max_tokens": 1, "stream_options": options}
        )
        assert found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        text = await metrics(session, url)
        assert metric(text, "vllm:prefix_cache_queries_total") == 100 + 100 + 142
        assert metric(text, "vllm:prefix_cache_hits_total") == 96 + 128


@on_loop
async def test_histograms_of_a_finished_request() -> None:
    async with served(linear_config(0.02, 0.0)) as (_, url, session):
        await ask(session, url + CHAT, {"messages": HELLO, "max_tokens": 5})
        text = await metrics(session, url)
        for name in (
            "request_prompt_tokens request_generation_tokens "
            "request_time_per_output_token_seconds request_queue_time_seconds "
            "request_prefill_time_seconds request_decode_time_seconds "
            "request_inference_time_seconds request_num_preemptions request_params_max_tokens"
        ).split():
            assert metric(text, f"vllm:{name}_count") == 1, name
        assert metric(text, "vllm:request_prompt_tokens_sum") == PROMPT_TOKENS
        assert metric(text, "vllm:request_generation_tokens_sum") == 5
        assert metric(text, "vllm:iteration_tokens_total_sum") == PROMPT_TOKENS + 5
        assert metric(text, "vllm:request_prefill_time_seconds_sum") >= 0.02
        assert metric(text, "vllm:request_decode_time_seconds_sum") >= 0.08 - 0.015
        whole = metric(text, "vllm:e2e_request_latency_seconds_sum")
        parts = [
            metric(text, f"vllm:request_{part}_time_seconds_sum")
            for part in ("queue", "prefill", "decode")
        ]
        assert sum(parts) == pytest.approx(whole)


def test_gaps_in_the_metrics_are_the_gaps_of_the_requests() -> None:
    """Under prefill-priority a gap counts from the request's own previous token."""
    metrics_ = Metrics("m")
    config = replace(
        linear_config(1.0, 0.0, 0.5, max_num_seqs=8),
        policy="prefill-priority",
        max_num_batched_tokens=10,
    )
    engine = Engine(config)
    lives = [LiveRequest(10, 5) for _ in range(3)]
    for live, arrival_s in zip(lives, (0.0, 2.0, 2.0), strict=True):
        engine.submit(live, arrival_s)
    now_s, last_s, gaps = 0.0, dict[LiveRequest, float](), list[float]()
    while (result := engine.step(now_s)) is not None:
        now_s = result.end_s
        for live in cast(list[LiveRequest], engine.recipients(result)):
            if live in last_s:
                gaps.append(now_s - last_s[live])
            last_s[live] = now_s
        metrics_.on_step(result, 0, now_s)
    found = metrics_.histograms["inter_token_latency_seconds"]
    assert len(gaps) == 12
    assert max(gaps) > 3.9  # two prompts came in between
    expected = Histogram(found.bounds)
    for gap in gaps:
        expected.add(gap)
    assert (found.counts, found.total) == (expected.counts, pytest.approx(expected.total))


@on_loop
async def test_k_tokens_in_a_chunk() -> None:
    async with served(face=Face(chunk_tokens=4)) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 10}
        found = await chunks(session, url + CHAT, payload)
        # The first token alone, then 4 by 4, and the rest with the finish reason: 1 + 4 + 4 + 1.
        assert [len(piece) // 5 for piece in content(found)] == [1, 4, 4, 1]


async def reads(url: str, payload: dict[str, Any]) -> list[tuple[float, bytes]]:
    """What arrives, with the time since the request was written, headers left out."""
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(payload | {"stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    start_s = time.monotonic()
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    found = []
    while data := await reader.read(1 << 20):
        found.append((time.monotonic() - start_s, data))
    writer.close()
    return found


@on_loop
async def test_flush_by_time() -> None:
    """40 tokens in 200 ms, flushed every 50 ms: some five writes, none between two ticks."""
    async with served(linear_config(0.005, 0.0), face=Face(flush_ms=50)) as (_, url, _session):
        found = await reads(url, {"messages": HELLO, "max_tokens": 40})
        assert 2 <= len(found) <= 8  # a late loop makes fewer, the end of the body is one more
        data = b"".join(piece for _, piece in found)
        assert len(re.findall(rb'"content":" ', data)) == 40
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@on_loop
async def test_role_before_the_prefill() -> None:
    config = linear_config(0.3, 0.0)
    async with served(config, face=Face(early_role=True)) as (_, url, _session):
        (early_s, first), *_ = await reads(url, {"messages": HELLO, "max_tokens": 1})
        assert early_s < 0.3
        assert first.count(b'"role"') == 1
        assert b'"content":" ' not in first


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@on_loop
async def test_reasoning_comes_first(field: Any) -> None:
    async with served(face=Face(reasoning_share=0.3, reasoning_field=field)) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 10, "seed": 2}
        found = await chunks(
            session, url + CHAT, payload | {"stream_options": {"include_usage": True}}
        )
        names = [next(iter(one["choices"][0]["delta"])) for one in found[1:-1]]
        assert names == [field] * 3 + ["content"] * 7
        assert found[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
        message = (await ask(session, url + CHAT, payload))["choices"][0]["message"]
        assert message[field] == "".join(content(found, field=field))
        assert message["content"] == "".join(content(found))
        # Completions do not reason.
        assert len((await ask(session, url + PLAIN, {"prompt": "a"}))["choices"][0]["text"]) == 80


@pytest.mark.parametrize(
    ("usage", "running", "final"), [("full", 4, 1), ("end", 0, 1), ("none", 0, 0)]
)
@on_loop
async def test_usage_and_done_can_be_missing(usage: Any, running: int, final: int) -> None:
    async with served(face=Face(usage=usage, done=False)) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 3, "stream": True}
        payload["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        found = [json.loads(one) for one in await events(session, url + CHAT, payload)]
        assert sum("usage" in one for one in found if one["choices"]) == running
        assert sum(not one["choices"] for one in found) == final


@on_loop
async def test_speculative_tokens_come_in_one_chunk() -> None:
    """With every draft accepted, 3 drafts give 4 tokens a step."""
    config = replace(
        FAST, speculation=Speculation(tokens=3, acceptance=1.0), max_num_batched_tokens=8192
    )
    async with served(config) as (_, url, session):
        found = await chunks(session, url + CHAT, {"messages": HELLO, "max_tokens": 13})
        assert [len(piece) // 5 for piece in content(found)] == [1, 4, 4, 4]


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.integers(1, 30),
    st.lists(st.sampled_from(["a", "le", *WORDS[:40]]), max_size=2),
    st.booleans(),
    st.none() | st.integers(1, 9),
)
def test_no_token_is_lost_in_any_mode(
    chunk: int, n: int, share: float, limit: int, stop: list[str], logged: bool, natural: int | None
) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": limit,
        "n": n,
        "stop": stop,
        "logprobs": logged,
        "stream": True,
    }
    call = parse(
        body,
        api="chat",
        models=("m",),
        max_model_len=64,
        default_id="1",
        header_id=None,
        natural_tokens=natural,
    )
    texts, reasons = read_together(call, Face(chunk_tokens=chunk, reasoning_share=share))
    for choice in call.choices:
        assert texts[choice.index] == characters(choice.seed, 0, choice.ending.characters)
        assert reasons[choice.index] == choice.ending.finish_reason
