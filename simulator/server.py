"""OpenAI-compatible HTTP face of the engine in real time: `python -m simulator.server --preset demo`."""

import argparse
import asyncio
import gc
import hmac
import itertools
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

from aiohttp import web

from simulator import SimulatorError
from simulator.answers import Frames, answer
from simulator.engine import Engine, EngineConfig
from simulator.hardware import find_config
from simulator.metrics import Metrics
from simulator.protocol import ApiError, Call, count_words, decode, parse
from simulator.realtime import LiveRequest, StepLoop

MAX_BODY_BYTES = 64 << 20
MAX_UNREAD_BYTES = 8 << 20  # a client that leaves more than this unread is cut off
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One engine behind HTTP. Use `start` and `stop` on a running event loop, or `serve` to block."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_name: str,
        api_key: str | None = None,
        error_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        """error_rate: share of generation requests that are answered with status 500, drawn by the seed."""
        if not 0 <= error_rate <= 1:
            raise SimulatorError(f"error_rate must be in [0, 1], got {error_rate}")
        self.engine = Engine(config)
        self.metrics = Metrics(model_name)
        self._config = config
        self._model = model_name
        self._api_key = api_key.encode() if api_key else None
        self._error_rate = error_rate
        self._random = random.Random(seed)
        self._ids = itertools.count()
        self._id_prefix = f"{seed & 0xFFFFFFFF:08x}"
        self._loop: StepLoop | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (a free one for port 0). Raises OSError where it cannot."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_json_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        self._loop = StepLoop(self.engine, self.metrics.on_step)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Stop listening and cut what is under way."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._loop is not None:
            self._loop.close()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        arrival_s = time.monotonic()
        self._authorize(request)
        body = decode(await request.read())
        number = next(self._ids)
        call = parse(
            body,
            chat=chat,
            model=self._model,
            max_model_len=self._config.max_model_len,
            default_id=f"{self._id_prefix}{number:08x}",
            header_id=request.headers.get("X-Request-Id"),
        )
        if self._error_rate and self._random.random() < self._error_rate:
            raise ApiError(500, "injected fault", "InternalServerError")
        if call.stream:
            return await self._stream(request, call, arrival_s)
        return await self._whole(call, arrival_s)

    async def _whole(self, call: Call, arrival_s: float) -> web.Response:
        created = int(time.time())
        done = asyncio.get_running_loop().create_future()
        left = call.output_tokens

        def on_token() -> None:
            nonlocal left
            left -= 1
            if not left and not done.done():
                done.set_result(None)

        await self._run(LiveRequest(call.prompt_tokens, call.output_tokens, on_token), arrival_s, done)
        return web.Response(body=answer(call, self._model, created), content_type="application/json")

    async def _stream(self, request: web.Request, call: Call, arrival_s: float) -> web.StreamResponse:
        if request.version < (1, 1):
            raise ApiError(400, "streaming needs HTTP/1.1", "BadRequestError", "stream")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise asyncio.CancelledError
        frames = Frames(call, self._model, int(time.time()))
        done = asyncio.get_running_loop().create_future()
        # The chunks go straight to the transport, framed by hand: one write for each token of a step.
        write, next_frame, closing, total = (
            transport.write,
            frames.next,
            transport.is_closing,
            call.output_tokens,
        )

        def on_token() -> None:
            if not closing():
                write(next_frame())
                if frames.sent == total and not done.done():
                    done.set_result(None)
                elif not frames.sent & 1023 and transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                    transport.abort()

        await self._run(LiveRequest(call.prompt_tokens, call.output_tokens, on_token), arrival_s, done)
        await response.write_eof()
        return response

    async def _run(self, live: LiveRequest, arrival_s: float, done: "asyncio.Future[None]") -> None:
        """Wait for the last token. A client that goes away cancels this, and its slot is freed."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("the server is not started")
        try:
            loop.submit(live, arrival_s)
        except SimulatorError as error:
            raise ApiError(400, str(error), "BadRequestError") from error
        try:
            await done
        finally:
            if live.finish_s is None:
                self.metrics.aborted += 1
                loop.abort(live)

    async def _models(self, request: web.Request) -> web.Response:
        self._authorize(request)
        card = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "ampacity-simulator",
            "root": self._config.name,
            "parent": None,
            "max_model_len": self._config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = decode(await request.read())
        count = count_words(body)
        prompt = body.get("prompt")
        words = prompt.split() if isinstance(prompt, str) else [str(n) for n in range(count)]
        tokens = [zlib.crc32(word.encode("utf-8", "replace")) % 32000 for word in words]
        max_model_len = self._config.max_model_len
        return web.json_response(
            {"count": count, "max_model_len": max_model_len, "tokens": tokens, "token_strs": None}
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "ampacity-simulator"})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self._loop is None:
            raise RuntimeError("the server is not started")
        text = self.metrics.render(self._loop)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=text.encode(), headers=headers)

    def _authorize(self, request: web.Request) -> None:
        """vLLM asks for the key under /v1 only."""
        if self._api_key is None:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.encode("utf-8", "replace"), self._api_key
        ):
            raise web.HTTPUnauthorized


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors with vLLM's bodies."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(status=error.status, body=error.body, content_type="application/json")
    except web.HTTPUnauthorized:
        return web.json_response({"error": "Unauthorized"}, status=401)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response({"detail": error.reason}, status=error.status, headers=headers)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str,
    api_key: str | None = None,
    error_rate: float = 0.0,
    seed: int = 0,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; call it in the main thread. `ready` gets the port once it listens.

    Raises SimulatorError when the address cannot be used.
    """
    server = Server(config, model_name=model_name, api_key=api_key, error_rate=error_rate, seed=seed)

    async def main() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        try:
            bound = await server.start(host, port)
        except OSError as error:
            raise SimulatorError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        gc.collect()
        gc.freeze()  # what is loaded by now stays: collections need not look at it
        if ready is not None:
            ready(bound)
        await stopped.wait()
        await server.stop()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def configured(
    preset: str, *, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None
) -> EngineConfig:
    """A preset (see hardware.find_config) with its limits replaced where they are given. Raises SimulatorError."""
    config = find_config(preset)
    if max_num_seqs is not None:
        config = replace(config, max_num_seqs=max_num_seqs)
    if max_num_batched_tokens is not None:
        config = replace(config, max_num_batched_tokens=max_num_batched_tokens)
    return config


def _end_with_stdin() -> None:
    """End this process when the other end of stdin closes: a child must not outlive its parent."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.server", description=__doc__)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--model-name", help="default: the preset's name")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    parser.add_argument(
        "--error-rate", type=float, default=0.0, help="share of requests answered with status 500"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    model = options.model_name or options.preset

    def ready(port: int) -> None:
        if options.end_with_stdin:
            _end_with_stdin()
        host = f"[{options.host}]" if ":" in options.host else options.host
        print(f"listening on http://{host}:{port}/v1 model {model}", flush=True)

    try:
        api_key = os.environ.get(options.api_key_env) if options.api_key_env else None
        if options.api_key_env and not api_key:
            raise SimulatorError(f"environment variable {options.api_key_env} is not set or empty")
        serve(
            configured(
                options.preset,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
            ),
            host=options.host,
            port=options.port,
            model_name=model,
            api_key=api_key,
            error_rate=options.error_rate,
            seed=options.seed,
            ready=ready,
        )
    except SimulatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
