"""Serve one validated request, to the last byte of its answer."""

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Mapping
from functools import partial

from aiohttp import web

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.server.answers import GARBAGE, ChoiceFrames, Stream, chunk
from ampacity.simulator.server.apierrors import ApiError
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.faults import Fate
from ampacity.simulator.server.metrics import Metrics
from ampacity.simulator.server.other_apis import STREAMS, whole
from ampacity.simulator.server.protocol import Call, block_hashes
from ampacity.simulator.server.realtime import LiveRequest, LiveRun

MAX_UNREAD_BYTES = 8 << 20  # a client that leaves more unread is disconnected


class Flusher:
    """Write the buffered data of all streams at multiples of an interval."""

    def __init__(self, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._interval_s = interval_s
        self._held: dict[asyncio.WriteTransport, list[bytes]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        self._held.setdefault(transport, []).append(data)
        if self._timer is None:
            now_s = self._loop.time()
            wait_s = self._interval_s - now_s % self._interval_s
            self._timer = self._loop.call_at(now_s + wait_s, self._tick)

    def flush(self, transport: asyncio.WriteTransport) -> None:
        """Write the buffered data of a stream that has ended."""
        held = self._held.pop(transport, None)
        if held and not transport.is_closing():
            transport.write(b"".join(held))

    def _tick(self) -> None:
        self._timer = None
        held, self._held = self._held, {}
        for transport, pieces in held.items():
            if not transport.is_closing():
                transport.write(b"".join(pieces))


class Generation:
    """Serve calls on a deployment, on a running event loop."""

    def __init__(self, deployment: Deployment, live: LiveRun, metrics: Metrics, face: Face) -> None:
        self._live = live
        caching = any(
            each.prefix_caching for each in (deployment.config, deployment.prefill) if each
        )
        self._names_blocks = caching or deployment.routing == "prefix-hash"
        self._block_tokens = deployment.config.block_tokens
        self._metrics = metrics
        self._face = face
        self._flusher = Flusher(face.flush_ms / 1000) if face.flush_ms else None

    async def whole(
        self,
        request: web.Request,
        call: Call,
        arrival_s: float,
        fate: Fate,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """Answer in one body."""
        done = asyncio.get_running_loop().create_future()
        left = call.output_tokens

        def on_tokens(count: int) -> None:
            nonlocal left
            left -= count
            if not left and not done.done():
                done.set_result(None)

        lives = self._lives(call, request, [on_tokens] * len(call.choices))
        await self._run(lives, arrival_s, done)
        body = whole(call, self._face, int(time.time()), _cached_tokens(call, lives))
        if fate.kind == "garbage":
            body = GARBAGE
        if fate.kind not in ("truncated", "reset_stream"):
            return web.Response(body=body, content_type="application/json", headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
        response.content_length = len(body)
        await response.prepare(request)
        transport = _transport(request)
        transport.write(body[: len(body) // 2])
        return await _cut(transport, reset=fate.kind == "reset_stream")

    async def stream(
        self,
        request: web.Request,
        call: Call,
        arrival_s: float,
        fate: Fate,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """Answer in server-sent events."""
        if request.version < (1, 1):
            raise ApiError(400, "streaming needs HTTP/1.1", "BadRequestError", "stream")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", **headers}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = _transport(request)
        stream = STREAMS.get(call.api, Stream)(call, self._face, int(time.time()))
        if self._face.early_role:
            transport.write(stream.opening())
        done = asyncio.get_running_loop().create_future()
        frames = stream.choices()
        # Chunks go straight to the transport, framed by hand, or to the flusher.
        flusher = self._flusher
        write = transport.write if flusher is None else partial(flusher.write, transport)
        tokens = [_on_token(write, stream, one, transport, done) for one in frames]
        if fate.kind is not None:
            strikes = fate.token(call.choices[0].ending.tokens)
            tokens[0] = _struck(fate.kind, strikes, tokens[0], write, stream, transport, done)
        lives = self._lives(call, request, tokens)
        if self._face.prompt_tokens_details:
            stream.cached = lambda: _cached_tokens(call, lives)
        await self._run(lives, arrival_s, done)
        if fate.kind in ("reset_stream", "truncated"):
            return await _cut(transport, reset=fate.kind == "reset_stream")
        if flusher is not None:
            flusher.flush(transport)
        await response.write_eof()
        return response

    def _lives(
        self, call: Call, request: web.Request, on_tokens: list[Callable[[int], None]]
    ) -> list[LiveRequest]:
        adapter = call.model if call.model in self._face.adapters else None
        return [
            LiveRequest(
                len(call.prompts[choice.prompt]),
                choice.ending.tokens,
                on_tokens=give,
                finish_reason=choice.ending.finish_reason,
                block_hashes=block_hashes(call, choice, self._block_tokens)
                if self._names_blocks
                else (),
                adapter=adapter,
                session=request.headers.get("X-Session-Id"),  # for session-sticky routing
            )
            for choice, give in zip(call.choices, on_tokens, strict=True)
        ]

    async def _run(
        self, lives: list[LiveRequest], arrival_s: float, done: "asyncio.Future[None]"
    ) -> None:
        """Wait for the last token. Cancelled if the client disconnects; frees its slots."""
        try:
            self._live.submit(lives, arrival_s)
        except SimulatorError as error:
            raise ApiError(400, str(error), "BadRequestError") from error
        try:
            await done
        finally:
            for live in lives:
                if live.finish_s is None:
                    self._metrics.aborted += 1
                    self._live.abort(live)


def _on_token(
    write: Callable[[bytes], None],
    stream: Stream,
    frames: ChoiceFrames,
    transport: asyncio.WriteTransport,
    done: "asyncio.Future[None]",
) -> Callable[[int], None]:
    push, closing, over = frames.push, transport.is_closing, done.done

    def on_tokens(count: int) -> None:
        if not closing() and not over():
            data = push(count)
            if data:
                write(data)
            if not stream.unfinished:
                done.set_result(None)
            elif (
                frames.made & 1023 < count and transport.get_write_buffer_size() > MAX_UNREAD_BYTES
            ):
                transport.abort()

    return on_tokens


def _struck(
    kind: str,
    strikes: int,
    on_tokens: Callable[[int], None],
    write: Callable[[bytes], None],
    stream: Stream,
    transport: asyncio.WriteTransport,
    done: "asyncio.Future[None]",
) -> Callable[[int], None]:
    """Return on_tokens with a fault in place of its token number `strikes`."""
    seen = 0

    def struck(count: int) -> None:
        nonlocal seen
        seen += count
        if not seen - count < strikes <= seen or done.done() or transport.is_closing():
            on_tokens(count)
        elif kind == "garbage":  # one additional event
            write(chunk(GARBAGE + b"\n\n"))
            on_tokens(count)
        else:
            if kind == "error_in_stream":
                write(stream.error("EngineCore encountered an issue (injected fault)."))
            done.set_result(None)

    return struck


def _cached_tokens(call: Call, lives: list[LiveRequest]) -> int:
    """Return the cached tokens of all prompts, each counted for its first choice."""
    cached = {
        choice.prompt: live.cached_tokens
        for choice, live in zip(reversed(call.choices), reversed(lives), strict=True)
    }
    return sum(cached.values())


def _transport(request: web.Request) -> asyncio.Transport:
    if request.transport is None:
        raise asyncio.CancelledError
    return request.transport


async def _cut(transport: asyncio.Transport, *, reset: bool) -> web.StreamResponse:
    """Close the connection in mid-answer; the server then cancels the handler."""
    if reset:
        reset_connection(transport)
    else:
        transport.close()
    await asyncio.Event().wait()
    raise AssertionError("a closed connection cancels its handler")


def reset_connection(transport: asyncio.Transport) -> None:
    """Send an RST, by a linger time of zero: nothing more is delivered."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
