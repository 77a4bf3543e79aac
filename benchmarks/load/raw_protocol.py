"""The raw limit of one Python core: an asyncio.Protocol on uvloop that stamps reads and splits
events, nothing else.

No JSON, no HTTP parser, no timeouts, no records on disk while it runs: what any real client adds
comes on top.

    python -m benchmarks.load.raw_protocol URL --rate 190 --duration 20 --out seen.npz
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import ssl
import time
from typing import cast
from urllib.parse import urlsplit

import numpy as np

from benchmarks.options import parser

END = b"\r\n0\r\n\r\n"
NOT_TOKENS = (
    3  # events after the last token: finish reason, usage, [DONE]; before the first: the role
)


class Stream(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.rest = b""
        self.at_ns: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at_ns = time.monotonic_ns()
        events = (self.rest + data).split(b"\n\n")
        self.rest = events.pop()
        for _ in events:
            self.at_ns.append(at_ns)
        if data.endswith(END):
            self.client.ended(self)

    def send(self, number: int, scheduled_ns: int, request: bytes) -> None:
        self.number, self.scheduled_ns = number, scheduled_ns
        self.rest, self.at_ns = b"", []
        self.started_ns = time.monotonic_ns()
        self.transport.write(request)


class Client:
    """Sends one Poisson load and keeps the stamps of every request."""

    def __init__(
        self, url: str, output_tokens: int, running_usage: bool = False, cacert: str | None = None
    ) -> None:
        parts = urlsplit(url)
        self.host, self.port, self.path = (
            parts.hostname or "127.0.0.1",
            parts.port or 80,
            parts.path,
        )
        self.context = ssl.create_default_context(cafile=cacert) if cacert else None
        self.output_tokens = output_tokens
        self.stream_options = {"include_usage": True, "continuous_usage_stats": running_usage}
        self.idle: list[Stream] = []
        self.rows: list[tuple[int, int, int, list[int]]] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def request(self, number: int) -> bytes:
        body = json.dumps(
            {
                "model": "mock",
                "messages": [{"role": "user", "content": f"{number} " + "a " * 15}],
                "stream": True,
                "max_tokens": self.output_tokens,
                "stream_options": self.stream_options,
            }
        ).encode()
        head = f"POST {self.path}/chat/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
        head += f"Content-Type: application/json\r\nX-Request-Id: raw-{number}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def dispatch(self, number: int, scheduled_ns: int) -> None:
        if self.idle:
            self.idle.pop().send(number, scheduled_ns, self.request(number))
        else:
            task = asyncio.get_running_loop().create_task(self.connect(number, scheduled_ns))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def connect(self, number: int, scheduled_ns: int) -> None:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: Stream(self), self.host, self.port, ssl=self.context
        )
        stream.send(number, scheduled_ns, self.request(number))

    def ended(self, stream: Stream) -> None:
        self.rows.append(
            (stream.number, stream.scheduled_ns, stream.started_ns, stream.at_ns[1:-NOT_TOKENS])
        )
        self.idle.append(stream)

    async def run(self, rate_rps: float, duration_s: float, seed: int) -> None:
        draw = random.Random(seed)
        start_ns = time.monotonic_ns() + 50_000_000
        number, due_s = 0, draw.expovariate(rate_rps)
        while due_s < duration_s:
            due_ns = start_ns + int(due_s * 1e9)
            if (wait_s := (due_ns - time.monotonic_ns()) / 1e9) > 0:
                await asyncio.sleep(wait_s)
            self.dispatch(number, due_ns)
            number, due_s = number + 1, due_s + draw.expovariate(rate_rps)
        give_up_s = time.monotonic() + 30
        while len(self.rows) < number and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)

    def save(self, path: str) -> None:
        """Return requests int64[n, 4] (number, scheduled, started, tokens) and token_ns."""
        rows = [(number, due, started, len(at)) for number, due, started, at in self.rows]
        token_ns = np.concatenate(
            [np.array(at, dtype=np.int64) for *_, at in self.rows] or [np.empty(0, np.int64)]
        )
        np.savez(path, requests=np.array(rows, dtype=np.int64).reshape(-1, 4), token_ns=token_ns)


def main() -> None:
    given = parser(__doc__, output_tokens=128, seed=1)
    given.add_argument("url")
    given.add_argument("--rate", type=float, required=True)
    given.add_argument("--duration", type=float, required=True, help="seconds")
    given.add_argument(
        "--running-usage", action="store_true", help="ask for a count of tokens in every chunk"
    )
    given.add_argument("--cacert", help="of a server with TLS, PEM")
    given.add_argument("--out", required=True, help="stamps, as .npz")
    options = given.parse_args()
    import uvloop

    client = Client(options.url, options.output_tokens, options.running_usage, options.cacert)
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(client.run(options.rate, options.duration, options.seed))
    client.save(options.out)


if __name__ == "__main__":
    main()
