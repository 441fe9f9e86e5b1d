"""BLOOM: ALiBi, LayerNorm, one more of it after the embedding."""

from __future__ import annotations

from lmjax.models.common import alibi_slopes, layer_norm, no_ropes, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, MlpSpec

ARCHITECTURE = "BloomForCausalLM"
_LAYER = "transformer.h.{i}."
LAYOUT = Layout(
    {
        "embed": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "attn.norm": _LAYER + "input_layernorm",
        "qkv_by_head": _LAYER + "self_attention.query_key_value",
        "o": _LAYER + "self_attention.dense",
        "mlp.norm": _LAYER + "post_attention_layernorm",
        "up": _LAYER + "mlp.dense_h_to_4h",
        "down": _LAYER + "mlp.dense_4h_to_h",
    },
    prefix="transformer.",
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    names = {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    config = config.with_defaults({"seq_length": 2048}, names)
    config.refuse(apply_residual_connection_post_layernorm=False)
    norm = layer_norm(config, "layer_norm_epsilon")
    return uniform_decoder(
        config,
        max_model_len,
        norm=norm,
        mlp=MlpSpec(ffn=4 * config.integer("hidden_size"), activation="gelu_tanh", bias=True, gated=False),
        ropes=no_ropes(config, max_model_len, "seq_length"),
        attention={"alibi": alibi_slopes(config.integer("num_attention_heads"))},
        qkv_bias=True,
        o_bias=True,
        embed_norm=norm,
        tie_embeddings=config.boolean("tie_word_embeddings", True),
    )
