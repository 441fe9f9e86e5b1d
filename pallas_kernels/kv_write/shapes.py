"""Tiles of the Triton body."""

from __future__ import annotations

import math
from typing import Any

import jax

from pallas_kernels.platform import Target, next_power_of_2, tuned


def write_case(qkv: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The name under which a card's best tile is stored: pool, head dim, heads of all tokens to a power of 2."""
    kv_heads, heads, dim, tokens = qkv.shape
    return f"{pool.dtype.name}/{dim}/{next_power_of_2(kv_heads * heads * tokens)}"


def write_tile(
    qkv: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct, target: Target
) -> dict[str, Any]:
    """{"rows": heads that a program takes, "num_warps"}: enough programs to fill the card, then 2048 elements each
    (4096 spill)."""
    found = tuned("kv_write", target, write_case(qkv, pool))
    if found:
        return found
    dim = qkv.shape[2]
    rows = math.prod(qkv.shape) // dim
    most = max(1, 2048 // next_power_of_2(dim))
    return {"rows": min(most, next_power_of_2(rows // (2 * target.cores))), "num_warps": 4}
