"""Decode and prefill programs of Llama 8B and 70B and of Mixtral, compiled for H200 without one. A few layers: every
further layer is the same again (``scripts/gpu_programs.py`` compiles the whole models)."""

from __future__ import annotations

import pytest

from tests import deviceless
from tests.gpu_programs import Case, read

pytestmark = deviceless.skip

DECODE, PREFILL = 64, 2048
LLAMA, LARGE, MIXTRAL = "llama-3.1-8b", "llama-3.3-70b", "mixtral-8x7b"
MOST_KERNELS = {(LLAMA, DECODE): 14, (LLAMA, PREFILL): 12, (LARGE, DECODE): 14, (LARGE, PREFILL): 12}
MOST_KERNELS |= {(MIXTRAL, DECODE): 16, (MIXTRAL, PREFILL): 16}
CASES = [
    Case(LLAMA, 1, DECODE),
    Case(LLAMA, 1, PREFILL),
    Case(LLAMA, 2, DECODE),
    Case(LLAMA, 8, DECODE),
    Case(LLAMA, 8, PREFILL),
    Case(LARGE, 8, DECODE),
    Case(LARGE, 8, PREFILL),
    Case(MIXTRAL, 8, DECODE),
    Case(MIXTRAL, 8, PREFILL),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_program(case):
    found = read(case)
    assert found.alias_bytes >= found.pool_bytes, "the pool is not updated in place"
    assert found.pool_makers == [], "something writes a whole pool"
    assert [i.name for i in found.instructions if i.opcode.startswith("copy") and "[4096" in i.shape] == []
    assert found.launches.loops == 0, "the host drives a loop"
    assert found.num_all_reduces == (2 * case.layers + 1 if case.tp > 1 else 0)
    assert found.kernels_of_a_layer <= MOST_KERNELS[case.model, case.tokens]
    if case.tp == 1:
        assert (found.num_command_buffers, found.num_host_launches) == (1, 1), "more than one CUDA graph"


@pytest.mark.parametrize("tokens", [DECODE, PREFILL])
def test_kernels_of_a_layer_by_difference(tokens):
    """Two more layers launch twice what one layer is counted to launch."""
    two, four = read(Case(LLAMA, 1, tokens, layers=2)), read(Case(LLAMA, 1, tokens))
    more = four.launches.kernels - two.launches.kernels
    assert more == 2 * four.kernels_of_a_layer
    assert abs(four.temporary_bytes - two.temporary_bytes) < 2**20, "temporaries grow with depth"
