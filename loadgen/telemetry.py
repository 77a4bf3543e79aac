"""Sample the server's /metrics during the run, on the clock of the records.

The pages of engines have thousands of lines, mostly histogram buckets. Only the wanted names are
parsed, so that a scrape costs the event loop well under a millisecond.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Mapping, Sequence

import pyarrow as pa

from ampacity.loadgen.net.pages import PAGE_MAX_BYTES, PageError, Pages
from ampacity.loadgen.send.endpoint import EndpointError

SCRAPE_EVERY_S = 1.0
TIMEOUT_S = 2.0

# Each engine's name of a metric: the first that a page has is used. Several samples of one name
# (replicas, engines, GPUs) are added up; of shares the mean is taken.
_NAMES: dict[str, tuple[str, ...]] = {
    "running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "tgi_batch_current_size",
        'nv_trt_llm_request_metrics{request_type="scheduled"}',
    ),
    "waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
        "tgi_queue_size",
        'nv_trt_llm_request_metrics{request_type="waiting"}',
        "nv_inference_pending_request_count",
    ),
    "kv_cache_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',
        "trtllm_kv_cache_utilization",
    ),
    "preemptions_total": (
        "vllm:num_preemptions_total",
        "vllm:num_preemptions",
        "sglang:num_retracted_requests_total",
        "sglang:num_retracted_reqs_total",
    ),
    "cached_tokens_total": (
        "vllm:prompt_tokens_cached_total",
        "sglang:cached_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
    ),
    "kv_block_lifetime_s_total": ("vllm:kv_block_lifetime_seconds_sum",),
    "kv_blocks_evicted_total": ("vllm:kv_block_lifetime_seconds_count",),
    "prefix_cache_queries_total": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
        "sglang:prompt_tokens_total",
    ),
    "prefix_cache_hits_total": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ),
    "prefix_hit_rate": ("sglang:cache_hit_rate", "trtllm_kv_cache_hit_rate"),
    "spec_draft_tokens_total": (
        "vllm:spec_decode_num_draft_tokens_total",
        "llamacpp:spec_decode_num_draft_tokens_total",
    ),
    "spec_accepted_tokens_total": (
        "vllm:spec_decode_num_accepted_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_total",
    ),
    "spec_acceptance_rate": ("sglang:spec_accept_rate", "vllm:spec_decode_draft_acceptance_rate"),
    "adapter_slots": ("sglang:lora_pool_slots_total",),
    "adapter_slots_used": ("sglang:lora_pool_slots_used",),
    "tensor_active": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",),
    "memory_active": ("DCGM_FI_PROF_DRAM_ACTIVE",),
    "gpu_utilization": ("DCGM_FI_DEV_GPU_UTIL", "nv_gpu_utilization"),
    "gpu_memory_used_bytes": ("DCGM_FI_DEV_FB_USED", "nv_gpu_memory_used_bytes"),
}
_FACTORS = {"DCGM_FI_DEV_GPU_UTIL": 0.01, "DCGM_FI_DEV_FB_USED": 2.0**20}  # percent and MiB
_SHARES = {  # the mean is taken ...
    *("prefix_hit_rate", "spec_acceptance_rate"),
    *("gpu_utilization", "tensor_active", "memory_active"),
}
_FULLEST = {"kv_cache_usage"}  # ... and of these the largest: that replica preempts

COLUMNS = (*_NAMES, "engines")
SCHEMA: pa.Schema = pa.schema(
    [pa.field("at_ns", pa.int64()), *(pa.field(name, pa.float64()) for name in COLUMNS)]
)


Lines = dict[str, list[str]]  # sample name -> rest of its lines
_LINE = re.compile(r"^[ \t]*([A-Za-z_:][\w:]*)[ \t]*(.*)", re.M)
_SAMPLE = re.compile(r'(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]*([^\s{}]+)')
_LABEL = re.compile(r'([A-Za-z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')


def lines_of(page: str) -> Lines:
    """Split a page in Prometheus' text format into its sample lines, for ``samples``."""
    found: Lines = {}
    for name, rest in _LINE.findall(page):
        found.setdefault(name, []).append(rest)
    return found


def samples(lines: Lines, name: str) -> list[tuple[dict[str, str], float]]:
    """Return (labels, value) of the samples of a name; NaN for a damaged line."""
    matches = [_SAMPLE.match(line) for line in lines.get(name, ())]
    return [(_labels(m[1] or ""), number(m[2])) if m else ({}, math.nan) for m in matches]


def _labels(text: str) -> dict[str, str]:
    return {
        k: re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v) if "\\" in v else v
        for k, v in _LABEL.findall(text)
    }


def number(text: str) -> float:
    """Parse a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def read_metrics(pages: Sequence[bytes]) -> dict[str, float]:
    """Return the known metrics on Prometheus text pages; counts are summed over the pages.

    ``engines``: how many report their running requests.
    """
    found: dict[str, list[float]] = {}
    for lines in (lines_of(page.decode("utf-8", "replace")) for page in pages):
        for column in _NAMES:
            found.setdefault(column, []).extend(series(lines, column).values())
        for column, value in _vllm_adapters(lines).items():
            found[column].append(value)
    engines = {"engines": float(len(found["running"]))} if found.get("running") else {}
    return {column: _one(column, values) for column, values in found.items() if values} | engines


def _vllm_adapters(lines: Lines) -> dict[str, float]:
    """Return the adapter slots, which vLLM gives as labels; the value is the time of a sample."""
    held = samples(lines, "vllm:lora_requests_info")
    labels = max(held, key=lambda sample: sample[1])[0] if held else {}
    names = [name for name in labels.get("running_lora_adapters", "").split(",") if name.strip()]
    slots = number(labels.get("max_lora", ""))
    return {"adapter_slots": slots, "adapter_slots_used": len(names)} if slots > 0 else {}


def series(lines: Lines, column: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Return the samples of a column by their labels, under the first name that the page has."""
    for name in _NAMES[column]:
        bare, _, label = name.partition("{")
        wanted = _labels(label).items()
        found = {
            tuple(sorted(labels.items())): value * _FACTORS.get(bare, 1.0)
            for labels, value in samples(lines, bare)
            if wanted <= labels.items() and math.isfinite(value)
        }
        if found:
            return found
    return {}


def _one(column: str, values: list[float]) -> float:
    if column in _FULLEST:
        return max(values)
    return sum(values) / len(values) if column in _SHARES else sum(values)


class Telemetry:
    """Scrapes pages in the background. A server without metrics gets one request only."""

    def __init__(self, fetcher: Pages, pages: Mapping[str, dict[str, str]]) -> None:
        """``pages``: URL -> request headers."""
        self._fetcher = fetcher
        self._pages = dict(pages)
        self._rows: list[dict[str, float | int]] = []
        self._task: asyncio.Task[None] | None = None
        self.available = False
        self.silent: list[str] = []  # pages without known metrics at the first scrape

    async def start(self) -> None:
        """Scrape once to find the pages with known metrics; then sample those until ``stop``."""
        answers = await asyncio.gather(*(self._page(*page) for page in self._pages.items()))
        self.silent = [
            u for u, page in zip(self._pages, answers, strict=True) if not read_metrics([page])
        ]
        for url in self.silent:
            del self._pages[url]
        self._keep(answers)
        self.available = bool(self._pages)
        if self.available:
            self._task = asyncio.create_task(self._loop())

    async def sample(self) -> dict[str, float]:
        """Scrape now; return {} if no server answers in time with a known metric."""
        return self._keep(
            await asyncio.gather(*(self._page(*page) for page in self._pages.items()))
        )

    def _keep(self, pages: Sequence[bytes]) -> dict[str, float]:
        at_ns = time.monotonic_ns()
        found = read_metrics(pages)
        if found:
            self._rows.append({"at_ns": at_ns, **found})
        return found

    async def _page(self, url: str, headers: dict[str, str]) -> bytes:
        try:
            page = await self._fetcher.get(url, headers, TIMEOUT_S)
            # of a page that was cut the figures would be those of a part
            whole = page.status == 200 and len(page.body) < PAGE_MAX_BYTES
            return page.body if whole else b""
        except (PageError, TimeoutError, EndpointError):
            return b""

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_EVERY_S)
            await self.sample()

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until the server reports no running or waiting requests; False if it does not."""
        give_up_s = time.monotonic() + timeout_s
        while self.available and time.monotonic() < give_up_s:
            found = await self.sample()
            if "running" in found and found["running"] + found.get("waiting", 0.0) == 0:
                return True
            await asyncio.sleep(0.1)
        return False

    async def stop(self) -> None:
        """End the sampling."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def table(self) -> pa.Table:
        """Return the samples: at_ns and a float column for each of ``COLUMNS``, null if absent."""
        return pa.Table.from_pylist(self._rows, schema=SCHEMA)

    def take(self) -> pa.Table:
        """Return the samples since the last call, as ``table`` does, and forget them."""
        taken = self.table()
        self._rows.clear()
        return taken
