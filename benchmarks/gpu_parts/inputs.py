"""Ragged batches over a paged pool, as paged_attention takes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Rows = list[tuple[int, int]]  # (tokens in this step, tokens of the whole context, these included)


def tables(rows: Rows, *, num_rows: int, width: int, block: int, blocks: int, turn: int = 0) -> np.ndarray:
    """int32 [num_rows, width]: shuffled blocks, none twice while the pool has enough. Another turn, other blocks."""
    order = np.random.default_rng(0).permutation(np.arange(1, blocks, dtype=np.int32))
    needed = [-(-context // block) for _, context in rows]
    taken = np.take(order, np.arange(sum(needed)) + turn * sum(needed), mode="wrap")
    out = np.zeros((num_rows, width), np.int32)
    ends = np.cumsum(needed)
    for row, (end, count) in enumerate(zip(ends, needed, strict=True)):
        out[row, :count] = taken[end - count : end]
    return out


def ragged(rows: Rows, *, num_tokens: int, num_rows: int) -> dict[str, jax.Array]:
    """The arguments beside q, pool and block_tables. Leading rows of one token are decode rows."""
    lens, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    decode = next((i for i, n in enumerate(lens) if n != 1), len(lens))
    ends = np.cumsum(lens)
    total = int(ends[-1])
    token_rows, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    token_rows[:total] = np.repeat(np.arange(len(lens)), lens)
    positions[:total] = np.arange(total) - np.repeat(ends - lens, lens) + np.repeat(contexts - lens, lens)

    def by_row(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, num_rows - len(rows))).astype(np.int32)

    arrays: dict[str, Any] = {
        "token_rows": token_rows,
        "positions": positions,
        "query_starts": by_row(ends - lens),
        "query_lens": by_row(lens),
        "context_lens": by_row(contexts),
        "num_decode": np.int32(decode),
        "num_rows": np.int32(len(rows)),
        "num_tokens": np.int32(total),
    }
    return {name: jnp.asarray(value) for name, value in arrays.items()}
