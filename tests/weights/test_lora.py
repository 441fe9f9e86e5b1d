"""PEFT directories: what is read, and that what is wrong is one line with the file, the field and what is allowed."""

import json
import math
import os
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmjax.models.registry import spec_from_hf
from lmjax.parallel.split import Degree, spread
from lmjax.types import AdapterError
from lmjax.weights.lora import read_adapter
from lmjax.weights.lora_config import read_config
from tests import tiny, tiny_loras

NAME = "some"  # q_proj and down_proj, rank 5
# as peft 0.21.2 writes it
WRITTEN = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def spec_of(case=tiny_loras.MODEL):
    return spec_from_hf(tiny.CASES[case].config, None)


def read(path, case=tiny_loras.MODEL, max_rank=16, dtype="float32", tp=1):
    spec = spec_of(case)
    return read_adapter(path, spec, spread(spec, Degree(tp=tp)), dtype, max_rank)


def edited(path, settings=None, tensors=None, name=NAME):
    """The adapter with some settings changed (None: taken out), and ``tensors`` (a function of them) applied."""
    tiny_loras.write(name, path)
    config = path / "adapter_config.json"
    values = json.loads(config.read_text()) | (settings or {})
    config.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    if tensors:
        stored = load_file(path / "adapter_model.safetensors")
        tensors(stored)
        save_file(stored, path / "adapter_model.safetensors")
    return path


def refused(path, **how):
    with pytest.raises(AdapterError) as caught:
        read(path, **how)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and not caught.value.unknown
    return message


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_a_config_as_peft_writes_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(WRITTEN))
    found = read_config(tmp_path)
    assert (found.rank, found.scale_of("model.layers.0.self_attn.q_proj"), found.modules) == (
        8,
        2,
        ("q_proj", "v_proj"),
    )


def test_scale_is_a_factor_of_b_and_ranks_are_filled_up(tmp_path):
    found = read(edited(tmp_path, {"lora_alpha": 15}))
    stored, layer = tiny_loras.tensors(NAME), found.tree[0]
    a, b = stored[f"{Q}.lora_A.weight"], stored[f"{Q}.lora_B.weight"]
    assert found.rank == 5
    np.testing.assert_array_equal(layer.qkv.a[0, :5], a)
    q = layer.qkv.b[0]  # [K, G, H, R]
    np.testing.assert_allclose(q[..., :5].reshape(b.shape), b * 3, rtol=1e-6)
    for rest in (layer.qkv.a[0, 5:], q[..., 5:], layer.qkv.a[1:], *layer.qkv.b[1:], layer.o.a, layer.gate_up.a):
        assert rest.size and not rest.any()
    assert read(edited(tmp_path, {"lora_alpha": 15, "use_rslora": True})).tree[0].qkv.b[0].flat[0] == pytest.approx(
        q.flat[0] * math.sqrt(5)
    )


def test_a_type_of_fewer_bits_is_rounded_once(tmp_path):
    exact, found = read(edited(tmp_path)), read(edited(tmp_path), dtype="bfloat16")
    np.testing.assert_array_equal(found.tree[1].down.b[0], exact.tree[1].down.b[0].astype(ml_dtypes.bfloat16))

    def half(stored):
        stored |= {name: x.astype(np.float16) for name, x in stored.items()}

    np.testing.assert_allclose(read(edited(tmp_path, tensors=half)).tree[1].down.a, exact.tree[1].down.a, rtol=1e-3)


def test_kv_heads_that_several_devices_hold(tmp_path):
    """2 KV heads on 4 devices: each is there twice, next to itself; queries keep their order."""
    name = "many0"
    one, four = (read(tiny_loras.write(name, tmp_path), tp=tp).tree[1] for tp in (1, 4))
    for part in (1, 2):
        np.testing.assert_array_equal(four.qkv.b[part], np.repeat(one.qkv.b[part], 2, axis=0))
    np.testing.assert_array_equal(four.qkv.b[0].reshape(-1), one.qkv.b[0].reshape(-1))
    np.testing.assert_array_equal(four.o.a, one.o.a)


def test_names_of_a_model_without_its_head(tmp_path):
    def shorter(stored):
        for name in list(stored):
            stored[name.replace("base_model.model.model.", "base_model.model.")] = stored.pop(name)

    found = read(edited(tmp_path, tensors=shorter))
    np.testing.assert_array_equal(found.tree[0].qkv.a[0, :5], tiny_loras.tensors(NAME)[f"{Q}.lora_A.weight"])


SETTINGS = {
    "kind": ({"peft_type": "IA3"}, "peft_type: got 'IA3', must be LORA"),
    "no kind": ({"peft_type": "absent"}, "peft_type: got None, must be LORA"),
    "bias": ({"bias": "lora_only"}, "bias: got 'lora_only', must be none"),
    "dora": ({"use_dora": True}, "use_dora: got True, must be absent: DoRA is not built"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save: got ['lm_head'], must be absent"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: got"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices: got [1]"),
    "replication": ({"layer_replication": [[0, 1]]}, "layer_replication: got [[0, 1]]"),
    "from the future": ({"use_xlora": 3}, "use_xlora: got 3, must be absent: this is not built"),
    "pissa": (
        {"init_lora_weights": "pissa"},
        "init_lora_weights: got 'pissa', which has changed the base model's weights",
    ),
    "rank": ({"r": 0}, "r: got 0, must be an integer of at least 1"),
    "rank of another type": ({"r": "8"}, "r: got '8', must be an integer"),
    "alpha": ({"lora_alpha": None}, "lora_alpha: got None, must be a number"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora: got 'yes', must be true or false"),
    "rank pattern": (
        {"rank_pattern": {"q_proj": 0}},
        "rank_pattern: got 'q_proj': 0, must have integers of at least 1",
    ),
    "rank list": ({"rank_pattern": [1]}, "rank_pattern: got [1], must be an object"),
    "alpha pattern": ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: got 'q_proj': 'x', must have numbers"),
    "no pattern": ({"alpha_pattern": {"(": 1}}, "alpha_pattern: got '(', which is no regular expression"),
    "no modules": ({"target_modules": []}, "target_modules: got [], must be a list of names"),
    "pattern of modules": ({"target_modules": "("}, "target_modules: got '(', which is no regular expression"),
    "tensors of a module that is no target": ({"target_modules": ["q_proj"]}, "leaves out (target_modules)"),
    "of one that the pattern misses": ({"target_modules": r".*layers\.0\..*"}, "leaves out (target_modules)"),
    "of one that is excluded": ({"exclude_modules": ["down_proj"]}, "leaves out (exclude_modules)"),
    "of another layer": ({"layers_to_transform": [1]}, "leaves out (layers_to_transform)"),
    "of a layer by another name": (
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "h"},
        "leaves out (layers_to_transform)",
    ),
    "no layer": ({"layers_to_transform": "all"}, "layers_to_transform: got 'all', must be the number of a layer"),
    "unknown module": (
        {"target_modules": ["q_proj", "lm_head"]},
        "target_modules: got 'lm_head', must be of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    ),
    "another rank than the tensors'": ({"r": 6}, "has shape [5, 40], must be [6, 40] (r 6, and the model's"),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|down)_proj"},
        {"exclude_modules": r"model\.layers\.\d+\.mlp\.up_proj"},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": "layers"},
        {"layers_to_transform": [0, 1, 2], "layers_pattern": ["blocks", "layers"]},
    ],
)
def test_other_ways_to_say_which_modules(changes, tmp_path):
    jax.tree.map(np.testing.assert_array_equal, read(edited(tmp_path, changes)).tree, read(edited(tmp_path)).tree)


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_refused(case, tmp_path):
    changes, message = SETTINGS[case]
    assert message in refused(edited(tmp_path, changes))


def put(name, *shape, value=0.5):
    return lambda stored: stored.update({name: np.full(shape, value, np.float32)})


TENSORS = {
    "missing half": (lambda stored: stored.pop(f"{Q}.lora_B.weight"), "lora_B.weight of model.layers.0.self_attn"),
    "shape": (put(f"{Q}.lora_B.weight", 161, 5), "has shape [161, 5], must be [160, 5]"),
    "NaN": (
        put(f"{Q}.lora_A.weight", 5, 160, value=np.nan),
        f"tensor {Q}.lora_A.weight has NaN or infinite values",
    ),
    "infinite": (
        put(f"{Q}.lora_A.weight", 5, 160, value=np.inf),
        f"tensor {Q}.lora_A.weight has NaN or infinite values",
    ),
    "head": (put("base_model.model.lm_head.lora_A.weight", 5, 160), "tensor base_model.model.lm_head.lora_A.weight"),
    "embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", 5, 96), "lora_embedding_A: must be"),
    "another layer": (put(Q.replace("layers.0", "layers.7") + ".lora_A.weight", 5, 160), "layers.7"),
    "whole module": (put("base_model.model.lm_head.weight", 96, 160), "tensor base_model.model.lm_head.weight: must"),
    "magnitude": (put(f"{Q}.lora_magnitude_vector", 160), "lora_magnitude_vector: must be lora_A.weight or lora_B"),
    "integers": (
        lambda stored: stored.update({f"{Q}.lora_A.weight": np.ones((5, 160), np.int32)}),
        "is stored as I32, must be F64, F32, F16, BF16",
    ),
    "nothing": (lambda stored: stored.clear(), "has no tensors"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_refused(case, tmp_path):
    change, message = TENSORS[case]
    assert message in refused(edited(tmp_path, tensors=change))


def test_experts_cannot_have_adapters(tmp_path):
    path = tiny_loras.write("qwen3_moe", tmp_path)
    expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj.lora_A.weight"
    stored = load_file(path / "adapter_model.safetensors") | {expert: np.zeros((16, 48), np.float32)}
    save_file(stored, path / "adapter_model.safetensors")
    message = refused(path, case="qwen3_moe")
    assert expert in message and "experts, routers and shared experts of MoE layers cannot have adapters" in message


def test_a_rank_above_the_highest(tmp_path):
    assert "r: got 16 (of model.layers.0.mlp.down_proj), must be at most 8 (--max-lora-rank)" in refused(
        tiny_loras.write("many0", tmp_path), max_rank=8
    )
    assert read(tiny_loras.write("patterns", tmp_path), max_rank=8).rank == 8


def test_values_beyond_the_type(tmp_path):
    change = put(f"{Q}.lora_B.weight", 160, 5, value=1e6)
    assert f"tensor {Q}.lora_B.weight: has values beyond float16" in refused(
        edited(tmp_path, tensors=change), dtype="float16"
    )


def test_files_that_are_not_there(tmp_path):
    assert "is no directory" in refused(tmp_path / "nothing")
    assert "adapter_config.json: cannot be read: No such file" in refused(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    assert "must be a JSON object" in refused(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    assert "is not JSON" in refused(tmp_path)
    tiny_loras.write(NAME, tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "adapter_model.safetensors: is missing" in refused(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"abc")
    assert "adapter_model.safetensors: has 3 bytes" in refused(tmp_path)


def test_pipes_are_not_waited_for(tmp_path):
    tiny_loras.write(NAME, tmp_path)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert f"{name}: is no regular file" in refused(tmp_path)


def test_an_adapter_of_another_model(tmp_path):
    """The first thing that does not fit is told."""
    config = tiny.CASES[tiny_loras.MODEL].config
    spec = spec_from_hf(config | {"intermediate_size": 44}, None)
    with pytest.raises(AdapterError, match=r"down_proj.lora_A.weight: has shape \[5, 40\], must be \[5, 44\]"):
        read_adapter(tiny_loras.write(NAME, tmp_path), spec, replace(spec), "float32", 16)
