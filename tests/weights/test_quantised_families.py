"""Quantised weights of families whose tensors are fused, in another order or without a gate."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmjax.config import ConfigError
from lmjax.models.params import named_leaves
from lmjax.weights.errors import WeightError
from lmjax.weights.packing import packings
from tests import tiny
from tests.models.driver import Driver
from tests.weights.test_quantised import PROMPT, loaded, nearest

MATRICES = ("qkv", "o", "gate_up", "down")
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.mark.parametrize("name", ["phi3", "falcon_new", "gptj", "cohere"])
def test_at_load(name, tmp_path):
    """Fused q, k, v and gate, up; biases; heads in another order; an MLP without a gate; LayerNorms stay floats."""
    path = tiny.write(name, tmp_path)
    floats, (got, _) = named_leaves(loaded(path)[0]), loaded(path, quantization="int8")
    count = 0
    for leaf, values in named_leaves(got).items():
        want = np.asarray(floats[leaf], np.float64)
        if leaf.startswith("layers.") and leaf.endswith(".weight") and leaf.split(".")[-2] in MATRICES:
            want, count = nearest(want, "int8"), count + 1
        np.testing.assert_allclose(values, want, rtol=2e-6, atol=1e-7, err_msg=leaf)
    params, spec = loaded(path, quantization="int8", quantized_weights="packed")
    assert len(packings(spec)) == count == 4 * len(spec.layers)
    want = Driver(got, spec).step({"a": PROMPT})["a"]
    assert np.abs(Driver(params, spec).step({"a": PROMPT})["a"] - want).max() <= 1e-3 * np.abs(want).max()


def test_matrices_in_out_are_refused(tmp_path):
    path = tiny.write("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=r"--quantization: got int8, but a gpt2 model's matrices are \[in, out\]"):
        loaded(path, quantization="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"gptq: not supported for gpt2, whose matrices are \[in, out\]"):
        loaded(path)


def write_mxfp4(folder, config):
    """GPT-OSS as it is published, each number of a block written out from the table and its exponent: checkpoints of
    the floats and of the blocks."""
    rng, plain, stored = np.random.default_rng(3), {}, {}
    for name, tensor in tiny.tensors("gpt_oss", config).items():
        plain[name] = stored[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
            scales = rng.integers(120, 128, (experts, rows, columns // 32), np.uint8)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            floats = np.zeros((experts, rows, columns // 32, 32), np.float32)
            floats[..., 0::2], floats[..., 1::2] = MXFP4[blocks % 16], MXFP4[blocks // 16]
            floats *= (2.0 ** (scales.astype(np.float64) - 127))[..., None].astype(np.float32)
            plain[name] = np.ascontiguousarray(floats.reshape(experts, rows, columns).swapaxes(1, 2))
    paths = []
    for kind, tensors in (("plain", plain), ("mxfp4", stored)):
        own = config | ({"quantization_config": {"quant_method": "mxfp4"}} if kind == "mxfp4" else {})
        paths.append(folder / kind)
        paths[-1].mkdir()
        (paths[-1] / "config.json").write_text(json.dumps(own))
        save_file(tensors, paths[-1] / "model.safetensors")
    return paths


def test_experts_in_mxfp4(tmp_path):
    config = tiny.CASES["gpt_oss"].config | {"hidden_size": 64, "intermediate_size": 32}
    want, got = (named_leaves(loaded(path)[0]) for path in write_mxfp4(tmp_path, config))
    assert sum(name.startswith("layers.0.mlp.experts") for name in got) == 4
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
