"""A directory from parameters: the loader reads it bit by bit, and transformers computes the goldens from it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lmjax.models.params import named_leaves
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.weights.errors import WeightError
from lmjax.weights.export import INDEX, save_pretrained
from lmjax.weights.loader import load_params
from lmjax.weights.pytree import from_hf
from lmjax.weights.source import resolve_model
from tests import tiny

FAMILIES = ("llama_tied_gqa3", "llama_mha_bias", "mistral_window", "qwen2", "qwen3", "mixtral", "qwen2_moe")
OTHERS = ("phi3", "gpt2", "falcon_new", "gptj", "gpt_oss", "deepseek_v3")
GOLDENS = {
    key: value
    for file in ("tiny", "families")
    for key, value in np.load(Path(__file__).parents[1] / "goldens" / f"{file}.npz").items()
}


def params_of(name, dtype="float32", degree=None):
    spec = spec_from_hf(tiny.CASES[name].config, None)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors = {key: x.astype(kind) for key, x in tiny.tensors(name).items()}
    return from_hf(tensors, spec, degree and split.spread(spec, degree)), tensors


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FAMILIES + OTHERS), ("qwen3_moe", "bfloat16")]
)
def test_the_loader_reads_it_bit_by_bit(name, dtype, tmp_path):
    params, tensors = params_of(name, dtype)
    config = tiny.CASES[name].config
    save_pretrained(params, config, tmp_path, {"eos_token_id": 2})
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[key].tobytes() == x.tobytes() and written[key].dtype == x.dtype for key, x in tensors.items())
    source = resolve_model(str(tmp_path))
    assert source.generation_config == {"eos_token_id": 2}
    assert source.config == {**config, "torch_dtype": dtype}
    again = named_leaves(load_params(source, spec_from_hf(source.config, None), dtype))
    for key, x in named_leaves(params).items():
        assert np.asarray(again[key]).tobytes() == np.asarray(x).tobytes(), key


@pytest.mark.parametrize(
    ("name", "degree"),
    [("llama_gqa4_dim20", split.Degree(4)), ("llama_mha_bias", split.Degree(2, 2)), ("qwen3_moe", split.Degree(1, 2))],
)
def test_of_a_meshes_layout(name, degree, tmp_path):
    params, tensors = params_of(name, degree=degree)
    save_pretrained(params, tiny.CASES[name].config, tmp_path, max_shard_size=30_000)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    found = {}
    for file in files:
        with safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        held = load_file(file)
        assert sum(x.nbytes for x in held.values()) <= 30_000 or len(held) == 1
        assert all(index["weight_map"][key] == file.name for key in held)
        found |= held
    assert found.keys() == tensors.keys()
    assert all(found[key].tobytes() == x.tobytes() for key, x in tensors.items())


def test_what_is_refused(tmp_path):
    params, _ = params_of("qwen2")
    config = tiny.CASES["qwen2"].config
    save_pretrained(params, config, tmp_path)
    save_pretrained(params, config, tmp_path)  # the same file anew
    with pytest.raises(WeightError, match=r"holds other weights \(model.safetensors\): give an empty directory"):
        save_pretrained(params, config, tmp_path, max_shard_size=10_000)
    with pytest.raises(WeightError, match="are of several types"):
        save_pretrained(params.replace(norm=params.norm.astype("bfloat16")), config, tmp_path)
    with pytest.raises(WeightError, match="embed"):
        save_pretrained(params, config | {"vocab_size": 300}, tmp_path)


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch (the extra oracle)")
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS, "qwen3_moe"])
def test_transformers_computes_the_goldens_from_it(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    params, _ = params_of(name)
    save_pretrained(params, tiny.CASES[name].config, tmp_path, max_shard_size=50_000)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    for i, (ids, at) in enumerate(zip(tiny.prompts(name), tiny.stored_positions(name), strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor(ids, dtype=torch.long)[None], use_cache=False).logits[0]
        np.testing.assert_allclose(logits[torch.tensor(at, dtype=torch.long)], GOLDENS[f"{name}/{i}"], atol=2e-5)
