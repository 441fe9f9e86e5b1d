"""Paged attention at the shape of Llama-3.1-8B: bytes per second of decode, FLOP per second of prefill."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_parts.inputs import Rows, ragged, tables
from benchmarks.gpu_parts.session import Session, bind, compiled, randoms
from pallas_kernels.paged_attention import paged_attention

BLOCK = 16
REPEATS = 8  # calls in one program, each over other blocks: launches overlap, and the cache does not help


def shape(s: Session) -> tuple[int, int, int]:
    """N, K, H"""
    return s.pick((32, 8, 128), (4, 2, 64))


def chain(s: Session, dim: int) -> Any:
    """Attention after attention, each on the last one's result as in a model: none can be left out or run early."""

    def run(q: jax.Array, pool: jax.Array, scales: Any, tables: list[jax.Array], batch: dict[str, Any], layer: Any):
        for table in tables:
            q = paged_attention(
                q,
                pool,
                layer=layer,
                block_tables=table,
                scale=dim**-0.5,
                kv_scales=scales,
                target=s.target,
                **batch,
            )
        return q

    return run


def make_tables(s: Session, rows: Rows, width: int, blocks: int, num_rows: int) -> list[jax.Array]:
    repeats = s.pick(REPEATS, 1)
    made = [tables(rows, num_rows=num_rows, width=width, block=BLOCK, blocks=blocks, turn=i) for i in range(repeats)]
    return [jnp.asarray(table) for table in made]


def decode(s: Session) -> dict[str, Any]:
    """Each batch size is one program for all contexts, as in an engine that serves up to the longest."""
    contexts = s.pick([512, 2048, 8192, 32768], [32, 64])
    # in the order of worth: what the bar is about, then the corners
    batches = s.pick([16, 64, 1, 128, 4], [1, 2])
    _decode(s, "bfloat16", batches, contexts)
    for kv in ["int8", "float8_e4m3fn"] if s.target.has_fp8 else ["int8"]:
        _decode(s, kv, s.pick([64], [2]), s.pick([512, 8192], [32]))
    return {}


def _decode(s: Session, kv: str, batches: list[int], contexts: list[int]) -> None:
    heads, kv_heads, dim = shape(s)
    size = jnp.dtype(kv).itemsize
    per_token = 2 * kv_heads * (dim * size + (4 if size == 1 else 0))
    most = max(batches) * max(contexts) // BLOCK + 1
    blocks = min(most, int(0.45 * s.memory) // (per_token * BLOCK))
    if size == 1:  # the kernels refuse pools of 2 to 4 GiB
        blocks = min(blocks, 2**31 // (2 * kv_heads * dim * BLOCK))
    pool = randoms((1, 2, blocks, kv_heads, BLOCK, dim), kv)
    scales = jnp.full(pool.shape[:-1], 0.01, jnp.float32) if size == 1 else None
    x = randoms((s.pick(2**28, 2**16),), jnp.bfloat16)
    copy = bind(compiled(lambda x: x + jnp.bfloat16(1), x), x)
    width, layer = max(contexts) // BLOCK, jnp.int32(0)
    for batch in s.cases(batches, lambda b: f"decode {kv} batch {b}"):
        with s.attempt(f"decode {kv} batch {batch}"):
            q = randoms((batch, heads, dim), jnp.bfloat16)
            executable = None
            for context in contexts:
                if batch * context > (blocks - 1) * BLOCK:
                    s.skipped.append(f"decode {kv} batch {batch} context {context}: the pool would not fit")
                    continue
                rows = [(1, context)] * batch
                args = (
                    q,
                    pool,
                    scales,
                    make_tables(s, rows, width, blocks, batch),
                    ragged(rows, num_tokens=batch, num_rows=batch),
                    layer,
                )
                executable = executable or compiled(chain(s, dim), *args)
                times = s.race({"attention": bind(executable, *args), "copy": copy})
                seconds = times["attention"] / len(args[3])
                rate = batch * context * per_token / seconds
                s.add(
                    kv=kv,
                    batch=batch,
                    context=context,
                    us=seconds * 1e6,
                    gb_s=rate / 1e9,
                    of_copy=rate / (4 * x.size / times["copy"]),
                )


def prefill(s: Session) -> dict[str, Any]:
    heads, kv_heads, dim = shape(s)
    chunks: list[tuple[str, Rows]] = s.pick(
        [
            ("2048 tokens", [(2048, 2048)]),
            ("8192 tokens", [(8192, 8192)]),
            ("2048 tokens after 14336", [(2048, 16384)]),
            ("4 x 512 tokens", [(512, 512)] * 4),
            ("63 decode rows of 2048, 1985 tokens", [(1, 2048)] * 63 + [(1985, 1985)]),
        ],
        [("24 tokens", [(24, 24)]), ("1 decode row of 40, 20 tokens", [(1, 40), (20, 30)])],
    )
    width = s.pick(1024, 4)
    blocks = s.pick(64 * 1024 + 1, 64)
    pool, layer = randoms((1, 2, blocks, kv_heads, BLOCK, dim), jnp.bfloat16), jnp.int32(0)
    for name, rows in s.cases(chunks, lambda c: c[0]):
        with s.attempt(name):
            tokens = sum(n for n, _ in rows)
            tokens += -tokens % s.pick(256, 32)
            slots = 1 if len(rows) == 1 else 64 if not s.small else 2
            q = randoms((tokens, heads, dim), jnp.bfloat16)
            args = (
                q,
                pool,
                None,
                make_tables(s, rows, width, blocks, slots),
                ragged(rows, num_tokens=tokens, num_rows=slots),
                layer,
            )
            seconds = s.seconds(bind(compiled(chain(s, dim), *args), *args)) / len(args[3])
            pairs = sum(n * context - n * (n - 1) // 2 for n, context in rows)
            s.add(case=name, us=seconds * 1e6, **_flops(s, 4 * heads * dim * pairs / seconds))
    if not s.target.interpret:
        _cudnn(s, 2048, heads, kv_heads, dim)
    return {}


def _cudnn(s: Session, tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    """What NVIDIA's own kernel makes of a whole prompt whose keys lie in one piece."""
    with s.attempt("cuDNN"):
        q = randoms((1, tokens, heads, dim), jnp.bfloat16)
        k, v = (randoms((1, tokens, kv_heads, dim), jnp.bfloat16, i) for i in (1, 2))

        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for _ in range(REPEATS):
                q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            return q

        seconds = s.seconds(bind(compiled(run, q, k, v), q, k, v)) / REPEATS
        pairs = tokens * (tokens + 1) // 2
        s.add(
            case=f"cuDNN, {tokens} tokens, no pages", us=seconds * 1e6, **_flops(s, 4 * heads * dim * pairs / seconds)
        )


def _flops(s: Session, rate: float) -> dict[str, float]:
    return {"tflop_s": rate / 1e12, "of_matmul": rate / s.peaks["bfloat16"] if "bfloat16" in s.peaks else 0.0}
