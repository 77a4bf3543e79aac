"""Length distributions against their formulas."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths import parse

Z_90, Z_99 = 1.2815515655446004, 2.3263478740408408  # tables of the normal distribution


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_quantile(sample: np.ndarray, q: float, value: float) -> None:
    """The share at or below ``value`` is q within 4.5 standard errors (ties: value lies within the
    jump)."""
    n = len(sample)
    margin = 4.5 * math.sqrt(q * (1 - q) / n)
    assert np.mean(sample <= math.ceil(value)) >= q - margin
    assert np.mean(sample < math.floor(value)) <= q + margin


def test_log_normal_quantiles_are_the_formula() -> None:
    lengths = parse.LogNormal(p50=1020, p99=4142)
    assert lengths.quantile(0.5) == 1020
    assert lengths.quantile(0.99) == 4142
    sigma = math.log(4142 / 1020) / Z_99  # 0.60238
    # 2207.4
    assert lengths.quantile(0.9) == pytest.approx(1020 * math.exp(sigma * Z_90), rel=1e-12)
    assert lengths.quantile(0.1) == pytest.approx(1020 * math.exp(-sigma * Z_90), rel=1e-12)


def test_log_normal_mean_is_the_closed_form() -> None:
    lengths = parse.LogNormal(p50=200, p99=800)
    sigma = math.log(4) / Z_99
    assert lengths.mean() == pytest.approx(200 * math.exp(sigma**2 / 2), rel=1e-6)


@pytest.mark.parametrize("bounds", [(1, 300), (100, None), (150, 400), (500, 900), (1, 20)])
def test_censored_log_normal_mean_agrees_with_the_integral_of_its_quantiles(
    bounds: tuple[int, int | None],
) -> None:
    lengths = parse.Clipped(parse.LogNormal(200, 800), minimum=bounds[0], maximum=bounds[1])
    integral, _ = integrate.quad(lengths.quantile, 0, 1, limit=500)
    assert lengths.mean() == pytest.approx(integral, rel=2e-4)


def test_log_normal_samples_follow_the_distribution() -> None:
    lengths = parse.LogNormal(p50=1020, p99=4142)
    sample = lengths.sample(rng(), 100_000)
    assert sample.dtype == np.int64
    for q in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        assert_quantile(sample, q, lengths.quantile(q))
    sigma = math.log(4142 / 1020) / Z_99
    # Spread over half a token: rounding would be what the test sees otherwise.
    smooth = sample + rng(2).uniform(-0.5, 0.5, len(sample))
    assert stats.kstest(np.log(smooth), "norm", args=(math.log(1020), sigma)).pvalue > 0.001
    assert sample.mean() == pytest.approx(lengths.mean(), rel=0.01)


def test_maximum_censors_so_that_the_bound_carries_the_tail() -> None:
    lengths = parse.Clipped(parse.LogNormal(p50=200, p99=800), maximum=400, minimum=50)
    sample = lengths.sample(rng(), 100_000)
    assert sample.min() == 50
    assert sample.max() == 400
    # P[X > 400] = P[Z > z_0.99 / 2] = 0.1224
    above = 1 - stats.norm.cdf(math.log(2) / (math.log(4) / Z_99))
    assert above == pytest.approx(0.1224, abs=1e-4)
    assert np.mean(sample == 400) == pytest.approx(above, abs=0.006)  # and what rounds up to 400
    assert lengths.quantile(0.99) == 400
    assert sample.mean() == pytest.approx(lengths.mean(), rel=0.01)


def test_log_normal_without_spread_is_its_median() -> None:
    lengths = parse.LogNormal(p50=300, p99=300)
    assert set(lengths.sample(rng(), 50).tolist()) == {300}
    assert [lengths.quantile(q) for q in (0, 0.5, 1)] == [300, 300, 300]
    assert lengths.mean() == pytest.approx(300)


def test_extreme_tails_stay_within_what_a_record_holds() -> None:
    lengths = parse.LogNormal(p50=1, p99=parse.MAX_TOKENS)
    sample = lengths.sample(rng(), 10_000)
    assert sample.min() == 1
    assert sample.max() == parse.MAX_TOKENS
    assert (lengths.quantile(0), lengths.quantile(1)) == (1, parse.MAX_TOKENS)


def test_fixed() -> None:
    lengths = parse.Fixed(512)
    assert lengths.sample(rng(), 3).tolist() == [512, 512, 512]
    assert (lengths.quantile(0.01), lengths.mean()) == (512, 512)


def test_quantile_table_interpolates() -> None:
    lengths = parse.Empirical.from_quantiles({1: 4000, 0: 1, 0.5: 101})
    assert lengths.quantile(0.25) == 51  # half way from 1 to 101
    assert lengths.quantile(0.75) == 2050.5  # half way from 101 to 4000
    assert lengths.mean() == 0.5 * (1 + 101) / 2 + 0.5 * (101 + 4000) / 2
    sample = lengths.sample(rng(), 100_000)
    for q in (0.05, 0.25, 0.5, 0.75, 0.99):
        assert_quantile(sample, q, lengths.quantile(q))
    assert sample.mean() == pytest.approx(lengths.mean(), rel=0.02)
    assert sample.min() >= 1
    assert sample.max() <= 4000


def test_samples_keep_their_quantiles_and_their_spikes() -> None:
    data = [181] * 20 + list(range(300, 380)) + [5000]
    lengths = parse.Empirical.from_samples(reversed(data))
    for q in (0, 0.1, 0.5, 0.99, 1):
        assert lengths.quantile(q) == pytest.approx(np.quantile(data, q))
    sample = lengths.sample(rng(), 50_000)
    assert np.mean(sample == 181) == pytest.approx(0.19, abs=0.01)  # 19 of 100 steps are flat
    assert parse.Empirical.from_samples([7]).sample(rng(), 4).tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize(
    "lengths",
    [
        parse.Fixed(9),
        parse.LogNormal(100, 400),
        parse.Empirical.from_samples([3, 90, 4000]),
        parse.Empirical.from_quantiles({0: 1, 1: 9}),
    ],
)
def test_first_lengths_do_not_depend_on_how_many_are_drawn(lengths: parse.Lengths) -> None:
    assert lengths.sample(rng(5), 10).tolist() == lengths.sample(rng(5), 1000)[:10].tolist()


def test_describe_is_json_and_reads_as_a_sentence() -> None:
    described = json.loads(json.dumps(parse.LogNormal(1020, 4142).describe(), allow_nan=False))
    assert (described["kind"], described["p50"], described["p99"]) == ("lognormal", 1020, 4142)
    assert described["text"] == "log-normal, p50 1020, p99 4142"
    expected = "log-normal, p50 200, p99 800, at least 5, at most 4096"
    assert parse.Clipped(parse.LogNormal(200, 800), 5, 4096).describe()["text"] == expected
    assert parse.Fixed(512).describe() == json.loads("""{"kind": "fixed", "p50": 512, "p99": 512,
        "mean": 512, "text": "fixed at 512"}""")
    expected = "empirical (3 samples), p50 3, p99 4.96"
    assert parse.Empirical.from_samples([1, 3, 5]).describe()["text"] == expected


@pytest.mark.parametrize(
    ("spec", "lengths"),
    [
        (512, parse.Fixed(512)),
        ("512", parse.Fixed(512)),
        (512.0, parse.Fixed(512)),
        ("fixed:512", parse.Fixed(512)),
        ({"fixed": 512}, parse.Fixed(512)),
        ("lognormal:p50=1020,p99=4142", parse.LogNormal(1020, 4142)),
        (
            "lognormal: p50=200, p99=800, max=4096",
            parse.Clipped(parse.LogNormal(200, 800), maximum=4096),
        ),
        ("lognormal:p50=1e2,p99=4e2,min=10", parse.Clipped(parse.LogNormal(100, 400), minimum=10)),
        (
            {"lognormal": {"p50": 200, "p99": "800", "max": 4096, "min": 2}},
            parse.Clipped(parse.LogNormal(200, 800), 2, 4096),
        ),
        ({"empirical": [100, 1, 10]}, parse.Empirical((0, 0.5, 1), (1, 10, 100), "3 samples")),
        ({"quantiles": {"1": 4000, 0: 1, 0.5: 100}}, parse.Empirical((0, 0.5, 1), (1, 100, 4000))),
    ],
)
def test_forms_of_a_length(spec: object, lengths: parse.Lengths) -> None:
    assert parse.parse_lengths(spec, "--input-tokens") == lengths


@pytest.mark.parametrize(
    ("spec", "culprit"),
    [
        (0, "whole number of tokens from 1"),
        (-5, "-5"),
        (1.5, "whole number"),
        (True, "True"),
        (None, "None"),
        (math.nan, "nan"),
        (10**400, "whole number|write"),
        ("many", "'many'"),
        ("normal:mean=3", "normal"),
        ("lognormal:", "no name=value"),
        ("lognormal:p50=10", "lacks p99"),
        ("lognormal:p50=10,p99=5", "p99 \\(5\\) is below p50 \\(10\\)"),
        ("lognormal:p50=0,p99=5", "p50 is 0"),
        ("lognormal:p50=10,p99=inf", "p99 is"),
        ("lognormal:p50=10,p99=x", "p99 is 'x'"),
        ("lognormal:p50=10,p50=11,p99=20", "p50 is given twice"),
        ("lognormal:p50=10,p99=20,mean=3", "no parameter 'mean'"),
        ("lognormal:p50=10,p99=20,min=8,max=4", "maximum \\(4\\) is below minimum \\(8\\)"),
        ({}, "no length distribution"),
        ({"fixed": 1, "lognormal": {}}, "no length distribution"),
        ({"lognormal": 5}, "no list of parameters"),
        ({"empirical": []}, "at least one length"),
        ({"empirical": [5, 0]}, "0"),
        ({"empirical": 5}, "empirical"),
        ({"quantiles": {0: 1}}, "levels 0 and 1"),
        ({"quantiles": {0.1: 1, 1: 5}}, "begin at level 0"),
        ({"quantiles": {0: 1, 99: 5}}, "outside 0 to 1"),
        ({"quantiles": {0: 9, 1: 5}}, "fall"),
        ({"quantiles": {0: 0, 1: 5}}, "no length"),
    ],
)
def test_a_bad_length_is_one_line_that_names_place_and_culprit(spec: object, culprit: str) -> None:
    with pytest.raises(WorkloadError, match=culprit) as caught:
        parse.parse_lengths(spec, "chat.yaml: input_tokens")
    assert str(caught.value).startswith("chat.yaml: input_tokens: ")
    assert "\n" not in str(caught.value)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
yaml_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["lognormal", "fixed", "empirical", "quantiles", "p50", "p99", "min", "max"]
            )
            | scalars,
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(deadline=None)
@example({"\x1e": None})
@given(yaml_values | st.text().map(lambda text: f"lognormal:{text}"))
def test_any_value_gives_lengths_or_one_plain_line(spec: object) -> None:
    try:
        lengths = parse.parse_lengths(spec, "here")
    except WorkloadError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - whether it raises is up to the input
    else:
        sample = lengths.sample(rng(), 20)
        assert (sample >= 1).all()
        assert (sample <= parse.MAX_TOKENS).all()
        json.dumps(lengths.describe(), allow_nan=False)


@settings(deadline=None)
@given(
    st.floats(1, 1e6),
    st.floats(1, 200),
    st.integers(1, 1000),
    st.none() | st.integers(1000, 10**6),
    st.floats(0, 1),
)
def test_log_normal_quantiles_rise_and_stay_in_bounds(
    p50: float, ratio: float, low: int, high: int | None, q: float
) -> None:
    lengths = parse.Clipped(parse.LogNormal(p50, p50 * ratio), low, high)
    assert low <= lengths.quantile(q / 2) <= lengths.quantile(q) <= (high or parse.MAX_TOKENS)
    assert low * (1 - 1e-9) <= lengths.mean() <= (high or parse.MAX_TOKENS) * (1 + 1e-9)
