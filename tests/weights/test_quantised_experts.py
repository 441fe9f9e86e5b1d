"""Experts of few bits: quantised while loading and read from every kind of layout, as floats and packed."""

from __future__ import annotations

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmjax.config import ConfigError
from lmjax.models.params import dotted, named_leaves
from lmjax.nn.weight import Quantized
from lmjax.weights.errors import WeightError
from lmjax.weights.packing import packings
from tests import tiny
from tests.models.driver import Driver
from tests.weights.quantised import LAYOUTS
from tests.weights.test_quantised import PROMPT, loaded, nearest
from tests.weights.test_quantised_families import write_mxfp4

# whole groups of 32 in every matrix, of 128 in Mixtral's; one layer
SIZES = {
    "mixtral": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": []},
    "gpt_oss": {"intermediate_size": 96, "layer_types": ["full_attention"]},
}


def config_of(family, **changes):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}
    return tiny.CASES[family].config | sizes | SIZES[family] | changes


def write(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def numbers(w, experts):
    """float64 [*out, in] (of experts [E, *out, in]) that a packed weight stands for, from the description of its type:
    a number is its code, less the zero, times the scale of its input feature and output feature."""
    p, values, scale = w.packing, np.asarray(w.values), np.asarray(w.scale)
    if experts and not p.group:
        return values.astype(np.float64) * scale.astype(np.float64)[..., None]
    at = 1 if experts else 0
    values = np.moveaxis(values, at, -1)
    if p.kind in ("int4", "mxfp4"):
        halves = values.reshape(*values.shape[:-1], -1, p.group // 2)
        values = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(*values.shape[:-1], -1)
    if p.kind == "mxfp4":
        values, scale = values.view(ml_dtypes.float4_e2m1fn), 2.0 ** (scale.astype(np.float64) - 127)

    def of_features(a):
        a = a.astype(np.float64)
        return np.repeat(np.moveaxis(a, at, -1), p.group, axis=-1) if p.group else a[..., None]

    zero = 8.0 if p.kind == "int4" and w.zero is None else 0.0 if w.zero is None else of_features(np.asarray(w.zero))
    return (values.astype(np.float64) - zero) * of_features(scale)


def check_numbers(params, want):
    """All packed weights of a tree against the leaves of another by name; how many there are."""
    found = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, Quantized))
    packed = {dotted(path): leaf for path, leaf in found if isinstance(leaf, Quantized)}
    for name, leaf in packed.items():
        np.testing.assert_allclose(numbers(leaf, ".experts." in name), want[name], rtol=2e-6, atol=1e-7, err_msg=name)
    return len(packed)


def same_logits(got, want):
    """Of (parameters, spec): within a thousandth of the largest."""
    wanted = Driver(*want).step({"a": PROMPT})["a"]
    assert np.abs(Driver(*got).step({"a": PROMPT})["a"] - wanted).max() <= 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("family", SIZES)
def test_at_load(family, kind, tmp_path):
    """The nearest values of the grid, matrix by matrix, as floats and packed."""
    config = config_of(family)
    path = write(tmp_path / "plain", config, tiny.tensors(family, config))
    floats, dense = named_leaves(loaded(path)[0]), named_leaves(loaded(path, quantization=kind)[0])
    for name, leaf in dense.items():
        want = np.asarray(floats[name], np.float64)
        if name.startswith("layers.") and name.endswith(".weight"):
            want = nearest(want, kind)
        np.testing.assert_allclose(leaf, want, rtol=2e-6, atol=1e-7, err_msg=name)
    params, spec = loaded(path, quantization=kind, quantized_weights="packed")
    assert {p.kind for p in packings(spec).values()} == {kind}
    assert check_numbers(params, dense) == len(packings(spec)) == (6 if family == "qwen2_moe" else 4)
    assert {f"layers.0.mlp.experts.{part}.weight" for part in ("gate_up", "down")} <= set(packings(spec))


SOME = [("mixtral", "int4"), ("gpt_oss", "int8")]
MORE = [(f, k) for f in SIZES for k in ("int8", "fp8", "int4") if (f, k) not in SOME]


@pytest.mark.parametrize(("family", "kind"), [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_logits(family, kind, tmp_path):
    config = config_of(family)
    path = write(tmp_path / "plain", config, tiny.tensors(family, config))
    same_logits(loaded(path, quantization=kind, quantized_weights="packed"), loaded(path, quantization=kind))


def test_at_load_of_whole_groups_only(tmp_path):
    config = config_of("mixtral", intermediate_size=40)
    path = write(tmp_path / "plain", config, tiny.tensors("mixtral", config))
    with pytest.raises(
        ConfigError, match=r"mlp\.experts\.down\.weight has 40 input features, must be a multiple of 32"
    ):
        loaded(path, quantization="int4")


PACKED = {
    "awq-g64": "int4",
    "fp8-block": "fp8",
    "ct-w8a8": "int8",
    "gptq-4-g128-sym": "int4",
    "gptq-8-g64-sym": "int8",
    "ct-w4a16-g32-asym": "int4",
    "ct-fp8-channel": "fp8",
    "gptq-4-g32-act-order": None,
}


def write_layout(folder, name):
    """Mixtral with every expert's matrices in a layout, and its floats."""
    layout, rng = LAYOUTS[name], np.random.default_rng(2)
    config, stored, floats = config_of("mixtral"), {}, {}
    for tensor, w in tiny.tensors("mixtral", config).items():
        module = tensor.removesuffix(".weight")
        if ".experts." in tensor or module.endswith("_proj"):
            matrix = layout.write(w, rng)
            stored |= {f"{module}.{part}": np.ascontiguousarray(x) for part, x in matrix.parts.items()}
            floats[tensor] = matrix.floats.astype(np.float32)
        else:
            stored[tensor] = floats[tensor] = w
    settings = {"quantization_config": layout.config}
    return write(folder / "stored", config | settings, stored), write(folder / "plain", config, floats)


@pytest.mark.parametrize(("name", "kind"), PACKED.items())
def test_layouts(name, kind, tmp_path):
    """None: no weight type fits, floats."""
    stored, plain = write_layout(tmp_path, name)
    want = named_leaves(loaded(plain)[0])
    for leaf, got in named_leaves(loaded(stored)[0]).items():
        np.testing.assert_allclose(got, want[leaf], rtol=2e-6, atol=1e-7, err_msg=leaf)
    params, spec = loaded(stored, quantized_weights="packed")
    assert [p.kind for p in packings(spec).values()] == ([] if kind is None else [kind] * 4)
    assert check_numbers(params, want) == (0 if kind is None else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in PACKED.items() if kind])
def test_logits_of_layouts(name, tmp_path):
    stored, plain = write_layout(tmp_path, name)
    same_logits(loaded(stored, quantized_weights="packed"), loaded(plain))


def test_mxfp4_stays_packed(tmp_path):
    """GPT-OSS's experts keep their codes and exponents: 4.25 bits a number."""
    plain, stored = write_mxfp4(tmp_path, config_of("gpt_oss"))
    (params, spec), want = loaded(stored, quantized_weights="packed"), loaded(plain)
    assert {name: p.kind for name, p in packings(spec).items()} == {
        f"layers.0.mlp.experts.{part}.weight": "mxfp4" for part in ("gate_up", "down")
    }
    leaves = named_leaves(params)
    for part, count in (("gate_up", 4 * 2 * 96 * 64), ("down", 4 * 64 * 96)):
        sizes = [leaves[f"layers.0.mlp.experts.{part}.weight.{leaf}"].nbytes for leaf in ("values", "scale")]
        assert sizes == [count // 2, count // 32]
    assert check_numbers(params, named_leaves(want[0])) == 2
    same_logits((params, spec), want)


def test_mxfp4_that_names_what_it_leaves_alone(tmp_path):
    """As openai/gpt-oss-20b does: patterns of modules, none of them experts."""
    _, stored = write_mxfp4(tmp_path, config_of("gpt_oss"))
    config = json.loads((stored / "config.json").read_text())
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"]["modules_to_not_convert"] = names
    (stored / "config.json").write_text(json.dumps(config))
    assert len(packings(loaded(stored, quantized_weights="packed")[1])) == 2


@pytest.mark.parametrize("kept", ["packed", "dequantized"])
def test_mxfp4_with_a_scale_that_is_no_number(kept, tmp_path):
    _, stored = write_mxfp4(tmp_path, config_of("gpt_oss"))
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1] = 255
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(WeightError, match=r"experts\.down_proj_scales has NaN or infinite values"):
        loaded(stored, quantized_weights=kept)
