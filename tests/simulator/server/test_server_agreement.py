"""The same seed and schedule in real time over HTTP and in virtual time: the same latencies.

Slow (30 s). Prompts are computed in chunks: with short steps a request that is sent late and misses
one changes little. The lateness of timers is measured meanwhile: if it explains a missed bound, the
test is skipped with the figures.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import uvloop

from ampacity.simulator.models.hardware import find_config
from ampacity.simulator.server.launch import start_in_process
from ampacity.simulator.server.protocol import CHAT_OVERHEAD_TOKENS
from ampacity.sleeper import Sleeper
from benchmarks.servers.truth import simulate
from tests.support.repeats import often

pytestmark = pytest.mark.real_time  # needs the machine to itself

PRESET = "llama3-70b-4xh100,max_num_batched_tokens=512"
RATE_RPS, DURATION_S = 6.0, often(14.0, 25.0)
CONNECTIONS = 128
# quantile of the latencies, and maximum difference between real and virtual time
BOUNDS = ((0.5, 0.03), (0.99, 0.10))
HOPELESS_S = 0.005  # skip if timers are later than this (p99) before the test
TOKEN = b'"delta":{"content":"'


@dataclass
class DoctorResult:
    """When a request was due and its tokens were read, in time.monotonic seconds."""

    due_s: float
    token_s: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    def __init__(self, idle: "list[Connection]") -> None:
        self.idle = idle
        self.seen: DoctorResult | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.idle.append(self)

    def send(self, request: bytes, seen: DoctorResult) -> None:
        self.seen = seen
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        self.seen.token_s += [now_s] * data.count(TOKEN)
        if data.endswith(b"0\r\n\r\n"):
            self.idle.append(self)


async def lateness(until_s: float) -> list[float]:
    """Return how late the machine fires timers of 5 ms."""
    alarm = Sleeper()
    late = []
    due_s = time.monotonic()
    while due_s < until_s:
        due_s += 0.005
        await alarm.until(int(due_s * 1e9))
        late.append(time.monotonic() - due_s)
    alarm.close()
    return late


async def drive(
    port: int, arrivals: np.ndarray, prompts: np.ndarray, outputs: np.ndarray
) -> tuple[list[DoctorResult], list[float]]:
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    opened = [
        await loop.create_connection(lambda: Connection(idle), "127.0.0.1", port)
        for _ in range(CONNECTIONS)
    ]
    start_s = time.monotonic() + 0.2
    control = asyncio.create_task(lateness(start_s + DURATION_S))
    alarm = Sleeper()
    seen = []
    for at_s, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        words = "word " * (int(prompt) - CHAT_OVERHEAD_TOKENS)
        payload = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": int(output),
            "stream": True,
        }
        body = json.dumps(payload).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        one = DoctorResult(start_s + float(at_s))
        await alarm.until(int(one.due_s * 1e9))
        idle.pop().send(head.encode() + body, one)
        seen.append(one)
    give_up_s = time.monotonic() + 60
    while len(idle) < CONNECTIONS and time.monotonic() < give_up_s:
        await asyncio.sleep(0.05)
    alarm.close()
    for transport, _ in opened:  # a loop of uvloop does not close while connections are open
        transport.abort()
    await asyncio.sleep(0.2)
    return seen, await control


@pytest.mark.slow
def test_real_time_and_virtual_time_agree() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        late_s = float(np.quantile(runner.run(lateness(time.monotonic() + 1)), 0.99))
    if late_s > HOPELESS_S:
        pytest.skip(f"the machine is disturbed: a timer is {late_s * 1000:.1f} ms late (p99)")
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / RATE_RPS, int(2 * RATE_RPS * DURATION_S)))
    arrivals = arrivals[arrivals < DURATION_S]
    prompts = np.clip(rng.lognormal(np.log(800), 0.3, arrivals.size), 64, 4000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(80), 0.6, arrivals.size), 4, 600).astype(int)
    expected = simulate(find_config(PRESET), arrivals, prompts, outputs)
    expected_itl = np.concatenate(
        [np.diff(expected.token_times_s(n)) for n in range(arrivals.size)]
    )

    with (
        start_in_process(PRESET) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        port = int(server.url.rsplit(":", 1)[1].removesuffix("/v1"))
        seen, late = runner.run(
            asyncio.wait_for(drive(port, arrivals, prompts, outputs), DURATION_S + 60)
        )
    assert [len(one.token_s) for one in seen] == list(outputs)
    ttft = np.array([one.token_s[0] - one.due_s for one in seen])
    itl = np.concatenate([np.diff(one.token_s) for one in seen])
    late_s = float(np.quantile(late, 0.99))
    lines, failed, disturbed = [f"the control is {late_s * 1000:.2f} ms late (p99)"], [], []
    for name, virtual, real in (("TTFT", expected.ttft_s, ttft), ("ITL", expected_itl, itl)):
        for quantile, bound in BOUNDS:
            want_s, found_s = (float(np.quantile(x, quantile)) for x in (virtual, real))
            lines.append(
                f"{name} p{quantile * 100:.0f}: virtual {want_s * 1000:.2f} ms, "
                f"real {found_s * 1000:.2f} ms ({found_s / want_s - 1:+.1%})"
            )
            if abs(found_s - want_s) > bound * want_s:
                # A token is waited for by two processes, each of them as late as the control
                (disturbed if 2 * late_s > bound * want_s else failed).append(lines[-1])
    print("\n".join(lines))
    assert not failed, lines
    if disturbed:
        pytest.skip(f"the machine is disturbed: {lines[0]}, {'; '.join(disturbed)}")
