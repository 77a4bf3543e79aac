"""Show the load's counters while it runs: a page for Prometheus, and OTLP over HTTP (JSON)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import msgspec

from ampacity import __version__
from ampacity.loadgen.generator import Generator
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.plan import LIVE_BOUNDS_S, LIVE_TIMES, Live, LiveTimes
from ampacity.loadgen.rundir.records import KINDS
from ampacity.settings import Settings
from ampacity.values import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

POST_EVERY_S, POST_TIMEOUT_S = 5.0, 5.0
_CUMULATIVE = 2  # OTLP's AGGREGATION_TEMPORALITY_CUMULATIVE


@dataclass(frozen=True)
class Metric:
    """A figure of the load; ``values``: (all stages together, the current one) to label: value."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: Callable[[Live, Live], dict[str, float]]
    label: str = ""


METRICS = (
    Metric(
        "stage", "gauge", "Number of the current stage, from 0.", lambda _, now: {"": now.stage}
    ),
    Metric(
        "offered_requests_per_second",
        "gauge",
        "Load of the current open stage.",
        lambda _, now: {"": now.level} if now.kind == "open" else {},
    ),
    Metric(
        "concurrency",
        "gauge",
        "Users of the current closed stage.",
        lambda _, now: {"": now.level} if now.kind == "closed" else {},
    ),
    Metric(
        "requests_in_flight",
        "gauge",
        "Requests sent and not ended.",
        lambda _, now: {"": now.in_flight},
    ),
    Metric(
        "requests_sent",
        "counter",
        "Requests sent, further attempts included.",
        lambda total, _: {"": total.released},
    ),
    Metric(
        "requests_ended",
        "counter",
        "Requests that have ended, by how: ok, or the kind of error.",
        lambda total, _: {kind: total.kinds[kind] for kind in KINDS},
        "status",
    ),
    Metric(
        "output_tokens",
        "counter",
        "Output tokens of requests that have ended.",
        lambda total, _: {"": total.tokens},
    ),
)
TIMES = {
    "ttft": "Time to first token from the schedule; a failed request is beyond every bound.",
    "e2e": "Time to last token from the schedule; a failed request is beyond every bound.",
    "itl": "Inter-token latency of good answers.",
    "client_lag": "How late requests left: sent minus scheduled.",
}


def totals(stages: Sequence[Live]) -> Live:
    """Return the counters of all stages together, with ``times``."""
    total = Live(times=LiveTimes())
    for stage in stages:
        total.merge(stage)
    return total


class PrometheusPage:
    """A collector of prometheus-client: every metric as ``ampacity_NAME``."""

    def __init__(self, stages: Callable[[], Sequence[Live]]) -> None:
        self._stages = stages

    def collect(self) -> Iterator[Family]:
        """Yield the metric families as of now."""
        from prometheus_client import core

        stages = self._stages()
        total = totals(stages)
        kinds: dict[str, Any] = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
        }
        for metric in METRICS:
            labels = [metric.label] if metric.label else []
            family = kinds[metric.kind](f"ampacity_{metric.name}", metric.help, labels=labels)
            for label, value in metric.values(total, stages[-1]).items():
                family.add_metric([label] if labels else [], value)
            yield family
        for name, counts, sum_s in _times(total):
            ends = [*map(str, LIVE_BOUNDS_S.tolist()), "+Inf"]
            histogram = core.HistogramMetricFamily(f"ampacity_{name}_seconds", TIMES[name])
            histogram.add_metric([], list(zip(ends, accumulate(counts), strict=True)), sum_s)
            yield histogram


def _times(total: Live) -> Iterator[tuple[str, list[int], float]]:
    """Yield (name, count of each bucket, sum in s)."""
    assert total.times is not None
    counts = total.times.counts
    for name in TIMES:
        row = LIVE_TIMES.index(name)
        yield name, counts[row].tolist(), float(total.times.sums_s[row])


def otlp_body(stages: Sequence[Live], began_ns: int, now_ns: int) -> bytes:
    """Return an ExportMetricsServiceRequest in OTLP's JSON; names as ``PrometheusPage`` has them.

    ``began_ns``, ``now_ns``: wall clock.
    """
    span = {"startTimeUnixNano": str(began_ns), "timeUnixNano": str(now_ns)}
    running = {"aggregationTemporality": _CUMULATIVE}
    total, found = totals(stages), list[dict[str, Any]]()
    for metric in METRICS:
        points = [
            {**span, "asDouble": value, "attributes": _attributes({metric.label: label})}
            for label, value in metric.values(total, stages[-1]).items()
        ]
        data: dict[str, Any] = {"gauge": {"dataPoints": points}}
        if metric.kind == "counter":
            data = {"sum": {"dataPoints": points, "isMonotonic": True, **running}}
        named = {"name": f"ampacity_{metric.name}", "description": metric.help, "unit": "1"}
        found += [named | data] if points else []
    for name, counts, sum_s in _times(total):
        buckets = {"bucketCounts": list(map(str, counts)), "explicitBounds": LIVE_BOUNDS_S.tolist()}
        point = {**span, "count": str(sum(counts)), "sum": sum_s, **buckets}
        named = {"name": f"ampacity_{name}", "description": TIMES[name], "unit": "s"}
        found.append(named | {"histogram": {"dataPoints": [point], **running}})
    scope = {"scope": {"name": "ampacity", "version": __version__}, "metrics": found}
    resource = {"attributes": _attributes({"service.name": "ampacity"})}
    return msgspec.json.encode(
        {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}]}
    )


def _attributes(values: dict[str, str]) -> list[dict[str, Any]]:
    return [{"key": k, "value": {"stringValue": v}} for k, v in values.items() if k]


@contextlib.asynccontextmanager
async def live_export(
    settings: Settings, generator: Generator, pages: Pages, note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Export while the block runs, as the settings ask. Raises ConfigError for a taken port."""
    async with contextlib.AsyncExitStack() as closing:
        if settings.prometheus is not None:
            shutdown = _serve(*settings.prometheus, generator)
            closing.push_async_callback(asyncio.to_thread, shutdown)
        if settings.otlp is not None:
            poster = _Poster(settings.otlp, generator, pages, note)
            posting = asyncio.create_task(poster.run())
            closing.push_async_callback(poster.post)  # the final counts
            closing.callback(posting.cancel)
        yield


def _serve(host: str, port: int, generator: Generator) -> Callable[[], None]:
    """Serve the page in a thread; return what ends it."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusPage(lambda: generator.stages))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--prometheus {host}:{port}: {error.strerror or error}") from None

    def shutdown() -> None:
        server.shutdown()
        server.server_close()

    return shutdown


class _Poster:
    """Posts the counters every POST_EVERY_S; a collector that does not take them is told once."""

    def __init__(
        self, url: str, generator: Generator, pages: Pages, note: Callable[[str], None]
    ) -> None:
        self._url = url
        self._generator = generator
        self._pages = pages
        self._note = note
        self._began_ns = time.time_ns()
        self._told = False
        self._headers = {"Content-Type": "application/json", **_headers_of_environment()}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POST_EVERY_S)
            await self.post()

    async def post(self) -> None:
        body = otlp_body(self._generator.stages, self._began_ns, time.time_ns())
        try:
            page = await self._pages.post(self._url, self._headers, body, POST_TIMEOUT_S)
            why = "" if 200 <= page.status < 300 else f"HTTP {page.status}"
        except (OSError, ValueError) as error:  # an exporter never ends the load
            why = str(error) or "no answer in time"
        if why and not self._told:
            self._told = True
            self._note(f"--otlp {self._url.partition('?')[0]}: not exported: {why}")


def _headers_of_environment() -> dict[str, str]:
    """Return the headers of OTEL_EXPORTER_OTLP_HEADERS: ``name=value,name=value``, URL-encoded."""
    text = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}
