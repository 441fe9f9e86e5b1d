"""Gemma 3, text: Gemma 2 with QK-norm in place of soft caps, one full layer in six, and a rotary base for each kind."""

from __future__ import annotations

from lmjax.models.common import alternating_types, head_sizes, ropes_of_kinds, windows_of
from lmjax.models.gemma2 import LAYOUT, four_norms
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

__all__ = ["APPLIES", "ARCHITECTURE", "LAYOUT", "spec_from_hf"]

ARCHITECTURE = "Gemma3ForCausalLM"
APPLIES = ("attn_logit_softcapping", "final_logit_softcapping")


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    # read by transformers and not used: a cap would make another model of it
    config.refuse(attn_logit_softcapping=None)
    kinds = alternating_types(config, config.integer("sliding_window_pattern", 6))
    thetas = {
        "full_attention": config.number("rope_theta", 1e6),
        "sliding_attention": config.number("rope_local_base_freq", 1e4),
    }
    return four_norms(
        config,
        max_model_len,
        (None, None),
        windows=windows_of(config, kinds, 4096),
        ropes=ropes_of_kinds(config, kinds, head_sizes(config, 256)[3], max_model_len, thetas),
        qk_norm=True,
    )
