"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in some layers, and one more expert that every token passes."""

from __future__ import annotations

from lmjax.models.common import layer_types, qwen_experts, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Qwen2MoeForCausalLM"
APPLIES = ("num_experts",)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    experts = qwen_experts(config, "num_experts", shared_ffn=config.integer("shared_expert_intermediate_size"))
    bias = config.boolean("qkv_bias", True)
    return uniform_decoder(config, max_model_len, windows=_windows(config), qkv_bias=bias, experts=experts)


def _windows(config: HfConfig) -> list[int | None]:
    """As transformers: without ``layer_types``, every second layer below ``max_window_layers`` slides."""
    num_layers = config.integer("num_hidden_layers")
    if not config.boolean("use_sliding_window", False):
        return [None] * num_layers
    window, first_full = config.integer("sliding_window", 4096), config.integer("max_window_layers", 28)
    kinds = layer_types(config)
    slides = [i % 2 == 0 and i < first_full for i in range(num_layers)]
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    return [window if slide else None for slide in slides]
