"""BERT and its descendants (MiniLM, BGE, RoBERTa, XLM-R): every token sees its whole sequence, nothing is generated.

Several sequences lie one after the other in one axis of tokens, as in the decoder; a token's row says whose it is.
Activations are feature-major, ``[features, T]``. Post-norm: LayerNorm(x + f(x)), as in Devlin et al. 2018.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from lmjax.models.encoder_spec import EncoderSpec
from lmjax.nn.linear import linear, matmul
from lmjax.nn.weight import Dense
from pallas_kernels.activation import ACTIVATIONS

QUERY_BLOCK = 512  # tokens whose scores are in memory at once


@struct.dataclass
class NormParams:
    scale: Any  # [D]
    bias: Any  # [D]


@struct.dataclass
class EncoderLayerParams:
    qkv: Dense  # [3, D, D]: query, key, value
    o: Dense  # [D, D]
    attn_norm: NormParams
    up: Dense  # [F, D]
    down: Dense  # [D, F]
    mlp_norm: NormParams


@struct.dataclass
class EncoderParams:
    embed: Any  # [V, D]
    positions: Any  # [positions, D]
    types: Any  # [types, D]
    norm: NormParams
    layers: tuple[EncoderLayerParams, ...]
    head: Dense | None = None  # [D, D], of a cross-encoder: over the first token, then tanh
    score: Dense | None = None  # [1, D]


@struct.dataclass
class EncoderBatch:
    """T tokens of up to S sequences, one after the other. Padding has the row S."""

    token_ids: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T], from 0 in each sequence
    types: jax.Array  # int32 [T]
    rows: jax.Array  # int32 [T]
    marks: jax.Array  # int32 [T], 1 for tokens that go into their row's sum


def abstract_params(spec: EncoderSpec, dtype: str) -> EncoderParams:
    """The tree with a ``jax.ShapeDtypeStruct`` at every leaf."""
    d, f, kind = spec.hidden, spec.ffn, jnp.dtype(dtype)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, kind)

    def dense(*shape: int) -> Dense:
        return Dense(array(*shape), array(*shape[:-1]))

    def norm() -> NormParams:
        return NormParams(array(d), array(d))

    def layer() -> EncoderLayerParams:
        return EncoderLayerParams(dense(3, d, d), dense(d, d), norm(), dense(f, d), dense(d, f), norm())

    return EncoderParams(
        embed=array(spec.vocab, d),
        positions=array(spec.num_positions, d),
        types=array(spec.num_types, d),
        norm=norm(),
        layers=tuple(layer() for _ in range(spec.layers)),
        head=dense(d, d) if spec.scores else None,
        score=dense(1, d) if spec.scores else None,
    )


def forward(params: EncoderParams, spec: EncoderSpec, batch: EncoderBatch, num_rows: int) -> jax.Array:
    """float32 [S, D]: sums of the marked tokens' hidden states; of a cross-encoder [S, 1], the scores."""
    x = params.embed[batch.token_ids] + params.positions[batch.positions + spec.first_position]
    x = (x + params.types[batch.types]).T
    x = _norm(x, params.norm, spec.norm_eps)
    for layer in params.layers:
        x = _layer(layer, x, batch.rows, spec=spec)
    sums = _sums(x, batch, num_rows)
    if params.head is None:
        return sums.T
    assert params.score is not None
    y = jnp.tanh(linear(params.head, sums.astype(x.dtype)))
    assert params.score.bias is not None
    return (matmul(params.score.weight, y) + params.score.bias.astype(jnp.float32)[:, None]).T


def _sums(x: jax.Array, batch: EncoderBatch, num_rows: int) -> jax.Array:
    """x [D, T] -> float32 [D, S]: a product with ones and zeros."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    picked = (batch.rows[:, None] == rows[None, :]) & (batch.marks == 1)[:, None]
    return lax.dot_general(
        x,
        picked.astype(x.dtype),
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@partial(jax.jit, static_argnames="spec")  # traced once, not once a layer
def _layer(p: EncoderLayerParams, x: jax.Array, rows: jax.Array, *, spec: EncoderSpec) -> jax.Array:
    """x [D, T] -> the same."""
    x = _norm(x + linear(p.o, _attention(linear(p.qkv, x), rows, spec)), p.attn_norm, spec.norm_eps)
    up = ACTIVATIONS[spec.activation](linear(p.up, x).astype(jnp.float32)).astype(x.dtype)
    return _norm(x + linear(p.down, up), p.mlp_norm, spec.norm_eps)


def _attention(qkv: jax.Array, rows: jax.Array, spec: EncoderSpec) -> jax.Array:
    """qkv [3, D, T], rows int32 [T] -> attended values [D, T]. A sequence's tokens are neighbours and at most
    ``max_len``, so a block of queries needs no keys farther away than that."""
    tokens, head_dim = rows.shape[0], spec.hidden // spec.heads
    q, k, v = qkv.reshape(3, spec.heads, head_dim, tokens)
    size = min(QUERY_BLOCK, tokens)
    width = min(tokens, size + 2 * spec.max_len)
    if tokens == width == size:
        return _attend(q, k, v, rows, rows).reshape(-1, tokens)

    def block(start: jax.Array) -> jax.Array:
        """Values of the queries from ``start`` on, [N, H, size]."""
        first = jnp.clip(start - spec.max_len, 0, tokens - width)
        near = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=width)
        own = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        return _attend(own(q, axis=2), near(k, axis=2), near(v, axis=2), own(rows), near(rows))

    # the last block may begin earlier than where the one before ends: it computes some queries again, equally
    starts = np.minimum(np.arange(0, tokens, size), tokens - size).astype(np.int32)
    blocks = lax.map(block, jnp.asarray(starts))
    out = jnp.zeros((spec.heads, head_dim, tokens), q.dtype)
    for i, start in enumerate(starts.tolist()):
        out = out.at[:, :, start : start + size].set(blocks[i])
    return out.reshape(-1, tokens)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, q_rows: jax.Array, k_rows: jax.Array) -> jax.Array:
    """q [N, H, Tq], k and v [N, H, Tk] -> [N, H, Tq]; a token sees those of its own row."""
    scale = jnp.float32(q.shape[1] ** -0.5)
    scores = jnp.einsum("nht,nhs->nts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where((q_rows[:, None] == k_rows[None, :])[None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("nts,nhs->nht", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)


def _norm(x: jax.Array, p: NormParams, eps: float) -> jax.Array:
    """LayerNorm over the features of x [D, T], in float32."""
    y = x.astype(jnp.float32)
    y = y - y.mean(0, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(0, keepdims=True) + jnp.float32(eps))
    return (y * p.scale.astype(jnp.float32)[:, None] + p.bias.astype(jnp.float32)[:, None]).astype(x.dtype)
