"""``ampacity validate``: buckets, drift, the findings, and exit states, against figures worked out
by hand.
"""

import contextlib
import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.analysis.contract import stage as contract
from ampacity.analysis.validate import (
    ASSUMPTIONS,
    Benchmark,
    Histogram,
    Production,
    ValidateError,
    ks_distance,
    of_samples,
    validate,
)
from ampacity.imports.production import add_up, between, fetch, from_pages, read_page
from tests.support.contract import struct_of
from tests.support.repeats import often
from tests.support.synthetic import Stage, make_run, request

INF = math.inf
NAME = "vllm:time_to_first_token_seconds"


def histogram(bounds: list[float], counts: list[float], total: float | None = None) -> Histogram:
    return Histogram(np.array(bounds), np.array(counts, dtype=float), total)


def page(
    name: str, cumulative: dict[str, int], total: float = 0.0, labels: str = 'model="m"'
) -> str:
    lines = [f'{name}_bucket{{{labels},le="{le}"}} {count}' for le, count in cumulative.items()]
    return "\n".join([f"# TYPE {name} histogram", *lines, f"{name}_sum{{{labels}}} {total}", ""])


# ---- buckets


def test_quantile_is_interpolated_and_bounded_by_its_bucket() -> None:
    # 100 samples: 50 up to 1, 40 in (1, 2], 10 in (2, 4]. p90 is the last of the second bucket;
    # p95 = 2 + 2 * 5/10
    held = histogram([1, 2, 4, INF], [5000, 4000, 1000, 0])
    value, low, high = held.quantile(0.95)
    assert value == pytest.approx(3.0)
    assert (low, high) == (2.0, 4.0)
    assert held.quantile(0.25)[0] == pytest.approx(0.5)


def test_last_bucket_has_no_upper_bound_and_a_short_tail_widens_to_the_buckets_of_its_ranks() -> (
    None
):
    assert histogram([1, INF], [0, 1000]).quantile(0.99) == (None, 1.0, INF)
    # p99 of 200: ranks 195 .. none (0.99^200 = 13 % > 2.5 %), so nothing bounds it from above
    _, low, high = histogram([1, 2, INF], [190, 10, 0]).quantile(0.99)
    assert (low, high) == (1.0, INF)


def test_ks_distance_at_the_bounds() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert ks_distance(values, histogram([2, 4, INF], [5, 5, 0])) == 0.0
    assert ks_distance(values, histogram([2, 4, INF], [0, 10, 0])) == pytest.approx(0.5)
    assert ks_distance(values, of_samples(np.array([1.0, 2.0, 3.0, 9.0]))) == pytest.approx(0.25)
    assert ks_distance(np.array([100.0]), of_samples(np.array([200.0]))) == 1.0


@settings(max_examples=often(15, 60), deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
)
def test_buckets_never_claim_more_than_the_true_distance(a: list[int], b: list[int]) -> None:
    xs, ys = np.array(a, dtype=float), np.array(b, dtype=float)
    truth = max(abs(np.mean(xs <= g) - np.mean(ys <= g)) for g in np.arange(0, 31))
    edges = np.array([5.0, 10.0, 20.0, INF])
    counts = np.diff([np.sum(ys <= e) for e in edges], prepend=0).astype(float)
    assert ks_distance(xs, Histogram(edges, counts)) <= truth + 1e-12
    assert ks_distance(xs, of_samples(ys)) == pytest.approx(truth)


def test_replicas_are_added_bucket_by_bucket_never_averaged() -> None:
    name = "vllm:time_to_first_token_seconds"
    both = page(name, {"0.1": 90, "1.0": 100, "+Inf": 100}, 9.0) + page(
        name, {"0.1": 0, "1.0": 10, "+Inf": 10}, 5.0, 'model="n"'
    )
    found = add_up([read_page(both)])["ttft"]
    assert found.counts.tolist() == [90, 20, 0]
    assert (found.n, found.total) == (110, 14.0)


def test_series_with_other_buckets_are_added_up_at_the_bounds_that_they_share() -> None:
    fine, coarse = (
        {"0.1": 1, "0.5": 3, "1.0": 6, "+Inf": 8},
        {"0.1": 10, "1.0": 20, "2.0": 25, "+Inf": 30},
    )
    found = add_up([read_page(page(NAME, fine, 2.0)), read_page(page(NAME, coarse, 9.0))])["ttft"]
    assert found.bounds.tolist() == [0.1, 1.0, INF]
    assert found.counts.tolist() == [11, 15, 12]  # 1 + 10; 5 + 10; 2 + 10
    assert found.total == 11.0


def test_two_scrapes_leave_what_came_in_between() -> None:
    name = "sglang:time_to_first_token_seconds"
    early, late = (
        read_page(page(name, c)) for c in ({"1": 100, "+Inf": 100}, {"1": 130, "+Inf": 140})
    )
    assert add_up([between(early, late, "p")])["ttft"].counts.tolist() == [30, 10]
    with pytest.raises(ValidateError, match=r"p: ttft: .* restarted"):
        between(late, early, "p")
    new = read_page(
        page(name, {"1": 130, "+Inf": 140}) + page(name, {"1": 7, "+Inf": 8}, labels='model="n"')
    )
    # n came in between
    assert add_up([between(early, new, "p")])["ttft"].counts.tolist() == [37, 11]
    with pytest.raises(ValidateError, match="restarted"):  # n is gone
        between(new, late, "p")


@pytest.mark.parametrize(
    "line",
    json.loads(r"""["_bucket{le=\"x\"} 3", "_bucket{le=\"1\"} NaN",
        "_bucket{le=\"1\"} 5\nvllm:time_to_first_token_seconds_bucket{le=\"+Inf\"} 3",
        "_bucket{le=\"1\"} 5"]"""),
)
def test_damaged_page_is_one_line(line: str) -> None:
    with pytest.raises(ValidateError):
        read_page("vllm:time_to_first_token_seconds" + line)


@settings(max_examples=often(15, 60), deadline=None)
@given(
    st.text(max_size=200)
    | st.just("\nvllm:prefix_cache_hits_total +Inf\nvllm:prefix_cache_queries_total 1e999\n"),
    st.integers(0, 300),
)
def test_no_page_ends_in_a_traceback(noise: str, cut: int) -> None:
    """Noise between the lines changes no figure; within one it may damage the page, or a number."""
    whole = page(NAME, {"0.1": 5, "1.0": 9, "+Inf": 10}, 3.0)
    lines = whole.splitlines(keepends=True)
    at = cut % len(lines)
    between_lines = "".join([*lines[:at], "\n", noise, "\n", *lines[at:]])
    found = from_pages(["p"], [between_lines], None, None).latencies["ttft"]
    assert (found.bounds.tolist(), found.counts.tolist()) == ([0.1, 1.0, INF], [5, 4, 1])
    assert found.total == 3.0
    with contextlib.suppress(ValidateError):  # the one error that it may raise
        damaged = from_pages(["p"], [whole[:cut] + noise + whole[cut:]], None, None)
        for held in damaged.latencies.values():
            assert held.bounds[-1] == INF
            assert (held.counts >= 0).all()
            assert held.counts.sum() == held.n > 0


# ---- findings

STAGE: dict[str, Any] = json.loads("""{"index": 0, "achieved_rps": 10.0,
    "ttft_s": {"p95": 0.2, "p99": 0.5, "n": 1000}, "itl_s": {"p95": 0.02, "n": 9000},
    "icl_s": {"n": 0}, "server": {"gpu_utilization": 0.6, "kv_cache_usage_max": null,
    "prefix_hit_rate": 0.5}}""")
RNG = np.random.default_rng(5)
BENCH = Benchmark(
    struct_of(contract.Stage, STAGE),
    RNG.normal(1000, 100, 2000),
    RNG.normal(200, 20, 2000),
    RNG.exponential(0.1, 2000),
)


def verdicts(production: Production, instances: int = 1) -> dict[str, str]:
    return {f.name: f.verdict for f in validate(BENCH, production, instances)}


def ttft(bounds: list[float], counts: list[float]) -> Production:
    return Production("p", {"ttft": histogram(bounds, counts)}, rps=1.0)


def test_breach_is_claimed_only_where_the_whole_bucket_is_above() -> None:
    # limit of p99: 1.3 * 0.5 = 0.65; of p95: 2 * 0.2 = 0.4
    # p99 in (0.7, 2]
    assert verdicts(ttft([0.7, 2, INF], [9000, 1000, 0]))["ttft_p99"] == "violated"
    # (0.6, 2] holds 0.65
    assert verdicts(ttft([0.6, 2, INF], [9000, 1000, 0]))["ttft_p99"] == "inconclusive"
    assert verdicts(ttft([0.6, 2, INF], [10000, 0, 0]))["ttft_p99"] == "met"
    assert verdicts(ttft([0.4, 2, INF], [9000, 1000, 0]))["ttft_p95"] == "violated"
    assert verdicts(ttft([0.3, 2, INF], [9000, 1000, 0]))["ttft_p95"] == "inconclusive"
    few = verdicts(Production("p", {"ttft": histogram([0.7, 2, INF], [0, 99, 0])}, rps=1.0))
    assert few["ttft_p99"] == "inconclusive"  # 99 samples


def test_a_benchmark_that_is_itself_uncertain_breaks_nothing() -> None:
    slow = Production("p", {"ttft": histogram([0.7, 2, INF], [9000, 1000, 0])}, rps=1.0)
    for upper, verdict in (
        (0.53, "violated"),
        (0.6, "inconclusive"),
    ):  # 1.3 * 0.53 = 0.689, 1.3 * 0.6 = 0.78
        stage = STAGE | {"ttft_s": {"p95": 0.2, "p99": 0.5, "p99_ci": [0.4, upper]}}
        found = validate(
            Benchmark(
                struct_of(contract.Stage, stage),
                BENCH.input_tokens,
                BENCH.output_tokens,
                BENCH.gaps_s,
            ),
            slow,
        )
        assert {f.name: f.verdict for f in found}["ttft_p99"] == verdict


def test_both_figures_and_the_limit_stand_in_a_finding() -> None:
    found = {f.name: f for f in validate(BENCH, ttft([0.7, 2, INF], [9000, 1000, 0]))}["ttft_p99"]
    assert (found.benchmark, found.limit, found.production_bounds) == (0.5, 0.65, (0.7, 2.0))
    assert found.production == pytest.approx(0.7 + 1.3 * 0.9)
    assert found.assumption == ASSUMPTIONS["ttft_p99"]


def test_itl_three_times_shares_twenty_points_load_per_instance() -> None:
    slow = Production(
        "p",
        {"itl": histogram([0.06, 1, INF], [900, 100, 0])},
        shares={"gpu_utilization": 0.81, "prefix_hit_rate": 0.31},
        rps=25.0,
    )
    found = verdicts(slow, instances=2)
    assert found["itl_p95"] == "violated"  # above 3 * 20 ms
    assert found["gpu_utilization"] == "violated"
    assert found["prefix_hit_rate"] == "met"
    assert found["kv_cache_usage_max"] == "inconclusive"
    assert found["load"] == "violated"  # 12.5 of each, 1.2 * 10 tested
    assert verdicts(slow, instances=3)["load"] == "met"
    exactly = Production("p", shares={"gpu_utilization": 0.8})
    assert verdicts(exactly)["gpu_utilization"] == "met"


def test_drift_of_lengths_and_bursts() -> None:
    rng = np.random.default_rng(6)
    same = Production(
        "p",
        lengths={"input_tokens": of_samples(rng.normal(1000, 100, 1000))},
        gaps_s=rng.exponential(2.0, 1000),
    )
    found = verdicts(same)
    assert found["input_tokens"] == "met"
    assert found["arrivals"] == "met"
    longer = Production(
        "p",
        lengths={"input_tokens": of_samples(rng.normal(1080, 100, 1000))},
        gaps_s=rng.gamma(0.25, 1.0, 1000),
    )
    found = verdicts(longer)
    # 0.8 standard deviations apart: KS = 2 Phi(0.4) - 1 = 0.31; gamma of shape 1/4: coefficient
    # of variation 2
    assert found["input_tokens"] == "violated"
    assert found["arrivals"] == "violated"


def test_coarse_buckets_with_other_means_are_not_called_kept() -> None:
    # everything is in (512, 2048] on both sides: no distance is proved, but a mean of 1500 is not
    # 1000
    for mean, verdict in ((1000, "met"), (1500, "inconclusive")):
        coarse = histogram([512, 2048, INF], [0, 1000, 0], 1000.0 * mean)
        assert (
            verdicts(Production("p", lengths={"input_tokens": coarse}, rps=1.0))["input_tokens"]
            == verdict
        )


def test_nothing_comparable_is_an_error() -> None:
    with pytest.raises(ValidateError, match="nothing of p can be compared"):
        validate(BENCH, Production("p"))


# ---- the command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    values = np.random.default_rng(1).lognormal(np.log(0.1), 0.3, 1000)
    records = [request(i, i / 20, ttft_s=float(t), gaps_s=[0.01] * 4) for i, t in enumerate(values)]
    make_run(tmp_path / "run", [Stage(records, 50.0, offered_rps=20.0)])
    return tmp_path / "run"


def test_exit_states(run: Path, tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    good, bad, none = (tmp_path / n for n in ("good.prom", "bad.prom", "none.prom"))
    good.write_text(page(NAME, {"0.2": 10_000, "+Inf": 10_000}))
    bad.write_text(page(NAME, {"0.5": 100, "1.0": 10_000, "+Inf": 10_000}))
    none.write_text("# TYPE other counter\nother 1\n")
    assert ampacity("validate", run, "--production", good) == 0
    assert "no assumptions violated" in capsys.readouterr().out
    assert ampacity("validate", run, "--production", bad, "--json") == 1
    assert json.loads(capsys.readouterr().out)["violated"] == ["ttft_p99", "ttft_p95"]
    for bad_place in (none, tmp_path / "missing", "http://127.0.0.1:9/metrics"):
        assert ampacity("validate", run, "--production", bad_place) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert ampacity("validate", run, "--production", good, "--stage", "7") == 2


def test_an_idle_server_is_no_evidence(
    run: Path, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    idle, fresh = tmp_path / "idle.prom", tmp_path / "fresh.prom"
    gauge = "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0\n"
    idle.write_text(page(NAME, {"0.2": 500, "+Inf": 500}) + gauge)
    fresh.write_text(page(NAME, {"0.2": 0, "+Inf": 0}) + gauge)
    for said, arguments in (
        (
            "nothing was served in the 5 s between the scrapes",
            ("--production", idle, "--before", idle, "--over", "5s"),
        ),
        ("nothing was served since the server started", ("--production", fresh)),
    ):
        assert ampacity("validate", run, *arguments) == 2
        told = capsys.readouterr()
        assert said in told.err
        assert told.err.count("\n") == 1
        assert told.out == ""


def test_figures_have_units_and_a_broken_line_says_what_was_assumed(
    run: Path, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    """The benchmark's TTFT is log-normal, 100 ms and sigma 0.3; production's p95 in (0.5 s, 1 s],
    95 of 100 at 0.5 + 0.5 x 94/99."""
    slow = tmp_path / "slow.prom"
    slow.write_text(page(NAME, {"0.5": 100, "1.0": 10_000, "+Inf": 10_000}))
    assert ampacity("validate", run, "--production", slow) == 1
    text = capsys.readouterr().out
    assert re.search(
        r"✗  ttft_p95 +1\d\d ms +975 ms +500 ms to 1.00 s +above the limit +"
        "users wait for the first token no longer than in the benchmark\n",
        text,
    )
    assert re.search("not known +a rate needs two scrapes", text)


def grown(late: int, labels: str = 'model="m"') -> str:
    queries = f"vllm:prefix_cache_queries_total{{{labels}}} {late}\n"
    return page(NAME, {"0.2": late, "+Inf": late}, labels=labels) + queries


def test_each_replica_and_each_series_is_held_against_itself(
    run: Path, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    def given(**pages: str) -> dict[str, Path]:
        for name, text in pages.items():
            (tmp_path / name).write_text(text)
        return {name: tmp_path / name for name in pages}

    def validated(late: list[Path], early: list[Path], *more: str) -> tuple[int, str]:
        places = [part for p in late for part in ("--production", p)] + [
            part for p in early for part in ("--before", p)
        ]
        return ampacity("validate", run, *places, "--over", "600s", *more), "".join(
            capsys.readouterr()
        )

    b = 'model="b"'
    at = given(
        a0=grown(10_000),
        a1=grown(14_800),
        b0=grown(3_000),
        b1=grown(7_800),
        b2=grown(500),
        both0=grown(10_000) + grown(3_000, b),
        both1=grown(14_800) + grown(500, b),
        both2=grown(14_800) + grown(7_800, b),
        cache0="vllm:prefix_cache_queries_total 9\n",
        cache1="vllm:prefix_cache_queries_total 3\n# TYPE x gauge\n",
    )
    for late, early, wrong in (
        (["a1", "b2"], ["a0", "b0"], "b2: ttft: a counter went back"),
        (["both1"], ["both0"], "both1: ttft: a counter went back"),
        (["cache1"], ["cache0"], "cache1: prefix_cache_queries_total: a counter went back"),
        (["a1", "b1"], ["a0"], "--before has 1 pages and --production 2"),
        (["a1"], ["a0", "b0"], "--before has 2 pages and --production 1"),
        (["a1", "a1"], ["a0", "b0"], "--production: a page stands there twice"),
        (["a1", "b1"], ["a0", "a0"], "--before: a page stands there twice"),
    ):
        code, said = validated([at[p] for p in late], [at[p] for p in early])
        assert code == 2
        assert wrong in said
    two = [at["a1"], at["b1"]], [at["a0"], at["b0"]]
    one = [at["both2"]], [at["both0"]]
    for (late_, early_), more, each in (
        (two, (), 8.0),
        (one, (), 16.0),
        (two, ("--replicas", "4"), 4.0),
    ):
        code, said = validated(late_, early_, "--json", *more)
        load = next(f for f in json.loads(said)["findings"] if f["name"] == "load")
        assert load["production"] == pytest.approx(each)  # 2 * 4800 requests in 600 s


def test_log_shows_lengths_and_arrivals(
    run: Path, tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    log = tmp_path / "log.csv"
    rng = np.random.default_rng(2)
    rows = [
        f"{t:.6f},{n},4"
        for t, n in zip(
            np.cumsum(rng.exponential(0.05, 500)), rng.integers(5000, 9000, 500), strict=True
        )
    ]
    rows = [f"{row},7" for row in (rows[1], rows[0], *rows[2:])]
    log.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens,other", *rows]))
    said = [
        "log.csv: the rows are not in the order of time (1 come before the row above them); they are sorted",
        "log.csv: columns that are not used: other",
    ]
    assert ampacity("validate", run, "--production", log) == 1
    notes = [line.removeprefix("NOTE      ") for line in capsys.readouterr().out.splitlines()[-2:]]
    assert notes == said
    assert ampacity("validate", run, "--production", log, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["notes"] == said
    found = {f["name"]: f for f in answer["findings"]}
    assert found["input_tokens"]["verdict"] == "violated"
    # a metronome was benchmarked, a Poisson process came
    assert found["arrivals"]["verdict"] == "violated"
    assert found["load"]["verdict"] == "met"  # about 20/s
    assert found["ttft_p99"]["verdict"] == "inconclusive"
    # of a log no bucket is spoken of
    assert found["input_tokens"]["reason"].startswith("KS distance 1.00, ")


def test_url_is_scraped_twice(run: Path, ampacity: Any, capsys: Any) -> None:
    pages = [
        page(NAME, {"0.2": 0, "9": 5000, "+Inf": 5000}),
        page(NAME, {"0.2": 4000, "9": 9000, "+Inf": 9000}),
    ]

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages.pop(0).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        # what came in between is fast, although the page as a whole is slow; 4000 in 0.2 s are
        # more than was tested
        assert ampacity("validate", run, "--production", url, "--over", "200ms", "--json") == 1
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    answer = json.loads(capsys.readouterr().out)
    assert answer["violated"] == ["load"]
    assert {f["name"]: f["verdict"] for f in answer["findings"]}["ttft_p99"] == "met"


def test_password_of_a_url_is_not_written() -> None:
    for url in ("http://me:secret@127.0.0.1:9/metrics", "http://me:secret@host/"):
        with pytest.raises(ValidateError) as error:
            fetch(url)
        assert "secret" not in str(error.value)
    with pytest.raises(ValidateError):
        fetch("http://127.0.0.1:x/")


SAMPLES = Path(__file__).parents[2] / "data" / "streams"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_pages_of_real_engines(engine: str) -> None:
    known = {"ttft", "e2e", "input_tokens", "output_tokens"} | (
        {"itl"} if engine == "vllm" else set()
    )
    pages = sorted((SAMPLES / engine).glob("*.prom"))
    assert pages
    for path in pages:
        assert read_page(path.read_text()).keys() >= known, path.name
