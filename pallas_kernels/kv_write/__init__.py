"""Rotary embedding and the write of new keys and values into the paged pool, in one pass over a layer's qkv."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.reference import kv_write_xla
from pallas_kernels.platform import CPU, Backend, Target

__all__ = ["choose", "kv_write"]

Written = tuple[jax.Array, jax.Array, jax.Array | None]  # q, pool, kv_scales


def kv_write(
    qkv: jax.Array,  # [K, G + 2, H, T]  of each KV head: its G query heads, its key, its value
    pool: jax.Array,  # [L, 2, blocks, K, B, H]  one KV group: its layers, then keys and values
    # or, where keys are values, too: qkv [K, G + 1, H, T] without values, pool [L, 1, blocks, K, B, H]
    *,
    cos: jax.Array | None,  # float32 [R / 2, T], R <= H rotary features; None: no rotary embedding
    sin: jax.Array | None,
    layer: int | jax.Array,  # index within the group (an int32 scalar where all layers share one kernel)
    block_ids: jax.Array,  # int32 [T]; padding tokens: 0, the null block
    offsets: jax.Array,  # int32 [T]  position within the block
    q_norm: jax.Array | None = None,  # [H]  RMSNorm of every query head before rope, as in Qwen3
    k_norm: jax.Array | None = None,  # [H]
    eps: float = 1e-6,
    plus_one: bool = False,  # the norms' factors are 1 + weight, as in Gemma
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
    body = choose(qkv, pool, target=target, backend=backend)
    return BODIES[body](
        qkv,
        pool,
        cos=cos,
        sin=sin,
        layer=jnp.asarray(layer, jnp.int32),
        block_ids=block_ids,
        offsets=offsets,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        plus_one=plus_one,
        kv_scales=kv_scales,
        target=target,
    )


def _triton(*args: Any, **kwargs: Any) -> Written:
    from pallas_kernels.kv_write.triton import kv_write_triton

    return kv_write_triton(*args, **kwargs)


BODIES: dict[str, Callable[..., Written]] = {"xla": kv_write_xla, "triton": _triton}


def choose(
    qkv: jax.ShapeDtypeStruct | jax.Array,
    pool: jax.ShapeDtypeStruct | jax.Array,
    *,
    target: Target,
    backend: Backend = "auto",
) -> str:
    """The name of the body in ``BODIES`` that serves this case; only shapes and dtypes of qkv and pool are read.

    Raises ``NotImplementedError`` where the case needs what the card or the body does not have.
    """
    name: str = backend
    if backend == "auto":
        name = "triton" if target.runs_pallas and pool.shape[1] == 2 else "xla"
    if name == "xla":
        return name
    if pool.shape[1] == 1:
        raise NotImplementedError(f"the {name} body writes keys and values, not latent vectors: take the xla body")
    if name not in BODIES:
        raise NotImplementedError(f"kv_write has no body named {name!r}: {', '.join(BODIES)}")
    if not target.runs_pallas:
        raise NotImplementedError(f"the {name} body needs an NVIDIA card of compute capability 8.0 or above")
    floats = (jnp.float32, jnp.bfloat16, jnp.float16)
    if qkv.dtype not in floats or pool.dtype not in (*floats, jnp.int8, jnp.float8_e4m3fn):
        raise NotImplementedError(f"the {name} body writes no {qkv.dtype} into a pool of {pool.dtype}")
    if pool.dtype == jnp.float8_e4m3fn and not target.has_fp8:
        raise NotImplementedError("a float8_e4m3fn KV pool needs compute capability 8.9 or above")
    if pool.dtype.itemsize == 1 and 2**31 < math.prod(pool.shape) <= 2**32:
        raise NotImplementedError(
            "a 1-byte KV pool of 2 to 4 GiB: Pallas counts its elements in 32 bits up to 4 GiB, and they overflow "
            "from 2 GiB on; take a pool of at most 2 GiB or of more than 4 GiB per device"
        )
    return name


def _check(
    qkv: jax.Array,
    pool: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    kv_scales: jax.Array | None,
) -> None:
    sides = pool.shape[1]
    if qkv.shape[0] != pool.shape[3] or qkv.shape[2] != pool.shape[5] or qkv.shape[1] < 1 + sides:
        raise ValueError(
            f"qkv {qkv.shape} [K, G + {sides}, H, T] does not fit the pool {pool.shape} [L, {sides}, blocks, K, B, H]"
        )
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
