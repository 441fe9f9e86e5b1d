"""Both bodies of kv_write (Triton's in the interpreter) against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import choose, kv_write
from pallas_kernels.platform import CPU, Target
from tests.pairs import all_pairs, every, name
from tests.pallas_kernels import ragged

TARGET = Target("cuda", (9, 0), 132, interpret=True)
LAYERS, LAYER, KV_HEADS, EPS = 2, 1, 2, 1e-3
ROUNDING = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}  # of one operation on numbers near 1

NORMS = ("q_norm", "k_norm")
ONE_BYTE = ["float32/int8", "bfloat16/int8", "bfloat16/float8_e4m3fn"]  # the first shows the rounding to int8
AXES = {
    "dtypes": ["float32/float32", "bfloat16/bfloat16", "float16/float32", *ONE_BYTE],
    "dim": [64, 80, 96, 128, 256],
    "group": [1, 3, 4, 8],
    "rotary": ["all", "half", "none"],
    "norm": ["none", "weight", "plus one"],
    "block": [8, 16, 32],
    "tokens": [1, 7, 40],
}


def make(case, seed=0):
    """Arguments of kv_write, and which tokens are real: the last of several is padding."""
    rng = np.random.default_rng(seed)
    q_dtype, kv_dtype = case["dtypes"].split("/")
    dim, tokens, block = case["dim"], case["tokens"], case["block"]
    blocks = 2 + -(-tokens // block)
    pool = ragged.unused(rng, (LAYERS, 2, blocks, KV_HEADS, block, dim), kv_dtype)
    slots = block + rng.permutation((blocks - 1) * block)[:tokens]
    real = np.arange(tokens) < max(1, tokens - 1)
    slots[~real] = 0
    x = rng.normal(size=(KV_HEADS, case["group"] + 2, dim, tokens)) * rng.uniform(0.1, 10, (1, 1, 1, tokens))
    x[:, -2:, :, :1] *= case["tokens"] != 7  # a key and a value of nothing but zeros
    operands = {"block_ids": slots // block, "offsets": slots % block}
    operands = {k: v.astype(np.int32) for k, v in operands.items()} | {"cos": None, "sin": None}
    if case["rotary"] != "none":
        angle = rng.uniform(0, 6, ((dim if case["rotary"] == "all" else dim // 2) // 2, tokens))
        operands |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    if case["norm"] != "none":
        offset = case["norm"] == "plus one"
        operands |= {k: (rng.uniform(0.5, 1.5, dim) - offset).astype(np.float32) for k in NORMS}
    if pool.dtype.itemsize == 1:
        operands["kv_scales"] = np.full(pool.shape[:-1], np.nan, np.float32)
    operands = {k: v if v is None else jnp.asarray(v) for k, v in operands.items()}
    operands |= {k: operands[k].astype(q_dtype) for k in NORMS if k in operands}
    return jnp.asarray(x, q_dtype), jnp.asarray(pool), operands, real


def expected(qkv, operands, plus_one):
    """float64 q [T, N, H] and keys, values [2, T, K, H]."""
    x = np.asarray(qkv, np.float64)
    q, k, v = x[:, :-2], x[:, -2:-1], x[:, -1:]

    def ready(x, weight):
        if weight is not None:
            x = x / np.sqrt((x * x).mean(2, keepdims=True) + EPS) * (plus_one + np.asarray(weight, np.float64))[:, None]
        if operands["cos"] is not None:
            cos, sin = (np.asarray(operands[name], np.float64) for name in ("cos", "sin"))
            half = len(cos)
            z = (x[:, :, :half] + 1j * x[:, :, half : 2 * half]) * (cos + 1j * sin)
            x = np.concatenate([z.real, z.imag, x[:, :, 2 * half :]], 2)
        return x

    q, k = ready(q, operands.get("q_norm")), ready(k, operands.get("k_norm"))
    by_token = q.transpose(3, 0, 1, 2).reshape(q.shape[3], -1, q.shape[2])
    return by_token, np.stack([k[:, 0], v[:, 0]]).transpose(0, 3, 1, 2)


def check(case):
    q_dtype, kv_dtype = case["dtypes"].split("/")
    qkv, pool, operands, real = make(case)
    plus_one = case["norm"] == "plus one"
    want_q, want_kv = expected(qkv, operands, plus_one)
    error = ROUNDING[q_dtype] * {"none": 1, "weight": 3, "plus one": 2}[case["norm"]]
    for target in (CPU, TARGET):

        @functools.partial(jax.jit, compiler_options=ragged.UNOPTIMISED)
        def body(qkv, pool, operands, target=target):
            return kv_write(qkv, pool, layer=LAYER, eps=EPS, plus_one=plus_one, target=target, **operands)

        q, after, scales = body(qkv, pool, operands)
        assert q.dtype == qkv.dtype and after.dtype == pool.dtype
        size = np.abs(want_q).max(-1, keepdims=True)
        assert (np.abs(np.asarray(q, np.float64) - want_q) <= error * size)[real].all()
        at = np.asarray(operands["block_ids"])[real], np.asarray(operands["offsets"])[real]
        got = _take(after, at).astype(np.float64)
        size = np.abs(want_kv[:, real]).max(-1, keepdims=True)
        allowed = error * size
        if scales is not None:
            scale = _take(scales, at)
            np.testing.assert_allclose(scale, size[..., 0] / {"int8": 127, "float8_e4m3fn": 448}[kv_dtype], rtol=error)
            got = got * scale[..., None]
            # int8: half a step; float8_e4m3fn: 3 bits of mantissa, and its smallest step below 2 ** -6
            fine = np.abs(want_kv[:, real]) * 2.0**-4 + scale[..., None] * 2.0**-10
            allowed = allowed + (scale[..., None] * 0.5001 if kv_dtype == "int8" else fine)
        assert (np.abs(got - want_kv[:, real]) <= allowed).all()
        _check_untouched(pool, after, at)
        if scales is not None:
            _check_untouched(operands["kv_scales"], scales, at)


def _take(pool, at):
    """[2, tokens, K, ...] of the layer."""
    return np.moveaxis(np.asarray(pool)[LAYER][:, at[0], :, at[1]], 0, 1)


def _check_untouched(before, after, at):
    """All but the written places and the null block is as it was, bit by bit."""
    before, after = (np.asarray(x).view(np.uint8).reshape(*x.shape[:5], -1).copy() for x in (before, after))
    for x in (before, after):
        x[LAYER, :, at[0], :, at[1]] = 0
        x[LAYER, :, 0] = 0
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("case", all_pairs(**AXES), ids=name)
def test_matches_float64(case):
    check(case)


WHOLE = AXES | {"tokens": [40]}  # their number only makes the grid larger


@pytest.mark.slow
@pytest.mark.parametrize("case", every(**WHOLE), ids=name)
def test_whole_matrix(case):
    check(case)


def pool_of(dtype, gib=0):
    shape = (1, 2, 2 + gib * 2**30 // (2 * 2 * 16 * 64 * jnp.dtype(dtype).itemsize), 2, 16, 64)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


QKV = jax.ShapeDtypeStruct((2, 3, 64, 8), jnp.bfloat16)


@pytest.mark.parametrize(
    ("pool", "target", "backend", "why"),
    [
        (pool_of("float8_e4m3fn"), Target("cuda", (8, 0)), "auto", "8.9"),
        (pool_of("int8", 3), Target("cuda", (9, 0)), "auto", "2 to 4 GiB"),
        (pool_of("bfloat16"), CPU, "triton", "8.0"),
        (pool_of("bfloat16"), Target("cuda", (7, 5)), "triton", "8.0"),
        (pool_of("bfloat16"), TARGET, "mosaic", "no body named"),
        (pool_of("int32"), TARGET, "auto", "int32"),
    ],
)
def test_what_no_body_serves_is_refused_before_lowering(pool, target, backend, why):
    with pytest.raises(NotImplementedError, match=why):
        choose(QKV, pool, target=target, backend=backend)


@pytest.mark.parametrize(
    ("pool", "target", "body"),
    [
        (pool_of("bfloat16"), CPU, "xla"),
        (pool_of("bfloat16"), Target("cuda", (7, 5)), "xla"),
        (pool_of("int8", 1), Target("cuda", (8, 0)), "triton"),
        (pool_of("int8", 5), Target("cuda", (8, 0)), "triton"),
        (pool_of("float8_e4m3fn"), Target("cuda", (8, 9)), "triton"),
        (pool_of("bfloat16", 3), Target("cuda", (12, 0)), "triton"),
    ],
)
def test_choice(pool, target, body):
    assert choose(QKV, pool, target=target) == body


@pytest.mark.parametrize("name", ["sin", "k_norm", "kv_scales"])
def test_arguments_that_belong_together(name):
    case = {"dtypes": "bfloat16/int8", "dim": 64, "group": 1, "rotary": "all", "norm": True, "block": 8, "tokens": 7}
    qkv, pool, operands, _ = make(case)
    with pytest.raises(ValueError, match=name):
        kv_write(qkv, pool, layer=0, **operands | {name: None})
