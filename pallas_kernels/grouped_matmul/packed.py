"""Triton body of grouped_matmul for matrices of few bits: widened in registers, scaled where they are summed.

As ``triton.py`` for the rows and the groups, as ``quant_matmul.triton`` for the weights: of a run of input features the
bytes are read once, and each nibble makes a product of its own.
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
from pallas_kernels.grouped_matmul.stack import QuantStack
from pallas_kernels.grouped_matmul.tiles import Tile, packed_tile_of
from pallas_kernels.grouped_matmul.triton import _both, _dot, _load
from pallas_kernels.platform import Target
from pallas_kernels.quant_matmul.pieces import Walk, nibbles_of, scale_of, walk_of
from pallas_kernels.quant_matmul.weight import NIBBLES, Kind


def grouped_matmul_packed(
    x: jax.Array, w: QuantStack, groups: Groups, *, activation: str | None, sorted_rows: bool, target: Target
) -> jax.Array:
    """Same arguments as ``pallas_kernels.grouped_matmul.grouped_matmul``."""
    n, k = w.shape[-2:]
    tile = packed_tile_of(groups.block_rows, activation is not None, n, k, x.dtype.name, w.form, target)
    return _call(x, w, groups, activation=activation, sorted_rows=sorted_rows, tile=tile, target=target)


@partial(jax.jit, static_argnames=("activation", "sorted_rows", "tile", "target"))  # equal layers lower once
def _call(
    x: jax.Array,
    w: QuantStack,
    groups: Groups,
    *,
    activation: str | None,
    sorted_rows: bool,
    tile: Tile,
    target: Target,
) -> jax.Array:
    size, (n, k) = groups.rows.shape[0], w.shape[-2:]
    w = w.with_parts()
    operands = [x, groups.rows, groups.block_groups, w.values, w.scale, *([] if w.zero is None else [w.zero])]
    body = partial(
        _body,
        kind=w.kind,
        has_zero=w.zero is not None,
        block=groups.block_rows,
        activation=activation,
        sorted_rows=sorted_rows,
        tile=tile,
        walk=walk_of(k, w.values.shape[1], w.run, tile.block_k),
    )
    return pl.pallas_call(
        body,
        # neighbours are blocks of rows: those of one group read the same tile of its matrix
        grid=(groups.block_groups.shape[0], pl.cdiv(n, tile.block_n)),
        out_shape=jax.ShapeDtypeStruct((size, n), x.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=target.interpret,
        name="grouped_matmul_packed",
    )(*operands)


def _body(
    x_ref: Any,  # [T or M, K]
    rows_ref: Any,  # [M]
    block_groups_ref: Any,  # [M / BM]
    w_ref: Any,  # [G, stored K, 1 or 2, N]
    scale_ref: Any,  # [G, runs, 1 or 2, N]
    *refs: Any,  # zeros where there are any, and the output [M, N]
    kind: Kind,
    has_zero: bool,
    block: int,
    activation: str | None,
    sorted_rows: bool,
    tile: Tile,
    walk: Walk,
) -> None:
    zero_ref, out_ref = (refs[0] if has_zero else None), refs[-1]
    tokens = x_ref.shape[0]
    stored, num_parts, n = w_ref.shape[1:]
    parts = range(num_parts)
    i, j = pl.program_id(0), pl.program_id(1)
    group = block_groups_ref[i]

    @pl.when(group >= 0)
    def _() -> None:
        at = i * block + jnp.arange(block, dtype=jnp.int32)
        row = at if sorted_rows else plt.load(rows_ref.at[at])
        row_ok = None if sorted_rows else (row >= 0) & (row < tokens)  # in bounds whatever the routing says
        col = j * tile.block_n + jnp.arange(tile.block_n, dtype=jnp.int32)
        col_ok = col < n if n % tile.block_n else None
        piece_row, pieces = jnp.arange(walk.rows, dtype=jnp.int32), jnp.int32(walk.pieces)

        def load_x(k: jax.Array, ok: jax.Array | None) -> jax.Array:
            return _load(x_ref.at[row[:, None], k[None]], _both(row_ok, ok))

        def of_run(ref: Any, run: jax.Array, part: int) -> jax.Array:
            run = jnp.minimum(run, ref.shape[1] - 1)  # past the end: x is 0 there
            return _load(ref.at[group, run, part, col], col_ok)[None]

        def piece(index: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Adds what piece ``index`` of K gives, index counting over all runs."""
            run, inner = index, piece_row
            if walk.pieces > 1:
                run, inner = lax.div(index, pieces), lax.rem(index, pieces) * walk.rows + piece_row
            k = run * walk.span + inner
            ok = None if walk.exact else (inner < walk.span) & (k < stored)

            def load_w(part: int) -> jax.Array:
                mask = _both(ok, col_ok)
                source = w_ref.at[group, k[:, None], part, col[None]]
                return plt.load(source) if mask is None else plt.load(source, mask=mask)

            def scaled(y: jax.Array, total: jax.Array | None, part: int) -> jax.Array:
                if zero_ref is not None and total is not None:
                    y = y - total[:, None] * of_run(zero_ref, run, part).astype(jnp.float32)
                return y * scale_of(of_run(scale_ref, run, part), kind)

            if kind in NIBBLES:
                first = run * (2 * walk.span) + inner
                low, high = load_x(first, ok), load_x(first + walk.span, ok)
                total = jnp.sum(low.astype(jnp.float32) + high.astype(jnp.float32), axis=1) if has_zero else None
                out = []
                for part, acc in zip(parts, accs, strict=True):
                    wide, others = nibbles_of(load_w(part), kind, has_zero, low.dtype)
                    out.append(acc + scaled(_dot(low, wide) + _dot(high, others), total, part))
                return tuple(out)
            xs, out = load_x(k, ok), []
            for part, acc in zip(parts, accs, strict=True):
                wide = load_w(part).astype(xs.dtype)
                if ok is not None:  # beyond the mask lies anything, NaN too; Triton has no fp8 constant to load instead
                    wide = jnp.where(ok[:, None], wide, jnp.zeros((), wide.dtype))
                out.append(acc + scaled(_dot(xs, wide), None, part))
            return tuple(out)

        def step(index: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            for part in range(walk.parts):
                accs = piece(index * walk.parts + part, accs)
            return accs

        zero = jnp.zeros((block, tile.block_n), jnp.float32)
        accs = lax.fori_loop(0, walk.steps, step, (zero,) * num_parts)
        y = accs[0] if activation is None else ACTIVATIONS[activation](accs[0]) * accs[1]
        plt.store(out_ref.at[at[:, None], col[None]], y.astype(out_ref.dtype), mask=_both(None, col_ok))
