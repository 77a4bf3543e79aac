"""The shape of models from their config.json, against published sizes and hand arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from ampacity.analysis.decision import model

LLAMA3_8B = json.loads("""{"model_type": "llama", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": false}""")
LLAMA3_70B = LLAMA3_8B | json.loads("""{"hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "intermediate_size": 28672}""")
QWEN25_15B = json.loads("""{"model_type": "qwen2", "hidden_size": 1536,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": true,
    "use_sliding_window": false, "sliding_window": 32768}""")
MIXTRAL_8X7B = json.loads("""{"model_type": "mixtral", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "sliding_window": null}""")
QWEN3_30B_A3B = json.loads("""{"model_type": "qwen3_moe", "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 151936}""")
DEEPSEEK_V3 = json.loads("""{"model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280}""")
GEMMA3_27B = json.loads("""{"model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 5376,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
    "sliding_window": 1024, "sliding_window_pattern": 6}}""")
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        # model cards and technical reports: Llama 3 (2024) table 3, Qwen2.5 (2024), Mixtral (2024),
        # Qwen3 (2025), DeepSeek-V3 (2024), Gemma 3 (2025) without its vision tower, gpt-oss (2025)
        pytest.param(LLAMA3_8B, 8.03e9, 8.03e9, id="llama3-8b"),
        pytest.param(LLAMA3_70B, 70.6e9, 70.6e9, id="llama3-70b"),
        pytest.param(QWEN25_15B, 1.54e9, 1.54e9, id="qwen2.5-1.5b"),
        pytest.param(MIXTRAL_8X7B, 46.7e9, 12.9e9, id="mixtral-8x7b"),
        pytest.param(QWEN3_30B_A3B, 30.5e9, 3.3e9, id="qwen3-30b-a3b"),
        pytest.param(DEEPSEEK_V3, 671e9, 37e9, id="deepseek-v3"),
        pytest.param(GEMMA3_27B, 27.0e9, 27.0e9, id="gemma3-27b"),
        # its card counts 3.6 G active without the input embedding, 201,088 x 2,880 = 0.58 G
        pytest.param(GPT_OSS_20B, 20.9e9, 4.18e9, id="gpt-oss-20b"),
    ],
)
def test_parameters_are_those_of_the_model_card(
    config: dict[str, Any], total: float, active: float
) -> None:
    shape = model.shape_of(config)
    assert shape.parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("config", "tokens", "expected_bytes"),
    [
        # 2 (key, value) x 32 layers x 8 heads x 128 x 2 B = 131,072 B a token
        pytest.param(LLAMA3_8B, 1, 131_072, id="8b-one-token"),
        pytest.param(LLAMA3_8B, 4096, 536_870_912, id="8b-4096"),
        pytest.param(LLAMA3_70B, 1, 327_680, id="70b-one-token"),
        pytest.param(LLAMA3_70B, 4096, 1_342_177_280, id="70b-4096"),
        pytest.param(DEEPSEEK_V3, 10, 10 * 61 * 576 * 2, id="latent"),
        # 10 of 62 layers see everything, 52 the last 1,024 tokens: 2 x 16 x 128 x 2 B each
        pytest.param(GEMMA3_27B, 1000, 62 * 8192 * 1000, id="window-not-full"),
        pytest.param(GEMMA3_27B, 5000, (10 * 5000 + 52 * 1024) * 8192, id="window-full"),
        pytest.param(GPT_OSS_20B, 1128, (12 * 1128 + 12 * 128) * 2 * 8 * 64 * 2, id="layer-types"),
        pytest.param(QWEN25_15B, 40_000, 40_000 * 2 * 28 * 2 * 128 * 2, id="window-not-used"),
    ],
)
def test_kv_cache_of_one_sequence(config: dict[str, Any], tokens: int, expected_bytes: int) -> None:
    assert model.shape_of(config).kv_bytes(tokens, 2.0) == expected_bytes


def test_the_input_embedding_is_kept_but_not_computed_with() -> None:
    """128,256 x 4,096 numbers of 8.03 G; gpt-oss counts its 3.6 G active without them."""
    llama = model.shape_of(LLAMA3_8B)
    assert llama.parameters - llama.weights_read(1) == 128_256 * 4096
    assert model.shape_of(GPT_OSS_20B).computed_parameters == pytest.approx(3.6e9, rel=0.01)
    tied = model.shape_of(QWEN25_15B)
    assert tied.weights_read(1) == tied.parameters


@pytest.mark.parametrize(
    ("held", "precision"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "hqq"}, None),
        ("fp8", None),
    ],
)
def test_the_precision_of_a_checkpoint(held: Any, precision: str | None) -> None:
    assert model.shape_of(LLAMA3_8B | {"quantization_config": held}).weights == precision


def test_five_numbers_give_the_same_cache_as_the_config() -> None:
    given = model.plain_model(8.03e9, layers=32, kv_heads=8, head_dim=128, heads=32)
    assert given.kv_bytes(1, 2.0) == 131_072
    assert (given.heads, given.kv_heads) == (32, 8)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """One of four experts a token: 1 token reads 1/4 of them, 2 read 1 - (3/4)^2 = 7/16."""
    shape = model.ModelShape("m", 10.0, 4.0, 8, (), expert_parameters=8.0, expert_share=0.25)
    assert shape.weights_read(1) == pytest.approx(2 + 2)
    assert shape.weights_read(2) == pytest.approx(2 + 8 * 7 / 16)
    assert shape.weights_read(10_000) == pytest.approx(10)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        pytest.param("[1]", "holds no object", id="list"),
        pytest.param("{", "not JSON", id="broken"),
        pytest.param('{"model_type": "mamba"}', "'mamba' is not known; give --params", id="mamba"),
        pytest.param("{}", "'None' is not known", id="empty"),
        pytest.param(
            json.dumps(LLAMA3_8B | {"num_attention_heads": None}),
            "num_attention_heads is missing; give --params",
            id="no-heads",
        ),
        pytest.param(json.dumps(LLAMA3_8B | {"vocab_size": -1}), "vocab_size is -1", id="negative"),
        pytest.param(
            json.dumps(LLAMA3_8B | {"num_hidden_layers": "32"}),
            "num_hidden_layers is '32'",
            id="text",
        ),
        pytest.param(
            json.dumps({k: v for k, v in MIXTRAL_8X7B.items() if k != "num_experts_per_tok"}),
            "num_experts_per_tok is missing",
            id="no-active-experts",
        ),
        pytest.param(
            json.dumps(MIXTRAL_8X7B | {"num_experts_per_tok": 16}),
            "num_experts_per_tok is 16: 1 to 8 of the experts",
            id="more-active-than-experts",
        ),
        pytest.param(
            json.dumps({k: v for k, v in MIXTRAL_8X7B.items() if k != "num_local_experts"}),
            "the number of experts is missing",
            id="no-experts",
        ),
        pytest.param(
            json.dumps({k: v for k, v in MIXTRAL_8X7B.items() if k != "intermediate_size"}),
            "intermediate_size is missing",
            id="no-feed-forward",
        ),
        pytest.param(
            json.dumps(QWEN3_30B_A3B | {"mlp_only_layers": list(range(60))}),
            "60 layers without experts are more than its 48 layers",
            id="more-dense-layers-than-layers",
        ),
        pytest.param(
            json.dumps(QWEN3_30B_A3B | {"mlp_only_layers": 5}), "a list is needed", id="no-list"
        ),
        pytest.param(
            json.dumps(GPT_OSS_20B | {"layer_types": ["full_attention"] * 50}),
            "layer_types has 50 entries for 24 layers",
            id="layer-types",
        ),
        pytest.param(
            json.dumps(LLAMA3_8B | {"num_key_value_heads": 7}),
            "32 attention heads are no multiple of the KV heads",
            id="kv-heads",
        ),
        pytest.param(
            json.dumps(LLAMA3_8B | {"hidden_size": 10**30}), "hidden_size is 1000", id="huge"
        ),
        pytest.param("[" * 100_000, "config.json", id="nested"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(model.DecisionError, match=r"config\.json") as refused:
        model.read_model(tmp_path)
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(model.DecisionError, match=r"no\.json: cannot be read: No such file"):
        model.read_model(tmp_path / "no.json")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_number_that_is_none_names_its_option(value: float) -> None:
    with pytest.raises(model.DecisionError, match="--params"):
        model.plain_model(value, 32, 8, 128)
