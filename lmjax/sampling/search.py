"""A threshold a row, found bit by bit in passes over the vocabulary: exact, and without a sort."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from lmjax.sampling.chunks import CHUNK, to_chunks
from lmjax.sampling.share import Share


def _to_key(x: jax.Array) -> jax.Array:
    """float32 -> int32 of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> jnp.int32(31)) & jnp.int32(0x7FFFFFFF))


def _from_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key ^ ((key >> jnp.int32(31)) & jnp.int32(0x7FFFFFFF)), jnp.float32)


def largest(holds: Callable[[jax.Array], jax.Array], best: jax.Array, bits: int = 1) -> jax.Array:
    """The largest float32 threshold [S] for which ``holds`` (true at -inf, monotone), at most ``best``.

    ``bits`` of it a pass, the highest first. ``holds``: thresholds [2**bits - 1, S] -> bool of the same shape. With 1
    bit a loop, with more all passes one after the other: they are for programs in which the host may drive no loop.
    """
    lowest = _to_key(jnp.full_like(best, -jnp.inf))
    digits = jnp.arange(1, 2**bits, dtype=jnp.int32)[:, None]

    def narrow(step: jax.Array, above: jax.Array) -> jax.Array:
        """``above``: how far over the key of -inf the threshold is at least. Keys beyond that of +inf are NaN, for
        which nothing holds."""
        shift = jnp.int32(32 - bits) - jnp.int32(bits) * step
        ok = holds(_from_key((lowest + above)[None, :] + (digits << shift)))
        return above + (ok.sum(axis=0, dtype=jnp.int32) << shift)

    above = lax.fori_loop(0, 32 // bits, narrow, jnp.zeros_like(lowest), unroll=bits > 1)
    return jnp.minimum(_from_key(lowest + above), best)


def by_row(scores: jax.Array) -> jax.Array:
    """[V, S] -> [S, C, CHUNK], a copy that lies in memory in that order.

    XLA's GPU compiler makes up to eight ``sums_above`` of that in one kernel that reads it once; of sums along the
    first axis of [V, S] one or two, and of a larger chunk it first writes what is to be summed (jax 0.10).
    """
    rows = to_chunks(scores, CHUNK).transpose(2, 0, 1)
    return lax.optimization_barrier(with_layout_constraint(rows, Layout((0, 1, 2))))


def sums_above(thresholds: jax.Array, scores: jax.Array, weights: jax.Array, share: Share) -> jax.Array:
    """The sum of ``weights`` where ``scores`` [S, C, CHUNK] are at least each of ``thresholds`` [n, S] -> [n, S].

    ``weights``: as scores, or one for all. Integers are exact. Of floats each device adds up its own, so the last bits
    depend on how many devices there are: the sums of all chunks would be n * V / CHUNK numbers a row to send.
    """
    zero = jnp.zeros((), weights.dtype)
    sums = [jnp.where(scores >= t[:, None, None], weights, zero).sum(axis=2, dtype=weights.dtype) for t in thresholds]
    return share.sum(jnp.stack(sums).sum(axis=2, dtype=weights.dtype))
