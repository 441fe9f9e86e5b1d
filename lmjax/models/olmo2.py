"""OLMo 2: norms after attention and MLP instead of before, QK-norm over all heads at once."""

from __future__ import annotations

from typing import Any

from lmjax.models.common import uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "Olmo2ForCausalLM"
_LAYER = "model.layers.{i}."
LAYOUT = Layout(
    {"attn.post_norm": _LAYER + "post_attention_layernorm", "mlp.post_norm": _LAYER + "post_feedforward_layernorm"}
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    return post_norm_decoder(config, max_model_len)


def post_norm_decoder(config: HfConfig, max_model_len: int | None, **fields: Any) -> DecoderSpec:
    """OLMo 2 and 3."""
    bias = config.boolean("attention_bias", False)
    return uniform_decoder(
        config.with_defaults({"rms_norm_eps": 1e-5}),
        max_model_len,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        attention={"qk_norm_over": "all"},
        layer={"pre_norm": False, "post_norm": True},
        **fields,
    )
