"""Every quantised layout gives the floats that its checkpoint was written with, as floats and packed."""

from __future__ import annotations

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmjax.config import ConfigError, EngineConfig
from lmjax.models.params import named_leaves
from lmjax.nn.linear import linear
from lmjax.nn.weight import Quantized
from lmjax.runtime.resolve import resolve
from lmjax.weights.errors import WeightError
from lmjax.weights.loader import load_params
from lmjax.weights.packing import packings
from lmjax.weights.quant import layout_of
from lmjax.weights.safetensors import read_directory
from lmjax.weights.source import resolve_model
from scripts import quantize
from tests.models.driver import Driver
from tests.weights import quantised
from tests.weights.checkpoints import tensors, write_gguf
from tests.weights.quantised import LAYOUTS, NEVER_PACKED

PROMPT = [5, 17, 80, 2, 41, 41, 9, 63, 30]


def loaded(path, **settings):
    """(parameters, spec) as an engine on a CPU has them."""
    config = EngineConfig(model=str(path), dtype="float32", **settings).validate()
    source = resolve_model(str(path))
    spec = resolve(config, source, "cpu").spec
    return load_params(source, spec, "float32", quantization=config.quantization), spec


def logits(path, **settings):
    params, spec = loaded(path, **settings)
    return Driver(params, spec).step({"a": PROMPT})["a"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_floats_are_those_of_the_layout(name, tmp_path):
    path, plain = quantised.write(tmp_path, name)
    got, want = (named_leaves(loaded(p)[0]) for p in (path, plain))
    assert got.keys() == want.keys()
    for leaf in got:
        np.testing.assert_allclose(got[leaf], want[leaf], rtol=2e-6, atol=1e-7, err_msg=leaf)


# one of every form that products have
SOME = ("gptq-4-g128-sym", "gptq-8-g64-sym", "awq-g64", "fp8-dynamic-channel", "fp8-block", "ct-w8a8", "gptq-4-all-v2")
PACKED = [
    pytest.param(name, marks=[] if name in SOME or name in NEVER_PACKED else [pytest.mark.slow]) for name in LAYOUTS
]


@pytest.mark.parametrize("name", PACKED)
def test_logits_of_packed_weights(name, tmp_path):
    path, plain = quantised.write(tmp_path, name)
    params, spec = loaded(path, quantized_weights="packed")
    assert len(packings(spec)) == (0 if name in NEVER_PACKED else 8)
    if not packings(spec):
        return
    want = logits(plain)
    got = Driver(params, spec).step({"a": PROMPT})["a"]
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_at_load(kind, tmp_path):
    """The nearest values of the grid, worked out in float64; packed they give the same logits."""
    _, plain = quantised.write(tmp_path, "fp8-static")
    floats, (got, _) = named_leaves(loaded(plain)[0]), loaded(plain, quantization=kind)
    for name, leaf in named_leaves(got).items():
        want = np.asarray(floats[name], np.float64)
        if name.startswith("layers.") and name.endswith(".weight"):
            want = nearest(want, kind)
        np.testing.assert_allclose(leaf, want, rtol=2e-6, atol=1e-7, err_msg=name)
    params, spec = loaded(plain, quantization=kind, quantized_weights="packed")
    assert {p.kind for p in packings(spec).values()} == {kind} and len(packings(spec)) == 8
    want = Driver(got, spec).step({"a": PROMPT})["a"]
    assert np.abs(Driver(params, spec).step({"a": PROMPT})["a"] - want).max() <= 1e-3 * np.abs(want).max()


def nearest(w, kind):
    """float64 [..., in] on the grid of ``kind``."""
    if kind != "int4":
        scale = np.abs(w).max(-1, keepdims=True).astype(np.float32) / np.float32(127 if kind == "int8" else 448)
        steps = (w.astype(np.float32) / scale).astype(np.float32)
        q = np.rint(steps) if kind == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)
        return q.astype(np.float64) * scale
    groups = w.reshape(*w.shape[:-1], -1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True).astype(np.float32) / np.float32(7)).astype(ml_dtypes.bfloat16)
    q = np.clip(np.rint(groups / scale.astype(np.float64)), -8, 7)
    return (q * scale.astype(np.float64)).reshape(w.shape)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_kept_quantised(kind, tmp_path):
    weights = tensors(quantised.CONFIG)
    kinds = {name: kind for name in weights if name.endswith("_proj.weight")}
    kinds["model.layers.1.self_attn.k_proj.weight"] = "Q5_0"  # then q, k and v are not of one kind
    path = write_gguf(tmp_path / "model.gguf", quantised.CONFIG, weights, kinds)
    (params, spec), want = loaded(path, quantized_weights="packed"), named_leaves(loaded(path)[0])
    assert len(packings(spec)) == 7
    for i, layer in enumerate(params.layers):
        matrices = {"attn.qkv": layer.attn.qkv, "attn.o": layer.attn.o}
        matrices |= {"mlp.gate_up": layer.mlp.gate_up, "mlp.down": layer.mlp.down}
        for name, dense in matrices.items():
            if isinstance(dense.weight, Quantized):
                columns = dense.weight.values.shape[0] * (1 if kind == "Q8_0" else 2)
                made = linear(dense, jnp.eye(columns, dtype=jnp.float32))
                np.testing.assert_allclose(made, want[f"layers.{i}.{name}.weight"], rtol=1e-5, atol=1e-5)


def test_mxfp4_is_read_as_floats(tmp_path):
    """Of GPT-OSS: [experts, out, blocks, 16 bytes] stand for [experts, in, out]."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(118, 131, (2, 6, 3), np.uint8)
    save_file({"x.down_proj_blocks": blocks, "x.down_proj_scales": scales}, tmp_path / "model.safetensors")
    layout = layout_of({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    found = layout.find(read_directory(tmp_path))
    got = found["x.down_proj"].dense()
    assert list(found) == ["x.down_proj"] and got.shape == found["x.down_proj"].shape == (2, 96, 6)
    numbers = blocks[..., None] >> np.array([0, 4], np.uint8) & 15
    values = numbers.reshape(2, 6, 3, 32).astype(np.uint8).view(np.uint8)
    values = values.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2.0 ** (scales[..., None] - 127.0)
    assert (got == values.reshape(2, 6, 96).swapaxes(1, 2)).all()
    assert (found["x.down_proj"].dense((1, 2)) == got[1:]).all()


REFUSED = [
    ({"quant_method": "quip"}, "quant_method: got 'quip', must be one of gptq, awq, fp8, compressed-tensors"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "bits: got 3, must be 4 or 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "must be one of gptq, gptq_v2"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm": {}}}, "dynamic: got .* must be absent"),
    ({"quant_method": "gptq", "bits": 4, "method": "qqq"}, "method: got 'qqq', must be one of gptq"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: got 'gemv', must be gemm"),
    (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        r"weight_block_size: got \[64, 64\], must be \[128, 128\]",
    ),
    ({"quant_method": "bitsandbytes", "load_in_4bit": False}, "load_in_4bit: got False, must be true"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format: got 'nvfp4-pack"),
    (
        LAYOUTS["ct-w8a8"].config | {"config_groups": {"a": {"targets": ["Embedding"], "weights": {"num_bits": 8}}}},
        r"config_groups.a.targets: got \['Embedding'\], must be Linear",
    ),
]


AS_WRITTEN = [  # by GPTQModel, by AutoRound in GPTQ's format, by AutoFP8 with scales for a KV cache
    {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "pack_dtype": "int32"}
    | {"method": "gptq", "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq"},
    {"bits": 4, "group_size": 128, "zero_point": True, "pack_dtype": "int32", "lm_head": False, "desc_act": False}
    | {"method": "awq", "quant_method": "awq", "format": "gemm", "checkpoint_format": "gemm"},
    {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq", "data_type": "int"}
    | {
        "autoround_version": "0.4.3",
        "iters": 200,
        "lr": 0.005,
        "nsamples": 128,
        "seqlen": 2048,
        "true_sequential": False,
    }
    | {"enable_minmax_tuning": True, "minmax_lr": 0.005, "enable_quanted_input": True, "scale_dtype": "torch.float16"},
    {"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static", "quant_method": "fp8"},
]


@pytest.mark.parametrize("config", AS_WRITTEN)
def test_configs_as_the_tools_write_them(config):
    found = layout_of({"quantization_config": config})
    assert found is not None and found.name == config["quant_method"]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_unknown_methods_and_fields(config, message, tmp_path):
    path, _ = quantised.write(tmp_path, "fp8-static")
    (path / "config.json").write_text(json.dumps(quantised.CONFIG | {"quantization_config": config}))
    with pytest.raises(WeightError, match=message):
        loaded(path)


def test_quantising_what_cannot_be(tmp_path):
    path, plain = quantised.write(tmp_path, "fp8-static")
    with pytest.raises(ConfigError, match="--quantization: got int8, but the checkpoint is quantised already"):
        loaded(path, quantization="int8")
    odd = json.loads((plain / "config.json").read_text()) | {"intermediate_size": 40}
    (plain / "config.json").write_text(json.dumps(odd))
    with pytest.raises(ConfigError, match=r"mlp\.down\.weight has 40 input features, must be a multiple of 32"):
        loaded(plain, quantization="int4")


def test_files_that_are_not_what_the_config_says(tmp_path):
    path, _ = quantised.write(tmp_path, "awq-g64")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= {"group_size": 32}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"scales has shape \[4, 128\], must be \[8, 128\]"):
        loaded(path)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_the_script_writes_what_quantising_at_load_gives(kind, tmp_path):
    _, plain = quantised.write(tmp_path, "fp8-static")
    (plain / "tokenizer.json").write_text("{}")
    assert quantize.main([str(plain), str(tmp_path / "out"), "--quantization", kind]) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    want, got = loaded(plain, quantization=kind, quantized_weights="packed"), None
    got = loaded(tmp_path / "out", quantized_weights="packed")
    assert len(packings(got[1])) == 8
    floats = [named_leaves(loaded(p, **how)[0]) for p, how in ((plain, {"quantization": kind}), (tmp_path / "out", {}))]
    for name, leaf in floats[0].items():
        np.testing.assert_array_equal(leaf, floats[1][name], err_msg=name)
    for name, leaf in named_leaves(want[0]).items():
        np.testing.assert_array_equal(
            np.asarray(leaf).astype(np.float32), np.asarray(named_leaves(got[0])[name]).astype(np.float32), err_msg=name
        )
    sizes = [sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (plain, tmp_path / "out")]
    assert sizes[1] < sizes[0] / 2


def test_the_script_says_what_is_wrong(tmp_path, capsys):
    path, plain = quantised.write(tmp_path, "fp8-static")
    assert quantize.main([str(path), str(tmp_path / "out"), "--quantization", "int8"]) == 1
    assert quantize.main([str(plain), str(path), "--quantization", "int8"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert "is quantised already" in errors[0] and "must be a new or empty directory" in errors[1]
