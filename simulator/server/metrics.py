"""Export vLLM's metrics and the simulator's own lateness in Prometheus format."""

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ampacity.simulator.engine.engine import Engine, StepResult
from ampacity.simulator.server.protocol import Call
from ampacity.simulator.server.realtime import LiveRequest, LiveRun

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
_TTFT: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL: tuple[float, ...] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_E2E: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH: tuple[float, ...] = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)
_ITERATION: tuple[float, ...] = (1.0, *(float(1 << power) for power in range(3, 15)))
_N: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTION: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# vLLM's histograms: name, help text, bucket bounds
_HISTOGRAMS = (
    ("request_prompt_tokens", "Number of prefill tokens processed.", _LENGTH),
    ("request_generation_tokens", "Number of generation tokens processed.", _LENGTH),
    ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", _ITERATION),
    ("request_params_n", "Histogram of the n request parameter.", _N),
    ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", _LENGTH),
    ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT),
    ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _ITL),
    (
        "request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        _ITL,
    ),
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _E2E),
    ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _E2E),
    (
        "request_inference_time_seconds",
        "Histogram of time spent in RUNNING phase for request.",
        _E2E,
    ),
    ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _E2E),
    ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _E2E),
    (
        "request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        _PREEMPTION,
    ),
)
# kind, name, help text, and the attribute of Engine or Metrics that has the value
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
_SCALARS: tuple[tuple[Kind, str, str, str], ...] = (
    (_GAUGE, "num_requests_running", "Number of requests in model execution batches.", "running"),
    (_GAUGE, "num_requests_waiting", "Number of requests waiting to be processed.", "waiting"),
    (_GAUGE, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "kv_usage"),
    (
        _COUNTER,
        "num_preemptions",
        "Cumulative number of preemption from the engine.",
        "preemptions",
    ),
    (_COUNTER, "prefix_cache_queries", "Prefix cache queries, in tokens.", "prefix_queries"),
    (_COUNTER, "prefix_cache_hits", "Prefix cache hits, in tokens.", "prefix_hits"),
    (_COUNTER, "prompt_tokens", "Number of prefill tokens processed.", "prompt_tokens"),
    (_COUNTER, "generation_tokens", "Number of generation tokens processed.", "generation_tokens"),
)
# of engines that speculate, and the attribute of Engine.batch
_DRAFTS = (
    ("spec_decode_num_draft_tokens", "Number of draft tokens.", "drafted"),
    ("spec_decode_num_accepted_tokens", "Number of accepted tokens.", "accepted"),
)
_QUANTILES = 0.5, 0.9, 0.99, 1.0  # of the lateness


class Histogram:
    """Counts by upper bound; the last bucket is unbounded."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def values(self) -> list[float]:
        """Return the cumulative counts of the buckets, the count and the sum."""
        counts = list(itertools.accumulate(self.counts))
        return [*counts, counts[-1], self.total]


class Series(NamedTuple):
    """A metric family without values, and a function that reads them in order of its samples."""

    family: Metric
    read: Callable[[], Sequence[float]]


class Metrics:
    """Collect the metrics of one engine, updated once per step."""

    def __init__(self, model: str, number: int = 0) -> None:
        self._labels = {"engine": str(number), "model_name": model}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.aborted = 0
        self.finished = {"stop": 0, "length": 0}
        self.histograms = {name: Histogram(bounds) for name, _, bounds in _HISTOGRAMS}
        self._decoded_s = 0.0  # end of the last step in which requests decoded
        # (end, requests) of the prefills that ended since the last decode step
        self._joined: list[tuple[float, int]] = []

    def on_call(self, call: Call) -> None:
        """Record an accepted request."""
        self.histograms["request_params_n"].add(len(call.choices) // len(call.prompts))
        self.histograms["request_params_max_tokens"].add(call.limit_tokens)

    def on_step(self, result: StepResult, tokens: int, now_s: float) -> None:
        """Record a step whose tokens were sent at now_s, in real time."""
        self.generation_tokens += tokens
        self.histograms["iteration_tokens_total"].add(tokens + result.prefill_tokens)
        if result.decoding:
            self._observe_gaps(result.decoding, now_s)
        joined = sum(request.output_tokens > 1 for request in result.prompts)
        if joined:
            self._joined.append((now_s, joined))
        for request in cast(list[LiveRequest], result.prompts):
            if request.first_step == result.number:
                request.prefill_s = max(request.arrival_s, result.start_s)
                request.real_first_token_s = now_s
                self.prompt_tokens += request.prompt_tokens
                self.histograms["time_to_first_token_seconds"].add(now_s - request.arrival_s)
        for request in cast(list[LiveRequest], result.finished):
            self._finish(request, now_s)

    def _observe_gaps(self, decoding: int, now_s: float) -> None:
        """Record the gap since the last decode step, or since the end of a request's prefill."""
        gaps = self.histograms["inter_token_latency_seconds"]
        for at_s, joined in self._joined:
            gaps.add(now_s - at_s, joined)
            decoding -= joined
        if decoding > 0:  # fewer than joined when some of these were aborted
            gaps.add(now_s - self._decoded_s, decoding)
        self._joined.clear()
        self._decoded_s = now_s

    def _finish(self, request: LiveRequest, now_s: float) -> None:
        self.finished[request.finish_reason] += 1
        decode_s = now_s - request.real_first_token_s
        # A prompt of several chunks counts as waiting until the step that completes it.
        admitted_s = request.prefill_s
        values = {
            "request_prompt_tokens": request.prompt_tokens,
            "request_generation_tokens": request.output_tokens,
            "e2e_request_latency_seconds": now_s - request.arrival_s,
            "request_queue_time_seconds": admitted_s - request.arrival_s,
            "request_prefill_time_seconds": request.real_first_token_s - admitted_s,
            "request_decode_time_seconds": decode_s,
            "request_inference_time_seconds": now_s - admitted_s,
            "request_num_preemptions": request.preemptions,
        }
        if request.output_tokens > 1:
            values["request_time_per_output_token_seconds"] = decode_s / (request.output_tokens - 1)
        for name, value in values.items():
            self.histograms[name].add(value)

    def series(self, engine: Engine) -> Iterator[Series]:
        """Yield vLLM's metrics of this engine."""
        for kind, name, text, attribute in _SCALARS:
            owner = self if hasattr(self, attribute) else engine
            family = _family(kind, name, text, self._labels)
            yield Series(family, partial(_attribute, owner, attribute))
        for name, text, attribute in _DRAFTS if engine.config.speculation else ():
            family = _family(_COUNTER, name, text, self._labels)
            yield Series(family, partial(_attribute, engine.batch, attribute))
        reasons = [
            {**self._labels, "finished_reason": r} for r in (*self.finished, "abort", "error")
        ]
        text = "Count of successfully processed requests."
        yield Series(
            _family(_COUNTER, "request_success", text, *reasons),
            lambda: [*self.finished.values(), self.aborted, 0],
        )
        for name, text, bounds in _HISTOGRAMS:
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            buckets = [(str(bound), 0.0) for bound in (*bounds, "+Inf")]
            family.add_metric(list(self._labels.values()), buckets, sum_value=0.0)
            yield Series(family, self.histograms[name].values)
        config = engine.config
        facts = {"block_size": str(config.block_tokens), "num_gpu_blocks": str(config.kv_blocks)}
        text = "Information of the LLMEngine CacheConfig"
        family = _family(_GAUGE, "cache_config_info", text, self._labels | facts)
        yield Series(family, lambda: [1.0])

    def lateness(self, live: LiveRun) -> Iterator[Series]:
        """Yield the simulator's own metrics, over all engines together."""
        name = "ampacity_simulator_lateness_seconds"
        text = (
            "Real minus planned end of a step, tokens written; quantiles over the last 8192 steps."
        )
        summary = SummaryMetricFamily(name, text)
        for q in _QUANTILES:
            summary.add_sample(name, {**self._labels, "quantile": str(q)}, 0)
        summary.add_sample(f"{name}_count", self._labels, 0)
        summary.add_sample(f"{name}_sum", self._labels, 0)
        yield Series(
            summary, lambda: [*_quantiles(live.lateness_s), live.steps, live.lateness_sum_s]
        )
        text = "Steps so late that the timetable was moved."
        name = "ampacity_simulator_timetable_resets"
        resets = CounterMetricFamily(name, text, labels=list(self._labels))
        resets.add_metric(list(self._labels.values()), 0)
        yield Series(resets, lambda: [live.timetable_resets])


def _attribute(owner: object, name: str) -> list[float]:
    return [getattr(owner, name)]


def _family(kind: Kind, name: str, text: str, *labels: dict[str, str]) -> Metric:
    family = kind(f"vllm:{name}", text, labels=list(labels[0]))
    for each in labels:
        family.add_metric(list(each.values()), 0)
    return family


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return [ordered[min(last, int(q * len(ordered)))] if ordered else math.nan for q in _QUANTILES]


class Page(Collector):
    """The text exposition format, version 0.0.4, of all engines.

    prometheus-client writes names and labels once; a scrape, which holds up the event loop,
    only fills in the values.
    """

    def __init__(self, metrics: Sequence[Metrics], live: LiveRun) -> None:
        self._families: list[Metric] = []
        self._reads: list[Callable[[], Sequence[float]]] = []
        engines = [own.series(engine) for own, engine in zip(metrics, live.engines, strict=True)]
        for series in (*zip(*engines, strict=True), *((own,) for own in metrics[0].lateness(live))):
            family = series[0].family
            family.samples = [sample for each in series for sample in each.family.samples]
            self._families.append(family)
            self._reads += [each.read for each in series]
        text = generate_latest(self).decode().replace("%", "%%")
        self._template = re.sub(r"(?m)^([^#].*) 0\.0$", r"\1 %s", text)

    def collect(self) -> list[Metric]:
        """Return each family once, with the samples of every engine."""
        return self._families

    def render(self) -> bytes:
        """Return the page as it is now."""
        values = itertools.chain.from_iterable(read() for read in self._reads)
        return (self._template % tuple(map(floatToGoString, values))).encode()
