"""Matrix products whose rows use different matrices: experts of a mixture, adapters of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.groups import Groups, default_block_rows, max_blocks
from pallas_kernels.grouped_matmul.stack import KINDS, QuantStack
from pallas_kernels.platform import CPU, Backend, Target

__all__ = [
    "Groups",
    "QuantStack",
    "choose",
    "choose_packed",
    "combine",
    "default_block_rows",
    "group_rows",
    "grouped_lora",
    "grouped_matmul",
    "max_blocks",
    "route",
]


def route(
    logits: jax.Array,  # float32 [T, E]
    num_tokens: jax.Array,  # int32 []  later tokens are padding: they join no group
    *,
    top_k: int,
    normalise: bool,  # divide a token's weights by their sum
    block_rows: int,
    first: int | jax.Array = 0,  # the experts [first, first + count) are here, the others' rows are left out
    count: int | None = None,  # None: all
    target: Target = CPU,
    backend: Backend = "auto",
) -> tuple[jax.Array, Groups]:
    """Softmax over the experts, the ``top_k`` best of each token (of equals the first), and the rows of each expert.

    Returns the weights float32 [T, k] and the groups; group g is expert ``first + g``.
    """
    return _ROUTE[choose(target=target, backend=backend)](
        logits,
        num_tokens,
        jnp.asarray(first, jnp.int32),
        top_k=top_k,
        normalise=normalise,
        groups=logits.shape[1] if count is None else count,
        block_rows=block_rows,
        target=target,
    )


def group_rows(
    ids: jax.Array,  # int32 [T, k]  a token's ids differ; -1 (or any outside [0, groups)): no group
    *,
    groups: int,
    block_rows: int,
    target: Target = CPU,
    backend: Backend = "auto",
) -> Groups:
    """The rows of each group from known ids, such as the adapters of a batch (k = 1)."""
    return _GROUP_ROWS[choose(target=target, backend=backend)](ids, groups=groups, block_rows=block_rows, target=target)


def grouped_matmul(
    x: jax.Array,  # [T, K], or [M, K] with sorted_rows
    w: jax.Array | QuantStack,  # [G, N, K]; with an activation [G, 2, N, K]: gate, up
    groups: Groups,
    *,
    scale: jax.Array | None = None,  # [G, N] or [G, 2, N]  factors of w's rows, where w is int8 or float8_e4m3fn
    activation: str | None = None,  # silu, gelu, gelu_tanh, relu: the result is act(gate) * up
    sorted_rows: bool = False,  # x has a row for each of the M rows, not for each token
    target: Target = CPU,
    backend: Backend = "auto",
) -> jax.Array:
    """Row m of the result [M, N], in x's dtype: ``w[g] @ x[groups.rows[m]]``, g the group of m's block.

    Accumulated, scaled and activated in float32. Rows that no token has are undefined. ``NotImplementedError`` for what
    the target or the chosen body cannot do.
    """
    if isinstance(w, QuantStack):
        if scale is not None:
            raise ValueError("scale: a QuantStack has its own")
        body = choose_packed(w, x.dtype, groups.block_rows, target=target, backend=backend)
        return _PACKED[body](x, w, groups, activation=activation, sorted_rows=sorted_rows, target=target)
    body = choose(w.shape, w.dtype, x.dtype, groups.block_rows, target=target, backend=backend)
    return _MATMUL[body](x, w, groups, scale=scale, activation=activation, sorted_rows=sorted_rows, target=target)


def grouped_lora(
    x: jax.Array,  # [T, K]
    a: jax.Array,  # [A, R, K]
    b: jax.Array,  # [A, N, R]  alpha / rank already multiplied in
    groups: Groups,  # of each token's adapter, as group_rows makes them
    *,
    target: Target = CPU,
    backend: Backend = "auto",
) -> jax.Array:
    """``b[i] @ a[i] @ x[t]`` with i the adapter of token t -> [T, N] in x's dtype; 0 for tokens without one.

    Any rank R: below 16 the tile is padded. Source: LoRA (Hu et al., 2021), many adapters in a batch.
    """
    how: Any = {"target": target, "backend": backend}
    low = grouped_matmul(x, a, groups, **how)
    return combine(grouped_matmul(low, b, groups, sorted_rows=True, **how), None, groups)


def combine(y: jax.Array, weights: jax.Array | None, groups: Groups) -> jax.Array:
    """y [M, D], weights float32 [T, k] (None: 1) -> [T, D] in y's dtype: each token's rows, weighted, added in float32;
    0 for a token in no group."""
    rows = jnp.take(y, groups.slots, axis=0, mode="clip").astype(jnp.float32)  # [T, k, D]
    if weights is not None:
        rows = rows * weights[..., None]
    # undefined rows may hold NaN, which a weight of zero would not stop
    return jnp.where(groups.slots[..., None] >= 0, rows, jnp.float32(0)).sum(1).astype(y.dtype)


FLOATS = ("bfloat16", "float16", "float32")
ONE_BYTE = ("int8", "float8_e4m3fn")
LEAST_RUN = 32


def choose(
    w_shape: tuple[int, ...] = (),
    w_dtype: Any = "bfloat16",
    x_dtype: Any = "bfloat16",
    block_rows: int = 16,
    *,
    target: Target = CPU,
    backend: Backend = "auto",
) -> str:
    """The body of a case, "xla" or "triton"; ``NotImplementedError`` where there is none."""
    w_name, x_name = jnp.dtype(w_dtype).name, jnp.dtype(x_dtype).name
    if w_name not in FLOATS + ONE_BYTE or x_name not in FLOATS or (w_name in FLOATS and w_name != x_name):
        raise NotImplementedError(f"grouped_matmul of {x_name} rows with {w_name} matrices")
    if w_name == "float8_e4m3fn" and target.platform == "cuda" and not target.has_fp8:
        raise NotImplementedError(
            f"fp8 matrices need compute capability 8.9, the card has {_dotted(target)}: convert them to int8 at load"
        )
    if backend == "auto":
        backend = "triton" if target.runs_pallas else "xla"
    if backend not in _MATMUL:
        raise NotImplementedError(f"grouped_matmul has no {backend} body")
    if backend == "triton":
        _check_triton(w_shape, w_name, block_rows, target)
    return backend


def choose_packed(
    w: QuantStack, x_dtype: Any = "bfloat16", block_rows: int = 16, *, target: Target = CPU, backend: Backend = "auto"
) -> str:
    """``choose`` for matrices of few bits whose scales come by runs of input features."""
    if w.kind not in KINDS or jnp.dtype(x_dtype).name not in FLOATS:
        raise NotImplementedError(f"grouped_matmul of {jnp.dtype(x_dtype).name} rows with {w.kind} matrices")
    body = choose(
        w.values.shape,
        "float8_e4m3fn" if w.kind == "fp8_group" else "int8",
        x_dtype,
        block_rows,
        target=target,
        backend=backend,
    )
    if body == "triton" and w.run < LEAST_RUN:
        raise NotImplementedError(f"runs of {w.run}: tensor cores take 16 rows, so {LEAST_RUN} is the shortest run")
    return body


def _check_triton(w_shape: tuple[int, ...], w_name: str, block_rows: int, target: Target) -> None:
    if not target.runs_pallas:
        raise NotImplementedError(f"Triton bodies run on compute capability 8.0 and above, not on {_dotted(target)}")
    if block_rows < 16 or block_rows & (block_rows - 1):
        raise NotImplementedError(f"blocks of {block_rows} rows: tensor cores take a power of two of at least 16")
    size = 1
    for n in w_shape:
        size *= n
    # Pallas-Triton counts elements in 32 bits up to 2**32 bytes
    if w_name in ONE_BYTE and 2**31 <= size <= 2**32:
        raise NotImplementedError(f"a {w_name} array of {size} elements: offsets overflow between 2 and 4 GiB")


def _dotted(target: Target) -> str:
    return f"{target.platform} {target.capability[0]}.{target.capability[1]}"


def _xla(name: str) -> Callable[..., Any]:
    def body(*args: Any, target: Target, **how: Any) -> Any:
        from pallas_kernels.grouped_matmul import reference

        return getattr(reference, name)(*args, **how)

    return body


def _triton(module: str, name: str) -> Callable[..., Any]:
    def body(*args: Any, **how: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(f"pallas_kernels.grouped_matmul.{module}"), name)(*args, **how)

    return body


_ROUTE = {"xla": _xla("route_xla"), "triton": _triton("routing", "route_triton")}
_GROUP_ROWS = {"xla": _xla("group_rows_xla"), "triton": _triton("routing", "group_rows_triton")}
_MATMUL = {"xla": _xla("grouped_matmul_xla"), "triton": _triton("triton", "grouped_matmul_triton")}
_PACKED = {"xla": _xla("grouped_matmul_packed_xla"), "triton": _triton("packed", "grouped_matmul_packed")}
