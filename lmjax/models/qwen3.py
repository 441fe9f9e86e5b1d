"""Qwen3 (dense): RMSNorm on every query and key head, head_dim 128 unless the config says otherwise."""

from __future__ import annotations

from lmjax.models.common import qwen_windows, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    windows = qwen_windows(config)
    return uniform_decoder(
        config, max_model_len, windows=windows, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True
    )
