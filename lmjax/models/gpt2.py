"""GPT-2: learned positions, LayerNorm, matrices stored as [in, out]."""

from __future__ import annotations

from lmjax.models.common import layer_norm, no_ropes, plain_mlp, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "GPT2LMHeadModel"
_LAYER = "transformer.h.{i}."
LAYOUT = Layout(
    {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "attn.norm": _LAYER + "ln_1",
        "qkv": _LAYER + "attn.c_attn",
        "o": _LAYER + "attn.c_proj",
        "mlp.norm": _LAYER + "ln_2",
        "up": _LAYER + "mlp.c_fc",
        "down": _LAYER + "mlp.c_proj",
    },
    transposed=True,
    prefix="transformer.",
    unused=(".attn.bias", ".attn.masked_bias"),
)
NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config = config.with_defaults(aliases=NAMES)
    config.refuse(add_cross_attention=False, scale_attn_by_inverse_layer_idx=False)
    return uniform_decoder(
        config,
        max_model_len,
        norm=layer_norm(config, "layer_norm_epsilon"),
        mlp=plain_mlp(config, "n_inner", "gelu_new", True, "activation_function"),
        ropes=no_ropes(config, max_model_len, "max_position_embeddings"),
        qkv_bias=True,
        o_bias=True,
        attention={} if config.boolean("scale_attn_weights", True) else {"softmax_scale": 1.0},
        positions=config.integer("max_position_embeddings"),
        tie_embeddings=config.boolean("tie_word_embeddings", True),
    )
