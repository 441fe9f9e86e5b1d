"""XLA form of kv_write: one scatter of [T, 2, K, H] rows, or [T, 1, K, H] where keys are values, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.heads import apply_rope, rms_norm
from pallas_kernels.platform import CPU, Target

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # what max |x| of a head is stored as
SMALLEST_SCALE = 1e-30  # below it a head counts as zero: its inverse would overflow


def kv_write_xla(
    qkv: jax.Array,
    pool: jax.Array,
    *,
    cos: jax.Array | None,
    sin: jax.Array | None,
    layer: jax.Array,
    block_ids: jax.Array,
    offsets: jax.Array,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    kv_scales: jax.Array | None = None,
    target: Target = CPU,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Same arguments as ``pallas_kernels.kv_write.kv_write``."""
    sides = pool.shape[1]
    kv_heads, group, dim, tokens = qkv.shape[0], qkv.shape[1] - sides, *qkv.shape[2:]
    q, k, others = qkv[:, :group], qkv[:, group], [qkv[:, i] for i in range(group + 1, group + sides)]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, plus_one), rms_norm(k, k_norm, eps, plus_one)
    if cos is not None and sin is not None:
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    q = q.reshape(kv_heads * group, dim, tokens).transpose(2, 0, 1)  # [T, N, H]
    kv = jnp.stack([x.transpose(2, 0, 1) for x in (k, *others)], axis=1)  # [T, 2, K, H]
    # advanced indices on both sides of slices put the token axis first: the updates are [T, 2, K, H] and [T, 2, K]
    if kv_scales is not None:
        kv, scales = quantize(kv, pool.dtype)
        kv_scales = kv_scales.at[layer, :, block_ids, :, offsets].set(scales, mode="promise_in_bounds")
    pool = pool.at[layer, :, block_ids, :, offsets, :].set(kv.astype(pool.dtype), mode="promise_in_bounds")
    return q, pool, kv_scales


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """x [..., H] -> (x / scale in a 1-byte dtype [..., H], scale float32 [...]); a head of zeros has scale 0."""
    largest = jnp.float32(LARGEST[dtype.name])
    xf = x.astype(jnp.float32)
    scale = jnp.abs(xf).max(-1) / largest
    inverse = jnp.where(scale > jnp.float32(SMALLEST_SCALE), 1 / scale, jnp.float32(0))
    y = jnp.clip(xf * inverse[..., None], -largest, largest)
    return (jnp.floor(y + jnp.float32(0.5)) if dtype == jnp.int8 else y).astype(dtype), scale
