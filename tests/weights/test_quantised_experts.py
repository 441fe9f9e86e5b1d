"""Experts of few bits: quantised while loading and read from every kind of layout, as floats and packed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmjax.config import ConfigError
from lmjax.models.params import named_leaves
from lmjax.weights.packing import packings
from tests import tiny
from tests.models.driver import Driver
from tests.weights.quantised import LAYOUTS
from tests.weights.test_quantised import PROMPT, loaded, nearest
from tests.weights.test_quantised_families import write_mxfp4

# whole groups of 32 in every matrix, one layer
SIZES = {
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": []},
    "gpt_oss": {"intermediate_size": 64, "layer_types": ["full_attention"]},
}


def config_of(family, **changes):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 1}
    return tiny.CASES[family].config | sizes | SIZES[family] | changes


def write(path, config, tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def same_logits(got, want):
    """Of (parameters, spec): within a thousandth of the largest."""
    wanted = Driver(*want).step({"a": PROMPT})["a"]
    assert np.abs(Driver(*got).step({"a": PROMPT})["a"] - wanted).max() <= 1e-3 * np.abs(wanted).max()


CASES = [("mixtral", "int4"), ("qwen2_moe", "fp8"), ("gpt_oss", "int4"), ("gpt_oss", "int8")]
MORE = [(f, k) for f in SIZES for k in ("int8", "fp8", "int4") if (f, k) not in CASES]


@pytest.mark.parametrize(("family", "kind"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_at_load(family, kind, tmp_path):
    """The nearest values of the grid, matrix by matrix; packed they give the same logits."""
    config = config_of(family)
    path = write(tmp_path / "plain", config, tiny.tensors(family, config))
    floats, dense = named_leaves(loaded(path)[0]), loaded(path, quantization=kind)
    for name, leaf in named_leaves(dense[0]).items():
        want = np.asarray(floats[name], np.float64)
        if name.startswith("layers.") and name.endswith(".weight"):
            want = nearest(want, kind)
        np.testing.assert_allclose(leaf, want, rtol=2e-6, atol=1e-7, err_msg=name)
    packed = loaded(path, quantization=kind, quantized_weights="packed")
    kept = packings(packed[1])
    assert {p.kind for p in kept.values()} == {kind} and len(kept) == (6 if family == "qwen2_moe" else 4)
    assert {"layers.0.mlp.experts.gate_up.weight", "layers.0.mlp.experts.down.weight"} <= set(kept)
    same_logits(packed, dense)


def test_at_load_of_whole_groups_only(tmp_path):
    config = config_of("mixtral", intermediate_size=40)
    path = write(tmp_path / "plain", config, tiny.tensors("mixtral", config))
    with pytest.raises(
        ConfigError, match=r"mlp\.experts\.down\.weight has 40 input features, must be a multiple of 32"
    ):
        loaded(path, quantization="int4")


PACKED = {"awq-g64": "int4", "fp8-block": "fp8", "ct-w8a8": "int8", "gptq-4-g64-act-order": None}
MORE_PACKED = {
    "gptq-4-g128-sym": "int4",
    "gptq-8-g64-sym": "int8",
    "ct-w4a16-g32-asym": "int4",
    "ct-fp8-channel": "fp8",
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*PACKED.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_PACKED.items())],
)
def test_layouts(name, kind, tmp_path):
    """Mixtral with every expert's matrices written in a layout. None: no weight type fits, floats."""
    layout, rng = LAYOUTS[name], np.random.default_rng(2)
    config = config_of("mixtral", hidden_size=128, intermediate_size=256, head_dim=32)
    stored, floats = {}, {}
    for tensor, w in tiny.tensors("mixtral", config).items():
        module = tensor.removesuffix(".weight")
        if ".experts." in tensor or module.endswith("_proj"):
            matrix = layout.write(w, rng)
            stored |= {f"{module}.{part}": np.ascontiguousarray(x) for part, x in matrix.parts.items()}
            floats[tensor] = matrix.floats.astype(np.float32)
        else:
            stored[tensor] = floats[tensor] = w
    # the router is no Linear to some quantisers, and named to others
    ignore = {"modules_to_not_convert": ["gate", "lm_head"]} if "modules_to_not_convert" in layout.config else {}
    ignore = {"ignore": ["re:.*gate$", "lm_head"]} if "ignore" in layout.config else ignore
    path = write(tmp_path / "stored", config | {"quantization_config": layout.config | ignore}, stored)
    plain = loaded(write(tmp_path / "plain", config, floats))
    for leaf, got in named_leaves(loaded(path)[0]).items():
        np.testing.assert_allclose(got, named_leaves(plain[0])[leaf], rtol=2e-6, atol=1e-7, err_msg=leaf)
    packed = loaded(path, quantized_weights="packed")
    assert [p.kind for p in packings(packed[1]).values()] == ([] if kind is None else [kind] * 4)
    if kind is not None:
        same_logits(packed, plain)


def test_mxfp4_stays_packed(tmp_path):
    """GPT-OSS's experts keep their codes and exponents, byte by byte: 4.25 bits a number."""
    plain, path = write_mxfp4(tmp_path, config_of("gpt_oss"))
    packed = loaded(path, quantized_weights="packed")
    assert {name: p.kind for name, p in packings(packed[1]).items()} == {
        f"layers.0.mlp.experts.{part}.weight": "mxfp4" for part in ("gate_up", "down")
    }
    leaves = named_leaves(packed[0])
    for part, count in (("gate_up", 4 * 2 * 64 * 64), ("down", 4 * 64 * 64)):
        sizes = [leaves[f"layers.0.mlp.experts.{part}.weight.{leaf}"].nbytes for leaf in ("values", "scale")]
        assert sizes == [count // 2, count // 32]
    same_logits(packed, loaded(plain))
