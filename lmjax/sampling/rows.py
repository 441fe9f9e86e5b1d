"""The parameter rows on the device, and each row's two uniform numbers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lmjax.sampling.params import FIELDS, NUM_PARAMS

_DTYPES = {"i": jnp.int32, "f": jnp.float32, "I": jnp.uint32}


class Rows(NamedTuple):
    """Columns of the parameter rows, each [S]; meanings in ``params.FIELDS``."""

    flags: jax.Array
    inv_temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p_gap: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    sample_index: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    prompt_len: jax.Array
    min_until: jax.Array
    num_bias: jax.Array
    num_bad_words: jax.Array
    reserved: jax.Array

    def has(self, flag: int) -> jax.Array:
        """bool [S]"""
        return (self.flags & jnp.int32(flag)) != 0


assert Rows._fields == tuple(name for name, _ in FIELDS)


def unpack_rows(params: jax.Array) -> Rows:
    """int32 [S, NUM_PARAMS] -> columns of their own type."""
    assert params.shape[1] == NUM_PARAMS, params.shape
    columns = (params[:, i] for i in range(NUM_PARAMS))
    return Rows(*(lax.bitcast_convert_type(c, _DTYPES[kind]) for c, (_, kind) in zip(columns, FIELDS, strict=True)))


def uniforms(rows: Rows, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers float32 [S] in [0, 1): functions of (seed, sample index, position) alone, 24 bits each.

    Threefry-2x32 (Salmon et al., 2011) in two steps through ``fold_in``: block (0, sample index) under the seed as
    key, then block (0, position) under the result, whose two words they are. ``fold_in`` does not depend on
    ``jax_threefry_partitionable``.
    """
    fold = jax.vmap(jax.random.fold_in)
    seeds = jnp.stack([rows.seed_high, rows.seed_low], axis=1)
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    words = jax.random.key_data(fold(fold(keys, rows.sample_index), positions))
    first, second = (words >> jnp.uint32(8)).astype(jnp.float32).T * jnp.float32(2.0**-24)
    return first, second
