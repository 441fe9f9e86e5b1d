"""Gemma's GGUF files, which hold 1 + w of the norms, give the model that the Hugging Face directory gives."""

from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest

from lmjax.models.registry import spec_from_hf
from lmjax.weights.loader import load_params
from lmjax.weights.source import resolve_model
from tests import tiny

BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# of the tiny cases, what a GGUF file cannot say: llama.cpp takes it from the architecture
FIXED = {
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
}


def gguf_of(name, config, path):
    """As llama.cpp's convert_hf_to_gguf.py writes it."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if name != "gemma":
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    for key, tensor in tiny.tensors(name, config).items():
        stem, kind = key.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            part = "ffn_norm" if name == "gemma" and part == "post_attention_layernorm" else BLOCK[part]
            stem = f"blk.{layer}.{part}"
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[stem]
        writer.add_tensor(f"{stem}.{kind}", tensor + 1 if "norm" in stem else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", FIXED)
def test_same_model(tmp_path, name):
    config = tiny.CASES[name].config | FIXED[name]
    config["query_pre_attn_scalar"] = config["head_dim"]
    if name != "gemma":
        config.pop("layer_types", None)
    gguf_of(name, config, tmp_path / "m.gguf")
    source = resolve_model(str(tmp_path / "m.gguf"))
    spec = spec_from_hf(source.config, None)
    assert spec == spec_from_hf(config, None)
    path = tiny.write(name, tmp_path / "hf")
    wanted = load_params(resolve_model(str(path)), spec_from_hf(tiny.CASES[name].config, None), "float32")
    got = load_params(source, spec, "float32")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=5e-7), got, wanted)
