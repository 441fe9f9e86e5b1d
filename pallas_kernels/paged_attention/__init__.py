"""Attention of a ragged batch over the paged KV pool."""

from __future__ import annotations

import jax

from pallas_kernels.paged_attention.reference import paged_attention_xla


def paged_attention(
    q: jax.Array,  # [T, N, H]  rotary embedding already applied
    pool: jax.Array,  # [L, 2, blocks, K, B, H]  the step's own keys and values already written
    *,
    layer: int | jax.Array,  # index within the group (an int32 scalar where all layers share one kernel)
    block_tables: jax.Array,  # int32 [S, P]
    token_rows: jax.Array,  # int32 [T]
    positions: jax.Array,  # int32 [T]
    query_starts: jax.Array,  # int32 [S]
    query_lens: jax.Array,  # int32 [S]
    context_lens: jax.Array,  # int32 [S]
    num_decode: jax.Array,  # int32 []  rows [:num_decode] have one token, token i = row i
    num_rows: jax.Array,  # int32 []
    num_tokens: jax.Array,  # int32 []
    scale: float,
    window: int | None = None,  # tokens a query sees, itself included
) -> jax.Array:
    """Causal attention: token t of row r attends to positions ``max(0, p - window + 1) .. p`` with p = positions[t].

    Returns [T, N, H] in q's dtype; padding tokens give finite values that nobody reads. Any GQA ratio N / K.
    Work follows the longest context, not the width of the table.
    """
    return paged_attention_xla(
        q,
        pool,
        layer=layer,
        block_tables=block_tables,
        token_rows=token_rows,
        positions=positions,
        query_starts=query_starts,
        query_lens=query_lens,
        context_lens=context_lens,
        num_decode=num_decode,
        num_rows=num_rows,
        num_tokens=num_tokens,
        scale=scale,
        window=window,
    )
