"""The forward program: packed buffer -> patched tables, token ids, the model, logits of each row's last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.core.plan import POOLED, row_width
from lmjax.models import decoder
from lmjax.models.lora import with_adapters
from lmjax.models.spec import DecoderSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import ALONE, Env
from lmjax.nn.tiles import columns_of, isolated, over_tiles, put_columns
from lmjax.runtime.buckets import ForwardKey
from lmjax.runtime.inputs import forward_layout
from lmjax.runtime.state import apply_patches
from lmjax.sampling.filters import filtered
from lmjax.sampling.logprobs import Logprobs, entropies, target_logprobs
from lmjax.sampling.rows import unpack_rows
from lmjax.sampling.share import Share

PROMPT_LOGPROB_ROWS = 128  # columns of one block of logits: [V, T] at once would be gigabytes

Pools = tuple[jax.Array, ...]


def make_forward(
    spec: DecoderSpec, key: ForwardKey, block_size: int, max_logprobs: int, env: Env = ALONE
) -> Callable[..., Any]:
    """``(params, pools, tokens, tables, packed) -> (logits [V, S], pools, tokens, tables, prompt log-probabilities)``.
    With ``key.adapters`` one more argument, the last: ``models.lora.LayerAdapters`` of each layer.

    Donate pools, tokens and tables. The last result is None but for the prompt_logprobs variant, where it is
    token rows with one column more, int32 [T, 3 + 2 * max_logprobs + 1] (see ``prompt_logprobs``), and float32 [S, D]
    (see ``pooled_sums``). The pooled variant has the latter alone, also in the logits' place.
    """

    def forward(
        params: Any, pools: Pools, tokens: jax.Array, tables: jax.Array, packed: jax.Array, *adapters: Any
    ) -> tuple[Any, ...]:
        parts = forward_layout(key, len(pools), block_size).split(packed)
        tables = apply_patches(tables, parts["patches"])
        token_ids, tokens = take_tokens(parts, tokens)
        batch = unpack_batch(parts, token_ids, tables)
        if key.adapters:
            params = params.replace(layers=with_adapters(params.layers, adapters[0]))
            batch = replace(batch, adapters=parts["adapters"][batch.token_rows])
        hidden, pools = decoder.forward(params, spec, pools, batch, env)
        if key.pooled:
            sums = pooled_sums(hidden, parts)
            return sums, pools, tokens, tables, (None, sums)
        logits = head_of_rows(params, spec, hidden[:, batch.logit_tokens], batch.num_rows, env)
        prompt = None
        if key.prompt_logprobs:

            def head(columns: jax.Array) -> jax.Array:
                return decoder.logits(params, spec, columns, env)

            share = Share(env.vocab_axis, spec.vocab)
            found = prompt_logprobs(head, hidden, parts, max_logprobs, share, env)
            prompt = found, pooled_sums(hidden, parts)
        return logits, pools, tokens, tables, prompt

    return forward


def head_of_rows(params: Any, spec: DecoderSpec, hidden: jax.Array, num_rows: jax.Array, env: Env) -> jax.Array:
    """hidden [D, S], of which ``num_rows`` columns are in use -> logits float32 [V, S]."""
    if env.tile is None:
        return decoder.logits(params, spec, hidden, env)
    tile, width = env.tile, hidden.shape[1]

    def body(first: jax.Array, out: jax.Array) -> jax.Array:
        return put_columns(out, decoder.logits(params, spec, columns_of(hidden, first, tile), env), first)

    table = params.embed if spec.tie_embeddings else params.head
    out = jnp.zeros((table.shape[0], width), jnp.float32)
    return over_tiles(tile, width, num_rows, body, out)


def pooled_sums(hidden: jax.Array, parts: dict[str, jax.Array]) -> jax.Array:
    """hidden [D, T] -> float32 [S, D]: each row's sum over its tokens whose target is POOLED.

    A product with ones and zeros: with one such token a row its hidden state comes out as it is.
    """
    rows = jnp.arange(parts["slots"].shape[0], dtype=jnp.int32)
    picked = (parts["token_rows"][None, :] == rows[:, None]) & (parts["target_ids"] == POOLED)[None, :]
    return lax.dot_general(
        picked.astype(hidden.dtype),
        hidden,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def take_tokens(parts: dict[str, jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids of the step, int32 [T], and the token table with the prefill tokens written: decode tokens are read
    from it."""
    num_decode, num_tokens = parts["header"][0], parts["header"][2]
    rows, positions, slots = parts["token_rows"], parts["positions"], parts["slots"]
    index = jnp.arange(rows.shape[0], dtype=jnp.int32)
    dummy = jnp.int32(tokens.shape[0] - 1)
    token_slots = jnp.where(index < num_tokens, slots[rows], dummy)
    token_ids = jnp.where(index < num_decode, tokens[token_slots, positions], parts["token_ids"])
    return token_ids, tokens.at[token_slots, positions].set(token_ids, mode="promise_in_bounds")


def unpack_batch(parts: dict[str, jax.Array], token_ids: jax.Array, tables: jax.Array) -> Batch:
    """tables: int32 [G, slots + 1, P]."""
    num_decode, num_rows, num_tokens = (parts["header"][i] for i in range(3))
    return Batch(
        token_ids=token_ids,
        positions=parts["positions"],
        token_rows=parts["token_rows"],
        block_tables=tables[:, parts["slots"]],
        query_starts=parts["query_starts"],
        query_lens=parts["query_lens"],
        context_lens=parts["context_lens"],
        logit_tokens=parts["logit_tokens"],
        num_decode=num_decode,
        num_rows=num_rows,
        num_tokens=num_tokens,
    )


def pack_logprobs(token_ids: jax.Array, found: Logprobs) -> jax.Array:
    """token_ids int32 [n] and what was found of them -> token rows, int32 [n, 3 + 2 k] (see core.plan.row_width)."""
    bits, top_bits = (lax.bitcast_convert_type(x, jnp.int32) for x in (found.logprobs, found.top_logprobs))
    pairs = jnp.stack([found.top_ids, top_bits], axis=2).reshape(token_ids.shape[0], -1)
    return jnp.concatenate([token_ids[:, None], bits[:, None], found.ranks[:, None], pairs], axis=1)


def logprobs_alone(logits: jax.Array, targets: jax.Array, k: int, share: Share, num: jax.Array) -> Logprobs:
    """``target_logprobs`` as code of its own: the same bits for sampled tokens and for a prompt's. num: int32 [], any
    number of 0 or more."""
    n = targets.shape[0]
    zeros = Logprobs(
        jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32), jnp.zeros((n, k), jnp.int32), jnp.zeros((n, k), jnp.float32)
    )
    return isolated(lambda: target_logprobs(logits, targets, k, share), zeros, num)


def _entropies(logits: jax.Array, wanted: jax.Array, share: Share, branches: bool) -> jax.Array:
    """Bits of the entropies, int32 [n]; with branches 0 where they are not ``wanted`` (bool [])."""
    if branches:
        zeros = jnp.zeros(logits.shape[1], jnp.float32)
        found = lax.cond(wanted, lambda: entropies(logits, share), lambda: zeros)
    else:
        found = entropies(logits, share)
    return lax.bitcast_convert_type(found, jnp.int32)


def prompt_logprobs(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    parts: dict[str, jax.Array],
    max_logprobs: int,
    share: Share,
    env: Env,
) -> jax.Array:
    """hidden [D, T] of the step with these ``parts`` -> token rows [T, 3 + 2 k] and, as one more column, the bits of
    the entropy (0 where the step wants none), of the tokens that want it.

    ``head``: columns of hidden -> logits, of ``share``. Where the parts have ``params`` (of the rows), temperature and
    filters are applied. ``env``: of all the code.
    """
    targets, span, tile = parts["target_ids"], parts["header"][3:], env.tile
    num_tokens = hidden.shape[1]
    size = min(tile or PROMPT_LOGPROB_ROWS, num_tokens)
    wanted_entropy = parts["entropy"][0] != 0

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(span[0] + i * jnp.int32(size), jnp.int32(num_tokens - size))
        columns = lax.dynamic_slice_in_dim(hidden, start, size, axis=1)
        wanted = lax.dynamic_slice_in_dim(targets, start, size)
        logits = head(columns)
        if "params" in parts:
            rows = lax.dynamic_slice_in_dim(parts["token_rows"], start, size)
            logits = filtered(logits, unpack_rows(parts["params"][rows]), share, env.branches)
        if tile is None:
            found = target_logprobs(logits, wanted, max_logprobs, share)
        else:
            found = logprobs_alone(logits, wanted, max_logprobs, share, span[0])
        entropy = _entropies(logits, wanted_entropy, share, env.branches)
        packed = jnp.concatenate([pack_logprobs(wanted, found), entropy[:, None]], axis=1)
        return lax.dynamic_update_slice_in_dim(out, packed, start, axis=0)

    blocks = (span[1] - span[0] + jnp.int32(size - 1)) // jnp.int32(size)
    return lax.fori_loop(0, blocks, block, jnp.zeros((num_tokens, row_width(max_logprobs) + 1), jnp.int32))
