"""Prometheus text with vLLM's metric names, and the simulator's own lateness."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import cast

from ampacity.simulator.engine.engine import Engine, StepResult
from ampacity.simulator.server.protocol import Call
from ampacity.simulator.server.realtime import LiveRequest, LiveRun

Family = tuple[str, str, str, list[str]]  # name, type, help, samples without the name

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
# Names and words of vLLM's histograms, with the bounds of its buckets.
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
    """Counts by upper bound, the last bucket without one."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Metrics:
    """What /metrics shows of one engine, fed once a step."""

    def __init__(self, model: str, number: int = 0) -> None:
        self._labels = (
            f'engine="{number}",model_name="'
            + model.translate({92: r"\\", 34: r"\"", 10: r"\n"})
            + '"'
        )
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.aborted = 0
        self.finished = {"stop": 0, "length": 0}
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._decoded_s = 0.0  # end of the last step in which requests decoded
        self._joined: list[
            tuple[float, int]
        ] = []  # (end, requests) of the prompts that ended since

    def on_call(self, call: Call) -> None:
        """A request was accepted."""
        self.histograms["request_params_n"].add(len(call.choices) // len(call.prompts))
        self.histograms["request_params_max_tokens"].add(call.limit_tokens)

    def on_step(self, result: StepResult, tokens: int, now_s: float) -> None:
        """A step's tokens were handed out at now_s; times of requests are real ones."""
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
        """Decoding requests had their token before at the last step that decoded, or when their prompt ended."""
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
        admitted_s = (
            request.prefill_s
        )  # a prompt of several chunks counts as waiting until the step that ends it
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

    def families(self, engine: Engine) -> Iterable[Family]:
        for name, kind, text, value in (
            (
                "num_requests_running",
                "gauge",
                "Number of requests in model execution batches.",
                engine.running,
            ),
            (
                "num_requests_waiting",
                "gauge",
                "Number of requests waiting to be processed.",
                engine.waiting,
            ),
            (
                "kv_cache_usage_perc",
                "gauge",
                "KV-cache usage. 1 means 100 percent usage.",
                engine.kv_usage,
            ),
            (
                "num_preemptions_total",
                "counter",
                "Cumulative number of preemption from the engine.",
                engine.preemptions,
            ),
            (
                "prefix_cache_queries_total",
                "counter",
                "Prefix cache queries, in tokens.",
                engine.prefix_queries,
            ),
            (
                "prefix_cache_hits_total",
                "counter",
                "Prefix cache hits, in tokens.",
                engine.prefix_hits,
            ),
            (
                "prompt_tokens_total",
                "counter",
                "Number of prefill tokens processed.",
                self.prompt_tokens,
            ),
            (
                "generation_tokens_total",
                "counter",
                "Number of generation tokens processed.",
                self.generation_tokens,
            ),
        ):
            yield f"vllm:{name}", kind, text, self._one(value)
        reasons = {**self.finished, "abort": self.aborted, "error": 0}
        samples = [
            self._sample("", count, finished_reason=reason) for reason, count in reasons.items()
        ]
        yield (
            "vllm:request_success_total",
            "counter",
            "Count of successfully processed requests.",
            samples,
        )
        for name, (text, _) in _HISTOGRAMS.items():
            yield f"vllm:{name}", "histogram", text, self._buckets(self.histograms[name])
        config = engine.config
        facts = self._sample("", 1, block_size=config.block_tokens, num_gpu_blocks=config.kv_blocks)
        yield "vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", [facts]

    def _one(self, value: float) -> list[str]:
        return [self._sample("", value)]

    def _sample(self, suffix: str, value: float, **labels: object) -> str:
        """A line of the exposition without the family's name."""
        more = "".join(f',{name}="{label}"' for name, label in labels.items())
        return f"{suffix}{{{self._labels}{more}}} {float(value)}"

    def _buckets(self, histogram: Histogram) -> list[str]:
        cumulated = list(itertools.accumulate(histogram.counts))
        bounds = [*map(str, histogram.bounds), "+Inf"]
        lines = [
            self._sample("_bucket", count, le=bound)
            for bound, count in zip(bounds, cumulated, strict=True)
        ]
        return [
            *lines,
            self._sample("_count", cumulated[-1]),
            self._sample("_sum", histogram.total),
        ]

    def lateness(self, live: LiveRun) -> Iterable[Family]:
        """The simulator's own figures, of all engines together."""
        recent = sorted(live.lateness_s)
        lines = [
            self._sample("", recent[min(len(recent) - 1, int(q * len(recent)))], quantile=q)
            for q in (0.5, 0.9, 0.99, 1.0)
            if recent
        ]
        lines += [self._sample("_count", live.steps), self._sample("_sum", live.lateness_sum_s)]
        text = (
            "Real minus planned end of a step, tokens written; quantiles over the last 8192 steps."
        )
        yield "ampacity_simulator_lateness_seconds", "summary", text, lines
        resets = self._one(live.timetable_resets)
        text = "Steps so late that the timetable was moved."
        yield "ampacity_simulator_timetable_resets_total", "counter", text, resets


def render(metrics: Sequence[Metrics], live: LiveRun) -> str:
    """The text exposition format, version 0.0.4, one engine after the other in each family."""
    lines = []
    own = [each.families(engine) for each, engine in zip(metrics, live.engines, strict=True)]
    for families in itertools.chain(
        zip(*own, strict=True), zip(metrics[0].lateness(live), strict=True)
    ):
        name, kind, text, _ = families[0]
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [name + sample for *_, samples in families for sample in samples]
    return "\n".join(lines) + "\n"
