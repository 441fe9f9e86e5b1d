"""Forms of attention and experts whose values are those of serving and whose gradients are those of dense algebra.

The serving forms loop up to bounds known at run time, which reverse mode cannot follow. Gradients are computed in
float32, attention's a block of queries at a time: no [n, n] matrix of all heads and rows is ever stored.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.models import decoder
from lmjax.models.params import AttentionParams
from lmjax.models.spec import AttentionSpec
from lmjax.nn.env import Env, Forms
from lmjax.nn.moe import moe_mlp
from lmjax.nn.weight import Dense
from pallas_kernels.activation import ACTIVATIONS
from pallas_kernels.heads import apply_rope, rms_norm

QUERY_BLOCK = 128


def _attention(
    qkv: jax.Array,
    p: AttentionParams,
    a: AttentionSpec,
    pool: jax.Array,
    step: decoder.Step,
    index: jax.Array,
    eps: float,
    env: Env,
) -> tuple[jax.Array, jax.Array]:
    """In place of ``decoder.paged``, for rows of equal length one after the other; ``pool`` gives the block size, and
    each layer has one of its own."""
    del index
    static = (a, eps, replace(env, forms=None), pool.shape[4])
    return _attend(static, qkv, p.q_norm, p.k_norm, step), pool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: tuple[AttentionSpec, float, Env, int], qkv: jax.Array, q_norm: Any, k_norm: Any, step: decoder.Step
) -> jax.Array:
    """[T, N, H] by the serving code, over a pool that holds this layer alone."""
    a, eps, env, block_size = static
    num_blocks = 1 + step.batch.block_tables[a.group].size
    pool = jnp.zeros((1, 2, num_blocks, qkv.shape[0], block_size, qkv.shape[2]), qkv.dtype)
    p = AttentionParams(norm=None, qkv=None, o=None, q_norm=q_norm, k_norm=k_norm)  # type: ignore[arg-type]
    return decoder.paged(qkv, p, a, pool, step, jnp.int32(0), eps, env)[0]


def _attend_forward(static: Any, qkv: jax.Array, q_norm: Any, k_norm: Any, step: decoder.Step) -> tuple[Any, Any]:
    cos, sin = step.rope
    rows = step.batch.query_lens
    return _attend(static, qkv, q_norm, k_norm, step), (qkv, q_norm, k_norm, cos, sin, rows)


def _attend_backward(static: Any, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    qkv, q_norm, k_norm, cos, sin, rows = saved
    a, eps = static[:2]

    def attend(qkv: jax.Array, q_norm: Any, k_norm: Any) -> jax.Array:
        return dense_attention(qkv, cos, sin, q_norm, k_norm, rows.shape[0], a, eps)

    _, pull = jax.vjp(attend, qkv, q_norm, k_norm)
    return (*pull(cotangent.astype(jnp.float32)), None)


_attend.defvjp(_attend_forward, _attend_backward)


def dense_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    rows: int,
    a: AttentionSpec,
    eps: float,
) -> jax.Array:
    """qkv [K, G + 2, H, T] of ``rows`` sequences of T / rows tokens each, one after the other -> float32 [T, N, H]."""
    kv_heads, _, dim, total = qkv.shape
    qkv = qkv.astype(jnp.float32)
    q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm.astype(jnp.float32), eps), rms_norm(k, k_norm.astype(jnp.float32), eps)
    q, k = apply_rope(q, cos, sin) * jnp.float32(a.scale), apply_rope(k, cos, sin)
    length = total // rows
    size = min(QUERY_BLOCK, length)
    padding = -length % size
    q = q.reshape(kv_heads, -1, dim, rows, length).transpose(3, 4, 0, 1, 2)  # [B, n, K, G, H]
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0))).reshape(rows, -1, size, *q.shape[2:])
    k, v = (x.reshape(kv_heads, dim, rows, length).transpose(2, 0, 3, 1) for x in (k, v))  # [B, K, n, H]
    firsts = jnp.arange(q.shape[1], dtype=jnp.int32) * size

    def one_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, keys, values = row

        @jax.checkpoint
        def one_block(block: jax.Array, first: jax.Array) -> jax.Array:
            position = first + jnp.arange(size, dtype=jnp.int32)[:, None]
            at = jnp.arange(length, dtype=jnp.int32)[None, :]
            seen = at <= position
            if a.window is not None:
                seen = seen & (at > position - a.window)
            scores = jnp.einsum("qkgh,kch->kgqc", block, keys)
            # a padding query sees something too: its softmax is no 0 / 0
            scores = jnp.where((seen | (position >= length))[None, None], scores, -jnp.inf)
            return jnp.einsum("kgqc,kch->qkgh", jax.nn.softmax(scores, axis=-1), values)

        return lax.map(lambda pair: one_block(*pair), (queries, firsts))

    out = lax.map(one_row, (q, k, v))  # [B, blocks, size, K, G, H]
    return out.reshape(rows, -1, a.heads, dim)[:, :length].reshape(total, a.heads, dim)


def _moe(router: jax.Array, gate_up: Dense, down: Dense, x: jax.Array, num_tokens: jax.Array, **how: Any) -> jax.Array:
    """In place of ``nn.moe.moe_mlp``, with all experts on this device."""
    if not isinstance(how.pop("first"), int):
        raise NotImplementedError("experts that are spread over devices cannot be differentiated")
    return _mix(tuple(sorted(how.items())), router, gate_up.weight, down.weight, x, num_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(
    how: tuple[Any, ...], router: jax.Array, gate_up: jax.Array, down: jax.Array, x: jax.Array, num_tokens: jax.Array
) -> jax.Array:
    return moe_mlp(router, Dense(gate_up), Dense(down), x, num_tokens, **dict(how))


def _mix_forward(how: Any, *arguments: jax.Array) -> tuple[jax.Array, Any]:
    return _mix(how, *arguments), arguments[:-1]


def _mix_backward(how: Any, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    named = {name: value for name, value in how if name in ("top_k", "normalise", "activation")}
    _, pull = jax.vjp(partial(dense_moe, **named), *saved)
    return (*pull(cotangent.astype(jnp.float32)), None)


_mix.defvjp(_mix_forward, _mix_backward)


def dense_moe(
    router: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    x: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    activation: str,
) -> jax.Array:
    """As ``nn.moe.moe_mlp`` with every expert computed for every token: x [D, T] -> float32 [D, T].

    The choice of experts has no gradient, their weights have.
    """
    x = x.astype(jnp.float32)
    weights, ids = lax.top_k(jax.nn.softmax((router.astype(jnp.float32) @ x).T, axis=-1), top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    mix = jnp.zeros((router.shape[0], x.shape[1]), jnp.float32)
    mix = mix.at[ids, jnp.arange(x.shape[1])[:, None]].set(weights)

    @jax.checkpoint
    def add(total: jax.Array, expert: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        gate_up, down, share = expert
        gate, up = jnp.einsum("pfd,dt->pft", gate_up.astype(jnp.float32), x)
        y = down.astype(jnp.float32) @ (ACTIVATIONS[activation](gate) * up)
        return total + share[None, :] * y, None

    return lax.scan(add, jnp.zeros_like(x), (gate_up, down, mix))[0]


FORMS = Forms(attention=_attention, moe=_moe)
