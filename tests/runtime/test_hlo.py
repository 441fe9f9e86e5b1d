"""Counting launches in the text of optimized HLO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lmjax.runtime.hlo import Collective, entry, large_copies, launches, layer_launches, shape_bytes
from tests import deviceless

TEXT = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %x = f32[8]{0} copy(%p)
}

ENTRY %main (a: bf16[8,4], b: bf16[4]) -> bf16[8,4] {
  %params_layers_0__attn_norm.1 = bf16[4]{0} parameter(0), metadata={op_name="params.layers[0].attn.norm"}
  %w1 = bf16[4]{0} parameter(1), metadata={op_name="params.layers[1].attn.norm"}
  %w2 = bf16[4]{0} parameter(2), metadata={op_name="params.layers[2].attn.norm"}
  %embed.1 = bf16[8,4]{1,0} parameter(3)
  %first = bf16[8,4]{1,0} fusion(%embed.1), kind=kLoop, calls=%fused
  %zero = (bf16[8,4]{1,0}, /*index=1*/s32[]) fusion(%first, %params_layers_0__attn_norm.1), kind=kInput, calls=%fused
  %gte.0 = bf16[8,4]{1,0} get-tuple-element(%zero), index=0
  %cast = bf16[1,4]{1,0} bitcast(%w1)
  %one = bf16[8,4]{1,0} fusion(%gte.0, %cast), kind=kLoop, calls=%fused
  %reduce = bf16[8,4]{1,0} all-reduce-start(%one), replica_groups={{0,1}}, to_apply=%add
  %done = bf16[8,4]{1,0} all-reduce-done(%reduce)
  %call.1 = bf16[8,4]{1,0} custom-call(%done), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="x(y)"}
  %two = bf16[8,4]{1,0} fusion(%call.1, %w2), kind=kLoop, calls=%fused
  %gather = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%two), dimensions={0}
  %gathered = bf16[16,4]{1,0} all-gather-done(%gather)
  %both = (f32[4]{0}, f32[2]{0}) all-reduce(%gathered, %gathered), to_apply=%add
  %loop = (s32[]) while(%both), condition=%c, body=%b
  ROOT %copy.9 = bf16[8,4]{1,0} copy(%two)
}
"""


def test_launches_of_an_entry():
    found = launches(entry(TEXT))
    assert found.kernels == 6 and found.loops == 1
    assert found.collectives == (
        Collective("all-reduce", 64),
        Collective("all-gather", 128),
        Collective("all-reduce", 24),
    )
    assert found.collective_bytes == 216


def test_a_layer_begins_with_the_first_use_of_its_weights():
    inner = layer_launches(entry(TEXT))
    assert list(inner) == [1]
    assert inner[1].kernels == 2 and inner[1].collectives == (Collective("all-reduce", 64),)


def test_copies_by_size():
    assert [i.name for i in large_copies(entry(TEXT), 64)] == ["copy.9"]
    assert large_copies(entry(TEXT), 65) == []


def test_bytes_of_shapes():
    assert shape_bytes("(f32[2,3]{1,0}, /*index=1*/s8[7]{0}, pred[], f8e4m3fn[5], s4[3])") == 24 + 7 + 1 + 5 + 2


@deviceless.skip
def test_counts_are_those_of_the_real_launch_list():
    mesh = deviceless.mesh("h200", 2)

    def step(x, w):
        for i in range(3):
            x = jax.lax.psum(jax.nn.silu(x @ w[i]) @ w[i].T, "tp")
        return x

    wrapped = jax.shard_map(
        step, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(None, None, "tp")), out_specs=PartitionSpec()
    )
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((3, 512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, None, "tp")))
    compiled = deviceless.compile(wrapped, x, w, devices=2, dump_ptx=True)
    found = launches(entry(compiled.text))
    assert found.collectives == (Collective("all-reduce", 256 * 512 * 2),) * 3
    kinds = [line.split()[1] for line in compiled.thunks.splitlines() if ": k" in line]
    assert found.kernels == sum(kind in ("kCustomKernel", "kKernel", "kGemm", "kCublasLtMatmul") for kind in kinds)
    assert sum("AllReduce" in kind and "Done" not in kind for kind in kinds) == 3
