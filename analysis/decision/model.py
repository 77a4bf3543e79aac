"""The shape of a model, from its config.json: parameters, KV cache and operations per token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ampacity.files import read_text
from ampacity.simulator.models.catalog import MODELS, Model

# Model types whose layers are the usual ones: attention with rotary positions and a gated MLP.
DENSE = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3"}
DENSE |= {"olmo2", "granite", "smollm3", "mistral3", "cohere", "cohere2", "ministral"}
EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmoe"}
EXPERTS |= {"kimi_k2", "phimoe", "granitemoe", "glm4_moe"}
LATENT_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
SLIDING_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}  # every n-th layer sees everything
QKV_BIAS = {"qwen2", "qwen2_moe"}
COUNT_MAX = 10_000_000  # of layers, sizes, experts and words


class DecisionError(ValueError):
    """Inputs from which no decision can be computed; the message is one line."""


@dataclass(frozen=True)
class KvLayers:
    """A group of layers whose KV cache has one size per token.

    ``elements`` of one token in one layer; ``window`` tokens are kept at most (None: all).
    """

    layers: int
    elements: float
    window: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. ``active_parameters`` are those that one token uses."""

    name: str
    parameters: float
    active_parameters: float
    heads: int
    kv: tuple[KvLayers, ...]
    # parameters of all routed experts, and the share of them that a token uses
    expert_parameters: float = 0.0
    expert_share: float = 0.0
    kv_heads: int | None = None  # None: latent attention, each device keeps all of it
    max_tokens: int | None = None
    # of an input embedding that is not the output layer too: a step reads few of its rows
    embedding_parameters: float = 0.0
    weights: str | None = None  # precision of the checkpoint, where its config names one

    def kv_bytes(self, tokens: float, bytes_per_element: float) -> float:
        """Return the bytes that one sequence of ``tokens`` keeps in the KV cache.

        Key and value of every layer and KV head (2 x layers x KV heads x head size), or one latent
        vector a layer; a layer with a sliding window keeps no more tokens than its window.
        """
        return bytes_per_element * sum(
            group.layers * group.elements * min(tokens, group.window or math.inf)
            for group in self.kv
        )

    def weights_read(self, tokens: float) -> float:
        """Return the parameters that a step reads for ``tokens`` tokens at once.

        Each token chooses its experts alike and independently, so that a share
        1 - (1 - s)^tokens of the routed experts is read, s that of one token.
        """
        touched = 1 - (1 - self.expert_share) ** tokens if self.expert_parameters else 0.0
        untouched = self.expert_parameters * (1 - touched)
        return self.parameters - self.embedding_parameters - untouched

    @property
    def computed_parameters(self) -> float:
        """Return the parameters that a token is multiplied with."""
        return self.active_parameters - self.embedding_parameters


def plain_model(
    parameters: float, layers: int, kv_heads: int, head_dim: int, heads: int | None = None
) -> ModelShape:
    """Return a dense model from the five numbers that the decision needs. Raises DecisionError."""
    named = {"--params": parameters, "--layers": layers}
    heads = kv_heads if heads is None else heads
    named |= {"--kv-heads": kv_heads, "--head-dim": head_dim, "--heads": heads}
    for name, value in named.items():
        if not (math.isfinite(value) and value > 0):
            raise DecisionError(f"{name} is {value}: it must be above zero")
    if heads % kv_heads:
        raise DecisionError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    kv = (KvLayers(layers, 2.0 * kv_heads * head_dim),)
    return ModelShape("given", parameters, parameters, heads, kv, kv_heads=kv_heads)


def catalogued(model: Model) -> ModelShape:
    """Return the shape of a model of the simulator's catalogue."""
    latent = model.latent_elements is not None
    elements = model.kv_bytes_per_token(1.0) / model.layers
    return ModelShape(
        model.name,
        model.parameters,
        model.active_parameters,
        model.heads,
        (KvLayers(model.layers, elements),),
        model.routed_parameters,
        model.experts_per_token / model.experts if model.experts else 0.0,
        None if latent else model.kv_heads,
        model.max_model_len,
    )


def read_model(path: Path) -> ModelShape:
    """Read a model's config.json (or a folder that holds it), or take one of MODELS by its name.

    Raises DecisionError.
    """
    if str(path) in MODELS and not path.exists():
        return catalogued(MODELS[str(path)])
    path = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(read_text(path))
    except OSError as error:
        raise DecisionError(
            f"{path}: cannot be read: {error.strerror}; give the path of the model's config.json "
            f"(or its folder), or one of {', '.join(MODELS)}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecisionError(f"{path}: not JSON: {error}") from error
    except RecursionError as error:
        raise DecisionError(f"{path}: nested too deeply for a config.json") from error
    if not isinstance(config, dict):
        raise DecisionError(f"{path}: not a model's config.json: it holds no object")
    return shape_of(config, str(path))


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape that a config.json describes. Raises DecisionError.

    Parameters are counted from the matrices of the usual architectures; norms and biases but those
    of queries, keys and values are left out (below 0.1 %). A prediction head for several tokens
    (DeepSeek's) is not counted.
    """
    read = _Config(_text_part(config), where)
    kind = read.kind
    if kind not in DENSE | EXPERTS:
        raise DecisionError(
            f"{where}: model_type {kind!r} is not known; "
            "give --params, --layers, --kv-heads and --head-dim"
        )
    layers, hidden, heads = (
        read.count(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if heads % read.count("num_key_value_heads", heads):
        raise DecisionError(f"{where}: {heads} attention heads are no multiple of the KV heads")
    latent = "kv_lora_rank" in read.held
    attention = (
        _latent_attention(read, hidden, heads) if latent else _attention(read, hidden, heads)
    )
    always, routed, per_layer_experts = _feed_forward(read, layers, hidden)
    tied = bool(read.held.get("tie_word_embeddings", kind.startswith(("gemma", "cohere"))))
    embedding = read.count("vocab_size") * hidden
    total = layers * attention + always + routed + embedding * (1 if tied else 2)
    share = read.experts_per_token / per_layer_experts if per_layer_experts else 0.0
    return ModelShape(
        str(config.get("_name_or_path") or kind),
        total,
        total - routed * (1 - share),
        heads,
        _kv_layers(read, layers, heads, latent),
        routed,
        share,
        None if latent else read.count("num_key_value_heads", heads),
        read.held.get("max_position_embeddings"),
        0.0 if tied else embedding,
        _checkpoint_precision(config),
    )


def _checkpoint_precision(config: Mapping[str, Any]) -> str | None:
    """Return the precision of the weights that quantization_config names; else None."""
    held = config.get("quantization_config")
    if not isinstance(held, Mapping):
        return None
    method, bits = str(held.get("quant_method")), held.get("bits")
    if method in ("awq", "gptq"):
        return {4: "int4", 8: "int8"}.get(bits if isinstance(bits, int) else 0)
    return {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "nvfp4"}.get(method)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model of a config that also describes a vision or audio tower."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


class _Config:
    """Checked access to the entries of a config.json."""

    def __init__(self, held: Mapping[str, Any], where: str) -> None:
        self.held = held
        self._where = where
        self.kind = str(held.get("model_type"))

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number. Raises DecisionError."""
        value = self.held.get(key)
        value = default if value is None else value
        if value is None:
            raise DecisionError(
                f"{self._where}: {key} is missing; "
                "give --params, --layers, --kv-heads and --head-dim"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= COUNT_MAX:
            raise DecisionError(
                f"{self._where}: {key} is {repr(value)[:40]}: a whole number from 1 to "
                f"{COUNT_MAX:,} is needed"
            )
        return value

    def first(self, *keys: str, default: int = 0) -> int:
        """Return the first of several keys that is given; ``default`` where none is."""
        for key in keys:
            if self.held.get(key) is not None:
                return self.count(key) if self.held[key] else 0
        return default

    def items(self, key: str) -> Sequence[Any]:
        """Return a list; empty where it is missing. Raises DecisionError."""
        value = self.held.get(key) or ()
        if not isinstance(value, (list, tuple)):
            raise DecisionError(f"{self._where}: {key} is {repr(value)[:40]}: a list is needed")
        return value

    def fail(self, why: str) -> DecisionError:
        """Return the error of a config that contradicts itself."""
        return DecisionError(f"{self._where}: {why}")

    @property
    def experts_per_token(self) -> int:
        return self.first("num_experts_per_tok", "experts_per_token")

    def head_dim(self, hidden: int, heads: int) -> int:
        return self.count("head_dim", hidden // heads)


def _attention(read: _Config, hidden: int, heads: int) -> float:
    """Return the parameters of queries, keys, values and output of one layer."""
    size = read.head_dim(hidden, heads)
    kv_heads = read.count("num_key_value_heads", heads)
    out = hidden * heads * size
    inputs = hidden * (heads + 2 * kv_heads) * size
    biased = read.held.get("attention_bias") or read.kind in QKV_BIAS
    return out + inputs + ((heads + 2 * kv_heads) * size if biased else 0)


def _latent_attention(read: _Config, hidden: int, heads: int) -> float:
    """Return the parameters of one layer of multi-head latent attention (DeepSeek-V2, 2.1)."""
    rank, rope, nope, value = (read.count(key) for key in LATENT_KEYS)
    query = heads * (nope + rope)
    through = read.first("q_lora_rank")
    queries = hidden * through + through * query if through else hidden * query
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _feed_forward(read: _Config, layers: int, hidden: int) -> tuple[float, float, int]:
    """Return (parameters of dense and shared parts, of routed experts, experts of a layer)."""
    experts = read.first("num_local_experts", "n_routed_experts", "num_experts")
    if read.kind not in EXPERTS:
        return layers * 3.0 * hidden * read.count("intermediate_size"), 0.0, 0
    if not experts:
        raise read.fail("the number of experts is missing (num_experts, num_local_experts)")
    if not 0 < read.experts_per_token <= experts:
        raise read.fail(
            f"num_experts_per_tok is {read.experts_per_token or 'missing'}: 1 to {experts} of the "
            "experts are active"
        )
    size = read.first("moe_intermediate_size") or read.count("intermediate_size")
    dense = read.first("first_k_dense_replace") + len(read.items("mlp_only_layers"))
    if dense > layers:
        raise read.fail(f"{dense} layers without experts are more than its {layers} layers")
    sparse = (layers - dense) // max(read.first("decoder_sparse_step", default=1), 1)
    shared = read.first("n_shared_experts") * size or read.first("shared_expert_intermediate_size")
    always = (layers - sparse) * 3.0 * hidden * read.first("intermediate_size", default=size)
    always += sparse * hidden * (3.0 * shared + experts)
    return always, sparse * experts * 3.0 * hidden * size, experts


def _kv_layers(read: _Config, layers: int, heads: int, latent: bool) -> tuple[KvLayers, ...]:
    """Return the groups of layers by what they keep of a token."""
    if latent:
        elements = float(read.count("kv_lora_rank") + read.count("qk_rope_head_dim"))
        return (KvLayers(layers, elements),)
    size = read.head_dim(read.count("hidden_size"), heads)
    elements = 2.0 * read.count("num_key_value_heads", heads) * size
    sliding = _sliding_layers(read, layers)
    if not sliding:
        return (KvLayers(layers, elements),)
    groups = (
        KvLayers(layers - sliding, elements),
        KvLayers(sliding, elements, read.count("sliding_window")),
    )
    return tuple(group for group in groups if group.layers)


def _sliding_layers(read: _Config, layers: int) -> int:
    """Return how many layers see a sliding window only."""
    if not read.held.get("sliding_window") or read.held.get("use_sliding_window") is False:
        return 0
    types = read.items("layer_types")
    if types:
        if len(types) != layers:
            raise read.fail(f"layer_types has {len(types)} entries for {layers} layers")
        return sum(kind == "sliding_attention" for kind in types)
    every = read.first("sliding_window_pattern", default=SLIDING_EVERY.get(read.kind, 0))
    if every:
        return layers - layers // every
    if read.kind.startswith("qwen"):  # the lower layers see everything
        return max(layers - read.first("max_window_layers", default=layers), 0)
    return layers
