"""LoRA adapters (Hu et al., 2021) of a matrix: ``W x + B A x``, with another pair (A, B) for each token.

The pairs of all slots lie side by side, so that a batch of any mix of adapters is two plain products: ``A`` of all
slots, of whose rows a token keeps those of its own slot, and ``B`` of all slots. There is no gather and no shape that
depends on the mix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Lora:
    """Of a matrix that is made of P parts (q, k and v; gate and up), each with a pair of its own. R = slots * rank."""

    a: Any  # [P, R, in]
    b: tuple[Any, ...]  # of each part: [*out, R]; their products, joined on ``axis``, are the matrix's
    slots: Any = None  # int32 [T]: each token's slot, -1 for none. Set by the layer that runs
    rank: int = struct.field(pytree_node=False, default=0)
    axis: int = struct.field(pytree_node=False, default=0)


def lora_product(lora: Lora, x: jax.Array) -> jax.Array:
    """``B A x``: x [in, T] -> [*out, T] in x's dtype, each product accumulated in float32."""
    parts, rows, fan_in = lora.a.shape
    h = _matmul(lora.a.reshape(parts * rows, fan_in), x).reshape(parts, rows, -1)
    own = jnp.arange(rows, dtype=jnp.int32)[:, None] // lora.rank == lora.slots[None, :]
    # chosen, not multiplied by 0: what overflows in one adapter is no NaN in another's rows
    h = jnp.where(own[None], h, 0.0).astype(x.dtype)
    ys = [_matmul(b.reshape(-1, rows), h[i]).astype(x.dtype).reshape(*b.shape[:-1], -1) for i, b in enumerate(lora.b)]
    return ys[0] if len(ys) == 1 else jnp.concatenate(ys, axis=lora.axis)


def _matmul(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.dot_general(w, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
