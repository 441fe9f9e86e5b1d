"""Rotary embedding and the write of new keys and values into the paged pool, in one pass over a layer's qkv."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.platform import CPU, Backend, Target

Written = tuple[jax.Array, jax.Array, jax.Array | None]  # q, pool, kv_scales

_BODIES = {  # imported when chosen: a CPU never loads Pallas
    "xla": ("pallas_kernels.kv_write.reference", "kv_write_xla"),
    "triton": ("pallas_kernels.kv_write.triton", "kv_write_triton"),
}


def kv_write(
    qkv: jax.Array,  # [K, G + 2, H, T]  of each KV head: its G query heads, its key, its value
    pool: jax.Array,  # [L, 2, blocks, K, B, H]  one KV group: its layers, then keys and values
    *,
    cos: jax.Array | None,  # float32 [R / 2, T], R <= H rotary features; None: no rotary embedding
    sin: jax.Array | None,
    layer: int | jax.Array,  # index within the group (an int32 scalar where all layers share one kernel)
    block_ids: jax.Array,  # int32 [T]; padding tokens: 0, the null block
    offsets: jax.Array,  # int32 [T]  position within the block
    q_norm: jax.Array | None = None,  # [H]  RMSNorm of every query head before rope, as in Qwen3
    k_norm: jax.Array | None = None,  # [H]
    eps: float = 1e-6,
    kv_scales: jax.Array | None = None,  # float32 [L, 2, blocks, K, B]  of int8 and float8_e4m3fn pools, and only there
    target: Target = CPU,
    backend: Backend = "auto",
) -> Written:
    """(q [T, N, H] normed and rotated, pool, kv_scales): token t's key and value lie in the pool at
    ``[layer, :, block_ids[t], :, offsets[t], :]``; query head n belongs to KV head n // G.

    A pool of 1-byte elements stores ``x / scale``, with one scale a token, head and side, ``max |x| / 127`` (int8) or
    ``/ 448`` (float8_e4m3fn), in kv_scales at the same place. In place where pool and kv_scales are donated. Several
    padding tokens may write the null block: which one stays is undefined.

    Raises ValueError for arguments that do not belong together, NotImplementedError where the chosen body cannot
    serve the case on the target.
    """
    _check(qkv, pool, cos, sin, q_norm, k_norm, kv_scales)
    body = choose(pool, target=target, backend=backend)
    extra = {"cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm, "eps": eps, "kv_scales": kv_scales}
    layer = jnp.asarray(layer, jnp.int32)
    return body(qkv, pool, layer=layer, block_ids=block_ids, offsets=offsets, target=target, **extra)


def choose(
    pool: jax.Array | jax.ShapeDtypeStruct, *, target: Target, backend: Backend = "auto"
) -> Callable[..., Written]:
    """The body that serves this pool on the target; NotImplementedError says why there is none."""
    name = ("triton" if target.runs_pallas else "xla") if backend == "auto" else backend
    if name not in _BODIES:
        raise NotImplementedError(f"kv_write has no {name} body")
    if name == "triton":
        if not target.runs_pallas:
            raise NotImplementedError(f"kv_write in Triton needs compute capability 8.0 or newer, not {target}")
        if pool.dtype == jnp.float8_e4m3fn and not target.has_fp8:
            raise NotImplementedError(
                f"float8_e4m3fn KV needs compute capability 8.9 or newer, not {target.capability}"
            )
        if pool.dtype.itemsize == 1 and 2**31 < pool.size <= 2**32:
            # Pallas-Triton addresses operands up to 2**32 bytes by signed 32-bit element offsets
            raise NotImplementedError(
                f"a pool of 1-byte elements of 2 to 4 GiB ({pool.size} bytes) cannot be addressed"
            )
    module, function = _BODIES[name]
    return getattr(importlib.import_module(module), function)


def _check(
    qkv: jax.Array,
    pool: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    kv_scales: jax.Array | None,
) -> None:
    if qkv.shape[0] != pool.shape[3] or qkv.shape[2] != pool.shape[5] or qkv.shape[1] < 3:
        raise ValueError(f"qkv {qkv.shape} [K, G + 2, H, T] does not fit the pool {pool.shape} [L, 2, blocks, K, B, H]")
    if (cos is None) != (sin is None) or (q_norm is None) != (k_norm is None):
        raise ValueError("cos and sin, and q_norm and k_norm, come together")
    if cos is not None and 2 * cos.shape[0] > qkv.shape[2]:
        raise ValueError(f"{2 * cos.shape[0]} rotary features of a head of {qkv.shape[2]}")
    if (pool.dtype.itemsize == 1) != (kv_scales is not None):
        raise ValueError(
            f"kv_scales belong to int8 and float8_e4m3fn pools, and to them alone; the pool is {pool.dtype}"
        )
    if kv_scales is not None and kv_scales.shape != pool.shape[:-1]:
        raise ValueError(f"kv_scales {kv_scales.shape} for a pool {pool.shape}")
