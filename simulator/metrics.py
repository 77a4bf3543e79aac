"""Prometheus text with vLLM's metric names, and the simulator's own lateness."""

from bisect import bisect_left
from collections.abc import Iterable

from simulator.engine import StepResult
from simulator.realtime import StepLoop

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


class Histogram:
    """Counts by upper bound, the last bucket without one."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Metrics:
    """What /metrics shows, fed once a step."""

    def __init__(self, model: str) -> None:
        self._labels = 'engine="0",model_name="' + model.translate({92: r"\\", 34: r"\"", 10: r"\n"}) + '"'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = 0
        self.aborted = 0
        self.ttft = Histogram(_TTFT_BUCKETS)
        self.itl = Histogram(_ITL_BUCKETS)
        self.e2e = Histogram(_E2E_BUCKETS)
        self._previous_s = 0.0

    def on_step(self, result: StepResult, tokens: int, now_s: float) -> None:
        self.generation_tokens += tokens
        if result.decoding:
            # Every decoding request had its previous token at the previous step's end.
            self.itl.add(now_s - self._previous_s, result.decoding)
        self._previous_s = now_s
        for request in result.prompts:
            if request.first_step == result.number:
                self.prompt_tokens += request.prompt_tokens
                self.ttft.add(now_s - request.arrival_s)
        for request in result.finished:
            self.finished += 1
            self.e2e.add(now_s - request.arrival_s)

    def render(self, loop: StepLoop) -> str:
        """The text exposition format, version 0.0.4."""
        engine = loop.engine
        lines: list[str] = []
        gauges = (
            ("num_requests_running", "Number of requests in model execution batches.", float(engine.running)),
            ("num_requests_waiting", "Number of requests waiting to be processed.", float(engine.waiting)),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv_usage),
        )
        for name, text, value in gauges:
            lines += self._head(f"vllm:{name}", text, "gauge")
            lines.append(f"vllm:{name}{{{self._labels}}} {value}")
        counters = (
            ("num_preemptions", "Cumulative number of preemptions.", engine.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", self.generation_tokens),
        )
        for name, text, count in counters:
            lines += self._head(f"vllm:{name}_total", text, "counter")
            lines.append(f"vllm:{name}_total{{{self._labels}}} {float(count)}")
        lines += self._head(
            "vllm:request_success_total", "Count of successfully processed requests.", "counter"
        )
        for reason, count in (("length", self.finished), ("abort", self.aborted), ("stop", 0)):
            lines.append(
                f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(count)}'
            )
        lines += self._histogram("time_to_first_token_seconds", "Time to first token in seconds.", self.ttft)
        lines += self._histogram("inter_token_latency_seconds", "Inter-token latency in seconds.", self.itl)
        lines += self._histogram("e2e_request_latency_seconds", "E2E request latency in seconds.", self.e2e)
        lines += self._lateness(loop)
        return "\n".join(lines) + "\n"

    def _head(self, name: str, text: str, kind: str) -> list[str]:
        return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Iterable[str]:
        name = f"vllm:{name}"
        yield from self._head(name, text, "histogram")
        cumulated = 0
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            cumulated += count
            yield f'{name}_bucket{{{self._labels},le="{bound}"}} {float(cumulated)}'
        yield f"{name}_count{{{self._labels}}} {float(cumulated)}"
        yield f"{name}_sum{{{self._labels}}} {histogram.total}"

    def _lateness(self, loop: StepLoop) -> Iterable[str]:
        name = "ampacity_simulator_lateness_seconds"
        text = "Real minus planned end of a step, tokens written; quantiles over the last 8192 steps."
        yield from self._head(name, text, "summary")
        recent = sorted(loop.lateness_s)
        for quantile in (0.5, 0.9, 0.99, 1.0):
            if recent:
                value = recent[min(len(recent) - 1, int(quantile * len(recent)))]
                yield f'{name}{{{self._labels},quantile="{quantile}"}} {value:.9f}'
        yield f"{name}_count{{{self._labels}}} {float(loop.steps)}"
        yield f"{name}_sum{{{self._labels}}} {loop.lateness_sum_s:.9f}"
        name = "ampacity_simulator_timetable_resets_total"
        yield from self._head(name, "Steps so late that the timetable was moved.", "counter")
        yield f"{name}{{{self._labels}}} {float(loop.timetable_resets)}"
