"""MPT: ALiBi, LayerNorm, no biases; some clip queries, keys and values."""

from __future__ import annotations

from lmjax.models.common import alibi_slopes, layer_norm, no_ropes, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, MlpSpec

ARCHITECTURE = "MptForCausalLM"
ALIASES = ("MPTForCausalLM",)  # as its makers write it
_LAYER = "transformer.blocks.{i}."
LAYOUT = Layout(
    {
        "embed": "transformer.wte",
        "norm": "transformer.norm_f",
        "attn.norm": _LAYER + "norm_1",
        "qkv": _LAYER + "attn.Wqkv",
        "o": _LAYER + "attn.out_proj",
        "mlp.norm": _LAYER + "norm_2",
        "up": _LAYER + "ffn.up_proj",
        "down": _LAYER + "ffn.down_proj",
    },
    prefix="transformer.",
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    names = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    }
    config = config.with_defaults(aliases=names)
    config.refuse(no_bias=True, expansion_ratio=4, logit_scale=None, embedding_fraction=1.0)
    attn = HfConfig(config.get("attn_config", {}), prefix="attn_config.")
    attn.refuse(alibi=True, qk_ln=False, prefix_lm=False, attn_uses_sequence_id=False, attn_type="multihead_attention")
    heads = config.integer("num_attention_heads")
    return uniform_decoder(
        config,
        max_model_len,
        norm=layer_norm(config, "layer_norm_epsilon", bias=False),
        mlp=MlpSpec(ffn=4 * config.integer("hidden_size"), activation="gelu", gated=False),
        ropes=no_ropes(config, max_model_len, "max_position_embeddings"),
        attention={
            "alibi": alibi_slopes(heads, attn.number("alibi_bias_max", 8.0)),
            "softmax_scale": attn.number("softmax_scale", None),
            "clip": attn.number("clip_qkv", None, low=1e-6),
        },
        tie_embeddings=config.boolean("tie_word_embeddings", True),
    )
