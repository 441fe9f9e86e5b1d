"""Triton body of quant_matmul: weights are widened in registers, scales are applied to the accumulator.

A program owns a tile of the output and walks K in steps. A step of int4 covers ``parts`` whole groups, or a piece of
one larger group; of each it reads the bytes once and makes two products, one a nibble. Integers and e4m3 values are
exact in bfloat16, so only the accumulation rounds. With few tokens K is split and the partial sums are added by XLA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.platform import Target
from pallas_kernels.quant_matmul.pieces import Walk, nibbles_of, scale_of, walk_of
from pallas_kernels.quant_matmul.tiles import Tile, splits_of, tile_of
from pallas_kernels.quant_matmul.weight import FP8_BLOCK, NIBBLES, Kind, QuantWeight


def quant_matmul_triton(x: jax.Array, w: QuantWeight, *, out_dtype: Any, target: Target) -> jax.Array:
    """x [T, K], w of [K, N] -> [T, N]."""
    tile = tile_of(w.kind, w.group, x.shape[0], x.dtype.itemsize, target)
    return _call(x, w, tile=tile, out_dtype=jnp.dtype(out_dtype), target=target)


@partial(jax.jit, static_argnames=("tile", "out_dtype", "target"))  # equal layers lower once
def _call(x: jax.Array, w: QuantWeight, *, tile: Tile, out_dtype: Any, target: Target) -> jax.Array:
    tokens, (k, n) = x.shape[0], w.shape
    walk = walk_of(k, w.values.shape[0], w.group, tile.block_k)
    splits = min(splits_of(tile, tokens, k, n, target), walk.steps)
    shape = (splits, tokens, n)
    body = partial(_body, w_kind=w.kind, has_zero=w.zero is not None, tile=tile, walk=walk, splits=splits)
    operands = [x, w.values, w.scale] + ([] if w.zero is None else [w.zero])
    out = pl.pallas_call(
        body,
        # neighbours share a tile of weights, so that it is read once from memory
        grid=(pl.cdiv(tokens, tile.block_m), pl.cdiv(n, tile.block_n), splits),
        out_shape=jax.ShapeDtypeStruct(shape, out_dtype if splits == 1 else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=target.interpret,
        name="quant_matmul",
    )(*operands)
    return out[0] if splits == 1 else out.sum(0).astype(out_dtype)


def _body(
    x_ref: Any,  # [T, K]
    w_ref: Any,  # values
    scale_ref: Any,
    *refs: Any,  # zeros where there are any, and the output [splits, T, N]
    w_kind: Kind,
    has_zero: bool,
    tile: Tile,
    walk: Walk,
    splits: int,
) -> None:
    zero_ref, out_ref = (refs[0] if has_zero else None), refs[-1]
    tokens, n = x_ref.shape[0], w_ref.shape[1]
    split = pl.program_id(2)
    t = pl.program_id(0) * tile.block_m + jnp.arange(tile.block_m, dtype=jnp.int32)
    col = pl.program_id(1) * tile.block_n + jnp.arange(tile.block_n, dtype=jnp.int32)
    t_ok, n_ok = t < tokens, (col < n if n % tile.block_n else None)
    row = jnp.arange(walk.rows, dtype=jnp.int32)
    scale_column = pl.program_id(1) * tile.block_n // FP8_BLOCK  # of fp8_block

    def load_x(at: jax.Array, ok: jax.Array | None) -> jax.Array:
        return plt.load(x_ref.at[t[:, None], at[None]], mask=_both(t_ok, ok), other=0)

    def per_group(ref: Any, group: jax.Array) -> jax.Array:
        group = jnp.minimum(group, ref.shape[0] - 1)  # past the end: x is 0 there
        return plt.load(ref.at[group, col], mask=n_ok, other=None if n_ok is None else 0)[None]

    def piece(index: jax.Array, acc: jax.Array) -> jax.Array:
        """Adds what piece ``index`` of K gives, index counting over all spans."""
        span, inner = index // walk.pieces, (index % walk.pieces) * walk.rows + row
        at = span * walk.span + inner
        ok = None if walk.exact else (inner < walk.span) & (at < w_ref.shape[0])
        mask = _both(ok, n_ok)
        values = plt.load(w_ref.at[at[:, None], col[None]], mask=mask)
        if w_kind in NIBBLES:
            first = span * (2 * walk.span) + inner
            low, high = load_x(first, ok), load_x(first + walk.span, ok)
            wide, others = nibbles_of(values, w_kind, has_zero, low.dtype)
            y = _dot(low, wide) + _dot(high, others)
            if zero_ref is not None:
                total = jnp.sum(low.astype(jnp.float32) + high.astype(jnp.float32), axis=1)
                y = y - total[:, None] * per_group(zero_ref, span).astype(jnp.float32)
            return acc + y * scale_of(per_group(scale_ref, span), w_kind)
        xs, wide = load_x(at, ok), values.astype(x_ref.dtype)
        if ok is not None:  # what lies beyond the mask is anything, NaN too; Triton has no fp8 constant to load instead
            wide = jnp.where(ok[:, None], wide, jnp.zeros((), wide.dtype))
        y = _dot(xs, wide)
        if w_kind == "fp8_block":  # block_n divides 128: one scale for the whole tile
            scale = plt.load(scale_ref.at[jnp.minimum(span, scale_ref.shape[0] - 1), scale_column])
            y = y * scale.astype(jnp.float32)
        elif w_kind in ("int8_group", "fp8_group"):
            y = y * scale_of(per_group(scale_ref, span), w_kind)
        return acc + y

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        for part in range(walk.parts):
            acc = piece(i * walk.parts + part, acc)
        return acc

    per_split = pl.cdiv(walk.steps, splits)
    begin = split * per_split
    end = jnp.minimum(begin + per_split, walk.steps)
    acc = lax.fori_loop(begin, end, step, jnp.zeros((tile.block_m, tile.block_n), jnp.float32))
    if w_kind in ("int8", "fp8"):
        scale = plt.load(scale_ref.at[col], mask=n_ok, other=None if n_ok is None else 0)
        acc = acc * scale.astype(jnp.float32)[None]
    plt.store(out_ref.at[split, t[:, None], col[None]], acc.astype(out_ref.dtype), mask=_both(t_ok, n_ok))


def _both(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a tile; None: all of it. What divides evenly is not masked."""
    if rows is None or columns is None:
        return columns[None] if rows is None and columns is not None else None if rows is None else rows[:, None]
    return rows[:, None] & columns[None]


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    # float32 means float32: the default would round both to TF32
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return plt.dot(x, w, precision=precision)
