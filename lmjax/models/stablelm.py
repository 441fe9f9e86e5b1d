"""StableLM 2 and 3B: LayerNorm, a quarter of each head rotates; QK-norm and parallel residual in some."""

from __future__ import annotations

from lmjax.models.common import layer_norm, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, NormSpec

ARCHITECTURE = "StableLmForCausalLM"
LAYOUT = Layout({f"{x}_norm": f"model.layers.{{i}}.self_attn.{x}_layernorm.norms.{{h}}" for x in "qk"})


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    norm, parallel = layer_norm(config, "layer_norm_eps"), config.boolean("use_parallel_residual", False)
    attention = {}
    if config.boolean("qk_layernorm", False):
        attention = {"qk_norm": NormSpec(kind="layer", eps=norm.eps), "qk_norm_over": "own"}
    return uniform_decoder(
        config,
        max_model_len,
        default_kv_heads=32,
        norm=norm,
        partial=0.25,
        qkv_bias=config.boolean("use_qkv_bias", False),
        attention=attention,
        layer={"parallel": parallel, "shared_norm": parallel},
    )
