"""Normalisation of feature-major activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm (Zhang and Sennrich, 2019) over axis -2: x [..., features, T], weight [features] -> x's shape and dtype.

    In float32; as in Hugging Face's Llama the result is rounded to x's dtype before the weight is applied.
    """
    xf = x.astype(jnp.float32)
    mean = jnp.mean(xf * xf, axis=-2, keepdims=True)
    y = (xf * lax.rsqrt(mean + jnp.float32(eps))).astype(x.dtype)
    shape = (1,) * (x.ndim - 2) + (weight.shape[0], 1)
    return y * weight.reshape(shape).astype(x.dtype)
