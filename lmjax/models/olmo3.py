"""OLMo 3: OLMo 2 with a sliding window in three layers of four; rope scaling only where attention is full."""

from __future__ import annotations

from lmjax.models.common import alternating_types, head_sizes, ropes_of_kinds, windows_of
from lmjax.models.hf_config import HfConfig
from lmjax.models.olmo2 import LAYOUT, post_norm_decoder
from lmjax.models.spec import DecoderSpec

__all__ = ["ARCHITECTURE", "LAYOUT", "spec_from_hf"]

ARCHITECTURE = "Olmo3ForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    kinds, theta = alternating_types(config, 4), config.number("rope_theta", 5e5)
    thetas = {"full_attention": theta, "sliding_attention": theta}
    ropes = ropes_of_kinds(config, kinds, head_sizes(config)[3], max_model_len, thetas)
    return post_norm_decoder(config, max_model_len, windows=windows_of(config, kinds, 4096), ropes=ropes)
