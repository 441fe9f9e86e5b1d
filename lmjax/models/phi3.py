"""Phi-3, Phi-3.5 and Phi-4: Llama with fused q, k, v and fused gate, up; longrope; Phi-4-mini rotates a part."""

from __future__ import annotations

from lmjax.models.common import one_window, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Phi3ForCausalLM"
LAYOUT = Layout(
    {"qkv": "model.layers.{i}.self_attn.qkv_proj", "gate_up": "model.layers.{i}.mlp.gate_up_proj"},
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config = config.with_defaults({"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
    return uniform_decoder(config, max_model_len, windows=one_window(config), partial=1.0)
