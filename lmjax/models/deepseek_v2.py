"""DeepSeek-V2 and V2-Lite: keys and values in a latent vector, experts from a few groups and some for every token."""

from __future__ import annotations

from lmjax.models.deepseek_v3 import NAMES, deepseek_decoder, expert_groups
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, Routing

ARCHITECTURE = "DeepseekV2ForCausalLM"
APPLIES = ("n_routed_experts",)
LAYOUT = Layout(NAMES)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    # no published V2 divides the weights by their sum, and transformers would not
    config.refuse(scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    limited = config.choice("topk_method", "greedy", {"greedy": False, "group_limited_greedy": True})
    groups, top_groups = expert_groups(config) if limited else (1, 1)
    factor = config.number("routed_scaling_factor", 1.0)
    routing = Routing(groups=groups, top_groups=top_groups, factor=factor)
    config = config.with_defaults({"first_k_dense_replace": 0})
    return deepseek_decoder(config, max_model_len, routing, normalise=False)
