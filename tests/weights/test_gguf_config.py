"""The config that comes out of a GGUF file describes the same model as the config.json it was converted from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmjax.models.registry import spec_from_hf
from lmjax.weights.errors import WeightError
from lmjax.weights.gguf_config import llama3_divisors
from lmjax.weights.source import resolve_model
from tests.weights.checkpoints import LLAMA, QWEN2, QWEN3, tensors, write_gguf


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, LLAMA | {"rope_theta": 500000.0, "tie_word_embeddings": True}])
def test_same_spec(tmp_path, config):
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", config, tensors(config))))
    assert source.kind == "gguf" and source.path == source.weights == tmp_path / "m.gguf"
    assert spec_from_hf(source.config, None) == spec_from_hf(config, None)
    assert source.config["rms_norm_eps"] == 1e-5  # not the float32 nearest to it
    assert source.config["eos_token_id"] == source.generation_config["eos_token_id"] == 2
    kept = set(config) - ({"mlp_bias"} if config["model_type"] != "llama" else set())  # llama has it alone
    assert {k: source.config[k] for k in kept} == {k: config[k] for k in kept}


def rope_of(tmp_path, config=LLAMA, **kwargs):
    path = write_gguf(tmp_path / "m.gguf", config, tensors(config), **kwargs)
    return resolve_model(str(path)).config["rope_scaling"]


def hf_divisors(theta, dim, scaling):
    """As transformers' modeling_rope_utils has it, branch by branch."""
    found = []
    for i in range(0, dim, 2):
        inv_freq = 1.0 / theta ** (i / dim)
        wavelen = 2 * math.pi / inv_freq
        old, low, high = (
            scaling[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wavelen < old / high:
            found.append(1.0)
        elif wavelen > old / low:
            found.append(scaling["factor"])
        else:
            smooth = (old / wavelen - low) / (high - low)
            found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(found)


def llama3(factor=8.0, low=1.0, high=4.0, original=8192):
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_comes_back_from_its_divisors(tmp_path, head_dim, factor):
    config = LLAMA | {"head_dim": head_dim, "rope_theta": 500000.0}
    freqs = hf_divisors(500000.0, head_dim, llama3(factor)).astype(np.float32)
    assert rope_of(tmp_path, config, extra_tensors={"rope_freqs.weight": freqs}) == llama3(factor)


def test_llama3_scaling_with_other_factors(tmp_path):
    config = LLAMA | {"head_dim": 128, "rope_theta": 500000.0}
    want = hf_divisors(500000.0, 128, llama3(16.0, 2.0, 8.0))
    found = rope_of(tmp_path, config, extra_tensors={"rope_freqs.weight": want.astype(np.float32)})
    assert found == llama3(16.0, 2.0, 8.0)
    # another original length is the same line in other units
    want = hf_divisors(500000.0, 128, llama3(8.0, 1.0, 4.0, 4096))
    found = rope_of(tmp_path, config, extra_tensors={"rope_freqs.weight": want.astype(np.float32)})
    np.testing.assert_allclose(hf_divisors(500000.0, 128, found), want, rtol=1e-5)


def test_divisors_equal_the_reference_branches():
    for head_dim in (64, 128):
        want = hf_divisors(500000.0, head_dim, llama3())
        np.testing.assert_allclose(llama3_divisors(500000.0, head_dim, 8.0, 1.0, 4.0, 8192), want, rtol=1e-12)


def test_rope_freqs_of_another_form(tmp_path):
    with pytest.raises(WeightError, match=r"m\.gguf: tensor rope_freqs\.weight"):
        rope_of(tmp_path, extra_tensors={"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)})
    with pytest.raises(WeightError, match=r"rope_freqs\.weight"):
        rope_of(tmp_path, extra_tensors={"rope_freqs.weight": np.full(7, 2, np.float32)})
    ones = {"rope_freqs.weight": np.ones(16, np.float32)}
    assert rope_of(tmp_path, extra_tensors=ones) is None


def test_linear_and_yarn(tmp_path):
    def scaled(**extra):
        return rope_of(tmp_path, extra={f"llama.rope.{k}": v for k, v in extra.items()})

    assert scaled() is None
    assert scaled(**{"scaling.type": "none"}) is None
    assert scaled(scale_linear=4.0) == {"rope_type": "linear", "factor": 4.0}
    assert scaled(**{"scaling.type": "linear", "scaling.factor": 2.0}) == {"rope_type": "linear", "factor": 2.0}
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
    want = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert scaled(**yarn) == want
    assert scaled(**yarn, **{"scaling.yarn_beta_fast": 16.0}) == want | {"beta_fast": 16.0}
    with pytest.raises(WeightError, match="'longrope' is not supported; known: none, linear, yarn"):
        scaled(**{"scaling.type": "longrope"})


@pytest.mark.parametrize(
    "extra,word",
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.dimension_count": 16}, "rotary"),
    ],
)
def test_refused(tmp_path, extra, word):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), extra=extra)
    with pytest.raises(WeightError, match=rf"m\.gguf: .*{word}"):
        resolve_model(str(path))


def test_unknown_architecture_names_the_known(tmp_path):
    weights = tensors(LLAMA)
    path = write_gguf(tmp_path / "m.gguf", LLAMA | {"model_type": "falcon"}, weights)
    with pytest.raises(
        WeightError, match=r"m\.gguf: architecture 'falcon' is not supported; known: llama, qwen2, qwen3"
    ):
        resolve_model(str(path))


def test_missing_metadata(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA))
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.black_count"))
    with pytest.raises(WeightError, match=r"m\.gguf: metadata llama\.block_count is missing"):
        resolve_model(str(path))


def test_damaged_metadata_gives_no_other_exception(tmp_path):
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.attn_factor": 2.0,
    }
    path = write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), extra=scaling)
    data = path.read_bytes()
    end = data.index(b"token_embd.weight")
    rng = np.random.default_rng(0)
    for at in rng.choice(end, 400, replace=False):
        bad = bytearray(data)
        bad[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        try:
            spec_from_hf(resolve_model(str(path)).config, None)
        except ValueError as error:
            assert "\n" not in str(error)


def test_end_of_turn_and_sampling(tmp_path):
    extra = {"tokenizer.ggml.eot_token_id": 7, "general.sampling.temp": 0.7, "general.sampling.top_k": 20}
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", LLAMA, tensors(LLAMA), extra=extra)))
    assert source.generation_config["eos_token_id"] == [2, 7]
    assert source.generation_config["temperature"] == 0.7 and source.generation_config["top_k"] == 20
