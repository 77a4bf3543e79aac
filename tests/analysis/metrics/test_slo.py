"""SLO texts: what is read, what is refused and with which advice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampacity.analysis.slo import (
    METRICS,
    SLO_SETS,
    Slo,
    SloError,
    parse_duration,
    parse_slo,
    parse_slos,
    slo_from_dict,
)


@pytest.mark.parametrize(
    ("text", "metric", "quantile", "limit_s"),
    [
        ("ttft_p99=2s", "ttft", 0.99, 2.0),
        ("itl_p99=50ms", "itl", 0.99, 0.05),
        ("tpot_p95=300us", "tpot", 0.95, 0.0003),
        ("e2e_p99.9=1.5m", "e2e", 0.999, 90.0),
        ("first_answer_p50 = 2 s", "first_answer", 0.5, 2.0),
        ("icl_p90=.5s", "icl", 0.9, 0.5),
        ("ttft_p5=1s", "ttft", 0.05, 1.0),
        ("ttft_p99.999=1s", "ttft", 0.99999, 1.0),
        ("ttft_max=5s", "ttft", 1.0, 5.0),
        ("itl_min=1ms", "itl", 0.0, 0.001),
    ],
)
def test_reads(text: str, metric: str, quantile: float, limit_s: float) -> None:
    assert parse_slo(text) == Slo(metric, quantile, pytest.approx(limit_s))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("ttft_p99=2", "write a number above 0 and its unit"),  # a bare number
        ("ttft_p99", "no '='"),
        ("ttft=2s", "write ttft_p99=2s"),
        ("latency_p99=2s", "allowed are ttft, itl, icl, tpot, e2e, first_answer"),
        ("ttft_p100=2s", "not above p0 and below p100"),
        ("ttft_p0=2s", "the extremes are min and max"),
        ("ttft_pmax=2s", "the extremes are min and max"),
        ("ttft_mean=2s", "names no percentile"),
        ("ttft_p99=2y", "write a number above 0 and its unit"),
        ("ttft_p99=fast", "write a number above 0 and its unit"),
        ("ttft_p99=0s", "write a number above 0 and its unit"),
        ("ttft_p99=-2s", "write a number above 0 and its unit"),
    ],
)
def test_refuses_in_one_line_with_an_example(text: str, advice: str) -> None:
    with pytest.raises(SloError) as caught:
        parse_slo(text)
    message = str(caught.value)
    assert advice in message
    assert text in message
    assert "\n" not in message
    assert "for example ttft_p99=2s" in message


def test_the_same_slo_twice_counts_once_and_two_limits_are_refused() -> None:
    assert [s.text for s in parse_slos(["ttft_p99=2s", "itl_p99=50ms", "ttft_p99=2000ms"])] == [
        "ttft_p99=2s",
        "itl_p99=50ms",
    ]
    with pytest.raises(SloError, match="given as 2s and as 3s: keep one"):
        parse_slos(["ttft_p99=2s", "ttft_p99=3s"])


@given(
    st.sampled_from(list(METRICS)),
    st.sampled_from(["p0.1", "p5", "p50", "p99", "p99.9", "p99.999", "min", "max"]),
    st.integers(1, 10**7),
    st.sampled_from(["us", "ms", "s", "m"]),
    st.sampled_from(["", "chat:", "a b:"]),
)
def test_canonical_text_is_read_back(
    metric: str, level: str, number: int, unit: str, of: str
) -> None:
    first = "2s+" if metric == "fluidity" else ""
    slo = parse_slo(f"{of}{metric}_{level}={first}{number}{unit}")
    assert parse_slo(slo.text) == slo
    assert slo_from_dict(slo.as_dict()) == slo


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for read in (parse_slo, parse_duration):
        try:
            read(text)
            message = ""
        except SloError as refused:
            message = str(refused)
        assert "\n" not in message


def test_broken_entry_of_run_json_is_named() -> None:
    whole = parse_slo("ttft_p99=2s").as_dict()
    for broken, why in (
        ({"metric": "ttft", "quantile": 0.99}, "no SLO as its text"),
        (whole | {"text": 5}, "no SLO as its text"),
        (whole | {"text": "ttft_p999=2s"}, "is not above p0 and below p100"),
        (whole | {"quantile": 99}, "whose text is another SLO"),
        (whole | {"limit_s": 3.0}, "whose text is another SLO"),
    ):
        with pytest.raises(SloError, match=why):
            slo_from_dict(broken)


def test_classes_error_rates_and_token_deadlines() -> None:
    assert parse_slo("chat:ttft_p99=2s") == Slo("ttft", 0.99, 2.0, "chat")
    rate = parse_slo("error_rate=0.5%")
    assert (rate.metric, rate.quantile, rate.text) == (
        "error_rate",
        pytest.approx(0.995),
        "error_rate=0.5%",
    )
    assert rate.as_dict()["limit_s"] is None
    assert slo_from_dict(rate.as_dict()) == rate
    fluid = parse_slo("fluidity_p95=2s+50ms")
    assert (fluid.first_s, fluid.limit_s, fluid.text) == (2.0, 0.05, "fluidity_p95=2s+50ms")
    names = [s.name for s in parse_slos(["ttft_p99=2s", "chat:ttft_p99=1s", "error_rate=1%"])]
    assert names == ["ttft_p99", "chat:ttft_p99", "error_rate"]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("error_rate=1", "write error_rate=1%"),
        ("error_rate=0%", "from 0.1% to 50%"),
        ("error_rate=90%", "from 0.1% to 50%"),
        ("fluidity_p99=2s", "write fluidity_p99=2s+50ms"),
        (":ttft_p99=2s", "names no class"),
        ("interactiv", "is no named set"),
    ],
)
def test_refuses_what_is_half_an_slo(text: str, advice: str) -> None:
    with pytest.raises(SloError, match=r"^SLO") as caught:
        parse_slos([text])
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_named_sets_are_the_table_with_its_source() -> None:
    # mlperf.conf: llama2-70b Server 2000/200 ms, interactive 450/40 ms; gptj 20 s end to end
    found = parse_slos(["mlperf-llama2-70b"])
    assert [s.text for s in found] == ["ttft_p99=2s", "tpot_p99=200ms"]
    assert "mlperf.conf" in str(found[0].as_dict()["source"])
    assert [s.text for s in parse_slos(["mlperf-llama2-70b-interactive"])] == [
        "ttft_p99=450ms",
        "tpot_p99=40ms",
    ]
    assert [s.text for s in parse_slos(["chat:mlperf-gptj"])] == ["chat:e2e_p99=20s"]
    assert [s.text for s in parse_slos(["batch"])] == ["error_rate=1%"]
    for name, (_, source) in SLO_SETS.items():
        assert parse_slos([name])
        assert source
