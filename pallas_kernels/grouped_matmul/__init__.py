"""Matrix products whose rows use different matrices: experts of a mixture, adapters of a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.groups import Groups, default_block_rows, max_blocks
from pallas_kernels.grouped_matmul.reference import group_rows_xla, grouped_matmul_xla, top_k_xla
from pallas_kernels.platform import CPU, Target

__all__ = ["Groups", "combine", "default_block_rows", "group_rows", "grouped_matmul", "max_blocks", "route"]


def route(
    logits: jax.Array,  # float32 [T, E]
    num_tokens: jax.Array,  # int32 []  later tokens are padding: they join no group
    *,
    top_k: int,
    normalise: bool,  # divide a token's weights by their sum
    block_rows: int,
    first: int | jax.Array = 0,  # the experts [first, first + count) are here, the others' rows are left out
    count: int | None = None,  # None: all
    target: Target = CPU,
) -> tuple[jax.Array, Groups]:
    """Softmax over the experts, the ``top_k`` best of each token (of equals the first), and the rows of each expert.

    Returns the weights float32 [T, k] and the groups; group g is expert ``first + g``.
    """
    weights, ids = top_k_xla(logits, top_k, normalise)
    count = logits.shape[1] if count is None else count
    real = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None] < num_tokens
    local = ids - jnp.asarray(first, jnp.int32)
    return weights, group_rows_xla(jnp.where(real & (local < count), local, -1), count, block_rows)


def group_rows(
    ids: jax.Array,  # int32 [T, k]  -1: no group
    *,
    groups: int,
    block_rows: int,
    target: Target = CPU,
) -> Groups:
    """The rows of each group from known ids (adapters of a batch: k = 1). A token's ids must differ."""
    return group_rows_xla(ids, groups, block_rows)


def grouped_matmul(
    x: jax.Array,  # [T, K], or [M, K] with sorted_rows
    w: jax.Array,  # [G, N, K]; with an activation [G, 2, N, K]: gate, up
    groups: Groups,
    *,
    scale: jax.Array | None = None,  # [G, N] or [G, 2, N]  factors of w's rows, where w is quantised
    activation: str | None = None,  # silu, gelu, gelu_tanh, relu: the result is act(gate) * up
    sorted_rows: bool = False,  # x has a row for each of the M rows, not for each token
    target: Target = CPU,
) -> jax.Array:
    """Row m of the result [M, N], in x's dtype: ``w[g] @ x[groups.rows[m]]``, g the group of m's block.

    Accumulated, scaled and activated in float32. Rows that no token has are undefined.
    """
    return grouped_matmul_xla(x, w, groups, scale=scale, activation=activation, sorted_rows=sorted_rows)


def combine(y: jax.Array, weights: jax.Array | None, groups: Groups) -> jax.Array:
    """y [M, D], weights float32 [T, k] (None: 1) -> [T, D] in y's dtype: each token's rows, weighted, added in float32;
    0 for a token in no group."""
    rows = jnp.take(y, groups.slots, axis=0, mode="clip").astype(jnp.float32)  # [T, k, D]
    if weights is not None:
        rows = rows * weights[..., None]
    # undefined rows may hold NaN, which a weight of zero would not stop
    return jnp.where(groups.slots[..., None] >= 0, rows, jnp.float32(0)).sum(1).astype(y.dtype)
