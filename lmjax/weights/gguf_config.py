"""A Hugging Face style config out of a GGUF file's metadata, so that one path builds the model from either."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from lmjax.weights.errors import WeightError
from lmjax.weights.gguf import GGUFFile, read_tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
ROPE_FREQS = "rope_freqs.weight"
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_REQUIRED = object()
_GEMMA = ("gemma", "gemma2", "gemma3")


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` of the file's model. Raises ``WeightError`` for what lmjax cannot run."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise WeightError(file.path, f"architecture {arch!r} is not supported; known: {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = _REQUIRED, kind: type = numbers.Real) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        if value is _REQUIRED:
            raise WeightError(file.path, f"metadata {arch}.{key} is missing")
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                raise WeightError(file.path, f"metadata {arch}.{key} differs by layer, which is not supported")
            value = value[0]
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise WeightError(file.path, f"metadata {arch}.{key}: got {value!r}, must be a {kind.__name__.lower()}")
        return value

    if get("expert_count", 0):
        raise WeightError(file.path, f"metadata {arch}.expert_count: mixture-of-experts files are not supported")
    if arch not in _GEMMA and 0 < get("attention.sliding_window", 0) < get("context_length"):
        raise WeightError(file.path, f"metadata {arch}.attention.sliding_window is not supported in a GGUF file")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", None) or hidden // max(heads, 1)
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise WeightError(file.path, "key, value and rotary sizes of a head differ, which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightError(file.path, "tensor token_embd.weight is missing, or not a matrix")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, get, head_dim),
        "hidden_act": "silu",
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file),
    }
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if arch in _GEMMA:
        config |= _gemma(arch, config, get)
    return config


def _gemma(arch: str, config: dict[str, Any], get: Any) -> dict[str, Any]:
    """What the file says otherwise, or leaves out, as llama.cpp's ``llama-model.cpp`` fills it in."""
    gelu = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if arch == "gemma":
        return gelu
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    largest = layers == {"gemma2": 46, "gemma3": 62}[arch]  # the 27B ones scale queries by another size
    found = gelu | {
        "model_type": arch if arch == "gemma2" else "gemma3_text",
        "sliding_window": get("attention.sliding_window"),
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
    }
    if arch == "gemma3":
        return found | {"rope_local_base_freq": get("rope.freq_base_swa", 10000.0)}
    return found | {
        "attn_logit_softcapping": get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": get("final_logit_softcapping", 30.0),
    }


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Token ids, and the sampling defaults that newer files carry (``general.sampling.*``)."""
    found = _token_ids(file)
    for key, name in SAMPLING.items():
        if f"general.sampling.{key}" in file.metadata:
            found[name] = file.metadata[f"general.sampling.{key}"]
    return found


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    """``eos_token_id`` is a list where the file also names an end-of-turn token: both end a reply."""

    def get(name: str) -> int | None:
        value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None

    ends = list(dict.fromkeys(i for i in (get("eos"), get("eot")) if i is not None))
    found = {"bos_token_id": get("bos"), "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None)}
    return {**found, "pad_token_id": get("padding")}


def _rope_scaling(file: GGUFFile, get: Any, head_dim: int) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none", str)
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    if kind == "none" and factor != 1.0:  # older files have only the factor
        kind = "linear"
    if factor <= 0.0:
        raise WeightError(file.path, f"metadata rope.scaling.factor: got {factor}, must be above 0")
    divisors = _rope_divisors(file)
    if divisors is not None:
        if kind != "none":
            raise WeightError(file.path, f"tensor {ROPE_FREQS} together with rope.scaling.type {kind} is not supported")
        return _llama3_scaling(file, divisors, get("rope.freq_base", 10000.0), head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise WeightError(file.path, f"rope.scaling.type {kind!r} is not supported; known: none, linear, yarn")
    original = get("rope.scaling.original_context_length", get("context_length"))
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (value := get(f"rope.scaling.{key}", None)) is not None:
            scaling[name] = value
    # the file's factor multiplies YaRN's own 0.1 ln(factor) + 1; a config's replaces it
    for key in ("attn_factor", "yarn_attn_factor"):
        if (value := get(f"rope.scaling.{key}", None)) not in (None, 1.0):
            scaling["attention_factor"] = value * (0.1 * math.log(factor) + 1.0)
    return scaling


def _rope_divisors(file: GGUFFile) -> np.ndarray | None:
    """float64 [H / 2], what llama.cpp divides each rotary frequency by; None where that changes nothing."""
    if ROPE_FREQS not in file.tensors:
        return None
    stored = read_tensor(file.tensors[ROPE_FREQS]).astype(np.float64).reshape(-1)
    return None if np.all(stored == 1.0) else stored


def _llama3_scaling(file: GGUFFile, stored: np.ndarray, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling from those divisors.

    The divisor is 1 for short waves, ``factor`` for long ones, and between them 1 / divisor is linear in the frequency.
    That line has two unknowns, so the original length is fixed at Llama 3's 8192 and the other two follow from it.
    """
    factor = float(stored.max(initial=1.0))
    original = 8192
    for low, high in [(1.0, 4.0), _fit_line(stored, base, head_dim, factor, original)]:
        if high > low and len(stored) == head_dim // 2:
            expected = llama3_divisors(base, head_dim, factor, low, high, original)
            if np.allclose(stored, expected, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise WeightError(file.path, f"tensor {ROPE_FREQS} is not of the form that Llama 3.1's rope scaling has")


def llama3_divisors(base: float, head_dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """float64 [H / 2]: what each rotary frequency is divided by (Llama 3.1's reference code)."""
    turns = original * base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _fit_line(stored: np.ndarray, base: float, head_dim: int, factor: float, original: int) -> tuple[float, float]:
    middle = np.flatnonzero((stored > 1.0 + 1e-6) & (stored < factor * (1 - 1e-6)))
    if len(middle) < 2:
        return 0.0, 0.0
    turns = original * base ** (-2.0 * middle / head_dim) / (2 * math.pi)
    smooth = (1.0 / stored[middle] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(turns, smooth, 1)
    low, high = -offset / slope, (1.0 - offset) / slope
    # the converter read round numbers from a config.json
    rounded = round(low, 2), round(high, 2)
    return rounded if np.allclose(rounded, (low, high), rtol=1e-3) else (float(low), float(high))
