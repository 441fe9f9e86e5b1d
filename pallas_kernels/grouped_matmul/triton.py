"""Triton body of grouped_matmul: a program makes a tile of one block of rows, with the matrix of the block's group.

Rows are gathered in the kernel, so no sorted copy of the tokens is made. Blocks of no group end at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.grouped_matmul.tiles import Tile, tile_of
from pallas_kernels.platform import Target


def grouped_matmul_triton(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    scale: jax.Array | None,
    activation: str | None,
    sorted_rows: bool,
    target: Target,
) -> jax.Array:
    """Same arguments as ``pallas_kernels.grouped_matmul.grouped_matmul``."""
    n, k = w.shape[-2:]
    tile = tile_of(groups.block_rows, activation is not None, n, k, x.dtype.name, w.dtype.name, target)
    return _call(x, w, groups, scale, activation=activation, sorted_rows=sorted_rows, tile=tile, target=target)


@partial(jax.jit, static_argnames=("activation", "sorted_rows", "tile", "target"))  # equal layers lower once
def _call(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    scale: jax.Array | None,
    *,
    activation: str | None,
    sorted_rows: bool,
    tile: Tile,
    target: Target,
) -> jax.Array:
    size, n = groups.rows.shape[0], w.shape[-2]
    operands = [x, w.reshape(w.shape[0], -1, *w.shape[-2:]), groups.rows, groups.block_groups]
    if scale is not None:
        operands.append(scale.reshape(w.shape[0], -1, n))
    return pl.pallas_call(
        partial(_body, block=groups.block_rows, activation=activation, sorted_rows=sorted_rows, tile=tile),
        # neighbours are blocks of rows: those of one group read the same tile of its matrix
        grid=(groups.block_groups.shape[0], pl.cdiv(n, tile.block_n)),
        out_shape=jax.ShapeDtypeStruct((size, n), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=target.interpret,
        name="grouped_matmul",
    )(*operands)


def _body(
    x_ref: Any,  # [T or M, K]
    w_ref: Any,  # [G, 1 or 2, N, K]
    rows_ref: Any,  # [M]
    block_groups_ref: Any,  # [M / BM]
    *refs: Any,  # scale [G, 1 or 2, N] where there is one, and the output [M, N]
    block: int,
    activation: str | None,
    sorted_rows: bool,
    tile: Tile,
) -> None:
    scale_ref, out_ref = (refs[0] if len(refs) == 2 else None), refs[-1]
    tokens, depth = x_ref.shape
    n = w_ref.shape[2]
    parts = range(w_ref.shape[1])
    i, j = pl.program_id(0), pl.program_id(1)
    group = block_groups_ref[i]

    @pl.when(group >= 0)
    def _() -> None:
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        row = at if sorted_rows else plt.load(rows_ref.at[at])
        row_ok = None if sorted_rows else (row >= 0) & (row < tokens)  # in bounds whatever the routing says
        col = j * tile.block_n + jnp.arange(tile.block_n, dtype=jnp.int32)
        col_ok = col < n if n % tile.block_n else None

        def step(index: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            k = index * tile.block_k + jnp.arange(tile.block_k, dtype=jnp.int32)
            k_ok = k < depth if depth % tile.block_k else None
            xs = _load(x_ref.at[row[:, None], k[None]], _both(row_ok, k_ok))
            out = []
            for part, acc in zip(parts, accs, strict=True):
                ws = _load(w_ref.at[group, part, col[:, None], k[None]], _both(col_ok, k_ok))
                out.append(acc + _dot(xs, ws.astype(xs.dtype).T))
            return tuple(out)

        zero = jnp.zeros((block, tile.block_n), jnp.float32)
        accs = lax.fori_loop(0, pl.cdiv(depth, tile.block_k), step, (zero,) * len(parts))
        if scale_ref is not None:
            scales = [_load(scale_ref.at[group, part, col], col_ok) for part in parts]
            accs = tuple(acc * s.astype(jnp.float32)[None] for acc, s in zip(accs, scales, strict=True))
        y = accs[0] if activation is None else ACTIVATIONS[activation](accs[0]) * accs[1]
        plt.store(out_ref.at[at[:, None], col[None]], y.astype(out_ref.dtype), mask=_both(None, col_ok))


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def _both(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a tile; None: all of it. What divides evenly is not masked."""
    if rows is None:
        return None if columns is None else columns[None]
    return rows[:, None] if columns is None else rows[:, None] & columns[None]


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    # float32 means float32: the default would round both to TF32
    return plt.dot(x, w, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
