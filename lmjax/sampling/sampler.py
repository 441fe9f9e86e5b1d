"""From the logits of one step to one token a row (see docs/sampling.md)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmjax.sampling.chunks import CHUNK, best_token, first_above, gather_sums, take_chunk, to_chunks
from lmjax.sampling.filters import NUM_CANDIDATES, thresholds, weights_of
from lmjax.sampling.logprobs import processed, target_logprobs
from lmjax.sampling.params import FILTERED, FLAG_RANDOM, FULL, GREEDY
from lmjax.sampling.processors import process
from lmjax.sampling.rows import Rows, uniforms, unpack_rows
from lmjax.sampling.share import WHOLE, Share


class SampleOut(NamedTuple):
    """The log-probability fields are None where ``max_logprobs`` is 0."""

    token_ids: jax.Array  # int32 [S]
    logprobs: jax.Array | None = None  # float32 [S]
    ranks: jax.Array | None = None  # int32 [S], from 1
    top_ids: jax.Array | None = None  # int32 [S, max_logprobs], best first
    top_logprobs: jax.Array | None = None  # float32 [S, max_logprobs]


def _draw(
    chunked: jax.Array,
    best: jax.Array,
    inv_temperature: jax.Array,
    threshold: jax.Array,
    uniforms: tuple[jax.Array, jax.Array],
    share: Share = WHOLE,
) -> jax.Array:
    """Two-level inverse CDF: token ids [S], or negative if nothing has weight.

    ``uniforms``: [S] each; the first chooses the chunk by its share of the total weight, the second the token by its
    share of the chunk's. One number for both would have the bounds of all tokens in one row: 50,000 places where the
    last bits of the logits decide, instead of 500.

    ``chunked`` [C, CHUNK, S] processed logits (of ``share``), ``best`` [S] their maxima, ``threshold`` [S] the
    smallest logit that may be drawn. Sums of chunks first, then only inside the chosen chunk: no scan over the
    vocabulary.
    """

    wide = (1, 1, -1)
    weights = weights_of(chunked, best.reshape(wide), inv_temperature.reshape(wide), threshold.reshape(wide))
    sums = gather_sums(weights.sum(axis=1), share)  # [C, S]
    cumulative = jnp.cumsum(sums, axis=0)
    chunk = first_above(cumulative, sums, uniforms[0] * cumulative[-1], axis=0)
    found = jnp.maximum(chunk, jnp.int32(0))

    def find(chunk: jax.Array) -> jax.Array:
        scores = take_chunk(chunked, chunk)  # [S, CHUNK]
        inside = weights_of(scores, best[:, None], inv_temperature[:, None], threshold[:, None])
        cumulative = jnp.cumsum(inside, axis=1)
        return first_above(cumulative, inside, uniforms[1] * cumulative[:, -1], axis=1)

    offset = share.from_owner(found, chunked.shape[0], find)
    return jnp.where((chunk < 0) | (offset < 0), jnp.int32(-1), found * jnp.int32(CHUNK) + offset)


def _choose(
    logits: jax.Array,
    scores: jax.Array,
    rows: Rows,
    positions: jax.Array,
    level: int,
    num_candidates: int,
    share: Share,
    branches: bool,
) -> tuple[jax.Array, jax.Array]:
    """Token ids [S] from the logits after bias, penalties and masks, ``scores`` [V, S], and the logits [V, S] of the
    distributions that they are drawn from (computed if used)."""
    chunked = to_chunks(scores, CHUNK)
    best, token = best_token(chunked, share)
    if level == FULL:
        # Everything is masked: the model's own best token, so that the answer is always a valid id.
        nothing = best == -jnp.inf
        model_best, model_token = best_token(to_chunks(logits, CHUNK), share)
        token = jnp.where(nothing, model_token, token)
        best = jnp.where(nothing, jnp.float32(0), best)
    threshold = rows.min_p_gap  # -inf: all
    if level >= FILTERED:
        threshold = thresholds(scores, best, rows, num_candidates, share, branches)
    drawn = _draw(chunked, best, rows.inv_temperature, threshold, uniforms(rows, positions), share)
    tokens = jnp.where(rows.has(FLAG_RANDOM) & (drawn >= 0), drawn, token)
    if level < FULL:
        return tokens, processed(scores, best, threshold, rows.inv_temperature)
    scores = jnp.where(nothing[None, :], logits, scores)
    best, threshold = jnp.where(nothing, model_best, best), jnp.where(nothing, -jnp.inf, threshold)
    return tokens, processed(scores, best, threshold, rows.inv_temperature)


def choose(
    logits: jax.Array,
    params: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    state: jax.Array,
    *,
    level: int,
    num_candidates: int = NUM_CANDIDATES,
    share: Share = WHOLE,
    branches: bool = True,
    processed_logprobs: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row: token ids int32 [S], and the logits [V, S] that their log-probabilities are taken of.

    Args:
      logits: float32 [V, S], finite or -inf; [V_local, S] of a ``share`` with an axis, where all else is whole.
      params: int32 [S, NUM_PARAMS], rows of ``params.encode_params``.
      slots: int32 [S], each row's line in ``tokens`` and ``state``.
      positions: int32 [S], the position of the token to draw = the number of tokens before it.
      tokens: int32 [slots + 1, L], all token ids so far (read at level 3 only).
      state: int32 [slots + 1, state_row_size(V)], rows of ``params.encode_state`` (read at level 3 only).
      level: static; at least ``params.feature_level`` of every row. A higher one draws the same tokens.
      num_candidates: static; how many of the largest logits the filters look at before they bisect. Without branches
        they look at none.
      share: static; which part of the vocabulary is on this device.
      branches: static; whether what no row uses is skipped. Not on a GPU: there the host reads a condition of the
        program, which stalls its dispatch and cuts its command buffer, so all is done for every row.
      processed_logprobs: static; log-probabilities are those of the distribution that is drawn from, -inf for tokens
        that cannot be; of a greedy row with temperature 1. Else they are raw.
    """
    assert share.axis is None or logits.shape[0] % CHUNK == 0, logits.shape
    if level == GREEDY:
        return best_token(to_chunks(logits, CHUNK), share)[1], logits
    rows = unpack_rows(params)
    scores = logits
    if level == FULL:
        scores = process(logits, rows, slots, positions, tokens, state, share, branches)
    token_ids, drawn_from = _choose(logits, scores, rows, positions, level, num_candidates, share, branches)
    return token_ids, drawn_from if processed_logprobs else logits


def sample(
    logits: jax.Array,
    params: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    state: jax.Array,
    *,
    max_logprobs: int,
    share: Share = WHOLE,
    **static: Any,
) -> SampleOut:
    """``choose``, and log-probabilities with the ``max_logprobs`` (static) most likely tokens; 0: none. Arguments as
    there."""
    token_ids, shown = choose(logits, params, slots, positions, tokens, state, share=share, **static)
    if max_logprobs == 0:
        return SampleOut(token_ids)
    return SampleOut(token_ids, *target_logprobs(shown, token_ids, max_logprobs, share))
