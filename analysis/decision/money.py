"""Costs of tokens: self-hosted against hosted, prompt caches, and what a cost depends on."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ampacity.analysis.decision.model import DecisionError

HOURS_PER_YEAR = 8760
MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens of a hosted API; ``cached``: of input read from its cache."""

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None

    @property
    def read(self) -> float:
        """Return the price of a cached input token; that of a fresh one where there is none."""
        return self.input if self.cached is None else self.cached

    @property
    def write(self) -> float:
        return self.input if self.cache_write is None else self.cache_write

    def request_usd(self, use: Request) -> float:
        """Return the dollars of one request, its cached tokens read from the cache."""
        fresh = use.input_tokens - use.cached_tokens
        tokens = (
            fresh * self.input + use.cached_tokens * self.read + use.output_tokens * self.output
        )
        return tokens / MILLION


@dataclass(frozen=True)
class Request:
    """Mean tokens of a request; ``cached_tokens`` of the input come from a cache."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0


def read_prices(path: Path) -> dict[str, Prices]:
    """Read a price file: CSV with the columns model, input, output and, where there are such
    prices, cached and cache_write; dollars per million tokens. Raises DecisionError.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in file if not line.startswith("#") and line.strip()]
            head = lines[0].strip().lower() if lines else ""
            mark = ";" if ";" in head else ","
            names = [name.strip() for name in head.split(mark)]
            rows = csv.DictReader(lines[1:], names, delimiter=mark)
            missing = {"model", "input", "output"} - set(names)
            if missing:
                raise DecisionError(
                    f"{path}: no column {', '.join(sorted(missing))}; a price file has the columns "
                    "model,input,output and may have cached,cache_write (USD per million tokens)"
                )
            found: dict[str, Prices] = {}
            for row in rows:
                name = (row["model"] or "").strip()
                if not name or name in found:
                    why = f"{name!r} stands twice" if name else "a row has no model"
                    raise DecisionError(f"{path}: {why}")
                found[name] = _prices(row, f"{path}, {name!r}")
    except OSError as error:
        raise DecisionError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DecisionError(f"{path}: not a CSV file: {error}") from error
    if not found:
        raise DecisionError(f"{path}: it holds no price")
    return found


def _prices(row: Mapping[str, str | None], where: str) -> Prices:
    known: dict[str, float | None] = {}
    for name in (field.name for field in fields(Prices)):
        text = (row.get(name) or "").strip()
        try:
            known[name] = float(text) if text else None
        except ValueError:
            raise DecisionError(f"{where}: {name} is {text!r}: a number is needed") from None
        price = known[name]
        if price is not None and not 0 <= price < math.inf:
            raise DecisionError(f"{where}: {name} is {text}: it must be 0 or more")
    given, output = known["input"], known["output"]
    if given is None or output is None:
        raise DecisionError(f"{where}: input and output need a price")
    return Prices(given, output, known["cached"], known["cache_write"])


def output_share(prices: Prices, use: Request) -> float:
    """Return the share of a request's price that its output bears."""
    whole = prices.request_usd(use)
    return use.output_tokens * prices.output / MILLION / whole if whole else 0.0


@dataclass(frozen=True)
class BreakEven:
    """Calls with one prefix from which writing it to a cache pays.

    ``exact``: (write - read) / (input - read), the writing call included. ``cautious``: write /
    (input - read), which counts the write as if it brought nothing.
    """

    exact: float
    cautious: float

    @property
    def calls(self) -> tuple[int, int]:
        """Return (exact, cautious) as whole calls."""
        return math.ceil(self.exact - 1e-9), math.ceil(self.cautious - 1e-9)


def cache_break_even(prices: Prices) -> BreakEven | None:
    """Return when a prompt cache pays; None where reading costs no less than sending again."""
    saved = prices.input - prices.read
    if saved <= 0:
        return None
    return BreakEven((prices.write - prices.read) / saved, prices.write / saved)


def prefix_usd_per_day(
    prices: Prices, prefix_tokens: float, calls: float, writes: float
) -> tuple[float, float]:
    """Return (without, with a cache) dollars a day of a prefix that ``calls`` requests share."""
    million = prefix_tokens / MILLION
    cached = writes * prices.write + (calls - writes) * prices.read
    return million * calls * prices.input, million * cached


@dataclass(frozen=True)
class FleetCost:
    """A fleet that is paid for whether it is used or not.

    ``carried_rps``: what it carries within the SLO; ``utilisation``: mean load over that.
    ``accepted``: the share of results that are of use.
    """

    gpus: int
    gpu_hour_usd: float
    carried_rps: float
    utilisation: float
    request: Request
    accepted: float = 1.0

    @property
    def usd_per_hour(self) -> float:
        return self.gpus * self.gpu_hour_usd

    @property
    def usd_per_year(self) -> float:
        return HOURS_PER_YEAR * self.usd_per_hour

    @property
    def usd_per_request(self) -> float:
        """Return the dollars of one request that is of use."""
        served = 3600 * self.carried_rps * self.utilisation * self.accepted
        return self.usd_per_hour / served if served > 0 else math.inf

    @property
    def usd_per_million_output(self) -> float:
        return self.usd_per_request / self.request.output_tokens * MILLION

    def crossover(self, hosted: Prices) -> float:
        """Return the utilisation from which this fleet is cheaper than a hosted API.

        Above 1: the hosted API is cheaper at any load that the fleet carries.
        """
        hosted_usd = 3600 * self.carried_rps * self.accepted * hosted.request_usd(self.request)
        return self.usd_per_hour / hosted_usd if hosted_usd else math.inf


@dataclass(frozen=True)
class Sensitivity:
    """Change of the cost of a useful request when one input is lower or higher by a share."""

    name: str
    lower: float
    higher: float

    @property
    def reach(self) -> float:
        return max(abs(self.lower), abs(self.higher))


def sensitivities(cost: FleetCost, share: float = 0.2) -> list[Sensitivity]:
    """Return how much each input moves the cost per useful request, the largest first."""

    def scaled(name: str, by: float) -> float:
        value = min(
            getattr(cost, name) * by, 1.0 if name in ("utilisation", "accepted") else math.inf
        )
        return replace(cost, **{name: value}).usd_per_request / cost.usd_per_request - 1

    names = ("gpu_hour_usd", "carried_rps", "utilisation", "accepted")
    found = [Sensitivity(name, scaled(name, 1 - share), scaled(name, 1 + share)) for name in names]
    return sorted(found, key=lambda one: -one.reach)


def transfer_s(size_bytes: float, link_bits_s: float) -> float:
    """Return the time to send a KV cache over a link: bytes x 8 / bits per second."""
    return size_bytes * 8 / link_bits_s
