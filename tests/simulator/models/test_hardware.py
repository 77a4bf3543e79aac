"""Presets and step times against figures worked out from the data sheets and model cards."""

import numpy as np
import pytest

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.engine import Speculation
from ampacity.simulator.engine.steptime import Linear
from ampacity.simulator.models.catalog import (
    A100_80,
    DEEPSEEK_V3,
    H100,
    H200,
    HARDWARE,
    L4,
    LLAMA3_8B,
    LLAMA3_70B,
    MODELS,
    QWEN3_32B,
    QWEN25_1_5B,
    Hardware,
    Model,
)
from ampacity.simulator.models.hardware import (
    PRESETS,
    engine_config,
    find_config,
    linear_config,
    roofline,
)

KIB, GIB = 1024, 1 << 30
ROUND_GPU = Hardware(
    "round", 1e15, 2e15, 1.8e12, 80e9, 100e9, bandwidth_factor=1.0, compute_factor=1.0
)
DENSE_7B = Model("dense-7b", 7e9, 7e9, 32, 32, 32, 128, 4096)


@pytest.mark.parametrize(
    ("model", "kib"),
    # 2 (key, value) x layers x KV heads x head size x 2 bytes
    [(LLAMA3_8B, 128), (LLAMA3_70B, 320), (QWEN25_1_5B, 28), (QWEN3_32B, 256)],
)
def test_kv_bytes_per_token(model: Model, kib: int) -> None:
    assert model.kv_bytes_per_token() == kib * KIB
    assert model.kv_bytes_per_token(1.0) == kib * KIB / 2


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
    expected = pytest.approx((2048 * 14e9 + pairs * 4 * 32 * 4096) / 1e15, rel=1e-9)
    assert step.seconds(1, 2048, 2048, pairs, 1) == expected
    halved = roofline(ROUND_GPU, DENSE_7B, precision="fp8", overhead_s=0.0)
    assert halved.seconds(1, 2048, 0, 0.0, 1) == pytest.approx(2048 * 14e9 / 2e15)
    assert halved.seconds(1, 1, 0, 0.0, 0) == pytest.approx(7e9 / 1.8e12)


def test_tensor_parallel_splits_work_and_pays_all_reduce() -> None:
    one = roofline(ROUND_GPU, DENSE_7B, overhead_s=0.0)
    four = roofline(ROUND_GPU, DENSE_7B, tensor_parallel=4, overhead_s=0.0)
    # 64 all-reduces of 10 us; of a token's 8 KiB activation 2 x 3/4 pass a 100 GB/s link, 64 times
    all_reduce_s = 64 * 10e-6 + 64 * 8192 * 1.5 / 100e9
    assert four.seconds(1, 1, 0, 0.0, 0) == pytest.approx(
        one.seconds(1, 1, 0, 0.0, 0) / 4 + all_reduce_s
    )


def test_kv_pool_is_what_memory_leaves() -> None:
    # 0.9 x 80 GiB - 2 GB of activations - 2 bytes x 8.03e9, in blocks of 16 tokens x 128 KiB
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
    "name",
    [
        *tuple("no-such linear linear:1 linear:a,b linear:1,2,3,4 linear:-1,2 linear:0,0".split()),
        *("gpt@h100", "llama3-8b@", "llama3-8b@h99", "llama3-8b@0xh100", "llama3-70b@h100"),
        *tuple(
            (
                "demo,weights=fp8 demo,policy=best demo,speculation=4 demo,prefix_caching=yes "
                "nope,policy=fcfs"
            ).split()
        ),
        *(
            "llama3-8b@h100,overhead_s=-1",
            "llama3-8b@h100,bandwidth_factor=nan",
            "demo,speculation=64:0.5",
        ),
        *("llama3-8b@h100,weights=fp7", "llama3-8b@h100,speed=9", "llama3-8b@h100,max_num_seqs=x"),
    ],
)
def test_find_config_refuses_in_one_line(name: str) -> None:
    with pytest.raises(SimulatorError) as caught:
        find_config(name)
    assert "\n" not in str(caught.value)


def test_linear_formula() -> None:
    # alpha + beta b + p for each prompt: 10 + 3 x 1 + 2 x 50 ms
    expected = pytest.approx(0.113)
    assert linear_config(0.01, 0.001, 0.05).step_time.seconds(3, 999, 999, 999.0, 2) == expected


def test_latent_attention_keeps_one_vector_a_layer() -> None:
    # 61 layers x (512 + 64) elements x 2 bytes
    assert DEEPSEEK_V3.kv_bytes_per_token() == 70272
    # The latent stands on every card; KV heads are split until there is one on each
    assert DEEPSEEK_V3.kv_copies(8) == 8
    assert (LLAMA3_70B.kv_copies(4), LLAMA3_70B.kv_copies(16)) == (1, 2)


def test_deepseek_counts_agree_with_its_report() -> None:
    # Active: everything but the routed experts, and 8 of 256 of those: 37 G in the report
    always = DEEPSEEK_V3.parameters - DEEPSEEK_V3.routed_parameters
    active = always + DEEPSEEK_V3.routed_parameters * 8 / 256
    assert active == pytest.approx(DEEPSEEK_V3.active_parameters, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "share"),
    # 1 - (1 - 8/256)^n: one token touches 8 of 256, 22 about half, 256 nearly all
    [(1, 0.03125), (2, 0.0615234375), (22, 0.502655), (256, 0.999704)],
)
def test_experts_touched_grow_with_the_batch(tokens: int, share: float) -> None:
    step = roofline(ROUND_GPU, DEEPSEEK_V3, precision="fp8", overhead_s=0.0)
    always = DEEPSEEK_V3.parameters - DEEPSEEK_V3.routed_parameters
    expected = (always + share * DEEPSEEK_V3.routed_parameters) / 1.8e12
    assert step.seconds(tokens, tokens, 0, 0.0, 0) == pytest.approx(expected, rel=1e-5)


def test_experts_touched_as_drawn() -> None:
    """The formula against drawing: 20 tokens choose 8 of 256 experts each."""
    rng = np.random.default_rng(3)
    touched = [
        len({e for _ in range(20) for e in rng.choice(256, 8, replace=False)}) for _ in range(300)
    ]
    expected = 256 * (1 - (1 - 8 / 256) ** 20)
    assert np.mean(touched) == pytest.approx(expected, abs=4 * np.std(touched) / 300**0.5)


def test_int4_weights_are_a_quarter_and_compute_at_fp16_speed() -> None:
    step = roofline(ROUND_GPU, DENSE_7B, precision="int4", overhead_s=0.0)
    assert step.seconds(1, 1, 0, 0.0, 0) == pytest.approx(3.5e9 / 1.8e12)
    assert step.seconds(1, 4096, 0, 0.0, 1) == pytest.approx(4096 * 14e9 / 1e15)


def test_fp8_kv_doubles_the_sequences_that_fit() -> None:
    plain = engine_config("a", H100, LLAMA3_8B)
    halved = engine_config("b", H100, LLAMA3_8B, kv_precision="fp8")
    assert halved.kv_blocks in (2 * plain.kv_blocks, 2 * plain.kv_blocks + 1)


def test_card_figures() -> None:
    assert (H200.bandwidth_bytes_s, H200.peak_flops("fp16")) == (4.8e12, H100.peak_flops("fp16"))
    figures = {
        name: (c.peak_flops_fp16, c.peak_flops_fp8, c.bandwidth_bytes_s)
        for name, c in HARDWARE.items()
    }
    assert figures["b200"] == (2250e12, 4500e12, 8e12)
    assert figures["mi300x"] == (1307.4e12, 2614.9e12, 5.3e12)
    assert figures["t4"] == (65e12, 65e12, 0.32e12)  # no FP8 unit
    assert set(MODELS) >= {"llama3-8b", "llama3-70b", "qwen3-32b", "deepseek-v3"}


def test_composed_names() -> None:
    assert find_config("llama3-70b@4xh100").step_time == PRESETS["llama3-70b-4xh100"].step_time
    found = find_config("llama3-70b@2xh100,weights=fp8,kv=fp8,max_num_seqs=32,bandwidth_factor=1.0")
    # 70.6e9 bytes over 2 x 3.35 TB/s, 2 ms, 160 all-reduces of 10 us, 16 KiB x 160 over 450 GB/s
    expected = 70.6e9 / 6.7e12 + 2e-3 + 1.6e-3 + 160 * 16384 / 450e9
    assert found.step_time.seconds(1, 1, 0, 0.0, 0) == pytest.approx(expected)
    assert found.max_num_seqs == 32
    pool = 2 * (0.9 * 80 * GIB - 2e9) - 70.6e9
    assert found.kv_blocks == int(pool // (16 * 160 * KIB))


def test_scheduling_settings_follow_any_name() -> None:
    found = find_config(
        "demo,policy=decode-priority,prefix_caching=on,speculation=3:0.7:0.001,max_loras=4"
    )
    assert (found.policy, found.prefix_caching, found.max_loras) == ("decode-priority", True, 4)
    assert found.speculation == Speculation(3, 0.7, 0.001)
    assert found.kv_blocks == PRESETS["demo"].kv_blocks
    assert find_config("linear:0.01,0.001,static_batching=on,max_num_seqs=16").static_batching
    composed = find_config("llama3-8b@l4,kv=fp8,policy=prefill-priority,max_num_seqs=8")
    assert (composed.policy, composed.max_num_seqs) == ("prefill-priority", 8)
