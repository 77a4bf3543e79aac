"""A scripted hosted provider on 127.0.0.1: quotas by the window, keys that expire, a price list.

It keeps its own books, which tests compare with what the client reports: ``spent_usd``,
``accepted`` (when each request was let through, s), and ``early`` (requests with the id of a
refused one that came before the time that the refusal named).
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import Call, delta, ending, event, role

OVERLOADED = "overloaded"
"""A script's entry: a good stream in which an overload event follows two tokens."""


@dataclass
class Bucket:
    """A token bucket: full at first, refilled evenly within ``window_s``."""

    size: float
    window_s: float
    level: float = field(init=False)
    at_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.level = self.size

    def refill(self) -> None:
        now_s = time.monotonic()
        self.level = min(self.size, self.level + (now_s - self.at_s) * self.size / self.window_s)
        self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Return how long it takes until ``amount`` can be taken; 0: now."""
        self.refill()
        return max(0.0, (amount - self.level) * self.window_s / self.size)


class Provider(FaultServer):
    """A provider with ``requests`` and ``tokens`` per ``window_s``.

    ``family``: of the rate-limit headers (openai, anthropic, ietf, ietf-1, openrouter; "": none).
    ``named``: how a refusal names its time: seconds, ms, date, or "" (not at all). ``keys``: those
    that are valid, each for ``key_life_s`` after ``issue``. ``prices``: (input, output), USD per
    million tokens. ``script``: answers of the first requests of the load, each a status line or OVERLOADED.
    ``least_wait_s`` is added to the time that a refusal names."""

    def __init__(
        self,
        *,
        requests: float = 1e9,
        tokens: float = 1e12,
        window_s: float = 60.0,
        family: str = "openai",
        named: str = "seconds",
        keys: Iterable[str] = (),
        key_life_s: float = 1e9,
        prices: tuple[float, float] = (0.0, 0.0),
        script: Iterable[str] = (),
        least_wait_s: float = 0.0,
        **how: Any,
    ) -> None:
        super().__init__(**how)
        self.quotas = {"requests": Bucket(requests, window_s), "tokens": Bucket(tokens, window_s)}
        self.window_s, self._family, self._named = window_s, family, named
        self._life_s, self._prices = key_life_s, prices
        self._until_s = {key: time.monotonic() + key_life_s for key in keys}
        self._guarded = bool(self._until_s)
        self._script = iter(script)
        self._least_wait_s = least_wait_s
        self.spent_usd, self.early, self.accepted = 0.0, 0, list[float]()
        self.answers: Counter[str] = Counter()  # by status
        self.keys_used: Counter[str] = Counter()
        self._not_before_s: dict[str, float] = {}  # by request id

    def issue(self, key: str) -> str:
        """Make a new key valid."""
        self._until_s[key] = time.monotonic() + self._life_s
        return key

    async def _answer(self, call: Call) -> bool:
        request, now_s = call.request, time.monotonic()
        said = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = said or request.headers.get("x-api-key") or request.headers.get("api-key") or ""
        if self._guarded and now_s > self._until_s.get(key, 0.0):
            return await self._refuse(call, "401 Unauthorized", f"bad or expired key {key}")
        if request.method == "GET":
            return await super()._answer(call)
        self.keys_used[key] += 1
        number = request.headers.get("x-request-id", "")
        self.early += now_s < self._not_before_s.get(number, 0.0)
        scripted = None if "probe" in number else next(self._script, None)
        if scripted and scripted != OVERLOADED:
            return await self._refuse(call, scripted, "as scripted", self._least_wait_s)
        prompt = len(json.dumps(request.body.get("messages", "")).split())
        cost = {"requests": 1.0, "tokens": float(prompt + request.tokens)}
        waits = {name: self.quotas[name].wait_s(n) for name, n in cost.items()}
        name = max(waits, key=lambda n: waits[n])
        if waits[name] > 0:
            why = f"Rate limit reached on {name} per min: {self.quotas[name].size:g}"
            wait_s = waits[name] + self._least_wait_s
            return await self._refuse(call, "429 Too Many Requests", why, wait_s)
        for name, n in cost.items():
            self.quotas[name].level -= n
        self.accepted.append(now_s)
        price_in, price_out = self._prices
        self.spent_usd += (prompt * price_in + request.tokens * price_out) / 1e6
        return await self._stream(call, prompt, scripted)

    async def _stream(self, call: Call, prompt: int, scripted: str | None) -> bool:
        n = call.request.tokens
        self.answers["200"] += 1
        await call.head(f"Transfer-Encoding: chunked\r\n{self._limits()}")
        await call.chunk(role())
        for i in range(2 if scripted else n):
            await call.chunk(event(delta(f"t{i} ")))
            if call.gap_s:
                await asyncio.sleep(call.gap_s)
        if scripted:
            error = {"type": "overloaded_error", "message": "Overloaded"}
            await call.chunk(event({"type": "error", "error": error}))
        else:
            counted = {"prompt_tokens": prompt, "completion_tokens": n}
            end = ending(n).replace(
                b'"usage": {"prompt_tokens": 5, "completion_tokens": %d}' % n,
                b'"usage": %b' % json.dumps(counted).encode(),
            )
            await call.chunk(end)
        await call.send(b"0\r\n\r\n")
        return True

    async def _refuse(self, call: Call, status: str, why: str, wait_s: float = 0.0) -> bool:
        self.answers[status[:3]] += 1
        now = datetime.now(UTC) + timedelta(seconds=wait_s)
        if self._named == "date":  # whole seconds: later, never earlier
            now = now.replace(microsecond=0) + timedelta(seconds=1)
            wait_s = (now - datetime.now(UTC)).total_seconds()
        head = {
            "seconds": f"Retry-After: {wait_s:.3f}\r\n",
            "ms": f"Retry-After-Ms: {1e3 * wait_s:.0f}\r\nRetry-After: 1\r\n",
            "date": f"Retry-After: {format_datetime(now, usegmt=True)}\r\n",
        }.get(self._named if wait_s else "", "")
        if head:
            number = call.request.headers.get("x-request-id", "")
            self._not_before_s[number] = time.monotonic() + wait_s - 0.001
        body = json.dumps({"error": {"message": why}}).encode()
        more = f"Content-Type: application/json\r\n{head}{self._limits()}"
        await call.answer(status, body, more)
        return True

    def _limits(self) -> str:
        """Return the rate-limit headers of the family."""
        lines: list[str] = []
        for name, bucket in self.quotas.items():
            bucket.refill()
            full_s = (bucket.size - bucket.level) * bucket.window_s / bucket.size
            limit, left = int(bucket.size), max(int(bucket.level), 0)
            if self._family == "openai":
                minutes, seconds = divmod(full_s, 60)
                reset = f"{minutes:.0f}m{seconds:.3f}s" if minutes else f"{1e3 * full_s:.0f}ms"
                values = {"limit": limit, "remaining": left, "reset": reset}
                lines += [f"x-ratelimit-{n}-{name}: {v}" for n, v in values.items()]
            elif self._family == "anthropic":
                at = (datetime.now(UTC) + timedelta(seconds=full_s)).isoformat()
                values = {"limit": limit, "remaining": left, "reset": at.replace("+00:00", "Z")}
                lines += [f"anthropic-ratelimit-{name}-{n}: {v}" for n, v in values.items()]
            elif name == "requests" and self._family == "ietf":
                lines += [f'RateLimit-Policy: "r";q={limit};w={bucket.window_s:.0f}']
                lines += [f'RateLimit: "r";r={left};t={full_s:.0f}']
            elif name == "requests" and self._family == "ietf-1":
                lines += [f"RateLimit-Limit: {limit}", f"RateLimit-Remaining: {left}"]
                lines += [f"RateLimit-Reset: {full_s:.0f}"]
            elif name == "requests" and self._family == "openrouter":
                lines += [f"X-RateLimit-Limit: {limit}", f"X-RateLimit-Remaining: {left}"]
                lines += [f"X-RateLimit-Reset: {1e3 * (time.time() + full_s):.0f}"]
        return "".join(f"{line}\r\n" for line in lines)
