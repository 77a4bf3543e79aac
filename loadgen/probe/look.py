"""Looks at an endpoint before the load begins: is it there, who serves, what does it take and tell.

Every refusal is one line that names the culprit. The probe sends at most eight small requests;
they are not part of the run's records.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import NoConnectionError, Page, PageError, Pages
from ampacity.loadgen.probe.diagnosis import Finding
from ampacity.loadgen.probe.gateways import gateway_of
from ampacity.loadgen.probe.network import RoundTrip
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.exchange import SEVERAL, Exchange
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError, shown_url
from ampacity.loadgen.send.protocols import Api, Dialect, RequestShape, error_text, printable
from ampacity.loadgen.send.secrets import redact, redact_record
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import Tokenizer

LOOK_TIMEOUT_S = 10.0
_KEY = "key? No API key was sent: put it into a variable and name it with --api-key-env"
UNKNOWN_TOKENS = 32  # of a chat template that nothing is known of
MODELS_MAX = 1000
FIRST_REPEATS = 2  # of a first request that failed
REPEAT_PAUSE_S = 0.2
REFUSED = (400, 422)  # a request field that the server does not take: it is asked without
SHORT_TOKENS = 32  # of our own tokenizer, in the prompt of the first request


@dataclass(frozen=True)
class Served:
    """What the server says about itself without being asked to generate anything."""

    models: tuple[str, ...] = ()
    engine: str | None = None
    engine_version: str | None = None
    server: str | None = None
    max_model_len: int | None = None
    listed: bool = True  # whether there is a /models at all
    trouble: str | None = None  # what it answered instead, where it failed
    gateway: str | None = None  # before the engine


@dataclass(frozen=True)
class Calibration:
    """How the server counts our prompts: tokens = overhead + own tokens × tokens_per_word (``token_census``)."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    measured: bool = False
    method: Literal["tokenize", "usage"] | None = None  # None: not measured
    overhead_error_tokens: float | None = None  # standard error; None: unknown
    word_sd_tokens: float | None = (
        None  # standard deviation of the server's tokens in one of ours; None: unknown
    )
    words: tuple[str, ...] | None = field(
        default=None, repr=False
    )  # that prompts are made of; None: all

    def prompts(self, tokenizer: Tokenizer, salt: str) -> PromptMaker:
        """What makes prompts of planned lengths as this server counts them."""
        return PromptMaker(
            tokenizer,
            salt,
            tokens_per_word=self.tokens_per_word,
            overhead_tokens=self.overhead_tokens,
            words=self.words,
        )

    def margin_tokens(self, input_tokens: Any) -> Any:
        """By how much prompts planned so long (a number or an array) may be longer, as floats.

        Three standard errors, and the rounding to whole words; where nothing was measured, a chat template of UNKNOWN_TOKENS.
        """
        words = np.maximum(input_tokens - self.overhead_tokens, 0.0) / self.tokens_per_word
        sd = self.word_sd_tokens if self.word_sd_tokens is not None else 0.5
        overhead = self.overhead_error_tokens if self.overhead_error_tokens is not None else 2.0
        found = self.tokens_per_word / 2 + 3 * np.hypot(overhead, sd * np.sqrt(words))
        return found if self.measured else found + UNKNOWN_TOKENS

    def as_dict(self) -> dict[str, Any]:
        """As it stands in run.json: of the words only how many."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return found | {"words": None if self.words is None else len(self.words)}


@dataclass(frozen=True)
class ProbeResult:
    """Everything that the probe found."""

    served: Served
    shape: RequestShape
    calibration: Calibration
    record: RequestRecord  # of the last probing request, unloaded
    notes: tuple[str, ...] = field(default=())
    diagnosis: tuple[Finding, ...] = ()  # what an answer of the planned lengths showed
    thinks: InlineThinking | None = None  # in the text of the answer
    keeps_alive: bool | None = None  # its connections; None: not seen
    network: RoundTrip = field(default_factory=RoundTrip)


async def look(pages: Pages, endpoint: Endpoint, model: str | None = None) -> Served:
    """Ask for the models list and the version. Raises EndpointError where nothing can follow.

    Secrets that the server repeats are taken out, but for those in ``model``, which the user said.
    """
    models = await _get(pages, endpoint, endpoint.models_url)
    if models.status in (401, 403):
        raise EndpointError(_key_error(endpoint, models.status, models.body))
    server = models.headers.get("server")
    trouble = f"HTTP {models.status}: {redact(error_text(models.body), endpoint.secrets)}"
    served = Served(listed=models.status == 200, trouble=trouble if models.status >= 500 else None)
    if models.status == 200:
        served = _read_models(served, models.body)
    try:
        page = await _get(pages, endpoint, f"{endpoint.root}/version")
        version = json.loads(page.body).get("version") if page.status == 200 else None
    except (EndpointError, ValueError, AttributeError, RecursionError):
        version = None

    def redacted(text: object) -> str | None:
        return redact(printable(text), endpoint.secrets) if isinstance(text, str) else None

    return dataclasses.replace(
        served,
        models=tuple(m if m == model else redact(m, endpoint.secrets) for m in served.models),
        engine=redacted(served.engine),
        engine_version=redacted(version),
        server=redacted(server),
        gateway=redacted(gateway_of(models.headers, served.engine)),
    )


def _read_models(served: Served, body: bytes) -> Served:
    try:
        entries = [
            e
            for e in json.loads(body)["data"]
            if isinstance(e, dict) and isinstance(e.get("id"), str)
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        return served
    first: dict[str, Any] = entries[0] if entries else {}
    owner, length = first.get("owned_by"), first.get("max_model_len")
    meta = first.get("meta")
    if not isinstance(length, int) and isinstance(meta, dict):
        length = meta.get("n_ctx")
    believable = isinstance(length, int) and not isinstance(length, bool) and 16 <= length < 2**31
    return dataclasses.replace(
        served,
        models=tuple(printable(e["id"]) for e in entries[:MODELS_MAX]),
        engine=owner if isinstance(owner, str) else None,
        max_model_len=length if believable else None,
    )


async def _get(pages: Pages, endpoint: Endpoint, url: str) -> Page:
    try:
        page = await pages.get(url, endpoint.all_headers(), LOOK_TIMEOUT_S)
    except TimeoutError as error:
        raise EndpointError(
            f"{endpoint.url} does not answer within {LOOK_TIMEOUT_S:g} s"
        ) from error
    except NoConnectionError as error:
        hint = await _other_scheme(pages, endpoint, error) or "is the server running?"
        raise EndpointError(f"cannot connect to {endpoint.url}: {error}; {hint}") from error
    except PageError as error:
        hint = await _other_scheme(pages, endpoint, error)
        said = f"{endpoint.url} does not speak HTTP as expected: {error}"
        raise EndpointError(f"{said}; {hint}" if hint else said) from error
    if (
        page.status == 400
        and endpoint.scheme == "http"
        and (hint := await _other_scheme(pages, endpoint))
    ):
        text = redact(error_text(page.body), endpoint.secrets)
        raise EndpointError(f"{endpoint.url} answers HTTP 400: {text}; {hint}")
    if page.status == 407:
        raise EndpointError(
            f"{endpoint.url}: the proxy on the way wants a user name and password (HTTP 407): write them into HTTP_PROXY, "
            "as http://USER:PASSWORD@HOST:PORT"
        )
    if 300 <= page.status < 400 and "location" in page.headers:
        place = redact(printable(shown_url(page.headers["location"])), endpoint.secrets)
        raise EndpointError(f"{url} redirects to {place}: give the final base URL")
    return page


async def _other_scheme(pages: Pages, endpoint: Endpoint, failed: Exception | None = None) -> str:
    """What to try where TLS failed for its certificate, or the server speaks it under http, or not under https; else empty.

    The server is asked, at its root and without the user's key or headers.
    """
    if isinstance(failed and failed.__cause__, ssl.SSLCertVerificationError):
        return "its certificate must be one that this machine trusts (SSL_CERT_FILE names further ones)"
    tls = endpoint.scheme == "http"
    other, spoken = ("https", "TLS") if tls else ("http", "plain HTTP")
    hint = f"{spoken} is spoken there: try {other}://{endpoint.authority}{endpoint.path}"
    try:
        page = await pages.get(f"{other}://{endpoint.authority}/", {}, LOOK_TIMEOUT_S / 5)
    except (PageError, TimeoutError) as error:
        return hint if isinstance(error.__cause__, ssl.SSLCertVerificationError) else ""
    # a port for TLS answers 400 to plain HTTP, and one beside it redirects to TLS
    return hint if tls or (page.status != 400 and not 300 <= page.status < 400) else ""


def _key_error(endpoint: Endpoint, status: int, body: bytes) -> str:
    text = redact(error_text(body), endpoint.secrets)
    if endpoint.api_key:
        return f"{endpoint.url} refuses the API key (HTTP {status}: {text}); check the variable of --api-key-env"
    return f"{endpoint.url} wants an API key (HTTP {status}: {text}); put it into a variable and name it with --api-key-env"


def choose_model(served: Served, model: str | None, endpoint: Endpoint) -> str:
    """The model to ask for: the user's, or the only one there is. Raises EndpointError."""
    if model is not None:
        return model
    if len(served.models) == 1 and "***" not in served.models[0]:  # no secret was taken out
        return served.models[0]
    if served.trouble:
        hint = "name a model with --model" if endpoint.has_key else _KEY
        raise EndpointError(f"{endpoint.url}/models answers {served.trouble}; {hint}")
    if not served.listed:
        hint = "" if endpoint.path.endswith("/v1") else f"; should the URL be {endpoint.url}/v1?"
        raise EndpointError(f"{endpoint.url} has no /models: name a model with --model{hint}")
    there = f"it serves: {', '.join(served.models[:10])}" if served.models else "it lists no models"
    raise EndpointError(f"{endpoint.url}: name a model with --model; {there}")


class Asked(Exchange):
    """A probing exchange, which keeps the headers of its answer; those of the load have no use for them."""

    __slots__ = ("headers",)

    def __init__(self, *arguments: Any) -> None:
        self.headers: dict[str, str] = {}
        super().__init__(*arguments)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        super().on_header(name, value)


async def ask(
    client: Client, api: Api, request: bytes, heard: Callable[[Asked], None] | None = None
) -> RequestRecord:
    """Send one request outside of any stage and give its record back, without the secrets that a server repeats.

    ``heard`` is told of the exchange when it is over; then its text is looked at for thinking.
    """
    now_ns = time.monotonic_ns()
    record = RequestRecord(
        request_id=-1, stage=-1, scheduled_ns=now_ns, status="unfinished", dispatched_ns=now_ns
    )
    ended = asyncio.Event()

    def on_end(exchange: Exchange) -> None:
        client.forget(exchange)
        ended.set()

    exchange = Asked(record, request, on_end, ANSWERS[api])
    if heard is not None:
        exchange.watch()
    client.dispatch(exchange)
    try:
        async with asyncio.timeout(client.patience_s):
            await ended.wait()
    except TimeoutError:
        why = f"no complete answer within {client.patience_s:g} s"
        exchange.fail("timeout", why, time.monotonic_ns())
    redact_record(record, client.secrets)
    client.asked += 1
    if record.status != "ok" and record.http_status not in REFUSED:
        client.asked_failed.append(f"{record.status}: {record.error}")
    if heard is not None:
        heard(exchange)
    return record


async def count_message_overhead(
    client: Client,
    shape: RequestShape,
    send: Callable[[RequestShape, str | msgspec.Raw, int], bytes],
) -> int:
    """Tokens that the server's chat template adds to each message but the first; 0 where it cannot be told.

    The same words once as one message and once as three, of which one is an answer.
    """
    if shape.api not in ("chat", "messages", "responses"):
        return 0
    parts = ("please count these words", "there are four of them", "and how many are these")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, parts, strict=True)]
    one = await ask(client, shape.api, send(shape, " ".join(parts), 1))
    three = await ask(client, shape.api, send(shape, msgspec.Raw(msgspec.json.encode(messages)), 1))
    if one.input_tokens is None or three.input_tokens is None:
        return 0
    return max(round((three.input_tokens - one.input_tokens) / 2), 0)


def _dialects() -> list[Dialect]:
    """From the fullest to the plainest: the first that is taken is used."""
    return [
        Dialect(),
        Dialect(ignore_eos=False),
        Dialect(continuous_usage=False),
        Dialect(ignore_eos=False, continuous_usage=False),
        Dialect(ignore_eos=False, continuous_usage=False, stream_usage=False),
    ]


async def _asked_again(client: Client, api: Api, request: bytes) -> RequestRecord:
    """A request that is sent again where it fails otherwise than by what it says: once may be chance."""
    record = await ask(client, api, request)
    for _ in range(FIRST_REPEATS):
        if record.status in ("ok", "timeout") or 400 <= (record.http_status or 0) < 429:
            break
        await asyncio.sleep(REPEAT_PAUSE_S)
        record = await ask(client, api, request)
    return record


async def find_dialect(
    client: Client,
    endpoint: Endpoint,
    shape: RequestShape,
    served: Served,
    send: Callable[[RequestShape, int, int], bytes],
) -> tuple[RequestShape, RequestRecord, list[str]]:
    """The shape that the server takes, by trying. Raises EndpointError with its own words otherwise."""
    notes: list[str] = []
    first: RequestRecord | None = None
    max_tokens_field = shape.dialect.max_tokens_field
    for dialect in _dialects():
        tried = dataclasses.replace(
            shape, dialect=dataclasses.replace(dialect, max_tokens_field=max_tokens_field)
        )
        record = await _asked_again(client, shape.api, send(tried, SHORT_TOKENS, 4))
        renamed = max_tokens_field == "max_completion_tokens"  # once is enough
        if (
            not renamed
            and record.http_status in REFUSED
            and "max_completion_tokens" in (record.error or "")
        ):
            max_tokens_field = "max_completion_tokens"
            tried = dataclasses.replace(
                shape, dialect=dataclasses.replace(dialect, max_tokens_field=max_tokens_field)
            )
            record = await ask(client, shape.api, send(tried, SHORT_TOKENS, 4))
        first = first or record
        if record.status == "ok":
            if not dialect.ignore_eos:
                notes.append("the server refuses ignore_eos: answers end where the model ends them")
            if not dialect.stream_usage:
                notes.append("the server refuses stream_options: tokens are counted as chunks")
            if served.models and shape.model not in served.models:
                notes.append(
                    f"the server lists {', '.join(served.models[:10])} but answers to {shape.model!r} too: is that the model you mean?"
                )
            return tried, record, notes
        if record.http_status not in REFUSED:
            break
    raise EndpointError(_refusal(endpoint, shape, served, first or record))


def _refusal(endpoint: Endpoint, shape: RequestShape, served: Served, record: RequestRecord) -> str:
    """One line that names the culprit of a failed first request."""
    error = record.error or record.status
    if record.http_status in (401, 403):
        return _key_error(endpoint, record.http_status, error.encode())
    unlisted = served.models and shape.model not in served.models
    if unlisted and record.http_status in (400, 404, 422):  # else it failed for another reason
        return f"--model {shape.model}: {endpoint.url} does not serve it ({error}); it serves: {', '.join(served.models[:10])}"
    if record.http_status == 404:
        return f"{endpoint.url}: no such route or model ({error}); does the URL end in /v1, and is --model {shape.model} right?"
    for_a_key = any(
        word in error.lower() for word in ("key", "auth", "credential", "internal server error")
    )
    hint = (
        f"; {_KEY}"
        if (record.http_status or 0) >= 500 and not endpoint.has_key and for_a_key
        else ""
    )
    if SEVERAL in error and shape.extra:
        hint = f"; which field of --extra-body ({', '.join(sorted(shape.extra))}) asks for them?"
    again = (
        f" {FIRST_REPEATS + 1} of {FIRST_REPEATS + 1} times"
        if record.status != "timeout" and (record.http_status or 500) >= 429
        else ""
    )
    return f"{endpoint.url}: a first small request failed{again} as {record.status}: {error}{hint}"
