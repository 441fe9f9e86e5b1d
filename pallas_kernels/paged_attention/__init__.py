"""Attention of a ragged batch over the paged KV pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.reference import paged_attention_xla
from pallas_kernels.paged_attention.shapes import decode_case
from pallas_kernels.platform import CPU, Backend, Target, tuned

__all__ = ["choose", "paged_attention"]

MAX_HEAD_DIM = 256
_NOT_LATENT = "latent vectors, which are keys and values in one, are served by the xla body alone"


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
    context_lens: jax.Array,  # int32 [S]  of a decode row: its token's position + 1
    num_decode: jax.Array,  # int32 []  rows [:num_decode] have one token, token i = row i
    num_rows: jax.Array,  # int32 []
    num_tokens: jax.Array,  # int32 []
    scale: float,
    window: int | None = None,  # tokens a query sees, itself included
    soft_cap: float | None = None,  # logits become soft_cap * tanh(logits / soft_cap), before bias and mask (Gemma 2)
    sinks: jax.Array | None = None,  # float32 [N]  a logit per head that joins the softmax's denominator (GPT-OSS)
    alibi: jax.Array | None = None,  # float32 [N]  slopes: logits += slope * (key position - query position)
    kv_scales: jax.Array | None = None,  # float32 [L, 2, blocks, K, B]  stored number * scale = value (1-byte pools)
    value_dim: int | None = None,  # the pool is [L, 1, blocks, K, B, H]: a key's first numbers are the value
    one_token_rows: bool = False,  # static; all rows are decode rows, and bits do not depend on how many there are
    target: Target = CPU,
    backend: Backend = "auto",
) -> jax.Array:
    """Causal attention: token t of row r attends to positions ``max(0, p - window + 1) .. p`` with p = positions[t].

    Returns [T, N, H], or [T, N, value_dim], in q's dtype; padding tokens give finite values that nobody reads. Any GQA
    ratio N / K. Sums are float32. Work follows the contexts, not the width of the table; what lies in unused places of
    the pool, NaN too, never shows. Raises ``NotImplementedError`` where the body that ``choose`` picks cannot serve the
    case.
    """
    if (pool.dtype.itemsize == 1) != (kv_scales is not None):
        raise ValueError(f"kv_scales belong to 1-byte pools and only to them; the pool is {pool.dtype}")
    if pool.shape[1] != (2 if value_dim is None else 1):
        raise ValueError(f"value_dim {value_dim} does not belong to a pool {pool.shape} [L, sides, blocks, K, B, H]")
    body = choose(q, pool, target=target, backend=backend, alibi=alibi is not None)
    how: dict[str, Any] = {} if value_dim is None else {"value_dim": value_dim}  # of the one body that has it
    return BODIES[body](
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
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
        kv_scales=kv_scales,
        one_token_rows=one_token_rows,
        target=target,
        **how,
    )


def _triton(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.paged_attention.triton import paged_attention_triton

    return paged_attention_triton(*args, **kwargs)


def _mosaic(*args: Any, **kwargs: Any) -> jax.Array:
    from pallas_kernels.paged_attention.mosaic import decode_mosaic

    return _triton(*args, **kwargs, decode=decode_mosaic)


BODIES: dict[str, Callable[..., jax.Array]] = {"xla": paged_attention_xla, "triton": _triton, "mosaic": _mosaic}


def choose(
    q: jax.ShapeDtypeStruct | jax.Array,
    pool: jax.ShapeDtypeStruct | jax.Array,
    *,
    target: Target,
    backend: Backend = "auto",
    alibi: bool = False,
) -> str:
    """The name of the body in ``BODIES`` that serves this case; only shapes and dtypes of q and pool are read.

    "auto" takes XLA on a CPU and Triton on a card, or Mosaic where a card has shown it faster (``tuned``); where keys
    are values, too (a pool [L, 1, ...]), it is XLA: no kernel is written for them. Raises ``NotImplementedError`` where
    the case needs what the card or the body does not have.
    """
    name: str = backend
    if backend == "auto":
        name = "triton" if target.runs_pallas and pool.shape[1] == 2 else "xla"
        best = (tuned("paged_decode", target, decode_case(pool)) or {}).get("body")
        if name == "triton" and best == "mosaic" and _mosaic_lacks(q, pool, target, alibi) is None:
            name = best
    if name not in BODIES:
        raise NotImplementedError(f"paged attention has no body named {name!r}: {', '.join(BODIES)}")
    lacking = None
    if name != "xla":
        lacking = _pallas_lacks(q, pool, target)
    if name == "mosaic":
        lacking = _mosaic_lacks(q, pool, target, alibi) or lacking
    if lacking:
        raise NotImplementedError(f"paged attention, {name} body: {lacking}")
    return name


def _pallas_lacks(
    q: jax.ShapeDtypeStruct | jax.Array, pool: jax.ShapeDtypeStruct | jax.Array, target: Target
) -> str | None:
    """Why no Pallas body can serve this, or None."""
    if pool.shape[1] == 1:
        return _NOT_LATENT
    if not target.runs_pallas:
        return "it needs an NVIDIA card of compute capability 8.0 or above"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"head dims up to {MAX_HEAD_DIM} are served, not {q.shape[-1]}"
    floats = (jnp.float32, jnp.bfloat16, jnp.float16)
    if q.dtype not in floats or pool.dtype not in (*floats, jnp.int8, jnp.float8_e4m3fn):
        return f"there is no form for queries {q.dtype} over KV {pool.dtype}"
    if pool.dtype == jnp.float8_e4m3fn and not target.has_fp8:
        return "a float8_e4m3fn KV pool needs compute capability 8.9 or above"
    if pool.dtype.itemsize == 1 and 2**31 < math.prod(pool.shape) <= 2**32:
        return (
            "elements of a 1-byte KV pool are counted in 32 bits up to 4 GiB, and overflow from 2 GiB on; take a pool "
            "of at most 2 GiB or of more than 4 GiB per device"
        )
    return None


def _mosaic_lacks(
    q: jax.ShapeDtypeStruct | jax.Array, pool: jax.ShapeDtypeStruct | jax.Array, target: Target, alibi: bool
) -> str | None:
    """Why the Mosaic body cannot serve this, or None."""
    if pool.shape[1] == 1:
        return _NOT_LATENT
    if target.platform != "cuda" or target.capability != (9, 0):
        return "it needs a card of compute capability 9.0"
    if pool.dtype != q.dtype or pool.dtype not in (jnp.bfloat16, jnp.float16):
        return f"KV must have the queries' dtype, bfloat16 or float16; they are {pool.dtype} and {q.dtype}"
    if pool.shape[5] not in (64, 128) or pool.shape[4] not in (8, 16, 32, 64):
        return f"head dims are 64 or 128 and blocks 8 to 64 tokens, not {pool.shape[5]} and {pool.shape[4]}"
    if q.shape[1] > 64 * pool.shape[3]:
        return "a KV head serves at most 64 query heads"
    return "it has no ALiBi" if alibi else None
