"""One decoder for every family: a pure function of parameters, KV pools and a ragged batch, driven by a spec.

Activations are feature-major, ``[features, T]``. Layers are unrolled: a scan over stacked layers copies weights and
KV on every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.models.layer import Step, run_layer
from lmjax.models.params import DecoderParams, LayerParams, abstract_params, init_params
from lmjax.models.pools import abstract_pool, block_size_of, pool_shape
from lmjax.models.rope import inverse_frequencies
from lmjax.models.spec import DecoderSpec, RopeSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import ALONE, Env
from lmjax.nn.linear import matmul
from lmjax.nn.norm import normed
from lmjax.nn.rope import rope_tables
from lmjax.nn.tiles import batch_of_tile, columns_of, over_tiles, put_columns
from lmjax.types import KVSpec

__all__ = [
    "abstract_params",
    "abstract_pool",
    "embed",
    "final_norm",
    "forward",
    "init_params",
    "kv_specs",
    "logits",
    "pool_shape",
    "run_layers",
]


Pools = tuple[Any, ...]  # one a KV group, see ``models.pools``


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
                kind="latent" if a.latent else "full" if a.window is None else "window",
                layers=tuple(stage * len(spec.layers) + i for stage in range(spec.stages) for i in groups[group]),
                kv_heads=a.kv_heads,
                k_dim=a.head_dim,
                v_dim=0 if a.latent else a.head_dim,
                dtype=dtype,
                window=a.window,
            )
        )
    return tuple(out)


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
    x = embed(params, spec, batch.token_ids, batch.positions, env)
    x, pools = run_layers(params.layers, spec, x, pools, batch, env)
    return final_norm(params, spec, x), pools


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

    hidden = jnp.zeros((spec.hidden, width), params.embed.dtype)
    return over_tiles(tile, width, batch.num_tokens, body, (hidden, pools))


def _layer_by_layer(
    params: DecoderParams, spec: DecoderSpec, pools: Pools, batch: Batch, env: Env, tile: int
) -> tuple[jax.Array, Pools]:
    """All tiles through a layer, then through the next, while a CPU has the layer's weights in its cache: a prefill
    takes 0.7 of the time. Not on a card, whose host would wait for the number of turns in every layer."""
    width = batch.token_ids.shape[0]
    tiles = partial(over_tiles, tile, width, batch.num_tokens)
    angles = tuple(jnp.zeros((rope.dim // 2, width), jnp.float32) for rope in spec.ropes)
    x = jnp.zeros((spec.hidden, width), params.embed.dtype)
    state = list(pools)

    def start(first: jax.Array, found: Any) -> Any:
        own = batch_of_tile(batch, first, tile)
        new = (embed(params, spec, own.token_ids, own.positions, env), _ropes(spec, own))
        return jax.tree.map(lambda whole, columns: put_columns(whole, columns, first), found, new)

    x, ropes = tiles(start, (x, tuple((table, table) for table in angles)))

    def through(i: int, first: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, pool = found
        own = batch_of_tile(batch, first, tile)
        own_ropes = jax.tree.map(lambda table: columns_of(table, first, tile), ropes)
        step = Step(own, own_ropes, _write_targets(own, block_size_of(pool)))
        y, pool = run_layer(
            params.layers[i],
            columns_of(x, first, tile),
            pool,
            step,
            _layer_ids(spec, own)[i],
            kind=spec.layers[i].kind,
            env=env,
        )
        return put_columns(x, y, first), pool

    for i, layer in enumerate(spec.layers):
        group = layer.attention.group
        x, state[group] = tiles(partial(through, i), (x, state[group]))

    def end(first: jax.Array, x: jax.Array) -> jax.Array:
        return put_columns(x, final_norm(params, spec, columns_of(x, first, tile)), first)

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
        ropes=_ropes(spec, batch),
        targets=_write_targets(batch, block_size_of(pools[0])),
    )
    layer_ids = _layer_ids(spec, batch)
    state = list(pools)
    for i, (layer, weights) in enumerate(zip(spec.layers, layers, strict=True)):
        group = layer.attention.group
        x, state[group] = run_layer(weights, x, state[group], step, layer_ids[i], kind=layer.kind, env=env)
    return x, tuple(state)


def final_norm(params: DecoderParams, spec: DecoderSpec, x: jax.Array) -> jax.Array:
    """The norm before the head: x [D, T] -> the same shape."""
    return normed(x, params.norm, spec.norm)


def logits(params: DecoderParams, spec: DecoderSpec, hidden: jax.Array, env: Env = ALONE) -> jax.Array:
    """hidden [D, S] (columns of ``forward``'s first result) -> float32 [V, S]; with ``env.vocab_axis`` this device's
    rows of it, -inf where the vocabulary is padded."""
    y = matmul(params.embed if spec.tie_embeddings else params.head, hidden)
    if params.head_bias is not None:
        y = y + params.head_bias.astype(jnp.float32)[:, None]
    if spec.logit_scale != 1.0:
        y = y * jnp.float32(spec.logit_scale)
    if spec.logit_cap is not None:
        y = jnp.float32(spec.logit_cap) * jnp.tanh(y / jnp.float32(spec.logit_cap))
    env = env.for_vocab
    if env.axis is None:
        return y
    rows = env.first(y.shape[0]) + jnp.arange(y.shape[0], dtype=jnp.int32)
    return jnp.where((rows < spec.vocab)[:, None], y, -jnp.inf)


def embed(
    params: DecoderParams, spec: DecoderSpec, token_ids: jax.Array, positions: jax.Array, env: Env = ALONE
) -> jax.Array:
    """token_ids and positions int32 [T] -> [D, T], what the first layer reads."""
    x = _embedded(params.embed, token_ids, env)
    if spec.embed_scale != 1.0:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)
    if params.positions is not None:
        x = x + params.positions[positions].T
    return x if spec.embed_norm is None else normed(x, params.embed_norm, spec.embed_norm)


def _embedded(table: jax.Array, token_ids: jax.Array, env: Env) -> jax.Array:
    """token_ids int32 [T] -> [D, T]. With ``env.vocab_axis`` a device has some rows of the table."""
    env = env.for_vocab
    if env.axis is None:
        return table[token_ids].T
    rows = token_ids - env.first(table.shape[0])
    here = (rows >= 0) & (rows < table.shape[0])
    return env.sum(jnp.where(here[:, None], table[jnp.where(here, rows, 0)], jnp.zeros((), table.dtype))).T


def _ropes(spec: DecoderSpec, batch: Batch) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """cos and sin, float32 [R / 2, T], of each of ``spec.ropes``."""
    return tuple(_rope(rope, batch) for rope in spec.ropes)


def _rope(rope: RopeSpec, batch: Batch) -> tuple[jax.Array, jax.Array]:
    def tables(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_tables(inverse_frequencies(rope), rope.attention_factor, positions)

    def once(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        # XLA:CPU would fuse sines and cosines into every use, in every layer, past a barrier too. It does not fuse
        # into a conditional, and cannot know that this one is always true.
        shape = (rope.dim // 2, *positions.shape)
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
