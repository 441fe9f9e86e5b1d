"""Tiles of the Triton body: a card's own table first, else what compiled without spills on all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pallas_kernels.platform import Target, next_power_of_2, tuned


@dataclass(frozen=True)
class Tile:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_of(block_rows: int, gated: bool, n: int, k: int, x_dtype: str, w_dtype: str, target: Target) -> Tile:
    """The tile for blocks of ``block_rows`` rows and a matrix [n, k]; gated: gate and up, two of them."""
    found = tuned("grouped_matmul", target, case_name(block_rows, gated, n, k, w_dtype))
    tile = Tile(**found) if found else _default(block_rows, gated, x_dtype, w_dtype, target)
    tile = replace(
        tile,
        block_n=min(tile.block_n, max(16, next_power_of_2(n))),
        block_k=min(tile.block_k, max(16, next_power_of_2(k))),
    )
    return _within_shared_memory(tile, block_rows, gated, x_dtype, target)


def packed_tile_of(block_rows: int, gated: bool, n: int, k: int, x_dtype: str, form: str, target: Target) -> Tile:
    """The same for a ``QuantStack`` of a ``form``: ``block_k`` is what two scalings are apart at most."""
    found = tuned("grouped_matmul", target, case_name(block_rows, gated, n, k, form))
    tile = Tile(**found) if found else _packed_default(block_rows, gated, x_dtype, target)
    tile = replace(tile, block_n=min(tile.block_n, max(16, next_power_of_2(n))))
    size, parts, per_byte = (4 if x_dtype == "float32" else 2), (2 if gated else 1), (2 if "4-" in form else 1)

    def needed(t: Tile) -> int:
        """Of the pipelined loads, and of the widened tiles that a wgmma reads."""
        weights = parts * t.block_k * t.block_n
        return t.num_stages * (t.block_k * block_rows * size + weights // per_byte) + weights * size

    while needed(tile) > target.shared_memory and (tile.num_stages > 1 or tile.block_k > 32):
        fewer = tile.num_stages > 1
        tile = replace(tile, num_stages=tile.num_stages - 1) if fewer else replace(tile, block_k=tile.block_k // 2)
    return tile


def _packed_default(block_rows: int, gated: bool, x_dtype: str, target: Target) -> Tile:
    if x_dtype == "float32":  # registers are the limit
        return Tile(32, 32, 4 if block_rows <= 16 else 8, 2)
    if block_rows <= 16:
        return Tile(64, 128, 4, 3)
    if target.capability[0] != 9:  # without wgmma more lies in registers
        return Tile(32 if gated else 64, 64, 4 if block_rows <= 64 else 8, 3)
    return Tile(64 if gated else 128, 64, 4 if block_rows <= 64 else 8, 3)


def case_name(block_rows: int, gated: bool, n: int, k: int, w_dtype: str) -> str:
    """The key in the tables of tuned tiles."""
    return f"m{block_rows}-{'gated' if gated else 'plain'}-{n}x{k}-{w_dtype}"


def _default(block_rows: int, gated: bool, x_dtype: str, w_dtype: str, target: Target) -> Tile:
    if x_dtype == "float32":  # full precision has no tensor cores: small tiles, or it spills
        return Tile(32 if gated else 64, 32, 4, 2) if block_rows <= 16 else Tile(32, 32, 8, 2)
    one_byte = w_dtype in ("int8", "float8_e4m3fn")
    if block_rows <= 16:
        return Tile(64, 128 if one_byte else 64, 4, 3)
    if target.capability < (9, 0):
        return Tile(64 if gated else 128, 64, 4, 3)
    return Tile(128, 64, 4 if block_rows <= 64 and not gated else 8, 3)


def _within_shared_memory(tile: Tile, block_rows: int, gated: bool, x_dtype: str, target: Target) -> Tile:
    size = 4 if x_dtype == "float32" else 2  # a narrower weight is widened on its way

    def needed(t: Tile) -> int:
        return t.num_stages * t.block_k * (block_rows + (2 if gated else 1) * t.block_n) * size

    while needed(tile) > target.shared_memory:
        if tile.num_stages > 1:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        else:
            tile = replace(tile, block_k=tile.block_k // 2)
    return tile
