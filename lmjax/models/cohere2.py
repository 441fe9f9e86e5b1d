"""Command-R7B and Command A: three of four layers slide; the others see all and have no rotary embedding."""

from __future__ import annotations

from lmjax.models.cohere import LAYOUT, cohere_decoder
from lmjax.models.common import Ropes, alternating_types, head_sizes, windows_of
from lmjax.models.hf_config import HfConfig
from lmjax.models.rope import rope_from_hf
from lmjax.models.spec import DecoderSpec

__all__ = ["ARCHITECTURE", "LAYOUT", "spec_from_hf"]

ARCHITECTURE = "Cohere2ForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    kinds = alternating_types(config, config.integer("sliding_window_pattern", 4))
    rope, max_len = rope_from_hf(config, head_sizes(config)[3], max_model_len)
    ropes = Ropes((rope,), [0 if kind == "sliding_attention" else None for kind in kinds], max_len)
    return cohere_decoder(config, max_model_len, windows=windows_of(config, kinds, 4096), ropes=ropes)
