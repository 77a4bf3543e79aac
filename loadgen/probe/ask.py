"""Send single requests outside of any stage."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.receive.answers import ANSWERS
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import PROTOCOLS, Api, RequestShape
from ampacity.loadgen.send.secrets import redact_record

WHOLE_FOR_S = 1.0  # after which an answer that lacks nothing but its end is over
REFUSED = (400, 422)  # statuses of a request with a field that the server does not accept


class Asked(Exchange):
    """A probing exchange, which keeps the headers of its answer."""

    __slots__ = ("headers",)

    def __init__(self, *arguments: Any) -> None:
        self.headers: dict[str, str] = {}
        super().__init__(*arguments)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; called by the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        super().on_header(name, value)

    @property
    def whole(self) -> bool:
        """Tell whether only the end of the body may be missing."""
        return self._answer.whole


def refuses_field(record: RequestRecord) -> bool:
    """Return whether a request may have been refused for one of its fields."""
    return record.http_status in REFUSED and record.status != "too_long"


async def ask(
    client: Client, api: Api, request: bytes, heard: Callable[[Asked], None] | None = None
) -> RequestRecord:
    """Send one request outside of any stage; return its record, with secrets redacted.

    ``heard`` gets the exchange when it is over; its text is then searched for thinking.
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
    give_up_s = time.monotonic() + client.patience_s
    while not ended.is_set():
        left_s = give_up_s - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, WHOLE_FOR_S)):
                await ended.wait()
        if not ended.is_set() and (exchange.whole or left_s <= WHOLE_FOR_S):
            why = f"no complete answer within {client.patience_s:g} s"
            exchange.fail("timeout", why, time.monotonic_ns())
    redact_record(record, client.secrets)
    client.asked.append(record)
    if record.status == "ok" and "json" in exchange.headers.get("content-type", ""):
        client.asked_bodies += 1
    if record.status != "ok" and not refuses_field(record):
        client.asked_failed.append(f"{record.status}: {record.error}")
    if heard is not None:
        heard(exchange)
    return record


async def count_message_overhead(
    client: Client,
    shape: RequestShape,
    send: Callable[[RequestShape, str | msgspec.Raw, int], bytes],
) -> int:
    """Return the tokens that the chat template adds to each message after the first; 0: unknown.

    Sends the same words as one message and as three.
    """
    if not PROTOCOLS[shape.api].conversation:
        return 0
    parts = ("please count these words", "there are four of them", "and how many are these")
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, parts, strict=True)]
    one = await ask(client, shape.api, send(shape, " ".join(parts), 1))
    three = await ask(client, shape.api, send(shape, msgspec.Raw(msgspec.json.encode(messages)), 1))
    if one.input_tokens is None or three.input_tokens is None:
        return 0
    return max(round((three.input_tokens - one.input_tokens) / 2), 0)
