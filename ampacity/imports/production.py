"""What production says of itself: Prometheus text pages of engines, one or two scrapes, or a log of requests."""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path

import numpy as np

from analysis.validate import Histogram, Production, ValidateError, of_samples
from loadgen.pages import PAGE_MAX_BYTES
from loadgen.telemetry import read_metrics

# The first that a page has: vLLM, SGLang, TGI, TensorRT-LLM. A per-request mean is no ITL, and is not taken for one.
_NAMES: dict[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds", "trtllm_time_to_first_token_seconds"),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds", "tgi_request_duration", "trtllm_e2e_request_latency_seconds"),
    "input_tokens": ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram", "tgi_request_input_length"),
    "output_tokens": ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram", "tgi_request_generated_tokens"),
}  # fmt: skip
_LENGTHS = ("input_tokens", "output_tokens")
_LABEL = re.compile(r'\ble="([^"]*)"')
_TIMEOUT_S = 10.0


def read_page(text: str) -> dict[str, Histogram]:
    """The known histograms of a page, those of several models or replicas added up. Raises ValidateError."""
    found = {}
    for figure, names in _NAMES.items():
        for name in names:
            histogram = _histogram(text, name)
            if histogram is not None:
                found[figure] = histogram
                break
    return found


def _histogram(text: str, name: str) -> Histogram | None:
    cumulative: dict[float, float] = {}
    for labels, value in re.findall(rf"^{re.escape(name)}_bucket\{{(.*?)\}} (\S+)", text, re.M):
        bound = _LABEL.search(labels)
        number, count = _number(bound[1] if bound else "nan"), _number(value)
        if math.isnan(number) or not 0 <= count < math.inf:
            raise ValidateError(
                f"{name}_bucket{{{labels}}} {value}: a bucket needs a bound and a count: the page is damaged"
            )
        cumulative[number] = cumulative.get(number, 0.0) + count
    if not cumulative:
        return None
    bounds = np.array(sorted(cumulative))
    counts = np.diff([cumulative[b] for b in bounds], prepend=0.0)
    if bounds[-1] != math.inf or (counts < 0).any():
        raise ValidateError(
            f"{name}: its buckets do not add up (series with other buckets, or a damaged page)"
        )
    sums = [_number(v) for v in re.findall(rf"^{re.escape(name)}_sum(?:\{{.*\}})? (\S+)", text, re.M)]
    return Histogram(bounds, counts, sum(sums) if sums and math.isfinite(sum(sums)) else None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def between(before: Mapping[str, Histogram], after: Mapping[str, Histogram]) -> dict[str, Histogram]:
    """What came between two scrapes. Raises ValidateError where a counter went back."""
    found = {}
    for figure, late in after.items():
        early = before.get(figure)
        if early is None:
            continue
        if not np.array_equal(early.bounds, late.bounds) or (late.counts < early.counts).any():
            raise ValidateError(
                f"{figure}: a counter went back between the scrapes, or its buckets changed: the server was restarted; scrape again"
            )
        total = None if late.total is None or early.total is None else late.total - early.total
        found[figure] = Histogram(late.bounds, late.counts - early.counts, total)
    return found


def from_pages(
    source: str, late: Sequence[str], early: Sequence[str] | None, over_s: float | None
) -> Production:
    """Production from pages of replicas; with the pages of ``over_s`` seconds before, only what came in between."""
    text = "\n".join(late)
    figures = read_page(text)
    if early:
        figures = between(read_page("\n".join(early)), figures)
    if figures and not any(h.n for h in figures.values()):
        when = f"in the {over_s:g} s between the scrapes" if early else "since the server started"
        raise ValidateError(
            f"{source}: nothing was served {when}: scrape under load, or longer apart (--over)"
        )
    served = max((figures[k].n for k in ("ttft", "e2e", *_LENGTHS) if k in figures), default=0)
    gauges = read_metrics([page.encode() for page in late])
    old = read_metrics([page.encode() for page in early or ()])
    shares = {
        "gpu_utilization": gauges.get("gpu_utilization"),
        "kv_cache_usage_max": gauges.get("kv_cache_usage"),
    }
    queries, hits = (
        gauges.get(f"prefix_cache_{k}_total", 0.0) - old.get(f"prefix_cache_{k}_total", 0.0)
        for k in ("queries", "hits")
    )
    shares["prefix_hit_rate"] = (
        hits / queries if 0 <= hits <= queries and queries else gauges.get("prefix_hit_rate")
    )
    if not figures and not gauges:
        raise ValidateError(f"{source} has none of the metrics of vLLM, SGLang or TGI")
    return Production(
        source, {k: h for k, h in figures.items() if k not in _LENGTHS}, {k: h for k, h in figures.items() if k in _LENGTHS},
        {k: v for k, v in shares.items() if v is not None}, served / over_s if served and over_s else None,
    )  # fmt: skip


def from_log(path: Path) -> Production:
    """Production from a log or trace (workloads.traces). Raises WorkloadError."""
    from workloads.traces import read_trace

    trace = read_trace(path)
    gaps, n = np.diff(trace.arrival_s), len(trace)
    lengths = {
        "input_tokens": of_samples(trace.input_tokens.astype(float)),
        "output_tokens": of_samples(trace.output_tokens.astype(float)),
    }
    span_s = float(trace.arrival_s[-1])
    rps = (n - 1) / span_s if span_s > 0 else None
    return Production(str(path), lengths=lengths, rps=rps, gaps_s=None if trace.clock_step_s else gaps)


def is_page(text: str) -> bool:
    return bool(re.search(r"^# (TYPE|HELP) |_bucket\{", text, re.M))


def fetch(where: str) -> str:
    """A file's text, or the page at an http(s) URL. Raises ValidateError."""
    shown = re.sub(r"//[^/@]*@", "//", where)
    if shown != where:
        raise ValidateError(
            f"{shown}: credentials do not belong on a command line: save the page to a file and give that"
        )
    try:
        if re.match(r"https?://", where):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(where, timeout=_TIMEOUT_S) as answer:
                return str(answer.read(PAGE_MAX_BYTES).decode("utf-8", "replace"))
        with Path(where).open("rb") as file:
            return file.read(PAGE_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        raise ValidateError(f"{shown} cannot be read: {error}") from error


def production(places: Sequence[str], before: Sequence[str], over_s: float | None) -> Production:
    """Production from files or URLs, one for each replica. Raises ValidateError, WorkloadError."""
    early = [fetch(p) for p in before]
    if not early and over_s and all(re.match(r"https?://", p) for p in places):
        early = [fetch(p) for p in places]
        time.sleep(over_s)
    texts = [fetch(p) for p in places]
    source = ", ".join(places)
    if all(is_page(t) for t in texts):
        if before and not over_s:
            raise ValidateError("--before needs --over: how long before, as --over 5m")
        return from_pages(source, texts, early or None, over_s if early else None)
    if len(places) > 1 or re.match(r"https?://", places[0]):
        raise ValidateError(f"{source}: no Prometheus text page")
    return from_log(Path(places[0]))
