"""Llama (1 to 3.x), SmolLM, and whatever else calls itself ``llama``."""

from __future__ import annotations

from lmjax.models.common import layer_types, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "LlamaForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    if "sliding_attention" in (layer_types(config) or []):
        raise config.error("layer_types", "sliding_attention", "full_attention for llama")
    bias = config.boolean("attention_bias", False)
    return uniform_decoder(
        config, max_model_len, qkv_bias=bias, o_bias=bias, mlp_bias=config.boolean("mlp_bias", False)
    )
