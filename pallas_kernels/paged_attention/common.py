"""What the Triton bodies share: reading the pool, logits, the online softmax. Called inside kernels, on tiles.

R: rows of a tile (query heads, times tokens in prefill), C: key positions of a tile, D: head dim padded to a power
of 2. Logits are in base 2: exp2 is one instruction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.platform import next_power_of_2

LOG2E = 1.4426950408889634
MASKED = -1e30  # finite, so that a row that has seen nothing yet subtracts it from itself


class Softmax(NamedTuple):
    """Online softmax (Milakov and Gimelshein, 2018): float32 maximum [R], sum of weights [R], values [R, D]."""

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    @staticmethod
    def start(rows: int, dim: int) -> Softmax:
        return Softmax(
            jnp.full((rows,), MASKED, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, dim), jnp.float32),
        )


def operands_of(
    required: dict[str, jax.Array],
    *,
    layer: int | jax.Array,
    sinks: jax.Array | None,
    alibi: jax.Array | None,
    kv_scales: jax.Array | None,
) -> dict[str, jax.Array]:
    """What a kernel takes, by name: the layer as an array of one, nothing for what is absent."""
    optional = {"sinks": sinks, "alibi": alibi, "scales": kv_scales}
    given = {name: x for name, x in optional.items() if x is not None}
    return required | {"layer": jnp.asarray(layer, jnp.int32).reshape(1)} | given


def compute_dtype(q: jnp.dtype, pool: jnp.dtype) -> jnp.dtype:
    """What the products are taken in. All 1-byte numbers are exact in every float that a query has."""
    return q if pool.itemsize == 1 else jnp.promote_types(q, pool)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[M, K] x [K, N] -> float32, without rounding float32 operands to TF32."""
    return plt.dot(a, b, precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)


def block_ids(tables: Any, row: jax.Array, positions: jax.Array, seen: jax.Array, block: int) -> jax.Array:
    """int32 [C]: the block of each position; 0 where nothing is to be read."""
    return plt.load(tables.at[row, positions // block], mask=seen, other=0)


def load_kv(
    pool: Any,
    layer: jax.Array,
    which: int,  # 0 keys, 1 values
    blocks: jax.Array,  # int32 [C]
    head: jax.Array,
    offsets: jax.Array,  # int32 [C]  within the block
    seen: jax.Array | None,  # bool [C]; None: all
    dtype: jnp.dtype,
) -> jax.Array:
    """[C, D] in dtype, zero where not seen: a weight of zero would not stop a NaN in an unused place."""
    dim = pool.shape[5]
    padded = next_power_of_2(dim)
    d = jnp.arange(padded, dtype=jnp.int32)[None]
    at = pool.at[layer, which, blocks[:, None], head, offsets[:, None], d]
    mask = None if seen is None else jnp.broadcast_to(seen[:, None], (seen.shape[0], padded))
    if dim < padded:
        inside = jnp.broadcast_to(d < dim, (blocks.shape[0], padded))
        mask = inside if mask is None else mask & inside
    x = plt.load(at) if mask is None else plt.load(at, mask=mask, other=jnp.zeros((), pool.dtype))
    return x.astype(dtype)


def load_scales(
    scales: Any,
    layer: jax.Array,
    which: int,
    blocks: jax.Array,
    head: jax.Array,
    offsets: jax.Array,
    seen: jax.Array | None,
) -> jax.Array:
    """float32 [C], zero where not seen."""
    at = scales.at[layer, which, blocks, head, offsets]
    return plt.load(at) if seen is None else plt.load(at, mask=seen, other=jnp.float32(0))


def logits(
    products: jax.Array,  # float32 [R, C]  queries times stored keys
    *,
    scale: float,
    soft_cap: float | None,
    key_scales: jax.Array | None,  # float32 [C]
    slopes: jax.Array | None,  # float32 [R]
    distance: jax.Array | None,  # int32 [R or 1, C]  key position - query position; read with slopes only
    seen: jax.Array | None,  # bool [R or 1, C]; None: all
) -> jax.Array:
    """float32 [R, C] in base 2."""
    if key_scales is not None:
        products = products * key_scales[None]
    if soft_cap is None and slopes is None:
        x = products * (scale * LOG2E)
    else:
        x = products * scale
        if soft_cap is not None:
            x = jnp.tanh(x * (1 / soft_cap)) * soft_cap
        if slopes is not None and distance is not None:
            x = x + slopes[:, None] * distance.astype(jnp.float32)
        x = x * LOG2E
    return x if seen is None else jnp.where(seen, x, MASKED)


def absorb(state: Softmax, x: jax.Array, values: jax.Array, value_scales: jax.Array | None) -> Softmax:
    """One tile more: x logits [R, C] of ``logits``, values [C, D], value_scales float32 [C]."""
    top = jnp.maximum(state.top, x.max(axis=1))
    weights = jnp.exp2(x - top[:, None])
    fade = jnp.exp2(state.top - top)
    total = state.total * fade + weights.sum(axis=1)
    if value_scales is not None:
        weights = weights * value_scales[None]
    acc = state.acc * fade[:, None] + dot(weights.astype(values.dtype), values)
    return Softmax(top, total, acc)


def take_in(
    state: Softmax,
    ref: dict[str, Any],  # with the kernel's "pool", "layer" and, where numbers are 1 byte, "scales"
    q: jax.Array,  # [R, D]
    blocks: jax.Array,
    head: jax.Array,
    offsets: jax.Array,
    held: jax.Array | None,  # bool [C]: places that may be read; None: all
    **scores: Any,  # of ``logits``
) -> Softmax:
    """One tile of keys and values from the pool more."""
    where, layer = (blocks, head, offsets, held), ref["layer"][0]
    key_scales = value_scales = None
    if "scales" in ref:
        key_scales, value_scales = (load_scales(ref["scales"], layer, which, *where) for which in (0, 1))
    keys = load_kv(ref["pool"], layer, 0, *where, q.dtype)
    x = logits(dot(q, keys.T), key_scales=key_scales, **scores)
    return absorb(state, x, load_kv(ref["pool"], layer, 1, *where, q.dtype), value_scales)


def finish(state: Softmax, sinks: jax.Array | None) -> jax.Array:
    """[R, D] float32, zeros where nothing was seen; sinks float32 [R]: natural logits with a weight and no value."""
    total = state.total
    if sinks is not None:
        total = total + jnp.exp2(sinks * LOG2E - state.top)  # infinite where the sink outweighs all else: zeros
    return state.acc / jnp.where(total > 0, total, 1.0)[:, None]
