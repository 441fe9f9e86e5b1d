"""GPT-NeoX (Pythia): LayerNorm, attention and MLP in parallel, a part of each head rotates."""

from __future__ import annotations

from lmjax.models.common import layer_norm, plain_mlp, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "GPTNeoXForCausalLM"
_LAYER = "gpt_neox.layers.{i}."
LAYOUT = Layout(
    {
        "embed": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "attn.norm": _LAYER + "input_layernorm",
        "qkv_by_head": _LAYER + "attention.query_key_value",
        "o": _LAYER + "attention.dense",
        "mlp.norm": _LAYER + "post_attention_layernorm",
        "up": _LAYER + "mlp.dense_h_to_4h",
        "down": _LAYER + "mlp.dense_4h_to_h",
    },
    unused=(".attention.bias", ".attention.masked_bias"),
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    # as in transformers: a rope_theta beside them means nothing
    base, share = config.number("rotary_emb_base", 10000.0), config.number("rotary_pct", 0.25)
    config = HfConfig(config.values | {"rope_theta": base, "partial_rotary_factor": share})
    bias = config.boolean("attention_bias", True)
    return uniform_decoder(
        config,
        max_model_len,
        norm=layer_norm(config, "layer_norm_eps"),
        mlp=plain_mlp(config, "intermediate_size", "gelu", True),
        partial=0.25,
        qkv_bias=bias,
        o_bias=bias,
        layer={"parallel": config.boolean("use_parallel_residual", True)},
    )
