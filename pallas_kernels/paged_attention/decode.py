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


class Shape(NamedTuple):
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

    @property
    def lanes(self) -> int:
        """Rows of the tensor cores' tile that the group's heads are padded to: 16 at least."""
        return next_power_of_2(max(self.group, 16))


class Static(NamedTuple):
    """What a decode program is traced for, beside shapes."""

    rows: int
    scale: float
    window: int | None
    soft_cap: float | None
    target: Target


def operands_of(
    q: jax.Array,
    pool: jax.Array,
    *,
    layer: int | jax.Array,
    block_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    count: jax.Array,
    num_tokens: jax.Array,
    sinks: jax.Array | None,
    alibi: jax.Array | None,
    kv_scales: jax.Array | None,
    **static: Any,
) -> tuple[dict[str, jax.Array], Static]:
    """The arguments of ``decode_triton`` as the kernels take them: scalars as arrays of one, no absent ones."""
    required = {
        "q": q,
        "pool": pool,
        "tables": block_tables,
        "rows": token_rows,
        "positions": positions,
        "count": count.reshape(1),
        "num_tokens": num_tokens.reshape(1),
    }
    return common.operands_of(required, layer=layer, sinks=sinks, alibi=alibi, kv_scales=kv_scales), Static(**static)


def shape_of(operands: dict[str, jax.Array], tile: int, static: Static) -> Shape:
    q, pool = operands["q"], operands["pool"]
    tokens, heads, dim = q.shape
    _, _, _, kv_heads, block, _ = pool.shape
    splits = decode_splits(static.rows, kv_heads, operands["tables"].shape[1] * block, static.target)
    scores = (static.scale, static.window, static.soft_cap)
    return Shape(tokens, static.rows, heads, kv_heads, dim, block, tile, splits, *scores)


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
    operands, static = operands_of(
        q,
        pool,
        layer=layer,
        block_tables=block_tables,
        token_rows=token_rows,
        positions=positions,
        count=count,
        num_tokens=num_tokens,
        rows=rows,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
        kv_scales=kv_scales,
        target=target,
    )
    return _call(operands, static)


@partial(jax.jit, static_argnames=("static",))
def _call(operands: dict[str, jax.Array], static: Static) -> jax.Array:
    q, target = operands["q"], static.target
    tile = decode_tile(q, operands["pool"], target)
    s = shape_of(operands, tile["block"], static)
    params = plt.CompilerParams(num_warps=tile["num_warps"], num_stages=tile["num_stages"])
    if s.splits == 1:
        return pl.pallas_call(
            partial(_decode_kernel, list(operands), s),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(s.rows, s.kv_heads, 1),
            compiler_params=params,
            interpret=target.interpret,
            name="paged_decode",
        )(*operands.values())
    first = {name: x for name, x in operands.items() if name != "sinks"}
    values, stats = pl.pallas_call(
        partial(_decode_kernel, list(first), s),
        out_shape=partials(s, s.lanes),
        grid=(s.rows, s.kv_heads, s.splits),
        compiler_params=params,
        interpret=target.interpret,
        name="paged_decode",
    )(*first.values())
    return combine(operands, values, stats, s, interpret=target.interpret)


def partials(s: Shape, lanes: int) -> list[jax.ShapeDtypeStruct]:
    """What each split leaves: weighted values [rows, K, splits, G, H]; maximum and sum of weights [..., 2, lanes]."""
    lead = (s.rows, s.kv_heads, s.splits)
    return [
        jax.ShapeDtypeStruct((*lead, s.group, s.dim), jnp.float32),
        jax.ShapeDtypeStruct((*lead, 2, lanes), jnp.float32),
    ]


def combine(
    operands: dict[str, jax.Array], values: jax.Array, stats: jax.Array, s: Shape, interpret: bool
) -> jax.Array:
    """[T, N, H] from the partial sums of ``partials``."""
    names = ("positions", "count", "num_tokens", "sinks")
    given = {"values": values, "stats": stats} | {name: operands[name] for name in names if name in operands}
    return pl.pallas_call(
        partial(_combine_kernel, list(given), s),
        out_shape=jax.ShapeDtypeStruct((s.tokens, s.heads, s.dim), operands["q"].dtype),
        grid=(s.rows, s.heads),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_combine",
    )(*given.values())


def tiles_of_split(position: jax.Array, s: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First tile of a row, the one after its last, and the tiles of one split."""
    first = jnp.int32(0) if s.window is None else jnp.maximum(position - (s.window - 1), 0) // s.tile
    stop = (position + s.tile) // s.tile
    return first, stop, (stop - first + s.splits - 1) // s.splits


def _decode_kernel(names: list[str], s: Shape, *refs: Any) -> None:
    ref, outs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    token, head, split = (pl.program_id(axis) for axis in range(3))
    count, num_tokens = ref["count"][0], ref["num_tokens"][0]
    g = jnp.arange(s.lanes, dtype=jnp.int32)
    d = jnp.arange(next_power_of_2(s.dim), dtype=jnp.int32)
    heads, inside = head * s.group + g, (g[:, None] < s.group) & (d[None] < s.dim)
    position = ref["positions"][token]
    first, stop, each = tiles_of_split(position, s)
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
        plt.store(outs[0].at[token, head, split, g[:, None], d[None]], state.acc, mask=inside)
        plt.store(outs[1].at[token, head, split, 0, g], state.top, mask=g < s.group)
        plt.store(outs[1].at[token, head, split, 1, g], state.total, mask=g < s.group)


def _attend(
    ref: dict[str, Any],
    s: Shape,
    token: jax.Array,
    head: jax.Array,
    tiles: tuple[jax.Array, jax.Array],
    position: jax.Array,
) -> common.Softmax:
    """The token's heads of one KV head over the given tiles."""
    dtype = common.compute_dtype(ref["q"].dtype, ref["pool"].dtype)
    padded = next_power_of_2(s.dim)
    g, d = jnp.arange(s.lanes, dtype=jnp.int32), jnp.arange(padded, dtype=jnp.int32)
    inside = (g[:, None] < s.group) & (d[None] < s.dim)
    q = plt.load(ref["q"].at[token, (head * s.group + g)[:, None], d[None]], mask=inside, other=0).astype(dtype)
    slopes = plt.load(ref["alibi"].at[head * s.group + g], mask=g < s.group, other=0.0) if "alibi" in ref else None
    row = ref["rows"][token]

    def body(i: jax.Array, state: common.Softmax) -> common.Softmax:
        at = i * s.tile + jnp.arange(s.tile, dtype=jnp.int32)
        seen = at <= position
        if s.window is not None:
            seen &= at > position - s.window
        blocks = common.block_ids(ref["tables"], row, at, seen, s.block)
        scores = {"scale": s.scale, "soft_cap": s.soft_cap, "slopes": slopes, "seen": seen[None]}
        return common.take_in(state, ref, q, blocks, head, at % s.block, seen, distance=(at - position)[None], **scores)

    return lax.fori_loop(*tiles, body, common.Softmax.start(s.lanes, padded))


def _combine_kernel(names: list[str], s: Shape, *refs: Any) -> None:
    ref, out = dict(zip(names, refs, strict=False)), refs[-1]
    token, head = pl.program_id(0), pl.program_id(1)
    count, num_tokens = ref["count"][0], ref["num_tokens"][0]
    d = jnp.arange(next_power_of_2(s.dim), dtype=jnp.int32)
    first, stop, each = tiles_of_split(ref["positions"][token], s)

    @pl.when(token < count)
    def _() -> None:
        split = jnp.arange(s.splits, dtype=jnp.int32)
        used = split * each < stop - first  # the others have written nothing
        kv_head, g = head // s.group, head % s.group
        top = plt.load(ref["stats"].at[token, kv_head, split, 0, g], mask=used, other=common.MASKED)
        total = plt.load(ref["stats"].at[token, kv_head, split, 1, g], mask=used, other=0.0)
        mask = used[:, None] & (d[None] < s.dim)
        values = plt.load(ref["values"].at[token, kv_head, split[:, None], g, d[None]], mask=mask, other=0.0)
        highest = top.max(axis=0)
        weights = jnp.exp2(top - highest)
        total = (total * weights).sum(axis=0)
        if "sinks" in ref:
            total += jnp.exp2(ref["sinks"][head] * common.LOG2E - highest)
        x = (values * weights[:, None]).sum(axis=0) / jnp.where(total > 0, total, 1.0)
        plt.store(out.at[token, head, d], x.astype(out.dtype), mask=d < s.dim)

    _clear(out, s, token, num_tokens, head, d, d < s.dim)


def _clear(
    out: Any, s: Shape, token: jax.Array, num_tokens: jax.Array, heads: jax.Array, d: jax.Array, mask: jax.Array
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
