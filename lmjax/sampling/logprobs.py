"""Log-probabilities: the log-softmax of the model's untouched logits (raw), or of those that are drawn from."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.sampling.chunks import CHUNK, to_chunks, top_values, total
from lmjax.sampling.share import WHOLE, Share


class Logprobs(NamedTuple):
    logprobs: jax.Array  # float32 [n]
    ranks: jax.Array  # int32 [n], from 1
    top_ids: jax.Array  # int32 [n, k], best first
    top_logprobs: jax.Array  # float32 [n, k]


def target_logprobs(logits: jax.Array, targets: jax.Array, k: int, share: Share = WHOLE) -> Logprobs:
    """Log-probability and rank of ``targets`` int32 [n] in ``logits`` float32 [V, n], and the ``k`` best tokens.

    The rank is 1 + the number of tokens with a strictly larger logit. Targets outside the vocabulary (padding rows)
    are clipped. Where k > V, the surplus columns hold id -1 and -inf. With an axis in ``share`` logits are this
    device's rows, all else is whole.
    """
    here, num_rows = logits.shape
    vocab = share.size(here)
    best = share.max(lax.stop_gradient(logits).max(axis=0))  # it cancels out of the result, so its gradient is 0
    # The where changes nothing but lets XLA:CPU vectorise the sum over a single column (see filters.weights_of).
    chunked = to_chunks(logits, CHUNK)
    weights = jnp.where(chunked > -jnp.inf, jnp.exp(chunked - best[None, None, :]), jnp.float32(0))
    log_total = best + jnp.log(total(weights, share))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    targets = jnp.clip(targets, 0, vocab - 1)
    chosen = share.from_owner(targets, here, lambda ids: logits.at[ids, row].get(mode="promise_in_bounds"))
    ranks = share.sum((logits > chosen[None, :]).sum(axis=0, dtype=jnp.int32)) + jnp.int32(1)
    values, ids = top_values(logits, min(k, vocab), share)
    surplus = ((0, 0), (0, k - values.shape[1]))
    return Logprobs(
        logprobs=chosen - log_total,
        ranks=ranks,
        top_ids=jnp.pad(ids, surplus, constant_values=-1),
        top_logprobs=jnp.pad(values - log_total[:, None], surplus, constant_values=-jnp.inf),
    )


def processed(scores: jax.Array, best: jax.Array, threshold: jax.Array, inv_temperature: jax.Array) -> jax.Array:
    """The logits of what is drawn from, -inf for what cannot be: ``scores`` [V, n] after bias, penalties and masks,
    ``best`` [n] their maxima, ``threshold`` [n] the smallest that may be drawn."""
    kept = scores >= threshold[None, :]
    return jnp.where(kept, (scores - best[None, :]) * inv_temperature[None, :], -jnp.inf)


def entropies(logits: jax.Array, share: Share = WHOLE) -> jax.Array:
    """float32 [n], in nats: the entropy of the softmax of ``logits`` float32 [V, n]; a token of -inf adds nothing."""
    best = share.max(lax.stop_gradient(logits).max(axis=0))
    gaps = to_chunks(logits, CHUNK) - best[None, None, :]
    possible = gaps > -jnp.inf
    gaps = jnp.where(possible, gaps, jnp.float32(0))
    weights = jnp.where(possible, jnp.exp(gaps), jnp.float32(0))
    mass = total(weights, share)
    return jnp.log(mass) - total(weights * gaps, share) / mass
