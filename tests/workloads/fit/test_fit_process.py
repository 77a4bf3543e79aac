"""The arrival process of a log: likelihoods against matrix exponentials and quadrature, and the
process that drew it is found.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.linalg import expm
from scipy.stats import gamma

from ampacity.reports.pages.profile import facts
from ampacity.workloads.arrivals.processes import arrival_times, parse_arrivals
from ampacity.workloads.fit.process import (
    Mmpp,
    choose_process,
    choose_windows,
    fit_hours,
    fit_mmpp,
    gamma_log_density,
    gaps_text,
    hours_text,
)
from ampacity.workloads.fit.profile import fit, write_profile
from ampacity.workloads.fit.servegen import fit_servegen
from ampacity.workloads.fit.sessions import context_limit, joint_sessions
from ampacity.workloads.fit.traffic import count_windows, turns_of
from ampacity.workloads.fit.view import read_measured, view
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import open_schedule
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.trace import Trace
from tests.support.repeats import often

DATA = Path(__file__).parents[2] / "data" / "traces"


# --- likelihoods ---


@pytest.mark.parametrize(
    ("rates", "leave"),
    [
        ((1.0, 8.0), (0.2, 0.5)),
        ((0.0, 5.0), (0.02, 0.1)),
        ((3.0, 3.0), (1.0, 0.01)),
        ((1e-3, 900.0), (0.5, 40.0)),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 50])
def test_the_likelihood_of_two_states_is_the_product_of_matrix_exponentials(
    rates: tuple[float, float], leave: tuple[float, float], n: int
) -> None:
    gaps = np.random.default_rng(n).exponential(1 / max(rates), n)
    (a, b), (p, q) = rates, leave
    inner, jumps = np.array([[-p - a, p], [q, -q - b]]), np.diag([a, b])
    after = np.array([q * a, p * b]) / (q * a + p * b)  # the state that a request leaves behind
    product = after
    for gap in gaps:
        product = product @ expm(inner * gap) @ jumps
    assert Mmpp(rates, leave).score(gaps) * n == pytest.approx(
        np.log(product.sum()), rel=1e-9, abs=1e-9
    )


def test_two_states_of_one_rate_are_poisson() -> None:
    gaps = np.array([0.1, 2.0, 0.7])
    assert Mmpp((2.0, 2.0), (1.0, 3.0)).score(gaps) == pytest.approx(
        np.mean(np.log(2.0) - 2.0 * gaps)
    )


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0, 13.0])
def test_gamma_gaps_have_their_density_and_the_shortest_share_one(cv: float) -> None:
    law = gamma(cv**-2, scale=cv**2)  # mean 1
    u = np.array([0.001, 0.3, 1.0, 9.0])
    assert gamma_log_density(u, cv) == pytest.approx(law.logpdf(u), rel=1e-9)
    shortest = gamma_log_density(np.array([0.0, 5e-5]), cv)
    assert shortest == pytest.approx([np.log(law.cdf(1e-4) / 1e-4)] * 2, rel=1e-6)
    above = (
        quad(lambda x: np.exp(gamma_log_density(np.array([x]), cv)[0]), 1e-4, np.inf, limit=500)[0]
        if cv < 5
        else law.sf(1e-4)
    )
    assert above + np.exp(shortest[0]) * 1e-4 == pytest.approx(1, rel=1e-3)


# --- what is chosen ---


def dispersions(times: np.ndarray) -> list[float]:
    return [count_windows(times, width).dispersion() for width in (1, 10, 60)]


def chosen(law: str, seed: int, requests: int = 3000, rate: float = 2.0) -> str:
    rng = np.random.default_rng(seed)
    times = arrival_times(law, rate, requests / rate, rng)
    times = times - times[0]
    return choose_process(times, dispersions(times), rng)[0].text


@pytest.mark.parametrize(
    ("law", "kind"),
    [
        ("poisson", "poisson"),
        ("constant", "constant"),
        ("gamma:cv=1.5", "gamma"),
        ("gamma:cv=3", "gamma"),
        ("onoff:on=10s,off=50s", "onoff"),
        ("onoff:on=2s,off=6s", "onoff"),
        ("mmpp:rates=1/8,stay=60s/5s", "mmpp"),
    ],
)
def test_the_process_that_drew_a_log_is_found(law: str, kind: str) -> None:
    found = [chosen(law, seed) for seed in range(often(1, 3))]
    assert {text.partition(":")[0] for text in found} == {kind}
    for text in found:
        parse_arrivals(text)  # a workload file takes it


def test_rates_and_stays_come_back() -> None:
    """40,000 requests of states with 1 and 8 requests/s for 60 s and 5 s, within the noise of some
    300 cycles."""
    rng = np.random.default_rng(1)
    # (60 + 40) / 65 a second
    times = arrival_times("mmpp:rates=1/8,stay=60s/5s", 20 / 13, 26_000, rng)
    found = fit_mmpp(np.diff(times))
    low, high = sorted((0, 1), key=lambda i: found.rates[i])
    assert found.rates[low] == pytest.approx(1, rel=0.05)
    assert found.rates[high] == pytest.approx(8, rel=0.1)
    assert 1 / found.leave[low] == pytest.approx(60, rel=0.2)
    assert 1 / found.leave[high] == pytest.approx(5, rel=0.2)


def test_a_day_that_repeats_is_found_and_a_flat_one_is_not_made_up() -> None:
    def days(law: str, seed: int) -> str:
        rng = np.random.default_rng(seed)
        times = np.concatenate(
            [arrival_times(law, 0.1, 86_400, rng) + day * 86_400 for day in range(3)]
        )
        return choose_process(times - times[0], dispersions(times - times[0]), rng)[0].text

    assert days("diurnal", 1).startswith("diurnal:weights=")
    assert "cv=" not in days("diurnal", 1)  # Poisson when the day is taken out
    assert days("poisson", 2) == "poisson"
    one = np.random.default_rng(3)
    times = arrival_times(
        "diurnal:weights=1/1/1/1/1/1/8/8/8/8/8/8/8/8/8/8/8/8/1/1/1/1/1/1", 0.1, 86_400, one
    )
    assert choose_process(times - times[0], dispersions(times), one)[0].text.startswith("diurnal:")


def test_the_weights_of_hours_by_hand() -> None:
    """Two days, twelve hours at ten an hour, then twelve at thirty: 0.5 and 1.5, and evenly spaced
    in between."""
    times = np.concatenate(
        [h * 3600 + np.arange(n) * 3600 / n for h, n in enumerate(([10] * 12 + [30] * 12) * 2)]
        + [[172_800.0]]
    )
    weights, cv = fit_hours(times, np.ones(len(times) - 1, dtype=bool), 86_400.0)
    assert weights == pytest.approx([0.5] * 12 + [1.5] * 12, rel=0.06)
    assert cv < 0.1
    assert hours_text(np.full(24, 1.0), 2.0) == f"diurnal:weights={'/'.join(['1'] * 24)},cv=2"
    parse_arrivals(hours_text(weights, cv))


def test_gaps_by_their_cv() -> None:
    assert [
        gaps_text(cv) for cv in (0.0, 0.5, 0.9, 1.19, 1.3, 400)
    ] == "constant gamma:cv=0.5 poisson poisson gamma:cv=1.3 gamma:cv=100".split()


# --- windows of ServeGen ---


def test_windows_that_stand_together_become_a_curve_and_scattered_ones_take_turns() -> None:
    rng = np.random.default_rng(1)
    together = np.zeros(144)
    together[60:71] = [108, 7374, 6894, 6528, 6336, 7596, 10_062, 9174, 4638, 4350, 5028]
    assert choose_windows(together, 600, 1.0)[0].text.startswith("steps:rates=0/0/")
    scattered = np.where(rng.random(144) < 0.3, 6000.0, 0.0)
    assert choose_windows(scattered, 600, 2.0)[0].text.startswith("onoff:on=")
    assert choose_windows(scattered, 600, 2.0)[0].text.endswith(",cv=2")
    flat = rng.poisson(600, 144).astype(float)
    assert choose_windows(flat, 600, 1.0)[0].text == "poisson"
    assert (
        len(parse_arrivals(choose_windows(np.tile(together, 14), 600, 1.0)[0].text).curve.rates)
        <= 336
    )


def test_a_servegen_client_of_eleven_windows_is_not_a_steady_trickle(tmp_path: Path) -> None:
    """11 of 144 windows at up to 16.8 requests/s, on average 0.7 a second: a day of draws has its
    requests in them."""
    rates = dict(
        zip(
            range(128, 139),
            [0.18, 12.29, 11.49, 10.88, 10.56, 12.66, 16.77, 15.29, 7.73, 7.25, 8.38],
            strict=True,
        )
    )
    rows = (f"{w * 600},{rates.get(w, 0)},{1 if w in rates else 0},,1,1\n" for w in range(144))
    (tmp_path / "c-trace.csv").write_text("".join(rows))
    table = {"input_tokens": "{10: 1.0}", "output_tokens": "{5: 1.0}", "reason_ratio": "{0.5: 1.0}"}
    (tmp_path / "c-dataset.json").write_text(
        json.dumps({"0": table, "21600": {**table, "input_tokens": "{}"}})
    )
    profile = fit_servegen(tmp_path / "c-trace.csv")
    measured = profile["measured"]
    assert measured["arrivals"]["mean_rps"] == pytest.approx(sum(rates.values()) / 144, rel=1e-4)
    times = arrival_times(
        profile["arrivals"], measured["arrivals"]["mean_rps"], 86_400, np.random.default_rng(1)
    )
    window = np.bincount((times // 600).astype(int), minlength=144) / 600
    assert set(np.flatnonzero(window)) == set(rates)
    assert window[134] == pytest.approx(16.77, rel=0.03)  # sqrt(10,062) is 1 % of it
    notes = " ".join(measured["notes"])
    assert "11 of 144 windows have requests, up to 16.8 requests/s" in notes
    assert "c-dataset.json: fields that are not used: reason_ratio (of 2 slots)" in notes
    assert "1 of 2 slots have no lengths" in notes
    write_profile(tmp_path / "c.yaml", profile)
    shown = dict(
        facts(
            view(load_workload(str(tmp_path / "c.yaml")), read_measured(str(tmp_path / "c.yaml")))
        )
    )
    # 128 of 144 windows are idle, three to a character
    assert shown["Rate over time"].startswith(" " * 42)


# --- logs ---


def trace(times: np.ndarray) -> Trace:
    n = len(times)
    lengths = np.full(n, 5, dtype=np.int64), np.full(n, 7, dtype=np.int64)
    return Trace(times, *lengths, "t.csv (generic format)", clock="a number of seconds")


def test_a_log_of_bursts_is_fitted_with_its_bursts_and_shown_beside_a_draw(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    times = arrival_times("onoff:on=10s,off=50s", 2, 3000, rng)
    profile = fit(trace(times - times[0]), "bursts")
    assert profile["arrivals"].startswith("onoff:on=")
    arrivals = profile["measured"]["arrivals"]
    assert arrivals["processes"][0]["process"] == profile["arrivals"]
    assert arrivals["processes"][0]["held_out_nats"] > arrivals["processes"][1]["held_out_nats"]
    over_time = arrivals["over_time"]
    assert np.mean(over_time["rps"]) == pytest.approx(len(times) / (times[-1] - times[0]), rel=0.02)
    assert len(over_time["rps"]) == len(over_time["fitted_rps"]) == 48
    # a draw is as uneven over ten seconds as the log; independent gaps of its CV would not be
    expected = pytest.approx(arrivals["dispersion"]["10s"], rel=0.5)
    assert over_time["fitted_dispersion"]["10s"] == expected
    notes = " ".join(profile["measured"]["notes"])
    assert (
        "arrivals: onoff describes parts of the log that it was not fitted to better than gamma:cv="
        in notes
    )
    write_profile(tmp_path / "b.yaml", profile)
    shown = dict(
        facts(
            view(load_workload(str(tmp_path / "b.yaml")), read_measured(str(tmp_path / "b.yaml")))
        )
    )
    assert shown["Processes"].startswith(f"{profile['arrivals']} +")
    assert len(shown["Rate over time"].partition(" up to")[0]) == 48


def test_azure_code_is_on_and_off() -> None:
    profile = fit(read_trace(DATA / "azure_llm_2023_code.csv.gz"), "code")
    curve = parse_arrivals(profile["arrivals"]).curve
    assert profile["arrivals"].startswith("onoff:")
    assert curve is not None
    assert profile["measured"]["arrivals"]["processes"][1]["process"] == "gamma:cv=13.2"


@pytest.mark.slow
# a draw that lies behind the last whole day
@example(gaps=[30.0, 1e7, 0.0, 0.0, 61.0], n=100, seed=3)
@settings(max_examples=often(6, 15), deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, 1.0, 2.0, 0.5, 30.0, 61.0, 5000.0, 90_000.0, 1e7]),
        min_size=1,
        max_size=6,
    ),
    st.integers(100, 400),
    st.integers(1, 3),
)
def test_any_log_is_fitted_to_a_workload_that_can_be_drawn(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[float], n: int, seed: int
) -> None:
    """Times of few gaps in any order: ties, steps, strays, breaks; what is written is read, and
    draws its mean rate."""
    times = np.cumsum(
        np.random.default_rng(seed).choice(
            gaps, n, p=np.arange(1, len(gaps) + 1)[::-1] / sum(range(len(gaps) + 1))
        )
    )
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    profile = fit(trace(times - times[0]), "any")
    write_profile(path, profile)
    facts(view(load_workload(str(path)), read_measured(str(path))))
    parse_arrivals(profile["arrivals"])
    assert np.isfinite(
        [p["held_out_nats"] for p in profile["measured"].get("arrivals", {}).get("processes", [])]
    ).all()


# --- sessions ---


def test_sessions_are_drawn_like_recorded_ones(tmp_path: Path) -> None:
    """Rows of two kinds: 3 turns from 100 tokens by 25, then by 40 on average; 1 turn of 9."""
    path = tmp_path / "w.yaml"
    sessions = {
        "turns": 2,
        "user_tokens": {"points": {10: 1, 30: 1}},
        "joint": [[3, 100, 25, 40], [1, 9, 0, 0]],
    }
    path.write_text(yaml.safe_dump({"input_tokens": 50, "output_tokens": 10, "sessions": sessions}))
    workload = load_workload(str(path))
    schedule = open_schedule(workload, rate_rps=20, duration_s=200, seed=1, stage=0)
    assert schedule.session is not None
    first = schedule.input_tokens[schedule.turn == 0]
    expected = pytest.approx({9: len(first) / 2, 100: len(first) / 2}, rel=0.02)
    assert dict(zip(*np.unique(first, return_counts=True), strict=True)) == expected
    assert set(schedule.new_tokens[schedule.turn == 1].tolist()) == {25}
    third = schedule.new_tokens[schedule.turn == 2]
    assert set(third.tolist()) == {20, 60}  # 10 and 30, scaled from a mean of 20 to 40
    assert third.mean() == pytest.approx(40, rel=0.05)
    assert workload.sessions is not None
    assert workload.describe()["sessions"]["joint"]["sessions"] == 2


@pytest.mark.parametrize(
    "joint", [[], [[1, 2]], [[0, 5, 5]], [[1, 0, 5]], [[1.5, 5, 5]], "x", [[1, 5, 5]] * 1001]
)
def test_joint_sessions_that_are_none_are_one_line(joint: object, tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(
        yaml.safe_dump(
            {"input_tokens": 50, "output_tokens": 10, "sessions": {"turns": 2, "joint": joint}}
        )
    )
    with pytest.raises(ValueError, match="sessions: joint") as caught:
        load_workload(str(path))
    assert "\n" not in str(caught.value)


def test_joint_rows_by_hand() -> None:
    """Contexts 100, 160, 220: 50 more and an answer of 10, then again; one that shrinks says a
    word; a single turn."""
    inputs, outputs = np.array([100, 160, 220, 80, 20, 7]), np.full(6, 10)
    turns, first = np.array([3, 2, 1]), np.array([0, 3, 5])
    assert joint_sessions(inputs, outputs, turns, first) == [
        [1, 7, 0, 0],
        [2, 80, 1, 1],
        [3, 100, 50, 50],
    ]


@pytest.mark.parametrize("jump", [0, 5000])
def test_joint_rows_keep_mean_and_spread_of_a_sawtooth(jump: int) -> None:
    """40 turns that rise by 1,000 from 2,000 (after a jump) and are compacted to 10,000 once: mean
    and deviation of the drawn ones.

    39 evenly spaced contexts with that deviation would go beyond the largest one, which is the end
    of the drawn ones."""
    contexts = 2000 + jump * (np.arange(40) > 0) + 1000 * np.arange(40)
    contexts[25:] -= 15_000
    turns, first, answer = np.array([40]), np.array([0]), 100
    ((count, start, second, later),) = joint_sessions(contexts, np.full(40, answer), turns, first)
    drawn = start + np.concatenate(
        [[0], np.cumsum([second + answer] + [later + answer] * (count - 2))]
    )
    assert drawn[0] == contexts[0]
    assert drawn[1:].mean() == pytest.approx(contexts[1:].mean(), rel=0.01)
    half = contexts[1:].max() - contexts[1:].mean()
    assert drawn[-1] == pytest.approx(contexts.max(), rel=0.01)
    assert half / math.sqrt(3 * 38 / 40) < contexts[1:].std()
    assert drawn[1:].std() == pytest.approx(half / math.sqrt(3 * 38 / 40), rel=0.02)


@pytest.mark.parametrize(
    "name", ["agentic_coding_requests.csv.gz", "agentic_coding_sessions_raw.jsonl.gz"]
)
def test_contexts_of_fitted_agent_sessions_are_those_of_the_log(tmp_path: Path, name: str) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    log = read_trace(path, timed=False)
    order, *_ = turns_of(log)
    contexts = log.input_tokens[order]
    write_profile(tmp_path / "a.yaml", fit(log, "a"))
    workload = load_workload(str(tmp_path / "a.yaml"))
    for seed in (1, 2):
        drawn = open_schedule(workload, rate_rps=1, duration_s=100_000, seed=seed, stage=0)
        for q in (0.5, 0.9):
            expected = pytest.approx(np.quantile(contexts, q), rel=0.05)
            assert np.quantile(drawn.input_tokens, q) == expected, (seed, q)


def test_a_limit_of_the_context_by_hand() -> None:
    """Twenty sessions of 100, 200, 300 tokens, then 150 (cut), with answers of 50: the usual
    message is 50, and 100 stay."""
    inputs, outputs = np.tile([100, 200, 300, 150], 20), np.full(80, 50)
    later = np.delete(np.arange(80), np.arange(0, 80, 4))
    limit = context_limit(inputs, outputs, later)
    assert (limit[0], set(limit[1].tolist())) == (300, {100})
    rows = joint_sessions(inputs, outputs, np.full(20, 4), np.arange(0, 80, 4), matched=False)
    assert rows == [[4, 100, 50, 50]] * 20
    assert context_limit(inputs[:76], outputs[:76], later[:57]) is None  # nineteen are too few
    assert (
        context_limit(
            np.append(inputs, [100, 2000]), np.append(outputs, [50, 50]), np.append(later, 81)
        )
        is None
    )


@pytest.mark.parametrize("kind", ["chat", "truncated", "restarted"])
def test_contexts_of_other_fitted_sessions(kind: str, tmp_path: Path) -> None:
    """Sessions whose first message grows with their turns; cut to 2,048 tokens, or begun anew with
    500 beyond 3,000."""
    rng = np.random.default_rng(1)
    rows: list[tuple[float, int, int, int]] = []
    for session in range(400):
        turns, at = int(rng.geometric(0.15)), rng.uniform(0, 1e5)
        context = int(rng.lognormal(5 + 0.05 * turns, 0.8)) + 1
        for _ in range(turns):
            answer = int(rng.lognormal(5, 0.7)) + 1
            rows.append((at, context, answer, session))
            at += rng.exponential(30)
            context += answer + int(rng.lognormal(4, 1)) + 1
            if kind == "truncated":
                context = min(context, 2048)
            elif kind == "restarted" and context > 3000:
                context = 500
    rows.sort()
    times, inputs, outputs, sessions = (np.array(column) for column in zip(*rows, strict=True))
    log = Trace(
        times - times[0],
        inputs,
        outputs,
        "t.csv (generic format)",
        clock="a number of seconds",
        session=sessions,
    )
    profile = fit(log, "s")
    assert ("limit_tokens" in profile["sessions"]) == (kind != "chat")
    write_profile(tmp_path / "s.yaml", profile)
    schedule = open_schedule(
        load_workload(str(tmp_path / "s.yaml")), rate_rps=1, duration_s=40_000, seed=1, stage=0
    )
    for q in (0.5, 0.9):
        assert np.quantile(schedule.input_tokens, q) == pytest.approx(
            np.quantile(inputs, q), rel=0.06
        ), q
