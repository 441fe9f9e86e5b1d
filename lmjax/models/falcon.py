"""Falcon: attention and MLP in parallel, one KV head (7B) or few (40B, 11B). Falcon-RW has ALiBi and both in turn."""

from __future__ import annotations

from lmjax.models.common import alibi_slopes, head_sizes, layer_norm, no_ropes, plain_mlp, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "FalconForCausalLM"
_LAYER = "transformer.h.{i}."
_NAMES = {
    "embed": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "qkv_by_head": _LAYER + "self_attention.query_key_value",
    "o": _LAYER + "self_attention.dense",
    "up": _LAYER + "mlp.dense_h_to_4h",
    "down": _LAYER + "mlp.dense_4h_to_h",
}
_ONE_NORM = {"attn.norm": _LAYER + "input_layernorm", "mlp.norm": _LAYER + "post_attention_layernorm"}
_TWO_NORMS = {"attn.norm": _LAYER + "ln_attn", "mlp.norm": _LAYER + "ln_mlp"}


def layout(spec: DecoderSpec) -> Layout:
    first = spec.layers[0]
    norms = _TWO_NORMS if first.parallel and not first.shared_norm else _ONE_NORM
    return Layout(_NAMES | norms, prefix="transformer.")


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    new = config.boolean("new_decoder_architecture", False)
    names = {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    config = config.with_defaults({"max_position_embeddings": 2048}, names)
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_kv_heads", heads) if new else 1 if config.boolean("multi_query", True) else heads
    config = config.with_defaults({"num_key_value_heads": kv_heads})
    norms = config.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if norms > (2 if new else 1):
        raise config.error("num_ln_in_parallel_attn", norms, "1, or 2 with new_decoder_architecture")
    parallel = config.boolean("parallel_attn", True) or new
    bias, alibi = config.boolean("bias", False), config.boolean("alibi", False)
    head_dim = head_sizes(config)[3]
    return uniform_decoder(
        config,
        max_model_len,
        norm=layer_norm(config, "layer_norm_epsilon"),
        mlp=plain_mlp(config, "ffn_hidden_size", "gelu", bias, "activation"),
        ropes=no_ropes(config, max_model_len, "max_position_embeddings") if alibi else None,
        # with ALiBi it scales the sum of both
        attention={"alibi": tuple(slope * head_dim**-0.5 for slope in alibi_slopes(heads))} if alibi else {},
        qkv_bias=bias,
        o_bias=bias,
        layer={"parallel": parallel, "shared_norm": parallel and norms == 1},
        tie_embeddings=config.boolean("tie_word_embeddings", True),
    )
