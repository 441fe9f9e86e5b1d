"""Tiles of the decode body, and the named cases that tests and benchmarks share."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.platform import Target, next_power_of_2, tuned

PROGRAMS_PER_CORE = 4  # decode programs that one multiprocessor holds (registers and shared memory)
MAX_SPLITS = 64
MAX_SPLIT_TOKENS = 16_384  # of one program: a long row among short ones would finish long after them


def decode_case(pool: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The name under which a card's best tile is stored."""
    return f"{pool.dtype.name}/{pool.shape[5]}/{pool.shape[4]}"


def decode_tile(
    q: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct, target: Target
) -> dict[str, Any]:
    """{"block": key positions a program takes at once, "num_warps", "num_stages"}.

    Of the forms that compile without spills the largest; two stages would lose the prefetch of the block table.
    """
    found = tuned("paged_decode", target, decode_case(pool))
    if found:
        return found
    dim, size = next_power_of_2(pool.shape[5]), pool.dtype.itemsize
    wide = dim >= 256 or (dim >= 128 and size != 2)
    tile = {"block": 32 if wide else 64, "num_warps": 8 if dim >= 256 and size != 2 else 4, "num_stages": 3}
    held = 2 * 2 * dim * max(size, q.dtype.itemsize)  # bytes a key position: keys and values, of two stages
    while tile["block"] > 16 and tile["block"] * held > target.shared_memory:
        tile["block"] //= 2
    return tile


def decode_splits(rows: int, kv_heads: int, max_tokens: int, target: Target) -> int:
    """Programs that share one row and KV head, a power of 2: enough to fill the card and to bound the longest."""
    fill = -(-PROGRAMS_PER_CORE * target.cores // (rows * kv_heads))
    longest = -(-max_tokens // MAX_SPLIT_TOKENS)
    most = -(-max_tokens // 64)
    return next_power_of_2(max(1, min(max(fill, longest), most, MAX_SPLITS)))


def prefill_case(pool: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The name under which a card's best tile is stored."""
    return f"{pool.dtype.name}/{pool.shape[5]}/{pool.shape[4]}"


def prefill_tile(
    q: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct, target: Target
) -> dict[str, Any]:
    """{"queries": rows of a tile (tokens x heads), "keys": positions it takes in at once, "num_warps", "num_stages"}."""
    found = tuned("paged_prefill", target, prefill_case(pool))
    if found:
        return found
    return {"queries": 64, "keys": 64, "num_warps": 4, "num_stages": 3}
