"""The same seed and schedule in real time over HTTP and in virtual time: the same latencies.

Slow (45 s), and meaningful on an unloaded machine only: how late it wakes a process that only wants to be woken
is measured before and while it runs, and the test is skipped with the figures where that is too much.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import uvloop

from simulator.hardware import find_config
from simulator.launch import Started, start_in_process
from simulator.outcome import simulate
from simulator.protocol import CHAT_OVERHEAD_TOKENS
from simulator.realtime import DeadlineTimer

PRESET = "llama3-70b-4xh100"
RATE_RPS, DURATION_S = 8.0, 40.0
CONNECTIONS = 128
MAX_CONTROL_P99_S = 0.001
TOKEN = b'"delta":{"content":"'


@dataclass
class Seen:
    """When one request was due and when each of its tokens was read, in time.monotonic seconds."""

    due_s: float
    token_s: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    def __init__(self, idle: "list[Connection]") -> None:
        self.idle = idle
        self.seen: Seen | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.idle.append(self)

    def send(self, request: bytes, seen: Seen) -> None:
        self.seen = seen
        self.transport.write(request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        assert self.seen is not None
        self.seen.token_s += [now_s] * data.count(TOKEN)
        if data.endswith(b"0\r\n\r\n"):
            self.idle.append(self)


class Alarm:
    """Sleeps to a deadline more finely than the event loop's own milliseconds."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.timer = DeadlineTimer(self.loop, self.ring)
        self.rung: asyncio.Future[None] = self.loop.create_future()

    def ring(self) -> None:
        self.rung.set_result(None)

    async def until(self, at_s: float) -> None:
        self.rung = self.loop.create_future()
        self.timer.set(at_s)
        await self.rung


async def lateness(until_s: float) -> list[float]:
    """A control loop: how late the machine wakes a process that wants nothing but to be woken."""
    alarm = Alarm()
    late = []
    due_s = time.monotonic()
    while due_s < until_s:
        due_s += 0.005
        await alarm.until(due_s)
        late.append(time.monotonic() - due_s)
    alarm.timer.close()
    return late


def busy_s(pid: int | None = None) -> float:
    """Processor time used by one process, or by all with what the host took (steal)."""
    if pid is None:
        user, nice, system, _, _, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        )
        ticks = user + nice + system + irq + softirq + steal
    else:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
    return ticks / 100.0


async def drive(
    port: int, arrivals: np.ndarray, prompts: np.ndarray, outputs: np.ndarray
) -> tuple[list[Seen], list[float]]:
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    opened = [
        await loop.create_connection(lambda: Connection(idle), "127.0.0.1", port) for _ in range(CONNECTIONS)
    ]
    start_s = time.monotonic() + 0.2
    control = asyncio.create_task(lateness(start_s + DURATION_S))
    alarm = Alarm()
    seen = []
    for at_s, prompt, output in zip(arrivals, prompts, outputs, strict=True):
        words = "word " * (int(prompt) - CHAT_OVERHEAD_TOKENS)
        payload = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": int(output),
            "stream": True,
        }
        body = json.dumps(payload).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        one = Seen(start_s + float(at_s))
        await alarm.until(one.due_s)
        idle.pop().send(head.encode() + body, one)
        seen.append(one)
    give_up_s = time.monotonic() + 60
    while len(idle) < CONNECTIONS and time.monotonic() < give_up_s:
        await asyncio.sleep(0.05)
    alarm.timer.close()
    for transport, _ in opened:  # a loop of uvloop does not close while connections are open
        transport.abort()
    await asyncio.sleep(0.2)
    return seen, await control


@dataclass
class Measured:
    seen: list[Seen]
    foreign_cores: float  # processor time that neither the server nor this test used
    control_p99_s: float  # lateness of a timer

    @property
    def disturbance(self) -> str | None:
        if self.control_p99_s > MAX_CONTROL_P99_S:
            return (
                f"the machine is disturbed: a timer is {self.control_p99_s * 1000:.2f} ms late (p99), "
                f"others use {self.foreign_cores:.2f} cores"
            )
        return None


def measure(server: Started, arrivals: np.ndarray, prompts: np.ndarray, outputs: np.ndarray) -> Measured:
    def own_s() -> float:
        return time.process_time() + busy_s(server.process.pid)

    port = int(server.url.rsplit(":", 1)[1].removesuffix("/v1"))
    start_s, all_s, ours_s = time.monotonic(), busy_s(), own_s()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen, late = runner.run(asyncio.wait_for(drive(port, arrivals, prompts, outputs), DURATION_S + 60))
    foreign_s = (busy_s() - all_s) - (own_s() - ours_s)
    return Measured(seen, foreign_s / (time.monotonic() - start_s), float(np.quantile(late, 0.99)))


@pytest.mark.slow
def test_real_time_and_virtual_time_agree() -> None:
    if not Path("/proc/stat").exists():
        pytest.skip("how busy the machine is can only be read on Linux")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before_s, wall_s = busy_s() - time.process_time(), time.monotonic()
        late = runner.run(asyncio.wait_for(lateness(time.monotonic() + 2), 20))
        foreign = (busy_s() - time.process_time() - before_s) / (time.monotonic() - wall_s)
    quiet = Measured([], foreign, float(np.quantile(late, 0.99)))
    if quiet.disturbance:
        pytest.skip(quiet.disturbance)

    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / RATE_RPS, int(RATE_RPS * DURATION_S)))
    arrivals = arrivals[arrivals < DURATION_S]
    prompts = np.clip(rng.lognormal(np.log(400), 0.8, arrivals.size), 16, 3000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(120), 0.6, arrivals.size), 4, 600).astype(int)
    expected = simulate(find_config(PRESET), arrivals, prompts, outputs)
    expected_itl = np.concatenate([np.diff(expected.token_times_s(n)) for n in range(arrivals.size)])

    with start_in_process(PRESET) as server:
        measured = measure(server, arrivals, prompts, outputs)
    assert [len(one.token_s) for one in measured.seen] == list(outputs)
    ttft = np.array([one.token_s[0] - one.due_s for one in measured.seen])
    itl = np.concatenate([np.diff(one.token_s) for one in measured.seen])
    figures = [
        (name, quantile, float(np.quantile(virtual, quantile)), float(np.quantile(real, quantile)), bound)
        for name, virtual, real in (("TTFT", expected.ttft_s, ttft), ("ITL", expected_itl, itl))
        for quantile, bound in ((0.5, 0.03), (0.99, 0.10))
    ]
    for name, quantile, virtual_s, real_s, _ in figures:
        print(
            f"{name} p{quantile * 100:.0f}: virtual {virtual_s * 1000:.2f} ms, real {real_s * 1000:.2f} ms "
            f"({real_s / virtual_s - 1:+.1%})"
        )
    print(
        f"others used {measured.foreign_cores:.2f} cores; control p99 {measured.control_p99_s * 1000:.2f} ms"
    )
    off = [one for one in figures if abs(one[3] / one[2] - 1) > one[4]]
    if off and measured.disturbance:
        pytest.skip(measured.disturbance)
    assert not off
