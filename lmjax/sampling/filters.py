"""min-p, top-k and top-p as one threshold a row on the logits: a token stays if its logit is at least that.

Thresholds keep every token that ties with the last one kept. With branches (a CPU) usually all of it can be read off
the largest ``num_candidates`` logits; rows where it can't (top_k beyond them, or too little mass in them) are solved by
bisection on the bits of the threshold, 32 passes over the vocabulary that run only if some row needs them. Without
branches (a GPU, see ``sampler.sample``) every row is searched for, 15 thresholds a pass: 8 passes for each of top-k and
top-p, whoever uses them. There a list of candidates would be a sort, and whether it was enough a question to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.sampling.chunks import CHUNK, to_chunks, top_values, total
from lmjax.sampling.logprobs import processed
from lmjax.sampling.rows import Rows
from lmjax.sampling.search import by_row, largest, sums_above
from lmjax.sampling.share import WHOLE, Share

NUM_CANDIDATES = 256
DIGIT = 4  # bits of the threshold that a pass without branches finds


def weights_of(scores: jax.Array, best: jax.Array, inv_temperature: jax.Array, kept: jax.Array) -> jax.Array:
    """exp((scores - best) / temperature) where scores >= kept, else 0; the arguments broadcast.

    The difference comes first so that tiny temperatures can't overflow. (The ``where`` is also what lets XLA:CPU
    vectorise a sum of this over a single column: 0.3 instead of 3 ms for 150,000 tokens.)
    """
    return jnp.where(scores >= kept, jnp.exp((scores - best) * inv_temperature), jnp.float32(0))


def _uses_top_p(rows: Rows) -> jax.Array:
    return (rows.top_p > 0) & (rows.top_p < 1)


def _uses_top_k(rows: Rows, vocab: int) -> jax.Array:
    return (rows.top_k > 0) & (rows.top_k < vocab)


def _top_k(scores: jax.Array, best: jax.Array, rows: Rows, candidates: jax.Array, share: Share) -> jax.Array:
    """The k-th largest logit [S]; -inf where top_k is off."""
    num_candidates = candidates.shape[1]
    used = _uses_top_k(rows, share.size(scores.shape[0]))
    index = jnp.clip(rows.top_k - jnp.int32(1), 0, num_candidates - 1)
    exact = jnp.take_along_axis(candidates, index[:, None], axis=1, mode="promise_in_bounds")[:, 0]
    beyond = used & (rows.top_k > num_candidates)

    def bisect() -> jax.Array:
        def enough(thresholds: jax.Array) -> jax.Array:
            counts = share.sum((scores >= thresholds).sum(axis=0, dtype=jnp.int32))
            return (counts >= rows.top_k)[None, :]

        return jnp.where(beyond, largest(enough, best), exact)

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
        def enough(thresholds: jax.Array) -> jax.Array:
            inside = jnp.where(chunked >= thresholds[None, :, :], weights, jnp.float32(0))
            return (total(inside, share) >= mass)[None, :]

        return jnp.where(beyond, largest(enough, best), exact)

    return jnp.where(used, lax.cond(beyond.any(), bisect, lambda: exact), -jnp.inf)


def filtered(logits: jax.Array, rows: Rows, share: Share = WHOLE, branches: bool = True) -> jax.Array:
    """[V, S] -> [V, S]: after temperature, min-p, top-k and top-p alone, -inf for what they leave out."""
    best = share.max(logits.max(axis=0))
    threshold = thresholds(logits, best, rows, share=share, branches=branches)
    return processed(logits, best, threshold, rows.inv_temperature)


def _search(scores: jax.Array, best: jax.Array, rows: Rows, share: Share) -> jax.Array:
    """``thresholds`` without branches, up to ``best``. A cut by mass may depend on the number of devices in the last
    bits of the sums (see ``sums_above``)."""
    spread = by_row(scores)

    def enough(wanted: jax.Array, weights: jax.Array) -> Callable[[jax.Array], jax.Array]:
        return lambda thresholds: sums_above(thresholds, spread, weights, share) >= wanted[None, :]

    kth = largest(enough(rows.top_k, jnp.int32(1)), best, DIGIT)
    kept = jnp.where(_uses_top_k(rows, share.size(scores.shape[0])), kth, -jnp.inf)
    kept = jnp.maximum(best + rows.min_p_gap, kept)
    wide = (-1, 1, 1)
    weights = weights_of(spread, best.reshape(wide), rows.inv_temperature.reshape(wide), kept.reshape(wide))
    mass = rows.top_p * share.sum(weights.sum(axis=2).sum(axis=1))
    last = largest(enough(mass, weights), best, DIGIT)
    return jnp.maximum(kept, jnp.where(_uses_top_p(rows), last, -jnp.inf))


def thresholds(
    scores: jax.Array,
    best: jax.Array,
    rows: Rows,
    num_candidates: int = NUM_CANDIDATES,
    share: Share = WHOLE,
    branches: bool = True,
) -> jax.Array:
    """The smallest logit that may be drawn, float32 [S], in the order min-p, top-k, top-p (top-p is taken over what
    the first two left). ``scores`` [V, S] processed logits (of ``share``), ``best`` [S] their maxima, finite."""
    if not branches:
        return jnp.minimum(_search(scores, best, rows, share), best)

    def lists() -> jax.Array:
        kept = best + rows.min_p_gap
        candidates, _ = top_values(scores, min(num_candidates, share.size(scores.shape[0])), share)
        kept = jnp.maximum(kept, _top_k(scores, best, rows, candidates, share))
        return jnp.maximum(kept, _top_p(scores, best, rows, candidates, kept, share))

    uses_list = ((rows.top_k > 0) | _uses_top_p(rows)).any()
    return jnp.minimum(lax.cond(uses_list, lists, lambda: best + rows.min_p_gap), best)
