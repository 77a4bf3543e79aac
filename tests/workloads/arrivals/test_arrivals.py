"""Arrival processes against their laws."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from ampacity.workloads.arrivals.processes import ARRIVALS, arrival_times, arrivals_text
from ampacity.workloads.arrivals.rates import MEASURED_DAY
from ampacity.workloads.errors import WorkloadError
from tests.support.repeats import often


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_poisson_gaps_are_exponential() -> None:
    """Poisson gaps pass KS against the exponential at 7.3/s."""
    times = arrival_times("poisson", 7.3, 14_000, rng())
    gaps = np.diff(times, prepend=0.0)  # the first request is one gap late as well
    assert stats.kstest(gaps, "expon", args=(0, 1 / 7.3)).pvalue > 0.001
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.02)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 4.5 / np.sqrt(len(gaps))


def test_poisson_counts_have_the_mean_and_variance_of_the_law() -> None:
    counts = np.array([len(arrival_times("poisson", 4, 25, rng(seed))) for seed in range(2000)])
    # N ~ Poisson(100): mean 100 with standard error 10/sqrt(2000) = 0.22; the variance of the
    # sample variance
    # is about 2 * 100^2 / 1999, standard error 3.2.
    assert counts.mean() == pytest.approx(100, abs=1.0)
    assert counts.var(ddof=1) == pytest.approx(100, abs=15)


def test_poisson_dispersion_is_one_at_every_time_scale() -> None:
    times = arrival_times("poisson", 20, 10_000, rng(3))
    for window_s in (0.1, 1, 10):
        counts = np.histogram(times, bins=np.arange(0, 10_000 + window_s / 2, window_s))[0]
        assert counts.var() / counts.mean() == pytest.approx(1, abs=6 * np.sqrt(2 / len(counts)))


def test_times_are_sorted_and_inside_the_stage() -> None:
    for kind in ("poisson", "constant"):
        times = arrival_times(kind, 50, 20, rng())
        assert times.dtype == np.float64
        assert (np.diff(times) > 0).all()
        assert times[0] >= 0
        assert times[-1] < 20


def test_constant_is_exact() -> None:
    assert arrival_times("constant", 4, 1, rng()).tolist() == [0, 0.25, 0.5, 0.75]
    assert arrival_times("constant", 10, 0.31, rng()).tolist() == [0, 0.1, 0.2, 0.3]
    # the end does not belong to the stage
    assert len(arrival_times("constant", 3, 1 / 3, rng())) == 1
    assert arrival_times("constant", 0.1, 5, rng()).tolist() == [0]


def test_same_state_gives_the_same_times_and_another_rate_stretches_them() -> None:
    slow = arrival_times("poisson", 2, 100, rng(9))
    assert slow.tolist() == arrival_times("poisson", 2, 100, rng(9)).tolist()
    fast = arrival_times("poisson", 8, 100, rng(9))
    n = min(len(slow), len(fast))
    assert fast[:n] * 4 == pytest.approx(slow[:n], rel=1e-12)
    assert arrival_times("poisson", 2, 50, rng(9)).tolist() == slow[slow < 50].tolist()


def test_a_short_stage_may_have_no_request() -> None:
    assert len(arrival_times("poisson", 1e-9, 1, rng())) == 0


@pytest.mark.parametrize(
    ("kind", "rate_rps", "duration_s", "culprit"),
    [
        ("bursty", 1, 1, "'bursty' are not known .did you mean burst"),
        ("poisson", 0, 1, "rate is 0"),
        ("poisson", -1, 1, "rate is -1"),
        ("poisson", float("nan"), 1, "rate is nan"),
        ("constant", 1, 0, "duration is 0"),
        ("constant", 1, float("inf"), "duration is inf"),
        ("poisson", 1e6, 1e6, "more than 50000000 requests"),
    ],
)
def test_bad_load_is_one_line(kind: str, rate_rps: float, duration_s: float, culprit: str) -> None:
    with pytest.raises(WorkloadError, match=culprit) as caught:
        arrival_times(kind, rate_rps, duration_s, rng())
    assert "\n" not in str(caught.value)


def weibull(cv: float) -> Any:
    k = optimize.brentq(
        lambda k: math.gamma(1 + 2 / k) / math.gamma(1 + 1 / k) ** 2 - 1 - cv**2, 0.2, 50
    )
    return stats.weibull_min(k, scale=1 / math.gamma(1 + 1 / k))


RENEWAL = {
    "gamma:cv=3": stats.gamma(1 / 9, scale=9),
    "gamma:cv=0.5": stats.gamma(4, scale=0.25),
    "weibull:cv=2": weibull(2),
    "weibull:cv=0.5": weibull(0.5),
}


@pytest.mark.parametrize("spec", RENEWAL)
def test_renewal_gaps_follow_their_law_and_are_independent(spec: str) -> None:
    law, cv = RENEWAL[spec], float(spec.partition("=")[2])
    assert (law.mean(), law.std()) == (pytest.approx(1, rel=1e-6), pytest.approx(cv, rel=1e-6))
    gaps = np.diff(arrival_times(spec, 7.3, 14_000, rng(2))) * 7.3
    assert len(gaps) > 95_000
    tiny = 1e-6  # a sum of 14,000 s does not hold shorter gaps exactly, and a CV of 3 has many
    assert np.mean(gaps <= tiny) == pytest.approx(
        law.cdf(tiny), abs=4.5 * math.sqrt(law.cdf(tiny) / len(gaps))
    )
    rest = gaps[gaps > tiny]
    assert stats.kstest(rest, lambda x: (law.cdf(x) - law.cdf(tiny)) / law.sf(tiny)).pvalue > 0.001
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.05)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 4.5 / math.sqrt(len(gaps))


@pytest.mark.parametrize("spec", RENEWAL)
def test_a_bursty_stage_is_stationary_from_its_first_second_on(spec: str) -> None:
    """Began it with a whole gap, a stage of CV 3 would have (CV^2 - 1) / 2 = 4 requests more than
    rate x duration."""
    cv = float(spec.partition("=")[2])
    stages = [arrival_times(spec, 4, 25, rng(seed)) for seed in range(4000)]
    counts = np.array([len(times) for times in stages])
    assert counts.mean() == pytest.approx(100, abs=4.5 * counts.std() / math.sqrt(4000))
    assert 4.5 * counts.std() / math.sqrt(4000) < max(0.5, cv)  # the test can tell
    early = np.array([np.count_nonzero(times < 1) for times in stages])
    assert early.mean() == pytest.approx(4, abs=4.5 * early.std() / math.sqrt(4000))
    first = np.array([times[0] for times in stages if len(times)])
    if (
        cv < 1
    ):  # mean of the residual gap, (1 + CV^2) / 2; with bursts some stages have no first request
        assert first.mean() * 4 == pytest.approx(
            (1 + cv**2) / 2, abs=4.5 * first.std() * 4 / math.sqrt(4000)
        )


def test_the_cv_of_one_is_poisson_in_every_family() -> None:
    poisson = arrival_times("poisson", 5, 60, rng()).tolist()
    assert arrival_times("gamma:cv=1", 5, 60, rng()).tolist() == poisson
    assert arrival_times("weibull:cv=1", 5, 60, rng()).tolist() == poisson


@pytest.mark.parametrize(
    ("spec", "rates", "stay"),
    [
        ("onoff:on=10s,off=30s", (1.0, 0.0), (10.0, 30.0)),
        ("mmpp:rates=1/8,stay=6s/2s", (1.0, 8.0), (6.0, 2.0)),
    ],
)
def test_switching_arrivals_have_the_dispersion_of_the_law(
    spec: str, rates: tuple[float, float], stay: tuple[float, float]
) -> None:
    """Cox process with a two-state rate: IDC(t) = 1 + 2 C0 / (m r) (1 - (1 - e^(-rt)) / (rt)), C0
    the rate's variance."""
    duration_s, m = 60_000, 4.0
    times = arrival_times(spec, m, duration_s, rng(5))
    share = stay[0] / sum(stay)
    scale = m / (share * rates[0] + (1 - share) * rates[1])
    c0 = share * (1 - share) * (scale * (rates[0] - rates[1])) ** 2
    r = 1 / stay[0] + 1 / stay[1]
    idc_end = 1 + 2 * c0 / (m * r)
    expected = len(times)
    assert expected == pytest.approx(m * duration_s, abs=4.5 * math.sqrt(m * duration_s * idc_end))
    for window_s in (0.25, 2.0, 20.0):
        counts = np.histogram(times, np.arange(0, duration_s + window_s / 2, window_s))[0]
        law = 1 + 2 * c0 / (m * r) * (1 - (1 - math.exp(-r * window_s)) / (r * window_s))
        assert counts.var() / counts.mean() == pytest.approx(law, rel=0.12)
    gaps = np.diff(times)
    law = lag_1_of_mmpp(scale * np.array(rates), np.array(stay))
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(law, abs=0.02)
    assert law > 0.1 or rates[1] == 0  # an on-off Poisson process is a renewal process: 0


def lag_1_of_mmpp(rates: Any, stay: Any) -> float:
    """Autocorrelation of neighbouring gaps, from the MMPP's matrices (Fischer and Meier-Hellstern,
    1993)."""
    d1 = np.diag(rates)
    q = np.array([[-1, 1], [1, -1]]) / stay[:, None]
    u = np.linalg.inv(d1 - q)
    phi = (stay * rates) / (stay @ rates)  # the state that an arrival sees
    one = np.ones(2)
    mean, second = phi @ u @ one, 2 * phi @ u @ u @ one
    return float((phi @ u @ u @ d1 @ u @ one - mean**2) / (second - mean**2))


def test_switching_begins_in_its_stationary_law() -> None:
    spec = "onoff:on=1s,off=3s"
    counts = np.array([len(arrival_times(spec, 8, 2, rng(seed))) for seed in range(4000)])
    assert counts.mean() == pytest.approx(16, abs=4.5 * counts.std() / math.sqrt(4000))


SHAPES = {  # the distribution function of an arrival's time, as a share of the stage of 200 s
    "ramp:from=0,to=2": lambda u: u**2,
    "ramp:from=3,to=1": lambda u: (3 * u - u**2) / 2,
    "steps:rates=1/2/5": lambda u: np.interp(u, [0, 1 / 3, 2 / 3, 1], [0, 1 / 8, 3 / 8, 1]),
    "steps:rates=0/4/1,lengths=1/1/2": lambda u: np.interp(u, [0, 0.25, 0.5, 1], [0, 0, 2 / 3, 1]),
    "burst:factor=9,length=20s": lambda u: np.interp(u, [0, 0.45, 0.55, 1], [0, 0.25, 0.75, 1]),
    "burst:factor=0,length=50s,at=0s": lambda u: np.interp(u, [0, 0.25, 1], [0, 0, 1]),
    "burst:factor=3,length=10s,every=50s,at=0": lambda u: np.interp(
        u,
        [0, 0.05, 0.25, 0.3, 0.5, 0.55, 0.75, 0.8, 1],
        np.array([0, 30, 70, 100, 140, 170, 210, 240, 280]) / 280,
    ),
    "diurnal:weights=1/3": lambda u: np.interp(u, [0, 0.5, 1], [0, 0.25, 1]),
    "diurnal": lambda u: np.interp(
        u, np.arange(25) / 24, np.cumsum([0, *MEASURED_DAY]) / sum(MEASURED_DAY)
    ),
}


@pytest.mark.parametrize("spec", SHAPES)
def test_the_rate_follows_its_curve_and_the_total_is_free(spec: str) -> None:
    times = arrival_times(spec, 500, 200, rng(3))
    assert (np.diff(times) >= 0).all()
    # Poisson: independent given their number
    assert stats.kstest(times / 200, SHAPES[spec]).pvalue > 0.001
    counts = np.array([len(arrival_times(spec, 0.5, 200, rng(seed))) for seed in range(1500)])
    assert counts.mean() == pytest.approx(100, abs=4.5 * 10 / math.sqrt(1500))
    assert counts.var(ddof=1) == pytest.approx(100, abs=4.5 * 100 * math.sqrt(2 / 1500))
    exact = arrival_times(f"{spec}{',' if ':' in spec else ':'}cv=0", 0.5, 200, rng())
    assert len(exact) == 100
    assert SHAPES[spec](exact / 200) * 100 == pytest.approx(np.arange(100), abs=1e-6)


def test_a_bursty_ramp_is_a_gamma_process_in_operational_time() -> None:
    times = arrival_times("ramp:from=0,to=2,cv=2", 500, 200, rng(3))
    gaps = np.diff(200 * (times / 200) ** 2) * 500
    assert stats.kstest(gaps, stats.gamma(0.25, scale=4).cdf).pvalue > 0.001


def test_the_day_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    # 60 in the first hour, 180 in the second
    at = [*range(0, 3600, 60), *range(3600, 7200, 20), 7200]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{t},5,5\n" for t in at))
    times = arrival_times(f"diurnal:trace={path},cv=0", 10, 100, rng())
    assert len(times) == 1000
    assert np.count_nonzero(times < 50) == pytest.approx(1000 * 60 / 241, abs=1)


def test_one_constant_stream_of_many_does_not_begin_with_the_others() -> None:
    firsts = [
        arrival_times("constant", 0.1, 100, rng(seed), one_of_many=True)[0] for seed in range(2000)
    ]
    assert stats.kstest(firsts, "uniform", args=(0, 10)).pvalue > 0.001


@pytest.mark.parametrize("spec", ["gamma:cv=3", "weibull:cv=2", "ramp:from=1,to=3", "diurnal"])
def test_a_higher_rate_is_the_same_pattern_compressed(spec: str) -> None:
    slow, fast = arrival_times(spec, 2, 100, rng(9)), arrival_times(spec, 8, 25, rng(9))
    assert fast * 4 == pytest.approx(slow, rel=1e-9)


@pytest.mark.parametrize(
    ("spec", "inline"),
    [
        ("poisson", "poisson"),
        ({"gamma": {"cv": 3}}, "gamma:cv=3"),
        ({"steps": {"rates": [1, 2.5, 4], "cv": 2}}, "steps:rates=1/2.5/4,cv=2"),
        ({"onoff": {"on": "10s", "off": "1m"}}, "onoff:on=10s,off=1m"),
        ({"diurnal": {}}, "diurnal"),
    ],
)
def test_yaml_and_inline_forms_of_arrivals(spec: object, inline: str) -> None:
    assert arrivals_text(spec) == inline
    assert arrivals_text(inline) == inline


@pytest.mark.parametrize(
    ("spec", "culprit"),
    [
        ("gama:cv=3", "arrivals 'gama:cv=3' are not known (did you mean gamma?)"),
        ("gamma", "gamma lacks cv: write gamma:cv=3"),
        ("gamma:cv=0", "cv is 0: give a number from 0.01 to 100"),
        ("gamma:cv=x", "cv is 'x'"),
        ("gamma:3", "'3' is no name=value: write gamma:cv=3"),
        ("poisson:cv=2", "poisson has no parameter 'cv': it takes none"),
        ("weibull:shape=2", "weibull has no parameter 'shape': it takes cv"),
        ("onoff:on=10s", "onoff lacks off: write onoff:on=10s,off=50s"),
        ("onoff:on=0s,off=1s", "on is '0s': give a time"),
        ("onoff:on=10 parsec,off=1s", "on is '10 parsec': give a time"),
        ("mmpp:rates=1/2,stay=1s", "2 rates and 1 stay: give as many of each"),
        ("mmpp:rates=0/0,stay=1s/1s", "rates are all 0"),
        ("ramp:from=0,to=0", "both ends of the ramp are 0"),
        ("ramp:from=-1,to=1", "from is -1"),
        ("steps:rates=1//2", "rates is ''"),
        ("steps:rates=1/2,lengths=1/0", "a step of length 0"),
        ("steps:rate=1/2", "steps has no parameter 'rate' (did you mean rates?)"),
        ("burst:factor=2,length=10s,every=5s", "length is not below every"),
        ("burst:factor=2,length=10s,cv=-1", "cv is -1"),
        ("diurnal:weights=1/2,trace=x.csv", "weights and trace exclude each other"),
        ("diurnal:step=1h", "step goes with trace"),
        ("diurnal:trace=/none.csv", "/none.csv cannot be read"),
        ({"gamma": 3}, "write {gamma: {cv: 3}} or gamma:cv=3"),
        ({}, "write {gamma: {cv: 3}}"),
    ],
)
def test_bad_arrivals_are_one_line(spec: object, culprit: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        arrivals_text(spec)
    assert culprit in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "duration_s", "culprit"),
    [
        (
            "burst:factor=0,length=60s,at=0",
            30,
            "60 s from 0 s on leave no change of rate in a stage of 30 s",
        ),
        ("burst:factor=5,length=1h", 30, "3600 s from 0 s on leave no change of rate"),
        ("burst:factor=5,length=5s,at=40s", 30, "5 s from 40 s on leave no change of rate"),
        ("burst:factor=2,length=1ms,every=2ms", 1e6, "changes more than 10000000 times"),
        ("onoff:on=1ms,off=1ms", 1e6, "changes more than 10000000 times"),
    ],
)
def test_a_curve_that_does_not_fit_the_stage_is_refused(
    spec: str, duration_s: float, culprit: str
) -> None:
    with pytest.raises(WorkloadError, match=culprit):
        arrival_times(spec, 1, duration_s, rng())


@settings(deadline=None, max_examples=often(50, 200))
@given(st.sampled_from(ARRIVALS), st.text(alphabet="0123456789=/,:.msh abceforvtny-", max_size=30))
def test_any_text_gives_arrivals_or_one_plain_line(kind: str, rest: str) -> None:
    try:
        times = arrival_times(f"{kind}:{rest}", 5, 10, rng())
    except WorkloadError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - whether it raises is up to the input
    else:
        assert (np.diff(times) >= 0).all()
        assert len(times) == 0 or (times[0] >= 0 and times[-1] < 10)
