"""The prefill body in the interpreter against float64, on ragged batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.prefill import prefill_triton
from pallas_kernels.platform import Target
from tests.pairs import all_pairs, every, name
from tests.pallas_kernels import ragged

TARGET = Target("cuda", (9, 0), 132, interpret=True)
UNTOUCHED = 7.0  # in the tokens that are not prefill's

# (decode rows, rows as (tokens before, tokens now), T, S)
BATCHES = {
    "mixed": (2, [(20, 1), (63, 1), (0, 30), (31, 65), (8, 8), (5, 1)], 128, 8),
    "one token each": (0, [(0, 1), (15, 1), (16, 1), (90, 1)], 20, 4),
    "empty rows": (0, [(0, 0), (0, 17), (3, 0), (64, 7)], 32, 4),
    "chunk": (0, [(62, 40)], 40, 1),
}
ONE_BYTE = ("int8", "float8_e4m3fn")
MORE = {"decode alone": (4, [(9, 1), (31, 1), (32, 1), (0, 1)], 20, 4)}
AXES = {
    "dtypes": ["float32/float32", "bfloat16/bfloat16", "float16/float16", *(f"bfloat16/{x}" for x in ONE_BYTE)],
    "group": [1, 3, 4, 8],
    "dim": [64, 80, 96, 128, 256],
    "block": [8, 16, 32],
    "window": [None, 5, 40],
    "soft_cap": [None, 3.0],
    "sinks": [False, True],
    "alibi": [False, True],
    "batch": list(BATCHES),
}


def make(case, seed=0):
    num_decode, rows, tokens, max_rows = (BATCHES | MORE)[case["batch"]]
    q_dtype, kv_dtype = case["dtypes"].split("/")
    return ragged.make(
        np.random.default_rng(seed),
        rows,
        num_decode=num_decode,
        tokens=tokens,
        max_rows=max_rows,
        width=-(-128 // case["block"]),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        **{k: v for k, v in case.items() if k not in ("batch", "dtypes")},
    )


def operands_of(made):
    """What is an operand, what is static."""
    operands = {k: jnp.asarray(v) for k, v in made.options.items() if isinstance(v, np.ndarray)}
    return operands, {k: v for k, v in made.options.items() if k not in operands}


def run(case):
    """(batch, the body's output float64)"""
    made = make(case)
    arrays = {k: v for k, v in made.arrays.items() if k not in ("token_rows", "positions", "num_tokens")}
    operands, static = operands_of(made)

    @functools.partial(jax.jit, compiler_options=ragged.UNOPTIMISED)
    def body(q, pool, arrays, operands):
        out = jnp.full(q.shape, UNTOUCHED, q.dtype)
        return prefill_triton(q, out, pool, **arrays, **operands, **static, target=TARGET)

    out = body(jnp.asarray(made.q), jnp.asarray(made.pool), arrays, operands)
    assert out.dtype == made.q.dtype
    return made, np.asarray(out, np.float64)


def check(case):
    made, out = run(case)
    atol = ragged.tolerance(case["dtypes"].split("/")[0])
    np.testing.assert_allclose(out[made.prefill], made.expected[made.prefill], atol=atol)
    np.testing.assert_array_equal(out[~made.prefill], UNTOUCHED)


@pytest.mark.parametrize("case", all_pairs(**AXES), ids=name)
def test_matches_float64(case):
    check(case)


WHOLE = AXES | {"window": [None, 40], "batch": ["mixed"]}


@pytest.mark.slow
@pytest.mark.parametrize("case", every(**WHOLE), ids=name)
def test_whole_matrix(case):
    check(case)


@pytest.mark.parametrize("case", [{"group": 80, "dim": 16}, {"group": 5, "dim": 256}], ids=name)
def test_more_heads_than_a_tile_holds(case):
    """80 query heads of a KV head: two tiles of 64, one token each; 5: no power of 2."""
    common = {"dtypes": "float32/float32", "block": 16, "window": 40, "soft_cap": None, "sinks": True, "alibi": True}
    check(case | common | {"batch": "empty rows"})


def test_a_step_without_prefill_rows_changes_nothing():
    made, out = run(dict(zip(AXES, (values[0] for values in AXES.values()), strict=True)) | {"batch": "decode alone"})
    assert not made.prefill.any()
    np.testing.assert_array_equal(out, UNTOUCHED)


def test_both_bodies_behind_the_api():
    """Decode rows, chunks and padding of one step, each token written by one of the two kernels."""
    case = dict(zip(AXES, ("bfloat16/int8", 4, 80, 16, 40, 3.0, True, True, "mixed"), strict=True))
    made = make(case)
    operands, static = operands_of(made)

    @functools.partial(jax.jit, compiler_options=ragged.UNOPTIMISED)
    def body(q, pool, arrays, operands):
        return paged_attention(q, pool, **arrays, **operands, **static, target=TARGET)

    out = np.asarray(body(jnp.asarray(made.q), jnp.asarray(made.pool), made.arrays, operands), np.float64)
    used = int(made.arrays["num_tokens"])
    np.testing.assert_allclose(out[:used], made.expected[:used], atol=ragged.tolerance("bfloat16"))
    np.testing.assert_array_equal(out[used:], 0)
