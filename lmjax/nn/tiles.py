"""Columns in tiles of one fixed width, so that what is computed of a column does not depend on how many there are.

XLA picks kernels, vector widths and fusions by shape: the same token in a wider batch comes out with other last bits. A
loop whose body has one fixed width is the same code whatever is around it. Its number of turns is known at run time
only: XLA would unroll a constant one, and fuse the body into what surrounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.nn.batch import Batch
from pallas_kernels.platform import Target

CPU_TILE = 16  # whole vectors of any host; the width from which XLA:CPU's products are near their full speed
GPU_TILE = 128  # up to it a product takes the time of reading its weights


def least_width(target: Target) -> int:
    """Columns that an array in tiles has at least: two tiles. A slice of everything is none to XLA, and what takes it
    would be fused, and on a card laid out, otherwise than in wider programs. Tiles that are not used cost nothing."""
    return 2 * tile_width(target)


State = TypeVar("State")


def tile_width(target: Target) -> int:
    """Columns of a tile on this platform."""
    return CPU_TILE if target.platform == "cpu" else GPU_TILE


def over_tiles(
    tile: int, width: int, used: jax.Array, body: Callable[[jax.Array, State], State], state: State
) -> State:
    """``body(first column, state) -> state`` for the tiles with the first ``used`` int32 [] of ``width`` columns."""
    assert width % tile == 0 and width >= 2 * tile, (width, tile)
    size = jnp.int32(tile)
    turns = (used + (size - 1)) // size
    return lax.fori_loop(jnp.zeros_like(turns), turns, lambda i, state: body(i * size, state), state)


def columns_of(x: jax.Array, first: jax.Array, tile: int, axis: int = -1) -> jax.Array:
    """``tile`` columns of ``x`` from ``first`` on."""
    return lax.dynamic_slice_in_dim(x, first, tile, axis=axis)


def put_columns(x: jax.Array, columns: jax.Array, first: jax.Array, axis: int = -1) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, columns, first, axis=axis)


def unknown_zero(values: jax.Array) -> jax.Array:
    """int32 [] 0, made of any integers in a way that XLA does not see through: for counts it must not know."""
    return (jnp.max(values).astype(jnp.int32) & jnp.int32(2**31 - 1)) >> jnp.int32(31)


def isolated(function: Callable[[], State], zeros: State, num: jax.Array) -> State:
    """``function()`` as a computation of its own, which XLA neither fuses with its surroundings nor orders otherwise.

    ``zeros``: of the result's shapes. num: int32 [], any number of 0 or more that XLA does not know.
    """
    turns = jnp.minimum(num, 0) + jnp.int32(1)
    return lax.fori_loop(jnp.zeros_like(turns), turns, lambda _, state: function(), zeros)


def batch_of_tile(batch: Batch, first: jax.Array, tile: int) -> Batch:
    """Tokens first .. first + tile - 1 of a batch, each as a decode row of its own.

    They may belong to one prompt: a layer writes the keys and values of all before any of them looks, and looks at
    positions up to its own.
    """
    index = jnp.arange(tile, dtype=jnp.int32)
    num = jnp.clip(batch.num_tokens - first, 0, tile)
    real = index < num
    positions = columns_of(batch.positions, first, tile)
    return Batch(
        token_ids=columns_of(batch.token_ids, first, tile),
        positions=positions,
        token_rows=index,
        block_tables=batch.block_tables[:, columns_of(batch.token_rows, first, tile)],
        query_starts=index,
        query_lens=real.astype(jnp.int32),
        context_lens=jnp.where(real, positions + 1, 0),
        logit_tokens=index,
        num_decode=num,
        num_rows=num,
        num_tokens=num,
        adapters=None if batch.adapters is None else columns_of(batch.adapters, first, tile),
    )
