"""Log-probabilities with the bits of an engine that runs with ``--deterministic``, and gradients all the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from lmjax.functional.cache import make_cache, padded, tiled_width, whole_rows
from lmjax.models import decoder
from lmjax.models.params import DecoderParams
from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env
from lmjax.nn.tiles import columns_of, over_tiles, put_columns, unknown_zero
from lmjax.runtime.forward import logprobs_alone
from lmjax.sampling.share import WHOLE


def exact(plain: Any) -> Any:
    """``plain(params, tokens, spec, env)`` float32 [B, n - 1] with the value of the engine's tiles, for an ``env`` that
    has them, and the gradient of ``plain`` itself, whose loops can be differentiated."""

    def one_by_one(params: DecoderParams, tokens: jax.Array, spec: DecoderSpec, env: Env) -> jax.Array:
        # under vmap a loop over what is mapped: a tile with an axis more would have other bits
        return sequential_vmap(partial(_in_tiles, spec=spec, env=env))(params, tokens)

    @partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def value(params: DecoderParams, tokens: jax.Array, spec: DecoderSpec, env: Env) -> jax.Array:
        return one_by_one(params, tokens, spec, env)

    def forward(params: DecoderParams, tokens: jax.Array, spec: DecoderSpec, env: Env) -> tuple[jax.Array, Any]:
        return one_by_one(params, tokens, spec, env), (params, tokens)

    def backward(spec: DecoderSpec, env: Env, saved: Any, cotangent: jax.Array) -> tuple[Any, None]:
        params, tokens = saved
        _, pull = jax.vjp(lambda params: plain(params, tokens, spec, replace(env, tile=None)), params)
        return (*pull(cotangent), None)

    value.defvjp(forward, backward)
    return value


def _in_tiles(params: DecoderParams, tokens: jax.Array, spec: DecoderSpec, env: Env) -> jax.Array:
    """tokens int32 [B, n] -> float32 [B, n - 1]."""
    assert env.tile is not None
    rows, length = tokens.shape
    total, tile = rows * length, env.tile
    width = tiled_width(total, env)
    num = total + unknown_zero(tokens)
    cache = make_cache(spec, rows, length, params.norm.dtype.name)
    batch = whole_rows(tokens, cache.tables, len(cache.pools), width, num)
    hidden, _ = decoder.forward(params, spec, cache.pools, batch, env)
    targets = padded(jnp.roll(tokens, -1, axis=1).reshape(-1), width)

    def block(first: jax.Array, out: jax.Array) -> jax.Array:
        logits = decoder.logits(params, spec, columns_of(hidden, first, tile), env)
        found = logprobs_alone(logits, columns_of(targets, first, tile), 1, WHOLE, num)
        return put_columns(out, found.logprobs, first)

    found = over_tiles(tile, width, num, block, jnp.zeros(width, jnp.float32))
    return found[:total].reshape(rows, length)[:, :-1]
