"""The page of metrics, without a socket."""

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ampacity.simulator.engine.engine import Engine
from ampacity.simulator.models.hardware import linear_config
from ampacity.simulator.server.metrics import Metrics, Page


def test_a_scrape_has_the_values_of_its_moment_under_any_model_name() -> None:
    model = 'odd %s "name" 0.0'
    engines = [Engine(linear_config(0.01, 0.0)) for _ in range(2)]
    live: Any = SimpleNamespace(
        engines=engines, lateness_s=[], steps=0, lateness_sum_s=0.0, timetable_resets=0
    )
    metrics = [Metrics(model, number) for number in range(2)]
    page = Page(metrics, live)

    def values(name: str, label: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for family in text_string_to_metric_families(page.render().decode())
            for sample in family.samples
            if sample.name == name and sample.labels["model_name"] == model
        }

    assert values("vllm:generation_tokens_total", "engine") == {"0": 0, "1": 0}
    metrics[1].generation_tokens = 3
    metrics[0].histograms["e2e_request_latency_seconds"].add(0.4, 2)
    live.lateness_s = [k / 100 for k in range(100)]
    assert values("vllm:generation_tokens_total", "engine") == {"0": 0, "1": 3}
    assert values("vllm:e2e_request_latency_seconds_sum", "engine") == {"0": 0.8, "1": 0}
    buckets = values("vllm:e2e_request_latency_seconds_bucket", "le")
    assert (buckets["0.3"], buckets["0.5"], buckets["+Inf"]) == (0, 0, 0)  # of the last engine
    lateness = values("ampacity_simulator_lateness_seconds", "quantile")
    assert lateness == {"0.5": 0.5, "0.9": 0.9, "0.99": 0.99, "1.0": 0.99}
