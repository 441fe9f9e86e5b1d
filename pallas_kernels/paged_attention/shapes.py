"""Tiles of the decode body, and the named cases that tests and benchmarks share."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.platform import Target, next_power_of_2, tuned

# Two programs of three stages have 64 KB and more on their way to a multiprocessor; its share of the bandwidth times
# the memory's latency is about 40 KB. More would pay for the kernel that combines them.
PROGRAMS_PER_CORE = 2
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
    fill = round(PROGRAMS_PER_CORE * target.cores / (rows * kv_heads))
    longest = -(-max_tokens // MAX_SPLIT_TOKENS)
    most = -(-max_tokens // 64)
    return next_power_of_2(max(1, min(max(fill, longest), most, MAX_SPLITS)))


def prefill_case(pool: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The name under which a card's best tile is stored."""
    return f"{pool.dtype.name}/{pool.shape[5]}/{pool.shape[4]}"


def prefill_tile(
    q: jax.Array | jax.ShapeDtypeStruct, pool: jax.Array | jax.ShapeDtypeStruct, target: Target
) -> dict[str, Any]:
    """{"queries": rows of a tile (tokens x heads), "keys": positions taken in at once, "num_warps", "num_stages"}.

    Large ones that compile without spills, all features on or none; no card has timed them yet.
    """
    found = tuned("paged_prefill", target, prefill_case(pool))
    if found:
        return found
    dim, size = next_power_of_2(pool.shape[5]), max(q.dtype.itemsize, pool.dtype.itemsize)
    converted = pool.dtype.itemsize == 1  # keys and values go through registers, in two types
    if size == 4:  # no tensor cores: the operands of a product go through registers
        queries, keys, warps, stages = (32, 32, 8, 2) if dim <= 64 else (16, 16, 8 if dim <= 128 else 16, 2)
    elif target.capability[0] in (9, 10):  # warpgroup products take their operands from shared memory
        queries, keys, warps, stages = (128, 64, 8, 3) if dim <= 128 else (64, 64, 8, 2)
        if dim == 128 and q.shape[0] * q.shape[1] < queries * target.cores:  # more programs than multiprocessors
            queries, keys, warps = 64, 32 if converted else 64, 4
        if dim <= 64 and target.capability[0] == 10:
            queries, warps = 64, 4
        if dim >= 256 and converted and target.capability[0] == 9:
            keys = 16
    elif converted:
        queries = 64 if dim <= 128 else 32 if target.capability == (8, 0) else 16
        keys, warps, stages = 32, 8, 2
    else:
        queries, keys, warps, stages = 128 if dim <= 64 else 64, 64 if dim <= 128 else 32, 8, 2
    while keys > 16 and (queries + 2 * 2 * keys) * dim * size > target.shared_memory:  # q, two tiles of K and V
        keys //= 2
    return {"queries": queries, "keys": keys, "num_warps": warps, "num_stages": stages}
