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

from lmjax.models.layer import Heads, Step, paged, slopes
from lmjax.models.spec import AttentionSpec
from lmjax.nn.env import Env, Forms
from lmjax.nn.moe import clamped_swiglu, moe_mlp
from lmjax.nn.routing import Routing, pick
from lmjax.nn.weight import Dense
from pallas_kernels.activation import ACTIVATIONS
from pallas_kernels.heads import apply_rope, rms_norm

QUERY_BLOCK = 128


def _attention(
    qkv: jax.Array, heads: Heads, a: AttentionSpec, pool: jax.Array, step: Step, index: jax.Array, env: Env
) -> tuple[jax.Array, jax.Array]:
    """In place of ``layer.paged``, for rows of equal length one after the other; ``pool`` gives the block size, and
    each layer has one of its own."""
    del index
    static = (a, replace(env, forms=None), pool.shape[4])
    return _attend(static, qkv, heads, step), pool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: tuple[AttentionSpec, Env, int], qkv: jax.Array, heads: Heads, step: Step) -> jax.Array:
    """[T, N, H] ([T, N, C] of latent vectors) by the serving code, over a pool that holds this layer alone."""
    a, env, block_size = static
    num_blocks = 1 + step.batch.block_tables[a.group].size
    pool = jnp.zeros((1, 1 if a.latent else 2, num_blocks, qkv.shape[0], block_size, qkv.shape[2]), qkv.dtype)
    return paged(qkv, heads, a, pool, step, jnp.int32(0), env)[0]


def _attend_forward(static: Any, qkv: jax.Array, heads: Heads, step: Step) -> tuple[Any, Any]:
    a = static[0]
    rope = None if a.rope is None else step.ropes[a.rope]
    return _attend(static, qkv, heads, step), (qkv, heads, rope, step.batch.query_lens)


def _attend_backward(static: Any, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    qkv, heads, rope, rows = saved
    a, env = static[:2]

    def attend(qkv: jax.Array, heads: Heads) -> jax.Array:
        return dense_attention(qkv, heads, rope, rows.shape[0], a, env)

    _, pull = jax.vjp(attend, qkv, heads)
    return (*pull(cotangent.astype(jnp.float32)), None)


_attend.defvjp(_attend_forward, _attend_backward)


def dense_attention(
    qkv: jax.Array, heads: Heads, rope: tuple[jax.Array, jax.Array] | None, rows: int, a: AttentionSpec, env: Env
) -> jax.Array:
    """qkv [K, G + 2, H, T] of ``rows`` sequences of T / rows tokens each, one after the other -> float32 [T, N, H]. Of
    latent vectors [1, N + 1, H, T] -> [T, N, C]."""
    kv_heads, _, dim, total = qkv.shape
    qkv = qkv.astype(jnp.float32)
    if a.latent:
        q, k = qkv[:, :-1], qkv[:, -1]
        v, rope = k[:, : a.value_dim], None  # they have had theirs
    else:
        q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    if heads.q_norm is not None and a.qk_norm is not None:
        norm = a.qk_norm
        weights = (w.astype(jnp.float32) for w in (heads.q_norm, heads.k_norm))
        q, k = (rms_norm(x, w, norm.eps, norm.plus_one) for x, w in zip((q, k), weights, strict=True))
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    q = q * jnp.float32(a.scale)
    slope = slopes(a, env)
    bias, sink = (None if x is None else x.astype(jnp.float32).reshape(kv_heads, -1) for x in (slope, heads.sinks))
    length = total // rows
    size = min(QUERY_BLOCK, length)
    padding = -length % size
    q = q.reshape(kv_heads, -1, dim, rows, length).transpose(3, 4, 0, 1, 2)  # [B, n, K, G, H]
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0))).reshape(rows, -1, size, *q.shape[2:])
    k, v = (x.reshape(kv_heads, -1, rows, length).transpose(2, 0, 3, 1) for x in (k, v))  # [B, K, n, H]
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
            if a.soft_cap is not None:
                scores = jnp.float32(a.soft_cap) * jnp.tanh(scores / jnp.float32(a.soft_cap))
            if bias is not None:
                scores = scores + bias[:, :, None, None] * (at - position).astype(jnp.float32)[None, None]
            # a padding query sees something too: its softmax is no 0 / 0
            scores = jnp.where((seen | (position >= length))[None, None], scores, -jnp.inf)
            return jnp.einsum("kgqc,kch->qkgh", _softmax(scores, sink), values)

        return lax.map(lambda pair: one_block(*pair), (queries, firsts))

    out = lax.map(one_row, (q, k, v))  # [B, blocks, size, K, G, H]
    return out.reshape(rows, -1, a.heads, a.value_dim)[:, :length].reshape(total, a.heads, a.value_dim)


def _softmax(scores: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Over the last axis of [K, G, Q, C]; sink [K, G]: one more logit, whose weight is left out."""
    if sink is None:
        return jax.nn.softmax(scores, axis=-1)
    last = jnp.broadcast_to(sink[:, :, None, None], (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, last], axis=-1), axis=-1)[..., :-1]


def _moe(router: jax.Array, gate_up: Dense, down: Dense, x: jax.Array, num_tokens: jax.Array, **how: Any) -> jax.Array:
    """In place of ``nn.moe.moe_mlp``, with all experts on this device."""
    if not isinstance(how.pop("first"), int):
        raise NotImplementedError("experts that are spread over devices cannot be differentiated")
    biases = how.pop("router_bias"), how.pop("choice_bias")
    return _mix(tuple(sorted(how.items())), router, biases, gate_up, down, x, num_tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(
    how: tuple[Any, ...],
    router: jax.Array,
    biases: tuple[jax.Array | None, jax.Array | None],
    gate_up: Dense,
    down: Dense,
    x: jax.Array,
    num_tokens: jax.Array,
) -> jax.Array:
    router_bias, choice_bias = biases
    return moe_mlp(router, gate_up, down, x, num_tokens, router_bias=router_bias, choice_bias=choice_bias, **dict(how))


def _mix_forward(how: Any, *arguments: Any) -> tuple[jax.Array, Any]:
    return _mix(how, *arguments), arguments[:-1]


def _mix_backward(how: Any, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    named = {name: value for name, value in how if name in ("top_k", "normalise", "routing", "activation", "limit")}
    _, pull = jax.vjp(partial(dense_moe, **named), *saved)
    return (*pull(cotangent.astype(jnp.float32)), None)


_mix.defvjp(_mix_forward, _mix_backward)


def dense_moe(
    router: jax.Array,
    biases: tuple[jax.Array | None, jax.Array | None],
    gate_up: Dense,
    down: Dense,
    x: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    routing: Routing,
    activation: str,
    limit: float | None,
) -> jax.Array:
    """As ``nn.moe.moe_mlp`` with every expert computed for every token: x [D, T] -> float32 [D, T]. biases: of the
    router, and of its choice.

    The choice of experts has no gradient, their weights have.
    """
    x, gate_up, down = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (x, gate_up, down))
    scores = router.astype(jnp.float32) @ x
    router_bias, choice_bias = biases
    if router_bias is not None:
        scores = scores + router_bias.astype(jnp.float32)[:, None]
    weights, ids = pick(scores.T, choice_bias, routing, top_k, normalise)
    mix = jnp.zeros((router.shape[0], x.shape[1]), jnp.float32)
    mix = mix.at[ids, jnp.arange(x.shape[1])[:, None]].set(weights)

    @jax.checkpoint
    def add(total: jax.Array, expert: tuple[Dense, Dense, jax.Array]) -> tuple[jax.Array, None]:
        gate_up, down, share = expert
        gate, up = _with_bias(jnp.einsum("pfd,dt->pft", gate_up.weight, x), gate_up.bias)
        y = ACTIVATIONS[activation](gate) * up if limit is None else clamped_swiglu(gate, up, limit)
        return total + share[None, :] * _with_bias(down.weight @ y, down.bias), None

    return lax.scan(add, jnp.zeros_like(x), (gate_up, down, mix))[0]


def _with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias[..., None]


FORMS = Forms(attention=_attention, moe=_moe)
