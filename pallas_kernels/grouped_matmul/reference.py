"""XLA forms: routing by a sort, and a loop over the blocks that are used. Work follows tokens, not groups.

``lax.ragged_dot`` would multiply every row with every group's matrix (on CPU and GPU alike), so it is not used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activation import ACTIVATIONS
from pallas_kernels.grouped_matmul.groups import Groups, max_blocks
from pallas_kernels.grouped_matmul.stack import QuantStack
from pallas_kernels.quant_matmul.reference import dequantised

# bytes of a matrix that are sliced out at once: XLA:CPU copies the slice, and the copy should stay in the cache
SLICE_BYTES = 1 << 20


def route_xla(
    logits: jax.Array,
    num_tokens: jax.Array,
    first: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    groups: int,
    block_rows: int,
) -> tuple[jax.Array, Groups]:
    """Same arguments as ``pallas_kernels.grouped_matmul.route``; ``groups``: its count."""
    weights, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    real = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None] < num_tokens
    return weights, group_rows_xla(jnp.where(real, ids - first, -1), groups=groups, block_rows=block_rows)


def group_rows_xla(ids: jax.Array, *, groups: int, block_rows: int) -> Groups:
    """Same arguments as ``pallas_kernels.grouped_matmul.group_rows``."""
    tokens, top_k = ids.shape
    blocks = max_blocks(tokens, top_k, groups, block_rows)
    flat = jnp.where((ids >= 0) & (ids < groups), ids, groups).reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    ordered = flat[order]
    bounds = jnp.searchsorted(ordered, jnp.arange(groups + 1, dtype=jnp.int32)).astype(jnp.int32)
    block_counts = (bounds[1:] - bounds[:-1] + (block_rows - 1)) // block_rows  # [groups]
    ends = jnp.cumsum(block_counts)
    starts = jnp.append((ends - block_counts) * block_rows, jnp.int32(0))
    place = starts[ordered] + jnp.arange(ordered.shape[0], dtype=jnp.int32) - bounds[ordered]
    slots = jnp.zeros_like(flat).at[order].set(jnp.where(ordered < groups, place, -1))
    target = jnp.where(ordered < groups, place, blocks * block_rows - 1)  # that row is never used
    rows = jnp.full(blocks * block_rows, tokens, jnp.int32).at[target].set(order // top_k)
    index = jnp.arange(blocks, dtype=jnp.int32)
    found = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    return Groups(slots.reshape(tokens, top_k), rows, jnp.where(index < ends[-1], found, -1))


def grouped_matmul_xla(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    scale: jax.Array | None,
    activation: str | None,
    sorted_rows: bool,
) -> jax.Array:
    """Same arguments as ``pallas_kernels.grouped_matmul.grouped_matmul``; rows of unused blocks are 0."""
    size, block = groups.rows.shape[0], groups.block_rows
    width, depth = w.shape[-2:]
    parts = 1 if activation is None else 2
    chunk = _chunk(width, parts * depth * w.dtype.itemsize)
    lead = w.shape[1:-2]  # no reshape of w: on XLA:CPU one with an axis of 1 copied all of it, in every step
    used = jnp.sum((groups.block_groups >= 0).astype(jnp.int32))

    def one_block(i: jax.Array, out: jax.Array) -> jax.Array:
        group = groups.block_groups[i]
        if sorted_rows:
            xb = lax.dynamic_slice_in_dim(x, i * block, block, 0)
        else:  # a padding row takes any token's values; nobody reads the result
            xb = jnp.take(x, lax.dynamic_slice_in_dim(groups.rows, i * block, block), axis=0, mode="clip")

        def one_chunk(j: jax.Array, out: jax.Array) -> jax.Array:
            at, zero = j * chunk, jnp.zeros_like(j)
            part = (zero,) * len(lead)
            wc = lax.dynamic_slice(w, (group, *part, at, zero), (1, *lead, chunk, depth))
            # the weight is the left operand, which is faster on XLA:CPU; that has no such product of bfloat16
            y = lax.dot_general(
                wc.reshape(parts * chunk, depth).astype(x.dtype).astype(jnp.float32),
                xb.astype(jnp.float32),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            ).reshape(parts, chunk, block)
            if scale is not None:
                s = lax.dynamic_slice(scale, (group, *part, at), (1, *lead, chunk))
                y = y * s.reshape(parts, chunk, 1).astype(jnp.float32)
            y = y[0] if activation is None else ACTIVATIONS[activation](y[0]) * y[1]
            return lax.dynamic_update_slice(out, y.T.astype(x.dtype), (i * block, at))

        return lax.fori_loop(jnp.int32(0), jnp.int32(width // chunk), one_chunk, out)

    return lax.fori_loop(jnp.zeros_like(used), used, one_block, jnp.zeros((size, width), x.dtype))


def grouped_matmul_packed_xla(
    x: jax.Array, w: QuantStack, groups: Groups, *, activation: str | None, sorted_rows: bool
) -> jax.Array:
    """Same arguments as ``pallas_kernels.grouped_matmul.grouped_matmul``: the matrix of a block's group is made floats,
    as many of its rows at a time as stay in the cache. Rows of unused blocks are 0."""
    size, block = groups.rows.shape[0], groups.block_rows
    width, depth = w.shape[-2:]
    w, parts = w.with_parts(), 1 if activation is None else 2
    chunk = _chunk(width, parts * depth * 4)
    used = jnp.sum((groups.block_groups >= 0).astype(jnp.int32))

    def one_block(i: jax.Array, out: jax.Array) -> jax.Array:
        group, zero = groups.block_groups[i], jnp.zeros_like(i)
        if sorted_rows:
            xb = lax.dynamic_slice_in_dim(x, i * block, block, 0)
        else:
            xb = jnp.take(x, lax.dynamic_slice_in_dim(groups.rows, i * block, block), axis=0, mode="clip")

        def one_chunk(j: jax.Array, out: jax.Array) -> jax.Array:
            def cut(a: jax.Array) -> jax.Array:
                return lax.dynamic_slice(a, (group, zero, zero, j * chunk), (1, *a.shape[1:3], chunk))

            wide = dequantised(jax.tree.map(cut, w).flat())  # [depth, parts * chunk]
            y = lax.dot(wide.T, xb.astype(jnp.float32).T, precision=lax.Precision.HIGHEST).reshape(parts, chunk, block)
            y = y[0] if activation is None else ACTIVATIONS[activation](y[0]) * y[1]
            return lax.dynamic_update_slice(out, y.T.astype(x.dtype), (i * block, j * chunk))

        return lax.fori_loop(jnp.int32(0), jnp.int32(width // chunk), one_chunk, out)

    return lax.fori_loop(jnp.zeros_like(used), used, one_block, jnp.zeros((size, width), x.dtype))


def _chunk(width: int, row_bytes: int) -> int:
    """The largest divisor of ``width`` whose rows stay within SLICE_BYTES (at least 1)."""
    most = max(1, min(width, SLICE_BYTES // row_bytes))
    return next(n for n in range(most, 0, -1) if width % n == 0)
