"""Samples of the server's own /metrics through the run, on the clock of the records.

The pages of engines run to thousands of lines, most of them histogram buckets: only the wanted
names are searched for, so that a scrape costs the event loop well under a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

import aiohttp
import pyarrow as pa

SCRAPE_EVERY_S = 1.0
TIMEOUT_S = 2.0
PAGE_MAX_BYTES = 8 * 2**20

# one set of names for what engines call differently; of several engines on a page counts are added up
_NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing", "tgi_batch_current_size"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size"),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
    "preemptions_total": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_cache_queries_total": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_cache_hits_total": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}  # fmt: skip

COLUMNS = tuple(_NAMES)
SCHEMA: pa.Schema = pa.schema(
    [pa.field("at_ns", pa.int64()), *(pa.field(name, pa.float64()) for name in COLUMNS)]
)

_PATTERNS = {
    column: [re.compile(rf"^{re.escape(n)}(?:\{{[^\n]*\}})? (\S+)".encode(), re.M) for n in names]
    for column, names in _NAMES.items()
}


def read_metrics(page: bytes) -> dict[str, float]:
    """The known gauges and counters on a Prometheus text page; what it does not have is left out."""
    found: dict[str, float] = {}
    for column, patterns in _PATTERNS.items():
        for pattern in patterns:
            values = [float(v) for v in pattern.findall(page) if _is_number(v)]
            if values:
                found[column] = max(values) if column == "kv_cache_usage" else sum(values)
                break
    return found


def _is_number(text: bytes) -> bool:
    try:
        return float(text) == float(text)  # not NaN
    except ValueError:
        return False


async def _limited(content: aiohttp.StreamReader) -> bytes:
    """A page, cut where it grows beyond all measure."""
    pieces, size = [], 0
    async for piece in content.iter_chunked(65_536):
        pieces.append(piece)
        size += len(piece)
        if size > PAGE_MAX_BYTES:
            break
    return b"".join(pieces)


class Telemetry:
    """Scrapes ``url`` while it runs. A server without metrics costs one request and is left alone."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        self._session = session
        self._headers = headers
        self._url = url
        self._rows: list[dict[str, float | int]] = []
        self._task: asyncio.Task[None] | None = None
        self.available = False

    async def start(self) -> None:
        """Look once whether there is anything to sample; then sample until ``stop``."""
        first = await self.sample()
        self.available = bool(first)
        if self.available:
            self._task = asyncio.create_task(self._loop())

    async def sample(self) -> dict[str, float]:
        """One scrape now; empty where the server does not answer in time or has none of the names."""
        try:
            async with self._session.get(
                self._url,
                headers=self._headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as answer:
                if answer.status != 200:
                    return {}
                page = await _limited(answer.content)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return {}
        at_ns = time.monotonic_ns()
        found = read_metrics(page)
        if found:
            self._rows.append({"at_ns": at_ns, **found})
        return found

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_EVERY_S)
            await self.sample()

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until the server says that nothing runs or waits. False: it did not, or cannot say."""
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
        """What was sampled: at_ns and one float column for each of ``COLUMNS``, null where absent."""
        return pa.Table.from_pylist(self._rows, schema=SCHEMA)
