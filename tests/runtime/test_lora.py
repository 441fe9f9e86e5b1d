"""Programs, buffers and bytes of adapters, and that without ``--enable-lora`` there is nothing of them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from lmjax.config import EngineConfig
from lmjax.models.registry import spec_from_hf
from lmjax.runtime.buckets import Buckets
from lmjax.runtime.inputs import InputPacker, forward_layout
from lmjax.runtime.plan_costs import bytes_per_device
from lmjax.runtime.programs import LOAD_ADAPTER, all_programs
from lmjax.runtime.resolve import _copied_bytes
from tests.runtime.test_plan import shapes_for
from tests.runtime.tiny import make_plan

LLAMA = json.loads((Path(__file__).parents[1] / "configs" / "llama-3.1-8b.json").read_text())


def plan_of(adapters=None, **fields):
    plan = make_plan(decode=[(0, 5), (3, 7)], prefill=[(1, 0, [7, 8, 9], True)], **fields)
    return replace(plan, adapters=None if adapters is None else np.array(adapters, np.int32))


@pytest.mark.parametrize("targets", [None, [1, 2, 3]])
def test_a_step_with_an_adapter_runs_on_the_second_form(targets):
    off, on, always = (Buckets(8, 32, adapters=kind) for kind in (False, True, "always"))
    base, mixed = plan_of(targets=targets), plan_of([-1, 2, 0], targets=targets)
    assert on.choose(base) == off.choose(base) and not on.choose(base).adapters
    assert on.choose(mixed) == replace(on.choose(base), adapters=True)
    assert always.choose(base) == always.choose(mixed) == on.choose(mixed)
    assert set(on.every_forward) == {replace(key, adapters=form) for key in off.every_forward for form in (False, True)}
    assert len(always.every_forward) == len(off.every_forward) == len(on.every_forward) / 2
    assert len({key.name for key in on.every_forward}) == len(on.every_forward)


def test_rows_have_slots_and_padding_has_none():
    packer = InputPacker(Buckets(8, 32, adapters=True), max_num_seqs=8, block_size=4, num_groups=1)
    for adapters in ([-1, 2, 0], [1, 1, -1]):  # buffers are used again
        for _ in range(4):
            packed = packer.pack(plan_of(adapters))
            parts = forward_layout(packed.forward_key, 1, 4).split(packed.forward)
            assert parts["adapters"].tolist() == adapters + [-1] * 5
    packed = packer.pack(plan_of())
    assert "adapters" not in forward_layout(packed.forward_key, 1, 4).shapes
    packer = InputPacker(Buckets(8, 32, adapters="always"), max_num_seqs=8, block_size=4, num_groups=1)
    packed = packer.pack(plan_of())
    assert forward_layout(packed.forward_key, 1, 4).split(packed.forward)["adapters"].tolist() == [-1] * 8


def test_without_adapters_programs_are_as_before():
    shapes = shapes_for({"model_type": "llama", **_SMALL})
    off = all_programs(shapes, Buckets(4, 8))
    assert LOAD_ADAPTER not in off and shapes.loras() is None
    on = all_programs(replace(shapes, adapters=(2, 8)), Buckets(4, 8, adapters=True))
    assert {key for key in on if key not in off} == {
        LOAD_ADAPTER,
        *(replace(key, adapters=True) for key in Buckets(4, 8).every_forward),
    }
    for key, program in off.items():
        assert jax.tree.structure(program.arguments) == jax.tree.structure(on[key].arguments)
        assert program.donate == on[key].donate


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_bytes_of_a_real_model():
    """Llama 3.1 8B: r (in + out) numbers for each module, but that q, k, v and gate, up have an A each."""
    spec = spec_from_hf(LLAMA, None)
    d, q, kv, f, layers = 4096, 4096, 1024, 14336, 32
    rank = 16
    one = 2 * layers * rank * (3 * d + q + 2 * kv + q + d + 2 * d + 2 * f + f + d)
    shapes = replace(shapes_for(LLAMA), adapters=(8, rank))
    assert shapes.spec.layers == spec.layers
    assert bytes_per_device(shapes.loras(), 1) == 8 * one
    assert bytes_per_device(shapes.loras(slots=1), 1) == one
    # while one is put into its slot, it lies beside
    assert _copied_bytes(shapes) - _copied_bytes(replace(shapes, adapters=None)) == one


def test_settings_are_part_of_the_identity(monkeypatch):
    from lmjax.runtime import identity
    from lmjax.runtime.resolve import Resolved

    monkeypatch.setattr(identity, "versions", lambda device: {})
    monkeypatch.setattr(identity, "device_facts", lambda device: {})
    spec, kv = shapes_for(LLAMA).spec, shapes_for(LLAMA).kv_specs
    found = []
    for settings in ({}, {"enable_lora": True}, {"enable_lora": True, "max_loras": 2}):
        resolved = Resolved(EngineConfig(**settings), None, "cpu", spec, "bfloat16", kv, 4, 64)
        found.append(identity.identity(resolved, [None])["--enable-lora"])
    assert found == ["no", "8 slots of rank 16", "2 slots of rank 16"]
