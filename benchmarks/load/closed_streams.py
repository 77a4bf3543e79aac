"""How much the simulator carries: so many streams in a closed loop, each asks again when its answer
has ended.

    ampacity simulate --preset linear:0.05,0 --max-num-seqs 2048 --port 8000
    python -m benchmarks.load.closed_streams --port 8000 --streams 1000 --duration 10

Prints tokens per second, the share of a core that the server used (Linux, with --pid), and its own
lateness.
"""

import argparse
import asyncio
import json
import os
import re
import time
import urllib.request
from pathlib import Path
from typing import cast

from benchmarks.options import parser

TOKEN = b'"content":" '
END = b"0\r\n\r\n"


class Stream(asyncio.Protocol):
    """One connection that is never idle."""

    tokens = 0  # of all streams

    def __init__(self, request: bytes) -> None:
        self.request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        Stream.tokens += data.count(TOKEN)
        if data.endswith(END):
            self.transport.write(self.request)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def lateness_ms(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r'lateness_seconds\{[^}]*quantile="([\d.]+)"\} (\S+)', text)
    return {quantile: float(value) * 1000 for quantile, value in found}


async def measure(options: argparse.Namespace) -> None:
    payload = {
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": options.output_tokens,
    }
    body = json.dumps(payload | {"stream": True}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    loop = asyncio.get_running_loop()
    for number in range(options.streams):
        await loop.create_connection(lambda: Stream(request), "127.0.0.1", options.port)
        if number % 50 == 0:  # not all at once: their answers shall not end together
            await asyncio.sleep(0.02)
    await asyncio.sleep(2)
    tokens, used_s, start_s = (
        Stream.tokens,
        cpu_s(options.pid) if options.pid else 0.0,
        time.monotonic(),
    )
    await asyncio.sleep(options.duration)
    wall_s = time.monotonic() - start_s
    line = f"{options.streams} streams: {(Stream.tokens - tokens) / wall_s:,.0f} tokens/s"
    if options.pid:
        line += f", {(cpu_s(options.pid) - used_s) / wall_s:.2f} of a core"
    late = await loop.run_in_executor(None, lateness_ms, options.port)
    print(
        line
        + ", lateness "
        + ", ".join(f"p{float(q) * 100:g} {ms:.1f} ms" for q, ms in late.items())
    )


def main() -> None:
    given = parser(__doc__, output_tokens=128)
    given.add_argument("--port", type=int, required=True)
    given.add_argument("--streams", type=int, required=True)
    given.add_argument("--duration", type=float, default=10.0, help="seconds")
    given.add_argument("--pid", type=int, help="of the server")
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(given.parse_args()))


if __name__ == "__main__":
    main()
