"""Checkpoints in the layouts that quantisers write, from their published descriptions; and the floats they stand for.

Everything is written element by element from the definition (value = (q - zero) * scale), with code of its own: the
readers' helpers are not used here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.weights.checkpoints import LLAMA, tensors, write_hf

# 128 input features in every matrix: blocks and groups of 128 have to fit
CONFIG: dict[str, Any] = LLAMA | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
}
FP8 = ml_dtypes.float8_e4m3fn


@dataclass
class Matrix:
    """What stands in place of ``name.weight``: tensors by suffix, and the floats [out, in]."""

    parts: dict[str, np.ndarray]
    floats: np.ndarray


Writer = Callable[[np.ndarray, np.random.Generator], Matrix]


@dataclass
class Layout:
    """``quantization_config`` and how a matrix is written. skip: modules that stay floats."""

    config: dict[str, Any]
    write: Writer
    skip: tuple[str, ...] = ("lm_head",)
    more: dict[str, np.ndarray] = field(default_factory=dict)


def words(q: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers of the last axis, ``32 / bits`` a word: place i of a word holds the word's element order[i]."""
    per = 32 // bits
    out = np.zeros((*q.shape[:-1], q.shape[-1] // per), np.uint64)
    for place in range(per):
        element = order[place] if order else place
        out |= q[..., element::per].astype(np.uint64) << np.uint64(bits * place)
    return out.astype(np.uint32).view(np.int32)


def grid(
    w: np.ndarray, bits: int, group: int, symmetric: bool, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q [out, in], scale and zero [out, groups], floats [out, in]."""
    columns = w.shape[1]
    groups = np.arange(columns) // (group or columns) if groups is None else groups
    count, top = int(groups.max()) + 1, 2**bits - 1
    q, floats = np.zeros(w.shape, np.int64), np.zeros(w.shape, np.float64)
    scale, zero = np.zeros((len(w), count), np.float16), np.zeros((len(w), count), np.int64)
    for g in range(count):
        part = w[:, groups == g].astype(np.float64)
        if symmetric:
            s = (np.abs(part).max(1) / (2 ** (bits - 1) - 1)).astype(np.float16)
            z = np.full(len(w), 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            s = ((high - low) / top).astype(np.float16)
            z = np.clip(np.rint(-low / s.astype(np.float64)), 0, top).astype(np.int64)
        found = np.clip(np.rint(part / s.astype(np.float64)[:, None]) + z[:, None], 0, top)
        q[:, groups == g], scale[:, g], zero[:, g] = found, s, z
        floats[:, groups == g] = (found - z[:, None]) * s.astype(np.float64)[:, None]
    return q, scale, zero, floats


def gptq(bits: int, group: int, symmetric: bool, act_order: bool = False, version: int = 1) -> Layout:
    def write(w: np.ndarray, rng: np.random.Generator) -> Matrix:
        columns = w.shape[1]
        index = np.arange(columns) // (columns if group == -1 else group)
        if act_order:
            index = rng.permutation(index)
        q, scale, zero, floats = grid(w, bits, 0 if group == -1 else group, symmetric, index)
        kept = (zero - 1) % 2**bits if version == 1 else zero
        parts = {"qweight": words(q, bits).T, "qzeros": words(kept.T, bits), "scales": scale.T}
        return Matrix({**parts, "g_idx": index.astype(np.int32)}, floats)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
    config |= {"checkpoint_format": "gptq" if version == 1 else "gptq_v2", "damp_percent": 0.1, "lm_head": False}
    return Layout(config, write)


def awq(group: int) -> Layout:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(w: np.ndarray, rng: np.random.Generator) -> Matrix:
        q, scale, zero, floats = grid(w, 4, group, False)
        return Matrix({"qweight": words(q.T, 4, order), "qzeros": words(zero.T, 4, order), "scales": scale.T}, floats)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Layout({**config, "modules_to_not_convert": None}, write)


def _fp8_parts(w: np.ndarray, strategy: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """values [out, in], scale, floats."""
    if strategy == "block":
        out, columns = w.shape
        scale = np.zeros((-(-out // 128), -(-columns // 128)), np.float32)
        spread = np.zeros(w.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                scale[i, j] = np.abs(w[at]).max() / 448
                spread[at] = scale[i, j]
    elif strategy == "channel":
        scale = (np.abs(w).max(1, keepdims=True) / 448).astype(np.float32)
        spread = np.broadcast_to(scale.astype(np.float64), w.shape)
    else:
        scale = np.float32(np.abs(w).max() / 448).reshape(())
        spread = np.full(w.shape, float(scale))
    values = (w / spread).astype(np.float32).astype(FP8)
    return values, scale, values.astype(np.float64) * spread


def fp8(strategy: str, static: bool) -> Layout:
    def write(w: np.ndarray, rng: np.random.Generator) -> Matrix:
        values, scale, floats = _fp8_parts(w, strategy)
        parts = {"weight": values, "weight_scale_inv" if strategy == "block" else "weight_scale": scale}
        return Matrix({**parts, **({"input_scale": np.float32(0.5).reshape(())} if static else {})}, floats)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    if strategy == "block":
        config |= {"fmt": "e4m3", "weight_block_size": [128, 128]}
    return Layout({**config, "modules_to_not_convert": ["lm_head"]}, write)


def compressed(kind: str, strategy: str, symmetric: bool = True, group: int = 128, act_order: bool = False) -> Layout:
    """kind: int8, int4, int8-packed or fp8."""
    bits = 4 if kind == "int4" else 8

    def write(w: np.ndarray, rng: np.random.Generator) -> Matrix:
        if kind == "fp8":
            values, scale, floats = _fp8_parts(w, strategy)
            return Matrix({"weight": values, "weight_scale": scale.reshape(scale.shape or (1,))}, floats)
        columns = w.shape[1]
        index = np.arange(columns) // (group if strategy == "group" else columns)
        if act_order:
            index = rng.permutation(index)
        q, scale, zero, floats = grid(w, bits, 0, symmetric, index)
        middle = 2 ** (bits - 1)
        if kind == "int8":
            parts = {"weight": (q - middle).astype(np.int8), "weight_scale": scale}
            return Matrix(parts | ({} if symmetric else {"weight_zero_point": (zero - middle).astype(np.int8)}), floats)
        parts = {"weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": np.array(w.shape, np.int64)}
        if not symmetric:
            parts["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        if act_order:
            parts["weight_g_idx"] = index.astype(np.int32)
        return Matrix(parts, floats)

    weights = {"num_bits": bits, "type": "float" if kind == "fp8" else "int", "symmetric": symmetric}
    weights |= {"strategy": strategy, "group_size": group if strategy == "group" else None, "observer": "minmax"}
    weights |= {"dynamic": False, "actorder": "group" if act_order else None}
    weights["block_structure"] = [128, 128] if strategy == "block" else None
    form = {"fp8": "float-quantized", "int8": "int-quantized"}.get(kind, "pack-quantized")
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}
    scheme = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    scheme["input_activations"] = activations if kind == "int8" else None
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}
    return Layout(
        {**config, "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}, write
    )


_NEGATIVE = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
_NEGATIVE = (*_NEGATIVE, -0.28444138169288635, -0.18477343022833234, -0.09105003625154495, 0.0)
_POSITIVE = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
_POSITIVE = (*_POSITIVE, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
NF4 = np.array([*_NEGATIVE, *_POSITIVE], np.float32)


def bnb4(double: bool) -> Layout:
    def write(w: np.ndarray, rng: np.random.Generator) -> Matrix:
        blocks = w.reshape(-1, 64)
        scale = np.abs(blocks).max(1).astype(np.float32)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(w.shape)}
        parts: dict[str, np.ndarray] = {"weight.quant_map": NF4}
        if double:
            outer_map = np.linspace(-1, 1, 256).astype(np.float32)
            offset = float(scale.mean())
            chunks = [scale[i : i + 256] - np.float32(offset) for i in range(0, len(scale), 256)]
            outer = np.array([np.abs(c).max() for c in chunks], np.float32)
            codes = np.concatenate(
                [np.abs(c[:, None] / o - outer_map).argmin(1) for c, o in zip(chunks, outer, strict=True)]
            ).astype(np.uint8)
            scale = outer_map[codes].astype(np.float64) * np.repeat(outer, 256)[: len(codes)] + offset
            parts |= {"weight.absmax": codes, "weight.nested_absmax": outer, "weight.nested_quant_map": outer_map}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            parts["weight.absmax"] = scale
        q = np.abs(blocks[:, :, None] / scale[:, None, None] - NF4).argmin(2)
        flat = q.reshape(-1).astype(np.uint8)
        parts["weight"] = (flat[0::2] * 16 + flat[1::2])[:, None]
        parts["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return Matrix(parts, (NF4[q].astype(np.float64) * scale[:, None]).reshape(w.shape))

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    config |= {"bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": "bfloat16"}
    return Layout({**config, "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0}, write)


def bnb8() -> Layout:
    def write(w: np.ndarray, rng: np.random.Generator) -> Matrix:
        scb = np.abs(w).max(1).astype(np.float32)
        q = np.rint(w * 127 / scb[:, None]).astype(np.int8)
        parts = {"weight": q, "SCB": scb, "weight_format": np.array(0, np.uint8)}
        return Matrix(parts, q * (scb.astype(np.float64)[:, None] / 127))

    return Layout({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, write)


LAYOUTS: dict[str, Layout] = {
    "gptq-4-g128-sym": gptq(4, 128, True),
    "gptq-4-g32-asym": gptq(4, 32, False),
    "gptq-4-all-v2": gptq(4, -1, False, version=2),
    "gptq-4-g32-act-order": gptq(4, 32, False, act_order=True),
    "gptq-4-g64-sym-act-order-v2": gptq(4, 64, True, act_order=True, version=2),
    "gptq-8-g64-sym": gptq(8, 64, True),
    "gptq-8-all-sym": gptq(8, -1, True),
    "gptq-8-g128-asym": gptq(8, 128, False),
    "awq-g64": awq(64),
    "awq-g128": awq(128),
    "fp8-static": fp8("tensor", True),
    "fp8-dynamic-channel": fp8("channel", False),
    "fp8-block": fp8("block", False),
    "ct-w8a8": compressed("int8", "channel"),
    "ct-w8a16-asym": compressed("int8", "channel", symmetric=False),
    "ct-w8a16-packed-g32": compressed("int8-packed", "group", group=32),
    "ct-w4a16-g128": compressed("int4", "group"),
    "ct-w4a16-g32-asym": compressed("int4", "group", symmetric=False, group=32),
    "ct-w4a16-channel": compressed("int4", "channel"),
    "ct-w4a16-act-order": compressed("int4", "group", group=64, act_order=True),
    "ct-fp8-tensor": compressed("fp8", "tensor"),
    "ct-fp8-channel": compressed("fp8", "channel"),
    "ct-fp8-block": compressed("fp8", "block"),
    "bnb-nf4": bnb4(False),
    "bnb-nf4-double": bnb4(True),
    "bnb-int8": bnb8(),
}
# what no weight type fits: floats, also where packed is asked for
NEVER_PACKED = {name for name in LAYOUTS if "act-order" in name or "nf4" in name}
NEVER_PACKED |= {"gptq-8-g128-asym", "ct-w8a16-asym"}


def write(directory: Path, name: str, config: dict[str, Any] = CONFIG) -> tuple[Path, Path]:
    """A quantised checkpoint, and one of the same floats (float32)."""
    layout, rng = LAYOUTS[name], np.random.default_rng(1)
    quantised: dict[str, np.ndarray] = {}
    floats: dict[str, np.ndarray] = {}
    for tensor, w in tensors(config).items():
        module = tensor.removesuffix(".weight")
        scaled = (w / np.sqrt(w.shape[-1])).astype(np.float32) if w.ndim == 2 else 1 + w / 10
        if module.endswith("_proj") and not any(module.endswith(skip) for skip in layout.skip):
            matrix = layout.write(scaled, rng)
            quantised |= {f"{module}.{part}": np.ascontiguousarray(x) for part, x in matrix.parts.items()}
            floats[tensor] = matrix.floats.astype(np.float32)
        else:
            quantised[tensor] = floats[tensor] = scaled
    return (
        write_hf(directory / "quantised", config | {"quantization_config": layout.config}, quantised),
        write_hf(directory / "floats", config, floats),
    )
