"""paged_attention's XLA form with every feature against float64; what the API refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import choose, paged_attention
from pallas_kernels.platform import CPU, Target
from tests.pairs import all_pairs, name
from tests.pallas_kernels import ragged
from tests.pallas_kernels.test_paged_decode import AXES, split_options

# (decode rows, rows as (tokens before, tokens now), T, S)
BATCHES = {
    "few": (4, [(0, 1), (15, 1), (16, 1), (180, 1), (30, 3)], 8, 8),
    "mixed": (3, [(20, 1), (0, 1), (100, 1), (0, 30), (31, 65), (8, 8)], 128, 8),
    "decode alone": (3, [(0, 1), (7, 1), (240, 1)], 16, 16),
}


@pytest.mark.parametrize(
    "case", all_pairs(**{k: v for k, v in AXES.items() if k != "cores"} | {"batch": list(BATCHES)}), ids=name
)
def test_xla_form_matches_float64(case):
    num_decode, rows, tokens, max_rows = BATCHES[case["batch"]]
    q_dtype, kv_dtype = case["dtypes"].split("/")
    made = ragged.make(
        np.random.default_rng(1),
        rows,
        num_decode=num_decode,
        tokens=tokens,
        max_rows=max_rows,
        width=-(-256 // case["block"]),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        **{k: v for k, v in case.items() if k not in ("batch", "dtypes")},
    )
    operands, static = split_options(made)

    @functools.partial(jax.jit, compiler_options=ragged.UNOPTIMISED)
    def body(q, pool, arrays, operands):
        return paged_attention(q, pool, **arrays, **operands, **static)

    out = np.asarray(body(jnp.asarray(made.q), jnp.asarray(made.pool), made.arrays, operands), np.float64)
    used = int(made.arrays["num_tokens"])
    assert np.isfinite(out).all()
    # the XLA form computes in float32 throughout: only the result is rounded to q's dtype
    rounding = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}[q_dtype]
    np.testing.assert_allclose(out[:used], made.expected[:used], atol=2e-5, rtol=rounding)


def pool_of(dtype, gib=0.001, dim=128):
    blocks = int(gib * 2**30) // (2 * 16 * dim * jnp.dtype(dtype).itemsize)
    return jax.ShapeDtypeStruct((1, 2, blocks, 1, 16, dim), dtype)


def queries(dtype=jnp.bfloat16, dim=128):
    return jax.ShapeDtypeStruct((8, 4, dim), dtype)


A100, L4, H100 = (Target("cuda", capability, 100) for capability in ((8, 0), (8, 9), (9, 0)))


def test_bodies_are_chosen_by_target():
    q, pool = queries(), pool_of(jnp.bfloat16)
    assert choose(q, pool, target=CPU) == "xla"
    assert choose(q, pool, target=Target("cuda", (7, 5), 40)) == "xla"
    assert all(choose(q, pool, target=card) == "triton" for card in (A100, L4, H100))
    assert choose(q, pool, target=H100, backend="xla") == "xla"
    assert choose(q, pool_of(jnp.float8_e4m3fn), target=L4) == "triton"
    assert choose(q, pool_of(jnp.int8, gib=2), target=A100) == "triton"
    assert choose(q, pool_of(jnp.int8, gib=4.1), target=A100) == "triton"
    assert choose(q, pool_of(jnp.bfloat16, gib=3), target=A100) == "triton"


@pytest.mark.parametrize(
    ("q", "pool", "target", "backend", "reason"),
    [
        (queries(), pool_of(jnp.float8_e4m3fn), A100, "auto", "8.9"),
        (queries(), pool_of(jnp.int8, gib=3), H100, "auto", "overflow"),
        (queries(), pool_of(jnp.float8_e4m3fn, gib=4), H100, "auto", "overflow"),
        (queries(dim=512), pool_of(jnp.bfloat16, dim=512), H100, "auto", "512"),
        (queries(), pool_of(jnp.float8_e5m2), H100, "auto", "float8_e5m2"),
        (queries(), pool_of(jnp.bfloat16), CPU, "triton", "NVIDIA"),
        (queries(), pool_of(jnp.bfloat16), Target("cuda", (7, 5), 40), "triton", "8.0"),
        (queries(), pool_of(jnp.bfloat16), CPU, "mosaic", "9.0"),
        (queries(), pool_of(jnp.bfloat16), A100, "mosaic", "9.0"),
        (queries(), pool_of(jnp.bfloat16), Target("cuda", (10, 0), 148), "mosaic", "9.0"),
        (queries(), pool_of(jnp.int8), H100, "mosaic", "int8"),
        (queries(dim=80), pool_of(jnp.bfloat16, dim=80), H100, "mosaic", "80"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(q, pool, target, backend, reason):
    with pytest.raises(NotImplementedError, match=reason):
        choose(q, pool, target=target, backend=backend)


def test_the_refusal_comes_before_lowering():
    made = ragged.make(
        np.random.default_rng(0),
        [(3, 1)],
        num_decode=1,
        group=1,
        dim=64,
        block=8,
        tokens=1,
        max_rows=1,
        width=4,
        q_dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
    )
    operands, static = split_options(made)
    run = functools.partial(paged_attention, jnp.asarray(made.q), jnp.asarray(made.pool), **made.arrays, **static)
    with pytest.raises(NotImplementedError, match=r"8\.9"):
        run(**operands, target=A100)
    with pytest.raises(ValueError, match="kv_scales"):
        run(target=CPU)
