"""Granite 3: Llama with multipliers of the embedding, of what is added to the residual, and of logits, both kinds."""

from __future__ import annotations

from lmjax.models.common import uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "GraniteForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.boolean("attention_bias", False)
    scaling = config.number("logits_scaling", 1.0)
    if scaling <= 0:
        raise config.error("logits_scaling", scaling, "above 0")
    return uniform_decoder(
        config,
        max_model_len,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        attention={"softmax_scale": config.number("attention_multiplier", 1.0)},
        layer={"residual_scale": config.number("residual_multiplier", 1.0)},
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / scaling,
    )
