"""Mosaic GPU body for decode rows on Hopper: whole blocks arrive by TMA, products are wgmma's.

One warpgroup a program, the group's heads in the first rows of wgmma's 64. What lies in the other rows is never read.
The combine kernel and the prefill body are the Triton ones. The forms that differ between jax 0.10 and 0.12 are
avoided; in the interpreter (jax 0.11 and above) accumulators cannot start from a value, so they are added there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.common import LOG2E, MASKED
from pallas_kernels.paged_attention.decode import (
    Shape,
    Static,
    combine,
    operands_of,
    partials,
    shape_of,
    tiles_of_split,
)

LANES = 64  # rows of a wgmma
TILE = 64  # key positions a program takes at once
STAGES = 2


def decode_mosaic(q: jax.Array, pool: jax.Array, **options: Any) -> jax.Array:
    """Same arguments and result as ``decode_triton``; ``alibi`` and ``kv_scales`` must be None."""
    if options["target"].interpret and not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError("Mosaic GPU kernels are interpreted from jax 0.11 on")
    return _call(*operands_of(q, pool, **options))


@partial(jax.jit, static_argnames=("static",))
def _call(operands: dict[str, jax.Array], static: Static) -> jax.Array:
    s, interpret = shape_of(operands, TILE, static), static.target.interpret
    group = -(-s.group // 8) * 8  # a tile of shared memory has 8 rows
    q = operands["q"].reshape(s.tokens, s.kv_heads, s.group, s.dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, group - s.group), (0, 0)))
    names = ("pool", "layer", "tables", "rows", "positions", "count")
    values, stats = plgpu.kernel(
        partial(_kernel, s, interpret),
        out_type=partials(s, LANES),
        scratch_types=_scratch(q.dtype, s, interpret),
        grid=(s.rows, s.kv_heads, s.splits),
        grid_names=("row", "head", "split"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({"interpret": plgpu.InterpretGPUParams()} if interpret else {}),  # type: ignore[attr-defined]
    )(q, *(operands[name] for name in names))
    return combine(operands, values, stats, s, interpret=interpret)


def _scratch(dtype: jnp.dtype, s: Shape, interpret: bool) -> dict[str, Any]:
    def swizzled(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))

    blocks = TILE // s.block
    scratch = {
        "q_tile": swizzled(LANES, s.dim),
        "k_tile": swizzled(STAGES, TILE, s.dim),
        "v_tile": swizzled(STAGES, TILE, s.dim),
        "acc": plgpu.SMEM((LANES, s.dim), jnp.float32),
        "top": plgpu.SMEM((LANES,), jnp.float32),
        "total": plgpu.SMEM((LANES,), jnp.float32),
        "q_here": plgpu.Barrier(),
        "k_here": plgpu.Barrier(num_arrivals=blocks, num_barriers=STAGES),
        "v_here": plgpu.Barrier(num_arrivals=blocks, num_barriers=STAGES),
    }
    return scratch | ({"p_tile": swizzled(LANES, TILE)} if interpret else {})


def _kernel(
    s: Shape,
    interpret: bool,
    q: Any,
    pool: Any,
    layer: Any,
    tables: Any,
    rows: Any,
    positions: Any,
    count: Any,
    values: Any,
    stats: Any,
    **scratch: Any,
) -> None:
    token, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    position = positions[token]
    first, stop, each = tiles_of_split(position, s)
    low = first + split * each
    high = jnp.minimum(low + each, stop)

    @pl.when((token < count[0]) & (low < high))
    def _() -> None:
        load = partial(_load, s, pool, layer[0], tables, rows[token], head, low, scratch)
        _attend(s, interpret, q.at[token, head], position, low, high, load, scratch)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["acc"].at[pl.ds(0, s.group)], values.at[token, head, split])
        plgpu.copy_smem_to_gmem(scratch["top"], stats.at[token, head, split, 0])
        plgpu.copy_smem_to_gmem(scratch["total"], stats.at[token, head, split, 1])
        plgpu.wait_smem_to_gmem(0)


def _load(
    s: Shape, pool: Any, layer: Any, tables: Any, row: Any, head: Any, low: Any, scratch: dict[str, Any], tile: Any
) -> None:
    """Starts the copies of a tile's blocks, keys before values. Table entries beyond the row's are the null block."""
    slot, blocks = lax.rem(tile - low, STAGES), TILE // s.block
    columns = [jnp.minimum(tile * blocks + i, tables.shape[1] - 1) for i in range(blocks)]
    ids = [tables[row, column] for column in columns]
    for which, name in enumerate("kv"):
        for i, block in enumerate(ids):
            plgpu.copy_gmem_to_smem(
                pool.at[layer, which, block, head],
                scratch[name + "_tile"].at[slot, pl.ds(i * s.block, s.block)],
                scratch[name + "_here"].at[slot],
            )


def _attend(
    s: Shape,
    interpret: bool,
    q: Any,
    position: Any,
    low: Any,
    high: Any,
    load: Callable[[Any], None],
    scratch: dict[str, Any],
) -> None:
    """Weighted values, maximum and sum of weights of tiles [low, high), left in ``scratch``."""
    plgpu.copy_gmem_to_smem(q, scratch["q_tile"].at[pl.ds(0, q.shape[0])], scratch["q_here"])
    for ahead in range(STAGES):
        pl.when(low + ahead < high)(partial(load, low + ahead))
    plgpu.barrier_wait(scratch["q_here"])

    def body(tile: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        top, total, acc = state
        slot = lax.rem(tile - low, STAGES)
        plgpu.barrier_wait(scratch["k_here"].at[slot])
        x = _product(scratch["q_tile"], scratch["k_tile"].at[slot].transpose((1, 0)), (LANES, TILE))
        x = _logits(s, x, tile, position)
        new = jnp.maximum(top, x.max(axis=1))
        weights = jnp.exp2(x - lax.broadcast_in_dim(new, x.shape, [0]))
        fade = jnp.exp2(top - new)
        total = total * fade + weights.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        plgpu.barrier_wait(scratch["v_here"].at[slot])
        values = scratch["v_tile"].at[slot]
        _clear_unseen(s, values, tile, position)
        acc = _add_product(
            acc, weights.astype(scratch["v_tile"].dtype), scratch["v_tile"].at[slot], scratch.get("p_tile")
        )
        pl.when(tile + STAGES < high)(partial(load, tile + STAGES))
        return new, total, acc

    rows = plgpu.Layout.WGMMA.reduce(1)
    start = (
        plgpu.layout_cast(jnp.full((LANES,), MASKED, jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), rows),
        plgpu.layout_cast(jnp.zeros((LANES, s.dim), jnp.float32), plgpu.Layout.WGMMA),
    )
    scratch["top"][...], scratch["total"][...], scratch["acc"][...] = lax.fori_loop(low, high, body, start)


def _product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _add_product(acc: jax.Array, weights: jax.Array, values: Any, staged: Any) -> jax.Array:
    """acc + weights @ values. ``staged``: shared memory for the weights, in the interpreter."""
    if staged is not None:
        staged[...] = weights
        plgpu.commit_smem()
        return acc + _product(staged, values, (LANES, acc.shape[1]))

    def run(ref: Any) -> None:
        plgpu.wgmma(ref, weights, values)

    return pl.run_state(run)(plgpu.ACC.init(acc))


def _seen(s: Shape, tile: Any, position: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    at = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + tile * TILE
    seen = at <= position
    return seen if s.window is None else seen & (at > position - s.window)


def _logits(s: Shape, products: jax.Array, tile: Any, position: Any) -> jax.Array:
    if s.soft_cap is None:
        x = products * (s.scale * LOG2E)
    else:
        x = jnp.tanh(products * (s.scale / s.soft_cap)) * (s.soft_cap * LOG2E)
    return jnp.where(_seen(s, tile, position, x.shape, 1), x, MASKED)


def _clear_unseen(s: Shape, values: Any, tile: Any, position: Any) -> None:
    """Whole blocks arrive, unused places too: a weight of zero would not stop a NaN there."""
    edge = (tile + 1) * TILE > position + 1
    if s.window is not None:
        edge |= tile * TILE <= position - s.window

    @pl.when(edge)
    def _() -> None:
        x = values[...]
        values[...] = jnp.where(_seen(s, tile, position, x.shape, 0), x, jnp.zeros_like(x))
        plgpu.commit_smem()
