"""Further length distributions against their closed forms, 10^5 draws each."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths import parse
from tests.support.repeats import often

N = 100_000
LEVELS = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
SMOOTH = {  # what is drawn, and the law that it must follow before rounding
    "normal:mean=5000,std=800": stats.norm(5000, 800),
    "normal:mean=400,std=300": stats.truncnorm(-399 / 300, np.inf, 400, 300),
    "gamma:mean=3000,cv=0.5": stats.gamma(4, scale=750),
    "gamma:mean=3000,cv=1": stats.expon(scale=3000),
    "pareto:start=1000,alpha=2.5": stats.pareto(2.5, scale=1000),
    "lognormal:mean=2000,cv=1.5": stats.lognorm(
        math.sqrt(math.log(3.25)), scale=2000 / math.sqrt(3.25)
    ),
}


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("spec", SMOOTH)
def test_a_distribution_is_its_closed_form(spec: str) -> None:
    law, lengths = SMOOTH[spec], parse.parse_lengths(spec, "x")
    for q in LEVELS:
        assert lengths.quantile(q) == pytest.approx(max(law.ppf(q), 1), rel=1e-6)
    assert lengths.mean() == pytest.approx(law.mean(), rel=1e-3)
    sample = lengths.sample(rng(), N)
    assert sample.dtype == np.int64
    smooth = sample + rng(2).uniform(-0.5, 0.5, N)  # rounding would be what the test sees otherwise
    assert stats.kstest(smooth, law.cdf).pvalue > 0.001
    assert sample.mean() == pytest.approx(law.mean(), rel=5 * law.std() / law.mean() / math.sqrt(N))
    if spec != "pareto:start=1000,alpha=2.5":  # its fourth moment is infinite: no sample CV to test
        assert sample.std() / sample.mean() == pytest.approx(law.std() / law.mean(), rel=0.05)


def test_uniform_gives_every_whole_number_the_same_chance() -> None:
    lengths = parse.parse_lengths("uniform:min=5,max=14", "x")
    assert (lengths.quantile(0), lengths.quantile(0.5), lengths.quantile(1), lengths.mean()) == (
        5,
        9.5,
        14,
        9.5,
    )
    counts = np.bincount(lengths.sample(rng(), N), minlength=15)
    assert counts[:5].sum() == 0
    assert stats.chisquare(counts[5:15]).pvalue > 0.001


def test_point_masses_have_their_weights() -> None:
    lengths = parse.parse_lengths("points:181=2,4096=1,7437=1", "x")
    assert lengths.mean() == (2 * 181 + 4096 + 7437) / 4
    assert [lengths.quantile(q) for q in (0.1, 0.49, 0.51, 0.74, 0.76, 1)] == json.loads("""[181, 181, 4096, 4096,
        7437, 7437]""")
    tokens, counts = np.unique(lengths.sample(rng(), N), return_counts=True)
    assert tokens.tolist() == [181, 4096, 7437]
    assert stats.chisquare(counts, N * np.array([0.5, 0.25, 0.25])).pvalue > 0.001


def test_normal_is_truncated_at_one_token_not_piled_up_there() -> None:
    lengths = parse.Normal(100, 200)  # 31 % of the normal law lies below 1
    law = stats.truncnorm(-99 / 200, np.inf, 100, 200)
    assert lengths.mean() == pytest.approx(law.mean(), rel=1e-9)
    sample = lengths.sample(rng(), N)
    assert sample.min() == 1
    assert np.mean(sample == 1) == pytest.approx(law.cdf(1.5), abs=0.001)
    assert (
        lengths.describe()["text"]
        == "normal, mean 100, std 200, truncated at 1 (31.0% would lie below and are drawn again)"
    )


def test_a_mixture_has_the_quantiles_and_the_mean_of_its_parts() -> None:
    lengths = parse.parse_lengths(
        "0.7*lognormal:p50=200,p99=800 + 0.2*gamma:mean=3000,cv=0.5 + 0.1*181", "x"
    )
    sigma = math.log(4) / stats.norm.ppf(0.99)
    parts = stats.lognorm(sigma, scale=200), stats.gamma(4, scale=750)

    def cdf(x: float) -> float:
        return 0.7 * parts[0].cdf(x) + 0.2 * parts[1].cdf(x) + 0.1 * (x >= 181)

    for q in (0.01, 0.1, 0.25, 0.6, 0.9, 0.99, 0.999):
        assert cdf(lengths.quantile(q)) == pytest.approx(q, abs=5e-4)
    assert lengths.quantile(cdf(180.99) + 0.05) == pytest.approx(181, abs=0.01)  # within the jump
    assert lengths.mean() == pytest.approx(
        0.7 * 200 * math.exp(sigma**2 / 2) + 0.2 * 3000 + 0.1 * 181, rel=1e-4
    )
    sample = lengths.sample(rng(), N)
    assert np.mean(sample == 181) == pytest.approx(
        0.1 + 0.7 * np.diff(parts[0].cdf([180.5, 181.5]))[0], abs=0.004
    )
    smooth = sample[sample != 181] + rng(2).uniform(-0.5, 0.5, np.count_nonzero(sample != 181))
    assert (
        stats.kstest(smooth, lambda x: (0.7 * parts[0].cdf(x) + 0.2 * parts[1].cdf(x)) / 0.9).pvalue
        > 0.001
    )


@pytest.mark.parametrize(
    ("free", "maximum", "share"),
    [
        (
            parse.LogNormal(200, 800),
            400,
            1 - stats.norm.cdf(math.log(2) / (math.log(4) / stats.norm.ppf(0.99))),
        ),
        (parse.Gamma(3000, 1), 6000, math.exp(-2)),
        (parse.Pareto(1000, 2), 4000, 1 / 16),
        (parse.Empirical.from_quantiles({0: 1, 0.5: 101, 1: 201}), 151, 0.25),
        (parse.Points((10, 20), (3, 1)), 10, 0.25),
    ],
)
def test_truncation_to_the_context_reports_the_share_that_is_cut(
    free: parse.Lengths, maximum: int, share: float
) -> None:
    assert free.share_above(maximum) == pytest.approx(share, abs=1e-9)
    cut = parse.Clipped(free, 1, maximum)
    described = cut.describe()
    assert described["truncated_share"] == pytest.approx(share, abs=1e-9)
    assert f"at most {maximum} ({share:.1%} are cut to it)" in described["text"]
    assert described["kind"] == free.kind
    sample = cut.sample(rng(), N)
    assert sample.max() == maximum
    if not isinstance(free, parse.Points):
        assert np.mean(sample == maximum) == pytest.approx(share, abs=0.006)
    assert sample.mean() == pytest.approx(cut.mean(), rel=0.02)


def test_pareto_without_a_mean_is_censored_where_a_record_ends() -> None:
    lengths = parse.Pareto(100, 0.5)
    assert lengths.mean() == pytest.approx(
        100 * (1 + (math.sqrt(parse.MAX_TOKENS / 100) - 1) / 0.5), rel=1e-9
    )
    assert lengths.sample(rng(), N).max() == parse.MAX_TOKENS
    assert lengths.quantile(1) == parse.MAX_TOKENS
    assert parse.Pareto(100, 1).mean() == pytest.approx(
        100 * (1 + math.log(parse.MAX_TOKENS / 100))
    )


def test_the_two_forms_of_a_log_normal_are_one() -> None:
    by_mean = parse.LogNormal.from_mean(2000, 1.5)
    sigma = math.sqrt(math.log(3.25))
    assert by_mean.p50 == pytest.approx(2000 / math.sqrt(3.25))
    assert by_mean.p99 == pytest.approx(by_mean.p50 * math.exp(sigma * stats.norm.ppf(0.99)))
    assert by_mean.mean() == pytest.approx(2000, rel=1e-3)  # less what is censored at 1


PAIRS = [
    (parse.LogNormal(1000, 4000), parse.LogNormal(200, 900)),
    (
        parse.Empirical.from_quantiles({0: 1, 0.3: 181, 0.5: 181, 1: 5000}),
        parse.LogNormal(300, 900),
    ),
    (
        parse.Mixture((parse.LogNormal(100, 300), parse.Fixed(512)), (0.7, 0.3)),
        parse.Points((10, 100, 1000), (1, 1, 1)),
    ),
]


@pytest.mark.parametrize("wanted", [-0.5, 0.07, 0.8])
@pytest.mark.parametrize("pair", PAIRS, ids=["smooth", "spike", "ties"])
def test_rank_correlation_is_met_and_the_margins_stay(
    pair: tuple[parse.Lengths, parse.Lengths], wanted: float
) -> None:
    copula = parse.fit_copula(*pair, wanted)
    if pair is PAIRS[0]:  # without ties: r = 2 sin(pi rho / 6)
        assert copula == pytest.approx(2 * math.sin(math.pi * wanted / 6), abs=0.025)
    drawn = parse.draw_pairs(*pair, copula, (rng(3), rng(4)), N)
    assert stats.spearmanr(*drawn).statistic == pytest.approx(wanted, abs=0.03)
    for lengths, sample in zip(pair, drawn, strict=True):
        alone = lengths.sample(rng(5), N)
        assert stats.ks_2samp(sample, alone).pvalue > 0.001


def test_correlation_out_of_reach_is_refused() -> None:
    with pytest.raises(
        WorkloadError, match=r"correlation 0.4 is out of reach: too many requests share one"
    ):
        parse.fit_copula(parse.Fixed(10), parse.LogNormal(100, 400), 0.4)
    with pytest.raises(WorkloadError, match="above -1 and below 1"):
        parse.fit_copula(parse.LogNormal(100, 400), parse.LogNormal(100, 400), 1)


EVERY = [
    parse.Uniform(1, 9),
    parse.Normal(50, 20),
    parse.Gamma(50, 2),
    parse.Pareto(5, 1.2),
    parse.Points((1, 5), (1, 2)),
    parse.Clipped(parse.Gamma(9, 1), 2, 8),
    parse.Mixture((parse.Fixed(3), parse.Gamma(50, 2)), (1, 2)),
]


@pytest.mark.parametrize("lengths", EVERY)
def test_first_lengths_do_not_depend_on_how_many_are_drawn(lengths: parse.Lengths) -> None:
    assert lengths.sample(rng(5), 10).tolist() == lengths.sample(rng(5), 1000)[:10].tolist()
    json.dumps(lengths.describe(), allow_nan=False)
    pair = lengths, parse.Gamma(20, 1)
    few, many = (parse.draw_pairs(*pair, 0.5, (rng(1), rng(2)), n)[1] for n in (10, 100))
    assert few.tolist() == many[:10].tolist()


@pytest.mark.parametrize(
    ("inline", "mapping"),
    [
        ("uniform:min=1,max=9", {"uniform": {"min": 1, "max": 9}}),
        ("normal:mean=50,std=20,max=90", {"normal": {"mean": 50, "std": 20}, "max": 90}),
        ("gamma:mean=50,cv=2,min=5,max=99", {"gamma": {"mean": 50, "cv": 2, "min": 5, "max": 99}}),
        ("pareto:start=5,alpha=1.2", {"pareto": {"start": 5, "alpha": 1.2}}),
        ("points:181=0.3,512=0.7", {"points": {512: 0.7, 181: 0.3}}),
        ("lognormal:mean=50,cv=2,max=400", {"lognormal": {"mean": 50, "cv": 2}, "max": 400}),
        (
            "0.7*lognormal:p50=1e+2,p99=4e+2 + 0.3*512",
            json.loads("""{"mixture": [{"weight": 0.7, "lognormal": {"p50": 100,
                "p99": 400}}, {"weight": 0.3, "fixed": 512}]}"""),
        ),
    ],
)
def test_inline_and_yaml_forms_say_the_same(inline: str, mapping: object) -> None:
    assert parse.parse_lengths(inline, "x") == parse.parse_lengths(mapping, "x")


@pytest.mark.parametrize(
    ("spec", "culprit"),
    [
        ("uniform:min=9,max=1", "maximum \\(1\\) is below minimum \\(9\\)"),
        ("uniform:min=1", "uniform lacks max: write uniform:min=100,max=200"),
        ("uniform:min=0,max=5", "minimum is 0"),
        (
            "normal:mean=50,sd=3",
            "normal has no parameter 'sd' \\(did you mean std\\?\\): it takes mean and std",
        ),
        ("normal:mean=-5,std=3", "mean is -5"),
        ("gamma:mean=50,cv=0", "cv is 0"),
        ("gamma:mean=50,cv=nan", "cv is 'nan'|cv is nan"),
        ("gama:mean=50,cv=1", "no length distribution \\(did you mean gamma\\?\\)"),
        ("pareto:start=0.5,alpha=1", "start is 0.5"),
        ("pareto:start=5,alpha=-1", "alpha is -1"),
        ("points:0=1", "tokens is 0"),
        ("points:5=0", "weight 0"),
        ("points:5=-1,6=2", "weight -1"),
        ("lognormal:mean=100", "lognormal lacks cv"),
        ("lognormal:cv=1,mean=0", "mean is 0"),
        ("0.7*gamma:mean=5,cv=1 + gamma:mean=5,cv=1", "cv is given twice"),
        ("0*5 + 1*6", "weight 0"),
        ("*5", "no mixture"),
        ({"mixture": []}, "at least one part"),
        ({"mixture": [{"fixed": 5}]}, "has no weight"),
        ({"mixture": [{"weight": "x", "fixed": 5}]}, "weight is 'x'"),
        ({"mixture": 5}, "no length distribution"),
        ({"max": 5}, "no length distribution"),
        ({"fixed": 5, "max": 0}, "maximum is 0"),
    ],
)
def test_a_bad_distribution_is_one_line_that_names_place_and_culprit(
    spec: object, culprit: str
) -> None:
    with pytest.raises(WorkloadError, match=culprit) as caught:
        parse.parse_lengths(spec, "mix.yaml: input_tokens")
    assert str(caught.value).startswith("mix.yaml: input_tokens: ")
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=often(15, 60))
@given(
    st.lists(
        st.tuples(st.floats(0.01, 10), st.integers(1, 5000), st.floats(1, 30)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 1.0]) | st.floats(1e-12, 1 - 1e-12),
)
def test_quantiles_of_any_mixture_rise_and_stay_within_its_parts(
    parts: list[tuple[float, int, float]], q: float
) -> None:
    mixture = parse.Mixture(
        tuple(parse.LogNormal(p50, p50 * r) for _, p50, r in parts), tuple(w for w, _, _ in parts)
    )
    each = [part.quantile(q) for part in mixture.parts]
    assert mixture.quantile(q / 2) <= mixture.quantile(q)
    assert min(each) * 0.98 - 1 <= mixture.quantile(q) <= max(each) * 1.02 + 1
