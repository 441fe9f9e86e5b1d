"""Draws as the engine makes them: a function of the logits and of (seed, sample index, position) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lmjax.core.plan import SlotLoad
from lmjax.functional.cache import padded, tiled_width
from lmjax.nn.env import ALONE, Env
from lmjax.nn.tiles import unknown_zero
from lmjax.runtime.sample import State, draw_in_tiles
from lmjax.sampling.logprobs import target_logprobs
from lmjax.sampling.params import FIELDS, encode_params, feature_level
from lmjax.sampling.sampler import sample as draw_tokens
from lmjax.sampling.share import WHOLE, Share
from lmjax.types import SamplingParams

_COLUMNS = [name for name, _ in FIELDS]
_SEED_LOW, _SEED_HIGH, _INDEX = (_COLUMNS.index(name) for name in ("seed_low", "seed_high", "sample_index"))


class Sampled(NamedTuple):
    tokens: jax.Array  # int32 [B]
    logprobs: jax.Array  # float32 [B], raw: before temperature and filters


def seeds(values: Sequence[int]) -> jax.Array:
    """The engine's seeds (``SamplingParams.seed``) as uint32 [B, 2], high and low half, to be given as ``key``."""
    whole = np.array([int(value) % 2**64 for value in values], np.uint64)
    return jnp.asarray(np.stack([whole >> np.uint64(32), whole & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32))


def row_seeds(key: jax.Array, rows: int) -> jax.Array:
    """A JAX random key (typed, or raw uint32 [2]) -> a seed for each row, uint32 [rows, 2]; seeds stay as they are."""
    key = jnp.asarray(key) if not hasattr(key, "dtype") else key
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape:
            raise ValueError(f"key: got keys {list(key.shape)}, must be one key, or seeds uint32 [B, 2]")
    elif key.dtype == jnp.uint32 and key.shape == (2,):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    elif key.dtype == jnp.uint32 and key.shape == (rows, 2):
        return key
    else:
        raise ValueError(
            f"key: got {key.dtype}{list(key.shape)}, must be a JAX random key, or seeds uint32 [{rows}, 2]"
        )
    return jax.random.bits(key, (rows, 2), jnp.uint32)


class Rule(NamedTuple):
    """How to sample, known when traced: the engine's parameter row but for the seed, and the level it needs."""

    row: np.ndarray  # int32 [NUM_PARAMS]
    level: int


def rule_of(temperature: float, top_k: int, top_p: float, min_p: float) -> Rule:
    """Python numbers, as in ``SamplingParams``; ``ParameterError`` for what that refuses."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    load = SlotLoad(0, params, 0, 0, np.zeros(0, np.int32), 0)
    return Rule(encode_params(load), feature_level(load))


def draw(
    logits: jax.Array,
    rule: Rule,
    row_keys: jax.Array,
    positions: jax.Array,
    sample_index: jax.Array | None = None,
    share: Share = WHOLE,
    env: Env = ALONE,
) -> Sampled:
    """logits float32 [V, B]; row_keys uint32 [B, 2]; positions and sample_index int32 [B]. With ``env.tile`` by the
    code of a deterministic engine."""
    rows, zeros = positions.shape[0], jnp.zeros_like(positions)
    halves = jax.lax.bitcast_convert_type(row_keys, jnp.int32)
    params = jnp.broadcast_to(jnp.asarray(rule.row), (rows, len(FIELDS)))
    params = params.at[:, _SEED_HIGH].set(halves[:, 0]).at[:, _SEED_LOW].set(halves[:, 1])
    params = params.at[:, _INDEX].set(zeros if sample_index is None else sample_index.astype(jnp.int32))
    if env.tile is not None:
        return _in_tiles(logits, params, positions, rule.level, share, env)
    nothing = jnp.zeros((1, 1), jnp.int32)  # token table and state rows: only level 3 reads them
    out = draw_tokens(logits, params, zeros, positions, nothing, nothing, level=rule.level, max_logprobs=0, share=share)
    return Sampled(out.token_ids, target_logprobs(logits, out.token_ids, 0, share).logprobs)


def sample(
    logits: jax.Array,
    key: jax.Array,
    positions: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    sample_index: jax.Array | None = None,
    env: Env | None = None,
) -> Sampled:
    """One token a row of ``logits`` float32 [B, V], and its raw log-probability.

    key: a JAX random key, or seeds uint32 [B, 2] (see ``seeds``). positions: int32 [B], tokens before the one that is
    drawn; a row draws the same token again for the same seed, ``sample_index`` (int32 [B], default 0: which of the
    engine's ``n`` choices) and position. The other arguments are Python numbers with the meaning, order and limits of
    ``SamplingParams``.
    """
    rule = rule_of(temperature, top_k, top_p, min_p)
    return draw(
        logits.T, rule, row_seeds(key, logits.shape[0]), positions.astype(jnp.int32), sample_index, env=env or ALONE
    )


def _in_tiles(
    logits: jax.Array, params: jax.Array, positions: jax.Array, level: int, share: Share, env: Env
) -> Sampled:
    assert env.tile is not None
    rows, width = positions.shape[0], tiled_width(positions.shape[0], env)
    zero = unknown_zero(positions)
    slots = jnp.where(jnp.arange(width, dtype=jnp.int32) < rows + zero, 0, 1)  # 1: nobody's
    state = State(jnp.zeros((2, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32), level, 1, share, env.branches, False)
    out = draw_in_tiles(
        padded(logits.T, width).T, padded(params, width), slots, padded(positions, width), state, env.tile
    )
    assert out.logprobs is not None
    return Sampled(out.token_ids[:rows], out.logprobs[:rows])
