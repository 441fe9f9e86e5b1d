"""What is done to each attention head before it is stored or compared: RMSNorm and rotary embedding.

On feature-major arrays, in XLA; the kernels that fuse them say so.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, plus_one: bool = False) -> jax.Array:
    """RMSNorm (Zhang and Sennrich, 2019) over axis -2: x [..., features, T], weight [features] -> x's shape and dtype.

    In float32; as in Hugging Face's Llama the result is rounded to x's dtype before the weight is applied. plus_one:
    the factor is 1 + weight, and the product is rounded once, as in its Gemma.
    """
    xf = x.astype(jnp.float32)
    mean = jnp.mean(xf * xf, axis=-2, keepdims=True)
    y = xf * lax.rsqrt(mean + jnp.float32(eps))
    weight = weight.reshape((1,) * (x.ndim - 2) + (weight.shape[0], 1))
    if plus_one:
        return (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * weight.astype(x.dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding (Su et al., 2021) of the first R features of each head, whose halves form the pairs.

    x [..., H, T]; cos, sin float32 [R / 2, T] with R <= H -> x's shape and dtype, computed in float32.
    """
    half = cos.shape[0]
    lead = (1,) * (x.ndim - 2)
    cos, sin = cos.reshape(*lead, *cos.shape), sin.reshape(*lead, *sin.shape)
    xf = x.astype(jnp.float32)
    a, b, rest = xf[..., :half, :], xf[..., half : 2 * half, :], xf[..., 2 * half :, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-2).astype(x.dtype)
