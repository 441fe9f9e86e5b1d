"""The decode body in the interpreter against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.decode import decode_triton
from pallas_kernels.platform import Target
from tests.pairs import all_pairs, every, name
from tests.pallas_kernels import ragged

# (decode rows, rows as (tokens before, tokens now), T, S); a program of T <= 16 takes every token as a decode row
BATCHES = {
    "one token": (1, [(0, 1)], 1, 1),
    "few": (4, [(0, 1), (15, 1), (16, 1), (180, 1), (30, 3)], 8, 8),
    "partial pages": (6, [(0, 1), (7, 1), (8, 1), (100, 1), (31, 1), (240, 1)], 18, 8),
    "beside prefill": (2, [(200, 1), (33, 1), (5, 9)], 20, 4),
    "no decode rows": (0, [(5, 9)], 20, 3),
}
AXES = {
    "dtypes": [
        "float32/float32",
        "bfloat16/bfloat16",
        "float16/float16",
        "bfloat16/int8",
        "bfloat16/float8_e4m3fn",
        "float32/int8",
    ],
    "group": [1, 3, 4, 8],
    "dim": [64, 80, 96, 128, 256],
    "block": [8, 16, 32],
    "window": [None, 5, 70],
    "soft_cap": [None, 3.0],
    "sinks": [False, True],
    "alibi": [False, True],
    "cores": [1, 132],  # 1: no split over KV
    "batch": list(BATCHES),
}


def make(case, seed=0):
    num_decode, rows, tokens, max_rows = BATCHES[case["batch"]]
    q_dtype, kv_dtype = case["dtypes"].split("/")
    return ragged.make(
        np.random.default_rng(seed),
        rows,
        num_decode=num_decode,
        tokens=tokens,
        max_rows=max_rows,
        width=-(-256 // case["block"]),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        **{k: v for k, v in case.items() if k not in ("batch", "dtypes", "cores")},
    )


def split_options(made):
    """What is an operand, what is static."""
    operands = {k: jnp.asarray(v) for k, v in made.options.items() if isinstance(v, np.ndarray)}
    return operands, {k: v for k, v in made.options.items() if k not in operands}


def check(case):
    made = make(case)
    tokens, max_rows = made.q.shape[0], made.arrays["block_tables"].shape[0]
    few = tokens <= 16
    arrays = {k: made.arrays[k] for k in ("layer", "block_tables", "token_rows", "positions", "num_tokens")}
    arrays["count"] = made.arrays["num_tokens" if few else "num_decode"]
    operands, static = split_options(made)
    static = {"sinks": None, "alibi": None, "kv_scales": None} | static
    target = Target("cuda", (9, 0), case["cores"], interpret=True)

    @functools.partial(jax.jit, compiler_options=ragged.UNOPTIMISED)
    def body(q, pool, arrays, operands):
        options = static | operands
        return decode_triton(q, pool, **arrays, **options, rows=min(tokens, max_rows), target=target)

    out = body(jnp.asarray(made.q), jnp.asarray(made.pool), arrays, operands)
    assert out.dtype == made.q.dtype
    out, count, used = np.asarray(out, np.float64), int(arrays["count"]), int(made.arrays["num_tokens"])
    atol = ragged.tolerance(case["dtypes"].split("/")[0])
    np.testing.assert_allclose(out[:count], made.expected[:count], atol=atol)
    np.testing.assert_array_equal(out[used:], 0)


@pytest.mark.parametrize("case", all_pairs(**AXES), ids=name)
def test_matches_float64(case):
    check(case)


WHOLE = AXES | {"window": [None, 70], "cores": [132], "batch": ["partial pages"]}


@pytest.mark.slow
@pytest.mark.parametrize("case", every(**WHOLE), ids=name)
def test_whole_matrix(case):
    check(case)


def test_one_program_for_all_layers_that_leaves_the_donated_pool_as_it_was():
    case = dict(zip(AXES, ("float32/int8", 4, 80, 16, 70, None, True, False, 132, "few"), strict=True))
    made = make(case)
    operands, static = split_options(made)
    arrays = {k: v for k, v in made.arrays.items() if k != "layer"}
    target = Target("cuda", (9, 0), 132, interpret=True)
    traces = []

    @functools.partial(jax.jit, compiler_options=ragged.UNOPTIMISED, donate_argnames=("pool",))
    def step(q, pool, layer, arrays, operands):
        traces.append(layer)
        return paged_attention(q, pool, layer=layer, **arrays, **operands, **static, target=target), pool

    other = np.random.default_rng(1).integers(-128, 128, made.pool.shape).astype(np.int8)
    other[1] = made.pool[1]
    pool = jnp.asarray(other)
    operands["kv_scales"] = operands["kv_scales"].at[0].set(operands["kv_scales"][1])
    outs = []
    for layer in (1, 0):
        before = pool
        out, pool = step(jnp.asarray(made.q), pool, jnp.int32(layer), arrays, operands)
        outs.append(np.asarray(out, np.float64))
        assert before.is_deleted()
    used = int(arrays["num_tokens"])
    assert len(traces) == 1
    np.testing.assert_allclose(outs[0][:used], made.expected[:used], atol=ragged.tolerance("float32"))
    assert np.abs(outs[1][:used] - made.expected[:used]).max() > 0.1  # the other layer holds other numbers
    np.testing.assert_array_equal(np.asarray(pool), other)


def test_equal_layers_are_lowered_once():
    case = dict(zip(AXES, ("bfloat16/bfloat16", 4, 64, 16, None, None, False, False, 132, "few"), strict=True))
    made = make(case)
    target = Target("cuda", (9, 0), 132, interpret=True)
    static = {k: v for k, v in made.options.items() if v is not None}

    def program(q, pool, arrays):
        for layer in range(2):
            q = paged_attention(q, pool, **arrays | {"layer": jnp.int32(layer)}, **static, target=target)
        return q

    text = jax.jit(program).lower(jnp.asarray(made.q), jnp.asarray(made.pool), made.arrays).as_text()
    assert text.count("func.func private @_call") == 1
    assert text.count("call @_call") == 2
