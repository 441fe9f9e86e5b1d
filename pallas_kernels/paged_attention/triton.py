"""Triton bodies of paged attention: decode rows, then prefill rows into the same output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.paged_attention.decode import decode_triton
from pallas_kernels.paged_attention.prefill import prefill_triton
from pallas_kernels.platform import Target

FEW = 16  # programs of so few tokens take each token as a decode row of its own


def paged_attention_triton(
    q: jax.Array,
    pool: jax.Array,
    *,
    layer: int | jax.Array,
    block_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    context_lens: jax.Array,
    num_decode: jax.Array,
    num_rows: jax.Array,
    num_tokens: jax.Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    one_token_rows: bool = False,
    target: Target,
    decode: Callable[..., jax.Array] = decode_triton,
) -> jax.Array:
    """Same arguments as ``pallas_kernels.paged_attention.paged_attention``; ``decode``: the body for decode rows."""
    tokens, few = q.shape[0], one_token_rows or q.shape[0] <= FEW
    shared: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "alibi": alibi,
        "kv_scales": kv_scales,
        "target": target,
    }
    out = decode(
        q,
        pool,
        layer=layer,
        block_tables=block_tables,
        token_rows=token_rows,
        positions=positions,
        count=num_tokens if few else num_decode,
        num_tokens=num_tokens,
        rows=tokens if few else min(tokens, block_tables.shape[0]),
        **shared,
    )
    if few:
        return out
    return prefill_triton(
        q,
        out,
        pool,
        layer=layer,
        block_tables=block_tables,
        query_starts=query_starts,
        query_lens=query_lens,
        context_lens=context_lens,
        num_decode=num_decode,
        num_rows=num_rows,
        **shared,
    )
