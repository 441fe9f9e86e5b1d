"""``prefill``, ``decode`` and ``generate``: the engine's forward and draw over a pool of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.functional.cache import (
    BLOCK_SIZE,
    Cache,
    check_params,
    check_tokens,
    env_or_default,
    make_cache,
    padded,
    row_values,
    tiled_width,
)
from lmjax.functional.sampling import Sampled, draw, row_seeds, rule_of
from lmjax.models import decoder
from lmjax.models.params import DecoderParams
from lmjax.models.spec import DecoderSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import Env
from lmjax.nn.tiles import unknown_zero
from lmjax.runtime.forward import head_of_rows
from lmjax.sampling.share import Share


def prefill(
    params: DecoderParams,
    tokens: jax.Array,
    cache: Cache,
    *,
    spec: DecoderSpec,
    lengths: jax.Array | None = None,
    starts: jax.Array | None = None,
    env: Env | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits float32 [B, V] of each row's last token, and the cache with the tokens' keys and values.

    tokens: int32 [B, n], of which row b has ``lengths[b]`` (at least 1; default n) and the rest is padding. starts:
    int32 [B], tokens of the row that the cache holds already (default 0: a new sequence).
    """
    check_params(params, spec)
    tokens = check_tokens(tokens)
    rows, width = tokens.shape
    _check_cache(cache, rows)
    if lengths is not None:
        lengths = row_values("lengths", lengths, rows, 1, min(width, cache.length))
    if starts is not None:
        starts = row_values("starts", starts, rows, 0, cache.length - 1)
    logits, cache = _prefill(params, tokens, cache, spec, lengths, starts, env_or_default(env))
    return logits.T, cache


def decode(
    params: DecoderParams,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    *,
    spec: DecoderSpec,
    env: Env | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits float32 [B, V] after one more token a row: tokens and their positions int32 [B]."""
    check_params(params, spec)
    rows = cache.tables.shape[0]
    tokens = row_values("tokens", tokens, rows, 0, spec.vocab - 1)
    positions = row_values("positions", positions, rows, 0, cache.length - 1)
    logits, cache = _decode(params, tokens, positions, cache, spec, env_or_default(env))
    return logits.T, cache


def _check_cache(cache: Cache, rows: int) -> None:
    if cache.tables.shape[0] != rows:
        raise ValueError(f"cache: is for {cache.tables.shape[0]} sequences, but there are {rows} rows of tokens")


class Generated(NamedTuple):
    tokens: jax.Array  # int32 [B, max_new_tokens], ``pad_id`` behind the end
    lengths: jax.Array  # int32 [B], the stop token included
    logprobs: jax.Array  # float32 [B, max_new_tokens], raw; 0 behind the end


def generate(
    params: DecoderParams,
    tokens: jax.Array,
    key: jax.Array,
    *,
    spec: DecoderSpec,
    max_new_tokens: int,
    lengths: jax.Array | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    sample_index: jax.Array | None = None,
    block_size: int = BLOCK_SIZE,
    env: Env | None = None,
) -> Generated:
    """Answers to a batch of prompts, as one loop that may be jitted; it ends when every row has.

    tokens: int32 [B, n], row b's prompt in its first ``lengths[b]`` places (default n). key, temperature, filters and
    sample_index as of ``sample``: with the seeds of engine requests the tokens are the engine's. A row ends with the
    first token of ``stop_ids``. All but arrays is static. Raises ``ValueError`` where prompt and answer are longer
    than ``spec.max_len``.
    """
    check_params(params, spec)
    tokens, env = check_tokens(tokens), env_or_default(env)
    rows, width = tokens.shape
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, must be an integer of at least 1")
    if width + max_new_tokens > spec.max_len:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens}, which after {width} prompt tokens is more than the model's length "
            f"({spec.max_len})"
        )
    rule, keys = rule_of(temperature, top_k, top_p, min_p), row_seeds(key, rows)
    lengths = jnp.full(rows, width, jnp.int32) if lengths is None else row_values("lengths", lengths, rows, 1, width)
    stops = jnp.asarray(list(stop_ids), jnp.int32)
    cache = make_cache(spec, rows, width + max_new_tokens - 1, params.embed.dtype.name, block_size=block_size)
    share = Share(env.vocab_axis, spec.vocab)

    def choose(logits: jax.Array, positions: jax.Array) -> Sampled:
        return draw(logits, rule, keys, positions, sample_index, share, env)

    def put(column: jax.Array, drawn: Sampled, done: jax.Array, so_far: Generated) -> tuple[jax.Array, Generated]:
        """Writes what rows that go on have drawn; also gives those that have ended now."""
        new = jnp.where(done, jnp.int32(pad_id), drawn.tokens), jnp.where(done, 0.0, drawn.logprobs)
        before = so_far.tokens, so_far.logprobs
        texts = [lax.dynamic_update_slice_in_dim(a, x[:, None], column, 1) for a, x in zip(before, new, strict=True)]
        out = Generated(texts[0], jnp.where(done, so_far.lengths, column + 1), texts[1])
        return done | (drawn.tokens[:, None] == stops[None, :]).any(axis=1), out

    empty = Generated(
        jnp.full((rows, max_new_tokens), pad_id, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, max_new_tokens), jnp.float32),
    )
    logits, cache = _prefill(params, tokens, cache, spec, lengths, None, env)
    first = choose(logits, lengths)
    done, out = put(jnp.int32(0), first, jnp.zeros(rows, bool), empty)

    def more(state: tuple[jax.Array, jax.Array, jax.Array, Cache, Generated]) -> jax.Array:
        column, _, done, _, _ = state
        return (column < max_new_tokens) & ~done.all()

    def step(
        state: tuple[jax.Array, jax.Array, jax.Array, Cache, Generated],
    ) -> tuple[jax.Array, jax.Array, jax.Array, Cache, Generated]:
        column, last, done, cache, out = state
        positions = lengths + column - 1
        logits, cache = _decode(params, last, positions, cache, spec, env)
        drawn = choose(logits, positions + 1)
        done, out = put(column, drawn, done, out)
        return column + 1, drawn.tokens, done, cache, out

    return lax.while_loop(more, step, (jnp.int32(1), first.tokens, done, cache, out))[-1]


def _prefill(
    params: DecoderParams,
    tokens: jax.Array,
    cache: Cache,
    spec: DecoderSpec,
    lengths: jax.Array | None,
    starts: jax.Array | None,
    env: Env,
) -> tuple[jax.Array, Cache]:
    """As ``prefill``; logits are [V, B]. The rows' tokens lie one after the other, as in a step of the engine."""
    rows, width = tokens.shape
    lengths = jnp.full(rows, width, jnp.int32) if lengths is None else lengths
    starts = jnp.zeros(rows, jnp.int32) if starts is None else starts
    ends = jnp.cumsum(lengths)
    begins, total = ends - lengths, ends[-1]
    index = jnp.arange(rows * width, dtype=jnp.int32)
    real = index < total
    row = jnp.where(real, jnp.searchsorted(ends, index, side="right").astype(jnp.int32), 0)
    offset = jnp.where(real, index - begins[row], 0)
    batch = Batch(
        token_ids=jnp.where(real, tokens[row, offset], 0),
        positions=jnp.where(real, starts[row] + offset, 0),
        token_rows=row,
        block_tables=_tables(cache),
        query_starts=begins,
        query_lens=lengths,
        context_lens=starts + lengths,
        logit_tokens=ends - 1,
        num_decode=jnp.int32(0),
        num_rows=jnp.int32(rows),
        num_tokens=total,
    )
    return _forward(params, spec, cache, batch, env)


def _decode(
    params: DecoderParams, tokens: jax.Array, positions: jax.Array, cache: Cache, spec: DecoderSpec, env: Env
) -> tuple[jax.Array, Cache]:
    """As ``decode``; logits are [V, B]."""
    rows = tokens.shape[0]
    index, count = jnp.arange(rows, dtype=jnp.int32), jnp.int32(rows)
    batch = Batch(
        token_ids=tokens,
        positions=positions,
        token_rows=index,
        block_tables=_tables(cache),
        query_starts=index,
        query_lens=jnp.ones(rows, jnp.int32),
        context_lens=positions + 1,
        logit_tokens=index,
        num_decode=count,
        num_rows=count,
        num_tokens=count,
    )
    return _forward(params, spec, cache, batch, env)


def _tables(cache: Cache) -> jax.Array:
    return jnp.broadcast_to(cache.tables, (len(cache.pools), *cache.tables.shape))


def _forward(params: DecoderParams, spec: DecoderSpec, cache: Cache, batch: Batch, env: Env) -> tuple[jax.Array, Cache]:
    rows = batch.logit_tokens.shape[0]
    if env.tile is not None:
        batch = _for_tiles(batch, env)
    hidden, pools = decoder.forward(params, spec, cache.pools, batch, env)
    logits = head_of_rows(params, spec, hidden[:, batch.logit_tokens], batch.num_rows, env)[:, :rows]
    return logits if env.vocab_axis else logits[: spec.vocab], Cache(pools, cache.tables)


def _for_tiles(batch: Batch, env: Env) -> Batch:
    """The same with room for whole tiles, and numbers of tokens and rows that XLA does not know."""
    zero = unknown_zero(batch.positions)
    width, rows = tiled_width(batch.token_ids.shape[0], env), tiled_width(batch.logit_tokens.shape[0], env)
    return batch.replace(  # type: ignore[attr-defined, no-any-return]
        token_ids=padded(batch.token_ids, width),
        positions=padded(batch.positions, width),
        token_rows=padded(batch.token_rows, width),
        logit_tokens=padded(batch.logit_tokens, rows),
        num_rows=batch.num_rows + zero,
        num_tokens=batch.num_tokens + zero,
    )
