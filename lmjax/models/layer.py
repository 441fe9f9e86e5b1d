"""One layer of a decoder: norms, attention over the paged pool, MLP or experts. What a layer has is in its spec."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.models.latent import queries_and_latent, values_of
from lmjax.models.lora import for_tokens
from lmjax.models.params import AttentionParams, LatentParams, LayerParams, MlpParams, MoeParams
from lmjax.models.pools import ScaledPool, parts_of
from lmjax.models.spec import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import Env
from lmjax.nn.linear import linear, summed_linear
from lmjax.nn.mlp import gated_mlp, plain_mlp
from lmjax.nn.moe import moe_mlp, num_experts, shared_expert
from lmjax.nn.norm import normed, normed_heads
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention


class Step(NamedTuple):
    """What all layers of a step share."""

    batch: Batch
    ropes: tuple[tuple[jax.Array, jax.Array], ...]  # of each of the model's: cos, sin  float32 [R / 2, T]
    targets: list[tuple[jax.Array, jax.Array]]  # per KV group: block id and offset of each token, int32 [T]


class Heads(NamedTuple):
    """Parameters of what is done to heads in one pass with the write of their keys, or with attention."""

    q_norm: Any = None  # [H]
    k_norm: Any = None  # [H]
    sinks: Any = None  # [N]


@partial(jax.jit, static_argnames=("kind", "env"))  # traced and lowered once a kind: a start takes half as long
def run_layer(
    p: LayerParams,
    x: jax.Array,
    pool: Any,
    step: Step,
    index: jax.Array,
    *,
    kind: LayerSpec,
    env: Env,
) -> tuple[jax.Array, Any]:
    """The layer at ``index`` of its KV group: residual x [D, T] and the group's pool -> the same, updated."""
    num_tokens = step.batch.num_tokens
    if step.batch.adapters is not None:
        p = for_tokens(p, step.batch.adapters)
    h = normed(x, p.attn.norm, kind.norm) if kind.pre_norm else x
    o, pool = _attention(p.attn, kind.attention, h, pool, step, index, env)
    attended = x + _added(o, p.attn.post_norm, kind)
    if kind.parallel:
        h = h if kind.shared_norm else normed(x, p.mlp.norm, kind.norm)
    else:
        h = normed(attended, p.mlp.norm, kind.norm) if kind.pre_norm else attended
    y = _mlp(p.mlp, kind.mlp, h, num_tokens, env)
    return attended + _added(y, p.mlp.post_norm, kind), pool


def _added(y: jax.Array, post_norm: Any, kind: LayerSpec) -> jax.Array:
    """What attention or the MLP gives, as it is added to the residual."""
    if kind.post_norm:
        y = normed(y, post_norm, kind.norm)
    return y if kind.residual_scale == 1.0 else (y.astype(jnp.float32) * kind.residual_scale).astype(y.dtype)


def _mlp(p: MlpParams | MoeParams, m: MlpSpec | MoeSpec, x: jax.Array, num_tokens: jax.Array, env: Env) -> jax.Array:
    """x [D, T] normed -> the MLP's contribution to the residual [D, T]."""
    if isinstance(p, MlpParams):
        assert isinstance(m, MlpSpec)
        form = gated_mlp if m.gated else plain_mlp
        return form(p.gate_up, p.down, x, m.activation, env)
    assert isinstance(m, MoeSpec)
    e, down = p.experts, p.experts.down
    if not env.spread_experts:  # each device has a share of every sum
        down = replace(down, bias=env.once(down.bias))
    experts = env.forms.moe if env.forms else moe_mlp
    y = experts(
        p.router,
        e.gate_up,
        down,
        x,
        num_tokens,
        top_k=m.top_k,
        normalise=m.normalise,
        activation=m.activation,
        first=env.first(num_experts(e.gate_up)) if env.spread_experts else 0,
        router_bias=p.router_bias,
        choice_bias=p.choice_bias,
        routing=m.routing,
        limit=m.limit,
        target=env.target,
    )
    if p.shared is not None:
        y = y + shared_expert(p.shared.gate, p.shared.gate_up, p.shared.down, x, m.activation, env.target)
    return env.sum(y)


def _attention(
    p: AttentionParams | LatentParams,
    a: AttentionSpec,
    x: jax.Array,
    pool: Any,
    step: Step,
    index: jax.Array,
    env: Env,
) -> tuple[jax.Array, Any]:
    """x [D, T] normed -> (attention's contribution to the residual [D, T], pool)."""
    tokens = x.shape[-1]
    attend = env.forms.attention if env.forms else paged
    if isinstance(p, LatentParams):
        assert a.rope is not None
        qkv, heads = queries_and_latent(p, a, x, step.ropes[a.rope], env), Heads()
    else:
        qkv = linear(p.qkv, x, env)
        if a.clip is not None:
            qkv = jnp.clip(qkv, -a.clip, a.clip)
        qkv, heads = _heads(qkv, p, a, env)
    o, pool = attend(qkv, heads, a, pool, step, index, env)
    # The next layer's write has to wait for this read: else XLA:CPU cannot update the one-array pool in place and
    # copies all of it several times a step. The residual makes it wait; the barrier states it.
    o, pool = lax.optimization_barrier((o, pool))
    values = values_of(p, a, o) if isinstance(p, LatentParams) else o.reshape(tokens, a.num_values).T
    return summed_linear(p.o, values, env), pool


def _heads(qkv: jax.Array, p: AttentionParams, a: AttentionSpec, env: Env) -> tuple[jax.Array, Heads]:
    """qkv [K, G + 2, H, T], normed where the write of keys cannot do it, and what is left to be done by it."""
    norm = a.qk_norm
    if norm is None:
        return qkv, Heads(sinks=p.sinks)
    if norm.kind == "rms" and a.qk_norm_over == "head":
        return qkv, Heads(p.q_norm, p.k_norm, p.sinks)
    together = a.qk_norm_over == "all"
    q = normed_heads(qkv[:, :-2], p.q_norm, norm, together, env)
    k = normed_heads(qkv[:, -2], p.k_norm, norm, together, env)
    return jnp.concatenate([q, k[:, None], qkv[:, -1:]], axis=1), Heads(sinks=p.sinks)


def paged(
    qkv: jax.Array,
    heads: Heads,
    a: AttentionSpec,
    pool: Any,
    step: Step,
    index: jax.Array,
    env: Env,
) -> tuple[jax.Array, Any]:
    """qkv [K, G + 2, H, T] -> (attended values [T, N, H], the pool with the step's keys and values).

    Of latent vectors [1, N + 1, H, T], which have had their rotary embedding -> [T, N, C].
    """
    batch = step.batch
    block_ids, offsets = step.targets[a.group]
    cos, sin = (None, None) if a.rope is None or a.latent else step.ropes[a.rope]
    values, scales = parts_of(pool)
    q, values, scales = kv_write(
        qkv,
        values,
        cos=cos,
        sin=sin,
        layer=index,
        block_ids=block_ids,
        offsets=offsets,
        q_norm=heads.q_norm,
        k_norm=heads.k_norm,
        eps=0.0 if a.qk_norm is None else a.qk_norm.eps,
        plus_one=a.qk_norm is not None and a.qk_norm.plus_one,
        kv_scales=scales,
        target=env.target,
        backend="xla" if env.attention == "xla" else "auto",
    )
    o = paged_attention(
        q,
        values,
        layer=index,
        block_tables=batch.block_tables[a.group],
        token_rows=batch.token_rows,
        positions=batch.positions,
        query_starts=batch.query_starts,
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        num_decode=batch.num_decode,
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        scale=a.scale,
        window=a.window,
        soft_cap=a.soft_cap,
        sinks=None if heads.sinks is None else heads.sinks.astype(jnp.float32),
        alibi=slopes(a, env),
        kv_scales=scales,
        value_dim=None if a.latent is None else a.value_dim,
        one_token_rows=env.tile is not None,
        target=env.target,
        backend=env.attention,
    )
    return o, values if scales is None else ScaledPool(values, scales)


def slopes(a: AttentionSpec, env: Env) -> jax.Array | None:
    """float32 [N]: ALiBi's, of this device's heads."""
    if not a.alibi:
        return None
    every = jnp.asarray(a.alibi, jnp.float32)
    return every if env.axis is None else lax.dynamic_slice_in_dim(every, env.first(a.heads), a.heads)
