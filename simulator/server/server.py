"""Serve the engine in real time by HTTP: OpenAI's APIs as in vLLM, and Anthropic's Messages."""

import asyncio
import gc
import hmac
import itertools
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec

import msgspec
from aiohttp import web

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.engine import EngineConfig
from ampacity.simulator.models.hardware import find_deployment
from ampacity.simulator.server.answers import model_cards
from ampacity.simulator.server.apierrors import ApiError, invalid
from ampacity.simulator.server.face import Face, read_options
from ampacity.simulator.server.faults import Fate, Faults, Plan
from ampacity.simulator.server.generation import Generation, reset_connection
from ampacity.simulator.server.metrics import Metrics, Page
from ampacity.simulator.server.other_apis import as_known
from ampacity.simulator.server.protocol import Api, decode, parse, words_of
from ampacity.simulator.server.realtime import LiveRun

MAX_BODY_BYTES = 64 << 20
APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """An HTTP server for a deployment. `start` and `stop` need a running event loop."""

    def __init__(
        self,
        deployment: EngineConfig | Deployment,
        *,
        model_name: str,
        api_key: str | None = None,
        face: Face = Face(),  # noqa: B008  # frozen
        faults: Plan = Plan(),  # noqa: B008
        seed: int = 0,
    ) -> None:
        """seed: for request ids, and so for words and lengths of requests without a seed."""
        self.deployment = (
            Deployment(deployment) if isinstance(deployment, EngineConfig) else deployment
        )
        self.metrics = [Metrics(model_name, number) for number in range(self.deployment.engines)]
        self.face = face
        self.faults = Faults(faults, time.monotonic())
        self._config = self.deployment.config
        self._models_served = (model_name, *self.face.adapters)
        self._api_key = api_key.encode() if api_key else None
        self._ids = itertools.count()
        self._id_prefix = f"{seed & 0xFFFFFFFF:08x}"
        self.live: LiveRun  # this and the next three are set by `start`
        self._generation: Generation
        self._page: Page
        self._runner: web.AppRunner

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port (a free one for port 0). Raises OSError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_json_errors])
        for path in APIS:
            app.router.add_post(path, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        if self.face.control:
            app.router.add_get("/control/faults", self._show_faults)
            app.router.add_post("/control/faults", self._set_faults)
        self.live = LiveRun(
            self.deployment,
            lambda number, *step: self.metrics[number].on_step(*step),
            lambda *step: self.faults.step_end(*step),  # noqa: PLW0108  # with the current plan
        )
        self._generation = Generation(self.deployment, self.live, self.metrics[0], self.face)
        self._page = Page(self.metrics, self.live)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        self.faults = Faults(self.faults.plan, time.monotonic())
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        await self._runner.cleanup()
        self.live.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        arrival_s = time.monotonic()
        self._authorize(request)
        body, api = decode(await request.read()), APIS[request.path]
        number = next(self._ids)
        call = parse(
            body if api in ("chat", "completions") else as_known(api, body),
            api=api,
            models=self._models_served,
            max_model_len=self._config.max_model_len,
            default_id=f"{self._id_prefix}{number:08x}",
            header_id=request.headers.get("X-Request-Id"),
            natural_tokens=self.face.natural_tokens,
        )
        headers = self.faults.admit(call.prompt_tokens + call.output_tokens, arrival_s)
        fate = self.faults.draw(arrival_s)
        if fate.delay_s:
            await asyncio.sleep(fate.delay_s)
            arrival_s = time.monotonic()  # the engine sees it only now
        await self._fail_at_once(request, fate, call.stream)
        self.metrics[0].on_call(call)
        answer = self._generation.stream if call.stream else self._generation.whole
        try:
            return await answer(request, call, arrival_s, fate, headers)
        except ConnectionResetError as error:  # the client disconnected between two writes
            raise asyncio.CancelledError from error

    async def _fail_at_once(self, request: web.Request, fate: Fate, stream: bool) -> None:
        """Inject faults before the answer: raise ApiError, or reset the connection."""
        if fate.kind in ("500", "503", "429") or (fate.kind == "error_in_stream" and not stream):
            raise self.faults.error(fate.kind)
        if fate.kind == "reset" and request.transport is not None:
            reset_connection(request.transport)
            await asyncio.Event().wait()  # the closed connection cancels this handler

    async def _models(self, request: web.Request) -> web.Response:
        self._authorize(request)
        cards = model_cards(
            self._models_served, self._config.name, self._config.max_model_len, int(time.time())
        )
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = decode(await request.read())
        words = [str(word) for word in words_of(body)]
        tokens = [zlib.crc32(word.encode("utf-8", "replace")) % 32000 for word in words]
        strings = words if body.get("return_token_strs") is True else None
        max_model_len = self._config.max_model_len
        return web.json_response(
            {
                "count": len(words),
                "max_model_len": max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def _show_faults(self, request: web.Request) -> web.Response:
        self._authorize(request)
        return web.json_response(self.faults.shown(time.monotonic()))

    async def _set_faults(self, request: web.Request) -> web.Response:
        """Replace the whole plan; {} ends all faults. Its times count from now."""
        self._authorize(request)
        try:
            plan = read_options(await request.read(), Plan, "faults")
        except SimulatorError as error:
            raise invalid("body", str(error)) from error
        self.faults = Faults(plan, time.monotonic())
        self.live.stretch_again()
        return web.json_response(self.faults.shown(time.monotonic()))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "ampacity-simulator"})

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._page.render(), headers=headers)

    def _authorize(self, request: web.Request) -> None:
        """Check the key, which Anthropic's clients send as X-Api-Key. Raises HTTPUnauthorized."""
        if self._api_key is None:
            return
        given = (
            request.headers.get("Authorization") or f"Bearer {request.headers.get('X-Api-Key', '')}"
        )
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.encode("utf-8", "replace"), self._api_key
        ):
            raise web.HTTPUnauthorized


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors with vLLM's bodies."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.Response(
            status=error.status,
            body=error.body,
            content_type="application/json",
            headers=error.headers,
        )
    except web.HTTPUnauthorized:
        return web.json_response({"error": "Unauthorized"}, status=401)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response({"detail": error.reason}, status=error.status, headers=headers)


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the server process."""

    preset: str = "demo"  # see hardware.find_deployment
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    model_name: str | None = None  # None: the preset
    api_key_env: str | None = None  # environment variable with the key that requests must carry
    face: Face = Face()
    faults: Plan = Plan()
    seed: int = 0


def serve(
    start: Start,
    deployment: EngineConfig | Deployment | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread; print the address once it listens.

    deployment: instead of the preset. Raises SimulatorError for invalid options or addresses.
    """
    if not start.host or not 0 <= start.port <= 65535:
        raise SimulatorError(
            f"cannot listen on {start.host!r}, port {start.port}: give a host (0.0.0.0: all of "
            "this machine's addresses) and a port from 0 to 65535"
        )
    api_key = os.environ.get(start.api_key_env) if start.api_key_env else None
    if start.api_key_env and not api_key:
        raise SimulatorError(
            "--api-key-env: no environment variable of that name is set: "
            "give a variable's name, not the key"
        )
    model = start.model_name or start.preset
    host = f"[{start.host}]" if ":" in start.host else start.host
    server = Server(
        deployment or find_deployment(start.preset),
        model_name=model,
        api_key=api_key,
        face=start.face,
        faults=start.faults,
        seed=start.seed,
    )

    async def main() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        try:
            port = await server.start(start.host, start.port)
        except OSError as error:
            raise SimulatorError(
                f"cannot listen on {host}:{start.port}: {error.strerror or error}"
            ) from error
        gc.collect()
        gc.freeze()  # all that is loaded by now stays
        print(f"listening on http://{host}:{port}/v1 model {model}", flush=True)
        on_ready()
        await stopped.wait()
        await server.stop()

    loop_factory = import_module("uvloop").new_event_loop if find_spec("uvloop") else None
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def _end_with_stdin() -> None:
    """Terminate this process when stdin closes: a child must not outlive its parent."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Run `python -m ampacity.simulator.server.server START`, with a `Start` in JSON."""
    try:
        serve(read_options(sys.argv[1].encode(), Start, "server"), on_ready=_end_with_stdin)
    except SimulatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
