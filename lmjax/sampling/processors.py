"""What changes the logits before temperature and filters: bias, penalties, masks, bad words (level 3 only).

Each step touches only the rows that use it, and with branches (see ``sampler.sample``) runs only if one does. Counts of
past tokens come from the token table at every call, so preemption, forks and rejected drafts leave nothing to roll
back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.sampling.params import (
    FLAG_BAD_WORDS,
    FLAG_BIAS,
    FLAG_MASK,
    FLAG_PENALTY,
    MAX_BAD_SEQUENCES,
    num_mask_words,
    state_row_size,
)
from lmjax.sampling.rows import Rows
from lmjax.sampling.share import WHOLE, Share
from lmjax.types import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS

BIAS_STEP = 64  # logit_bias entries of all rows that one loop iteration adds
HISTORY_STEP = 512  # positions of all rows that one loop iteration counts


def process(
    logits: jax.Array,
    rows: Rows,
    slots: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    state: jax.Array,
    share: Share = WHOLE,
    branches: bool = True,
) -> jax.Array:
    """[V, S] -> [V, S]: bias, penalties, then -inf for what may not be drawn. Arguments as of ``sampler.sample``."""
    vocab = share.size(logits.shape[0])
    assert state.shape[1] == state_row_size(vocab), (state.shape, vocab)
    words = num_mask_words(vocab)
    own = state[slots]  # [S, row]
    always, early, rest = own[:, :words], own[:, words : 2 * words], own[:, 2 * words :]
    bias_ids, rest = rest[:, :MAX_LOGIT_BIAS], rest[:, MAX_LOGIT_BIAS:]
    bias_values = lax.bitcast_convert_type(rest[:, :MAX_LOGIT_BIAS], jnp.float32)
    bad_words = rest[:, MAX_LOGIT_BIAS:].reshape(-1, MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS)

    def when(flag: int, change, scores: jax.Array) -> jax.Array:
        return lax.cond(rows.has(flag).any(), change, lambda x: x, scores) if branches else change(scores)

    scores = when(FLAG_BIAS, lambda x: _add_bias(x, rows, bias_ids, bias_values, share, branches), logits)
    scores = when(FLAG_PENALTY, lambda x: _penalize(x, rows, slots, positions, tokens, share, branches), scores)
    mask = _own_words(jnp.where((positions < rows.min_until)[:, None], early, always), logits.shape[0], share)
    scores = when(FLAG_MASK, lambda x: _mask(x, rows, mask), scores)
    past = (slots, positions, tokens)
    return when(FLAG_BAD_WORDS, lambda x: _ban(x, rows, bad_words, *past, share), scores)


def _row_index(like: jax.Array) -> jax.Array:
    """int32, the shape of ``like`` [S, n]: each entry its row."""
    return lax.broadcasted_iota(jnp.int32, like.shape, 0)


def _add_bias(
    scores: jax.Array, rows: Rows, ids: jax.Array, values: jax.Array, share: Share, branches: bool
) -> jax.Array:
    """Adds ``values`` [S, MAX_LOGIT_BIAS] at ``ids``; the loop ends with the longest list, and without branches there
    is none."""
    count = jnp.where(rows.has(FLAG_BIAS), rows.num_bias, jnp.int32(0))
    step_len = BIAS_STEP if branches else MAX_LOGIT_BIAS

    def add(step: jax.Array, scores: jax.Array) -> jax.Array:
        start = step * jnp.int32(step_len)
        entry = start + jnp.arange(step_len, dtype=jnp.int32)[None, :]
        some_ids = lax.dynamic_slice_in_dim(ids, start, step_len, axis=1)
        some = lax.dynamic_slice_in_dim(values, start, step_len, axis=1)
        some_ids = share.local(some_ids, scores.shape[0])
        some_ids = jnp.where(entry < count[:, None], some_ids, jnp.int32(scores.shape[0]))  # outside: dropped
        return scores.at[some_ids, _row_index(some_ids)].add(some, mode="drop")

    if not branches:
        return add(jnp.int32(0), scores)
    return lax.fori_loop(0, (count.max() + (step_len - 1)) // step_len, add, scores)


def _history(tokens: jax.Array, slots: jax.Array, index: jax.Array) -> jax.Array:
    """Token ids at positions ``index`` [S, n] of the rows' slots (clipped into the table)."""
    return tokens.at[slots[:, None], index].get(mode="clip")


def count_tokens(
    vocab: int,
    rows: Rows,
    slots: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    share: Share = WHOLE,
    branches: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """How often each token is in the prompt and in the output so far, int32 [V, S] each; 0 for rows without penalty.

    ``vocab``: the rows here, V_local where ``share`` has an axis.
    """
    num_rows = len(slots)
    step_len = min(HISTORY_STEP, tokens.shape[1]) if branches else tokens.shape[1]
    length = jnp.where(rows.has(FLAG_PENALTY), positions, jnp.int32(0))

    def count(step: jax.Array, counts: jax.Array) -> jax.Array:
        index = step * jnp.int32(step_len) + jnp.arange(step_len, dtype=jnp.int32)[None, :]
        index = jnp.broadcast_to(index, (num_rows, step_len))
        ids = share.local(_history(tokens, slots, index), vocab)
        ids = jnp.where(index < length[:, None], ids, jnp.int32(vocab))  # outside: dropped
        generated = (index >= rows.prompt_len[:, None]).astype(jnp.int32)
        return counts.at[generated, ids, _row_index(ids)].add(jnp.int32(1), mode="drop")

    counts = jnp.zeros((2, vocab, num_rows), jnp.int32)
    if branches:
        counts = lax.fori_loop(0, (length.max() + (step_len - 1)) // step_len, count, counts)
    else:
        counts = count(jnp.int32(0), counts)
    return counts[0], counts[1]


def _penalize(
    scores: jax.Array,
    rows: Rows,
    slots: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    share: Share,
    branches: bool,
) -> jax.Array:
    """Repetition (Keskar et al., 2019: prompt and output), then frequency and presence (OpenAI: output only)."""
    in_prompt, in_output = count_tokens(scores.shape[0], rows, slots, positions, tokens, share, branches)
    repetition = rows.repetition_penalty[None, :]
    seen = ((in_prompt + in_output) > 0) & (repetition != 1.0)
    changed = jnp.where(seen, jnp.where(scores > 0, scores / repetition, scores * repetition), scores)
    penalty = rows.frequency_penalty[None, :] * in_output.astype(jnp.float32) + rows.presence_penalty[None, :]
    changed = jnp.where(in_output > 0, changed - penalty, changed)
    return jnp.where(rows.has(FLAG_PENALTY)[None, :], changed, scores)


def _own_words(words: jax.Array, count: int, share: Share) -> jax.Array:
    """int32 [S, ceil(V / 32)] -> the words of the ``count`` tokens here; padding of the vocabulary is not allowed."""
    if share.axis is None:
        return words
    index = share.first(count // 32) + jnp.arange(count // 32, dtype=jnp.int32)
    return words.at[:, index].get(mode="fill", fill_value=0)


def _mask(scores: jax.Array, rows: Rows, words: jax.Array) -> jax.Array:
    """-inf where the row's bit in ``words`` int32 [S, ceil(V / 32)] is 0."""
    vocab, num_rows = scores.shape
    shift = jnp.arange(32, dtype=jnp.uint32)[None, :, None]
    bits = (lax.bitcast_convert_type(words.T, jnp.uint32)[:, None, :] >> shift) & jnp.uint32(1)
    allowed = (bits != 0).reshape(-1, num_rows)[:vocab]
    return jnp.where(allowed | ~rows.has(FLAG_MASK)[None, :], scores, -jnp.inf)


def _ban(
    scores: jax.Array,
    rows: Rows,
    words: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    tokens: jax.Array,
    share: Share,
) -> jax.Array:
    """-inf for the last token of a bad word whose other tokens are the last ones generated.

    ``words`` int32 [S, MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS], right-aligned. As in vLLM the prompt does not count.
    """
    back = jnp.arange(1 - MAX_BAD_WORD_TOKENS, 0, dtype=jnp.int32)[None, :]
    index = positions[:, None] + back
    generated = index >= rows.prompt_len[:, None]
    past = jnp.where(generated, _history(tokens, slots, jnp.maximum(index, jnp.int32(0))), jnp.int32(-2))
    start, last = words[:, :, :-1], words[:, :, -1]
    match = ((start == past[:, None, :]) | (start < 0)).all(axis=2)
    used = lax.broadcasted_iota(jnp.int32, last.shape, 1) < rows.num_bad_words[:, None]
    used = used & rows.has(FLAG_BAD_WORDS)[:, None]
    own = share.local(last, scores.shape[0])
    ids = jnp.where(match & used & (last >= 0), own, jnp.int32(scores.shape[0]))  # outside: dropped
    return scores.at[ids, _row_index(ids)].set(-jnp.inf, mode="drop")
