"""The paged pools of keys and values, one a KV group: an array, or 1-byte elements with their scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmjax.types import KVSpec


class ScaledPool(NamedTuple):
    """A pool of 1-byte elements: stored number * scale = value."""

    values: jax.Array  # [layers, sides, blocks, K, B, H]
    scales: jax.Array  # float32 [layers, sides, blocks, K, B]


def pool_shape(kv_spec: KVSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """[L, sides, blocks, K, B, H] of one KV group's pool: keys and values, or latent vectors alone. ``num_blocks``
    includes the null block 0."""
    return (len(kv_spec.layers), kv_spec.sides, num_blocks, kv_spec.kv_heads, block_size, kv_spec.k_dim)


def abstract_pool(kv_spec: KVSpec, num_blocks: int, block_size: int) -> Any:
    """A KV group's pool as ``jax.ShapeDtypeStruct``."""
    shape = pool_shape(kv_spec, num_blocks, block_size)
    values = jax.ShapeDtypeStruct(shape, jnp.dtype(kv_spec.dtype))
    if not kv_spec.scaled:
        return values
    return ScaledPool(values, jax.ShapeDtypeStruct(shape[:-1], jnp.float32))  # type: ignore[arg-type]


def parts_of(pool: Any) -> tuple[jax.Array, jax.Array | None]:
    """The elements of a pool, and their scales if it has some."""
    return pool if isinstance(pool, ScaledPool) else (pool, None)


def block_size_of(pool: Any) -> int:
    return int(parts_of(pool)[0].shape[4])
