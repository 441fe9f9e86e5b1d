"""Decode and prefill programs of Llama 8B and 70B and of Mixtral, compiled for H200 without one. A few layers: every
further layer is the same again (``scripts/gpu_programs.py`` compiles the whole models)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import jax
import pytest

from lmjax.models.params import param_specs
from lmjax.models.registry import spec_from_hf
from lmjax.runtime import hlo
from lmjax.runtime.buckets import FILTERED, FULL, GPU_SAMPLERS, GREEDY, SampleKey
from lmjax.runtime.programs import sample_program
from tests import deviceless
from tests.gpu_programs import CONFIGS, CONTEXT, Case, make_shapes, read
from tests.marks import slow

pytestmark = deviceless.skip

DECODE, PREFILL = 64, 2048
LLAMA, LARGE, MIXTRAL = "llama-3.1-8b", "llama-3.3-70b", "mixtral-8x7b"
MOST_KERNELS = {(LLAMA, DECODE): 14, (LLAMA, PREFILL): 12, (LARGE, DECODE): 14, (LARGE, PREFILL): 12}
MOST_KERNELS |= {(MIXTRAL, DECODE): 16, (MIXTRAL, PREFILL): 16}
CASES = [
    Case(LLAMA, 1, DECODE),
    Case(LLAMA, 1, PREFILL),
    Case(LARGE, 8, DECODE),
    Case(MIXTRAL, 8, PREFILL),
]
MORE = [
    Case(LLAMA, 2, DECODE),
    Case(LLAMA, 8, DECODE),
    Case(LLAMA, 8, PREFILL),
    Case(LARGE, 8, PREFILL),
    Case(MIXTRAL, 8, DECODE),
]


@pytest.mark.parametrize("case", [*CASES, *map(slow, MORE)], ids=str)
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


@pytest.mark.parametrize("tokens", [DECODE, slow(PREFILL // 2)])
def test_tick_of_a_pipeline(tokens):
    """TP 4 x PP 2: beside the layers' only the embedding, the last hidden states and what moves on travel."""
    found = read(Case(LARGE, 4, tokens, layers=8, pp=2))
    kinds = Counter(c.kind for c in found.launches.collectives)
    assert kinds == {"all-reduce": 2 * found.layers + 2, "collective-permute": 1}
    assert found.alias_bytes >= found.pool_bytes and found.pool_makers == [] and found.launches.loops == 0


@pytest.mark.parametrize(
    "case", [slow(Case(LARGE, 8, DECODE)), Case(LARGE, 4, DECODE, pp=2), Case(MIXTRAL, 8, DECODE)], ids=str
)
def test_parameters_and_sampling(case):
    """A device has its share of the parameters; sampling gathers no vocabulary, and has no condition and no loop."""
    config = json.loads((CONFIGS / f"{case.model}.json").read_text()) | {"num_hidden_layers": case.layers}
    shapes = make_shapes(case, config)
    total = sum(math.prod(p.shape) for p in jax.tree.leaves(param_specs(spec_from_hf(config, CONTEXT))))
    here = sum(math.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(shapes.params()))
    assert here == pytest.approx(total / case.devices, rel=0.02)
    every = [*GPU_SAMPLERS, (FILTERED, False)]
    for level, logprobs in every if case.tp == 8 and case.model == LARGE else [(GREEDY, False)]:
        program = sample_program(shapes, SampleKey(DECODE, level, logprobs))
        done = deviceless.compile(program.function, *program.arguments, devices=case.devices, donate=program.donate)
        found = hlo.launches(hlo.entry(done.text))
        assert found.collective_bytes < 0.1 * DECODE * shapes.spec.vocab * 4
        assert found.loops == 0, "the host reads a condition"
        if level == GREEDY and not logprobs:
            assert [c.kind for c in found.collectives] == ["all-gather"]


@pytest.mark.parametrize(("rows", "level", "most"), [slow(8, FILTERED, 90), (DECODE, FULL, 115)])
def test_sampling_on_one_card(rows, level, most):
    """One CUDA graph, whatever the rows ask for. Of the kernels 64 are the 8 passes of each filter's search."""
    config = json.loads((CONFIGS / f"{LLAMA}.json").read_text()) | {"num_hidden_layers": 2}
    program = sample_program(make_shapes(Case(LLAMA, 1, rows), config), SampleKey(rows, level, level == FULL))
    done = deviceless.compile(
        program.function, *program.arguments, donate=program.donate, dump_ptx=True, kernel="none of them"
    )
    found = hlo.launches(hlo.entry(done.text))
    assert found.loops == 0 and found.kernels <= most
    assert re.findall(r"^\d+: (k\w+)", done.thunks, flags=re.MULTILINE) == ["kCommandBuffer"]


@pytest.mark.parametrize("tokens", [DECODE, slow(PREFILL)])
def test_kernels_of_a_layer_by_difference(tokens):
    """Two more layers launch twice what one layer is counted to launch."""
    two, four = read(Case(LLAMA, 1, tokens, layers=2)), read(Case(LLAMA, 1, tokens))
    more = four.launches.kernels - two.launches.kernels
    assert more == 2 * four.kernels_of_a_layer
    assert abs(four.temporary_bytes - two.temporary_bytes) < 2**20, "temporaries grow with depth"
