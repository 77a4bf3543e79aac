"""The roofline: worked values, and what an operating point uses of its hardware."""

import pytest

from ampacity.analysis.decision.inputs import Range
from ampacity.analysis.decision.model import DecisionError, plain_model
from ampacity.analysis.decision.roofline import (
    Instance,
    Point,
    bandwidth_share,
    cost_floor_per_million,
    decode_floor_s,
    lever,
    pipeline_bubble,
    prefill_floor_s,
    ridge_flops_per_byte,
    speculated_tokens_per_step,
    tp_crossover,
    use_of,
)
from ampacity.simulator.models.catalog import HARDWARE, Hardware

CARD = Hardware("card", 1000e12, 2000e12, 2e12, 100e9, 1e11)
MODEL = plain_model(7e9, layers=32, kv_heads=8, head_dim=128, heads=32)  # 131,072 B a token


def test_ridge_of_an_h100() -> None:
    """989 TFLOP/s / 3.35 TB/s = 295 FLOP/byte."""
    assert ridge_flops_per_byte(HARDWARE["h100"]) == pytest.approx(295, abs=0.5)


def test_bandwidth_share_of_a_7b_model() -> None:
    """7 G x 2 B x 100 tokens/s on 2 TB/s."""
    assert bandwidth_share(14e9, 100, 2e12) == pytest.approx(0.70)


def test_cost_of_a_batch_of_one() -> None:
    """14 GB / 1,800 GB/s = 7.78 ms a token, at $0.00044/s: $3.42 a million; 0.9 accepted: $3.80."""
    step_s = 14e9 / 1800e9
    assert cost_floor_per_million(step_s, 1, 0.00044) == pytest.approx(3.42, abs=0.005)
    assert cost_floor_per_million(step_s, 1, 0.00044, 0.9) == pytest.approx(3.80, abs=0.005)


@pytest.mark.parametrize(
    ("draft", "acceptance", "tokens"),
    [(4, 0.8, 3.36), (4, 0.9, 4.10), (4, 0.0, 1.0), (4, 1.0, 5.0)],
)
def test_tokens_of_a_speculated_step(draft: int, acceptance: float, tokens: float) -> None:
    assert speculated_tokens_per_step(draft, acceptance) == pytest.approx(tokens, abs=0.005)


def test_bubble_of_a_pipeline() -> None:
    assert pipeline_bubble(4, 4) == pytest.approx(3 / 7)  # 43 %


def test_use_of_a_measured_point() -> None:
    """8 sequences of 1,000 tokens of context on average, a token each 10 ms: 800 tokens/s.

    A step reads 14 GB + 8 x 1,000 x 131,072 B = 15.049 GB in 10 ms: 1.505 TB/s of 2: 75.2 %.
    Operations: (800 + 4,000) tokens/s x 14 G = 67.2 TFLOP/s of 1,000: 6.72 %."""
    point = Point(Range(800.0, 760.0, 840.0), 0.010, 900, 200, input_tokens_per_s=4000.0)
    use = use_of(Instance(MODEL, CARD), point)
    moved = 14e9 + 8 * 1000 * 131_072
    assert use.batch == pytest.approx(8)
    assert use.context == 1000
    assert use.mbu.value == pytest.approx(moved / 0.010 / 2e12)
    assert use.mbu.value == pytest.approx(0.7524, abs=1e-4)
    # 760 tokens/s in steps of 10 ms: 7.6 sequences
    assert use.mbu.low == pytest.approx((14e9 + 7.6 * 1000 * 131_072) / 0.010 / 2e12)
    assert use.mfu.value == pytest.approx(0.0672)
    assert use.intensity == pytest.approx(8 * 14e9 / moved)
    assert use.decode_floor_s == pytest.approx(moved / 2e12)
    assert use.prefill_floor_s == pytest.approx(900 * 14e9 / 1000e12)
    assert use.tokens_per_gpu_hour.value == pytest.approx(800 * 3600)
    assert use.tokens_per_s_per_gb.high == pytest.approx(8.4)
    assert lever(use) == "75 % (75 to 76 %) of the bandwidth bound used: software can still help"


def test_above_four_fifths_the_hardware_is_the_lever() -> None:
    use = use_of(Instance(MODEL, CARD), Point(Range(900.0), 0.009, 900, 200))
    assert lever(use) == "84 % of the bandwidth bound used: hardware is the remaining lever"
    assert use.mfu is None
    # 13.6 to 17.85 sequences of 6,000 tokens: 24.7 to 28.0 GB in 17 ms of 34 GB
    wide = use_of(Instance(MODEL, CARD), Point(Range(900.0, 800.0, 1050.0), 0.017, 5000, 2000))
    assert lever(wide).endswith(
        "(73 to 82 %) of the bandwidth bound used: 80 % lies inside, so the lever cannot be told"
    )


def test_of_an_idle_endpoint_the_share_is_that_of_one_sequence() -> None:
    """Ten tokens/s of 10 ms each: a tenth of the time one sequence, whose steps read 14.1 GB."""
    use = use_of(Instance(MODEL, CARD), Point(Range(10.0, 2.0, 18.0), 0.010, 900, 200))
    share = pytest.approx((14e9 + 1000 * 131_072) / 0.010 / 2e12)
    assert (use.mbu.low, use.mbu.value, use.mbu.high) == (share, share, share)


def test_a_rate_that_no_hardware_allows_is_refused() -> None:
    """4 ms a token: the step would read 15 GB in 4 ms, 3.76 TB/s of 2."""
    with pytest.raises(DecisionError, match=r"188 % of the bandwidth .* check the number of GPUs"):
        use_of(Instance(MODEL, CARD), Point(Range(2000.0), 0.004, 900, 200))


def test_two_gpus_have_twice_the_bandwidth() -> None:
    one, two = (decode_floor_s(Instance(MODEL, CARD, n), 8, 1000) for n in (1, 2))
    assert one == pytest.approx(2 * two)


def test_a_short_prompt_is_bound_by_the_weights_that_it_reads() -> None:
    assert prefill_floor_s(Instance(MODEL, CARD), 1) == pytest.approx(14e9 / 2e12)


def test_eight_bit_weights_are_read_in_half_the_time() -> None:
    assert decode_floor_s(Instance(MODEL, CARD, weights="fp8"), 1, 0) == pytest.approx(7e9 / 2e12)


def test_requests_per_gpu_that_fall_with_the_degree() -> None:
    """10, 24 and 36 req/s on 1, 2 and 4 GPUs: 10, 12 and 9 a GPU."""
    found = tp_crossover({4: Range(36, 33, 40), 1: Range(10, 9, 11), 2: Range(24, 23, 25)})
    assert (found.lower, found.higher) == (2, 4)
    assert found.lower_rps_per_gpu == Range(12, 11.5, 12.5)
    assert found.certain  # 10 is below 11.5
    open_end = tp_crossover({2: Range(24, None, 25), 4: Range(36, 33, 40)})
    assert not open_end.certain
    assert tp_crossover({1: Range(10), 2: Range(20)}) is None
