"""The sample program: logits -> one token a row, written into the token table and into one packed result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lmjax.nn.env import ALONE, Env
from lmjax.nn.tiles import columns_of, over_tiles, put_columns
from lmjax.runtime.buckets import SampleKey
from lmjax.runtime.forward import logprobs_alone, pack_logprobs
from lmjax.runtime.inputs import sample_layout
from lmjax.sampling.logprobs import Logprobs, target_logprobs
from lmjax.sampling.sampler import SampleOut, choose
from lmjax.sampling.share import Share

SampleProgram = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def make_sample(
    key: SampleKey, max_logprobs: int, vocab: int, env: Env = ALONE, processed_logprobs: bool = False
) -> SampleProgram:
    """``(logits [V, S], tokens, sampling state, packed) -> (tokens, result)``; donate tokens.

    Rows of the logits beyond ``vocab`` are padding. With ``env.vocab_axis`` logits are one device's rows
    [V_local, S], and ``Placement.wrap_sample`` makes one function of all.

    result: token rows, int32 [S, 1], or [S, 3 + 2 * max_logprobs] with log-probabilities.
    """

    # 0 means none to the sampler; a request may want its token's own log-probability where no more is allowed
    most = max(max_logprobs, 1) if key.logprobs else 0

    def sample(
        logits: jax.Array, tokens: jax.Array, sampling: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        parts = sample_layout(key.num_rows).split(packed)
        slots, positions = parts["slots"], parts["positions"]
        logits = logits[:vocab] if env.vocab_axis is None else logits
        share = Share(env.vocab_axis, vocab)
        state = State(tokens, sampling, key.level, most, share, env.branches, processed_logprobs)
        if env.tile is None:
            out = draw_rows(logits, parts["params"], slots, positions, state)
        else:
            out = draw_in_tiles(logits, parts["params"], slots, positions, state, env.tile)
        tokens = tokens.at[slots, positions].set(out.token_ids, mode="promise_in_bounds")
        result = out.token_ids[:, None]
        if key.logprobs:
            assert out.logprobs is not None and out.ranks is not None
            assert out.top_ids is not None and out.top_logprobs is not None
            top = out.top_ids[:, :max_logprobs], out.top_logprobs[:, :max_logprobs]
            result = pack_logprobs(out.token_ids, Logprobs(out.logprobs, out.ranks, *top))
        return tokens, result

    return sample


class State(NamedTuple):
    """What all rows share; arguments of ``sampling.sampler.sample``."""

    tokens: jax.Array
    sampling: jax.Array
    level: int
    max_logprobs: int
    share: Share
    branches: bool
    processed_logprobs: bool


def choose_rows(
    logits: jax.Array, params: jax.Array, slots: jax.Array, positions: jax.Array, state: State
) -> tuple[jax.Array, jax.Array]:
    return choose(
        logits,
        params,
        slots,
        positions,
        state.tokens,
        state.sampling,
        level=state.level,
        share=state.share,
        branches=state.branches,
        processed_logprobs=state.processed_logprobs,
    )


def draw_rows(logits: jax.Array, params: jax.Array, slots: jax.Array, positions: jax.Array, state: State) -> SampleOut:
    token_ids, shown = choose_rows(logits, params, slots, positions, state)
    if not state.max_logprobs:
        return SampleOut(token_ids)
    return SampleOut(token_ids, *target_logprobs(shown, token_ids, state.max_logprobs, state.share))


def draw_in_tiles(
    logits: jax.Array,
    params: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    state: State,
    tile: int,
) -> SampleOut:
    """``draw_rows``, so many rows at a time; log-probabilities by the code that a prompt's are made with."""
    width, most = slots.shape[0], state.max_logprobs
    index = jnp.arange(width, dtype=jnp.int32)
    used = jnp.where(slots < state.tokens.shape[0] - 1, index + 1, 0).max()  # the others have the dummy slot

    def body(first: jax.Array, out: SampleOut) -> SampleOut:
        own = columns_of(logits, first, tile)
        own_params, own_slots, own_positions = (columns_of(x, first, tile, 0) for x in (params, slots, positions))
        token_ids, shown = choose_rows(own, own_params, own_slots, own_positions, state)
        found = SampleOut(token_ids)
        if most:
            number = jnp.maximum(used, 0)
            found = SampleOut(token_ids, *logprobs_alone(shown, token_ids, most, state.share, number))
        return jax.tree.map(lambda whole, part: put_columns(whole, part, first, 0), out, found)

    ints, floats = (jnp.zeros(width, x) for x in (jnp.int32, jnp.float32))
    out = SampleOut(ints)
    if most:
        tops = (jnp.zeros((width, most), x) for x in (jnp.int32, jnp.float32))
        out = SampleOut(ints, floats, ints, *tops)
    return over_tiles(tile, width, used, body, out)
