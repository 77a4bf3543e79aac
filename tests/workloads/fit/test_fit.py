"""From a log to a profile: each figure by hand or by its formula, and the public traces where they
are at hand.
"""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.fit.lengths import fit_families, fit_lengths, quantile_table
from ampacity.workloads.fit.profile import fit, write_profile
from ampacity.workloads.fit.servegen import fit_servegen, is_servegen
from ampacity.workloads.fit.traffic import (
    count_windows,
    fit_arrivals,
    fit_clients,
    fit_sessions,
    leading_hits,
)
from ampacity.workloads.lengths.parse import parse_lengths, spearman
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import open_schedule
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.trace import Blocks, Trace

DATA = Path(__file__).parents[2] / "data" / "traces"


def counted(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, weights = np.unique(samples, return_counts=True)
    return values.astype(float), weights.astype(float)


def trace(times: list[float], inputs: list[int], outputs: list[int], **more: object) -> Trace:
    arrays = (np.array(times, dtype=float), np.array(inputs), np.array(outputs))
    return Trace(*arrays, "t.csv (generic format)", clock="a number of seconds", **more)


# --- lengths ---


def test_a_table_of_a_few_lengths_is_the_step_function() -> None:
    """One half has 10 tokens, a quarter 20, a quarter 40: the steps end at 0.5 and 0.75."""
    table = quantile_table(np.array([10.0, 20.0, 40.0]), np.array([2.0, 1.0, 1.0]))
    lengths = parse_lengths({"quantiles": table}, "t")
    assert [
        lengths.quantile(q) for q in (0, 0.25, 0.4999, 0.5001, 0.7499, 0.7501, 1)
    ] == json.loads("""[10, 10, 10, 20, 20,
        40, 40]""")
    drawn = lengths.sample(np.random.default_rng(1), 40_000)
    assert dict(zip(*np.unique(drawn, return_counts=True), strict=True)) == {
        10: pytest.approx(20_000, abs=400),
        20: pytest.approx(10_000, abs=350),
        40: pytest.approx(10_000, abs=350),
    }


def test_one_length_and_two_requests() -> None:
    assert set(quantile_table(np.array([7.0]), np.array([3.0])).values()) == {7}
    profile = fit(trace([0, 1], [5, 5], [1, 9]), "p")
    assert profile["arrivals"] == "poisson"  # nothing is known of two
    hundred = np.arange(100)
    assert fit(trace(hundred, 5 + hundred % 2, 1 + hundred % 9), "p")["arrivals"] == "constant"
    assert profile["measured"]["input_tokens"]["families"] == []
    # each gap is longer than the one before
    few = fit(trace(hundred[:99] ** 2, 5 + hundred[:99], 5 + hundred[:99]), "p")
    assert few["arrivals"] == "poisson"
    assert "correlation" not in few
    assert not {"correlation", "arrivals"} & few["measured"].keys()
    assert few["measured"]["notes"][-1].startswith(
        "99 requests are too few to fit: arrivals are taken for Poisson, "
    )
    with pytest.raises(WorkloadError, match="too few for a profile"):
        fit(trace([0], [5], [1]), "p")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_draws_from_a_table_have_the_quantiles_and_spikes_of_the_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = np.concatenate(
        [
            rng.lognormal(6, 1.2, 20_000).astype(int) + 1,
            np.full(700, 181),
            np.full(900, 4096),
            rng.integers(390, 436, 4000),
        ]
    )
    table = quantile_table(*counted(samples))
    assert len(table) < 200
    drawn = parse_lengths({"quantiles": table}, "t").sample(rng, 200_000)
    for q in (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99):
        assert np.quantile(drawn, q) == pytest.approx(np.quantile(samples, q), rel=0.02), q
    for spike in (181, 4096):
        assert np.mean(drawn == spike) == pytest.approx(np.mean(samples == spike), rel=0.06)
    assert np.mean((drawn >= 390) & (drawn <= 435)) == pytest.approx(
        np.mean((samples >= 390) & (samples <= 435)), abs=0.004
    )
    assert drawn.mean() == pytest.approx(samples.mean(), rel=0.02)
    found = fit_lengths(*counted(samples), len(samples))["spikes"]
    assert {s["tokens"] for s in found} == {181, 4096}


def families(samples: np.ndarray) -> dict[str, dict[str, object]]:
    return {str(f["family"]): f for f in fit_families(*counted(samples), len(samples))}


def test_each_family_is_found_by_its_own_samples() -> None:
    """Parameters come back, and only the right family passes Kolmogorov-Smirnov among the single
    ones."""
    rng = np.random.default_rng(5)
    n = 20_000
    own = families(np.rint(rng.lognormal(7, 0.8, n)).astype(int))
    assert own["lognormal"]["fits"]
    assert not own["gamma"]["fits"]
    assert not own["weibull"]["fits"]
    lognormal = own["lognormal"]["lengths"]["lognormal"]
    assert lognormal["p50"] == pytest.approx(math.exp(7), rel=0.02)
    assert lognormal["p99"] == pytest.approx(math.exp(7 + 2.3263 * 0.8), rel=0.03)
    assert own["two lognormals"]["fits"]  # it holds the single one, which is named as it is simpler
    assert (
        fit_lengths(*counted(np.rint(rng.lognormal(7, 0.8, n)).astype(int)), n)["best_family"]
        == "lognormal"
    )
    own = families(np.maximum(np.rint(rng.gamma(2.5, 400, n)), 1).astype(int))
    assert own["gamma"]["fits"]
    assert not own["lognormal"]["fits"]
    assert own["gamma"]["lengths"]["gamma"]["mean"] == pytest.approx(1000, rel=0.02)
    assert own["gamma"]["lengths"]["gamma"]["cv"] == pytest.approx(1 / math.sqrt(2.5), rel=0.03)
    own = families(np.maximum(np.rint(800 * rng.weibull(1.7, n)), 1).astype(int))
    assert own["weibull"]["fits"]
    assert not own["lognormal"]["fits"]


def test_a_mixture_of_two_lognormals_is_found() -> None:
    rng = np.random.default_rng(6)
    samples = np.rint(
        np.concatenate([rng.lognormal(4, 0.4, 6_000), rng.lognormal(7, 0.5, 14_000)])
    ).astype(int)
    own = families(samples)
    assert own["two lognormals"]["fits"]
    assert not any(own[name]["fits"] for name in ("lognormal", "gamma", "weibull"))
    low, high = own["two lognormals"]["lengths"]["mixture"]
    assert low["weight"] == pytest.approx(0.3, abs=0.01)
    assert (low["lognormal"]["p50"], high["lognormal"]["p50"]) == (
        pytest.approx(math.exp(4), rel=0.03),
        pytest.approx(math.exp(7), rel=0.03),
    )
    assert fit_lengths(*counted(samples), len(samples))["best_family"] == "two lognormals"
    parse_lengths(own["two lognormals"]["lengths"], "t")  # a workload file takes it as it is


def test_where_none_fits_it_is_said() -> None:
    samples = np.repeat([10, 11, 500, 4000], [500, 300, 900, 300])
    found = fit_lengths(*counted(samples), len(samples))
    assert found["best_family"] is None
    assert found["ks_limit"] == pytest.approx(1.36 / math.sqrt(2000), rel=1e-3)


def test_rank_correlation_with_ties() -> None:
    """Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: 1.5 and 0.5 off the mean and so on give 4.5/sqrt(4.5
    * 5)."""
    assert spearman(np.array([1, 5, 5, 9]), np.array([2, 8, 4, 10])) == pytest.approx(
        4.5 / math.sqrt(4.5 * 5)
    )
    assert spearman(np.array([1, 2, 3]), np.array([3, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1, 2, 3]), np.array([4, 4, 4])) == 0


# --- arrivals ---


def test_seconds_are_counted_and_their_percentiles_are_those_of_whole_seconds() -> None:
    """100 s with one request each, but second 50 has 10 and seconds 60 to 64 have 4: P95 is 1 of
    95, P99 is 4."""
    extra = [50.5] * 9 + [s + 0.25 for s in range(60, 65) for _ in range(3)]
    times = np.sort(np.array([float(s) for s in range(101)] + extra))
    found = fit_arrivals(times)
    assert (found["rps_p50"], found["rps_p95"], found["rps_p99"], found["rps_max"]) == (1, 4, 4, 10)
    assert found["mean_rps"] == pytest.approx((len(times) - 1) / 100, rel=1e-4)
    seconds = np.ones(100)
    seconds[50], seconds[60:65] = 10, 4
    assert found["dispersion"]["1s"] == pytest.approx(seconds.var() / seconds.mean(), rel=1e-4)
    assert found["peak_to_mean"]["1s"] == pytest.approx(10 / seconds.mean(), rel=1e-4)
    assert count_windows(times, 10).held.tolist() == [10, 10, 10, 10, 10, 19, 25, 10, 10, 10]


def test_processes_by_their_formulas() -> None:
    constant = fit_arrivals(np.arange(1000) * 0.1)
    assert constant["gap_cv"] == pytest.approx(0, abs=1e-9)
    assert constant["dispersion"]["10s"] == pytest.approx(0, abs=0.01)
    rng = np.random.default_rng(3)
    poisson = fit_arrivals(np.cumsum(rng.exponential(0.1, 60_000)))
    assert poisson["gap_cv"] == pytest.approx(1, abs=0.02)
    expected = pytest.approx([1, 1, 1], abs=0.3)
    assert [poisson["dispersion"][w] for w in ("1s", "10s", "60s")] == expected
    assert poisson["rps_p99"] == pytest.approx(18, abs=1)  # the Poisson(10) quantile
    bursty = fit_arrivals(np.cumsum(rng.gamma(1 / 9, 0.9, 60_000)))  # CV 3
    assert bursty["gap_cv"] == pytest.approx(3, abs=0.15)
    assert fit(
        trace(np.cumsum(rng.gamma(1 / 9, 0.9, 5_000)).tolist(), [5] * 5000, [6] * 5000), "p"
    )["arrivals"].startswith("gamma:cv=")


def test_a_day_has_hourly_weights() -> None:
    per_hour = np.tile([10] * 12 + [30] * 12, 2)
    times = np.concatenate(
        [h * 3600 + np.arange(n) * 3600 / n for h, n in enumerate(per_hour)] + [[48 * 3600.0]]
    )
    found = fit_arrivals(times)
    assert found["hourly_weights"] == pytest.approx([0.5] * 12 + [1.5] * 12)


def test_clients_without_their_names() -> None:
    """Requests without a client are none: their uneven gaps are those of no one."""
    client = np.array([0] * 60 + [1] * 30 + [2] * 10 + [-1] * 50)
    found = fit_clients(client, np.append(np.arange(100.0), 100 + np.arange(50.0) ** 2))
    assert found["clients"] == 3
    assert found["share_of_top"] == {"1": 0.6}
    assert found["clients_for_90_percent"] == 2
    assert found["gap_cv_by_client"] == {"p10": 0, "p50": 0, "p90": 0}


# --- sharing and sessions ---


def test_leading_hits_by_hand() -> None:
    """The second has two leading blocks of the first; the third none, though its later ones are
    known; the fourth all."""
    chains = [[1, 2, 3], [1, 2, 9], [7, 2, 3], [1, 2, 9]]
    blocks = Blocks(np.concatenate(chains), np.array([0, 3, 6, 9, 12]))
    assert leading_hits(blocks).tolist() == [0, 2, 0, 3]
    profile = fit(trace([0, 1, 2, 3], [48, 33, 40, 40], [1, 2, 3, 4], blocks=blocks), "p")
    sharing = profile["measured"]["sharing"]
    assert sharing["block_tokens"] == 16
    # 48 hit, of only 40 tokens
    assert sharing["cached_share_infinite"] == pytest.approx((32 + 40) / 161, rel=1e-4)
    assert profile["prefixes"]["cached_share"] == pytest.approx(72 / 161, abs=1e-4)


def test_sessions_by_hand() -> None:
    blocks = Blocks(np.array([1, 2, 1, 2, 3, 5, 1, 2, 4, 6]), np.array([0, 2, 5, 6, 10]))
    held = trace(
        [0, 4, 5, 14], [20, 40, 9, 70], [5, 6, 7, 8], blocks=blocks, session=np.array([0, 0, 1, 0])
    )
    found = fit_sessions(held)
    assert found["sessions"] == 2
    assert found["turns"]["mean"] == 2
    assert found["gap_s"]["p50"] == 7  # between 4 and 10
    assert found["input_growth_tokens"]["p50"] == 25  # between 20 and 30
    assert found["turn_to_turn_share"] == pytest.approx((2 + 2) / (3 + 4), rel=1e-4)
    profile = fit(held, "p")
    assert profile["arrivals"] == "poisson"  # of the two sessions, of which nothing is known
    assert profile["sessions"].keys() == {"turns", "user_tokens", "think_ms", "joint"}
    # 20, 40, 70 with answers of 6.5: 20 and 13.5 more, then 23.5 more
    assert profile["sessions"]["joint"] == [[1, 9, 0, 0], [3, 20, 14, 24]]
    # the third prompt, 70, is longer than 40 and 6; the second, 40, than 20 and 5
    assert not any(
        "shorter than the one before" in note for note in profile["measured"].get("notes", [])
    )
    assert parse_lengths(profile["sessions"]["user_tokens"], "t").quantile(0) == 15  # 40 - 20 - 5
    # of first messages: 20 and 9
    assert parse_lengths(profile["input_tokens"], "t").quantile(1) == 20


def test_cached_tokens_as_reported() -> None:
    held = trace([0, 1, 2], [100, 100, 50], [1, 1, 1], cached_tokens=np.array([-1, 64, 0]))
    profile = fit(held, "p")
    expected = {"cached_share_reported": pytest.approx(64 / 150, rel=1e-4)}
    assert profile["measured"]["sharing"] == expected
    assert profile["prefixes"]["cached_share"] == pytest.approx(64 / 150, rel=1e-3)


# --- the profile as a file ---


def test_a_profile_is_a_workload_file_and_holds_no_words_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rng = np.random.default_rng(1)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["timestamp", "user", "prompt", "input_tokens", "output_tokens"])
        for at in np.cumsum(rng.exponential(0.5, 400)):
            n = int(rng.integers(10, 500))
            out.writerow(
                [
                    f"{at:.6f}",
                    f"secret-user-{n % 7}",
                    "a secret prompt",
                    n,
                    n + int(rng.integers(0, 200)),
                ]
            )
    profile = fit(read_trace(path), "mine")
    write_profile(tmp_path / "mine.yaml", profile)
    text = (tmp_path / "mine.yaml").read_text()
    assert "secret" not in text
    workload = load_workload(str(tmp_path / "mine.yaml"))
    assert workload.name == "mine"
    schedule = open_schedule(workload, rate_rps=50, duration_s=100, seed=1, stage=0)
    drawn = spearman(schedule.input_tokens, schedule.output_tokens)
    assert drawn == pytest.approx(profile["measured"]["correlation"], abs=0.05)
    assert profile["measured"]["correlation"] > 0.8
    assert yaml.safe_load(text)["measured"]["clients"]["clients"] == 7


def test_servegen_client_by_hand(tmp_path: Path) -> None:
    """600 requests of 10 tokens and 1,200 of 10 or 30: two thirds have 10, a third 30."""
    (tmp_path / "c-trace.csv").write_text(
        "0,1.0,2.0,Gamma,0.25,4\n600,0,0,,0,0\n1200,2.0,1.0,Gamma,1,0.5\n"
    )
    slots = {
        "0": {"input_tokens": "{10: 1.0}", "output_tokens": "{5: 1.0}"},
        "1200": {"input_tokens": "{10: 0.5, 30: 0.5}", "output_tokens": "{5: 1.0}"},
    }
    (tmp_path / "c-dataset.json").write_text(json.dumps(slots))
    assert is_servegen(tmp_path / "c-dataset.json")
    profile = fit_servegen(tmp_path / "c-dataset.json")
    measured = profile["measured"]
    assert measured["requests"] == 1800
    expected = pytest.approx((1200 * 10 + 600 * 30) / 1800, rel=1e-4)
    assert measured["input_tokens"]["mean"] == expected
    assert measured["arrivals"]["mean_rps"] == 1
    assert measured["arrivals"]["gap_cv"] == 1  # 1,200 of 1,800 requests are in the window of CV 1
    (tmp_path / "c-trace.csv").write_text("0,1.0,2.0\n600,-1,0\n")
    with pytest.raises(WorkloadError, match=r"c-trace\.csv:2"):
        fit_servegen(tmp_path / "c-trace.csv")
    (tmp_path / "c-trace.csv").write_text("0,1.0,2.0\n")
    (tmp_path / "c-dataset.json").write_text('{"0": {"input_tokens": "__import__(1)"}}')
    with pytest.raises(WorkloadError, match="no data set of a ServeGen client"):
        fit_servegen(tmp_path / "c-trace.csv")


# --- the public traces ---


@pytest.mark.parametrize("name", ["conv", "code"])
def test_azure_draws_agree_with_the_sample(name: str, tmp_path: Path) -> None:
    held = read_trace(DATA / f"azure_llm_2023_{name}.csv.gz")
    profile = fit(held, name)
    write_profile(tmp_path / "p.yaml", profile)
    schedule = open_schedule(
        load_workload(str(tmp_path / "p.yaml")), rate_rps=500, duration_s=100, seed=1, stage=0
    )
    for side in ("input_tokens", "output_tokens"):
        sample, drawn = getattr(held, side), getattr(schedule, side)
        for q in (0.5, 0.9, 0.99):
            assert np.quantile(drawn, q) == pytest.approx(np.quantile(sample, q), rel=0.05), (
                side,
                q,
            )
        for spike in profile["measured"][side]["spikes"]:
            share = np.mean(sample == spike["tokens"])
            assert np.mean(drawn == spike["tokens"]) == pytest.approx(share, abs=0.003), (
                side,
                spike,
            )
    assert spearman(schedule.input_tokens, schedule.output_tokens) == pytest.approx(
        spearman(held.input_tokens, held.output_tokens), abs=0.05
    )
    spikes = {
        (side, s["tokens"])
        for side in ("input_tokens", "output_tokens")
        for s in profile["measured"][side]["spikes"]
    }
    assert ("input_tokens", 181 if name == "conv" else 7436) in spikes
    arrivals = profile["measured"]["arrivals"]
    expected = {"conv": (1.09, [1.4, 3.9, 16.1]), "code": (13.15, [13.2, 71.6, 164.0])}[name]
    assert arrivals["gap_cv"] == pytest.approx(expected[0], rel=0.01)
    assert list(arrivals["dispersion"].values()) == pytest.approx(expected[1], rel=0.02)


def test_azure_families_as_computed_elsewhere() -> None:
    """KS distances and p99 ratios that scipy gave for the same data."""
    held = read_trace(DATA / "azure_llm_2023_code.csv.gz")
    found = {str(f["family"]): f for f in fit_families(*counted(held.input_tokens), len(held))}
    assert found["lognormal"]["ks"] == pytest.approx(0.106, abs=0.001)
    assert found["lognormal"]["p99_ratio"] == pytest.approx(3.49, rel=0.01)
    assert found["gamma"]["ks"] == pytest.approx(0.035, abs=0.001)
    assert found["weibull"]["ks"] == pytest.approx(0.036, abs=0.001)
    assert float(found["two lognormals"]["ks"]) <= 0.031


def test_mooncake_sharing_and_its_clock() -> None:
    profile = fit(read_trace(DATA / "mooncake_conversation.jsonl.gz"), "m")
    measured = profile["measured"]
    assert measured["sharing"]["cached_share_infinite"] == pytest.approx(0.374, abs=0.02)
    assert measured["sharing"]["block_tokens"] == 512
    assert measured["clock_step_s"] == pytest.approx(3, abs=0.01)
    assert measured["arrivals"]["gap_cv"] == pytest.approx(1.0, abs=0.05)  # 3.03 as written
    assert profile["arrivals"] == "poisson"


def test_agentic_coding_turns() -> None:
    found = fit_sessions(read_trace(DATA / "agentic_coding_requests.csv.gz"))
    assert found["turn_to_turn_share"] == pytest.approx(0.973, abs=0.02)
    assert found["sessions"] == 773


def test_a_log_whose_lengths_rise_together_gives_a_profile_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"{i},{5 + i % 2},{5 + i % 2}" for i in range(100)]
    # no end of the last line
    path.write_text("\r\n".join(["timestamp,input_tokens,output_tokens", *rows]))
    profile = fit(read_trace(path), "log")
    assert profile["measured"]["correlation"] == 1.0
    write_profile(tmp_path / "log.yaml", profile)
    drawn = open_schedule(
        load_workload(str(tmp_path / "log.yaml")), rate_rps=10, duration_s=100, seed=1, stage=0
    )
    assert (drawn.input_tokens == drawn.output_tokens).mean() > 0.95
