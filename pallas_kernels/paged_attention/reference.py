"""XLA form of paged attention (first version: every token walks its own blocks; the fast forms come next)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def paged_attention_xla(
    q: jax.Array,
    pool: jax.Array,
    *,
    layer: int,
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
) -> jax.Array:
    """Same arguments as ``pallas_kernels.paged_attention.paged_attention``."""
    num_q, heads, dim = q.shape
    kv_heads, block = pool.shape[3], pool.shape[4]
    group = heads // kv_heads
    qf = (q.astype(jnp.float32) * jnp.float32(scale)).reshape(num_q, kv_heads, group, dim)
    tables = block_tables[token_rows]  # [T, P]

    def body(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        m, den, acc = carry
        kv = pool[layer, :, lax.dynamic_index_in_dim(tables, j, 1, keepdims=False)].astype(jnp.float32)
        k, v = kv[:, 0], kv[:, 1]  # [T, K, B, H]
        at = j * block + jnp.arange(block, dtype=jnp.int32)
        seen = at[None, :] <= positions[:, None]
        if window is not None:
            seen &= at[None, :] > positions[:, None] - window
        s = jnp.einsum("tkgh,tkbh->tkgb", qf, k)
        s = jnp.where(seen[:, None, None, :], s, -jnp.inf)
        top = jnp.maximum(m, s.max(-1))
        safe = jnp.where(jnp.isfinite(top), top, 0.0)
        p = jnp.exp(s - safe[..., None])
        alpha = jnp.exp(m - safe)
        # a masked V may be NaN (null block): a zero weight would not stop it
        v = jnp.where(seen[:, None, :, None], v, 0.0)
        return top, den * alpha + p.sum(-1), acc * alpha[..., None] + jnp.einsum("tkgb,tkbh->tkgh", p, v)

    zero = jnp.zeros((num_q, kv_heads, group), jnp.float32)
    last = (jnp.max(context_lens) + block - 1) // block
    start = jnp.zeros_like(last)
    _, den, acc = lax.fori_loop(start, last, body, (zero - jnp.inf, zero, jnp.zeros_like(qf)))
    out = acc / jnp.maximum(den, 1e-30)[..., None]
    return out.reshape(num_q, heads, dim).astype(q.dtype)
