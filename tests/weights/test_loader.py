"""Parameters from files: every value where it belongs, and one line for whatever does not fit."""

from __future__ import annotations

import json
import tracemalloc

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmjax.models.params import abstract_params, named_leaves
from lmjax.models.registry import spec_from_hf
from lmjax.weights import safetensors
from lmjax.weights.errors import WeightError
from lmjax.weights.loader import load_params
from lmjax.weights.source import resolve_model
from tests import tiny
from tests.weights.checkpoints import LLAMA, QWEN2, QWEN3, tensors, write_gguf, write_hf

BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}


def load(path, dtype="float32", load_format="auto", **kwargs):
    source = resolve_model(str(path))
    return load_params(source, spec_from_hf(source.config, None), dtype, load_format, **kwargs)


def fails(path, *words, **kwargs):
    with pytest.raises(WeightError) as caught:
        load(path, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def expected(config, weights):
    """The parameters written out by hand, head by head."""
    heads, kv, h = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    group = heads // kv

    def qkv(layer, kind):
        q, k, v = (weights[f"{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        rows = []
        for j in range(kv):
            for i in range(j * group, (j + 1) * group):
                rows.append(q[i * h : (i + 1) * h])
            rows += [k[j * h : (j + 1) * h], v[j * h : (j + 1) * h]]
        return np.stack(rows).reshape(kv, group + 2, h, *q.shape[1:])

    found = {"embed": weights["model.embed_tokens.weight"], "norm": weights["model.norm.weight"]}
    if "lm_head.weight" in weights and not config["tie_word_embeddings"]:
        found["head"] = weights["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        found[f"layers.{i}.attn.norm"] = weights[f"{at}.input_layernorm.weight"]
        found[f"layers.{i}.attn.qkv.weight"] = qkv(at, "weight")
        if f"{at}.self_attn.q_proj.bias" in weights:
            found[f"layers.{i}.attn.qkv.bias"] = qkv(at, "bias")
        for part, name in (("attn.q_norm", "self_attn.q_norm"), ("attn.k_norm", "self_attn.k_norm")):
            if f"{at}.{name}.weight" in weights:
                found[f"layers.{i}.{part}"] = weights[f"{at}.{name}.weight"]
        found[f"layers.{i}.attn.o.weight"] = weights[f"{at}.self_attn.o_proj.weight"]
        found[f"layers.{i}.mlp.norm"] = weights[f"{at}.post_attention_layernorm.weight"]
        gate_up = [weights[f"{at}.mlp.{x}_proj.weight"] for x in ("gate", "up")]
        found[f"layers.{i}.mlp.gate_up.weight"] = np.stack(gate_up)
        found[f"layers.{i}.mlp.down.weight"] = weights[f"{at}.mlp.down_proj.weight"]
        if f"{at}.mlp.gate_proj.bias" in weights:
            found[f"layers.{i}.attn.o.bias"] = weights[f"{at}.self_attn.o_proj.bias"]
            found[f"layers.{i}.mlp.gate_up.bias"] = np.stack(
                [weights[f"{at}.mlp.{x}_proj.bias"] for x in ("gate", "up")]
            )
            found[f"layers.{i}.mlp.down.bias"] = weights[f"{at}.mlp.down_proj.bias"]
    return found


def assert_params(params, want, dtype=np.float32):
    got = named_leaves(params)
    assert set(got) == set(want)
    for name, value in got.items():
        assert isinstance(value, jax.Array) and value.dtype == dtype
        np.testing.assert_array_equal(np.asarray(value), want[name].astype(dtype), err_msg=name)


def biased(weights):
    rng = np.random.default_rng(9)
    more = {
        name.replace(".weight", ".bias"): rng.standard_normal(len(value), np.float32)
        for name, value in weights.items()
        if "_proj." in name
    }
    return weights | more


CONFIGS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "biased": BIASED}


def weights_of(name):
    weights = tensors(CONFIGS[name])
    return biased(weights) if name == "biased" else weights


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_hf(tmp_path, name, shards):
    config, weights = CONFIGS[name], weights_of(name)
    params = load(write_hf(tmp_path, config, weights, shards))
    assert_params(params, expected(config, weights))
    spec = spec_from_hf(config, None)
    want = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(spec, "float32"))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == want


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf(tmp_path, name):
    config, weights = CONFIGS[name], weights_of(name)
    assert_params(load(write_gguf(tmp_path / "m.gguf", config, weights)), expected(config, weights))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantised_gguf(tmp_path, kind):
    weights = tensors(QWEN2)
    kinds = {name: kind for name, value in weights.items() if value.ndim == 2}
    code = gguf.GGMLQuantizationType[kind]
    rounded = {n: gguf.dequantize(gguf.quantize(v, code), code) if n in kinds else v for n, v in weights.items()}
    assert_params(load(write_gguf(tmp_path / "m.gguf", QWEN2, weights, kinds)), expected(QWEN2, rounded))


@pytest.mark.parametrize("stored", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_conversion(tmp_path, stored, dtype):
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    weights = {name: value.astype(kinds.get(stored, stored)) for name, value in tensors(LLAMA).items()}
    params = load(write_hf(tmp_path, LLAMA, weights), dtype)
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    assert_params(params, expected(LLAMA, wide), kinds.get(dtype, np.dtype(dtype)))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_float16_overflow(tmp_path, stored):
    weights = tensors(LLAMA)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    path = write_hf(tmp_path, LLAMA, {name: value.astype(stored) for name, value in weights.items()})
    fails(path, "model.layers.1.mlp.up_proj.weight", "bfloat16", dtype="float16")
    load(path, "bfloat16")


def test_tied_head_loads_with_and_without_the_copy(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    weights = tensors(config)
    want = expected(config, weights)
    assert_params(load(write_hf(tmp_path / "a", config, weights)), want)
    # as in transformers, the embedding wins
    copy = weights | {"lm_head.weight": np.zeros_like(weights["model.embed_tokens.weight"])}
    assert_params(load(write_hf(tmp_path / "b", config, copy)), want)


def test_untied_head_missing(tmp_path):
    weights = tensors(LLAMA)
    del weights["lm_head.weight"]
    fails(write_hf(tmp_path, LLAMA, weights), "lm_head.weight", "missing", "tie_word_embeddings is false")


def test_names_without_their_prefix(tmp_path):
    """As in the checkpoints of GPT-2 and BLOOM on the hub, which hold a causal mask, too."""
    path, spec = tiny.write("gpt2", tmp_path), spec_from_hf(tiny.CASES["gpt2"].config, None)
    expected = named_leaves(load_params(resolve_model(str(path)), spec, "float32"))
    short = {name.removeprefix("transformer."): x for name, x in tiny.tensors("gpt2").items()}
    save_file(short | {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.uint8)}, path / "model.safetensors")
    found = named_leaves(load_params(resolve_model(str(path)), spec, "float32"))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_harmless_tensors_are_passed_over(tmp_path):
    weights = tensors(LLAMA)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    assert_params(load(write_hf(tmp_path, LLAMA, weights | extra)), expected(LLAMA, weights))


def test_unknown_tensors(tmp_path):
    weights = tensors(LLAMA)
    path = write_hf(tmp_path, LLAMA, weights | {"model.layers.0.self_attn.q_proj.bias": np.ones(128, np.float32)})
    fails(path, "model.safetensors", "tensor model.layers.0.self_attn.q_proj.bias is unknown")
    path = write_hf(tmp_path, LLAMA, weights | {f"x{i}": np.ones(2, np.float32) for i in range(5)})
    fails(path, "5 tensors (x0, x1, x2, ...) are unknown")
    smaller = json.dumps(LLAMA | {"num_hidden_layers": 1})
    (write_hf(tmp_path, LLAMA, weights) / "config.json").write_text(smaller)
    fails(path, "9 tensors (model.layers.1.")


def test_missing_tensors(tmp_path):
    weights = {name: value for name, value in tensors(LLAMA).items() if ".1.mlp." not in name}
    fails(write_hf(tmp_path, LLAMA, weights), str(tmp_path), "3 tensors (model.layers.1.mlp.gate_proj.weight, ")


@pytest.mark.parametrize("shape", [(96, 65), (95, 64), (64, 96), (6144,), (1, 96, 64)])
def test_wrong_shape(tmp_path, shape):
    weights = tensors(LLAMA) | {"model.layers.1.mlp.gate_proj.weight": np.ones(shape, np.float32)}
    words = ("model.safetensors", "model.layers.1.mlp.gate_proj.weight", str(list(shape)), "[96, 64]")
    fails(write_hf(tmp_path, LLAMA, weights), *words)


def test_vocabulary_larger_than_the_checkpoint(tmp_path):
    config = LLAMA | {"vocab_size": 100}
    fails(write_hf(tmp_path, config, tensors(LLAMA)), "model.embed_tokens.weight", "[96, 64]", "[100, 64]")


def test_integer_weights(tmp_path):
    weights = tensors(LLAMA) | {"model.norm.weight": np.ones(64, np.int8)}
    fails(write_hf(tmp_path, LLAMA, weights), "model.norm.weight", "I8", "BF16")


def test_gguf_errors_name_file_and_tensor(tmp_path):
    weights = tensors(LLAMA)
    del weights["model.layers.0.mlp.up_proj.weight"]
    fails(write_gguf(tmp_path / "a.gguf", LLAMA, weights), "a.gguf", "tensor blk.0.ffn_up.weight is missing")
    weights = tensors(LLAMA) | {"model.layers.0.mlp.up_proj.weight": np.ones((96, 32), np.float32)}
    fails(write_gguf(tmp_path / "b.gguf", LLAMA, weights), "b.gguf", "blk.0.ffn_up.weight", "[96, 32]", "[96, 64]")
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "c.gguf", LLAMA, tensors(LLAMA), extra_tensors=extra)
    fails(path, "c.gguf", "blk.0.attn_sinks.weight is unknown")


def test_gguf_integer_weights(tmp_path):
    weights = {name: value for name, value in tensors(LLAMA).items() if name != "lm_head.weight"}
    extra = {"output.weight": np.ones((96, 64), np.int16)}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, weights, extra_tensors=extra)
    fails(path, "m.gguf", "output.weight", "I16", "Q4_K")


def test_faults_are_found_before_anything_is_read(tmp_path, monkeypatch):
    def read(info, out, rows, columns):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(safetensors, "read_into", read)
    weights = tensors(LLAMA) | {"lm_head.weight": np.ones((96, 63), np.float32)}  # the last one
    fails(write_hf(tmp_path, LLAMA, weights), "lm_head.weight")


def test_load_format(tmp_path):
    hf = write_hf(tmp_path / "hf", LLAMA, tensors(LLAMA))
    file = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA))
    load(hf, load_format="safetensors")
    load(file, load_format="gguf")
    fails(hf, "--load-format gguf", load_format="gguf")
    fails(file, "--load-format safetensors", load_format="safetensors")
    fails(hf, "--load-format", "'pt'", "dummy", load_format="pt")


def test_dummy_needs_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    fails(tmp_path, "no weights")
    first, again, other = (named_leaves(load(tmp_path, "bfloat16", "dummy", seed=s)) for s in (1, 1, 2))
    want = named_leaves(abstract_params(spec_from_hf(LLAMA, None), "bfloat16"))
    assert {n: (v.shape, v.dtype) for n, v in first.items()} == {n: (v.shape, v.dtype) for n, v in want.items()}
    assert all(np.array_equal(first[n], again[n]) for n in first)
    assert not np.array_equal(first["embed"], other["embed"])
    assert not np.array_equal(first["embed"], first["head"])
    assert all(np.isfinite(np.asarray(v, np.float32)).all() and np.asarray(v).any() for v in first.values())


def test_progress_counts_stored_bytes(tmp_path):
    seen = []
    load(write_hf(tmp_path, LLAMA, tensors(LLAMA)), progress=lambda done, total: seen.append((done, total)))
    total = sum(value.nbytes for value in tensors(LLAMA).values())
    assert seen == sorted(seen) and seen[-1] == (total, total)


@pytest.mark.parametrize("dtype,kind", [("float32", "hf"), ("bfloat16", "hf"), ("float32", "gguf")])
def test_peak_host_memory_is_the_model_and_a_tensor_or_two(tmp_path, dtype, kind):
    config = LLAMA | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 6}
    weights = tensors(config)
    if kind == "hf":
        path = write_hf(tmp_path, config, weights)
    else:
        q8 = {name: "Q8_0" for name, value in weights.items() if value.ndim == 2}
        path = write_gguf(tmp_path / "m.gguf", config, weights, q8)
    largest = max(value.nbytes for value in weights.values())
    model = sum(value.nbytes for value in weights.values()) * (1 if dtype == "float32" else 0.5)
    assert model > 6 * largest / (1 if dtype == "float32" else 2)
    del weights
    load(path, dtype)  # imports and caches are not the model's
    tracemalloc.start()
    params = load(path, dtype)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < model + 2.2 * largest
    assert held < 1.05 * model + 1e6
    del params


def test_parameters_do_not_change_with_the_file(tmp_path):
    path = write_hf(tmp_path, LLAMA, tensors(LLAMA))
    params = load(path)
    file = path / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(bytes(size))
    assert_params(params, expected(LLAMA, tensors(LLAMA)))
