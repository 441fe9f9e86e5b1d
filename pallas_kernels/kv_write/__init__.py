"""Write new keys and values into the paged pool."""

from __future__ import annotations

import jax

from pallas_kernels.kv_write.reference import kv_write_xla


def kv_write(
    pool: jax.Array,  # [L, 2, blocks, K, B, H]  one KV group: its layers, then keys and values
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    *,
    layer: int | jax.Array,  # index within the group (an int32 scalar where all layers share one kernel)
    block_ids: jax.Array,  # int32 [T]; padding tokens: 0, the null block
    offsets: jax.Array,  # int32 [T]  position within the block
) -> jax.Array:
    """The pool with token t's key and value at ``[layer, :, block_ids[t], :, offsets[t], :]``.

    In place where the pool is donated. Several padding tokens may write the null block: which one stays is undefined.
    """
    return kv_write_xla(pool, k, v, layer=layer, block_ids=block_ids, offsets=offsets)
