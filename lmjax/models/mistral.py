"""Mistral 7B: Llama, with a sliding window in all layers or in none."""

from __future__ import annotations

from lmjax.models.common import layer_types, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "MistralForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    # absent means transformers' default of 4096, null means none
    window = 4096 if "sliding_window" not in config.values else config.integer("sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(layer_types(config) or [kind]) != {kind}:
        raise config.error("layer_types", config.get("layer_types"), f"{kind} in every layer, as sliding_window says")
    windows = [window] * config.integer("num_hidden_layers")
    return uniform_decoder(config, max_model_len, windows=windows, default_kv_heads=8)
