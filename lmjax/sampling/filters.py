"""min-p, top-k and top-p as one threshold a row on the logits: a token stays if its logit is at least that.

Thresholds keep every token that ties with the last one kept. Usually all of it can be read off the largest
``num_candidates`` logits; rows where it can't (top_k beyond them, or too little mass in them) are solved by bisection
on the bits of the threshold, 32 passes over the vocabulary that run only if some row needs them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.sampling.chunks import CHUNK, to_chunks, top_values, total
from lmjax.sampling.logprobs import processed
from lmjax.sampling.rows import Rows
from lmjax.sampling.share import WHOLE, Share

NUM_CANDIDATES = 256


def weights_of(scores: jax.Array, best: jax.Array, inv_temperature: jax.Array, kept: jax.Array) -> jax.Array:
    """exp((scores - best) / temperature) where scores >= kept, else 0; the arguments broadcast.

    The difference comes first so that tiny temperatures can't overflow. (The ``where`` is also what lets XLA:CPU
    vectorise a sum of this over a single column: 0.3 instead of 3 ms for 150,000 tokens.)
    """
    return jnp.where(scores >= kept, jnp.exp((scores - best) * inv_temperature), jnp.float32(0))


def _to_key(x: jax.Array) -> jax.Array:
    """float32 -> int32 of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> jnp.int32(31)) & jnp.int32(0x7FFFFFFF))


def _from_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(key ^ ((key >> jnp.int32(31)) & jnp.int32(0x7FFFFFFF)), jnp.float32)


def _largest(holds: Callable[[jax.Array], jax.Array], best: jax.Array) -> jax.Array:
    """The largest float32 threshold [S] for which ``holds`` (true at -inf, monotone), at most ``best``."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> jnp.int32(1))  # the mean without overflow
        ok = holds(_from_key(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low = _to_key(jnp.full_like(best, -jnp.inf))
    low, _ = lax.fori_loop(0, 32, halve, (low, _to_key(best) + jnp.int32(1)))
    return jnp.minimum(_from_key(low), best)


def _uses_top_p(rows: Rows) -> jax.Array:
    return (rows.top_p > 0) & (rows.top_p < 1)


def _top_k(scores: jax.Array, best: jax.Array, rows: Rows, candidates: jax.Array, share: Share) -> jax.Array:
    """The k-th largest logit [S]; -inf where top_k is off."""
    num_candidates = candidates.shape[1]
    used = (rows.top_k > 0) & (rows.top_k < share.size(scores.shape[0]))
    index = jnp.clip(rows.top_k - jnp.int32(1), 0, num_candidates - 1)
    exact = jnp.take_along_axis(candidates, index[:, None], axis=1, mode="promise_in_bounds")[:, 0]
    beyond = used & (rows.top_k > num_candidates)

    def bisect() -> jax.Array:
        def enough(threshold: jax.Array) -> jax.Array:
            return share.sum((scores >= threshold[None, :]).sum(axis=0, dtype=jnp.int32)) >= rows.top_k

        return jnp.where(beyond, _largest(enough, best), exact)

    kth = lax.cond(beyond.any(), bisect, lambda: exact)
    return jnp.where(used, kth, -jnp.inf)


def _top_p(
    scores: jax.Array, best: jax.Array, rows: Rows, candidates: jax.Array, kept: jax.Array, share: Share
) -> jax.Array:
    """The last logit of the smallest set of the tokens >= ``kept`` [S] that has the mass top_p; -inf where off."""
    used = _uses_top_p(rows)
    chunked = to_chunks(scores, CHUNK)
    weights = weights_of(chunked, best[None, None, :], rows.inv_temperature[None, None, :], kept[None, None, :])
    mass = rows.top_p * total(weights, share)
    inside = weights_of(candidates, best[:, None], rows.inv_temperature[:, None], kept[:, None])
    reached = jnp.cumsum(inside, axis=1) >= mass[:, None]
    index = jnp.argmax(reached, axis=1).astype(jnp.int32)
    exact = jnp.take_along_axis(candidates, index[:, None], axis=1, mode="promise_in_bounds")[:, 0]
    exact = jnp.where(reached.any(axis=1), exact, -jnp.inf)
    everything = candidates.shape[1] >= share.size(scores.shape[0])
    complete = (candidates[:, -1] < kept) | everything  # all that is kept is in there
    beyond = used & ~reached.any(axis=1) & ~complete

    def bisect() -> jax.Array:
        def enough(threshold: jax.Array) -> jax.Array:
            return total(jnp.where(chunked >= threshold[None, None, :], weights, jnp.float32(0)), share) >= mass

        return jnp.where(beyond, _largest(enough, best), exact)

    return jnp.where(used, lax.cond(beyond.any(), bisect, lambda: exact), -jnp.inf)


def filtered(logits: jax.Array, rows: Rows, share: Share = WHOLE) -> jax.Array:
    """[V, S] -> [V, S]: after temperature, min-p, top-k and top-p alone, -inf for what they leave out."""
    best = share.max(logits.max(axis=0))
    return processed(logits, best, thresholds(logits, best, rows, share=share), rows.inv_temperature)


def thresholds(
    scores: jax.Array, best: jax.Array, rows: Rows, num_candidates: int = NUM_CANDIDATES, share: Share = WHOLE
) -> jax.Array:
    """The smallest logit that may be drawn, float32 [S], in the order min-p, top-k, top-p (top-p is taken over what
    the first two left). ``scores`` [V, S] processed logits (of ``share``), ``best`` [S] their maxima, finite."""

    def lists() -> jax.Array:
        kept = best + rows.min_p_gap
        candidates, _ = top_values(scores, min(num_candidates, share.size(scores.shape[0])), share)
        kept = jnp.maximum(kept, _top_k(scores, best, rows, candidates, share))
        return jnp.maximum(kept, _top_p(scores, best, rows, candidates, kept, share))

    uses_list = ((rows.top_k > 0) | _uses_top_p(rows)).any()
    return jnp.minimum(lax.cond(uses_list, lists, lambda: best + rows.min_p_gap), best)
