"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) in its absorbed form.

A token's keys and values of all heads are linear in one latent vector [C], and beside it all heads share one rotary key
[R]: that is all that is stored. A head's own part of the key matrix goes to the query instead, ``q @ W_UK``, and that
of the value matrix comes after the sum over tokens. So it is attention of N query heads over one key [C + R], whose
first C numbers are the value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.models.params import LatentParams
from lmjax.models.spec import AttentionSpec
from lmjax.nn.env import Env
from lmjax.nn.linear import linear
from lmjax.nn.norm import rms_norm
from pallas_kernels.heads import apply_rope


def queries_and_latent(
    p: LatentParams, a: AttentionSpec, x: jax.Array, rope: tuple[jax.Array, jax.Array], env: Env
) -> jax.Array:
    """x [D, T] normed -> [1, N + 1, C + R, T]: the absorbed queries, then the latent vector with its rotary key."""
    m = a.latent
    assert m is not None
    if p.q_down is not None:
        q = linear(p.q_up, rms_norm(linear(p.q_down, x, env), p.q_norm, m.eps), env)  # [N, Q + R, T]
    else:
        q = linear(p.q_up, x, env)
    latent = linear(p.kv_down, x, env)  # [C + R, T]
    key = jnp.concatenate([rms_norm(latent[: m.rank], p.kv_norm, m.eps), apply_rope(latent[m.rank :], *rope)])
    absorbed = _by_head(p.kv_up[:, : m.nope_dim], q[:, : m.nope_dim], 1, (1, 0))  # [N, C, T]
    q = jnp.concatenate([absorbed.astype(x.dtype), apply_rope(q[:, m.nope_dim :], *rope)], axis=1)
    return jnp.concatenate([q, key[None]])[None]


def values_of(p: LatentParams, a: AttentionSpec, o: jax.Array) -> jax.Array:
    """o [T, N, C], attended latents -> [N * V, T], the heads' values."""
    m = a.latent
    assert m is not None
    values = _by_head(p.kv_up[:, m.nope_dim :], o, 2, (2, 1))  # [N, V, T]
    return values.astype(o.dtype).reshape(-1, o.shape[0])


def _by_head(w: jax.Array, x: jax.Array, w_axis: int, x_axes: tuple[int, int]) -> jax.Array:
    """w [N, ...] times x, summed over ``w_axis``: float32 [N, rest of w, T]. x_axes: what of x is summed, and N."""
    axis, heads = x_axes
    return lax.dot_general(w, x, (((w_axis,), (axis,)), ((0,), (heads,))), preferred_element_type=jnp.float32)
