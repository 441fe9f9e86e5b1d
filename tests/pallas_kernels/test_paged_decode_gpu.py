"""The decode bodies compiled for cards that aren't there: what they cost, and how they read the pool."""

from __future__ import annotations

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from lmjax.runtime import cards
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import decode_tile
from pallas_kernels.platform import next_power_of_2
from tests import deviceless

DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
TOKENS = 16  # decode rows only: no prefill kernel beside
PLAIN = {"scale": 0.1}
FEATURES = {"scale": 0.1, "window": 1000, "soft_cap": 30.0}
INT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)


def shapes(dtype, dim, *, group=4, block=16, gib=4.5, features=False):
    """(q, pool, what else is an operand) for a pool of more than 4 GiB: offsets of 64 bits, more registers."""
    kv_heads, width = 2, 2048 // block
    size = jnp.dtype(dtype).itemsize
    pool = (4, 2, int(gib * 2**30) // (4 * 2 * kv_heads * block * dim * size) + 1, kv_heads, block, dim)
    rows, scalar = INT((TOKENS,)), INT(())
    operands = dict.fromkeys(("token_rows", "positions", "query_starts", "query_lens", "context_lens"), rows)
    operands |= dict.fromkeys(("layer", "num_decode", "num_rows", "num_tokens"), scalar)
    operands["block_tables"] = INT((TOKENS, width))
    heads = group * kv_heads
    if features:
        operands |= dict.fromkeys(("sinks", "alibi"), jax.ShapeDtypeStruct((heads,), jnp.float32))
    if size == 1:
        operands["kv_scales"] = jax.ShapeDtypeStruct(pool[:-1], jnp.float32)
    q = jax.ShapeDtypeStruct((TOKENS, heads, dim), jnp.bfloat16 if size == 1 else dtype)
    return q, jax.ShapeDtypeStruct(pool, dtype), operands


def compiled(card, cases, backend="auto", options=PLAIN):
    """The kernels "paged_..." of one program that attends once a case."""

    def program(cases):
        target = cards.card(card).target()
        call = functools.partial(paged_attention, **options, target=target, backend=backend)
        return [call(q, pool, **operands) for q, pool, operands in cases]

    return deviceless.compile(program, cases, card=card, dump_ptx=True, kernel="paged").kernels


@deviceless.skip
@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=pytest.mark.slow if t in ("float16", "float32") else ()) for t in DTYPES]
)
@pytest.mark.parametrize("card", ["a100-80", "b200"])
def test_compiles_for_the_other_cards_or_is_refused(card, dtype):
    forms = ((80, 1), (128, 3), (256, 8)) if dtype != "float32" else ((128, 3),)  # its products compile slowly
    cases = [shapes(dtype, dim, group=group) for dim, group in forms]
    if dtype == "float8_e4m3fn" and card == "a100-80":
        with pytest.raises(NotImplementedError, match=r"8\.9"):
            compiled(card, cases)
        return
    kernels = compiled(card, cases)
    assert len(kernels) == 2 * len(cases)
    assert sum(kernel.spill_bytes for kernel in kernels) == 0


@deviceless.skip
@pytest.mark.parametrize(
    ("dtype", "features"), [*((dtype, True) for dtype in DTYPES), ("bfloat16", False)], ids=lambda value: str(value)
)
def test_on_hopper_registers_and_loads(dtype, features):
    cases = [shapes(dtype, dim, features=features) for dim in (64, 128, 256)]
    kernels = compiled("h200", cases, options=FEATURES if features else PLAIN)
    assert len(kernels) == 2 * len(cases)
    if deviceless.PTXAS:
        assert sum(kernel.spill_bytes for kernel in kernels) == 0
        assert max(kernel.registers for kernel in kernels) <= 168
    decode = [loads(kernel.ptx) for kernel in kernels if "decode" in kernel.name]
    decode.sort(key=lambda found: sum(size * n for size, n in found.items()))
    tiles = sorted(tile_bytes(*case[:2], cards.card("h200").target()) for case in cases)
    for found, tile in zip(decode, tiles, strict=True):
        check_loads(found, tile, least=8 if jnp.dtype(dtype).itemsize == 1 else 16)


@deviceless.skip
@pytest.mark.parametrize(("dtype", "dim", "group", "block"), [("bfloat16", 128, 4, 16), ("float16", 64, 8, 8)])
def test_mosaic_body_compiles_for_hopper(dtype, dim, group, block):
    q, pool, operands = shapes(dtype, dim, group=group, block=block, features=True)
    del operands["alibi"]
    kernels = compiled("h200", [(q, pool, operands)], backend="mosaic", options=FEATURES)
    assert [kernel.name for kernel in kernels] == ["paged_combine"]  # Mosaic's own kernel is not among XLA's files


def loads(ptx):
    """{bytes a thread takes: how many such loads from global memory there are in the text}"""
    sizes = [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", ptx)]
    for vector, bits in re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+) ", ptx):
        sizes.append(int(vector or 1) * int(bits) // 8)
    return Counter(sizes)


def tile_bytes(q, pool, target):
    """Of the keys or the values of one tile, for one thread."""
    tile = decode_tile(q, pool, target)
    return tile["block"] * next_power_of_2(pool.shape[5]) * pool.dtype.itemsize // (32 * tile["num_warps"])


def check_loads(found, tile, least):
    """Scalars, block ids, scales, slopes are loads of 4 to 8 bytes; a tile read like that would be dozens of them."""
    assert sum(size * n for size, n in found.items() if size >= least) >= 2 * tile, found
    assert sum(n for size, n in found.items() if size < least) <= 20, found
