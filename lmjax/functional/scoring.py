"""Log-probabilities of given tokens: the serving forward as a differentiable function of the parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.functional.cache import (
    BLOCK_SIZE,
    check_params,
    check_tokens,
    env_or_default,
    own_blocks,
    row_values,
    whole_rows,
)
from lmjax.functional.dense import FORMS
from lmjax.functional.exact import exact
from lmjax.models import decoder
from lmjax.models.params import DecoderParams
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env
from lmjax.nn.norm import rms_norm
from lmjax.sampling.logprobs import entropies, target_logprobs
from lmjax.sampling.share import Share

HEAD_COLUMNS = 128  # as in the serving program: logits [V, B * n] are never there at once


class Scores(NamedTuple):
    logprobs: jax.Array  # float32 [B, n - 1], of the tokens 1 .. n - 1
    entropies: jax.Array  # float32 [B, n - 1], of the distributions that they are drawn from, in nats


def logprobs(
    params: DecoderParams,
    tokens: jax.Array,
    *,
    spec: DecoderSpec,
    lengths: jax.Array | None = None,
    remat: bool = False,
    env: Env | None = None,
) -> jax.Array:
    """float32 [B, n - 1]: entry [b, i] is log p(tokens[b, i + 1] | tokens[b, :i + 1]), raw.

    tokens: int32 [B, n]. lengths: int32 [B], tokens of each row that count (default n); entries behind are 0 and have
    no gradient. Usable under jit, grad, vmap and shard_map over B. The value is computed by the ops of the serving
    forward; the gradient, in reverse mode alone, is that of dense attention in float32. With the ``env`` of a
    deterministic engine (``LLM.functional``) the value has that engine's bits, for one forward more. remat: keep of
    each layer only its input and compute the layer again in the backward pass.
    """
    check_params(params, spec)
    env, tokens = env_or_default(env), _checked(tokens, spec)
    lengths = _checked_lengths(lengths, tokens)

    def plain(params: DecoderParams, tokens: jax.Array, spec: DecoderSpec, env: Env) -> jax.Array:
        hidden, targets, env = _hidden(params, tokens, spec, remat, env)
        return _cut(_by_columns(params, hidden, targets, spec, env, False)[0], tokens.shape, None)

    found = (plain if env.tile is None else exact(plain))(params, tokens, spec, env)
    return found if lengths is None else _cut_at(found, lengths)


def scores(
    params: DecoderParams,
    tokens: jax.Array,
    *,
    spec: DecoderSpec,
    lengths: jax.Array | None = None,
    remat: bool = False,
    env: Env | None = None,
) -> Scores:
    """``logprobs`` and the entropies of the same distributions, from one forward. Arguments as there."""
    check_params(params, spec)
    env, tokens = env_or_default(env), _checked(tokens, spec)
    lengths = _checked_lengths(lengths, tokens)
    if env.tile is not None:
        raise NotImplementedError("env: deterministic scores have log-probabilities alone, see logprobs")
    hidden, targets, env = _hidden(params, tokens, spec, remat, env)
    found = _by_columns(params, hidden, targets, spec, env, True)
    return Scores(*(_cut(x, tokens.shape, lengths) for x in found))


def _checked(tokens: jax.Array, spec: DecoderSpec) -> jax.Array:
    tokens = check_tokens(tokens)
    width = tokens.shape[1]
    if not 2 <= width <= spec.max_len:
        raise ValueError(f"tokens: got rows of {width}, must be 2 to {spec.max_len} tokens")
    return tokens


def _checked_lengths(lengths: Any, tokens: jax.Array) -> jax.Array | None:
    return None if lengths is None else row_values("lengths", lengths, tokens.shape[0], 0, tokens.shape[1])


def _hidden(
    params: DecoderParams, tokens: jax.Array, spec: DecoderSpec, remat: bool, env: Env
) -> tuple[jax.Array, jax.Array, Env]:
    """Hidden states [D, B * n] after the last norm, the token that follows each int32 [B * n], and what for."""
    env = replace(env, forms=FORMS)
    groups = 1 + max(layer.attention.group for layer in spec.layers)
    pools = (jnp.zeros((0, 2, 0, 0, BLOCK_SIZE, 0)),) * groups  # attention makes its own; this tells the block size
    rows, total = tokens.shape[0], tokens.size
    batch = whole_rows(tokens, own_blocks(rows, -(-tokens.shape[1] // BLOCK_SIZE)), groups, total, jnp.int32(total))
    targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
    if not remat:
        return decoder.forward(params, spec, pools, batch, env)[0], targets, env
    x = decoder.embed(params, batch.token_ids, env)
    for layer, weights in zip(spec.layers, params.layers, strict=True):
        alone = replace(spec, layers=(layer,))
        x = jax.checkpoint(lambda w, x, alone=alone: decoder.run_layers((w,), alone, x, pools, batch, env)[0])(
            weights, x
        )
    return rms_norm(x, params.norm, spec.norm_eps), targets, env


def _by_columns(
    params: DecoderParams, hidden: jax.Array, targets: jax.Array, spec: DecoderSpec, env: Env, entropy: bool
) -> tuple[jax.Array, ...]:
    """float32 [T] each: log-probabilities of ``targets``, and entropies if wanted."""
    total = targets.shape[0]
    size = min(HEAD_COLUMNS, total)
    padding = -total % size
    columns = jnp.pad(hidden, ((0, 0), (0, padding))).reshape(hidden.shape[0], -1, size).transpose(1, 0, 2)
    share = Share(env.vocab_axis, spec.vocab)

    @jax.checkpoint
    def block(columns: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        logits = decoder.logits(params, spec, columns, env)
        found = target_logprobs(logits, targets, 0, share).logprobs
        return (found, entropies(logits, share)) if entropy else (found,)

    found = lax.map(lambda pair: block(*pair), (columns, jnp.pad(targets, (0, padding)).reshape(-1, size)))
    return tuple(x.reshape(-1)[:total] for x in found)


def _cut(x: jax.Array, shape: tuple[int, ...], lengths: jax.Array | None) -> jax.Array:
    """[B * n] -> [B, n - 1], 0 behind each row's length."""
    x = x.reshape(shape)[:, :-1]
    return x if lengths is None else _cut_at(x, lengths)


def _cut_at(x: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32)[None, :] < lengths[:, None], x, 0.0)
