"""Triton body for decode rows: one query token a row, the heads of one KV head in a tile, KV split over programs.

The tile loop runs from the window's first tile to the row's last: its length is a run-time number. Where rows and KV
heads alone would not fill the card, a row's tiles are split over programs (flash decoding, Dao et al., 2023), whose
partial sums a second kernel combines.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention import common
from pallas_kernels.paged_attention.shapes import decode_splits, decode_tile
from pallas_kernels.platform import Target, next_power_of_2


class _Shape(NamedTuple):
    """All that is static. ``rows``: of the grid; ``tile``: key positions a program takes at once."""

    tokens: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    block: int
    tile: int
    splits: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def decode_triton(
    q: jax.Array,  # [T, N, H]
    pool: jax.Array,
    *,
    layer: int | jax.Array,
    block_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    count: jax.Array,  # int32 []  tokens [:count] are decode rows of their own
    num_tokens: jax.Array,
    rows: int,  # the most that count can be
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    alibi: jax.Array | None,
    kv_scales: jax.Array | None,
    target: Target,
) -> jax.Array:
    """[T, N, H]: tokens [:count] attended, tokens [num_tokens:] zero, those between left unwritten (not even zero)."""
    operands = {
        "q": q,
        "pool": pool,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "tables": block_tables,
        "rows": token_rows,
        "positions": positions,
        "counts": jnp.stack([count, num_tokens]),
    }
    optional = {"sinks": sinks, "alibi": alibi, "scales": kv_scales}
    operands |= {name: x for name, x in optional.items() if x is not None}
    return _call(operands, rows=rows, scale=scale, window=window, soft_cap=soft_cap, target=target)


@partial(jax.jit, static_argnames=("rows", "scale", "window", "soft_cap", "target"))
def _call(
    operands: dict[str, jax.Array],
    *,
    rows: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    target: Target,
) -> jax.Array:
    q, pool = operands["q"], operands["pool"]
    tokens, heads, dim = q.shape
    _, _, _, kv_heads, block, _ = pool.shape
    tile = decode_tile(q, pool, target)
    splits = decode_splits(rows, kv_heads, operands["tables"].shape[1] * block, target)
    s = _Shape(tokens, rows, heads, kv_heads, dim, block, tile["block"], splits, scale, window, soft_cap)
    params = plt.CompilerParams(num_warps=tile["num_warps"], num_stages=tile["num_stages"])
    if splits == 1:
        return pl.pallas_call(
            partial(_decode_kernel, list(operands), s),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(rows, kv_heads, 1),
            compiler_params=params,
            interpret=target.interpret,
            name="paged_decode",
        )(*operands.values())
    partials = [
        jax.ShapeDtypeStruct((rows, heads, splits, dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, heads, 2, splits), jnp.float32),  # maximum and sum of weights
    ]
    first = {name: x for name, x in operands.items() if name != "sinks"}
    values, stats = pl.pallas_call(
        partial(_decode_kernel, list(first), s),
        out_shape=partials,
        grid=(rows, kv_heads, splits),
        compiler_params=params,
        interpret=target.interpret,
        name="paged_decode",
    )(*first.values())
    second = {"values": values, "stats": stats}
    second |= {name: operands[name] for name in ("positions", "counts", "sinks") if name in operands}
    return pl.pallas_call(
        partial(_combine_kernel, list(second), s),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(rows, heads),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=target.interpret,
        name="paged_combine",
    )(*second.values())


def _tiles(position: jax.Array, s: _Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First tile of a row, the one after its last, and the tiles of one split."""
    first = jnp.int32(0) if s.window is None else jnp.maximum(position - (s.window - 1), 0) // s.tile
    stop = (position + s.tile) // s.tile
    return first, stop, (stop - first + s.splits - 1) // s.splits


def _decode_kernel(names: list[str], s: _Shape, *refs: Any) -> None:
    ref, outs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    token, head, split = (pl.program_id(axis) for axis in range(3))
    count, num_tokens = ref["counts"][0], ref["counts"][1]
    rows = next_power_of_2(max(s.group, 16))  # tensor cores take 16 at least
    g = jnp.arange(rows, dtype=jnp.int32)
    d = jnp.arange(next_power_of_2(s.dim), dtype=jnp.int32)
    heads, inside = head * s.group + g, (g[:, None] < s.group) & (d[None] < s.dim)
    position = ref["positions"][token]
    first, stop, each = _tiles(position, s)
    low = first + split * each
    high = jnp.minimum(low + each, stop)

    def attend() -> common.Softmax:
        return _attend(ref, s, token, head, (low, high), position)

    if s.splits == 1:

        @pl.when(token < count)
        def _() -> None:
            sinks = plt.load(ref["sinks"].at[heads], mask=g < s.group, other=0.0) if "sinks" in ref else None
            out = common.finish(attend(), sinks)
            plt.store(outs[0].at[token, heads[:, None], d[None]], out.astype(outs[0].dtype), mask=inside)

        _clear(outs[0], s, token, num_tokens, heads[:, None], d[None], inside)
        return

    @pl.when((token < count) & (low < high))
    def _() -> None:
        state = attend()
        plt.store(outs[0].at[token, heads[:, None], split, d[None]], state.acc, mask=inside)
        plt.store(outs[1].at[token, heads, 0, split], state.top, mask=g < s.group)
        plt.store(outs[1].at[token, heads, 1, split], state.total, mask=g < s.group)


def _attend(
    ref: dict[str, Any],
    s: _Shape,
    token: jax.Array,
    head: jax.Array,
    tiles: tuple[jax.Array, jax.Array],
    position: jax.Array,
) -> common.Softmax:
    """The token's heads of one KV head over the given tiles."""
    pool, dtype = ref["pool"], common.compute_dtype(ref["q"].dtype, ref["pool"].dtype)
    rows, padded = next_power_of_2(max(s.group, 16)), next_power_of_2(s.dim)
    g, d = jnp.arange(rows, dtype=jnp.int32), jnp.arange(padded, dtype=jnp.int32)
    inside = (g[:, None] < s.group) & (d[None] < s.dim)
    q = plt.load(ref["q"].at[token, (head * s.group + g)[:, None], d[None]], mask=inside, other=0).astype(dtype)
    slopes = plt.load(ref["alibi"].at[head * s.group + g], mask=g < s.group, other=0.0) if "alibi" in ref else None
    row, layer = ref["rows"][token], ref["layer"][0]

    def body(i: jax.Array, state: common.Softmax) -> common.Softmax:
        at = i * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
        seen = at <= position
        if s.window is not None:
            seen &= at > position - s.window
        where = (common.block_ids(ref["tables"], row, at, seen, s.block), head, at % s.block, seen)
        key_scales = value_scales = None
        if "scales" in ref:
            key_scales, value_scales = (common.load_scales(ref["scales"], layer, which, *where) for which in (0, 1))
        keys = common.load_kv(pool, layer, 0, *where, dtype)
        x = common.logits(
            common.dot(q, keys.T),
            scale=s.scale,
            soft_cap=s.soft_cap,
            key_scales=key_scales,
            slopes=slopes,
            distance=(at - position)[None],
            seen=seen[None],
        )
        return common.absorb(state, x, common.load_kv(pool, layer, 1, *where, dtype), value_scales)

    return lax.fori_loop(*tiles, body, common.Softmax.start(rows, padded))


def _combine_kernel(names: list[str], s: _Shape, *refs: Any) -> None:
    ref, out = dict(zip(names, refs, strict=False)), refs[-1]
    token, head = pl.program_id(0), pl.program_id(1)
    count, num_tokens = ref["counts"][0], ref["counts"][1]
    d = jnp.arange(next_power_of_2(s.dim), dtype=jnp.int32)
    first, stop, each = _tiles(ref["positions"][token], s)

    @pl.when(token < count)
    def _() -> None:
        split = jnp.arange(s.splits, dtype=jnp.int32)
        used = split * each < stop - first  # the others have written nothing
        top = plt.load(ref["stats"].at[token, head, 0, split], mask=used, other=common.MASKED)
        total = plt.load(ref["stats"].at[token, head, 1, split], mask=used, other=0.0)
        mask = used[:, None] & (d[None] < s.dim)
        values = plt.load(ref["values"].at[token, head, split[:, None], d[None]], mask=mask, other=0.0)
        highest = top.max(axis=0)
        if "sinks" in ref:
            highest = jnp.maximum(highest, ref["sinks"][head] * common.LOG2E)
        weights = jnp.exp2(top - highest)
        total = (total * weights).sum(axis=0)
        if "sinks" in ref:
            total += jnp.exp2(ref["sinks"][head] * common.LOG2E - highest)
        x = (values * weights[:, None]).sum(axis=0) / jnp.where(total > 0, total, 1.0)
        plt.store(out.at[token, head, d], x.astype(out.dtype), mask=d < s.dim)

    _clear(out, s, token, num_tokens, head, d, d < s.dim)


def _clear(
    out: Any, s: _Shape, token: jax.Array, num_tokens: jax.Array, heads: jax.Array, d: jax.Array, mask: jax.Array
) -> None:
    """Zeros in padding tokens, each of which has one program of the grid: finite, whatever was there."""
    if s.rows == s.tokens:

        @pl.when(token >= num_tokens)
        def _() -> None:
            plt.store(out.at[token, heads, d], jnp.zeros(mask.shape, out.dtype), mask=mask)

        return

    def body(i: jax.Array, carry: None) -> None:
        plt.store(out.at[num_tokens + token + i * s.rows, heads, d], jnp.zeros(mask.shape, out.dtype), mask=mask)

    lax.fori_loop(0, (s.tokens - num_tokens - token + s.rows - 1) // s.rows, body, None)
