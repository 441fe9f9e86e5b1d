"""grouped_matmul: routing, both bodies against float64, the adapters' shape, refusals."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    Groups,
    choose,
    combine,
    default_block_rows,
    group_rows,
    grouped_lora,
    grouped_matmul,
    route,
)
from pallas_kernels.grouped_matmul.shapes import MODELS, WEIGHTS, rows_dtype
from pallas_kernels.grouped_matmul.tiles import tile_of
from pallas_kernels.platform import CPU, Target
from tests import pairs

HOPPER = Target("cuda", (9, 0), 132, interpret=True)
TARGETS = {"xla": CPU, "triton": HOPPER}
# one program a case, not optimised: compiling is nearly all of the time
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# of the largest result: float32 accumulates, the others round where a result is written (twice in combine)
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}


def check_groups(groups: Groups, ids: np.ndarray, count: int, block: int) -> None:
    """Everything that ``Groups`` promises, from the definition; ids int [T, k], -1: none."""
    slots, rows, blocks = (np.asarray(a) for a in groups)
    tokens = len(ids)
    assert slots.shape == ids.shape and rows.shape == (len(blocks) * block,)
    assert ((slots >= 0) == (ids >= 0)).all()
    taken = slots[ids >= 0]
    assert len(set(taken.tolist())) == len(taken)
    token = np.broadcast_to(np.arange(tokens)[:, None], ids.shape)
    assert (rows[taken] == token[ids >= 0]).all()
    assert (blocks[taken // block] == ids[ids >= 0]).all()
    members = np.bincount(ids[ids >= 0], minlength=count)
    used = -(-members // block)
    assert (blocks == np.append(np.repeat(np.arange(count), used), np.full(len(blocks) - used.sum(), -1))).all()
    assert blocks[-1] == -1
    padding = np.setdiff1d(np.arange(used.sum() * block), taken)
    assert (rows[padding] == tokens).all()


# T, real tokens, E, k, BM, first, count
ROUTES = {
    "one token": (1, 1, 8, 2, 16, 0, 8),
    "padding only": (24, 0, 4, 4, 16, 0, 4),
    "one kernel": (60, 50, 60, 4, 16, 0, 60),
    "two kernels, a share of the experts": (90, 83, 200, 8, 16, 50, 50),
    "many tiles": (2200, 2190, 8, 1, 64, 0, 8),
}


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("name", ROUTES)
def test_route(name, backend):
    tokens, real, experts, top_k, block, first, count = ROUTES[name]
    logits = np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32) * 2
    normalise = top_k == 8
    how = {"top_k": top_k, "normalise": normalise, "block_rows": block, "count": count, "target": TARGETS[backend]}
    run = jit(lambda logits, real, first: route(logits, real, first=first, **how))
    weights, groups = run(logits, jnp.int32(real), jnp.int32(first))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :top_k]
    best = np.take_along_axis(p, ids, 1)
    np.testing.assert_allclose(weights, best / best.sum(1, keepdims=True) if normalise else best, rtol=2e-6)
    local = ids - first
    local[(local < 0) | (local >= count) | (np.arange(tokens)[:, None] >= real)] = -1
    check_groups(groups, local, count, block)


@pytest.mark.parametrize("backend", TARGETS)
def test_equal_logits_pick_the_first(backend):
    how = {"top_k": 2, "normalise": False, "block_rows": 16, "target": TARGETS[backend]}
    weights, groups = jit(lambda logits: route(logits, jnp.int32(3), **how))(jnp.zeros((3, 5)))
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)
    check_groups(groups, np.array([[0, 1]] * 3), 5, 16)


def numbers(dtype: str, rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    if dtype == "int8":
        return jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
    return jnp.asarray(rng.standard_normal(shape)).astype(dtype)


def some_ids(rng: np.random.Generator, tokens: int, count: int, top_k: int) -> np.ndarray:
    """Different groups a token, never the last group, some choices of none."""
    ids = np.stack([rng.permutation(count - 1)[:top_k] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    return ids


def exact(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    erf = np.vectorize(math.erf)
    f = {
        "silu": lambda z: z / (1 + np.exp(-z)),
        "gelu": lambda z: z * (1 + erf(z / 2**0.5)) / 2,
        "gelu_tanh": lambda z: z * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2,
        "relu": lambda z: np.maximum(z, 0),
    }[activation]
    return f(gate) * up


AXES = {
    "weights": list(WEIGHTS),
    "activation": [None, "silu", "gelu", "gelu_tanh", "relu"],
    "tokens": [1, 40, 130],
    "grouping": [(6, 2, 16), (9, 1, 64), (3, 2, 16)],  # G, k, BM
    "shape": [(128, 64), (40, 24), (200, 136)],  # K, N: whole tiles, and tiles that are cut
    "sorted_rows": [False, True],
}
COVER = pairs.all_pairs(**AXES)


def check(backend, *, weights, activation, tokens, grouping, shape, sorted_rows):
    (count, top_k, block), (k, n), dtype = grouping, shape, rows_dtype(weights)
    rng = np.random.default_rng([tokens, k, count])
    ids = some_ids(rng, tokens, count, top_k)
    parts = (n,) if activation is None else (2, n)
    w = np.array(numbers(weights, rng, (count, *parts, k)))
    if weights != "int8":
        w[-1] = np.nan  # of the group that nobody is in
    scale = None
    if weights in ("int8", "float8_e4m3fn"):
        scale = jnp.asarray(rng.random((count, *parts)) / 64, jnp.float32)
    x = np.array(numbers(dtype, rng, (tokens, k)))
    x[(ids < 0).all(1)] = np.nan
    how = {"activation": activation, "sorted_rows": sorted_rows, "target": TARGETS[backend]}

    def run(x: jax.Array, w: jax.Array, scale: jax.Array | None, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        groups = group_rows(ids, groups=count, block_rows=block)
        if sorted_rows:
            of_token = groups.rows[:, None] < tokens
            x = jnp.where(of_token, x[jnp.minimum(groups.rows, tokens - 1)], jnp.nan)
        y = grouped_matmul(x, w, groups, scale=scale, **how)
        return y, combine(y, None, groups)

    y, got = jit(run)(x, w, scale, ids)
    assert y.dtype == got.dtype == dtype and y.shape[1] == n
    expected = np.zeros((tokens, n))
    wide = w.astype(np.float64) if scale is None else w.astype(np.float64) * np.asarray(scale, np.float64)[..., None]
    for t, group in zip(*np.nonzero(ids >= 0), strict=True):
        z = wide[ids[t, group]] @ x[t].astype(np.float64)
        expected[t] += z if activation is None else exact(activation, *z)
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= TOLERANCE[dtype] * max(np.abs(expected).max(), 1e-3)


@pytest.mark.parametrize("case", COVER, ids=pairs.name)
def test_xla_form(case):
    check("xla", **case)


@pytest.mark.parametrize("case", COVER, ids=pairs.name)
def test_triton_body(case):
    check("triton", **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairs.every(**AXES), ids=pairs.name)
def test_triton_body_everywhere(case):
    check("triton", **case)


@pytest.mark.parametrize(("backend", "rank"), [("xla", 8), ("xla", 64), ("triton", 8), ("triton", 64)])
def test_adapters(backend, rank):
    rng = np.random.default_rng(rank)
    tokens, adapters, k, n = 37, 5, 96, 80
    ids = rng.integers(-1, adapters, (tokens, 1)).astype(np.int32)
    x, a, b = (
        rng.standard_normal(s).astype(np.float32) for s in ((tokens, k), (adapters, rank, k), (adapters, n, rank))
    )
    target = TARGETS[backend]

    def run(x: jax.Array, a: jax.Array, b: jax.Array, ids: jax.Array) -> tuple[Groups, jax.Array]:
        groups = group_rows(ids, groups=adapters, block_rows=16, target=target)
        return groups, grouped_lora(x, a, b, groups, target=target)

    groups, got = jit(run)(x, a, b, ids)
    check_groups(groups, ids, adapters, 16)
    got = np.asarray(got)
    wide = [m.astype(np.float64) for m in (x, a, b)]
    expected = np.stack(
        [wide[2][i] @ (wide[1][i] @ v) if i >= 0 else np.zeros(n) for i, v in zip(ids[:, 0], wide[0], strict=True)]
    )
    assert (got[ids[:, 0] < 0] == 0).all()
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_combine_weighs_and_survives_what_nobody_wrote():
    groups = group_rows(jnp.asarray([[0, 1], [1, -1], [-1, -1]], jnp.int32), groups=2, block_rows=16)
    slots = np.asarray(groups.slots)
    y = np.full((groups.rows.shape[0], 4), np.nan, np.float32)
    y[slots[0, 0]], y[slots[0, 1]], y[slots[1, 0]] = 1.0, 2.0, 3.0
    out = combine(jnp.asarray(y), jnp.asarray([[0.5, 0.25], [2.0, 9.0], [9.0, 9.0]]), groups)
    np.testing.assert_array_equal(out, np.array([[1.0] * 4, [6.0] * 4, [0.0] * 4], np.float32))


def test_choice_and_refusals():
    a100, h100 = Target("cuda", (8, 0), 108), Target("cuda", (9, 0), 132)
    assert choose() == "xla" and choose(target=a100) == choose(target=h100) == "triton"
    assert choose(target=h100, backend="xla") == "xla"
    shape = (8, 16, 16)
    assert choose(shape, "float8_e4m3fn", target=h100) == "triton"
    with pytest.raises(NotImplementedError, match=r"fp8 matrices need compute capability 8.9, the card has cuda 8.0"):
        choose(shape, "float8_e4m3fn", target=a100)
    with pytest.raises(NotImplementedError, match=r"run on compute capability 8.0 and above, not on cpu"):
        choose(backend="triton")
    with pytest.raises(NotImplementedError, match="no mosaic body"):
        choose(target=h100, backend="mosaic")
    with pytest.raises(NotImplementedError, match="blocks of 8 rows"):
        choose(shape, block_rows=8, target=h100)
    with pytest.raises(NotImplementedError, match="float32 rows with bfloat16 matrices"):
        choose(shape, "bfloat16", "float32")
    with pytest.raises(NotImplementedError, match="offsets overflow between 2 and 4 GiB"):
        choose((16, 2, 16384, 6144), "int8", target=h100)
    assert choose((8, 2, 14336, 4096), "int8", target=h100) == "triton"
    assert choose((16, 2, 16384, 6144), "bfloat16", target=h100) == "triton"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", MODELS)
def test_tiles_fit_shared_memory(name, capability):
    target, m = Target("cuda", capability, 100), MODELS[name]
    for tokens in (1, 64, 512, 8192):
        block = default_block_rows(tokens, m.top_k, m.experts, target)
        for w in WEIGHTS:
            for gated, n, k in ((True, m.ffn, m.hidden), (False, m.hidden, m.ffn)):
                tile, size = tile_of(block, gated, n, k, rows_dtype(w), w, target), 4 if w == "float32" else 2
                assert tile.block_k >= 16 and tile.block_n >= 16
                used = tile.num_stages * tile.block_k * (block + (1 + gated) * tile.block_n) * size
                assert used <= target.shared_memory
