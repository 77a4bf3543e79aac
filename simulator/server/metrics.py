"""Export vLLM's metrics and the simulator's own lateness in Prometheus format."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ampacity.simulator.engine.engine import Engine, StepResult
from ampacity.simulator.server.protocol import Call
from ampacity.simulator.server.realtime import LiveRequest, LiveRun

_TTFT_BUCKETS: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS: tuple[float, ...] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_E2E_BUCKETS: tuple[float, ...] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH_BUCKETS: tuple[float, ...] = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)
_ITERATION_BUCKETS: tuple[float, ...] = (1.0, *(float(1 << power) for power in range(3, 15)))
_N_BUCKETS: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTION_BUCKETS: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# vLLM's histograms: name, help text and bucket bounds.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _LENGTH_BUCKETS),
    "request_generation_tokens": ("Number of generation tokens processed.", _LENGTH_BUCKETS),
    "iteration_tokens_total": (
        "Histogram of number of tokens per engine_step.",
        _ITERATION_BUCKETS,
    ),
    "request_params_n": ("Histogram of the n request parameter.", _N_BUCKETS),
    "request_params_max_tokens": (
        "Histogram of the max_tokens request parameter.",
        _LENGTH_BUCKETS,
    ),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _ITL_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        _ITL_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _E2E_BUCKETS),
    "request_queue_time_seconds": (
        "Histogram of time spent in WAITING phase for request.",
        _E2E_BUCKETS,
    ),
    "request_inference_time_seconds": (
        "Histogram of time spent in RUNNING phase for request.",
        _E2E_BUCKETS,
    ),
    "request_prefill_time_seconds": (
        "Histogram of time spent in PREFILL phase for request.",
        _E2E_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "Histogram of time spent in DECODE phase for request.",
        _E2E_BUCKETS,
    ),
    "request_num_preemptions": (
        "Histogram of the number of times a request was preempted.",
        _PREEMPTION_BUCKETS,
    ),
}


class Histogram:
    """Counts by upper bound; the last bucket is unbounded."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, requests at or below it), as Prometheus exports a histogram."""
        bounds = [*map(str, self.bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.counts), strict=True))


class Metrics:
    """Collect the metrics of one engine, updated once per step."""

    def __init__(self, model: str, number: int = 0) -> None:
        self._labels = {"engine": str(number), "model_name": model}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.aborted = 0
        self.finished = {"stop": 0, "length": 0}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
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

    def families(self, engine: Engine) -> Iterator[Metric]:
        """Yield vLLM's metric families for this engine."""
        gauges = {
            "num_requests_running": (
                "Number of requests in model execution batches.",
                engine.running,
            ),
            "num_requests_waiting": ("Number of requests waiting to be processed.", engine.waiting),
            "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", engine.kv_usage),
        }
        counters = {
            "num_preemptions": (
                "Cumulative number of preemption from the engine.",
                engine.preemptions,
            ),
            "prefix_cache_queries": ("Prefix cache queries, in tokens.", engine.prefix_queries),
            "prefix_cache_hits": ("Prefix cache hits, in tokens.", engine.prefix_hits),
            "prompt_tokens": ("Number of prefill tokens processed.", self.prompt_tokens),
            "generation_tokens": ("Number of generation tokens processed.", self.generation_tokens),
        }
        for name, (text, value) in gauges.items():
            yield self._family(GaugeMetricFamily, name, text, [({}, value)])
        for name, (text, value) in counters.items():
            yield self._family(CounterMetricFamily, name, text, [({}, value)])
        reasons = {**self.finished, "abort": self.aborted, "error": 0}
        finished = [({"finished_reason": reason}, count) for reason, count in reasons.items()]
        text = "Count of successfully processed requests."
        yield self._family(CounterMetricFamily, "request_success", text, finished)
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            histogram = self.histograms[name]
            family.add_metric(
                list(self._labels.values()), histogram.cumulative(), sum_value=histogram.total
            )
            yield family
        config = engine.config
        facts = {"block_size": str(config.block_tokens), "num_gpu_blocks": str(config.kv_blocks)}
        text = "Information of the LLMEngine CacheConfig"
        yield self._family(GaugeMetricFamily, "cache_config_info", text, [(facts, 1)])

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        samples: Sequence[tuple[dict[str, str], float]],
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=[*self._labels, *samples[0][0]])
        for labels, value in samples:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def lateness(self, live: LiveRun) -> Iterator[Metric]:
        """Yield the simulator's own metrics, over all engines together."""
        name = "ampacity_simulator_lateness_seconds"
        text = (
            "Real minus planned end of a step, tokens written; quantiles over the last 8192 steps."
        )
        summary = SummaryMetricFamily(name, text)
        recent = sorted(live.lateness_s)
        for q in (0.5, 0.9, 0.99, 1.0) if recent else ():
            value = recent[min(len(recent) - 1, int(q * len(recent)))]
            summary.add_sample(name, {**self._labels, "quantile": str(q)}, value)
        summary.add_sample(f"{name}_count", self._labels, live.steps)
        summary.add_sample(f"{name}_sum", self._labels, live.lateness_sum_s)
        yield summary
        text = "Steps so late that the timetable was moved."
        resets = CounterMetricFamily(
            "ampacity_simulator_timetable_resets", text, labels=list(self._labels)
        )
        resets.add_metric(list(self._labels.values()), live.timetable_resets)
        yield resets


@dataclass(frozen=True, slots=True)
class _Collector(Collector):
    metrics: Sequence[Metrics]
    live: LiveRun

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of every engine."""
        own = [
            each.families(engine)
            for each, engine in zip(self.metrics, self.live.engines, strict=True)
        ]
        for first, *others in zip(*own, strict=True):
            for other in others:
                first.samples += other.samples
            yield first
        yield from self.metrics[0].lateness(self.live)


def render(metrics: Sequence[Metrics], live: LiveRun) -> bytes:
    """Return the text exposition format, version 0.0.4."""
    return generate_latest(_Collector(metrics, live))
