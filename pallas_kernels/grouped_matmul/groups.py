"""Rows sorted by group: the rows of each token, the token of each row, and the group of each block of rows."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.platform import Target, next_power_of_2


class Groups(NamedTuple):
    """A token takes part in up to k groups (experts), or in none. The rows of a group are whole blocks of equal size,
    the last one padded; M rows in all: as many as any routing needs, and one block more that is never used."""

    slots: jax.Array  # int32 [T, k]  the row in [0, M) of each token's k-th group; -1: not grouped
    rows: jax.Array  # int32 [M]  the token of each row; T for padding. Undefined in blocks of group -1
    block_groups: jax.Array  # int32 [M / BM]  the group of each block; -1: nothing to do. Those come last

    @property
    def block_rows(self) -> int:
        """BM"""
        return self.rows.shape[0] // self.block_groups.shape[0]


def max_blocks(tokens: int, top_k: int, groups: int, block_rows: int) -> int:
    """Most blocks that any choice of ``top_k`` different groups a token fills, and the one that is never used."""
    pairs = tokens * top_k
    return min(pairs // block_rows + groups, groups * -(-tokens // block_rows), pairs) + 1


def default_block_rows(tokens: int, top_k: int, groups: int, target: Target) -> int:
    """BM for ``tokens`` tokens. Half a block a group is padding on average, so a block holds at most a quarter of what
    a group gets; small blocks load a group's weights more often."""
    average = tokens * top_k // groups
    if target.platform == "cuda":
        if average < 64:
            return 16  # the least that a tensor core takes
        return 64 if average < 256 or target.capability < (9, 0) else 128
    return 1 if tokens == 1 else min(max(next_power_of_2(average) // 4, 8), 128)
