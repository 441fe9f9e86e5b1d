"""Ragged batches over a paged pool, and attention over them in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

# compiler options: LLVM would take most of the time of a case, code in several modules a sixth, and what XLA:CPU does
# by MLIR another quarter (from jax 0.11 on there is no choice)
UNOPTIMISED: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
if jax.__version_info__ < (0, 11):
    UNOPTIMISED["xla_cpu_use_fusion_emitters"] = False


@dataclass
class Ragged:
    """``arrays``: the arguments of paged_attention that describe the batch; ``expected``: float64 [T, N, H].

    ``real``: bool [T], tokens of prefill rows; the others of ``expected`` are zero unless they are decode rows.
    """

    q: np.ndarray
    pool: np.ndarray
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    expected: np.ndarray
    prefill: np.ndarray


def dense(q, keys, values, positions, *, scale, window=None, soft_cap=None, sinks=None, alibi=None):
    """q [n, N, H], keys and values [c, K, H] of one sequence -> [n, N, H], all float64."""
    group = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
    x = np.einsum("qnh,cnh->nqc", q, keys) * scale
    if soft_cap is not None:
        x = soft_cap * np.tanh(x / soft_cap)
    distance = np.arange(len(keys))[None] - positions[:, None]
    if alibi is not None:
        x = x + alibi.astype(np.float64)[:, None, None] * distance
    seen = distance <= 0
    if window is not None:
        seen &= distance > -window
    x = np.where(seen[None], x, -np.inf)
    if sinks is not None:
        x = np.concatenate([x, np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*x.shape[:2], 1))], -1)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("nqc,cnh->qnh", p[..., : len(keys)], values)


def stored(rng, shape, dtype):
    """Random numbers as a pool of this dtype holds them, scales [shape[:-1]] or None, and the float64 they mean."""
    if dtype == "int8":
        x = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        x = rng.normal(size=shape).astype(np.float32).astype(_numpy(dtype))
    if np.dtype(_numpy(dtype)).itemsize > 1:
        return x, None, x.astype(np.float64)
    scales = (rng.uniform(0.5, 1.5, shape[:-1]) * (0.01 if dtype == "int8" else 1)).astype(np.float32)
    return x, scales, x.astype(np.float64) * scales[..., None]


def _numpy(dtype):
    return getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)


def unused(rng, shape, dtype):
    """What must never show: NaN, and random bytes where there is none."""
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    return np.full(shape, np.nan, _numpy(dtype))


def make(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],  # tokens before the step, tokens in it; decode rows first
    *,
    num_decode: int,
    group: int,
    kv_heads: int = 2,
    dim: int,
    block: int,
    tokens: int,
    max_rows: int,
    width: int,
    q_dtype: str = "float32",
    kv_dtype: str = "float32",
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
) -> Ragged:
    """Blocks in random order; those that lie wholly behind a row's window are freed, as the engine does it."""
    heads, layer, layers = group * kv_heads, 1, 2
    num_blocks = 2 + sum(-(-(before + new) // block) for before, new in rows)
    free = list(1 + rng.permutation(num_blocks - 1))
    pool = unused(rng, (layers, 2, num_blocks, kv_heads, block, dim), kv_dtype)
    scales = np.full(pool.shape[:-1], np.nan, np.float32) if pool.dtype.itemsize == 1 else None
    q = rng.normal(size=(tokens, heads, dim)).astype(np.float32).astype(_numpy(q_dtype))
    options: dict[str, Any] = {"scale": dim**-0.5, "window": window, "soft_cap": soft_cap}
    options["sinks"] = rng.normal(size=heads).astype(np.float32) if sinks else None
    options["alibi"] = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32) if alibi else None
    tables = np.zeros((max_rows, width), np.int32)
    starts, lens, contexts = (np.zeros(max_rows, np.int32) for _ in range(3))
    token_rows, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    expected, prefill, at = np.zeros((tokens, heads, dim)), np.zeros(tokens, bool), 0
    for r, (before, new) in enumerate(rows):
        total, span = before + new, slice(at, at + new)
        kv, kv_scales, exact = stored(rng, (2, total, kv_heads, dim), kv_dtype)
        first = 0 if window is None else max(0, before - window + 1) // block
        for column in range(first, -(-total // block)):
            tables[r, column] = free.pop()
            for p in range(column * block, min(total, (column + 1) * block)):
                pool[layer, :, tables[r, column], :, p % block] = kv[:, p]
                if scales is not None:
                    scales[layer, :, tables[r, column], :, p % block] = kv_scales[:, p]
        starts[r], lens[r], contexts[r] = at, new, total
        token_rows[span], positions[span] = r, np.arange(before, total)
        if new:
            expected[span] = dense(q[span].astype(np.float64), *exact, positions[span], **options)
        prefill[span] = r >= num_decode
        at += new
    arrays = {
        "block_tables": tables,
        "token_rows": token_rows,
        "positions": positions,
        "query_starts": starts,
        "query_lens": lens,
        "context_lens": contexts,
        "num_decode": np.int32(num_decode),
        "num_rows": np.int32(len(rows)),
        "num_tokens": np.int32(at),
        "layer": np.int32(layer),
    }
    options["kv_scales"] = scales
    return Ragged(q, pool, {k: jnp.asarray(v) for k, v in arrays.items()}, options, expected, prefill)


def tolerance(q_dtype: str) -> float:
    """Absolute, for values near 1: the weights are rounded to the queries' dtype before they meet V."""
    return {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[q_dtype]
