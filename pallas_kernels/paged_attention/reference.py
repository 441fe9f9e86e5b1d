"""XLA forms of paged attention: one for decode rows, one for tiles of prefill rows. Fast on a CPU, right everywhere.

Both walk the KV blocks in chunks with an online softmax (Milakov and Gimelshein, 2018) up to a bound known at run time.
Keys and values are gathered apart: gathering both at once and slicing was 1.3x slower on XLA:CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.platform import CPU, Target

# Query tokens of one sequence that share each gather of its blocks. Large tiles make the better products, small ones
# waste less: each size takes what fills it, and a rest of more than half of it. Each further size makes a start longer.
TILES = (256, 64)
TILE_BLOCKS = 16  # KV blocks a tile takes in at once
WHOLE_CHUNK = 2  # times as many where nothing is masked
GATHER = 128  # decode rows x blocks in one gather: larger spills the cache, smaller loses to loop overhead
# Where bits must not depend on the batch both are fixed. Fewer rows lose to loop overhead, more blocks to what short
# contexts and unused rows gather for nothing.
EXACT_ROWS, EXACT_BLOCKS = 16, 2


class _Logits(NamedTuple):
    """What turns products into logits, and stored numbers into keys and values."""

    soft_cap: float | None
    sinks: jax.Array | None  # float32 [K, G]
    alibi: jax.Array | None  # float32 [K, G]
    kv_scales: jax.Array | None  # float32 [L, 2, blocks, K, B]
    value_dim: int  # of a value; of a pool that holds keys alone it is their first numbers


class _Softmax(NamedTuple):
    """Running maximum and sum [..., Q], accumulated values [..., Q, V]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array


def _start(shape: tuple[int, ...], dim: int) -> _Softmax:
    return _Softmax(jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape), jnp.zeros((*shape, dim)))


def _absorb(
    state: _Softmax,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array | None,
    soft_cap: float | None,
    bias: jax.Array | None,
) -> _Softmax:
    """q [X, K, Q, H]; k [X, K, C, H]; v [X, K, C, V]; seen bool [X, Q or 1, C], None: all is; bias float32
    [X, K, Q, C]."""
    s = jnp.einsum("xkqh,xkch->xkqc", q, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        s = jnp.float32(soft_cap) * jnp.tanh(s / jnp.float32(soft_cap))
    if bias is not None:
        s = s + bias
    if seen is not None:
        s = jnp.where(seen[:, None], s, -jnp.inf)
    top = jnp.maximum(state.top, s.max(-1))
    safe = jnp.where(jnp.isfinite(top), top, jnp.float32(0))  # rows that have seen nothing yet
    p = jnp.exp(s - safe[..., None])
    fade = jnp.exp(state.top - safe)
    if seen is not None:  # a weight of zero would not stop a NaN in a masked V (null block, blocks not yet written)
        v = jnp.where(seen.any(1)[:, None, :, None], v, jnp.float32(0))
    pv = jnp.einsum("xkqc,xkch->xkqh", p, v, preferred_element_type=jnp.float32)
    return _Softmax(top, state.total * fade + p.sum(-1), state.acc * fade[..., None] + pv)


def _result(state: _Softmax, sinks: jax.Array | None) -> jax.Array:
    """Values over weights; sinks float32 [K, Q] are weights without a value."""
    if sinks is not None:
        top = jnp.maximum(state.top, sinks[None])
        fade = jnp.exp(state.top - top)
        return state.acc * (fade / (state.total * fade + jnp.exp(sinks[None] - top)))[..., None]
    return state.acc / jnp.maximum(state.total, jnp.float32(1e-30))[..., None]


def _gather(pool: jax.Array, logits: _Logits, layer: int | jax.Array, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """blocks int32 [X, C] -> keys float32 [X, K, C * B, H] and values [X, K, C * B, V]."""
    scales = logits.kv_scales
    rows, count = blocks.shape

    def take(which: int) -> jax.Array:
        x = pool[layer, which, blocks].astype(jnp.float32)  # [X, C, K, B, H]
        if scales is not None:
            x = x * scales[layer, which, blocks][..., None]
        return jnp.moveaxis(x, 2, 1).reshape(rows, pool.shape[3], count * pool.shape[4], pool.shape[5])

    keys = take(0)
    return keys, take(1) if pool.shape[1] == 2 else keys[..., : logits.value_dim]


def _seen(positions: jax.Array, first: jax.Array, count: int, window: int | None) -> jax.Array:
    """positions int32 [..., Q] -> bool [..., Q, count]: which of the tokens first .. first + count - 1 each sees."""
    at = first + jnp.arange(count, dtype=jnp.int32)
    at = at.reshape((1,) * positions.ndim + (count,))
    seen = at <= positions[..., None]
    return seen if window is None else seen & (at > positions[..., None] - window)


def _chunks(first: jax.Array, last: jax.Array, size: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Loop bounds over chunks of ``size`` tokens for queries at positions first .. last."""
    low = jnp.zeros_like(last) if window is None else jnp.maximum(first - window + 1, 0) // size
    return low, (last + size) // size


def _distance(positions: jax.Array, first: jax.Array, count: int) -> jax.Array:
    """positions int32 [..., Q] -> float32 [..., Q, count]: from each to the tokens first .. first + count - 1."""
    at = first + jnp.arange(count, dtype=jnp.int32)
    return (at.reshape((1,) * positions.ndim + (count,)) - positions[..., None]).astype(jnp.float32)


def _decode(
    q: jax.Array,
    pool: jax.Array,
    layer: int | jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    window: int | None,
    logits: _Logits,
    count: int | None = None,
) -> jax.Array:
    """q [X, K, G, H] scaled; tables int32 [X, P]; positions int32 [X], -1: nothing to do. Returns [X, K, G, V].
    ``count``: KV blocks taken in at once, None: by the number of rows."""
    rows, block = q.shape[0], pool.shape[4]
    count = count or max(1, min(8, GATHER // rows))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count)))

    def body(j: jax.Array, state: _Softmax) -> _Softmax:
        k, v = _gather(pool, logits, layer, lax.dynamic_slice_in_dim(tables, j * count, count, 1))
        seen = _seen(positions, j * (count * block), count * block, window)
        bias = None
        if logits.alibi is not None:
            distance = _distance(positions, j * (count * block), count * block)
            bias = logits.alibi[None, :, :, None] * distance[:, None, None]
        return _absorb(state, q, k, v, seen[:, None], logits.soft_cap, bias)

    first = jnp.min(jnp.where(positions < 0, jnp.int32(2**30), positions))
    low, high = _chunks(first, jnp.max(positions), count * block, window)
    return _result(lax.fori_loop(low, high, body, _start(q.shape[:3], logits.value_dim)), logits.sinks)


def _few_at_a_time(
    q: jax.Array,  # [T, K, G, H] scaled
    pool: jax.Array,
    layer: int | jax.Array,
    tables: jax.Array,  # int32 [T, P]
    positions: jax.Array,  # int32 [T]
    num_tokens: jax.Array,  # int32 []
    window: int | None,
    logits: _Logits,
) -> jax.Array:
    """``_decode`` of a fixed number of tokens in a loop: one code whatever T, bounded by their contexts. A chunk
    of keys begins at a fixed position, and one that a token does not see leaves its sums as they are."""
    size = min(EXACT_ROWS, q.shape[0])
    assert q.shape[0] % size == 0, q.shape

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        first = i * jnp.int32(size)
        own, own_tables, at = (lax.dynamic_slice_in_dim(x, first, size) for x in (q, tables, positions))
        at = jnp.where(first + jnp.arange(size, dtype=jnp.int32) < num_tokens, at, -1)
        found = _decode(own, pool, layer, own_tables, at, window, logits, EXACT_BLOCKS)
        return lax.dynamic_update_slice_in_dim(out, found, first, axis=0)

    turns = (num_tokens + jnp.int32(size - 1)) // jnp.int32(size)
    return lax.fori_loop(jnp.zeros_like(turns), turns, body, jnp.zeros((*q.shape[:3], logits.value_dim)))


def _prefill(
    q: jax.Array,  # [T, K, G, H] scaled
    out: jax.Array,  # [T, K, G, V]  written where a row has tokens
    pool: jax.Array,
    layer: int | jax.Array,
    tables: jax.Array,  # int32 [S, P]
    starts: jax.Array,  # int32 [S]  index in T of the row's first token
    lens: jax.Array,  # int32 [S]  0 for rows that are no prefill rows
    context_lens: jax.Array,
    window: int | None,
    logits: _Logits,
) -> jax.Array:
    offsets = context_lens - lens - starts  # position = index in T + offset
    sizes = sorted({min(tile, q.shape[0]) for tile in TILES}, reverse=True)
    for tile in sizes:
        rest = 0 if tile == sizes[-1] else lens % tile
        now = jnp.where(rest > tile // 2, lens, lens - rest)
        out = _tiles(q, out, pool, layer, tables, starts, now, offsets, window, logits, tile)
        starts, lens = starts + now, lens - now
    return out


def _tiles(
    q: jax.Array,  # [T, K, G, H] scaled
    out: jax.Array,  # [T, K, G, V]  written where a tile has tokens
    pool: jax.Array,
    layer: int | jax.Array,
    tables: jax.Array,
    starts: jax.Array,  # int32 [S]  index in T of the first token that is computed here
    lens: jax.Array,  # int32 [S]  how many are
    offsets: jax.Array,  # int32 [S]
    window: int | None,
    logits: _Logits,
    tile: int,
) -> jax.Array:
    tokens, kv_heads, group, dim = q.shape
    block = pool.shape[4]
    count = min(TILE_BLOCKS, tables.shape[1])
    whole_count = WHOLE_CHUNK * count
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count)))
    tiles = (lens + tile - 1) // tile  # [S]
    ends = jnp.cumsum(tiles)
    sinks, slopes = (None if x is None else jnp.repeat(x, tile, 1) for x in (logits.sinks, logits.alibi))

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum((ends <= i).astype(jnp.int32))
        begin = starts[row] + (i - ends[row] + tiles[row]) * tile
        stop = jnp.minimum(begin + tile, starts[row] + lens[row])
        start = jnp.minimum(begin, tokens - tile)  # the slice must lie within T: it may begin before the tile
        index = start + jnp.arange(tile, dtype=jnp.int32)
        ours = (index >= begin) & (index < stop)
        offset = offsets[row]
        positions = jnp.where(ours, index + offset, jnp.int32(-1))
        qt = lax.dynamic_slice_in_dim(q, start, tile, 0)  # [tile, K, G, H]
        qt = jnp.moveaxis(qt, 0, 2).reshape(1, kv_heads, group * tile, dim)

        def body(j: jax.Array, state: _Softmax, size: int, whole: bool) -> _Softmax:
            blocks = lax.dynamic_slice(tables, (row, j * size), (1, size))
            k, v = _gather(pool, logits, layer, blocks)
            seen = bias = None
            if not whole:
                seen = jnp.tile(_seen(positions, j * (size * block), size * block, window), (group, 1))[None]
            if slopes is not None:
                distance = _distance(positions, j * (size * block), size * block)
                bias = (slopes[:, :, None] * jnp.tile(distance, (group, 1))[None])[None]
            return _absorb(state, qt, k, v, seen, logits.soft_cap, bias)

        low, high = _chunks(begin + offset, stop - 1 + offset, count * block, window)
        state = _start((1, kv_heads, group * tile), logits.value_dim)
        if window is None and tile == TILES[0] and tables.shape[1] >= whole_count:
            wholes = (begin + offset + 1) // (whole_count * block)  # chunks that all of the tile sees to their end
            state = lax.fori_loop(0, wholes, lambda j, state: body(j, state, whole_count, True), state)
            low = wholes * (whole_count // count)
        state = lax.fori_loop(low, high, lambda j, state: body(j, state, count, False), state)
        o = jnp.moveaxis(_result(state, sinks).reshape(kv_heads, group, tile, -1), 2, 0)
        kept = lax.dynamic_slice_in_dim(out, start, tile, 0)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(ours[:, None, None, None], o, kept), start, 0)

    return lax.fori_loop(jnp.zeros_like(ends[-1]), ends[-1], one_tile, out)


def paged_attention_xla(
    q: jax.Array,
    pool: jax.Array,
    *,
    layer: int | jax.Array,
    block_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    context_lens: jax.Array,
    num_decode: jax.Array,
    num_rows: jax.Array,
    num_tokens: jax.Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    value_dim: int | None = None,
    one_token_rows: bool = False,
    target: Target = CPU,
) -> jax.Array:
    """Same arguments as ``pallas_kernels.paged_attention.paged_attention``."""
    del target  # one form for all
    tokens, heads, dim = q.shape
    rows, kv_heads = block_tables.shape[0], pool.shape[3]
    sinks, alibi = (None if x is None else x.reshape(kv_heads, heads // kv_heads) for x in (sinks, alibi))
    value_dim = value_dim or dim
    logits = _Logits(soft_cap, sinks, alibi, kv_scales, value_dim)
    scaled = (q.astype(jnp.float32) * jnp.float32(scale)).reshape(tokens, kv_heads, heads // kv_heads, dim)
    if one_token_rows:
        out = _few_at_a_time(scaled, pool, layer, block_tables[token_rows], positions, num_tokens, window, logits)
        return out.reshape(tokens, heads, value_dim).astype(q.dtype)
    if tokens < 16:  # few tokens: each walks its own blocks, and the tile loop need not be compiled
        real = jnp.arange(tokens, dtype=jnp.int32) < num_tokens
        out = _decode(scaled, pool, layer, block_tables[token_rows], jnp.where(real, positions, -1), window, logits)
        return out.reshape(tokens, heads, value_dim).astype(q.dtype)
    row = jnp.arange(rows, dtype=jnp.int32)
    count = min(rows, tokens)
    decode = _decode(
        scaled[:count],
        pool,
        layer,
        block_tables[:count],
        jnp.where(row < num_decode, context_lens - 1, -1)[:count],
        window,
        logits,
    )
    out = jnp.zeros((*scaled.shape[:3], value_dim)).at[:count].set(decode)
    lens = jnp.where((row >= num_decode) & (row < num_rows), query_lens, 0)
    out = _prefill(scaled, out, pool, layer, block_tables, query_starts, lens, context_lens, window, logits)
    return out.reshape(tokens, heads, value_dim).astype(q.dtype)
