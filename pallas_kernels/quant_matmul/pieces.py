"""How a Triton body walks the input features of packed weights, and what the stored numbers of a piece stand for."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.platform import next_power_of_2
from pallas_kernels.quant_matmul.weight import Kind

# Twice the magnitudes of e2m1, the first in the lowest bits: 0, 1, 2, 3, 4, 6, 8, 12
_E2M1 = np.uint32(0xC8643210).view(np.int32)


class Walk(NamedTuple):
    """How K is walked. A piece is what one scale covers within a step."""

    steps: int  # in all
    parts: int  # pieces of a step, unrolled
    rows: int  # of the stored values in a piece: a power of two >= 16, masked down to ``limit``
    span: int  # stored rows from one scale to the next
    pieces: int  # of a span
    exact: bool  # the pieces cover K without a rest


def walk_of(k: int, stored: int, group: int, block_k: int) -> Walk:
    """K numbers in ``stored`` rows, ``group`` of K to a scale; a step takes ``block_k`` of K at most."""
    per_byte = k // stored
    span = group // per_byte
    rows = min(max(16, block_k // per_byte), max(16, next_power_of_2(span)))
    pieces = pl.cdiv(span, rows)
    groups = pl.cdiv(stored, span)
    parts = max(1, block_k // per_byte // rows) if pieces == 1 else 1
    parts = min(parts, groups)
    # a step less full needs no masks
    parts = next((n for n in range(parts, parts // 2, -1) if groups % n == 0), parts)
    steps = pl.cdiv(groups * pieces, parts)
    return Walk(steps, parts, rows, span, pieces, steps * parts * rows == stored)


def nibbles_of(values: jax.Array, kind: Kind, has_zero: bool, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The numbers in the low and in the high nibbles, all exact in bfloat16; of mxfp4 twice what they are."""
    bits = values.astype(jnp.int32)

    def number(nibble: jax.Array) -> jax.Array:
        if kind == "mxfp4":
            twice = (jnp.int32(_E2M1) >> ((nibble & 7) * 4)) & 15
            return jnp.where(nibble > 7, -twice, twice).astype(dtype)
        return (nibble - jnp.int32(0 if has_zero else 8)).astype(dtype)

    return number(bits & 15), number(bits >> 4)


def scale_of(stored: jax.Array, kind: Kind) -> jax.Array:
    """float32 factors of the numbers that ``nibbles_of`` gives. Exponents of 0 count as a factor of zero, not 2^-127:
    float32 has no such normal number."""
    if kind == "mxfp4":
        return lax.bitcast_convert_type(stored.astype(jnp.int32) << 23, jnp.float32) * jnp.float32(0.5)
    return stored.astype(jnp.float32)
