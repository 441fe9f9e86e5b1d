"""Rotary position embedding (Su et al., 2021), in the half-rotation layout of GPT-NeoX and Hugging Face."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def rope_tables(inv_freq: np.ndarray, attention_factor: float, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [R / 2, T], of positions int32 [T]; inv_freq float32 [R / 2], R rotary features."""
    angle = jnp.asarray(inv_freq, jnp.float32)[:, None] * positions.astype(jnp.float32)[None, :]
    return jnp.cos(angle) * jnp.float32(attention_factor), jnp.sin(angle) * jnp.float32(attention_factor)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first R features of each head: x [..., H, T] with R <= H -> x's shape and dtype, in float32."""
    half = cos.shape[0]
    lead = (1,) * (x.ndim - 2)
    cos, sin = cos.reshape(*lead, *cos.shape), sin.reshape(*lead, *sin.shape)
    xf = x.astype(jnp.float32)
    a, b, rest = xf[..., :half, :], xf[..., half : 2 * half, :], xf[..., 2 * half :, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-2).astype(x.dtype)
