"""One decoder for every family: a pure function of parameters, KV pools and a ragged batch, driven by a spec.

Activations are feature-major, ``[features, T]``. Layers are unrolled: a scan over stacked layers copies weights and
KV on every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.models.params import (
    AttentionParams,
    DecoderParams,
    LayerParams,
    MlpParams,
    MoeParams,
    abstract_params,
    init_params,
)
from lmjax.models.rope import inverse_frequencies
from lmjax.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import ALONE, Env
from lmjax.nn.linear import linear, matmul, summed_linear
from lmjax.nn.mlp import gated_mlp
from lmjax.nn.moe import moe_mlp, shared_expert
from lmjax.nn.norm import rms_norm
from lmjax.nn.rope import rope_tables
from lmjax.nn.tiles import batch_of_tile, columns_of, over_tiles, put_columns
from lmjax.types import KVSpec
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention

__all__ = ["abstract_params", "embed", "forward", "init_params", "kv_specs", "logits", "pool_shape", "run_layers"]


class ScaledPool(NamedTuple):
    """A pool of 1-byte elements: stored number * scale = value."""

    values: jax.Array  # [layers, 2, blocks, K, B, H]
    scales: jax.Array  # float32 [layers, 2, blocks, K, B]


Pools = tuple[Any, ...]  # for each KV group [layers, 2, blocks, K, B, H], or a ScaledPool


def kv_specs(spec: DecoderSpec, dtype: str) -> tuple[KVSpec, ...]:
    """The KV groups, in the order of ``AttentionSpec.group``; dtype is that of the pools. Layers of a pipeline are
    numbered stage by stage."""
    groups: dict[int, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        groups.setdefault(layer.attention.group, []).append(i)
    out = []
    for group in range(len(groups)):
        a = spec.layers[groups[group][0]].attention
        out.append(
            KVSpec(
                kind="full" if a.window is None else "window",
                layers=tuple(stage * len(spec.layers) + i for stage in range(spec.stages) for i in groups[group]),
                kv_heads=a.kv_heads,
                k_dim=a.head_dim,
                v_dim=a.head_dim,
                dtype=dtype,
                window=a.window,
            )
        )
    return tuple(out)


def pool_shape(kv_spec: KVSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """[L, 2, blocks, K, B, H] of one KV group's pool; ``num_blocks`` includes the null block 0."""
    return (len(kv_spec.layers), 2, num_blocks, kv_spec.kv_heads, block_size, kv_spec.k_dim)


def abstract_pool(kv_spec: KVSpec, num_blocks: int, block_size: int) -> Any:
    """A KV group's pool as ``jax.ShapeDtypeStruct``."""
    shape = pool_shape(kv_spec, num_blocks, block_size)
    values = jax.ShapeDtypeStruct(shape, jnp.dtype(kv_spec.dtype))
    if not kv_spec.scaled:
        return values
    return ScaledPool(values, jax.ShapeDtypeStruct(shape[:-1], jnp.float32))  # type: ignore[arg-type]


def _parts(pool: Any) -> tuple[jax.Array, jax.Array | None]:
    """The elements of a pool, and their scales if it has some."""
    return pool if isinstance(pool, ScaledPool) else (pool, None)


def forward(
    params: DecoderParams, spec: DecoderSpec, pools: Pools, batch: Batch, env: Env = ALONE
) -> tuple[jax.Array, Pools]:
    """Hidden states after the final norm [D, T] (in the parameters' dtype) and the pools with the step's KV written.

    Donate the pools: they are then updated in place. Hidden states of padding tokens are finite and mean nothing.
    With axes in ``env`` parameters, spec and pools are one device's share; the result is whole on every device.
    """
    if env.tile is not None:
        return _forward_in_tiles(params, spec, pools, batch, env, env.tile)
    return _forward(params, spec, pools, batch, env)


def _forward(params: DecoderParams, spec: DecoderSpec, pools: Pools, batch: Batch, env: Env) -> tuple[jax.Array, Pools]:
    x = embed(params, batch.token_ids, env)
    x, pools = run_layers(params.layers, spec, x, pools, batch, env)
    return rms_norm(x, params.norm, spec.norm_eps), pools


def _forward_in_tiles(
    params: DecoderParams, spec: DecoderSpec, pools: Pools, batch: Batch, env: Env, tile: int
) -> tuple[jax.Array, Pools]:
    """Some tokens, then the next: those before have written their keys and values."""
    if env.target.platform == "cpu":
        return _layer_by_layer(params, spec, pools, batch, env, tile)
    width = batch.token_ids.shape[0]

    def body(first: jax.Array, state: tuple[jax.Array, Pools]) -> tuple[jax.Array, Pools]:
        hidden, pools = state
        own, pools = _forward(params, spec, pools, batch_of_tile(batch, first, tile), env)
        return put_columns(hidden, own, first), pools

    hidden = jnp.zeros((spec.hidden, width), params.norm.dtype)
    return over_tiles(tile, width, batch.num_tokens, body, (hidden, pools))


def _layer_by_layer(
    params: DecoderParams, spec: DecoderSpec, pools: Pools, batch: Batch, env: Env, tile: int
) -> tuple[jax.Array, Pools]:
    """All tiles through a layer, then through the next, while a CPU has the layer's weights in its cache: a prefill
    takes 0.7 of the time. Not on a card, whose host would wait for the number of turns in every layer."""
    width = batch.token_ids.shape[0]
    tiles = partial(over_tiles, tile, width, batch.num_tokens)
    angles = jnp.zeros((spec.rope.dim // 2, width), jnp.float32)
    x = jnp.zeros((spec.hidden, width), params.norm.dtype)
    state = list(pools)

    def start(first: jax.Array, found: Any) -> Any:
        own = batch_of_tile(batch, first, tile)
        new = (embed(params, own.token_ids, env), _rope(spec, own))
        return jax.tree.map(lambda whole, columns: put_columns(whole, columns, first), found, new)

    x, rope = tiles(start, (x, (angles, angles)))

    def through(i: int, first: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, pool = found
        own = batch_of_tile(batch, first, tile)
        own_rope = jax.tree.map(lambda table: columns_of(table, first, tile), rope)
        step = Step(own, own_rope, _write_targets(own, _parts(pool)[0].shape[4]))
        y, pool = _layer(
            params.layers[i],
            columns_of(x, first, tile),
            pool,
            step,
            _layer_ids(spec, own)[i],
            kind=spec.layers[i].kind,
            eps=spec.norm_eps,
            env=env,
        )
        return put_columns(x, y, first), pool

    for i, layer in enumerate(spec.layers):
        group = layer.attention.group
        x, state[group] = tiles(partial(through, i), (x, state[group]))

    def end(first: jax.Array, x: jax.Array) -> jax.Array:
        return put_columns(x, rms_norm(columns_of(x, first, tile), params.norm, spec.norm_eps), first)

    return tiles(end, x), tuple(state)


def run_layers(
    layers: Sequence[LayerParams],
    spec: DecoderSpec,
    x: jax.Array,
    pools: Pools,
    batch: Batch,
    env: Env,
) -> tuple[jax.Array, Pools]:
    """x [D, T], the residual stream, through ``spec.layers``."""
    step = Step(
        batch=batch,
        rope=_rope(spec, batch),
        targets=_write_targets(batch, _parts(pools[0])[0].shape[4]),
    )
    layer_ids = _layer_ids(spec, batch)
    state = list(pools)
    for i, (layer, weights) in enumerate(zip(spec.layers, layers, strict=True)):
        group, kind = layer.attention.group, layer.kind
        x, state[group] = _layer(weights, x, state[group], step, layer_ids[i], kind=kind, eps=spec.norm_eps, env=env)
    return x, tuple(state)


def logits(params: DecoderParams, spec: DecoderSpec, hidden: jax.Array, env: Env = ALONE) -> jax.Array:
    """hidden [D, S] (columns of ``forward``'s first result) -> float32 [V, S]; with ``env.vocab_axis`` this device's
    rows of it, -inf where the vocabulary is padded."""
    y = matmul(params.embed if spec.tie_embeddings else params.head, hidden)
    env = env.for_vocab
    if env.axis is None:
        return y
    rows = env.first(y.shape[0]) + jnp.arange(y.shape[0], dtype=jnp.int32)
    return jnp.where((rows < spec.vocab)[:, None], y, -jnp.inf)


def embed(params: DecoderParams, token_ids: jax.Array, env: Env = ALONE) -> jax.Array:
    """token_ids int32 [T] -> [D, T]. With ``env.vocab_axis`` a device has some rows of the table."""
    table, env = params.embed, env.for_vocab
    if env.axis is None:
        return table[token_ids].T
    rows = token_ids - env.first(table.shape[0])
    here = (rows >= 0) & (rows < table.shape[0])
    return env.sum(jnp.where(here[:, None], table[jnp.where(here, rows, 0)], jnp.zeros((), table.dtype))).T


class Step(NamedTuple):
    """What all layers of a step share."""

    batch: Batch
    rope: tuple[jax.Array, jax.Array]  # cos, sin  float32 [R / 2, T]
    targets: list[tuple[jax.Array, jax.Array]]  # per KV group: block id and offset of each token, int32 [T]


def _rope(spec: DecoderSpec, batch: Batch) -> tuple[jax.Array, jax.Array]:
    def tables(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(inverse_frequencies(spec.rope), spec.rope.attention_factor, positions)

    def once(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        # XLA:CPU would fuse sines and cosines into every use, in every layer, past a barrier too. It does not fuse
        # into a conditional, and cannot know that this one is always true.
        shape = (spec.rope.dim // 2, *positions.shape)
        zeros = (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
        return lax.cond(batch.num_tokens >= 0, tables, lambda _: zeros, positions)

    return lax.platform_dependent(batch.positions, cpu=once, default=tables)


def _layer_ids(spec: DecoderSpec, batch: Batch) -> tuple[jax.Array, ...]:
    """int32 [] a layer: its index within its KV group."""
    ids = tuple(jnp.int32(layer.attention.index) for layer in spec.layers)

    def opaque(num_tokens: jax.Array) -> tuple[jax.Array, ...]:
        # With a constant index every layer's kernels differ. Made of a run-time value they are equal, and XLA:CPU
        # compiles equal kernels once: half the compile time.
        zero = jnp.minimum(num_tokens, 0)
        return tuple(zero + i for i in ids)

    return lax.platform_dependent(batch.num_tokens, cpu=opaque, default=lambda _: ids)


def _write_targets(batch: Batch, block_size: int) -> list[tuple[jax.Array, jax.Array]]:
    """Per KV group (block id, offset in it), int32 [T] each, of every token; padding goes to the null block."""
    real = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32) < batch.num_tokens
    column, offset = batch.positions // block_size, batch.positions % block_size
    tables = [batch.block_tables[g] for g in range(batch.block_tables.shape[0])]
    return [(jnp.where(real, table[batch.token_rows, column], 0), offset) for table in tables]


@partial(jax.jit, static_argnames=("kind", "eps", "env"))  # traced and lowered once a kind: a start takes half as long
def _layer(
    p: LayerParams,
    x: jax.Array,
    pool: Any,
    step: Step,
    index: jax.Array,
    *,
    kind: LayerSpec,
    eps: float,
    env: Env,
) -> tuple[jax.Array, Any]:
    """The layer at ``index`` of its KV group: residual x [D, T] and the group's pool -> the same, updated."""
    h = rms_norm(x, p.attn.norm, eps)
    o, pool = _attention(p.attn, kind.attention, h, pool, step, index, eps, env)
    x = x + o
    h = rms_norm(x, p.mlp.norm, eps)
    return x + _mlp(p.mlp, kind.mlp, h, step.batch.num_tokens, env), pool


def _mlp(p: MlpParams | MoeParams, m: MlpSpec | MoeSpec, x: jax.Array, num_tokens: jax.Array, env: Env) -> jax.Array:
    """x [D, T] normed -> the MLP's contribution to the residual [D, T]."""
    if isinstance(p, MlpParams):
        return gated_mlp(p.gate_up, p.down, x, m.activation, env)
    assert isinstance(m, MoeSpec)
    e = p.experts
    experts = env.forms.moe if env.forms else moe_mlp
    y = experts(
        p.router,
        e.gate_up,
        e.down,
        x,
        num_tokens,
        top_k=m.top_k,
        normalise=m.normalise,
        activation=m.activation,
        first=env.first(e.gate_up.weight.shape[0]) if env.spread_experts else 0,
        target=env.target,
    )
    if p.shared is not None:
        y = y + shared_expert(p.shared.gate, p.shared.gate_up, p.shared.down, x, m.activation, env.target)
    return env.sum(y)


def _attention(
    p: AttentionParams,
    a: AttentionSpec,
    x: jax.Array,
    pool: Any,
    step: Step,
    index: jax.Array,
    eps: float,
    env: Env,
) -> tuple[jax.Array, Any]:
    """x [D, T] normed -> (attention's contribution to the residual [D, T], pool)."""
    tokens = x.shape[-1]
    attend = env.forms.attention if env.forms else paged
    o, pool = attend(linear(p.qkv, x, env), p, a, pool, step, index, eps, env)
    # The next layer's write has to wait for this read: else XLA:CPU cannot update the one-array pool in place and
    # copies all of it several times a step. The residual makes it wait; the barrier states it.
    o, pool = lax.optimization_barrier((o, pool))
    return summed_linear(p.o, o.reshape(tokens, a.heads * a.head_dim).T, env), pool


def paged(
    qkv: jax.Array,
    p: AttentionParams,
    a: AttentionSpec,
    pool: Any,
    step: Step,
    index: jax.Array,
    eps: float,
    env: Env,
) -> tuple[jax.Array, Any]:
    """qkv [K, G + 2, H, T] -> (attended values [T, N, H], the pool with the step's keys and values)."""
    batch = step.batch
    block_ids, offsets = step.targets[a.group]
    cos, sin = step.rope
    values, scales = _parts(pool)
    q, values, scales = kv_write(
        qkv,
        values,
        cos=cos,
        sin=sin,
        layer=index,
        block_ids=block_ids,
        offsets=offsets,
        q_norm=p.q_norm,
        k_norm=p.k_norm,
        eps=eps,
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
        kv_scales=scales,
        one_token_rows=env.tile is not None,
        target=env.target,
        backend=env.attention,
    )
    return o, values if scales is None else ScaledPool(values, scales)
