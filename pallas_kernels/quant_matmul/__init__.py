"""Products with quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.platform import CPU, Backend, Target
from pallas_kernels.quant_matmul.reference import quant_matmul_xla
from pallas_kernels.quant_matmul.weight import (
    Kind,
    QuantWeight,
    pack_int4,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)

__all__ = [
    "QuantWeight",
    "choose",
    "pack_int4",
    "quant_matmul",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
    "unpack_int4",
]


_IN_GROUPS = ("int4", "mxfp4", "int8_group", "fp8_group", "fp8_block")


def quant_matmul(
    x: jax.Array,  # [T, K]  bfloat16, float16 or float32
    w: QuantWeight,  # of [K, N]
    *,
    out_dtype: Any,
    target: Target = CPU,
    backend: Backend = "auto",
) -> jax.Array:
    """``x @ dequantised(w)`` -> [T, N] in out_dtype: values enter exactly, sums and scales are float32.

    Raises ``NotImplementedError`` for what the target or the chosen body cannot do, ``ValueError`` for shapes that do
    not fit each other.
    """
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"x is {x.shape}, the weight {w.shape}")
    return _BODIES[choose(w.kind, w.group, x.dtype, target, backend)](x, w, out_dtype=out_dtype, target=target)


def choose(kind: Kind, group: int, x_dtype: Any, target: Target, backend: Backend = "auto") -> str:
    """The body of a case: "xla" or "triton". ``NotImplementedError`` where there is none.

    On a card "auto" is Triton for groups and blocks, where XLA would write the widened weight to memory on every call,
    and XLA for scales per output channel, which its GEMM takes in.
    """
    if kind in ("fp8", "fp8_group", "fp8_block") and target.platform == "cuda" and not target.has_fp8:
        raise NotImplementedError(
            f"fp8 weights need compute capability 8.9, the card has {_dotted(target)}: convert them to int8 at load"
        )
    if backend == "auto":
        backend = "triton" if target.runs_pallas and kind in _IN_GROUPS else "xla"
        if backend == "triton" and kind in _IN_GROUPS and group < 32:
            backend = "xla"
    if backend not in _BODIES:
        raise NotImplementedError(f"quant_matmul has no {backend} body")
    if backend == "triton":
        _check_triton(kind, group, x_dtype, target)
    return backend


def _check_triton(kind: Kind, group: int, x_dtype: Any, target: Target) -> None:
    if not target.runs_pallas:
        raise NotImplementedError(f"Triton bodies run on compute capability 8.0 and above, not on {_dotted(target)}")
    if kind in _IN_GROUPS and group < 32:
        raise NotImplementedError(f"groups of {group}: tensor cores take 16 rows, so 32 is the smallest group")
    if jnp.dtype(x_dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")):
        raise NotImplementedError(f"activations of {jnp.dtype(x_dtype).name}")


def _dotted(target: Target) -> str:
    return f"{target.platform} {target.capability[0]}.{target.capability[1]}"


def _xla(x: jax.Array, w: QuantWeight, *, out_dtype: Any, target: Target) -> jax.Array:
    return quant_matmul_xla(x, w, out_dtype=out_dtype)


def _triton(x: jax.Array, w: QuantWeight, *, out_dtype: Any, target: Target) -> jax.Array:
    from pallas_kernels.quant_matmul.triton import quant_matmul_triton

    return quant_matmul_triton(x, w, out_dtype=out_dtype, target=target)


_BODIES: dict[str, Callable[..., jax.Array]] = {"xla": _xla, "triton": _triton}
