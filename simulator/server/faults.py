"""Inject faults: choose the requests that fail, and lengthen steps. No I/O, no clock.

A plan is one JSON object (`Plan`); its times count from the moment it was set. Faults are drawn
with the plan's seed in order of arrival: the same seed and order give the same faults.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ampacity.simulator import SimulatorError
from ampacity.simulator.server.apierrors import ApiError

KINDS = ("500", "503", "429", "reset", "reset_stream", "truncated", "garbage", "error_in_stream")


Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
PerMinute = Annotated[float, Meta(ge=1, le=1e12)]


class Spikes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A share of the requests is delayed before the engine gets it."""

    share: Share = 0.0
    seconds: Seconds = 0.0


class Drift(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A share of the requests is delayed more and more: the tail rises, the median does not."""

    share: Share = 0.0
    seconds_per_minute: Seconds = 0.0
    at_s: Seconds = 0.0


class Stall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No stream gets a token for for_s seconds from at_s on."""

    at_s: Seconds
    for_s: Seconds


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps that begin at at_s or later take `factor` times as long, until the next entry."""

    at_s: Seconds
    factor: Annotated[float, Meta(ge=0.01, le=1e6)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rate limits; tokens are prompt and output tokens. None: no limit."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All faults. `errors`: share of the requests by kind (KINDS).

    Ranges are checked when read from JSON; shares that exclude each other add up to at most 1.
    """

    seed: int = 0
    errors: dict[str, Share] = {}
    retry_after_s: Seconds = 1.0  # of a 429 or 503 of `errors`
    spikes: Spikes = Spikes()
    drift: Drift = Drift()
    stalls: tuple[Stall, ...] = ()
    capacity: tuple[Capacity, ...] = ()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for kind in self.errors:
            if kind not in KINDS:
                raise SimulatorError(
                    f"faults: errors has no kind {kind!r}; there are {', '.join(KINDS)}"
                )
        for name, share in (
            ("errors", sum(self.errors.values())),
            ("spikes and drift", self.spikes.share + self.drift.share),
        ):
            if share > 1.0 + 1e-9:
                raise SimulatorError(f"faults: the shares in {name} add up to more than 1")


@dataclass(frozen=True, slots=True)
class Fate:
    """The fault of one request."""

    kind: str | None = None  # of KINDS
    delay_s: float = 0.0  # before the engine gets it
    place: float = 0.5  # in [0, 1): position in the answer of a fault in mid-stream

    def token(self, tokens: int) -> int:
        """Return the number, from 1, of the token it replaces; not the first if there are two."""
        return 1 if tokens < 2 else 2 + int(self.place * (tokens - 1))


class Bucket:
    """A token bucket with a limit per minute, full at first. The caller keeps the time."""

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at_s = -math.inf

    def level(self, now_s: float) -> float:
        if now_s > self._at_s:
            refilled = self._level + (now_s - self._at_s) * self.per_minute / 60.0
            self._level, self._at_s = min(self.per_minute, refilled), now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the time until an amount is available; infinite if it never is."""
        if amount > self.per_minute:
            return math.inf
        return max(0.0, (amount - self.level(now_s)) * 60.0 / self.per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Faults:
    """A plan in use."""

    def __init__(self, plan: Plan, now_s: float) -> None:
        self.plan = plan
        self.since_s = now_s
        self.requests = 0  # with a drawn fate
        self.injected: Counter[str] = Counter()
        self._random = random.Random(plan.seed)
        self._stalls = sorted((stall.at_s, stall.for_s) for stall in plan.stalls)
        self._capacity = sorted((change.at_s, change.factor) for change in plan.capacity)
        limits = (
            ("requests", plan.limits.requests_per_minute),
            ("tokens", plan.limits.tokens_per_minute),
        )
        self._buckets = [(name, Bucket(limit)) for name, limit in limits if limit is not None]

    def draw(self, now_s: float) -> Fate:
        """Return the fate of the next request: three draws, so that shares are independent."""
        self.requests += 1
        plan = self.plan
        kind = self._kind(self._random.random())
        place = self._random.random()
        chance = self._random.random()
        delay_s = 0.0
        if chance < plan.spikes.share:
            delay_s = plan.spikes.seconds
            self.injected["spike"] += 1
        elif chance > 1.0 - plan.drift.share:
            minutes = max(0.0, now_s - self.since_s - plan.drift.at_s) / 60.0
            delay_s = plan.drift.seconds_per_minute * minutes
            self.injected["drift"] += 1
        if kind is not None:
            self.injected[kind] += 1
        return Fate(kind, delay_s, place)

    def _kind(self, chance: float) -> str | None:
        for kind, share in self.plan.errors.items():
            if chance < share:
                return kind
            chance -= share
        return None

    def step_end(self, start_s: float, end_s: float) -> float:
        """Return the end of a step that lasts from start_s to end_s without faults."""
        if not self._stalls and not self._capacity:
            return end_s
        start_s -= self.since_s
        end_s -= self.since_s
        for at_s, factor in reversed(self._capacity):
            if at_s <= start_s:
                end_s = start_s + (end_s - start_s) * factor
                break
        for at_s, for_s in self._stalls:
            if start_s < at_s + for_s and at_s < end_s:
                end_s += at_s + for_s - max(start_s, at_s)
        return end_s + self.since_s

    def admit(self, tokens: int, now_s: float) -> dict[str, str]:
        """Take a request from the limits; return the x-ratelimit headers.

        Raises ApiError 429 with them and Retry-After if a limit is reached; then nothing is taken.
        """
        amounts = {"requests": 1, "tokens": tokens}
        for name, bucket in self._buckets:
            wait_s = bucket.wait_s(amounts[name], now_s)
            if wait_s > 0:
                self.injected[f"limit_{name}"] += 1
                raise self._limited(name, bucket, amounts[name], wait_s, now_s)
        for name, bucket in self._buckets:
            bucket.take(amounts[name])
        return self._headers(now_s)

    def _limited(
        self, name: str, bucket: Bucket, amount: int, wait_s: float, now_s: float
    ) -> ApiError:
        never = math.isinf(wait_s)
        headers = self._headers(now_s)
        if not never:
            headers |= retry_after(wait_s)
        advice = f"Please try again in {wait_s:.3f} seconds."
        message = (
            f"Rate limit reached for {name} per minute: limit {bucket.per_minute:g}, "
            f"requested {amount}. {'A request of this size never fits.' if never else advice}"
        )
        return ApiError(429, message, name, code="rate_limit_exceeded", headers=headers)

    def _headers(self, now_s: float) -> dict[str, str]:
        headers = {}
        for name, bucket in self._buckets:
            level, limit = bucket.level(now_s), bucket.per_minute
            headers[f"x-ratelimit-limit-{name}"] = f"{limit:.0f}"
            headers[f"x-ratelimit-remaining-{name}"] = f"{max(0.0, level):.0f}"
            headers[f"x-ratelimit-reset-{name}"] = f"{(limit - level) * 60.0 / limit:.3f}s"
        return headers

    def error(self, kind: str) -> ApiError:
        """Return the answer for a kind of error with a status."""
        if kind not in ("503", "429"):
            return ApiError(500, "injected fault", "InternalServerError")
        name, code = "ServiceUnavailableError", None
        if kind == "429":
            name, code = "requests", "rate_limit_exceeded"
        headers = retry_after(self.plan.retry_after_s)
        return ApiError(int(kind), "injected fault", name, code=code, headers=headers)

    def shown(self, now_s: float) -> dict[str, Any]:
        """Return the answer of GET /control/faults: the plan, its age and its injected faults."""
        return {
            "faults": msgspec.to_builtins(self.plan),
            "age_s": round(now_s - self.since_s, 3),
            "requests": self.requests,
            "injected": dict(sorted(self.injected.items())),
        }


def retry_after(seconds: float) -> dict[str, str]:
    """Return Retry-After in whole seconds, and the exact time in the header of OpenAI's clients."""
    return {
        "Retry-After": str(max(1, math.ceil(seconds))),
        "retry-after-ms": f"{seconds * 1000:.0f}",
    }
