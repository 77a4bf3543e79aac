"""Several engines behind one HTTP face, and the moment at which a step is planned."""

import asyncio
import json
import re
import time
from typing import Any

import pytest

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.deployment import Deployment, Transfer
from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.engine.steptime import Roofline
from ampacity.simulator.models.hardware import find_config, find_deployment, linear_config
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.faults import Plan, Stall
from ampacity.simulator.server.realtime import LiveRequest, LiveRun
from tests.support.simulator.simulated_server import (
    CHAT,
    HELLO,
    PROMPT_TOKENS,
    events,
    metrics,
    on_loop,
    served,
)
from tests.support.waiting import until

pytestmark = pytest.mark.real_time  # needs the machine to itself

LINE = linear_config(0.004, 0.0, max_num_seqs=8)
# 1 kB of KV entries a token; prompts are computed and handed over in some milliseconds
DECODE = EngineConfig("d", Roofline(4.0, 0.0, 1.0, 0.0, 1e3, 1e6))
APART = Deployment(DECODE, prefill=DECODE, transfer=Transfer(1e3, 1e6, 0.05))


def by_engine(text: str, name: str) -> dict[str, float]:
    return {
        engine: float(value)
        for engine, value in re.findall(
            rf'^{name}{{engine="(\d)"[^}}]*}} (\S+)$', text, re.MULTILINE
        )
    }


@on_loop
async def test_replicas_take_turns_and_are_told_apart_in_the_metrics() -> None:
    async with served(Deployment(LINE, 3)) as (_, url, session):
        for _ in range(7):
            await events(session, url + CHAT, {"messages": HELLO, "max_tokens": 2, "stream": True})
        text = await metrics(session, url)
        prompts = by_engine(text, "vllm:prompt_tokens_total")
        assert prompts == {"0": 3 * PROMPT_TOKENS, "1": 2 * PROMPT_TOKENS, "2": 2 * PROMPT_TOKENS}
        assert by_engine(text, "vllm:generation_tokens_total") == {"0": 6, "1": 4, "2": 4}
        families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert len(families) == len(set(families))


@on_loop
async def test_a_session_stays_on_its_replica() -> None:
    async with served(Deployment(LINE, 4, "session-sticky")) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 1, "stream": True}
        for _ in range(5):
            await events(session, url + CHAT, payload, headers={"X-Session-Id": "ann"})
        found = by_engine(await metrics(session, url), "vllm:prompt_tokens_total")
        assert sorted(found.values()) == [0, 0, 0, 5 * PROMPT_TOKENS]


@on_loop
async def test_prefill_apart_from_decoding() -> None:
    """The second token is 10 ms (10 kB over 1 MB/s) and 50 ms after that of engine 1."""
    async with served(APART, face=Face(prompt_tokens_details=True)) as (_, url, session):
        payload = {"messages": HELLO, "max_tokens": 5, "stream": True}
        at_s = []
        async with session.post(url + CHAT, json=payload) as response:
            async for line in response.content:
                if b'"content":" ' in line:
                    at_s.append(time.monotonic())
        assert len(at_s) == 5
        assert at_s[1] - at_s[0] >= 0.06 - 0.02  # the first may have been read late
        async with session.post(
            url + CHAT, json=payload | {"max_tokens": 1, "stream": False}
        ) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 1
        text = await metrics(session, url)
        assert by_engine(text, "vllm:generation_tokens_total") == {"0": 4, "1": 2}
        assert by_engine(text, "vllm:kv_cache_usage_perc") == {"0": 0, "1": 0}


@on_loop
async def test_a_client_that_leaves_while_its_entries_are_on_their_way_frees_everything() -> None:
    async with served(APART) as (server, url, session):
        async with session.post(
            url + CHAT, json={"messages": HELLO, "max_tokens": 500, "stream": True}
        ) as response:
            await response.content.readuntil(b'"content":" ')
        engines = server.live.engines
        await until(lambda: server.metrics[0].aborted == 1)
        await until(lambda: [one.running + one.waiting for one in engines] == [0, 0])
        assert server.metrics[0].generation_tokens == 0


@on_loop
async def test_what_arrived_before_a_step_began_is_in_it_although_it_was_still_being_read() -> None:
    done = asyncio.get_running_loop().create_future()
    first_s = time.monotonic()
    second = LiveRequest(1, 1, on_tokens=lambda count: done.set_result(None))

    def late(count: int) -> None:  # the step of the first has ended, 50 ms after first_s
        asyncio.get_running_loop().call_soon(live.submit, [second], first_s + 0.049)

    first = LiveRequest(1, 2, on_tokens=lambda count: None)
    opener = LiveRequest(1, 1, on_tokens=late)
    live = LiveRun(Deployment(linear_config(0.05, 0.0)), lambda *_: None)
    live.submit([first, opener], first_s)
    await done
    live.close()
    assert second.first_token_s == pytest.approx(first_s + 0.1, abs=1e-6)


@on_loop
async def test_a_stall_holds_every_engine() -> None:
    plan = Plan(stalls=(Stall(0.0, 0.3),))
    async with served(Deployment(LINE, 2), faults=plan) as (server, url, session):
        payload = {"messages": HELLO, "max_tokens": 2, "stream": True}
        await asyncio.gather(*(events(session, url + CHAT, payload) for _ in range(2)))
        assert time.monotonic() - server.faults.since_s >= 0.3


def test_deployments_by_name() -> None:
    found = find_deployment(
        "llama3-70b-4xh100,replicas=2,routing=session-sticky,prefill_replicas=3,transfer_gbs=25"
    )
    assert (found.replicas, found.routing, found.prefill_replicas) == (2, "session-sticky", 3)
    assert found.engines == 5
    assert found.transfer == Transfer(320 * 1024, 25e9)
    assert find_deployment("demo") == Deployment(find_config("demo"))
    with pytest.raises(SimulatorError, match="one engine"):
        find_config("demo,replicas=2")


@pytest.mark.parametrize(
    "setting", ["replicas=0", "routing=best", "replicas=x", "prefill_replicas=1,transfer_gbs=0"]
)
def test_bad_deployments_by_name(setting: str) -> None:
    with pytest.raises(SimulatorError) as caught:
        find_deployment(f"demo,{setting}")
    assert "\n" not in str(caught.value)


@on_loop
async def test_tokens_do_not_depend_on_the_deployment() -> None:
    texts = []
    for deployment in (Deployment(LINE), Deployment(LINE, 2), APART):
        async with served(deployment) as (_, url, session):
            payload: dict[str, Any] = {
                "messages": HELLO,
                "max_tokens": 6,
                "stream": True,
                "seed": 3,
            }
            found = await events(session, url + CHAT, payload)
            texts.append([json.loads(one)["choices"][0]["delta"]["content"] for one in found[:-1]])
    assert texts[0] == texts[1] == texts[2]
