"""XLA form of quant_matmul: exact products, accumulated in float32.

Per output channel this is also the form for a GPU: the cast of int8 and fp8 fuses into the GEMM and the scale into its
epilogue. Groups and blocks are dequantised first, which a GPU would do in memory on every call: the kernel's job.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quant_matmul.weight import FP8_BLOCK, QuantWeight

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)  # by nibble: a sign, 2 bits of exponent, one more


def quant_matmul_xla(x: jax.Array, w: QuantWeight, *, out_dtype: Any) -> jax.Array:
    """x [T, K], w of [K, N] -> [T, N]; the arithmetic of ``quant_matmul``."""
    if w.kind in ("int8", "fp8"):
        # int8 and e4m3 fit bfloat16's and float16's significand: the cast loses nothing
        y = _dot(x, w.values.astype(x.dtype)) * w.scale.astype(jnp.float32)[None]
        return y.astype(out_dtype)
    return _dot(x.astype(jnp.float32), dequantised(w)).astype(out_dtype)


def dequantised(w: QuantWeight) -> jax.Array:
    """float32 [K, N]; ``w`` has its scales by groups or blocks."""
    return {"int4": _grouped, "mxfp4": _grouped, "fp8_block": _blocks}.get(w.kind, _runs)(w)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot(x, w, precision=precision, preferred_element_type=jnp.float32)


def _grouped(w: QuantWeight) -> jax.Array:
    (k, n), group = w.shape, w.group
    packed = w.values.reshape(k // group, group // 2, n)
    nibbles = jnp.concatenate([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=1)
    if w.kind == "mxfp4":
        scale = lax.bitcast_convert_type(w.scale.astype(jnp.int32) << 23, jnp.float32)
        return (jnp.asarray(E2M1)[nibbles] * scale[:, None]).reshape(k, n)
    nibbles = nibbles.astype(jnp.float32)
    zero = jnp.float32(8) if w.zero is None else w.zero.astype(jnp.float32)[:, None]
    return ((nibbles - zero) * w.scale.astype(jnp.float32)[:, None]).reshape(k, n)


def _runs(w: QuantWeight) -> jax.Array:
    k, n = w.shape
    values = w.values.astype(jnp.float32).reshape(k // w.group, w.group, n)
    return (values * w.scale.astype(jnp.float32)[:, None]).reshape(k, n)


def _blocks(w: QuantWeight) -> jax.Array:
    k, n = w.shape
    spread = jnp.repeat(jnp.repeat(w.scale.astype(jnp.float32), FP8_BLOCK, 0), FP8_BLOCK, 1)
    return w.values.astype(jnp.float32) * spread[:k, :n]
