"""grouped_matmul with matrices of few bits: both bodies against float64, refusals, and compiling for cards."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lmjax.runtime import cards
from pallas_kernels.grouped_matmul import (
    QuantStack,
    choose_packed,
    combine,
    default_block_rows,
    group_rows,
    grouped_matmul,
)
from pallas_kernels.grouped_matmul.shapes import MODELS
from pallas_kernels.grouped_matmul.tiles import packed_tile_of
from pallas_kernels.platform import Target
from pallas_kernels.quant_matmul import QuantWeight, pack_int4, quant_matmul
from tests import deviceless, pairs
from tests.pallas_kernels.test_grouped_matmul import TARGETS, exact, some_ids
from tests.pallas_kernels.test_grouped_matmul_gpu import abstract_groups

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
FORMS = {  # kind, run, zeros
    "int4-g32": ("int4", 32, False),
    "int4-g64-zero": ("int4", 64, True),
    "mxfp4": ("mxfp4", 32, False),
    "int8-g32": ("int8_group", 32, False),
    "fp8-g64": ("fp8_group", 64, False),
}
# of the largest result: float32 accumulates, bfloat16 rounds where a result is written (twice in combine)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7}


def stack(form: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[QuantStack, np.ndarray]:
    """[G, (2,) N, K] and the float64 numbers that it stands for, each from its code, zero and scale."""
    kind, run, has_zero = FORMS[form]
    *out, k = shape
    runs, zero = k // run, None
    scale = rng.uniform(0.5, 2, (*out, runs)).astype(np.float32) / {"int8_group": 512, "fp8_group": 8}.get(kind, 32)
    if kind in ("int4", "mxfp4"):
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        numbers = codes.astype(np.float64) - 8
        if has_zero:
            zero = rng.integers(0, 16, (*out, runs)).astype(np.float32)
            numbers = codes - np.repeat(zero, run, -1).astype(np.float64)
        if kind == "mxfp4":
            numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
            exponents = rng.integers(119, 125, (*out, runs)).astype(np.uint8)
            scale = 2.0 ** (exponents.astype(np.float64) - 127)
        per_matrix = codes.reshape(-1, out[-1], k).swapaxes(1, 2)
        values = np.stack([pack_int4(m, run) for m in per_matrix]).reshape(*out[:-1], k // 2, out[-1])
        stored = exponents if kind == "mxfp4" else scale
    else:
        codes = rng.integers(-127, 128, shape).astype(np.int8)
        if kind == "fp8_group":
            codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        numbers, values, stored = codes.astype(np.float64), codes.swapaxes(-1, -2), scale
    floats = numbers * np.repeat(scale, run, -1)

    def input_first(a: np.ndarray | None) -> jax.Array | None:  # [G, (2,) K, N] -> [G, K, (2,) N]
        return None if a is None else jnp.asarray(np.moveaxis(a, -2, 1))

    runs_first = (None if a is None else a.swapaxes(-1, -2) for a in (stored, zero))
    return QuantStack(input_first(values), *map(input_first, runs_first), kind), floats


AXES = {
    "form": list(FORMS),
    "activation": [None, "silu"],
    "tokens": [1, 40],
    "grouping": [(6, 2, 16), (3, 2, 32)],  # G, k, BM
    "shape": [(128, 64), (192, 24), (320, 136)],  # K, N: whole tiles, three runs of 64, and tiles that are cut
    "sorted_rows": [False, True],
    "dtype": ["bfloat16", "float32"],
}
COVER = pairs.all_pairs(**AXES)
SOME = [
    ("int4-g32", "silu", 40, (6, 2, 16), (320, 136), False, "bfloat16"),
    ("int4-g64-zero", None, 40, (3, 2, 32), (192, 24), True, "float32"),
    ("mxfp4", "silu", 1, (6, 2, 16), (192, 24), False, "float32"),
    ("int8-g32", "silu", 40, (3, 2, 32), (128, 64), False, "bfloat16"),
    ("fp8-g64", None, 40, (6, 2, 16), (320, 136), False, "bfloat16"),
]
SOME = [dict(zip(AXES, case, strict=True)) for case in SOME]


def check(backend, *, form, activation, tokens, grouping, shape, sorted_rows, dtype):
    (count, top_k, block), (k, n) = grouping, shape
    rng = np.random.default_rng([tokens, k, count])
    ids = some_ids(rng, tokens, count, top_k)
    w, floats = stack(form, (count, *((n,) if activation is None else (2, n)), k), rng)
    assert w.shape == floats.shape and w.run == FORMS[form][1]
    x = np.array(jnp.asarray(rng.standard_normal((tokens, k))).astype(dtype))
    x[(ids < 0).all(1)] = np.nan
    how = {"activation": activation, "sorted_rows": sorted_rows, "target": TARGETS[backend]}

    def run(x: jax.Array, w: QuantStack, ids: jax.Array) -> jax.Array:
        groups = group_rows(ids, groups=count, block_rows=block)
        if sorted_rows:
            of_token = groups.rows[:, None] < tokens
            x = jnp.where(of_token, x[jnp.minimum(groups.rows, tokens - 1)], jnp.nan)
        return combine(grouped_matmul(x, w, groups, **how), None, groups)

    got = jit(run)(x, w, ids)
    expected = np.zeros((tokens, n))
    for t, group in zip(*np.nonzero(ids >= 0), strict=True):
        z = floats[ids[t, group]] @ x[t].astype(np.float64)
        expected[t] += z if activation is None else exact(activation, *z)
    assert got.dtype == dtype and got.shape == expected.shape
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= TOLERANCE[dtype] * max(np.abs(expected).max(), 1e-3)


@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("case", SOME, ids=pairs.name)
def test_values(case, backend):
    check(backend, **case)


@pytest.mark.slow
@pytest.mark.parametrize("backend", TARGETS)
@pytest.mark.parametrize("case", COVER, ids=pairs.name)
def test_values_of_all_pairs(case, backend):
    check(backend, **case)


@pytest.mark.parametrize(("backend", "tokens"), [("xla", 3), ("triton", 3)])
def test_mxfp4_of_one_matrix(backend, tokens):
    """As ``quant_matmul`` takes it."""
    rng = np.random.default_rng(tokens)
    w, floats = stack("mxfp4", (1, 72, 320), rng)
    x = jnp.asarray(rng.standard_normal((tokens, 320)), jnp.bfloat16)
    one = QuantWeight(w.values[0], w.scale[0], None, "mxfp4")
    got = quant_matmul(x, one, out_dtype=jnp.float32, target=TARGETS[backend], backend=backend)
    want = np.asarray(x, np.float64) @ floats[0].T
    assert one.shape == (320, 72) and one.group == 32
    assert np.abs(np.asarray(got) - want).max() <= 1e-5 * np.abs(want).max()


def test_choice_and_refusals():
    a100, h100 = Target("cuda", (8, 0), 108), Target("cuda", (9, 0), 132)

    def like(kind: str, run: int, count: int = 2) -> QuantStack:
        stored = 128 if kind.startswith(("int8", "fp8")) else 64
        values = jax.ShapeDtypeStruct((count, stored, 16), jnp.uint8)
        return QuantStack(values, jax.ShapeDtypeStruct((count, 128 // run, 16), jnp.float32), None, kind)

    assert choose_packed(like("int4", 32)) == "xla" and choose_packed(like("mxfp4", 32), target=h100) == "triton"
    with pytest.raises(NotImplementedError, match=r"fp8 matrices need compute capability 8\.9"):
        choose_packed(like("fp8_group", 32), target=a100)
    with pytest.raises(NotImplementedError, match=r"runs of 16: .* 32 is the shortest"):
        choose_packed(like("int4", 16), target=h100)
    with pytest.raises(NotImplementedError, match="offsets overflow between 2 and 4 GiB"):
        choose_packed(like("int4", 32, 2**21), target=h100)
    with pytest.raises(NotImplementedError, match="float64 rows with int4"):
        choose_packed(like("int4", 32), "float64")
    with pytest.raises(NotImplementedError, match="bfloat16 rows with int8 matrices"):
        choose_packed(like("int8", 32))
    with pytest.raises(ValueError, match="a QuantStack has its own"):
        grouped_matmul(jnp.ones((1, 128)), like("int4", 32), None, scale=jnp.ones((2, 16)))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("name", MODELS)
def test_tiles_fit_shared_memory(name, capability):
    target, m = Target("cuda", capability, 100), MODELS[name]
    for tokens in (1, 64, 512, 8192):
        block = default_block_rows(tokens, m.top_k, m.experts, target)
        for form, size in (("int4-g32", 2), ("fp8-g128", 2), ("mxfp4-g32", 4)):
            for gated, n, k in ((True, m.ffn, m.hidden), (False, m.hidden, m.ffn)):
                tile = packed_tile_of(block, gated, n, k, "float32" if size == 4 else "bfloat16", form, target)
                stored = (1 + gated) * tile.block_k * tile.block_n // (1 if form.startswith("fp8") else 2)
                assert tile.block_k >= 32 and tile.block_n >= 16
                assert tile.num_stages * (tile.block_k * block * size + stored) <= target.shared_memory


COMPILED = [
    ("h200", "gpt-oss-20b", "mxfp4", 64),
    ("h200", "mixtral-8x7b", "int4-g32", 2048),
    ("a100-80", "qwen3-30b-a3b", "int4-g128-zero", 64),
]
MORE = [
    *[("h200", "mixtral-8x7b", "fp8-g128", tokens) for tokens in (64, 2048)],
    ("h200", "mixtral-8x7b", "int4-g32", 64),
    ("h200", "gpt-oss-20b", "mxfp4", 2048),
    ("a100-80", "gpt-oss-20b", "mxfp4", 2048),
    ("b200", "qwen3-30b-a3b", "int8-g128", 2048),
    ("b200", "gpt-oss-20b", "mxfp4", 2048),
]


@deviceless.skip
@pytest.mark.parametrize(
    ("card", "model", "form", "tokens"), [*COMPILED, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_compiles_for_cards(card, model, form, tokens):
    """An MLP of experts: two kernels, tensor cores, no spills, and no buffer of a widened matrix."""
    target, m = cards.card(card).target(), MODELS[model]
    block = default_block_rows(tokens, m.top_k, m.experts, target)
    kind, run, has_zero = {
        **FORMS,
        "fp8-g128": ("fp8_group", 128, False),
        "int8-g128": ("int8_group", 128, False),
        "int4-g128-zero": ("int4", 128, True),
    }[form]

    def abstract(*shape: int) -> QuantStack:
        g, k, *out = shape
        stored = {"int8_group": jnp.int8, "fp8_group": jnp.float8_e4m3fn}.get(kind, jnp.uint8)
        values = jax.ShapeDtypeStruct((g, k if kind.endswith("_group") else k // 2, *out), stored)
        scale = jax.ShapeDtypeStruct((g, k // run, *out), jnp.uint8 if kind == "mxfp4" else jnp.bfloat16)
        return QuantStack(values, scale, scale if has_zero else None, kind)

    def mlp(x: jax.Array, gate_up: QuantStack, down: QuantStack, groups) -> jax.Array:
        h = grouped_matmul(x, gate_up, groups, activation="silu", target=target)
        return grouped_matmul(h, down, groups, sorted_rows=True, target=target)

    done = deviceless.compile(
        mlp,
        jax.ShapeDtypeStruct((tokens, m.hidden), jnp.bfloat16),
        abstract(m.experts, m.hidden, 2, m.ffn),
        abstract(m.experts, m.ffn, m.hidden),
        abstract_groups(tokens, m.top_k, m.experts, block),
        card=card,
        dump_ptx=True,
        kernel="grouped_matmul_packed",
    )
    assert len(done.kernels) == 2 and done.ptx.count("mma") > 0
    assert not deviceless.PTXAS or done.spill_bytes == 0, [(k.registers, k.spill_bytes) for k in done.kernels]
    rows = abstract_groups(tokens, m.top_k, m.experts, block).rows.shape[0]
    assert done.memory.temp_size_in_bytes <= 2 * rows * m.ffn + 2**20  # what is between the products
