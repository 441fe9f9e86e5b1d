"""Gemma 1: Llama with 1 + w norms, scaled embeddings and GELU."""

from __future__ import annotations

from lmjax.models.common import ACTIVATIONS, layer_types, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec, MlpSpec, NormSpec

ARCHITECTURE = "GemmaForCausalLM"


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    if "sliding_attention" in (layer_types(config) or []):
        raise config.error("layer_types", "sliding_attention", "full_attention for gemma")
    # the first configs say gelu and mean its tanh form, as transformers reads them
    activation = config.choice("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS | {"gelu": "gelu_tanh"})
    return gemma_decoder(config, max_model_len, MlpSpec(ffn=config.integer("intermediate_size"), activation=activation))


def gemma_decoder(config: HfConfig, max_model_len: int | None, mlp: MlpSpec, **fields: object) -> DecoderSpec:
    """What all of the family have in common."""
    bias = config.boolean("attention_bias", False)
    return uniform_decoder(
        config,
        max_model_len,
        head_dim=256,
        mlp=mlp,
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6), plus_one=True),
        qkv_bias=bias,
        o_bias=bias,
        tie_embeddings=config.boolean("tie_word_embeddings", True),
        embed_scale=config.integer("hidden_size") ** 0.5,
        **fields,  # type: ignore[arg-type]
    )
