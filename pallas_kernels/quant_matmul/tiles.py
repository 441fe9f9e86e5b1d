"""Tiles of the Triton body: which one a case gets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from pallas_kernels.platform import Target, next_power_of_2, tuned
from pallas_kernels.quant_matmul.weight import NIBBLES, Kind

OP = "quant_matmul"
MAX_SPLITS = 8
MIN_SPLIT_ROWS = 512  # of K: less work than this does not pay for its partial sums


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m x block_n outputs a program; block_k rows of K (of int4: at most) between two scalings."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# by the most tokens of the case
_DEFAULT = {
    16: Tile(16, 64, 128, 4, 4),
    64: Tile(64, 64, 128, 4, 3),
    0: Tile(128, 128, 64, 8, 3),
}


def token_class(num_tokens: int) -> int:
    """16: up to 16 tokens, 64: up to 64, 0: more."""
    return 16 if num_tokens <= 16 else 64 if num_tokens <= 64 else 0


def case_name(kind: Kind, group: int, num_tokens: int) -> str:
    """Key in the table of tuned tiles."""
    groups = f"-g{group if group <= 128 else 'all'}" if kind in (*NIBBLES, "int8_group", "fp8_group") else ""
    return f"{kind.removesuffix('_group')}{groups}-t{token_class(num_tokens) or 'many'}"


def tile_of(kind: Kind, group: int, num_tokens: int, x_bytes: int, target: Target) -> Tile:
    """What a card has shown best, else the default; cut down to the shared memory that the target has."""
    found = tuned(OP, target, case_name(kind, group, num_tokens))
    if found is not None:
        tile = Tile(**{f.name: int(found[f.name]) for f in fields(Tile)})
    else:
        tile = _DEFAULT[token_class(num_tokens)]
        if target.capability[0] != 9:  # without wgmma more lies in registers: the larger tiles spill
            tile = replace(tile, block_m=min(tile.block_m, 64), block_k=tile.block_k if tile.block_m == 16 else 64)
        if x_bytes == 4:  # float32 runs without tensor cores: registers are the limit
            tile = replace(tile, block_m=min(tile.block_m, 32), block_n=min(tile.block_n, 64), block_k=32)
    if kind == "fp8_block":
        tile = replace(tile, block_n=min(tile.block_n, 128), block_k=min(tile.block_k, 128))
    while _shared_bytes(tile, kind, x_bytes) > target.shared_memory and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while _shared_bytes(tile, kind, x_bytes) > target.shared_memory and tile.block_k > 32:
        tile = replace(tile, block_k=tile.block_k // 2)
    return tile


def _shared_bytes(tile: Tile, kind: Kind, x_bytes: int) -> int:
    """Of the pipelined loads, and of the converted weight tile that a wgmma reads."""
    weights = tile.block_k * tile.block_n // (2 if kind in NIBBLES else 1)
    return tile.num_stages * (tile.block_m * tile.block_k * x_bytes + weights) + tile.block_k * tile.block_n * x_bytes


def splits_of(tile: Tile, num_tokens: int, k: int, n: int, target: Target) -> int:
    """Into how many parts K is cut, so that few tokens still fill the card: a power of two up to 8.

    Four programs a core keep enough bytes in flight; partial sums may cost a quarter of what reading int4 does.
    """
    programs = -(-num_tokens // tile.block_m) * -(-n // tile.block_n)
    wanted = next_power_of_2(max(1, 4 * target.cores // programs))
    possible = max(1, min(MAX_SPLITS, k // MIN_SPLIT_ROWS, k // (64 * num_tokens)))
    while wanted > possible:
        wanted //= 2
    return wanted
