"""The prefill and kv_write bodies compiled for cards that aren't there."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from lmjax.runtime import cards
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import choose
from pallas_kernels.paged_attention.prefill import prefill_triton
from tests import deviceless
from tests.pairs import all_pairs, every, name

CARDS = ("a100-80", "h200", "b200")  # 8.0, 9.0, 10.0
DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
ROWS, KV_HEADS, BLOCK = 64, 2, 16
INT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
FLOAT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def pool_of(dtype, dim, gib=4.5):
    """More than 4 GiB: offsets of 64 bits, more registers."""
    size = KV_HEADS * BLOCK * dim * jnp.dtype(dtype).itemsize
    return jax.ShapeDtypeStruct((4, 2, int(gib * 2**30) // (8 * size) + 1, KV_HEADS, BLOCK, dim), dtype)


def refused(card, dtype):
    """Says that the case is refused, and looks that it is; what isn't asked of the compiler can't abort in it."""
    target = cards.card(card).target()
    if dtype != "float8_e4m3fn" or target.has_fp8:
        return False
    q = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"8\.9"):
        choose(q, pool_of(dtype, 128), target=target)
    (pool, scales), (qkv, operands) = write_case(dtype, *WRITES[0])
    with pytest.raises(NotImplementedError, match=r"8\.9"):
        jax.eval_shape(write(target), qkv, pool, operands | scales)
    return True


def prefill_case(dtype, dim, group, tokens, features):
    """out, (q, pool, the arrays)"""
    pool = pool_of(dtype, dim)
    q = jax.ShapeDtypeStruct((tokens, group * KV_HEADS, dim), jnp.bfloat16 if pool.dtype.itemsize == 1 else dtype)
    arrays = dict.fromkeys(("query_starts", "query_lens", "context_lens"), INT((ROWS,)))
    arrays |= dict.fromkeys(("layer", "num_decode", "num_rows"), INT(()))
    arrays["block_tables"] = INT((ROWS, 1024))
    arrays |= dict.fromkeys(("sinks", "alibi"), FLOAT(q.shape[1:2]) if features else None)
    arrays["kv_scales"] = FLOAT(pool.shape[:-1]) if pool.dtype.itemsize == 1 else None
    return q, (q, pool, arrays)


def compile_prefill(card, dtype, forms, features):
    """forms: (head dim, group, tokens)"""
    target = cards.card(card).target()
    options = {"scale": 0.1, "soft_cap": 30.0 if features else None, "window": 4096 if features else None}
    outs, cases = zip(*(prefill_case(dtype, *form, features) for form in forms), strict=True)

    def program(outs, cases):
        calls = zip(outs, cases, strict=True)
        return [prefill_triton(q, out, pool, **more, **options, target=target) for out, (q, pool, more) in calls]

    return deviceless.compile(program, outs, cases, card=card, donate=(0,), dump_ptx=True, kernel="paged_prefill")


AXES = {
    "dtype": DTYPES,
    "form": [(64, 1, 2048), (128, 4, 8192), (96, 3, 512), (256, 8, 2048)],
    "card": CARDS,
    "features": [False, True],
}
INSTRUCTION = {"a100-80": "mma.sync", "h200": "wgmma.mma_async", "b200": "tcgen05.mma"}


def check_prefill(dtype, form, card, features):
    if refused(card, dtype):
        return
    compiled = compile_prefill(card, dtype, [form], features)
    assert len(compiled.kernels) == 1
    assert compiled.spill_bytes == 0
    if dtype != "float32":  # float32 products are exact: no tensor cores
        assert INSTRUCTION.get(card, "mma") in compiled.ptx
        loads = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", compiled.ptx)
        assert max(int(size, 0) for size in loads) >= (8 if jnp.dtype(dtype).itemsize == 1 else 16)


@deviceless.skip_ptxas
@pytest.mark.parametrize("case", all_pairs(**AXES | {"dtype": ("bfloat16", "int8", "float8_e4m3fn")}), ids=name)
def test_prefill_does_not_spill(case):
    check_prefill(**case)


MORE = {"form": [(64, 4, 32), (80, 4, 8192), (128, 1, 8192), (128, 16, 64), (256, 1, 512)]}
OTHERS = {"card": ["a100-40", "h100", "l4", "rtx6000pro"]}  # l4 and rtx6000pro have less shared memory


@deviceless.skip_ptxas
@pytest.mark.slow
@pytest.mark.parametrize("case", every(**AXES) + every(**AXES | MORE) + every(**AXES | OTHERS), ids=name)
def test_prefill_does_not_spill_anywhere(case):
    check_prefill(**case)


@deviceless.skip
def test_prefill_writes_in_place():
    compiled = compile_prefill("h200", "bfloat16", [(128, 4, 2048)], False)
    assert not re.findall(r"= \S+ copy\(", compiled.text)
    assert compiled.memory.temp_size_in_bytes < 2**20


def write(target):
    return lambda qkv, pool, operands: kv_write(qkv, pool, **operands, target=target)


def write_operands(tokens, rotary):
    tables = FLOAT((rotary // 2, tokens))
    return {"cos": tables, "sin": tables, "block_ids": INT((tokens,)), "offsets": INT((tokens,)), "layer": INT(())}


WRITES = [(16, 128, 128, True), (2048, 128, 128, False), (2048, 80, 32, True)]  # T, H, R, whether heads are normed


def write_case(dtype, tokens, dim, rotary, norm):
    """(pool, its scales), (qkv, the other operands)"""
    pool = pool_of(dtype, dim)
    operands = write_operands(tokens, rotary)
    qkv = jax.ShapeDtypeStruct((KV_HEADS, 6, dim, tokens), jnp.bfloat16 if pool.dtype.itemsize == 1 else dtype)
    if norm:
        operands |= dict.fromkeys(("q_norm", "k_norm"), jax.ShapeDtypeStruct((dim,), qkv.dtype))
    scales = {"kv_scales": FLOAT(pool.shape[:-1])} if pool.dtype.itemsize == 1 else {}
    return (pool, scales), (qkv, operands)


@deviceless.skip_ptxas
@pytest.mark.parametrize("case", all_pairs(dtype=DTYPES, card=CARDS, form=WRITES), ids=name)
def test_kv_write_does_not_spill(case):
    check_write(**case)


@deviceless.skip_ptxas
@pytest.mark.slow
@pytest.mark.parametrize("case", every(dtype=DTYPES, card=[*CARDS, *OTHERS["card"]], form=WRITES), ids=name)
def test_kv_write_does_not_spill_anywhere(case):
    check_write(**case)


def check_write(dtype, card, form):
    if refused(card, dtype):
        return
    (pool, scales), (qkv, more) = write_case(dtype, *form)
    target = cards.card(card).target()

    def program(held, qkv, more):
        return write(target)(qkv, held[0], more | held[1])

    compiled = deviceless.compile(
        program, (pool, scales), qkv, more, card=card, donate=(0,), dump_ptx=True, kernel="kv_write"
    )
    assert len(compiled.kernels) == 1
    assert compiled.spill_bytes == 0
    assert compiled.memory.alias_size_in_bytes == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves((pool, scales))
    )
    assert not re.findall(r"= \S+ copy\(", compiled.text)


@deviceless.skip
@pytest.mark.parametrize("tokens", [16, 512])
def test_the_projection_writes_what_kv_write_reads(tokens):
    """No transpose between them: feature-major qkv [K, G + 2, H, T] is a matter of the GEMM's output layout."""
    weight = jax.ShapeDtypeStruct((8 * 6 * 128, 1024), jnp.bfloat16)
    x, positions = jax.ShapeDtypeStruct((1024, tokens), jnp.bfloat16), INT((tokens,))
    pool = jax.ShapeDtypeStruct((2, 2, 64, 8, BLOCK, 128), jnp.bfloat16)
    target = cards.card("h200").target()

    def program(pool, weight, x, positions):
        angle = positions.astype(jnp.float32)[None] * jnp.arange(1.0, 65.0, dtype=jnp.float32)[:, None]
        qkv = jax.lax.dot_general(weight, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        qkv = qkv.astype(x.dtype).reshape(8, 6, 128, tokens)
        where = {"layer": 0, "block_ids": positions // BLOCK, "offsets": positions % BLOCK}
        return kv_write(qkv, pool, cos=jnp.cos(angle), sin=jnp.sin(angle), **where, target=target)

    text = deviceless.compile(program, pool, weight, x, positions, card="h200", donate=(0,)).text
    entry = text[text.index("ENTRY") :]
    assert "kv_write" in text or "triton" in entry
    assert not re.findall(r"= \S+ (?:copy|transpose)\(|transpose\S* = \S+ fusion\(", entry)
