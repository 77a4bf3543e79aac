"""The memory floor: the worked values of a 70B model, and the arithmetic around them."""

import pytest

from ampacity.analysis.decision import memory
from ampacity.analysis.decision.model import DecisionError, plain_model
from ampacity.simulator.models.catalog import HARDWARE

GB = 1e9
FP16 = memory.Needed(weights=140 * GB, kv=104 * GB, activations=28 * GB, overhead=15 * GB)
FP8 = memory.Needed(weights=70 * GB, kv=52 * GB, activations=28 * GB, overhead=15 * GB)


@pytest.mark.parametrize(
    ("needed", "headroom", "total", "gpus", "degree"),
    [
        # 287 / 80 = 3.6; x 1.3 = 4.7; x 1.5 = 5.4; degrees that divide 64 heads: 1, 2, 4, 8, ...
        pytest.param(FP16, 0.0, 287, 4, 4, id="fp16"),
        pytest.param(FP16, 0.3, 287, 5, 8, id="fp16-30"),
        pytest.param(FP16, 0.5, 287, 6, 8, id="fp16-50"),
        pytest.param(FP8, 0.0, 165, 3, 4, id="fp8"),  # 165 / 80 = 2.1
    ],
)
def test_gpus_by_memory(
    needed: memory.Needed, headroom: float, total: int, gpus: int, degree: int
) -> None:
    assert needed.total == total * GB
    floor = memory.floor_of(needed, 80 * GB, heads=64, headroom=headroom)
    assert (floor.gpus, floor.tensor_parallel) == (gpus, degree)


def test_the_overhead_comes_off_each_gpu_unless_it_is_stated() -> None:
    """150 GB on cards of 80: two hold 160, but 148 with 7.5 % taken; 155 with 5 GB stated."""
    assert memory.gpus_needed(memory.Needed(150 * GB, 0, 0), 80 * GB) == 3
    assert memory.gpus_needed(memory.Needed(150 * GB, 0, 0, overhead=5 * GB), 80 * GB) == 2


def test_needed_of_a_model_is_the_sum_of_its_parts() -> None:
    """10 sequences of 1,000 tokens of 131,072 B; 16 G of weights; 20 % of them; 4 x 50 MB."""
    shape = plain_model(8e9, layers=32, kv_heads=8, head_dim=128, heads=32)
    needed = memory.memory_needed(shape, 10, 1000, adapters=memory.Adapters(4, 50e6))
    assert needed.weights == 16e9
    assert needed.kv == 10 * 1000 * 131_072
    assert needed.activations == pytest.approx(3.2e9)
    assert needed.adapters == 200e6
    quantised = memory.memory_needed(shape, 10, 1000, weights="int4", kv="fp8")
    assert quantised.weights == 4e9
    assert quantised.kv == needed.kv / 2
    assert quantised.activations == needed.activations  # of the weights in 16 bits


@pytest.mark.parametrize(
    ("tokens", "held"), [(2_000, 234), (8_000, 58), (32_000, 14), (128_000, 3)]
)
def test_sequences_in_a_pool_of_60_gb(tokens: int, held: int) -> None:
    assert memory.sequences_held(60 * GB, tokens * 128e3) == held


@pytest.mark.parametrize(
    ("precision", "size"),
    [("fp16", 2), ("bf16", 2), ("fp8", 1), ("int8", 1), ("int4", 0.5), ("nvfp4", 0.5625)],
)
def test_bytes_of_a_number(precision: str, size: float) -> None:
    """NVFP4: 4 bits, and one FP8 scale for each 16 numbers: 4 + 8 / 16 = 4.5 bits."""
    assert memory.element_bytes(precision) == size


def test_a_precision_that_is_none() -> None:
    with pytest.raises(
        DecisionError, match=r"'fp12' \(--weights, --kv\) is none of fp16, bf16, fp8"
    ):
        memory.element_bytes("fp12")


def test_valid_degrees_are_the_divisors_of_the_heads() -> None:
    assert memory.valid_degrees(64) == (1, 2, 4, 8, 16, 32, 64)
    assert memory.valid_degrees(12) == (1, 2, 3, 4, 6, 12)


def test_what_the_pool_of_an_instance_holds() -> None:
    """8B on one A100-80: 80 GiB x 0.925 - 16.06 GB - 3.212 GB = 60.185 GB; 131,072 B a token."""
    shape = plain_model(8.03e9, layers=32, kv_heads=8, head_dim=128, heads=32)
    fit = memory.does_it_fit(
        shape,
        memory.memory_needed(shape, 20, 4096),
        HARDWARE["a100-80"],
        {"p50": 2048, "p95": 8192},
    )
    pool = 80 * 2**30 * 0.925 - 8.03e9 * 2 * 1.2
    assert fit.gpus == 1
    assert fit.pool_bytes == pytest.approx(pool)
    assert fit.sequences == {"p50": 224, "p95": 56}  # 60.185e9 / 131,072 = 459,175 tokens
    assert [floor.headroom for floor in fit.floors] == [0.0, 0.3, 0.5]


def test_more_gpus_than_the_heads_can_be_split_over() -> None:
    shape = plain_model(700e9, layers=60, kv_heads=2, head_dim=128, heads=2)
    with pytest.raises(DecisionError, match="more than its 2 heads can be split over"):
        memory.does_it_fit(shape, memory.memory_needed(shape, 1, 1000), HARDWARE["l4"], {})
