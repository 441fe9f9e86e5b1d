"""Rotary frequencies: reading them from config.json, and every scaling that Hugging Face transformers knows.

The factor rule: ``dynamic`` (NTK) and ``longrope`` depend on the length of the sequence. transformers picks it anew
at every step, so that keys already cached and new keys disagree. Here the length is ``max_model_len``, fixed once:
up to the original length the model keeps its original (short) factors, above it the factors are those that
transformers would use for one sequence of ``max_model_len`` tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import RopeSpec

# keys of rope_scaling / rope_parameters by kind; () = optional
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_KEYS: dict[str, tuple[set[str], set[str]]] = {  # kind -> (required, optional)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "longrope": (
        {"short_factor", "long_factor"},
        {"original_max_position_embeddings", "attention_factor", "factor"},
    ),
}


def rope_from_hf(
    config: HfConfig, head_dim: int, max_model_len: int | None, partial: float | None = None
) -> tuple[RopeSpec, int]:
    """(rope, longest sequence to serve) from ``rope_parameters`` (new) or ``rope_theta`` + ``rope_scaling`` (old).

    ``max_model_len`` None: the model's ``max_position_embeddings``. partial: the default of ``partial_rotary_factor``
    in families that have it, in others all features of a head rotate. ValueError names a field that is unknown, missing
    or out of range.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    numbers = HfConfig(config.get(field) or {}, prefix=f"{field}.")
    kind: Any = numbers.get("rope_type") or numbers.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    if kind not in _KEYS:
        raise numbers.error("rope_type", kind, f"one of {', '.join(_KEYS)}")
    numbers.check_keys(_COMMON | _KEYS[kind][0] | _KEYS[kind][1], required=_KEYS[kind][0])
    dim = _rotary_dim(numbers, config, head_dim, partial)
    theta = numbers.number("rope_theta", None) or config.number("rope_theta", 10000.0)
    if theta <= 0:
        raise config.error("rope_theta", theta, "above 0")
    trained = config.integer("max_position_embeddings")
    original = numbers.integer("original_max_position_embeddings", None)
    original = original or config.integer("original_max_position_embeddings", trained)
    original = trained if kind in ("linear", "dynamic") else original
    longest = _longest(kind, numbers, trained, original)
    served = trained if max_model_len is None else max_model_len
    if served > longest:
        raise ValueError(
            f"max_model_len: got {served}, must be at most {longest} (max_position_embeddings {trained}, rope {kind})"
        )
    rope = RopeSpec(
        theta=theta,
        dim=dim,
        kind=kind,
        original_len=original,
        **_READERS[kind](numbers, dim, trained, original, served),
    )
    return rope, served


def _rotary_dim(numbers: HfConfig, config: HfConfig, head_dim: int, partial: float | None) -> int:
    for source in (numbers, config):
        share = source.number("partial_rotary_factor", 1.0)
        if partial is None and share != 1.0:
            raise source.error("partial_rotary_factor", share, "1.0 for this model type")
        if not 0.0 < share <= 1.0:
            raise source.error("partial_rotary_factor", share, "above 0 and at most 1")
    if partial is None:
        if head_dim % 2:
            raise config.error("head_dim", head_dim, "even")
        return head_dim
    share = numbers.number("partial_rotary_factor", None) or config.number("partial_rotary_factor", partial)
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise config.error("partial_rotary_factor", share, f"such that an even number of {head_dim} features rotate")
    return dim


def ropes_by_kind(
    config: HfConfig, head_dim: int, max_model_len: int | None, thetas: dict[str, float]
) -> tuple[dict[str, RopeSpec], int]:
    """A rope for each of ``layer_types``' kinds, and the longest sequence. ``rope_parameters`` by kind (new), or
    ``rope_scaling`` of the layers with full attention (old). thetas: each kind's base where the config has none."""
    by_kind: Any = config.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or any(kind not in thetas for kind in by_kind):
        raise config.error("rope_parameters", by_kind, f"an object with {' and '.join(thetas)}")
    ropes, served = {}, []
    for kind, theta in thetas.items():
        own = by_kind.get(kind) or (config.get("rope_scaling") if kind == "full_attention" else None) or {}
        values = config.values | {"rope_scaling": None, "rope_theta": theta, "rope_parameters": own}
        ropes[kind], longest = rope_from_hf(HfConfig(values, config.prefix), head_dim, max_model_len)
        served.append(longest)
    return ropes, min(served)


def _longest(kind: str, numbers: HfConfig, trained: int, original: int) -> int:
    """What the frequencies are good for; configs state either the scaled or the original length."""
    if kind in ("linear", "dynamic", "yarn"):
        return max(trained, int(numbers.number("factor") * original))
    return trained


def _linear(n: HfConfig, dim: int, trained: int, original: int, served: int) -> dict[str, Any]:
    return {"factor": n.number("factor", low=1.0)}


def _dynamic(n: HfConfig, dim: int, trained: int, original: int, served: int) -> dict[str, Any]:
    return {"factor": n.number("factor", low=1.0), "seq_len": max(served, original)}


def _llama3(n: HfConfig, dim: int, trained: int, original: int, served: int) -> dict[str, Any]:
    low, high = n.number("low_freq_factor"), n.number("high_freq_factor")
    if high <= low:
        raise n.error("high_freq_factor", high, f"above low_freq_factor ({low})")
    return {"factor": n.number("factor", low=1.0), "low_freq_factor": low, "high_freq_factor": high}


def _yarn(n: HfConfig, dim: int, trained: int, original: int, served: int) -> dict[str, Any]:
    factor = n.number("factor", low=1.0)
    scale, scale_all = n.number("mscale", 0.0), n.number("mscale_all_dim", 0.0)
    inferred = _mscale(factor, scale) / _mscale(factor, scale_all) if scale and scale_all else _mscale(factor, 1.0)
    return {
        "factor": factor,
        "attention_factor": n.number("attention_factor", inferred, low=0.0),
        "beta_fast": n.number("beta_fast", 32.0) or 32.0,
        "beta_slow": n.number("beta_slow", 1.0) or 1.0,
        "truncate": n.boolean("truncate", True),
    }


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def yarn_scale(config: HfConfig) -> float:
    """What ``mscale_all_dim`` makes of queries and keys each in DeepSeek's attention, beside cos and sin."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    numbers = HfConfig(config.get(field) or {}, prefix=f"{field}.")
    scale = numbers.number("mscale_all_dim", 0.0)
    return _mscale(numbers.number("factor"), scale) if scale else 1.0


def _longrope(n: HfConfig, dim: int, trained: int, original: int, served: int) -> dict[str, Any]:
    factor = n.number("factor", trained / original)
    inferred = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    chosen = "long_factor" if served > original else "short_factor"
    for name in ("short_factor", "long_factor"):
        if len(n.numbers(name)) != dim // 2:
            raise n.error(name, f"{len(n.numbers(name))} numbers", f"{dim // 2} numbers (half the head dim)")
    return {
        "factor": factor,
        "attention_factor": n.number("attention_factor", inferred, low=0.0),
        "factors": n.numbers(chosen),
    }


_READERS = {
    "default": lambda n, dim, trained, original, served: {},
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    """float32 [dim / 2]: radians per position. In float32 throughout, as in transformers.

    Sources: linear (kaiokendev, 2023), dynamic NTK (bloc97 and emozilla, 2023), llama3 (Llama 3.1's reference code),
    yarn (Peng et al., 2023), longrope (Ding et al., 2024).
    """
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    theta = rope.theta
    if rope.kind == "dynamic":
        grown = rope.factor * rope.seq_len / rope.original_len - (rope.factor - 1.0)
        theta = theta * grown ** (rope.dim / (rope.dim - 2))
    powers = np.float32(theta) ** exponent
    if rope.kind == "longrope":
        return (1.0 / (np.asarray(rope.factors, np.float32) * powers)).astype(np.float32)
    freq = (np.float32(1.0) / powers).astype(np.float32)
    if rope.kind == "linear":
        return freq / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, freq)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, freq)
    return freq


def _llama3_frequencies(rope: RopeSpec, freq: np.ndarray) -> np.ndarray:
    """Long waves are divided by the factor, short ones kept, those between interpolated."""
    turns = rope.original_len / (2 * np.pi / freq)  # how often a wave fits into the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1.0 - smooth) * freq / rope.factor + smooth * freq).astype(np.float32)


def _yarn_frequencies(rope: RopeSpec, freq: np.ndarray) -> np.ndarray:
    """A linear ramp over the dimensions from the original frequencies to the interpolated ones."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.original_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high + 0.001 if low == high else high  # as transformers does against the singularity
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (freq / rope.factor * ramp + freq * (1.0 - ramp)).astype(np.float32)
