"""Tiny random checkpoints of every family and mechanism, in the Hugging Face layout. No torch needed.

``CASES`` names them; ``scripts/make_goldens.py`` runs transformers over the same directories and stores logits in
``tests/goldens/tiny.npz``. Weights and prompts come from numpy's generator seeded with the case's name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests import tiny_families

VOCAB = 96
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class Case:
    """One checkpoint and the prompts its goldens have. ``max_model_len`` as given to the engine."""

    config: dict[str, Any]
    lengths: tuple[int, ...] = (37, 5)
    max_model_len: int | None = None
    # positions of each prompt whose logits are stored: these many, evenly spread, the last one included
    stored: int = 10
    greedy: int = 0  # greedy tokens after each prompt that are stored


def _config(model_type: str, heads: int = 3, kv_heads: int = 1, head_dim: int = 16, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": heads * head_dim,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return _config("llama", rope_scaling={"rope_type": kind, **numbers})


def _new_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 saves it."""
    config = dict(config)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta")}
    config["dtype"] = config.pop("torch_dtype")
    return config


_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_DYNAMIC = _config("llama", rope_scaling={"type": "dynamic", "factor": 3.0}, max_position_embeddings=32)
_LONGROPE = _config(
    "llama",
    rope_scaling={
        "rope_type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
        "original_max_position_embeddings": 32,
    },
)
_QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
_SHARED = {"shared_expert_intermediate_size": 20, "num_hidden_layers": 4}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 3}

CASES: dict[str, Case] = {
    "llama_tied_gqa3": Case(_config("llama", tie_word_embeddings=True)),
    "llama_mha_bias": Case(_config("llama", heads=4, kv_heads=4, attention_bias=True, mlp_bias=True)),
    "llama_gqa4_dim20": Case(_config("llama", heads=8, kv_heads=2, head_dim=20)),
    "llama_head_dim": Case(_config("llama", heads=4, kv_heads=2) | {"hidden_size": 40, "head_dim": 24}),
    "llama_gelu": Case(_config("llama", hidden_act="gelu")),
    "llama_gelu_tanh": Case(_config("llama", hidden_act="gelu_pytorch_tanh")),
    "llama_new_style": Case(_new_style(_config("llama"))),
    "llama_linear": Case(_rope("linear", factor=2.5)),
    "llama_dynamic_below": Case(_DYNAMIC, (30, 7), max_model_len=32),
    "llama_dynamic_above": Case(_DYNAMIC, (80,), max_model_len=80),
    "llama_llama3": Case(
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        (90,),
    ),
    "llama_llama3_new_style": Case(
        _new_style(
            _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=32)
        )
    ),
    "llama_yarn": Case(_rope("yarn", **_YARN), (90,)),
    "llama_yarn_mscale": Case(
        _rope("yarn", **_YARN, mscale=1.2, mscale_all_dim=0.6, beta_fast=16, beta_slow=2, truncate=False), (60,)
    ),
    "llama_yarn_attention_factor": Case(_rope("yarn", **_YARN, attention_factor=1.3), (60,)),
    "llama_longrope_below": Case(_LONGROPE, (31, 8), max_model_len=32),
    "llama_longrope_above": Case(_LONGROPE, (90,), max_model_len=128),
    "mistral_window": Case(_config("mistral", heads=4, kv_heads=2, sliding_window=7), (61, 20)),
    "mistral_no_window": Case(_config("mistral", heads=4, kv_heads=1, sliding_window=None)),
    "qwen2": Case(_config("qwen2", heads=4, kv_heads=2, tie_word_embeddings=True)),
    "qwen2_window": Case(_config("qwen2", heads=4, kv_heads=2, max_window_layers=1, **_QWEN_WINDOW), (61, 20)),
    "qwen2_layer_types": Case(
        _config("qwen2", layer_types=["sliding_attention", "full_attention", "sliding_attention"], **_QWEN_WINDOW),
        (61,),
    ),
    "qwen3": Case(_config("qwen3", heads=4, kv_heads=1) | {"head_dim": 24}),
    "qwen3_bias": Case(_config("qwen3", heads=2, kv_heads=2, attention_bias=True) | {"head_dim": 16}),
    "qwen3_window": Case(
        _config("qwen3", heads=3, kv_heads=3, max_window_layers=2, **_QWEN_WINDOW) | {"head_dim": 18}, (61,)
    ),
    "mixtral": Case(_config("mixtral", num_local_experts=4, num_experts_per_tok=2), greedy=24),
    "mixtral_window": Case(
        _config("mixtral", num_local_experts=5, num_experts_per_tok=1, sliding_window=7, hidden_act="gelu"), (61, 20)
    ),
    "qwen2_moe": Case(
        _config("qwen2_moe", **_QWEN_MOE | _SHARED, norm_topk_prob=False, mlp_only_layers=[2]), greedy=24
    ),
    "qwen2_moe_step": Case(
        _config("qwen2_moe", **_QWEN_MOE | _SHARED | {"decoder_sparse_step": 2}, norm_topk_prob=True, qkv_bias=False)
    ),
    "qwen2_moe_window": Case(
        _config("qwen2_moe", max_window_layers=2, **_QWEN_WINDOW | _QWEN_MOE | _SHARED, norm_topk_prob=True), (61,)
    ),
    "qwen3_moe": Case(_config("qwen3_moe", **_QWEN_MOE, norm_topk_prob=True) | {"head_dim": 24}, greedy=24),
    "qwen3_moe_plain": Case(
        _config("qwen3_moe", **_QWEN_MOE | {"num_experts_per_tok": 8}, attention_bias=True, mlp_only_layers=[0])
    ),
    "qwen3_moe_window": Case(
        _config("qwen3_moe", **_QWEN_MOE | _QWEN_WINDOW, norm_topk_prob=True, tie_word_embeddings=True), (61,)
    ),
}


CASES |= {
    name: Case(tiny_families.config(name), lengths, stored=6, greedy=20 if name in tiny_families.GREEDY else 0)
    for name, (_, _, _, lengths) in tiny_families.FAMILIES.items()
}


def _rng(*words: str) -> np.random.Generator:
    return np.random.default_rng([b for word in words for b in hashlib.sha256(word.encode()).digest()[:8]])


def prompts(name: str) -> list[np.ndarray]:
    """int32 token ids of the case's prompts."""
    rng = _rng(name, "prompts")
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in CASES[name].lengths]


def stored_positions(name: str) -> list[np.ndarray]:
    """Of each prompt, the positions whose logits are in the goldens."""
    return [
        np.unique(np.linspace(0, length - 1, min(length, CASES[name].stored)).round().astype(np.int32))
        for length in CASES[name].lengths
    ]


def tensors(name: str, config: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, float32. Scales are such that attention, MLP and logits all vary."""
    config = config or CASES[name].config
    if name in tiny_families.FAMILIES:
        return tiny_families.tensors(config, _rng(name, "weights"))
    hidden, heads, kv_heads = (config[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    inner, family = config["intermediate_size"], config["model_type"]
    dim = config.get("head_dim") or hidden // heads
    bias = config.get("attention_bias", False)
    qkv_bias = bias or (family in ("qwen2", "qwen2_moe") and config.get("qkv_bias", True))
    rng = _rng(name, "weights")

    def matrix(out: int, fan_in: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((out, fan_in)) * scale / fan_in**0.5).astype(np.float32)

    def vector(size: int, around: float, scale: float) -> np.ndarray:
        return (around + scale * rng.standard_normal(size)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(VOCAB, hidden, hidden**0.5)}

    def linear(prefix: str, rows: int, columns: int, with_bias: bool, scale: float = 1.0) -> None:
        out[f"{prefix}.weight"] = matrix(rows, columns, scale)
        if with_bias:
            out[f"{prefix}.bias"] = vector(rows, 0.0, 0.5)

    def mlp(pattern: str, ffn: int, with_bias: bool = False, parts: tuple[str, ...] = ("gate", "up", "down")) -> None:
        for part, (rows, columns) in zip(parts, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
            linear(pattern.format(part), rows, columns, with_bias, 1.5)

    def experts(layer: str) -> None:
        if family == "mixtral":
            linear(f"{layer}.block_sparse_moe.gate", config["num_local_experts"], hidden, False, 2.0)
            for e in range(config["num_local_experts"]):
                mlp(f"{layer}.block_sparse_moe.experts.{e}.{{}}", inner, parts=("w1", "w3", "w2"))
            return
        linear(f"{layer}.mlp.gate", config["num_experts"], hidden, False, 2.0)
        for e in range(config["num_experts"]):
            mlp(f"{layer}.mlp.experts.{e}.{{}}_proj", config["moe_intermediate_size"])
        if family == "qwen2_moe":
            linear(f"{layer}.mlp.shared_expert_gate", 1, hidden, False, 2.0)
            mlp(f"{layer}.mlp.shared_expert.{{}}_proj", config["shared_expert_intermediate_size"])

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{layer}.self_attn.{part}_proj", size * dim, hidden, qkv_bias, 1.5)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * dim, bias, 1.5)
        if family in ("qwen3", "qwen3_moe"):
            for part in ("q", "k"):
                out[f"{layer}.self_attn.{part}_norm.weight"] = vector(dim, 1.3, 0.3)
        if has_experts(config, i):
            experts(layer)
        else:
            mlp(f"{layer}.mlp.{{}}_proj", inner, config.get("mlp_bias", False))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{norm}.weight"] = vector(hidden, 1.0, 0.2)
    out["model.norm.weight"] = vector(hidden, 1.0, 0.2)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(VOCAB, hidden, 2.0)
    return out


def has_experts(config: dict[str, Any], layer: int) -> bool:
    if config["model_type"] == "mixtral":
        return True
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers", [])
    return config["model_type"].endswith("_moe") and layer not in dense and (layer + 1) % step == 0


def checksum(weights: dict[str, np.ndarray]) -> str:
    """Tells whether this numpy draws the weights that the goldens were made with."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].tobytes())
    return digest.hexdigest()[:16]


def write(name: str, path: str | Path) -> Path:
    """The case's checkpoint as a directory: config.json and model.safetensors."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CASES[name].config, indent=1))
    save_file(tensors(name), path / "model.safetensors", metadata={"format": "pt"})
    return path
