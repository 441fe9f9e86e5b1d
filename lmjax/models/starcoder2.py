"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere, a sliding window in all layers or in none."""

from __future__ import annotations

from lmjax.models.common import layer_norm, one_window, plain_mlp, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Starcoder2ForCausalLM"
LAYOUT = Layout({"up": "model.layers.{i}.mlp.c_fc", "down": "model.layers.{i}.mlp.c_proj"})


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    bias = config.boolean("use_bias", True)
    return uniform_decoder(
        config,
        max_model_len,
        default_kv_heads=2,
        windows=one_window(config),
        norm=layer_norm(config, "norm_epsilon"),
        mlp=plain_mlp(config, "intermediate_size", "gelu_pytorch_tanh", bias),
        qkv_bias=bias,
        o_bias=bias,
        tie_embeddings=config.boolean("tie_word_embeddings", True),
    )
