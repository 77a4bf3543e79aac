"""Presets and step times against figures worked out from the data sheets and model cards."""

import pytest

from simulator import SimulatorError
from simulator.hardware import (
    A100_80,
    H100,
    L4,
    LLAMA3_8B,
    LLAMA3_70B,
    PRESETS,
    QWEN25_1_5B,
    Hardware,
    Model,
    engine_config,
    find_config,
    linear_config,
    roofline,
)
from simulator.steptime import Linear

KIB, GIB = 1024, 1 << 30
ROUND_GPU = Hardware("round", 1e15, 2e15, 1.8e12, 80e9, 100e9, bandwidth_factor=1.0, compute_factor=1.0)
DENSE_7B = Model("dense-7b", 7e9, 7e9, 32, 32, 32, 128, 4096)


@pytest.mark.parametrize(
    ("model", "kib"),
    # 2 (key, value) x layers x KV heads x head size x 2 bytes
    [(LLAMA3_8B, 128), (LLAMA3_70B, 320), (QWEN25_1_5B, 28)],
)
def test_kv_bytes_per_token(model: Model, kib: int) -> None:
    assert model.kv_bytes_per_token() == kib * KIB
    assert model.kv_bytes_per_token(1.0) == kib * KIB / 2


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    # Llama-3 8B, FP16: 256 MiB, 1 GiB, 4 GiB and 16 GiB each, of 60e9 bytes
    [(2048, 223), (8192, 55), (32768, 13), (131072, 3)],
)
def test_sequences_that_fit_a_60_gb_pool(tokens: int, sequences: int) -> None:
    assert LLAMA3_8B.sequences_in(60e9, tokens) == sequences
    # FP8 entries are half as large
    assert LLAMA3_8B.sequences_in(60e9, tokens, 1.0) == int(60e9 // (tokens * 64 * KIB))


def test_dense_7b_has_a_floor_of_7_8_ms() -> None:
    step = roofline(ROUND_GPU, DENSE_7B, overhead_s=0.0)
    # 14 GB / 1,800 GB/s
    assert step.seconds(1, 1, 0, 0.0, 0) == pytest.approx(7.7778e-3, rel=1e-4)
    # 1,000 tokens of context at 512 KiB each add 0.29 ms
    assert step.seconds(1, 1, 1000, 1000.0, 0) == pytest.approx((14e9 + 1000 * 512 * KIB) / 1.8e12)


def test_prefill_is_bound_by_compute() -> None:
    step = roofline(ROUND_GPU, DENSE_7B, overhead_s=0.0)
    # 2 x 7e9 operations a token; attention 4 x 32 layers x 4096 for each pair
    pairs = 2048 * 2049 / 2
    assert step.seconds(1, 2048, 2048, pairs, 1) == pytest.approx(
        (2048 * 14e9 + pairs * 4 * 32 * 4096) / 1e15, rel=1e-9
    )
    halved = roofline(ROUND_GPU, DENSE_7B, precision="fp8", overhead_s=0.0)
    assert halved.seconds(1, 2048, 0, 0.0, 1) == pytest.approx(2048 * 14e9 / 2e15)
    assert halved.seconds(1, 1, 0, 0.0, 0) == pytest.approx(7e9 / 1.8e12)


def test_tensor_parallel_splits_work_and_pays_all_reduce() -> None:
    one = roofline(ROUND_GPU, DENSE_7B, overhead_s=0.0)
    four = roofline(ROUND_GPU, DENSE_7B, tensor_parallel=4, overhead_s=0.0)
    # 64 all-reduces of 10 us; of a token's 8 KiB activation 2 x 3/4 pass a 100 GB/s link, 64 times
    all_reduce_s = 64 * 10e-6 + 64 * 8192 * 1.5 / 100e9
    assert four.seconds(1, 1, 0, 0.0, 0) == pytest.approx(one.seconds(1, 1, 0, 0.0, 0) / 4 + all_reduce_s)


def test_kv_pool_is_what_memory_leaves() -> None:
    # 0.9 x 80 GiB - 2 GB of activations - 2 bytes x 8.03e9 weights, in blocks of 16 tokens x 128 KiB
    blocks = int((0.9 * 80 * GIB - 2e9 - 16.06e9) // (16 * 128 * KIB))
    assert PRESETS["llama3-8b-a100"].kv_blocks == blocks
    # four cards: 4 x (0.9 x 80 GiB - 2 GB) - 141.2 GB, at 320 KiB a token
    blocks = int((4 * (0.9 * 80 * GIB - 2e9) - 141.2e9) // (16 * 320 * KIB))
    assert PRESETS["llama3-70b-4xh100"].kv_blocks == blocks


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SimulatorError, match=r"llama3-70b in fp16 does not fit on 1 x A100-80"):
        engine_config("big", A100_80, LLAMA3_70B)


def test_data_sheet_figures() -> None:
    assert (A100_80.peak_flops("fp16"), A100_80.bandwidth_bytes_s) == (312e12, 2.039e12)
    assert (H100.peak_flops("fp16"), H100.peak_flops("fp8")) == (989.4e12, 1978.9e12)
    assert (L4.peak_flops("fp16"), L4.bandwidth_bytes_s) == (121e12, 300e9)


def test_demo_steps_are_slow_enough_for_real_time() -> None:
    # FP8 weights of 1.54 GB at 0.8 x 300 GB/s and 2 ms of overhead
    assert PRESETS["demo"].step_time.seconds(1, 1, 0, 0.0, 0) == pytest.approx(1.54 / 240 + 2e-3)


def test_find_config() -> None:
    assert find_config("demo") is PRESETS["demo"]
    assert find_config("linear:0.01,0.001").step_time == Linear(0.01, 0.001, 0.0)
    assert find_config("linear:0.01,0.001,0.05").step_time == Linear(0.01, 0.001, 0.05)


@pytest.mark.parametrize(
    "name", ["no-such", "linear", "linear:1", "linear:a,b", "linear:1,2,3,4", "linear:-1,2", "linear:0,0"]
)
def test_find_config_refuses_in_one_line(name: str) -> None:
    with pytest.raises(SimulatorError) as caught:
        find_config(name)
    assert "\n" not in str(caught.value)


def test_linear_formula() -> None:
    # alpha + beta b + p for each prompt: 10 + 3 x 1 + 2 x 50 ms
    assert linear_config(0.01, 0.001, 0.05).step_time.seconds(3, 999, 999, 999.0, 2) == pytest.approx(0.113)
