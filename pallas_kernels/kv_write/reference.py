"""XLA form of kv_write: one scatter of [T, 2, K, H] rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_write_xla(
    pool: jax.Array, k: jax.Array, v: jax.Array, *, layer: int | jax.Array, block_ids: jax.Array, offsets: jax.Array
) -> jax.Array:
    """Same arguments as ``pallas_kernels.kv_write.kv_write``."""
    kv = jnp.stack([k, v], axis=1).astype(pool.dtype)  # [T, 2, K, H]
    # advanced indices on both sides of slices put the token axis first: the update is [T, 2, K, H]
    return pool.at[layer, :, block_ids, :, offsets, :].set(kv, mode="promise_in_bounds")
