"""grouped_matmul and its routing compiled for cards that aren't there: registers, spills, tensor cores, loads."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from lmjax.runtime import cards
from pallas_kernels.grouped_matmul import (
    Groups,
    default_block_rows,
    group_rows,
    grouped_lora,
    grouped_matmul,
    max_blocks,
    route,
)
from pallas_kernels.grouped_matmul.shapes import LORA, MODELS, TOKENS, WEIGHTS, rows_dtype
from tests import deviceless, pairs

CARDS = ("a100-80", "h200", "b200")  # 8.0, 9.0, 10.0
TENSOR_OP = {"a100-80": "mma.sync", "h200": "wgmma.mma_async", "b200": "tcgen05.mma"}
pytestmark = deviceless.skip  # without ptxas no spill is seen, but that it compiles is
INT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
FLOAT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def has(case):
    return case["weights"] != "float8_e4m3fn" or cards.card(case["card"]).target().has_fp8


AXES = {"card": CARDS, "weights": WEIGHTS, "model": ("mixtral-8x7b", "qwen3-30b-a3b"), "tokens": TOKENS}


def abstract_groups(tokens, top_k, groups, block):
    blocks = max_blocks(tokens, top_k, groups, block)
    return Groups(INT((tokens, top_k)), INT((blocks * block,)), INT((blocks,)))


def check_experts(card, weights, model, tokens):
    target, m, dtype = cards.card(card).target(), MODELS[model], rows_dtype(weights)
    block = default_block_rows(tokens, m.top_k, m.experts, target)
    scaled = weights in ("int8", "float8_e4m3fn")

    def mlp(x, gate_up, down, scales, groups):
        a, b = scales if scaled else (None, None)
        h = grouped_matmul(x, gate_up, groups, scale=a, activation="silu", target=target)
        return grouped_matmul(h, down, groups, scale=b, sorted_rows=True, target=target)

    compiled = deviceless.compile(
        mlp,
        jax.ShapeDtypeStruct((tokens, m.hidden), dtype),
        jax.ShapeDtypeStruct((m.experts, 2, m.ffn, m.hidden), weights),
        jax.ShapeDtypeStruct((m.experts, m.hidden, m.ffn), weights),
        (FLOAT((m.experts, 2, m.ffn)), FLOAT((m.experts, m.hidden))),
        abstract_groups(tokens, m.top_k, m.experts, block),
        card=card,
        dump_ptx=True,
        kernel="grouped_matmul",
    )
    assert len(compiled.kernels) == 2 and compiled.spill_bytes == 0
    for kernel in compiled.kernels:
        if weights != "float32":  # which is multiplied in full precision
            assert ("mma.sync" if block == 16 else TENSOR_OP[card]) in kernel.ptx
        # rows are gathered 16 bytes at a time
        assert re.search(r"cp\.async\.cg\.shared\.global[^;]*, 0x10", kernel.ptx)


@pytest.mark.parametrize("case", pairs.all_pairs(has, **AXES), ids=pairs.name)
def test_experts(case):
    check_experts(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairs.every(has, **AXES), ids=pairs.name)
def test_experts_everywhere(case):
    check_experts(**case)


@pytest.mark.parametrize(
    ("card", "model"), [("a100-80", "qwen3-30b-a3b"), ("h200", "mixtral-8x7b"), ("b200", "qwen3-30b-a3b")]
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_routing(card, model, tokens):
    """Logits to rows: one kernel for a decode step's tokens, two for many."""
    target, m = cards.card(card).target(), MODELS[model]
    how = {
        "top_k": m.top_k,
        "normalise": True,
        "block_rows": default_block_rows(tokens, m.top_k, m.experts, target),
        "target": target,
    }
    compiled = deviceless.compile(
        lambda logits, real: route(logits, real, **how), FLOAT((tokens, m.experts)), INT(()), card=card, dump_ptx=True
    )
    assert len(compiled.kernels) == (1 if tokens == 64 else 2)
    assert all("route" in kernel.name for kernel in compiled.kernels) and compiled.spill_bytes == 0


@pytest.mark.parametrize(("card", "name"), list(zip(CARDS, LORA, strict=True)))
def test_adapters(card, name):
    target, (adapters, rank, k, n), tokens = cards.card(card).target(), LORA[name], 64

    def delta(x, a, b, ids):
        groups = group_rows(ids, groups=adapters, block_rows=16, target=target)
        return grouped_lora(x, a, b, groups, target=target)

    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    operands = half((tokens, k)), half((adapters, rank, k)), half((adapters, n, rank)), INT((tokens, 1))
    compiled = deviceless.compile(delta, *operands, card=card, dump_ptx=True)
    assert len(compiled.kernels) <= 4 and compiled.spill_bytes == 0
