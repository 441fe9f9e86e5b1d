"""quant_matmul: packing, both bodies against float64, refusals, and compiling for cards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.runtime import cards
from pallas_kernels.platform import CPU, Target
from pallas_kernels.quant_matmul import (
    QuantWeight,
    choose,
    pack_int4,
    quant_matmul,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from pallas_kernels.quant_matmul.shapes import FORMATS, LLAMA_8B, ODD, TOKENS
from pallas_kernels.quant_matmul.tiles import splits_of, tile_of
from tests import deviceless, pairs

HOPPER = Target("cuda", (9, 0), 132, interpret=True)
# of the largest output: bfloat16 and float16 round only where the result is written
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
# K, N: whole tiles; N odd; K cut in two uneven parts for few tokens, N below a tile's edge
SHAPES = [(256, 128), (384, 137), (1152, 72)]
AXES = {
    "form": list(FORMATS),
    "tokens": [1, 40, 130],
    "shape": SHAPES,
    "dtype": ["float32", "bfloat16", "float16"],
}


IN_GROUPS = {"int8-g32": ("int8", 32), "int8-g128": ("int8", 128), "fp8-g64": ("fp8", 64)}


def in_groups(form: str, w: np.ndarray) -> QuantWeight:
    """8-bit numbers with a scale a group: each group as a matrix of its own."""
    kind, group = IN_GROUPS[form]
    made = [(quantize_int8 if kind == "int8" else quantize_fp8)(part) for part in np.split(w, len(w) // group)]
    values, scale = np.concatenate([m.values for m in made]), np.stack([m.scale for m in made])
    return QuantWeight(values, scale, None, f"{kind}_group")


@pytest.mark.parametrize(("body", "tokens"), [("xla", 3), ("triton", 3), ("triton", 40)])
@pytest.mark.parametrize("form", IN_GROUPS)
def test_groups_of_8_bits(form, body, tokens):
    rng = np.random.default_rng(tokens)
    w = in_groups(form, rng.standard_normal((384, 72)).astype(np.float32))
    x = jnp.asarray(rng.standard_normal((tokens, 384)), jnp.bfloat16)
    want = np.asarray(x, np.float64) @ (np.asarray(w.values, np.float64) * np.repeat(w.scale, w.group, 0))
    got = quant_matmul(x, w, out_dtype=jnp.float32, target=HOPPER if body == "triton" else CPU, backend=body)
    assert w.group == IN_GROUPS[form][1]
    assert np.abs(np.asarray(got) - want).max() <= 1e-5 * np.abs(want).max()


@deviceless.skip
@pytest.mark.parametrize(("kind", "card"), [("int8", "h200"), ("int8", "a100-80"), ("fp8", "h200")])
def test_groups_of_8_bits_compile(kind, card):
    (k, n), target = LLAMA_8B["qkv"], cards.card(card).target()
    values = jax.ShapeDtypeStruct((k, n), jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)
    w = QuantWeight(values, jax.ShapeDtypeStruct((k // 128, n), jnp.float32), None, f"{kind}_group")
    x = jax.ShapeDtypeStruct((16, k), jnp.bfloat16)
    done = deviceless.compile(
        lambda x, w: quant_matmul(x, w, out_dtype=jnp.float32, target=target),
        *(x, w),
        card=card,
        dump_ptx=True,
        kernel="quant_matmul",
    )
    assert len(done.kernels) == 1 and "mma" in done.ptx and done.memory.temp_size_in_bytes < k * n // 4
    assert not deviceless.PTXAS or done.spill_bytes == 0


def quantized(form: str, w: np.ndarray) -> QuantWeight:
    kind, group, symmetric = FORMATS[form]
    if kind == "int4":
        return quantize_int4(w, group or w.shape[0], symmetric)
    return quantize_int8(w) if kind == "int8" else quantize_fp8(w, block=kind == "fp8_block")


def dequantized(w: QuantWeight) -> np.ndarray:
    """float64 [K, N], element by element from the definition in ``QuantWeight``."""
    k, n = w.shape
    row, column = np.arange(k)[:, None], np.arange(n)[None]
    values, scale = np.asarray(w.values), np.asarray(w.scale, np.float64)
    if w.kind == "int4":
        g, at = w.group, row % w.group
        byte = values[row // g * (g // 2) + at % (g // 2), column]
        nibble = np.where(at < g // 2, byte % 16, byte // 16).astype(np.float64)
        zero = 8.0 if w.zero is None else np.asarray(w.zero, np.float64)[row // g, column]
        return (nibble - zero) * scale[row // g, column]
    steps = scale[row // 128, column // 128] if w.kind == "fp8_block" else scale[column]
    return values.astype(np.float64) * steps


def check(form: str, tokens: int, shape: tuple[int, int], dtype: str, target: Target, backend: str) -> None:
    rng = np.random.default_rng(len(form) + tokens)
    w = quantized(form, rng.standard_normal(shape).astype(np.float32))
    x = jnp.asarray(rng.standard_normal((tokens, shape[0])), dtype)
    got = quant_matmul(x, w, out_dtype=jnp.dtype(dtype), target=target, backend=backend)
    want = np.asarray(x, np.float64) @ dequantized(w)
    assert got.shape == want.shape and got.dtype == dtype
    assert np.abs(np.asarray(got, np.float64) - want).max() <= TOLERANCE[dtype] * np.abs(want).max()


PAIRS = pairs.all_pairs(**AXES)


@pytest.mark.parametrize("case", PAIRS, ids=pairs.name)
def test_xla_form(case):
    check(**case, target=CPU, backend="xla")


@pytest.mark.parametrize("case", PAIRS, ids=pairs.name)
def test_triton_body(case):
    check(**case, target=HOPPER, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("case", pairs.every(**AXES), ids=pairs.name)
def test_triton_body_whole_matrix(case):
    check(**case, target=HOPPER, backend="triton")


@pytest.mark.parametrize("form", ["int8", "fp8-block", "int4-all"])
def test_k_that_no_step_divides(form):
    check(form, 3, (100, 40), "float32", HOPPER, "triton")
    check(form, 3, (100, 40), "float32", CPU, "xla")


def test_nibbles_round_trip():
    nibbles = np.random.default_rng(0).integers(0, 16, (192, 10)).astype(np.uint8)
    for group in (32, 64, 192):
        packed = pack_int4(nibbles, group)
        assert packed.shape == (96, 10)
        np.testing.assert_array_equal(unpack_int4(packed, group), nibbles)
    # the first byte of a group holds its first row and the first of its second half
    assert pack_int4(nibbles, 32)[0, 0] == nibbles[0, 0] + 16 * nibbles[16, 0]
    with pytest.raises(ValueError, match="multiple of the group"):
        pack_int4(nibbles, 128)


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_is_within_half_a_step(form):
    w = np.random.default_rng(1).standard_normal((256, 130)).astype(np.float32)
    w[:, 3] = 0  # a channel without a scale of its own
    quant = quantized(form, w)
    error = np.abs(dequantized(quant) - w)
    if quant.kind.startswith("fp8"):  # a step is 2^-3 of the value's power of two, or 2^-9 near zero
        scale = np.asarray(quant.scale, np.float64)
        scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:, :130] if quant.kind == "fp8_block" else scale
        half = np.maximum(np.abs(w) * 2.0**-4, scale * 2.0**-10)
    else:
        scale = np.asarray(quant.scale, np.float64)
        half = 0.5 * (np.repeat(scale, quant.group, 0) if quant.kind == "int4" else scale)
    assert (error <= half * (1 + 1e-5)).all()
    assert error.max() > 0
    assert not error[:, 3].any()


def test_padding_rows_of_x_do_not_spread():
    """Other tokens of the batch may hold anything."""
    w = quantize_int4(np.random.default_rng(2).standard_normal((128, 32)).astype(np.float32), 32, False)
    x = np.ones((4, 128), np.float32)
    x[2:] = np.nan
    got = quant_matmul(jnp.asarray(x), w, out_dtype=jnp.float32, target=HOPPER, backend="triton")
    np.testing.assert_allclose(got[:2], x[:2] @ dequantized(w), rtol=1e-4, atol=1e-4)


def test_choice():
    ampere, turing = Target("cuda", (8, 0), 108), Target("cuda", (7, 5), 40)
    assert choose("int4", 128, "bfloat16", ampere) == "triton"
    assert choose("fp8_block", 128, "bfloat16", HOPPER) == "triton"
    assert choose("int8", 4096, "bfloat16", HOPPER) == choose("fp8", 4096, "bfloat16", HOPPER) == "xla"
    assert choose("int4", 128, "bfloat16", CPU) == choose("fp8", 128, "float32", CPU) == "xla"
    assert choose("int4", 16, "bfloat16", HOPPER) == choose("int4", 128, "float16", turing) == "xla"
    for kind in ("fp8", "fp8_block"):
        for backend in ("auto", "xla", "triton"):
            with pytest.raises(NotImplementedError, match=r"8\.9.*convert them to int8"):
                choose(kind, 128, "bfloat16", ampere, backend)
    with pytest.raises(NotImplementedError, match="no mosaic body"):
        choose("int4", 128, "bfloat16", HOPPER, "mosaic")
    with pytest.raises(NotImplementedError, match="32 is the smallest"):
        choose("int4", 16, "bfloat16", HOPPER, "triton")
    with pytest.raises(NotImplementedError, match=r"not on cpu"):
        choose("int4", 128, "bfloat16", CPU, "triton")
    with pytest.raises(NotImplementedError, match="float64"):
        choose("int4", 128, "float64", HOPPER, "triton")
    with pytest.raises(ValueError, match="the weight"):
        quant_matmul(jnp.ones((2, 64)), quantize_int8(np.ones((32, 8))), out_dtype=jnp.float32)


def test_tiles_fit_the_card_and_splits_fill_it():
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        target = Target("cuda", capability, 128)
        for kind, group, _ in FORMATS.values():
            for tokens in TOKENS:
                for x_bytes in (2, 4):
                    tile = tile_of(kind, group or 4096, tokens, x_bytes, target)
                    piece = tile.block_m * tile.block_k * x_bytes + tile.block_k * tile.block_n // 2
                    assert tile.num_stages * piece <= target.shared_memory
    tile = tile_of("int4", 128, 1, 2, HOPPER)
    assert splits_of(tile, 1, 14336, 4096, HOPPER) == 8 and splits_of(tile, 1, 4096, 28672, HOPPER) == 1
    assert splits_of(tile, 16, 4096, 4096, HOPPER) == 4  # partial sums of many tokens would be the larger part
    assert splits_of(tile, 1, 512, 4096, HOPPER) == 1


def abstract(form: str, k: int, n: int, scale: str = "bfloat16") -> QuantWeight:
    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    kind, group, symmetric = FORMATS[form]
    if kind == "int4":
        scales = array(scale, k // (group or k), n)
        return QuantWeight(array("uint8", k // 2, n), scales, None if symmetric else scales, kind)
    scales = array(scale, -(-k // 128), -(-n // 128)) if kind == "fp8_block" else array(scale, n)
    return QuantWeight(array("int8" if kind == "int8" else "float8_e4m3fn", k, n), scales, None, kind)


def compiled(form: str, shape: str, tokens: int, card: str, backend: str = "triton") -> deviceless.Compiled:
    target, (k, n) = cards.card(card).target(), SHAPES_BY_NAME[shape]

    def product(x, w):
        return quant_matmul(x, w, out_dtype=jnp.bfloat16, target=target, backend=backend)

    x = jax.ShapeDtypeStruct((tokens, k), jnp.bfloat16)
    return deviceless.compile(product, x, abstract(form, k, n), card=card, dump_ptx=True, kernel="quant_matmul")


CARDS = ["a100-80", "h200", "b200"]
SHAPES_BY_NAME = LLAMA_8B | {"odd": ODD}
COMPILE_AXES = {"form": list(FORMATS), "card": CARDS, "tokens": list(TOKENS), "shape": list(LLAMA_8B)}
SHORT_AXES = COMPILE_AXES | {"card": CARDS[:2], "tokens": (1, 64), "shape": list(LLAMA_8B)[:2]}
ODD_COMPILES = [
    {"form": form, "card": "h200", "tokens": 3, "shape": "odd"} for form in ("int8", "fp8", "fp8-block", "int4-all")
]


def card_has(case: pairs.Case) -> bool:
    return not (case["form"].startswith("fp8") and case["card"] == "a100-80")


def check_compiled(form: str, shape: str, tokens: int, card: str) -> None:
    result = compiled(form, shape, tokens, card)
    assert len(result.kernels) == 1
    if deviceless.PTXAS:
        assert result.spill_bytes == 0
    assert "mma" in result.ptx  # tensor cores
    k, n = SHAPES_BY_NAME[shape]
    assert result.memory.temp_size_in_bytes < k * n // 4  # partial sums at most: no widened weight


@deviceless.skip
@pytest.mark.parametrize("case", pairs.all_pairs(card_has, **SHORT_AXES) + ODD_COMPILES, ids=pairs.name)
def test_compiles_for_cards(case):
    check_compiled(**case)


@pytest.mark.slow
@deviceless.skip
@pytest.mark.parametrize("case", pairs.every(card_has, **COMPILE_AXES), ids=pairs.name)
def test_compiles_for_cards_whole_matrix(case):
    check_compiled(**case)


@deviceless.skip
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_xla_takes_channel_scales_into_its_gemm(form):
    result = compiled(form, "qkv", 16, "h200", backend="xla")
    k, n = LLAMA_8B["qkv"]
    assert result.memory.temp_size_in_bytes < k * n // 4  # split-K sums; the widened weight would be 2 k n
