"""Tables of rotary position embedding (Su et al., 2021), in the half-rotation layout of GPT-NeoX and Hugging Face."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.heads import apply_rope

__all__ = ["apply_rope", "rope_tables"]


def rope_tables(inv_freq: np.ndarray, attention_factor: float, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [R / 2, T], of positions int32 [T]; inv_freq float32 [R / 2], R rotary features."""
    angle = jnp.asarray(inv_freq, jnp.float32)[:, None] * positions.astype(jnp.float32)[None, :]
    return jnp.cos(angle) * jnp.float32(attention_factor), jnp.sin(angle) * jnp.float32(attention_factor)
