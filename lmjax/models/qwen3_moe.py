"""Qwen3-MoE: Qwen3 with experts in some layers; where it slides, all layers do."""

from __future__ import annotations

from lmjax.models.common import qwen_experts, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Qwen3MoeForCausalLM"
APPLIES = ("num_experts", "num_local_experts")


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    name = "num_experts" if config.get("num_experts") else "num_local_experts"  # transformers 5 saves the latter
    if config.integer("num_local_experts", None) not in (None, config.integer(name)):
        raise config.error("num_local_experts", config.get("num_local_experts"), f"num_experts ({config.get(name)})")
    bias = config.boolean("attention_bias", False)
    slides = config.boolean("use_sliding_window", False)
    window = config.integer("sliding_window", 4096) if slides else None
    windows = [window] * config.integer("num_hidden_layers")
    return uniform_decoder(
        config,
        max_model_len,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        experts=qwen_experts(config, name),
    )
