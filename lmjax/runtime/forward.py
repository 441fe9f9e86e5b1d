"""The forward program: packed buffer -> patched tables, token ids, the model, logits of each row's last token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.core.plan import row_width
from lmjax.models import decoder
from lmjax.models.spec import DecoderSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import ALONE, Env
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

    Donate pools, tokens and tables. The last result is None but for the prompt_logprobs variant, where it is
    token rows with one column more, int32 [T, 3 + 2 * max_logprobs + 1] (see ``prompt_logprobs``).
    """

    def forward(params: Any, pools: Pools, tokens: jax.Array, tables: jax.Array, packed: jax.Array) -> tuple[Any, ...]:
        parts = forward_layout(key, len(pools), block_size).split(packed)
        tables = apply_patches(tables, parts["patches"])
        token_ids, tokens = take_tokens(parts, tokens)
        batch = unpack_batch(parts, token_ids, tables)
        hidden, pools = decoder.forward(params, spec, pools, batch, env)
        logits = decoder.logits(params, spec, hidden[:, batch.logit_tokens], env)
        prompt = None
        if key.prompt_logprobs:

            def head(columns: jax.Array) -> jax.Array:
                return decoder.logits(params, spec, columns, env)

            share = Share(env.vocab_axis, spec.vocab)
            prompt = prompt_logprobs(head, hidden, parts, max_logprobs, share)
        return logits, pools, tokens, tables, prompt

    return forward


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


def prompt_logprobs(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    parts: dict[str, jax.Array],
    max_logprobs: int,
    share: Share,
) -> jax.Array:
    """hidden [D, T] of the step with these ``parts`` -> token rows [T, 3 + 2 k] and, as one more column, the bits of
    the entropy (0 where the step wants none), of the tokens that want it.

    ``head``: columns of hidden -> logits, of ``share``. Where the parts have ``params`` (of the rows), temperature and
    filters are applied.
    """
    targets, span = parts["target_ids"], parts["header"][3:]
    num_tokens = hidden.shape[1]
    size = min(PROMPT_LOGPROB_ROWS, num_tokens)
    wanted_entropy = parts["entropy"][0] != 0

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        start = jnp.minimum(span[0] + i * jnp.int32(size), jnp.int32(num_tokens - size))
        columns = lax.dynamic_slice_in_dim(hidden, start, size, axis=1)
        wanted = lax.dynamic_slice_in_dim(targets, start, size)
        logits = head(columns)
        if "params" in parts:
            rows = lax.dynamic_slice_in_dim(parts["token_rows"], start, size)
            logits = filtered(logits, unpack_rows(parts["params"][rows]), share)
        packed = pack_logprobs(wanted, target_logprobs(logits, wanted, max_logprobs, share))
        entropy = lax.cond(wanted_entropy, lambda: entropies(logits, share), lambda: jnp.zeros(size, jnp.float32))
        entropy = lax.bitcast_convert_type(entropy, jnp.int32)
        packed = jnp.concatenate([packed, entropy[:, None]], axis=1)
        return lax.dynamic_update_slice_in_dim(out, packed, start, axis=0)

    blocks = (span[1] - span[0] + jnp.int32(size - 1)) // jnp.int32(size)
    return lax.fori_loop(0, blocks, block, jnp.zeros((num_tokens, row_width(max_logprobs) + 1), jnp.int32))
