"""Read production figures: Prometheus pages of engines (one or two scrapes), or a request log."""

import asyncio
import functools
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ampacity.analysis.validate import Histogram, Production, ValidateError, of_samples
from ampacity.files import open_file, why
from ampacity.loadgen.net.pages import PAGE_MAX_BYTES, PageError, Pages
from ampacity.loadgen.telemetry import Lines, lines_of, number, read_metrics, samples, series

# The first name on a page counts: vLLM, SGLang, TGI, TensorRT-LLM. A per-request mean is no ITL.
_NAMES: dict[str, tuple[str, ...]] = {
    "ttft": (
        *(f"{engine}:time_to_first_token_seconds" for engine in ("vllm", "sglang")),
        "trtllm_time_to_first_token_seconds",
    ),
    "itl": tuple(
        f"{engine}:{name}_seconds"
        for engine in ("vllm", "sglang")
        for name in ("inter_token_latency", "time_per_output_token")
    ),
    "e2e": (
        *(f"{engine}:e2e_request_latency_seconds" for engine in ("vllm", "sglang")),
        *("tgi_request_duration", "trtllm_e2e_request_latency_seconds"),
    ),
    "input_tokens": (
        *("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
        "tgi_request_input_length",
    ),
    "output_tokens": (
        *("vllm:request_generation_tokens", "sglang:generation_tokens_histogram"),
        "tgi_request_generated_tokens",
    ),
}
_LENGTHS = ("input_tokens", "output_tokens")
_COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total")
_TIMEOUT_S = 10.0
Labels = tuple[tuple[str, str], ...]
PageFigures = dict[str, dict[Labels, Histogram]]  # of each figure, the series of models and engines


def read_page(text: str) -> PageFigures:
    """Return the known histograms of a page, and counters as one bucket. Raises ValidateError."""
    lines = lines_of(text)
    found = {}
    for figure, names in _NAMES.items():
        name = next((n for n in names if f"{n}_bucket" in lines), None)
        if name is not None:
            found[figure] = _histograms(lines, name)
    for figure in _COUNTERS:
        if counted := series(lines, figure):
            found[figure] = {
                k: Histogram(np.array([math.inf]), np.array([n])) for k, n in counted.items()
            }
    return found


def _histograms(lines: Lines, name: str) -> dict[Labels, Histogram]:
    cumulative: dict[Labels, dict[float, float]] = {}
    for labels, count in samples(lines, f"{name}_bucket"):
        bound = number(labels.pop("le", ""))
        if math.isnan(bound) or not 0 <= count < math.inf:
            raise ValidateError(
                f"{name}_bucket: a bucket needs a bound and a count, not {bound} and {count}: "
                "the page is damaged"
            )
        cumulative.setdefault(tuple(sorted(labels.items())), {})[bound] = count
    sums = {tuple(sorted(labels.items())): total for labels, total in samples(lines, f"{name}_sum")}
    found = {}
    for key, held in cumulative.items():
        bounds = np.array(sorted(held))
        counts = np.diff([held[b] for b in bounds], prepend=0.0)
        if bounds[-1] != math.inf or (counts < 0).any():
            raise ValidateError(f"{name}: its buckets do not add up: the page is damaged")
        total = sums.get(key, math.nan)
        found[key] = Histogram(bounds, counts, total if math.isfinite(total) else None)
    return found


def between(before: PageFigures, after: PageFigures, place: str) -> PageFigures:
    """Subtract two scrapes of a page, by series. Raises ValidateError where a counter went back."""
    found: PageFigures = {figure: {} for figure in {**before, **after}}
    for figure, grown in found.items():
        early, late = before.get(figure, {}), after.get(figure, {})
        for labels in {**early, **late}:
            old, new = early.get(labels), late.get(labels)
            if old is None and new is not None:  # a series is there from its first sample on
                grown[labels] = new
            elif (
                old
                and new
                and np.array_equal(old.bounds, new.bounds)
                and (new.counts >= old.counts).all()
            ):
                total = None if new.total is None or old.total is None else new.total - old.total
                grown[labels] = Histogram(new.bounds, new.counts - old.counts, total)
            else:
                raise ValidateError(
                    f"{place}: {figure}: a counter went back between the scrapes, or its buckets "
                    "changed: the server was restarted; scrape again"
                )
    return found


def add_up(pages: Sequence[PageFigures]) -> dict[str, Histogram]:
    """Sum all series of all pages, at the bounds that they share."""
    found = {}
    for figure in dict.fromkeys(f for page in pages for f in page):
        parts = [h for page in pages for h in page.get(figure, {}).values()]
        bounds = functools.reduce(np.intersect1d, [h.bounds for h in parts])
        cumulative = sum(np.cumsum(h.counts)[np.isin(h.bounds, bounds)] for h in parts)
        totals = [h.total for h in parts if h.total is not None]
        found[figure] = Histogram(
            bounds,
            np.diff(cumulative, prepend=0.0),
            sum(totals) if len(totals) == len(parts) else None,
        )
    return found


def from_pages(
    places: Sequence[str], late: Sequence[str], early: Sequence[str] | None, over_s: float | None
) -> Production:
    """Return production from pages of replicas; with ``early`` pages, the ``over_s`` s between."""
    source = ", ".join(places)
    before = early or [""] * len(late)
    for place, page in zip(places, early or (), strict=bool(early)):
        if not read_page(page) and not read_metrics([page.encode()]):
            raise ValidateError(
                f"the page before {place} has none of the metrics of vLLM, SGLang or TGI"
            )
    figures = add_up(
        [
            between(read_page(b), read_page(a), p)
            for b, a, p in zip(before, late, places, strict=True)
        ]
    )
    queries, hits = (figures.pop(k).n if k in figures else 0 for k in _COUNTERS)
    if figures and not any(h.n for h in figures.values()):
        when = f"in the {over_s:g} s between the scrapes" if early else "since the server started"
        raise ValidateError(
            f"{source}: nothing was served {when}: scrape under load, or longer apart (--over)"
        )
    served = max((figures[k].n for k in ("ttft", "e2e", *_LENGTHS) if k in figures), default=0)
    gauges = read_metrics([page.encode() for page in late])
    shares = {
        "gpu_utilization": gauges.get("gpu_utilization"),
        "kv_cache_usage_max": gauges.get("kv_cache_usage"),
    }
    shares["prefix_hit_rate"] = (
        hits / queries if 0 <= hits <= queries and queries else gauges.get("prefix_hit_rate")
    )
    if not figures and not gauges:
        raise ValidateError(f"{source} has none of the metrics of vLLM, SGLang or TGI")
    return Production(
        source,
        {k: h for k, h in figures.items() if k not in _LENGTHS},
        {k: h for k, h in figures.items() if k in _LENGTHS},
        {k: v for k, v in shares.items() if v is not None},
        served / over_s if served and over_s else None,
    )


def from_log(path: Path) -> Production:
    """Return production from a log or trace. Raises WorkloadError."""
    from ampacity.workloads.traces.read import read_trace

    trace = read_trace(path)
    gaps, n = np.diff(trace.arrival_s), len(trace)
    lengths = {
        "input_tokens": of_samples(trace.input_tokens.astype(float)),
        "output_tokens": of_samples(trace.output_tokens.astype(float)),
    }
    span_s = float(trace.arrival_s[-1])
    rps = (n - 1) / span_s if span_s > 0 else None
    return Production(
        str(path),
        lengths=lengths,
        rps=rps,
        gaps_s=None if trace.clock_step_s else gaps,
        notes=trace.notes,
    )


def is_page(text: str) -> bool:
    return bool(re.search(r"^[ \t]*#[ \t]*(TYPE|HELP)[ \t]|_bucket[ \t]*\{", text, re.M))


async def _page(url: str) -> bytes:
    async with Pages() as pages:
        page = await pages.get(url, {}, _TIMEOUT_S)
    if page.status != 200:
        raise PageError(f"HTTP {page.status}")
    return page.body


def fetch(where: str) -> str:
    """Return a file's text, or the page at an http(s) URL. Raises ValidateError."""
    shown = re.sub(r"//[^/@]*@", "//", where)
    if shown != where:
        raise ValidateError(
            f"{shown}: credentials do not belong on a command line: "
            "save the page to a file and give that"
        )
    try:
        if re.match(r"https?://", where):
            body = asyncio.run(_page(where))
        else:
            with open_file(where) as file:
                body = file.read(PAGE_MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ValidateError(f"{shown} cannot be read: {why(error)}") from error
    text = body.decode("utf-8", "replace")
    if len(body) >= PAGE_MAX_BYTES and is_page(text):
        raise ValidateError(
            f"{shown}: the page has {PAGE_MAX_BYTES:,} bytes or more: "
            "give one of the engine's metrics alone"
        )
    return text


def production(places: Sequence[str], before: Sequence[str], over_s: float | None) -> Production:
    """Return production from a file or URL per replica. Raises ValidateError, WorkloadError."""
    for flag, given in (("--production", places), ("--before", before)):
        if len({p if "//" in p else Path(p).resolve() for p in given}) < len(given):
            raise ValidateError(f"{flag}: a page stands there twice: give each replica once")
    if before and len(before) != len(places):
        raise ValidateError(
            f"--before has {len(before)} pages and --production {len(places)}: "
            "give the same ones, in the same order"
        )
    early = [fetch(p) for p in before]
    if not early and over_s and all(re.match(r"https?://", p) for p in places):
        early = [fetch(p) for p in places]
        time.sleep(over_s)
    texts = [fetch(p) for p in places]
    source = ", ".join(places)
    if all(is_page(t) for t in texts):
        if before and not over_s:
            raise ValidateError("--before needs --over: how long before, as --over 5m")
        return from_pages(places, texts, early or None, over_s if early else None)
    if len(places) > 1 or re.match(r"https?://", places[0]):
        raise ValidateError(f"{source}: no Prometheus text page")
    return from_log(Path(places[0]))
