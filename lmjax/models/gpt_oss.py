"""GPT-OSS: experts with biases and a clamped product, attention sinks, every other layer slides."""

from __future__ import annotations

from lmjax.models.common import alternating_types, router_sizes, uniform_decoder, windows_of
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, MoeSpec

ARCHITECTURE = "GptOssForCausalLM"
APPLIES = ("num_local_experts", "num_experts")
_MLP = "model.layers.{i}.mlp."
LAYOUT = Layout(
    {
        "router": _MLP + "router",
        "experts_gate_up": _MLP + "experts.gate_up_proj",
        "experts_down": _MLP + "experts.down_proj",
    }
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config = config.with_defaults({"rope_theta": 150000.0, "rms_norm_eps": 1e-5}, {"num_local_experts": "num_experts"})
    if config.get("rope_scaling") is None:
        config = config.with_defaults({"rope_parameters": _YARN})
    config.refuse(swiglu_alpha=1.702, hidden_act="silu")
    moe = MoeSpec(
        **router_sizes(config, "num_local_experts"),
        ffn=config.integer("intermediate_size"),
        normalise=True,
        bias=True,
        limit=config.number("swiglu_limit", 7.0, low=0.0),
    )
    bias, num_layers = config.boolean("attention_bias", True), config.integer("num_hidden_layers")
    return uniform_decoder(
        config,
        max_model_len,
        head_dim=64,
        default_kv_heads=8,
        windows=windows_of(config, alternating_types(config, 2), 128),
        experts=[moe] * num_layers,
        qkv_bias=bias,
        o_bias=bias,
        attention={"sinks": True},
    )
