"""Command-R: LayerNorm without a bias, one for attention and MLP in parallel; rotary pairs are neighbours."""

from __future__ import annotations

from typing import Any

from lmjax.models.common import layer_norm, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "CohereForCausalLM"
LAYOUT = Layout(interleaved=True)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    qk_norm = config.boolean("use_qk_norm", False)
    attention = {"qk_norm": layer_norm(config, "layer_norm_eps", bias=False), "qk_norm_over": "own"} if qk_norm else {}
    return cohere_decoder(config.with_defaults({"rope_theta": 5e5}), max_model_len, attention=attention)


def cohere_decoder(config: HfConfig, max_model_len: int | None, **fields: Any) -> DecoderSpec:
    """Command-R and Command-R7B."""
    bias = config.boolean("attention_bias", False)
    return uniform_decoder(
        config,
        max_model_len,
        norm=layer_norm(config, "layer_norm_eps", bias=False),
        qkv_bias=bias,
        o_bias=bias,
        layer={"parallel": True, "shared_norm": True},
        logit_scale=config.number("logit_scale", 0.0625),
        tie_embeddings=config.boolean("tie_word_embeddings", True),
        **fields,
    )
