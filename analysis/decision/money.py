"""Costs of tokens: self-hosted against hosted, prompt caches, and what a cost depends on."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from msgspec import structs

from ampacity.analysis.capacity.fleet_figures import (
    FleetFigures,
    FleetInputs,
    crossover_utilisation,
    fleet_figures,
)
from ampacity.analysis.contract.part import Part
from ampacity.analysis.decision.model import DecisionError
from ampacity.files import MIB, read_text

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
        every = read_text(path, MIB).splitlines(keepends=True)
        lines = [line for line in every if not line.startswith("#") and line.strip()]
        mark = ";" if ";" in "".join(lines[:1]) else ","
        rows = csv.reader(lines, delimiter=mark)
        names = [name.strip().lower() for name in next(rows, [])]
        missing = {"model", "input", "output"} - set(names)
        if missing:
            raise DecisionError(
                f"{path}: no column {', '.join(sorted(missing))}; a price file has the columns "
                "model,input,output and may have cached,cache_write (USD per million tokens)"
            )
        if any(name and names.count(name) > 1 for name in names):
            raise DecisionError(f"{path}: two columns have one name")
        found: dict[str, Prices] = {}
        for cells in rows:
            row = dict(zip(names, cells, strict=False))
            name = row.get("model", "").strip()
            if not name or name in found:
                why = f"{name!r} stands twice" if name else "a row has no model"
                raise DecisionError(f"{path}: {why}")
            if any(cells[len(names) :]):  # 1,50 for 1.50
                raise DecisionError(f"{path}, {name!r}: more values than columns")
            found[name] = _prices(row, f"{path}, {name!r}")
    except OSError as error:
        raise DecisionError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DecisionError(f"{path}: not a CSV file: {error}") from error
    if not found:
        raise DecisionError(f"{path}: it holds no price")
    return found


def _prices(row: Mapping[str, str], where: str) -> Prices:
    known: dict[str, float | None] = {}
    for name in (field.name for field in fields(Prices)):
        text = row.get(name, "").strip()
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


class BreakEven(Part, frozen=True, kw_only=True):
    """Calls with one prefix from which writing it to a cache pays, and as whole calls.

    ``exact``: (write - read) / (input - read), the writing call included. ``cautious``: write /
    (input - read), which counts the write as if it brought nothing.
    """

    exact: float
    exact_calls: int
    cautious: float
    cautious_calls: int


def cache_break_even(prices: Prices) -> BreakEven | None:
    """Return when a prompt cache pays; None where reading costs no less than sending again."""
    saved = prices.input - prices.read
    if saved <= 0:
        return None
    exact, cautious = (prices.write - prices.read) / saved, prices.write / saved
    return BreakEven(
        exact=exact,
        exact_calls=math.ceil(exact - 1e-9),
        cautious=cautious,
        cautious_calls=math.ceil(cautious - 1e-9),
    )


def prefix_usd_per_day(
    prices: Prices, prefix_tokens: float, calls: float, writes: float
) -> tuple[float, float]:
    """Return (without, with a cache) dollars a day of a prefix that ``calls`` requests share."""
    million = prefix_tokens / MILLION
    cached = writes * prices.write + (calls - writes) * prices.read
    return million * calls * prices.input, million * cached


class Prefix(Part, frozen=True, kw_only=True):
    """A shared prefix at a hosted API, written to its cache once a day (assumed)."""

    tokens: float
    calls_per_day: float
    usd_per_day_without_cache: float
    usd_per_day_with_cache: float


class Hosted(Part, frozen=True, kw_only=True):
    """A hosted API against the fleet, for the mean request of the run, accepted or not.

    From ``crossover_utilisation`` on (above 1: never), which is ``crossover_rps``, the fleet is
    cheaper; at the plan's load it is cheaper below ``crossover_gpu_hour_usd``. ``output_share``: of
    the price of a request.
    """

    model: str
    cost_per_thousand_requests: float
    output_share: float
    crossover_utilisation: float | None
    crossover_rps: float | None
    crossover_gpu_hour_usd: float
    break_even: BreakEven | None
    prefix: Prefix | None


def against_hosted(
    given: FleetInputs, fleet: FleetFigures, prices: Mapping[str, Prices]
) -> list[Hosted]:
    """Return each hosted API against a fleet; none where tokens are not known."""
    if given.output_tokens is None or given.input_tokens is None:
        return []
    use = Request(given.input_tokens, given.output_tokens, given.cached_tokens or 0.0)
    found = []
    for model, price in prices.items():
        each = price.request_usd(use)
        crossover = crossover_utilisation(fleet, each)
        found.append(
            Hosted(
                model=model,
                cost_per_thousand_requests=1000 * each,
                output_share=output_share(price, use),
                crossover_utilisation=crossover,
                crossover_rps=None if crossover is None else crossover * fleet.carried_rps,
                crossover_gpu_hour_usd=3600 * fleet.load_rps * each / fleet.gpus,
                break_even=cache_break_even(price),
                prefix=_prefix(price, given.cached_tokens, fleet.load_rps),
            )
        )
    return found


def _prefix(price: Prices, tokens: float | None, load_rps: float) -> Prefix | None:
    calls = 86_400 * load_rps
    if not tokens or calls < 1 or price.read >= price.input:
        return None
    without, cached = prefix_usd_per_day(price, tokens, calls, 1)
    return Prefix(
        tokens=tokens,
        calls_per_day=calls,
        usd_per_day_without_cache=without,
        usd_per_day_with_cache=cached,
    )


class Moved(Part, frozen=True, kw_only=True):
    """Effect of one input: (at 20 % less, at 20 % more) of it, all others as they are.

    ``cost_per_thousand``: of accepted results where their share is stated, else of requests.
    """

    input: str
    instances: tuple[int, int]
    cost_per_year: tuple[float, float] | None
    cost_per_thousand: tuple[float, float] | None


def sensitivities(given: FleetInputs) -> list[Moved]:
    """Return what each input moves by 20 % either way, the largest effect first.

    Shares stay at most 1, a safety factor at least 1, the mean load at most the peak.
    """
    load = "mean_rps" if given.utilisation is None else "utilisation"
    names = {
        "peak load": "peak_rps",
        "capacity": "capacity_rps",
        "safety factor": "safety_factor",
        "GPU price": "gpu_hour_usd",
        "mean load" if given.utilisation is None else "utilisation": load,
        "accepted share": "accepted",
    }
    found = []
    for label, name in names.items():
        if getattr(given, name) is not None or name == "mean_rps":
            low, high = (fleet_figures(_scaled(given, name, times)) for times in (0.8, 1.2))
            found.append(
                Moved(
                    input=label,
                    instances=(low.instances, high.instances),
                    cost_per_year=_pair(low.cost_per_year, high.cost_per_year),
                    cost_per_thousand=_pair(_each(low), _each(high)),
                )
            )
    now = fleet_figures(given)

    def reach(moved: Moved) -> tuple[float, float]:
        year = _reach(moved.cost_per_year or moved.instances, now.cost_per_year or now.instances)
        return year, _reach(moved.cost_per_thousand or (), _each(now))

    return sorted(found, key=reach, reverse=True)


def _pair(low: float | None, high: float | None) -> tuple[float, float] | None:
    return None if low is None or high is None else (low, high)


def _reach(ends: Sequence[float], now: float | None) -> float:
    """Return by which share of what it is now a figure moves at most."""
    return max((abs(end / now - 1) for end in ends if now), default=0.0)


def _scaled(given: FleetInputs, name: str, by: float) -> FleetInputs:
    value = by * (given.peak_rps if getattr(given, name) is None else getattr(given, name))
    if name in ("utilisation", "accepted"):
        value = min(value, 1.0)
    scaled = structs.replace(given, **{name: max(value, 1.0) if name == "safety_factor" else value})
    if scaled.mean_rps is None:
        return scaled
    return structs.replace(scaled, mean_rps=min(scaled.mean_rps, scaled.peak_rps))


def _each(fleet: FleetFigures) -> float | None:
    accepted = fleet.fleet_cost_per_thousand_accepted_results
    return fleet.fleet_cost_per_thousand_requests if accepted is None else accepted


def transfer_s(size_bytes: float, link_bits_s: float) -> float:
    """Return the time to send a KV cache over a link: bytes x 8 / bits per second."""
    return size_bytes * 8 / link_bits_s
