"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v; optionally a window in the upper layers."""

from __future__ import annotations

from lmjax.models.common import qwen_windows, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Qwen2ForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    return uniform_decoder(config, max_model_len, windows=qwen_windows(config), qkv_bias=True)
