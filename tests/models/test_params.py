"""The parameter tree, dummy weights, and the tensor names that fill it."""

import jax
import numpy as np
import pytest

from lmjax.models.names import by_tensor, gguf_names, harmless, hf_names
from lmjax.models.params import abstract_params, init_params, map_named, named_leaves, param_specs
from lmjax.models.registry import spec_from_hf
from tests import tiny

SPECS = {name: spec_from_hf(case.config, case.max_model_len) for name, case in tiny.CASES.items()}


@pytest.mark.parametrize("name", SPECS)
def test_hf_names_are_the_checkpoints(name):
    """Names and shapes are exactly those of a checkpoint that transformers loads without complaint (make_goldens)."""
    tensors = tiny.tensors(name)
    parts = by_tensor(hf_names(SPECS[name]))
    assert {n: part.shape for n, (_, (part, *_)) in parts.items()} == {n: t.shape for n, t in tensors.items()}


DENSE = ["llama_gqa4_dim20", "llama_mha_bias", "mistral_window", "qwen2", "qwen3_bias"]


@pytest.mark.parametrize(
    ("name", "names"),
    [(n, f) for n in DENSE for f in (hf_names, gguf_names)] + [(n, hf_names) for n in ("mixtral", "qwen2_moe")],
)
def test_fill_covers_each_parameter_once(name, names):
    leaves = named_leaves(abstract_params(SPECS[name], "float32"))
    table = names(SPECS[name])
    assert list(table) == list(leaves)
    for parameter, parts in table.items():
        count = np.zeros(leaves[parameter].shape, np.int32)
        for part in parts:
            count[part.index] += 1
            values = np.arange(np.prod(part.shape), dtype=np.float32).reshape(part.shape)
            filled = np.full(leaves[parameter].shape, np.nan, np.float32)
            part.fill(filled, values)
            np.testing.assert_array_equal(part.extract(filled), values)
            with pytest.raises(ValueError, match=rf"{part.name}: has shape"):
                part.fill(filled, values[:-1])
        assert (count == 1).all()


def _permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k of the llama architecture."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


@pytest.mark.parametrize("name", ["llama_mha_bias", "llama_gqa4_dim20", "mistral_window", "qwen2", "qwen3_bias"])
def test_gguf_gives_the_same_parameters(name):
    spec, tensors = SPECS[name], tiny.tensors(name)
    permuted = spec.model_type in ("llama", "mistral")
    hf, gguf = hf_names(spec), gguf_names(spec)
    for parameter, leaf in named_leaves(abstract_params(spec, "float32")).items():
        expected, got = np.empty(leaf.shape, np.float32), np.empty(leaf.shape, np.float32)
        for a, b in zip(hf[parameter], gguf[parameter], strict=True):
            tensor = tensors[a.name]
            a.fill(expected, tensor)
            if permuted and "q_proj" in a.name:
                tensor = _permute(tensor, spec.layers[0].attention.heads)
            if permuted and "k_proj" in a.name:
                tensor = _permute(tensor, spec.layers[0].attention.kv_heads)
            b.fill(got, tensor)
        np.testing.assert_array_equal(got, expected)


def test_gguf_names():
    parts = by_tensor(gguf_names(SPECS["qwen3_bias"]))
    assert {n.removeprefix("blk.1.") for n in parts if n.startswith("blk.1.")} == {
        *(f"attn_{p}.{s}" for p in ("q", "k", "v", "output") for s in ("weight", "bias")),
        *(f"{p}.weight" for p in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm")),
        *(f"ffn_{p}.weight" for p in ("gate", "up", "down")),
    }
    assert {n for n in parts if not n.startswith("blk.")} == {
        "token_embd.weight",
        "output_norm.weight",
        "output.weight",
    }


def test_gguf_has_no_experts():
    with pytest.raises(ValueError, match="mixtral: experts in a GGUF file are not supported"):
        gguf_names(SPECS["mixtral"])


def test_harmless():
    tied, untied = SPECS["llama_tied_gqa3"], SPECS["llama_linear"]
    assert harmless("model.layers.3.self_attn.rotary_emb.inv_freq", untied)
    assert harmless("lm_head.weight", tied) and not harmless("lm_head.weight", untied)
    assert not harmless("model.layers.0.self_attn.q_proj.bias", tied)


@pytest.mark.parametrize("name", ["llama_tied_gqa3", "qwen2_window", "qwen3_bias"])
def test_init(name):
    spec = SPECS[name]
    params = init_params(spec, "bfloat16", seed=3)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == abstract_params(spec, "bfloat16")
    again, other = init_params(spec, "bfloat16", seed=3), init_params(spec, "bfloat16", seed=4)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True))
    assert not (params.embed == other.embed).all()
    assert not (params.layers[0].mlp.down.weight == params.layers[1].mlp.down.weight).all()
    deviation = np.asarray(params.layers[0].mlp.gate_up.weight).astype(np.float32).std() * spec.hidden**0.5
    assert deviation == pytest.approx(1.0, abs=0.05)
    assert (params.norm == 1).all()


def test_axes():
    specs = named_leaves(param_specs(SPECS["llama_mha_bias"]))
    assert all(len(p.axes) == len(p.shape) for p in specs.values())
    assert specs["layers.0.attn.qkv.weight"].axes == ("kv_heads", None, None, "embed")
    assert specs["layers.0.attn.o.weight"].axes == ("embed", "heads")
    assert specs["layers.1.mlp.gate_up.bias"].axes == (None, "ffn")
    moe = named_leaves(param_specs(SPECS["qwen2_moe"]))
    assert all(len(p.axes) == len(p.shape) for p in moe.values())
    assert moe["layers.0.mlp.router"].axes == (None, "embed")
    assert moe["layers.0.mlp.experts.gate_up.weight"].axes == ("experts", None, "expert_ffn", "embed")
    assert moe["layers.0.mlp.experts.down.weight"].axes == ("experts", "embed", "expert_ffn")
    assert moe["layers.0.mlp.shared.down.weight"].axes == ("embed", "ffn")
    seen = []
    map_named(lambda name, leaf: seen.append(name), param_specs(SPECS["llama_mha_bias"]))
    assert seen == list(specs)
