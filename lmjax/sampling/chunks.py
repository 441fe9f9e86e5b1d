"""Two-level reductions over the vocabulary in global chunks, on the feature-major form [V, S].

Everything works per column, so a row never sees its neighbours. Chunks are global (token id // CHUNK): the result of
a draw does not depend on how the vocabulary is padded or sharded. With a ``share`` that has an axis, arguments are this
device's rows, results are of the whole vocabulary and the same on every device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.sampling.share import WHOLE, Share

CHUNK = 128  # of the inverse CDF, the argmax and all sums
TOP_CHUNK = 16  # of the two-stage top-k: about sqrt(V / k) touches the fewest values


def to_chunks(x: jax.Array, size: int) -> jax.Array:
    """[V, S] -> [C, size, S], filled up with -inf."""
    vocab, num_rows = x.shape
    padding = -vocab % size
    if padding:
        x = jnp.pad(x, ((0, padding), (0, 0)), constant_values=-jnp.inf)
    return x.reshape(-1, size, num_rows)


def take_chunk(chunked: jax.Array, index: jax.Array) -> jax.Array:
    """[C, size, S], one chunk index a row [S] -> [S, size]."""
    row = jnp.arange(chunked.shape[2], dtype=jnp.int32)
    return chunked.at[index, :, row].get(mode="promise_in_bounds")


def gather_sums(sums: jax.Array, share: Share) -> jax.Array:
    """Sums of this device's chunks [C_local, S] -> of all chunks [C, S], as many as one device would have."""
    num_chunks = -(-share.size(sums.shape[0] * CHUNK) // CHUNK)
    return share.gather(sums)[:num_chunks]


def total(weights: jax.Array, share: Share = WHOLE) -> jax.Array:
    """[C, CHUNK, S] -> [S], in two levels: the same additions on any number of devices."""
    sums = weights.sum(axis=1)
    if share.axis is None:
        sums = lax.optimization_barrier(sums)  # XLA would make one sum of the two, in another order
    return gather_sums(sums, share).sum(axis=0)


def best_token(chunked: jax.Array, share: Share = WHOLE) -> tuple[jax.Array, jax.Array]:
    """The largest value and its first token id, each [S] (equal to max and argmax over the vocabulary)."""
    maxima = chunked.max(axis=1)
    chunk = jnp.argmax(maxima, axis=0).astype(jnp.int32)
    inside = jnp.argmax(take_chunk(chunked, chunk), axis=1).astype(jnp.int32)
    token = chunk * jnp.int32(chunked.shape[1]) + inside
    return share.best(maxima.max(axis=0), token, chunked.shape[0] * chunked.shape[1])


def top_values(x: jax.Array, k: int, share: Share = WHOLE) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of each column of [V, S], best first, equal ones by ascending id: values, ids [S, k]."""
    rows = x.shape[0]
    assert k <= share.size(rows)
    values, ids = _top_values(x, min(k, rows), share)
    if share.axis is None or k == 0:
        return values, ids
    # In the order of devices equal values are in the order of ids, and top_k prefers the first.
    values, ids = share.gather(values, axis=1), share.gather(ids + share.first(rows), axis=1)
    values, where = _top_k(values, k, share)
    return values, jnp.take_along_axis(ids, where, axis=1, mode="promise_in_bounds")


def _top_values(x: jax.Array, k: int, share: Share) -> tuple[jax.Array, jax.Array]:
    """``top_values`` of the rows that are here.

    Exact in two stages: an element of the top k lies in one of the k chunks with the largest maxima, because each
    chunk that comes before holds an element that comes before.
    """
    num_rows = x.shape[1]
    if k == 0:
        return jnp.zeros((num_rows, 0), x.dtype), jnp.zeros((num_rows, 0), jnp.int32)
    chunked = to_chunks(x, TOP_CHUNK)
    num_chunks = min(k, chunked.shape[0])
    _, chunk_ids = _top_k(chunked.max(axis=1).T, num_chunks, share)
    chunk_ids = jnp.sort(chunk_ids, axis=1)  # top_k prefers the first of equal values: keep the order of ids
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    values = chunked.at[chunk_ids, :, row].get(mode="promise_in_bounds")  # [S, num_chunks, size]
    ids = chunk_ids[:, :, None] * jnp.int32(TOP_CHUNK) + jnp.arange(TOP_CHUNK, dtype=jnp.int32)[None, None, :]
    top, where = _top_k(values.reshape(num_rows, -1), k, share)
    return top, jnp.take_along_axis(ids.reshape(num_rows, -1), where, axis=1, mode="promise_in_bounds")


def _top_k(x: jax.Array, k: int, share: Share) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k``, on one CPU kept whole: XLA sorts the full row when a later slice is merged into it (4x slower).

    For several devices XLA (of jax 0.10) aborts over a barrier here.
    """

    def top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(x, k)
        return values, ids

    if share.axis is not None:
        return top_k(x)
    return lax.platform_dependent(x, cpu=lambda x: lax.optimization_barrier(top_k(x)), default=top_k)


def first_above(cumulative: jax.Array, weights: jax.Array, target: jax.Array, axis: int) -> jax.Array:
    """First index with cumulative > target among those with weight > 0; else the last with weight; -1 if none has.

    A scan's sums may be off by rounding and not even be monotone, so the weight itself has the last word: an entry
    of weight 0 is never chosen. ``target`` has the reduced shape.
    """
    target = jnp.expand_dims(target, axis)
    hit = (cumulative > target) & (weights > 0)
    index = lax.broadcasted_iota(jnp.int32, weights.shape, axis)
    last = jnp.where(weights > 0, index, jnp.int32(-1)).max(axis=axis)
    return jnp.where(hit.any(axis=axis), jnp.argmax(hit, axis=axis).astype(jnp.int32), last)
