"""Triton body for prefill rows: a tile is some query tokens of one row times the query heads of one KV head.

The grid has room for every way to cut T tokens of S rows into tiles; a program finds its row by bisection, and those
too many leave at once, so that nothing about tiles is made on the host. Key positions come in two loops: those that
the whole tile sees, unmasked, then the edges of the causal triangle and of the window.
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
from pallas_kernels.paged_attention.shapes import prefill_tile
from pallas_kernels.platform import Target, next_power_of_2


class _Shape(NamedTuple):
    """All that is static. ``queries``: rows of a tile (tokens x heads); ``keys``: positions it takes in at once."""

    tokens: int
    rows: int
    heads: int
    kv_heads: int
    dim: int
    block: int
    queries: int
    keys: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile: those of the KV head, or as many of them as fit."""
        return min(self.group, self.queries)

    @property
    def chunks(self) -> int:
        return -(-self.group // self.tile_heads)

    @property
    def tile_tokens(self) -> int:
        return self.queries // self.tile_heads

    @property
    def grid(self) -> tuple[int, int]:
        """A row of n tokens has at most n // tile_tokens + 1 tiles."""
        return (self.tokens // self.tile_tokens + self.rows, self.kv_heads * self.chunks)


class _Tile(NamedTuple):
    """Where a program is: int32 scalars."""

    row: jax.Array
    token: jax.Array  # index in T of its first token
    length: jax.Array  # its tokens; 0 or less: nothing to do
    position: jax.Array  # of its first token in the sequence


def prefill_triton(
    q: jax.Array,  # [T, N, H]
    out: jax.Array,  # [T, N, H]  updated in place where it is donated or a temporary
    pool: jax.Array,
    *,
    layer: int | jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    context_lens: jax.Array,
    num_decode: jax.Array,
    num_rows: jax.Array,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    alibi: jax.Array | None,
    kv_scales: jax.Array | None,
    target: Target,
) -> jax.Array:
    """``out`` with the tokens of rows [num_decode:num_rows] attended; the others as they were.

    Arguments as of ``pallas_kernels.paged_attention.paged_attention``.
    """
    required = {
        "q": q,
        "pool": pool,
        "tables": block_tables,
        "starts": query_starts,
        "lens": query_lens,
        "contexts": context_lens,
        "bounds": jnp.stack([num_decode, num_rows]),
    }
    operands = common.operands_of(required, layer=layer, sinks=sinks, alibi=alibi, kv_scales=kv_scales)
    return _call(operands, out, scale=scale, window=window, soft_cap=soft_cap, target=target)


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "target"))
def _call(
    operands: dict[str, jax.Array],
    out: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    target: Target,
) -> jax.Array:
    q, pool = operands["q"], operands["pool"]
    tokens, heads, dim = q.shape
    _, _, _, kv_heads, block, _ = pool.shape
    tile = prefill_tile(q, pool, target)
    rows = operands["tables"].shape[0]
    s = _Shape(tokens, rows, heads, kv_heads, dim, block, tile["queries"], tile["keys"], scale, window, soft_cap)
    return pl.pallas_call(
        partial(_kernel, list(operands), s),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=s.grid,
        input_output_aliases={len(operands): 0},
        compiler_params=plt.CompilerParams(num_warps=tile["num_warps"], num_stages=tile["num_stages"]),
        interpret=target.interpret,
        name="paged_prefill",
    )(*operands.values(), out)


def _kernel(names: list[str], s: _Shape, *refs: Any) -> None:
    ref, out = dict(zip(names, refs, strict=False)), refs[-1]
    # the last tiles of a row have the most keys: they start first, or the card would wait for them at the end
    tile = _find(ref, s, s.grid[0] - 1 - pl.program_id(0))
    head, chunk = pl.program_id(1) // s.chunks, pl.program_id(1) % s.chunks

    @pl.when(tile.length > 0)
    def _() -> None:
        r = jnp.arange(s.queries, dtype=jnp.int32)
        t, g = r // s.tile_heads, chunk * s.tile_heads + r % s.tile_heads
        real = (t < tile.length) & (g < s.group)
        d = jnp.arange(next_power_of_2(s.dim), dtype=jnp.int32)
        at, mask = (tile.token + t[:, None], (head * s.group + g)[:, None], d[None]), real[:, None] & (d[None] < s.dim)
        per_head = {
            name: plt.load(ref[name].at[head * s.group + g], mask=real, other=0.0) if name in ref else None
            for name in ("sinks", "alibi")
        }
        q = plt.load(ref["q"].at[at], mask=mask, other=0)
        state = _attend(ref, s, tile, head, q, tile.position + t, per_head["alibi"])
        plt.store(out.at[at], common.finish(state, per_head["sinks"]).astype(out.dtype), mask=mask)


def _find(ref: dict[str, Any], s: _Shape, index: jax.Array) -> _Tile:
    """The tile of this index. Row i of the prefill rows owns the indices from (tokens before it) // tile_tokens + i."""
    first = ref["bounds"][0]
    count = ref["bounds"][1] - first
    origin = ref["starts"][jnp.minimum(first, s.rows - 1)]

    def begin(i: jax.Array) -> jax.Array:
        return (ref["starts"][jnp.minimum(first + i, s.rows - 1)] - origin) // s.tile_tokens + i

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        right = begin(middle) <= index
        done = low >= high
        return jnp.where(done | ~right, low, middle + 1), jnp.where(done | right, high, middle)

    low, _ = lax.fori_loop(0, s.rows.bit_length(), halve, (jnp.int32(0), count))
    i = jnp.maximum(low - 1, 0)
    row = jnp.minimum(first + i, s.rows - 1)
    skipped = (index - begin(i)) * s.tile_tokens
    length = ref["lens"][row]
    mine = jnp.where(count > 0, jnp.minimum(length - skipped, s.tile_tokens), 0)
    return _Tile(row, ref["starts"][row] + skipped, mine, ref["contexts"][row] - length + skipped)


def _attend(
    ref: dict[str, Any],
    s: _Shape,
    tile: _Tile,
    head: jax.Array,
    q: jax.Array,  # [queries, D]
    positions: jax.Array,  # int32 [queries]
    slopes: jax.Array | None,  # float32 [queries]
) -> common.Softmax:
    q = q.astype(common.compute_dtype(q.dtype, ref["pool"].dtype))
    last = tile.position + tile.length - 1

    def absorb(i: jax.Array, state: common.Softmax, edge: bool) -> common.Softmax:
        at = i * s.keys + jnp.arange(s.keys, dtype=jnp.int32)
        held = seen = None
        if edge:  # past the last position and before the window lie places that hold anything
            held, seen = at <= last, at[None] <= positions[:, None]
            if s.window is not None:
                held &= at > tile.position - s.window
                seen &= at[None] > positions[:, None] - s.window
            blocks = common.block_ids(ref["tables"], tile.row, at, held, s.block)
        else:
            blocks = plt.load(ref["tables"].at[tile.row, at // s.block])
        distance = None if slopes is None else at[None] - positions[:, None]
        scores = {"scale": s.scale, "soft_cap": s.soft_cap, "slopes": slopes, "seen": seen}
        return common.take_in(state, ref, q, blocks, head, at % s.block, held, distance=distance, **scores)

    full, lead, trail = _loops(s, tile.position, last)
    state = common.Softmax.start(s.queries, next_power_of_2(s.dim))
    state = lax.fori_loop(*full, lambda i, state: absorb(i, state, False), state)
    before = lead[1] - lead[0]

    def edge(j: jax.Array, state: common.Softmax) -> common.Softmax:
        return absorb(jnp.where(j < before, lead[0] + j, trail[0] + j - before), state, True)

    return lax.fori_loop(0, before + trail[1] - trail[0], edge, state)


_Range = tuple[jax.Array, jax.Array]


def _loops(s: _Shape, first: jax.Array, last: jax.Array) -> tuple[_Range, _Range, _Range]:
    """Key tiles of queries at positions first .. last: those that all see whole, those before and those after."""
    end, full_end = last // s.keys + 1, (first + 1) // s.keys
    if s.window is None:
        zero = jnp.zeros_like(end)
        return (zero, full_end), (zero, zero), (full_end, end)
    begin = jnp.maximum(first - (s.window - 1), 0) // s.keys
    full_begin = jnp.minimum((jnp.maximum(last - (s.window - 1), 0) + s.keys - 1) // s.keys, end)
    full_end = jnp.maximum(full_end, full_begin)
    return (full_begin, full_end), (begin, full_begin), (full_end, end)
