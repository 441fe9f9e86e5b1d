"""The Mosaic GPU decode body in jax's GPU interpreter against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import choose, paged_attention
from pallas_kernels.platform import Target
from tests.pallas_kernels import ragged
from tests.pallas_kernels.test_paged_decode import split_options

HAS_INTERPRETER = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)


def make(**options):
    """Three decode rows and a token of padding; one row fills its last block, one does not."""
    return ragged.make(
        np.random.default_rng(0),
        [(69, 1), (111, 1), (0, 1)],
        num_decode=3,
        tokens=4,
        max_rows=4,
        width=-(-128 // options["block"]),
        kv_heads=1,
        q_dtype="bfloat16",
        kv_dtype="bfloat16",
        **options,
    )


def run(made, cores=1):
    operands, static = split_options(made)
    target = Target("cuda", (9, 0), cores, interpret=True)
    call = functools.partial(paged_attention, **made.arrays, **operands, **static, target=target, backend="mosaic")
    return np.asarray(call(jnp.asarray(made.q), jnp.asarray(made.pool)), np.float64)


@pytest.mark.skipif(not HAS_INTERPRETER, reason="Mosaic GPU kernels are interpreted from jax 0.11 on")
@pytest.mark.parametrize(
    ("cores", "options"),
    [
        (1, {"group": 8, "dim": 64, "block": 16}),
        (4, {"group": 3, "dim": 128, "block": 8, "window": 21, "soft_cap": 3.0, "sinks": True}),
    ],
    ids=["plain", "features"],
)
def test_matches_float64(cores, options):
    made = make(**options)
    out = run(made, cores)
    np.testing.assert_allclose(out[:3], made.expected[:3], atol=ragged.tolerance("bfloat16"))
    np.testing.assert_array_equal(out[3:], 0)


@pytest.mark.skipif(HAS_INTERPRETER, reason="this jax has the interpreter")
def test_without_the_interpreter_it_says_so():
    with pytest.raises(NotImplementedError, match=r"0\.11"):
        run(make(group=8, dim=64, block=16))


def test_auto_takes_it_only_where_a_card_has_shown_it_faster(monkeypatch):
    best = {"body": "mosaic"}
    monkeypatch.setattr("pallas_kernels.paged_attention.tuned", lambda op, target, case: best)
    q = jax.ShapeDtypeStruct((8, 32, 128), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((2, 2, 10, 8, 16, 128), jnp.bfloat16)
    hopper = Target("cuda", (9, 0), 132)
    assert choose(q, pool, target=hopper) == "mosaic"
    assert choose(q, pool, target=hopper, alibi=True) == "triton"
    assert choose(q, pool, target=Target("cuda", (8, 0), 108)) == "triton"
    best.clear()
    assert choose(q, pool, target=hopper) == "triton"
