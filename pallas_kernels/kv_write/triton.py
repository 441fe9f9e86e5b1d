"""Triton body of kv_write: reads qkv once and writes q, K and V, the pool in place.

qkv is taken as rows of heads, [T * K * (G + 2), H] (in XLA a bitcast: the projection's GEMM writes that layout), and a
program takes some consecutive rows, whatever their kind, so nothing is padded but H. A head is loaded as its two
rotary halves and the rest, since registers cannot be sliced.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kv_write.reference import LARGEST, SMALLEST_SCALE
from pallas_kernels.kv_write.shapes import write_tile
from pallas_kernels.platform import Target, next_power_of_2


class _Shape(NamedTuple):
    tokens: int
    kv_heads: int
    group: int
    dim: int
    half: int  # R / 2, 0 without rotary embedding
    rows: int  # rows of a program
    plus_one: bool  # of the norms

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(first feature, features) of a head's loads: the rotary halves, then what does not rotate."""
        parts = [(0, self.half), (self.half, self.half), (2 * self.half, self.dim - 2 * self.half)]
        return [(at, size) for at, size in parts if size]


def kv_write_triton(
    qkv: jax.Array,
    pool: jax.Array,
    *,
    cos: jax.Array | None,
    sin: jax.Array | None,
    layer: jax.Array,
    block_ids: jax.Array,
    offsets: jax.Array,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    kv_scales: jax.Array | None = None,
    target: Target,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Same arguments as ``pallas_kernels.kv_write.kv_write``."""
    inputs = {"qkv": qkv, "layer": layer.reshape(1), "block_ids": block_ids, "offsets": offsets}
    if cos is not None and sin is not None:
        inputs |= {"cos": cos, "sin": sin}
    if q_norm is not None and k_norm is not None:
        inputs |= {"q_norm": q_norm, "k_norm": k_norm}
    return _call(inputs, pool, kv_scales, eps=eps, plus_one=plus_one, target=target)


@partial(jax.jit, static_argnames=("eps", "plus_one", "target"))
def _call(
    inputs: dict[str, jax.Array],
    pool: jax.Array,
    kv_scales: jax.Array | None,
    *,
    eps: float,
    plus_one: bool,
    target: Target,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    kv_heads, heads, dim, tokens = inputs["qkv"].shape
    tile = write_tile(inputs["qkv"], pool, target)
    half = inputs["cos"].shape[0] if "cos" in inputs else 0
    shape = _Shape(tokens, kv_heads, heads - 2, dim, half, tile["rows"], plus_one)
    operands = {**inputs, "qkv": inputs["qkv"].transpose(3, 0, 1, 2).reshape(-1, dim)}
    if half:
        operands |= {"cos": inputs["cos"].T, "sin": inputs["sin"].T}  # [T, R / 2]
    held = {"pool": pool} if kv_scales is None else {"pool": pool, "scales": kv_scales}
    names = [*operands, *held]
    out_names = ["q", *held]

    def body(*refs: Any) -> None:
        _kernel(
            dict(zip(names, refs, strict=False)) | dict(zip(out_names, refs[len(names) :], strict=True)), shape, eps
        )

    q_shape = jax.ShapeDtypeStruct((tokens, kv_heads * (heads - 2), dim), inputs["qkv"].dtype)
    q, *updated = pl.pallas_call(
        body,
        out_shape=[q_shape, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in held.values())],
        grid=(pl.cdiv(tokens * kv_heads * heads, shape.rows),),
        input_output_aliases={len(operands) + i: 1 + i for i in range(len(held))},
        compiler_params=plt.CompilerParams(num_warps=tile["num_warps"], num_stages=1),
        interpret=target.interpret,
        name="kv_write",
    )(*operands.values(), *held.values())
    return q, updated[0], updated[1] if kv_scales is not None else None


def _kernel(refs: dict[str, Any], s: _Shape, eps: float) -> None:
    row = pl.program_id(0) * s.rows + jnp.arange(s.rows, dtype=jnp.int32)
    heads = s.group + 2
    real = row < s.tokens * s.kv_heads * heads
    token, kv_head, kind = row // (s.kv_heads * heads), (row // heads) % s.kv_heads, row % heads
    is_q, is_v = kind < s.group, kind == heads - 1
    x = [_load_rows(refs["qkv"], row, real, part) for part in s.parts]
    dtype = x[0].dtype
    x = [part.astype(jnp.float32) for part in x]
    if "q_norm" in refs:
        x = _norm(refs, x, is_q, is_v, s, eps, dtype)
    if s.half:
        x = _rotate(refs, x, token, real & ~is_v, s)
    x = [part.astype(dtype) for part in x]

    # a masked lane gets an index out of bounds: the interpreter writes the old value back there
    to_q = real & is_q
    q_at = (jnp.where(to_q, token, s.tokens), kv_head * s.group + kind)
    _store_rows(refs["q"], q_at, x, to_q, s)
    to_pool = real & ~is_q
    block = plt.load(refs["block_ids"].at[token], mask=to_pool, other=0)
    offset = plt.load(refs["offsets"].at[token], mask=to_pool, other=0)
    block = jnp.where(to_pool, block, refs["pool"].shape[2])
    at = (jnp.full_like(row, refs["layer"][0]), jnp.where(is_v, 1, 0), block, kv_head, offset)
    if "scales" in refs:
        x, scale = _quantize(x, refs["pool"].dtype)
        plt.store(refs["scales"].at[at], scale, mask=to_pool)
    _store_rows(refs["pool"], at, x, to_pool, s)


def _features(part: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """A part's feature indices [1, power of 2], and which of them exist."""
    lane = jnp.arange(next_power_of_2(part[1]), dtype=jnp.int32)[None, :]
    return part[0] + lane, lane < part[1]


def _load_rows(ref: Any, row: jax.Array, real: jax.Array, part: tuple[int, int]) -> jax.Array:
    d, inside = _features(part)
    return plt.load(ref.at[row[:, None], d], mask=real[:, None] & inside, other=0)


def _store_rows(ref: Any, at: tuple[jax.Array, ...], x: list[jax.Array], mask: jax.Array, s: _Shape) -> None:
    for part, value in zip(s.parts, x, strict=True):
        d, inside = _features(part)
        plt.store(ref.at[(*(i[:, None] for i in at), d)], value.astype(ref.dtype), mask=mask[:, None] & inside)


def _norm(
    refs: dict[str, Any], x: list[jax.Array], is_q: jax.Array, is_v: jax.Array, s: _Shape, eps: float, dtype: jnp.dtype
) -> list[jax.Array]:
    """RMSNorm of query and key rows, rounded where ``pallas_kernels.heads.rms_norm`` rounds."""
    mean = sum((part * part).sum(1) for part in x) * jnp.float32(1 / s.dim)
    factor = jax.lax.rsqrt(mean + jnp.float32(eps))[:, None]
    out = []
    for part, value in zip(s.parts, x, strict=True):
        d, inside = _features(part)
        q_weight, k_weight = (plt.load(refs[name].at[d], mask=inside, other=0) for name in ("q_norm", "k_norm"))
        weight = jnp.where(is_q[:, None], q_weight, k_weight)
        if s.plus_one:
            y = (value * factor * (weight.astype(jnp.float32) + 1.0)).astype(dtype).astype(jnp.float32)
            out.append(jnp.where(is_v[:, None], value, y))
            continue
        weight = weight.astype(dtype).astype(jnp.float32)
        # the product of two 16-bit floats is exact in float32
        y = ((value * factor).astype(dtype).astype(jnp.float32) * weight).astype(dtype).astype(jnp.float32)
        out.append(jnp.where(is_v[:, None], value, y))
    return out


def _rotate(refs: dict[str, Any], x: list[jax.Array], token: jax.Array, turns: jax.Array, s: _Shape) -> list[jax.Array]:
    d, inside = _features((0, s.half))
    at, mask = (token[:, None], d), turns[:, None] & inside
    cos = plt.load(refs["cos"].at[at], mask=mask, other=0)
    sin = plt.load(refs["sin"].at[at], mask=mask, other=0)
    a, b = x[:2]
    return [jnp.where(mask, a * cos - b * sin, a), jnp.where(mask, b * cos + a * sin, b), *x[2:]]


def _quantize(x: list[jax.Array], dtype: jnp.dtype) -> tuple[list[jax.Array], jax.Array]:
    """As ``pallas_kernels.kv_write.reference.quantize``, over the parts of each row."""
    largest = jnp.float32(LARGEST[dtype.name])
    x = [part.astype(jnp.float32) for part in x]
    top = jnp.abs(x[0]).max(1)
    for part in x[1:]:
        top = jnp.maximum(top, jnp.abs(part).max(1))
    scale = top / largest
    inverse = jnp.where(scale > jnp.float32(SMALLEST_SCALE), 1 / scale, jnp.float32(0))
    least = jnp.float32(-LARGEST[dtype.name])  # Triton cannot lower the negation of a constant
    x = [jnp.minimum(jnp.maximum(part * inverse[:, None], least), largest) for part in x]
    if dtype == jnp.int8:
        x = [jnp.floor(part + jnp.float32(0.5)) for part in x]
    return x, scale
