"""Faults over real sockets: each happens as configured, and all else is intact."""

import asyncio
import json
import re
import time
from collections import Counter
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop

from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.faults import KINDS, Capacity, Drift, Limits, Plan, Spikes, Stall
from tests.support.simulator.simulated_server import (
    CHAT,
    FAST,
    HELLO,
    events,
    metric,
    metrics,
    on_loop,
    served,
)

pytestmark = pytest.mark.real_time  # needs the machine to itself

QUICK = linear_config(0.002, 0.0, max_num_seqs=64)
TOKENS = 6


async def raw(url: str, payload: dict[str, Any]) -> tuple[bytes, str]:
    """All bytes of an answer, and how the connection ended: 'closed' or 'reset'."""
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(payload).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    received = b""
    try:
        writer.write(head.encode() + body)
        while data := await reader.read(1 << 16):
            received += data
        return received, "closed"
    except ConnectionResetError:
        return received, "reset"
    finally:
        writer.close()


def kind_of_stream(received: bytes, ended: str) -> str | None:
    """What a client sees; None for a whole and faultless answer."""
    if ended == "reset":
        return "reset_stream" if received else "reset"
    status = int(received.split(b" ", 2)[1])
    if status != 200:
        assert b"injected fault" in received
        return str(status)
    words = len(re.findall(rb'"content":" [a-z]{4}"', received))
    if not received.endswith(b"\r\n0\r\n\r\n"):
        assert 1 <= words < TOKENS
        return "truncated"
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    if b'data: {"error"' in received:
        assert 1 <= words < TOKENS
        return "error_in_stream"
    assert words == TOKENS
    assert b'"finish_reason":"length"' in received
    if b"\xff" in received:
        return "garbage"
    for event in re.findall(rb"data: (\{.*\})\n\n", received):
        json.loads(event)
    return None


def kind_of_whole(received: bytes, ended: str) -> str | None:
    if ended == "reset":
        return "reset_stream" if received else "reset"
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        return str(status)
    length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
    if len(body) < length:
        return "truncated"
    try:
        return None if json.loads(body)["usage"]["completion_tokens"] == TOKENS else "?"
    except ValueError:
        return "garbage"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("loop", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_each_kind_of_error_has_its_share_and_the_rest_is_whole(stream: bool, loop: Any) -> None:
    plan = Plan(seed=1, errors=dict.fromkeys(KINDS, 0.08))
    count = 400

    async def body() -> None:
        async with served(QUICK, faults=plan) as (server, url, session):
            payload = {"messages": HELLO, "max_tokens": TOKENS, "stream": stream}
            read = kind_of_stream if stream else kind_of_whole
            found: Counter[str | None] = Counter()
            for _ in range(count // 20):
                answers = await asyncio.gather(*(raw(url, payload) for _ in range(20)))
                found += Counter(read(*answer) for answer in answers)
            injected = Counter(server.faults.injected)
            if not stream:
                injected["500"] += injected.pop("error_in_stream")
            # A reset can overtake the bytes before it: then nothing was seen of the stream.
            resets = found["reset"] + found["reset_stream"]
            assert resets == injected["reset"] + injected["reset_stream"]
            assert found["reset_stream"] >= 1
            for kind in set(KINDS) - {"reset", "reset_stream"}:
                assert found[kind] == injected[kind], kind
            assert found[None] == count - sum(injected.values())
            for kind in KINDS:  # 32 expected, standard deviation 5.4
                assert 10 <= server.faults.injected[kind] <= 54, kind
            # every slot is free again
            while server.live.engines[0].running or server.live.engines[0].waiting:
                await asyncio.sleep(0.005)
            assert metric(await metrics(session, url), "vllm:kv_cache_usage_perc") == 0

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(body(), 30))


@on_loop
async def test_errors_say_when_to_come_back() -> None:
    for kind in ("429", "503"):
        plan = Plan(errors={kind: 1.0}, retry_after_s=2.5)
        async with (
            served(faults=plan) as (_, url, session),
            session.post(url + CHAT, json={"messages": HELLO}) as response,
        ):
            assert response.status == int(kind)
            assert response.headers["Retry-After"] == "3"
            assert response.headers["retry-after-ms"] == "2500"
            assert (await response.json())["error"]["message"] == "injected fault"


async def token_times(session: aiohttp.ClientSession, url: str, tokens: int) -> list[float]:
    """Return the start of a stream and the times at which its tokens were read."""
    payload = {"messages": HELLO, "max_tokens": tokens, "stream": True}
    found = [time.monotonic()]
    async with session.post(url + CHAT, json=payload) as response:
        async for line in response.content:
            if b'"content":" ' in line:
                found.append(time.monotonic())
    assert len(found) == tokens + 1
    return found


@on_loop
async def test_spikes_befall_their_share_and_no_other() -> None:
    plan = Plan(seed=2, spikes=Spikes(0.25, 1.0))
    async with served(QUICK, faults=plan) as (server, url, session):
        runs = await asyncio.gather(*(token_times(session, url, 2) for _ in range(60)))
        ttft_s = np.sort([one[1] - one[0] for one in runs])
        spikes = server.faults.injected["spike"]
        assert 3 <= spikes <= 28  # 15 expected, standard deviation 3.4
        assert (ttft_s >= 1.0).sum() == spikes
        assert np.median(ttft_s) < 1.0


@on_loop
async def test_drift_grows_while_the_rest_stays() -> None:
    plan = Plan(seed=3, drift=Drift(share=0.3, seconds_per_minute=60.0, at_s=0.2))
    async with served(QUICK, faults=plan) as (server, url, session):
        since_s = server.faults.since_s
        delays = []
        for wait_s in (0.25, 0.8):
            await asyncio.sleep(max(0.0, since_s + wait_s - time.monotonic()))
            before = server.faults.injected["drift"]
            runs = await asyncio.gather(*(token_times(session, url, 1) for _ in range(40)))
            hit = server.faults.injected["drift"] - before
            assert 2 <= hit <= 26  # 12 expected, standard deviation 2.9
            ttft_s = np.sort([one[1] - one[0] for one in runs])
            delays.append(ttft_s)
            # One second more each second, since 0.2 s after the start.
            least_s = wait_s - 0.2
            assert (ttft_s >= least_s).sum() >= hit
        assert np.median(delays[1]) < 0.6 <= delays[1][-1]


@on_loop
async def test_a_stall_holds_all_streams_once_and_for_its_time() -> None:
    plan = Plan(stalls=(Stall(0.3, 0.5),))
    config = linear_config(0.01, 0.0, max_num_seqs=8)
    async with served(config, faults=plan) as (server, url, session):
        since_s = server.faults.since_s
        runs = await asyncio.gather(*(token_times(session, url, 60) for _ in range(5)))
        for times in runs:
            gaps = np.diff(times)
            longest = int(np.argmax(gaps))
            assert gaps[longest] >= 0.5 - 0.02  # the token before may have been read late
            assert sum(gaps > 0.4) == 1
            assert times[longest] <= since_s + 0.8 <= times[longest + 1] + 0.001


@on_loop
async def test_capacity_is_lost_from_its_time_on() -> None:
    plan = Plan(capacity=(Capacity(0.4, 5.0),))
    config = linear_config(0.01, 0.0, max_num_seqs=8)
    async with served(config, faults=plan) as (server, url, session):
        since_s = server.faults.since_s
        times = np.array(await token_times(session, url, 55))[1:] - since_s
        gaps, at = np.diff(times), times[1:]
        assert np.median(gaps[at < 0.4]) == pytest.approx(0.01, abs=0.004)
        assert np.median(gaps[at > 0.46]) == pytest.approx(0.05, abs=0.012)


@on_loop
async def test_limits_by_requests() -> None:
    plan = Plan(limits=Limits(requests_per_minute=6))
    async with served(FAST, faults=plan) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 1, "stream": True}
        left = []
        for _ in range(6):
            async with session.post(url + CHAT, json=payload) as response:
                assert response.status == 200
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
                left.append(response.headers["x-ratelimit-remaining-requests"])
        assert left == ["5", "4", "3", "2", "1", "0"]
        async with session.post(url + CHAT, json=payload) as response:
            assert response.status == 429
            assert 8 <= int(response.headers["Retry-After"]) <= 10  # one each 10 s
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        async with session.get(f"{url}/v1/models") as response:  # no tokens, no limit
            assert response.status == 200


@on_loop
async def test_limits_by_tokens_and_waiting_as_told() -> None:
    plan = Plan(limits=Limits(tokens_per_minute=60_000))  # 1,000 a second
    config = linear_config(0.002, 0.0, max_model_len=100_000)
    async with served(config, faults=plan) as (server, url, session):
        big = [{"role": "user", "content": "x " * 59_982}]  # with the template and 10 tokens 60,000
        small = [{"role": "user", "content": "x " * 482}]  # 500
        async with session.post(url + CHAT, json={"messages": big, "max_tokens": 10}) as response:
            assert response.status == 200
        async with session.post(url + CHAT, json={"messages": small, "max_tokens": 10}) as response:
            assert response.status == 429
            wait_s = int(response.headers["retry-after-ms"]) / 1000
            assert 0 < wait_s <= 0.5
        await asyncio.sleep(wait_s + 0.002)
        async with session.post(url + CHAT, json={"messages": small, "max_tokens": 10}) as response:
            assert response.status == 200
        assert server.faults.injected == {"limit_tokens": 1}


@on_loop
async def test_control_is_there_only_when_asked_for_and_wants_the_key() -> None:
    async with served() as (_, url, session):
        for method in ("GET", "POST"):
            async with session.request(method, f"{url}/control/faults", data=b"{}") as response:
                assert response.status == 404
    async with served(face=Face(control=True), api_key="k") as (_, url, session):
        for method in ("GET", "POST"):
            async with session.request(method, f"{url}/control/faults", data=b"{}") as response:
                assert response.status == 401


@on_loop
async def test_faults_are_set_shown_and_ended_while_it_runs() -> None:
    config = linear_config(0.01, 0.0, max_num_seqs=8)
    async with served(config, face=Face(control=True)) as (_, url, session):
        control = f"{url}/control/faults"
        payload = {"messages": HELLO, "max_tokens": 2}
        async with session.post(control, json={"errors": {"503": 1.0}}) as response:
            assert response.status == 200
        async with session.post(url + CHAT, json=payload) as response:
            assert response.status == 503
        async with session.get(control) as response:
            shown = await response.json()
        assert shown["faults"]["errors"] == {"503": 1.0}
        assert (shown["requests"], shown["injected"]) == (1, {"503": 1})
        async with session.post(control, json={"errors": {"504": 1.0}}) as response:
            assert response.status == 400
            assert "no kind '504'" in (await response.json())["error"]["message"]
        async with session.post(control, json={}) as response:
            assert (await response.json())["faults"]["errors"] == {}
        async with session.post(url + CHAT, json=payload) as response:
            assert response.status == 200
        # A stall that is asked for now holds the step under way, too.
        stream = asyncio.create_task(
            events(session, url + CHAT, payload | {"max_tokens": 20, "stream": True})
        )
        while metric(await metrics(session, url), "vllm:num_requests_running") == 0:
            await asyncio.sleep(0.002)
        start_s = time.monotonic()
        async with session.post(control, json={"stalls": [{"at_s": 0, "for_s": 0.5}]}) as response:
            assert response.status == 200
        await stream
        assert time.monotonic() - start_s >= 0.5
