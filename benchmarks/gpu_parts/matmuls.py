"""Quantised and grouped products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_parts.session import Session, bind, compiled, lower, randoms, tree_bytes
from pallas_kernels.grouped_matmul import combine, default_block_rows, grouped_matmul, route
from pallas_kernels.quant_matmul import QuantWeight, quant_matmul
from pallas_kernels.quant_matmul.shapes import FORMATS, LLAMA_8B

COPIES = 8  # different matrices in one program: a layer's int4 weights would fit the cache


def weight(form: str, k: int, n: int, seed: int) -> QuantWeight:
    """Random bits and scales; no real matrix is needed to be timed."""
    kind, group, symmetric = FORMATS[form]
    if kind == "int4":
        scale = jnp.full((k // (group or k), n), 0.01, jnp.bfloat16)
        zero = None if symmetric else jnp.full(scale.shape, 7, jnp.bfloat16)
        return QuantWeight(randoms((k // 2, n), jnp.uint8, seed), scale, zero, "int4")
    shape = (-(-k // 128), -(-n // 128)) if kind == "fp8_block" else (n,)
    stored = jnp.int8 if kind == "int8" else jnp.float8_e4m3fn
    return QuantWeight(randoms((k, n), stored, seed), jnp.full(shape, 0.01, jnp.bfloat16), None, kind)  # type: ignore


def quant(s: Session) -> dict[str, Any]:
    """Each form and body against a plain bfloat16 product of the same shape, in turns."""
    forms = [("int4-g128", "triton"), ("fp8-block", "triton"), ("int8", "xla"), ("int8", "triton"), ("fp8", "xla")]
    forms += [("fp8", "triton"), ("int4-g32-zero", "triton")]
    forms = s.pick([f for f in forms if s.target.has_fp8 or not f[0].startswith("fp8")], forms[:1])
    shapes = s.pick(LLAMA_8B, {"small": (256, 128)})
    cases = [(name, tokens) for tokens in s.pick((1, 64, 16, 512), (1,)) for name in shapes]
    for name, tokens in s.cases(cases, lambda c: f"quant_matmul {c[0]} T={c[1]}"):
        _quant(s, name, shapes[name], tokens, forms)
    return {}


def _quant(s: Session, name: str, shape: tuple[int, int], tokens: int, forms: list[tuple[str, str]]) -> None:
    (k, n), copies = shape, range(s.pick(COPIES, 1))
    x = randoms((tokens, k), jnp.bfloat16)
    plain = [randoms((k, n), jnp.bfloat16, i) for i in copies]
    args: dict[str, Any] = {"bfloat16": (x, plain)}
    lowered = {"bfloat16": lower(lambda x, ws: [x @ w for w in ws], x, plain)}
    for form, backend in forms:
        with s.attempt(f"quant_matmul {form}, {backend} {name} T={tokens}"):
            ws = [weight(form, k, n, i) for i in copies]

            def run(x: jax.Array, ws: list[QuantWeight], backend: Any = backend) -> list[jax.Array]:
                return [quant_matmul(x, w, out_dtype=x.dtype, target=s.target, backend=backend) for w in ws]

            args[f"{form}, {backend}"] = (x, ws)
            lowered[f"{form}, {backend}"] = lower(run, x, ws)
    built = s.build(lowered)
    times = s.race({label: bind(executable, *args[label]) for label, executable in built.items()})
    for label, taken in times.items():
        seconds = taken / len(copies)
        s.add(
            shape=name,
            tokens=tokens,
            form=label,
            us=seconds * 1e6,
            gb_s=tree_bytes(args[label][1][0]) / seconds / 1e9,
            tflop_s=2 * tokens * k * n / seconds / 1e12,
            speedup=times["bfloat16"] / taken if "bfloat16" in times else 0.0,
        )


# experts, top k, D, F
MOE = {"mixtral-8x7b": (8, 2, 4096, 14336), "qwen3-30b-a3b": (128, 8, 2048, 768)}


def grouped(s: Session) -> dict[str, Any]:
    """A whole MoE layer but for its router's product: routing, both products, the weighted sum."""
    models = s.pick(MOE, {"small": (4, 2, 64, 32)})
    cases = [(name, tokens) for tokens in s.pick((64, 1, 2048), (5,)) for name in models]
    for name, tokens in s.cases(cases, lambda c: f"grouped_matmul {c[0]} T={c[1]}"):
        with s.attempt(f"grouped_matmul {name} T={tokens}"):
            _moe(s, name, models[name], tokens)
    return {}


def _moe(s: Session, name: str, sizes: tuple[int, int, int, int], tokens: int) -> None:
    experts, top_k, hidden, ffn = sizes
    x = randoms((tokens, hidden), jnp.bfloat16)
    up = randoms((experts, 2, ffn, hidden), jnp.bfloat16, 1, hidden**-0.5)
    down = randoms((experts, hidden, ffn), jnp.bfloat16, 2, ffn**-0.5)
    logits = randoms((tokens, experts), jnp.float32, 3)
    block_rows = default_block_rows(tokens, top_k, experts, s.target)

    def layer(x: jax.Array, up: jax.Array, down: jax.Array, logits: jax.Array) -> jax.Array:
        for _ in range(s.pick(4, 1)):
            weights, groups = route(
                logits, jnp.int32(tokens), top_k=top_k, normalise=True, block_rows=block_rows, target=s.target
            )
            h = grouped_matmul(x, up, groups, activation="silu", target=s.target)
            y = grouped_matmul(h, down, groups, sorted_rows=True, target=s.target)
            x = combine(y, weights, groups)
        return x

    args = (x, up, down, logits)
    seconds = s.seconds(bind(compiled(layer, *args), *args)) / s.pick(4, 1)
    used = len({int(e) for e in jax.lax.top_k(logits, top_k)[1].reshape(-1)})
    num_bytes = 3 * used * hidden * ffn * 2
    flops = 6 * tokens * top_k * hidden * ffn
    row: dict[str, Any] = {"model": name, "tokens": tokens, "us": seconds * 1e6, "experts_used": used}
    row |= {"gb_s": num_bytes / seconds / 1e9, "tflop_s": flops / seconds / 1e12}
    if "copy" in s.peaks:
        row["of_roofline"] = max(num_bytes / s.peaks["copy"], flops / s.peaks["bfloat16"]) / seconds
    s.add(**row)
