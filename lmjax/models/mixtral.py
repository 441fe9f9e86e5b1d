"""Mixtral: Mistral whose MLPs are experts; a sliding window in all layers or, by default, in none."""

from __future__ import annotations

from lmjax.models.common import ACTIVATIONS, router_sizes, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, MoeSpec

ARCHITECTURE = "MixtralForCausalLM"
APPLIES = ("num_local_experts",)
_MOE = "model.layers.{i}.block_sparse_moe."
LAYOUT = Layout(
    {
        "router": _MOE + "gate",
        "expert_gate": _MOE + "experts.{e}.w1",
        "expert_up": _MOE + "experts.{e}.w3",
        "expert_down": _MOE + "experts.{e}.w2",
    }
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config = HfConfig({"rope_theta": 1e6} | {k: v for k, v in config.values.items() if v is not None})
    moe = MoeSpec(
        **router_sizes(config, "num_local_experts"),
        ffn=config.integer("intermediate_size"),
        activation=config.choice("hidden_act", "silu", ACTIVATIONS),
        normalise=True,
    )
    num_layers = config.integer("num_hidden_layers")
    windows = [config.integer("sliding_window", None)] * num_layers
    return uniform_decoder(config, max_model_len, windows=windows, default_kv_heads=8, experts=[moe] * num_layers)
