"""Every kernel on this card against its XLA form, in every type it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_parts.inputs import ragged, tables
from benchmarks.gpu_parts.session import Session, lower, randoms
from pallas_kernels.grouped_matmul import QuantStack, combine, grouped_matmul, route
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quant_matmul import QuantWeight, quant_matmul, quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.quant_matmul.shapes import FORMATS

# largest difference over the largest value: two roundings of the result, and sums in another order
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}


class Case(NamedTuple):
    name: str
    dtype: str  # of the tolerance
    inputs: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]  # (*inputs, target=, backend=) -> arrays to compare


def check(s: Session) -> dict[str, Any]:
    cases = [*_attention(s), *_kv_write(s), *_quant(s), *_grouped(s)]
    size = max(1, s.threads // 2)  # compiled together, two programs each
    groups = [cases[i : i + size] for i in range(0, len(cases), size)]
    for group in s.cases(groups, lambda g: ", ".join(case.name for case in g)):
        _check(s, group)
    return {}


def _check(s: Session, cases: list[Case]) -> None:
    inputs, kernels, references = {}, {}, {}
    for case in cases:
        with s.attempt(case.name):
            inputs[case.name] = case.inputs()
            kernels[case.name] = lower(partial(case.run, target=s.target, backend="triton"), *inputs[case.name])
            with jax.default_matmul_precision("highest"):
                references[case.name] = lower(partial(case.run, target=s.target, backend="xla"), *inputs[case.name])
    found = s.build(kernels)
    wanted = s.build(references, {"xla_gpu_autotune_level": 0})  # not timed
    for case in cases:
        if case.name not in found or case.name not in wanted:
            continue  # recorded as failed
        with s.attempt(case.name):
            error = difference(found[case.name](*inputs[case.name]), wanted[case.name](*inputs[case.name]))
            limit = TOLERANCE[case.dtype]
            s.add(kernel=case.name, error=error, limit=limit)
            if not error <= limit:  # a NaN is a failure too
                s.failed.append(f"{case.name}: off by {error:.3g}, at most {limit} is right")


def difference(found: Any, wanted: Any) -> float:
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if not bool(jnp.isfinite(a).all()):
            return float("nan")
        worst = max(worst, float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-30)))
    return worst


def _floats(s: Session) -> list[str]:
    return s.pick(["bfloat16", "float16", "float32"], ["bfloat16"])


def _one_byte(s: Session) -> list[str]:
    return ["int8", "float8_e4m3fn"] if s.target.has_fp8 else ["int8"]


def _attention(s: Session) -> Iterator[Case]:
    dim, heads, kv_heads, block = s.pick((128, 32, 8, 16), (64, 4, 2, 16))
    tokens, slots, width, blocks = s.pick((256, 8, 256, 400), (32, 4, 4, 8))
    rows = s.pick([(1, 1), (1, 37), (1, 3000), (70, 70), (97, 1290)], [(1, 17), (9, 30)])
    batch = ragged(rows, num_tokens=tokens, num_rows=slots)
    table = jnp.asarray(tables(rows, num_rows=slots, width=width, block=block, blocks=blocks))

    def inputs(kind: str, kv: str) -> tuple[Any, ...]:
        pool, scales = randoms((2, 2, blocks, kv_heads, block, dim), kv, 5), None
        if pool.dtype.itemsize == 1:
            scales = jnp.abs(randoms(pool.shape[:-1], jnp.float32, 6)) * jnp.float32(0.01 if kv == "int8" else 1)
        per_head = jnp.abs(randoms((heads,), jnp.float32, 7))
        return randoms((tokens, heads, dim), kind), pool, scales, table, batch, jnp.int32(1), per_head

    def run(q, pool, scales, table, batch, layer, per_head, *, extra: dict[str, Any], **how: Any) -> jax.Array:
        if "sinks" in extra:
            extra = {"sinks": per_head}
        if "alibi" in extra:
            extra = {"alibi": per_head * jnp.float32(0.01)}
        out = paged_attention(
            q, pool, layer=layer, block_tables=table, scale=dim**-0.5, kv_scales=scales, **batch, **extra, **how
        )
        return out[: sum(n for n, _ in rows)]

    def case(name: str, kind: str, kv: str, **extra: Any) -> Case:
        return Case(f"paged_attention {name}", kind, partial(inputs, kind, kv), partial(run, extra=extra))

    yield from (case(kind, kind, kind) for kind in _floats(s))
    yield from (case(f"bfloat16 over {kv}", "bfloat16", kv) for kv in _one_byte(s))
    if not s.small:
        extras = {"window": 20, "soft_cap": 5.0, "sinks": True, "alibi": True}
        yield from (case(f"bfloat16, {name}", "bfloat16", "bfloat16", **{name: v}) for name, v in extras.items())


def _kv_write(s: Session) -> Iterator[Case]:
    dim, kv_heads, group, block = s.pick((128, 8, 4, 16), (64, 2, 2, 16))
    tokens = s.pick(200, 20)

    def inputs(kind: str, kv: str) -> tuple[Any, ...]:
        pool = jnp.zeros((2, 2, 2 + tokens // block + 1, kv_heads, block, dim), kv)
        scales = jnp.ones(pool.shape[:-1], jnp.float32) if pool.dtype.itemsize == 1 else None
        angle = randoms((dim // 2, tokens), jnp.float32, 3)
        at = jnp.arange(tokens, dtype=jnp.int32) + 16
        qkv = randoms((kv_heads, group + 2, dim, tokens), kind)
        return qkv, pool, scales, jnp.cos(angle), jnp.sin(angle), at // block, at % block, jnp.int32(1)

    def run(qkv, pool, scales, cos, sin, block_ids, offsets, layer, **how: Any) -> Any:
        q, pool, scales = kv_write(
            qkv, pool, cos=cos, sin=sin, layer=layer, block_ids=block_ids, offsets=offsets, kv_scales=scales, **how
        )
        return q, pool.astype(jnp.float32) * (jnp.float32(1) if scales is None else scales[..., None])

    yield from (Case(f"kv_write {kind}", kind, partial(inputs, kind, kind), run) for kind in _floats(s))
    # a value between two steps may fall either way, and a step of e4m3 is a sixteenth of the largest: int8 has finer
    yield Case("kv_write bfloat16 into int8", "bfloat16", partial(inputs, "bfloat16", "int8"), run)


def _quant(s: Session) -> Iterator[Case]:
    k, n = s.pick((2048, 520), (256, 72))

    def inputs(form: str, tokens: int, dtype: str) -> tuple[Any, ...]:
        kind, group, symmetric = FORMATS[form]
        dense = np.random.default_rng(0).standard_normal((k, n), np.float32)
        if kind == "int4":
            w = quantize_int4(dense, group or k, symmetric)
        else:
            w = quantize_int8(dense) if kind == "int8" else quantize_fp8(dense, kind == "fp8_block")
        return randoms((tokens, k), dtype, 2), jax.tree.map(jnp.asarray, w)

    def run(x: jax.Array, w: QuantWeight, **how: Any) -> jax.Array:
        return quant_matmul(x, w, out_dtype=x.dtype, **how)

    def case(form: str, tokens: int, dtype: str) -> Case:
        return Case(f"quant_matmul {form} {dtype} T={tokens}", dtype, partial(inputs, form, tokens, dtype), run)

    forms = s.pick(list(FORMATS), ["int4-g128-zero", "fp8-block"])
    usable = [f for f in forms if s.target.has_fp8 or not f.startswith("fp8")]
    yield from (case(form, tokens, "bfloat16") for form in usable for tokens in s.pick([3, 48, 200], [3]))
    if not s.small:
        yield from (case("int4-g128", 48, dtype) for dtype in ("float16", "float32"))


def _grouped(s: Session) -> Iterator[Case]:
    experts, top_k, hidden, ffn = s.pick((16, 2, 1024, 768), (4, 2, 64, 32))

    def matrix(shape: tuple[int, ...], kind: str) -> tuple[jax.Array | QuantStack, jax.Array | None]:
        deviation = shape[-1] ** -0.5
        if kind in ("int4", "mxfp4"):
            (count, *out), runs = shape[:-1], shape[-1] // 32
            values = randoms((count, shape[-1] // 2, *out), jnp.uint8, 9)
            if kind == "int4":
                return QuantStack(values, jnp.full((count, runs, *out), deviation / 5, jnp.bfloat16), None, kind), None
            return QuantStack(values, jnp.full((count, runs, *out), 120, jnp.uint8), None, kind), None
        if jnp.dtype(kind).itemsize > 1:
            return randoms(shape, kind, 9, deviation), None
        scale = deviation / (70 if kind == "int8" else 1)
        return randoms(shape, kind, 9), jnp.full(shape[:-1], scale, jnp.float32)

    def inputs(kind: str, w_kind: str, tokens: int) -> tuple[Any, ...]:
        up, down = matrix((experts, 2, ffn, hidden), w_kind), matrix((experts, hidden, ffn), w_kind)
        logits = randoms((tokens, experts), jnp.float32, 4)
        return randoms((tokens, hidden), kind), logits, up, down, jnp.int32(tokens - 1)

    def run(x, logits, up, down, count, *, block_rows: int, **how: Any) -> jax.Array:
        weights, groups = route(logits, count, top_k=top_k, normalise=True, block_rows=block_rows, **how)
        h = grouped_matmul(x, up[0], groups, scale=up[1], activation="silu", **how)
        y = grouped_matmul(h, down[0], groups, scale=down[1], sorted_rows=True, **how)
        return combine(y, weights, groups)

    def case(kind: str, w_kind: str, tokens: int, block_rows: int) -> Case:
        name = f"grouped_matmul {kind}{'' if kind == w_kind else f' by {w_kind}'} T={tokens}"
        return Case(name, kind, partial(inputs, kind, w_kind, tokens), partial(run, block_rows=block_rows))

    sizes = s.pick([(16, 16), (700, 64), (1500, 128)], [(5, 16)])
    yield from (case(kind, kind, tokens, rows) for kind in _floats(s) for tokens, rows in sizes)
    yield from (case("bfloat16", kind, 16, 16) for kind in s.pick(_one_byte(s), ["int8"]))
    packed = s.pick([("int4", 16, 16), ("mxfp4", 16, 16), ("mxfp4", 1500, 128)], [("mxfp4", 5, 16)])
    yield from (case("bfloat16", kind, tokens, rows) for kind, tokens, rows in packed)
