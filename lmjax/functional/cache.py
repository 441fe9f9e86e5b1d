"""A paged pool of its own for a fixed batch: row b has the blocks 1 + b P .. (b + 1) P of every KV group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from lmjax.models import decoder
from lmjax.models.params import DecoderParams
from lmjax.models.spec import DecoderSpec
from lmjax.nn.batch import Batch
from lmjax.nn.env import ALONE, Env
from lmjax.nn.tiles import least_width
from pallas_kernels.platform import device_target

BLOCK_SIZE = 16


@struct.dataclass
class Cache:
    pools: tuple[jax.Array, ...]  # one a KV group, [layers, 2, 1 + rows * P, K, B, H]
    tables: jax.Array  # int32 [rows, P]

    @property
    def length(self) -> int:
        """Tokens that a row has room for."""
        return self.tables.shape[1] * self.pools[0].shape[4]


def make_cache(
    spec: DecoderSpec, rows: int, length: int, dtype: str = "float32", *, block_size: int = BLOCK_SIZE
) -> Cache:
    """An empty cache for ``rows`` sequences of up to ``length`` tokens. dtype: that of the parameters."""
    columns = -(-length // block_size)
    pools = tuple(
        jnp.zeros(decoder.pool_shape(kv, 1 + rows * columns, block_size), jnp.dtype(kv.dtype))
        for kv in decoder.kv_specs(spec, dtype)
    )
    return Cache(pools, own_blocks(rows, columns))


def own_blocks(rows: int, columns: int) -> jax.Array:
    """int32 [rows, columns]: block 0 is the null block, the others go to the rows in turn."""
    return 1 + jnp.arange(rows * columns, dtype=jnp.int32).reshape(rows, columns)


def env_or_default(env: Env | None) -> Env:
    """None: one device of the kind that JAX computes on."""
    if env is not None:
        return env
    target = device_target(jax.devices()[0])
    return ALONE if target == ALONE.target else Env(target)


def check_tokens(tokens: jax.Array) -> jax.Array:
    """int32 [B, n], or ``ValueError``."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens: got {tokens.dtype}{list(tokens.shape)}, must be integers [B, n] with B and n of at least 1"
        )
    return tokens.astype(jnp.int32)


def check_params(params: DecoderParams, spec: DecoderSpec) -> None:
    """Raises ``TypeError`` or ``ValueError`` for what is no tree of ``spec``."""
    if not isinstance(params, DecoderParams):
        raise TypeError(
            f"params: got a {type(params).__name__}, must be a DecoderParams as LLM.params; "
            "LLM(params=...) and lmjax.weights.pytree.from_hf make it of other trees"
        )
    if len(params.layers) != len(spec.layers):
        raise ValueError(f"params: have {len(params.layers)} layers, spec has {len(spec.layers)}")


def row_values(name: str, values: Any, rows: int, low: int, high: int) -> jax.Array:
    """int32 [rows]. Raises ``ValueError`` for another shape or type and, where they are known (not while they are
    traced), for numbers outside low .. high."""
    array = jnp.asarray(values)
    if array.shape != (rows,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, must be integers [{rows}]")
    if not isinstance(array, jax.core.Tracer):
        wrong = [int(x) for x in np.asarray(array) if not low <= x <= high]
        if wrong:
            raise ValueError(f"{name}: got {wrong[0]}, must be {low} to {high}")
    return array.astype(jnp.int32)


def tiled_width(tokens: int, env: Env) -> int:
    """Columns of a batch of ``tokens``, with ``env.tile``."""
    assert env.tile is not None
    return max(-(-tokens // env.tile) * env.tile, least_width(env.target))


def whole_rows(tokens: jax.Array, tables: jax.Array, groups: int, width: int, num: jax.Array) -> Batch:
    """tokens int32 [B, n] as one batch of prompts from their first token on, one row after the other, and padding up
    to ``width`` tokens. tables: int32 [B, P], for each of ``groups``; num: int32 [], B * n."""
    rows, length = tokens.shape
    row, ones = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.int32)
    return Batch(
        token_ids=padded(tokens.reshape(-1), width),
        positions=padded(jnp.tile(jnp.arange(length, dtype=jnp.int32), rows), width),
        token_rows=padded(jnp.repeat(row, length), width),
        block_tables=jnp.broadcast_to(tables, (groups, *tables.shape)),
        query_starts=row * length,
        query_lens=ones * length,
        context_lens=ones * length,
        logit_tokens=row * length + (length - 1),
        num_decode=jnp.int32(0),
        num_rows=jnp.int32(rows),
        num_tokens=num,
    )


def padded(x: jax.Array, width: int) -> jax.Array:
    """[n, ...] -> [width, ...], zeros behind."""
    return jnp.pad(x, ((0, width - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
