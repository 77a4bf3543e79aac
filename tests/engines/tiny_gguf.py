"""A very small language model with weights of chance, for real inference engines.

Nothing is fetched: the byte-level BPE vocabulary is trained on the help texts that come with
Python, and the weights of a two-layer Llama are drawn from a seed. It writes nonsense, but an
engine serves it as it serves any model: with a tokenizer, a context, a KV cache, and an end token
of its own.

Two things are steered. Only tokens of printable ASCII can be drawn, so that no engine has to hold
back half a character; and the end token comes with probability 1/``mean_length`` at each step of
plain sampling (temperature 1, no top-k, top-p or min-p), so that natural answers are geometric with
that mean. Both are done by a bias on each logit. Llama has none, so feature 0 of the residual
stream is kept constant: no layer writes into it, and column 0 of the output matrix is then a bias.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 4096
VOCABULARY = 2048
WIDTH, INNER_WIDTH, LAYERS = 128, 256, 2
HEADS, KV_HEADS, HEAD_WIDTH = 2, 1, 64
ROPE_BASE, NORM_EPSILON = 10_000.0, 1e-5

SPECIAL = ("<|start|>", "<|turn|>", "<|end|>")
START, TURN, END = range(3)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

_SPREAD = 0.05  # standard deviation of the weights
_CONSTANT = 32.0  # feature 0; far above the others (1), so that RMSNorm hardly moves it
_NEVER = -40.0  # the logit of a token that must not be drawn

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class TinyModel:
    """Tokenizer and weights; the names of the weights are those of a Hugging Face Llama."""

    tokenizer: Tokenizer
    weights: Weights


def make_tiny_model(mean_length: float = 128, seed: int = 0) -> TinyModel:
    """Natural answers have ``mean_length`` tokens on average, the end token included; above 1."""
    tokenizer = _train_tokenizer()
    drawable = [
        i for i in range(len(SPECIAL), VOCABULARY) if _is_printable(tokenizer.id_to_token(i) or "")
    ]
    return TinyModel(tokenizer, _draw_weights(np.random.default_rng(seed), drawable, mean_length))


def _train_tokenizer() -> Tokenizer:
    from pydoc_data.topics import topics

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}"
        )
    return tokenizer


def _is_printable(token: str) -> bool:
    """Byte-level BPE writes the bytes of space and line feed as U+0120 and U+010A."""
    return token.replace("\u0120", " ").replace("\u010a", " ").isascii()


def _draw_weights(rng: np.random.Generator, drawable: list[int], mean_length: float) -> Weights:
    def matrix(rows: int, columns: int, spread: float = _SPREAD) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread)

    ones = np.ones(WIDTH, dtype=np.float32)
    weights: Weights = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH, 1.0)}
    weights["model.embed_tokens.weight"][:, 0] = _CONSTANT
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_WIDTH, WIDTH),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_WIDTH, WIDTH),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_WIDTH, WIDTH),
            f"{name}.self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD_WIDTH),
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.mlp.gate_proj.weight": matrix(INNER_WIDTH, WIDTH),
            f"{name}.mlp.up_proj.weight": matrix(INNER_WIDTH, WIDTH),
            f"{name}.mlp.down_proj.weight": matrix(WIDTH, INNER_WIDTH),
        }
        weights[f"{name}.self_attn.o_proj.weight"][0] = 0
        weights[f"{name}.mlp.down_proj.weight"][0] = 0
    weights["model.norm.weight"] = ones
    weights["lm_head.weight"] = _output_matrix(matrix(VOCABULARY, WIDTH), drawable, mean_length)
    return weights


def _output_matrix(
    random: NDArray[np.float32], drawable: list[int], mean_length: float
) -> NDArray[np.float32]:
    """Logit = bias + noise. The noise of a drawable token is normal with variance v, so that
    sum(exp(logit)) is about n exp(v/2), and the end token has probability 1/mean_length against it.
    """
    mean_square = (_CONSTANT**2 + WIDTH - 1) / WIDTH
    noise_variance = _SPREAD**2 * (WIDTH - 1) / mean_square
    bias = np.full(VOCABULARY, _NEVER)
    bias[drawable] = 0.0
    bias[END] = np.log(len(drawable)) + noise_variance / 2 - np.log(mean_length - 1)
    random[bias == _NEVER] = 0
    random[END] = 0
    random[:, 0] = bias / (_CONSTANT / np.sqrt(mean_square))
    return random


def write_gguf(model: TinyModel, path: Path) -> None:
    """One GGUF file, as llama.cpp reads it.

    llama.cpp orders the rows of q and k for its rotary embedding otherwise than Hugging Face does;
    rows of chance need no reordering, so the two formats hold equally distributed but not equal
    models."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER_WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, model.tokenizer)
    for name, tensor in model.weights.items():
        writer.add_tensor(_gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, tokenizer: Tokenizer) -> None:
    import gguf

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokenizer.id_to_token(i) for i in range(VOCABULARY)])
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (VOCABULARY - len(SPECIAL)))
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(START)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_GGUF_NAMES = json.loads("""{"model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}""")


def _gguf_name(name: str) -> str:
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_hugging_face(model: TinyModel, folder: Path) -> None:
    """The same as a folder of config, tokenizer and safetensors, as vLLM reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": START}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "bos_token": SPECIAL[START],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[START],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"do_sample": True, "temperature": 1.0, **ids}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    _write_safetensors(model.weights, folder / "model.safetensors")


def _write_safetensors(weights: Weights, path: Path) -> None:
    """Length of the header (u64), header in JSON, then the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in weights.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in weights.values():
            file.write(tensor.astype("<f4").tobytes())
