"""--prometheus and --otlp: the counters of a running load, and the dashboard that draws them."""

import contextlib
import json
import re
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ampacity.analysis.metrics.gaps import GapSeries
from ampacity.experiments.stages.live_export import PrometheusPage, otlp_body
from ampacity.loadgen.plan import LIVE_BOUNDS_S, LIVE_TIMES, Live, LiveTimes
from ampacity.loadgen.rundir.records import KINDS, RequestRecord
from ampacity.simulator.server.launch import Started
from tests.support.args import Command
from tests.support.servers.http_server import http_server, reply
from tests.support.synthetic import cohort, request

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def counted(*records: RequestRecord, stage: int = 0, **known: Any) -> Live:
    live = Live(stage=stage, released=len(records) + 1, times=LiveTimes(), **known)
    for record in records:
        live.count(record)
    live.flush()
    return live


def page(*stages: Live) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusPage(lambda: stages))
    return generate_latest(registry).decode()


def samples(text: str) -> dict[str, float]:
    """Samples of a page: ``name{label=value}`` without the ``ampacity_``."""
    return {
        s.name.removeprefix("ampacity_") + "".join(f"{{{v}}}" for v in s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_a_request_is_counted_in_the_buckets_of_its_times() -> None:
    good = request(0, 0.0, ttft_s=0.3, gaps_s=[0.01, 0.03], chunk_tokens=[1, 1, 3], tail_s=0.1)
    late = request(1, 0.0, ttft_s=0.1, start_delay_s=0.05, dispatched_ns=5_000_050_000_000)
    failed = request(2, 0.0, ttft_s=None, status="timeout")
    left = request(3, 0.0, ttft_s=0.1, status="cancelled")
    found = samples(page(counted(good, late, failed, left, level=5.0), counted(good, stage=1)))
    assert found["requests_sent_total"] == 7
    assert found["requests_in_flight"] == 1  # of the current stage
    assert found["requests_ended_total{ok}"] == 3
    assert found["requests_ended_total{timeout}"] == found["requests_ended_total{cancelled}"] == 1
    assert (found["stage"], found["offered_requests_per_second"]) == (1, 0.0)
    assert "concurrency" not in found
    # TTFT from the schedule: 0.3, 0.15 and 0.3 s; the failed one is beyond every bound
    assert [found[f"ttft_seconds_bucket{{{b}}}"] for b in ("0.1", "0.2", "0.5", "200.0", "+Inf")] == [
        0, 1, 3, 3, 4,
    ]  # fmt: skip
    assert found["ttft_seconds_sum"] == pytest.approx(0.75)
    # a chunk of three tokens 30 ms after the last is three samples of 10 ms
    assert found["itl_seconds_bucket{0.01}"] == found["itl_seconds_count"] == 8
    assert found["itl_seconds_sum"] == pytest.approx(0.08)
    assert found["e2e_seconds_bucket{0.2}"] == 1
    assert found["client_lag_seconds_bucket{0.02}"] == 4
    assert found["client_lag_seconds_bucket{0.05}"] == 5


@pytest.mark.parametrize(
    ("code", "kind"),
    [(429, "rate_limited"), (529, "rate_limited"), (401, "auth"), (503, "overloaded"),
     (502, "upstream"), (404, "bad_request"), (None, "http_error")],
)  # fmt: skip
def test_an_http_error_is_counted_as_its_kind_as_in_the_summary(code: Any, kind: str) -> None:
    record = request(0, 0.0, ttft_s=None, status="http_error", http_status=code)
    live = counted(record)
    assert samples(page(live))[f"requests_ended_total{{{kind}}}"] == live.failed == 1
    assert KINDS[cohort(record).requests.status[0]] == kind


def test_gaps_are_those_of_the_analysis() -> None:
    rng = np.random.default_rng(1)
    records = [
        request(
            i, i * 1.0, gaps_s=rng.exponential(0.02, 40), chunk_tokens=[1, *rng.integers(0, 4, 40)]
        )
        for i in range(50)
    ]
    gaps = GapSeries(cohort(*records).chunks, np.ones(50, bool), per_token=True)
    gaps_s, times = gaps.distinct()
    wanted = np.bincount(np.searchsorted(LIVE_BOUNDS_S, gaps_s), times, len(LIVE_BOUNDS_S) + 1)
    live = counted(*records)
    assert live.times.counts[LIVE_TIMES.index("itl")].tolist() == wanted.tolist()


def otlp_values(body: bytes) -> dict[str, float]:
    """Samples of an OTLP body under the names of the page."""
    found: dict[str, float] = {}
    [scope] = json.loads(body)["resourceMetrics"][0]["scopeMetrics"]
    for metric in scope["metrics"]:
        name = metric["name"].removeprefix("ampacity_")
        if data := metric.get("histogram"):
            [point] = data["dataPoints"]
            found[f"{name}_seconds_count"] = float(point["count"])
            found[f"{name}_seconds_sum"] = point["sum"]
            ends = [*map(str, point["explicitBounds"]), "+Inf"]
            upto = np.cumsum([int(n) for n in point["bucketCounts"]])
            found |= {f"{name}_seconds_bucket{{{e}}}": n for e, n in zip(ends, upto, strict=True)}
            continue
        total = "_total" if "sum" in metric else ""
        for point in (metric.get("sum") or metric["gauge"])["dataPoints"]:
            labels = "".join(f"{{{a['value']['stringValue']}}}" for a in point["attributes"])
            found[f"{name}{total}{labels}"] = point["asDouble"]
    return found


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_otlp_posts_what_the_page_shows(kind: str) -> None:
    stage = counted(*(request(i, i * 0.1, gaps_s=[0.01]) for i in range(9)), kind=kind, level=8.0)
    assert otlp_values(otlp_body([stage], 1, 2)) == samples(page(stage))


def test_every_metric_of_the_dashboard_is_on_the_page() -> None:
    expressions = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        for target in panel["targets"]
    ]
    closed = page(counted(request(0, 0.0), kind="closed", level=4.0))
    shown = {
        s.name
        for text in (page(counted(request(0, 0.0))), closed)
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    asked = {name for text in expressions for name in re.findall(r"\bampacity_\w+", text)}
    assert asked - shown == set()
    bare = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    assert {re.sub(r"_bucket$", "", name) for name in asked} == bare, "not drawn"
    by_status = [text for text in expressions if "requests_ended" in text]
    assert by_status
    assert all("status" in text for text in by_status)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_is_exported_while_it_runs(
    workers: int, tmp_path: Path, command: Command, server: Started
) -> None:
    posted: list[bytes] = []
    pages: list[str] = []
    ended = threading.Event()

    def post(handler: BaseHTTPRequestHandler) -> None:
        assert handler.path == "/v1/metrics"
        assert handler.headers["X-Scope"] == "a team"
        posted.append(handler.rfile.read(int(handler.headers["Content-Length"])))
        reply(handler)

    def scrape(port: int) -> None:
        while not ended.wait(0.2):
            url = f"http://127.0.0.1:{port}/metrics"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as got:
                pages.append(got.read().decode())

    with (
        http_server(lambda handler: reply(handler, status=404), post) as collector,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-scope=a%20team")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        scraper = threading.Thread(target=scrape, args=(port,), daemon=True)
        scraper.start()
        command(
            f"run {server.url} --rates 20,40 --duration 2s --workload chat-short "
            f"--workers {workers} --prometheus {port} --otlp {collector} --out",
            tmp_path / "run",
        )
        ended.set()
        scraper.join(5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    final = otlp_values(posted[-1])
    assert final["requests_sent_total"] == summary["requests"]
    expected = final["requests_ended_total{ok}"]
    assert expected == (summary["requests"] - sum(summary["errors"].values()))
    assert final["ttft_seconds_count"] == final["client_lag_seconds_count"] == summary["requests"]
    assert final["stage"] == len(summary["stages"]) - 1
    sent = [samples(text)["requests_sent_total"] for text in pages]
    assert sent == sorted(sent)  # a counter never falls, over both stages
    assert len({n for n in sent if n}) > 5


def test_a_port_that_is_taken_is_one_line(
    tmp_path: Path, command: Command, server: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    with http_server(reply) as taken:
        port = taken.rpartition(":")[2]
        command(f"run {server.url} --rates 5 --prometheus {port} --out", tmp_path / "x", status=2)
    assert f"--prometheus 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    for text, why in (("99999", "at most 65535"), ("a:b", "give a whole number")):
        command(f"run http://127.0.0.1:1/v1 --rates 5 --prometheus {text}", status=2)
        assert why in capsys.readouterr().err
    for url in ("http://u:p@127.0.0.1", "http://127.0.0.1:99999", "ftp://x", "foo"):
        command(f"run http://127.0.0.1:1/v1 --rates 5 --otlp {url}", status=2)
        assert "give an http(s) URL without a user name" in capsys.readouterr().err
