"""DeepSeek-V3 and R1: V2 whose router scores by sigmoid, chooses with a bias, and takes groups by their two best."""

from __future__ import annotations

from lmjax.models.common import ACTIVATIONS, Ropes, router_sizes, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.rope import rope_from_hf, yarn_scale
from lmjax.models.spec import DecoderSpec, LatentSpec, MoeSpec, Routing

ARCHITECTURE = "DeepseekV3ForCausalLM"
APPLIES = ("n_routed_experts",)
_SHARED = "model.layers.{i}.mlp.shared_experts."
NAMES = {f"shared_{part}": f"{_SHARED}{part}_proj" for part in ("gate", "up", "down")}


def layout(spec: DecoderSpec) -> Layout:
    """Behind the last layer checkpoints may have one that predicts a further token (``num_nextn_predict_layers``)."""
    return Layout(NAMES, extra_layer=f"model.layers.{len(spec.layers)}.")


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse(scoring_func="sigmoid", topk_method="noaux_tc")
    config = config.with_defaults({"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3})
    groups, top_groups = expert_groups(config, least=2)
    routing = Routing(
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        group_score="best_two",
        choice_bias=True,
        factor=config.number("routed_scaling_factor", 2.5),
    )
    normalise = config.boolean("norm_topk_prob", True)
    interleaved = config.boolean("rope_interleave", True)
    return deepseek_decoder(config, max_model_len, routing, normalise=normalise, interleaved=interleaved)


def expert_groups(config: HfConfig, least: int = 1) -> tuple[int, int]:
    """``n_group`` and ``topk_group``, checked. least: experts of a group that its score needs."""
    experts, top_k = config.integer("n_routed_experts"), config.integer("num_experts_per_tok")
    groups, top_groups = config.integer("n_group"), config.integer("topk_group")
    if experts % groups or experts // groups < least:
        raise config.error("n_group", groups, f"a divisor of n_routed_experts ({experts}), {least} or more in a group")
    if top_groups > groups:
        raise config.error("topk_group", top_groups, f"at most n_group ({groups})")
    if top_k > top_groups * (experts // groups):
        most = top_groups * (experts // groups)
        raise config.error("num_experts_per_tok", top_k, f"at most the experts of topk_group groups ({most})")
    return groups, top_groups


def deepseek_decoder(
    config: HfConfig,
    max_model_len: int | None,
    routing: Routing,
    *,
    normalise: bool,
    interleaved: bool = True,
) -> DecoderSpec:
    """Either version: the same attention, and experts from layer ``first_k_dense_replace`` on."""
    latent = LatentSpec(
        rank=config.integer("kv_lora_rank", 512),
        rope_dim=config.integer("qk_rope_head_dim", 64),
        nope_dim=config.integer("qk_nope_head_dim", 128),
        value_dim=config.integer("v_head_dim", 128),
        q_rank=config.integer("q_lora_rank", None if "q_lora_rank" in config.values else 1536),
        bias=config.boolean("attention_bias", False),
        interleaved=interleaved,
    )
    heads, num_layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.error("num_key_value_heads", config.get("num_key_value_heads"), f"{heads}, as num_attention_heads")
    rope, max_len = rope_from_hf(config, latent.rope_dim, max_model_len)
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5 * yarn_scale(config) ** 2
    stored = {"num_key_value_heads": 1, "head_dim": latent.rank + latent.rope_dim}
    return uniform_decoder(
        HfConfig(config.values | stored, config.prefix),
        max_model_len,
        ropes=Ropes((rope,), [0] * num_layers, max_len),
        experts=_experts(config, routing, normalise),
        o_bias=latent.bias,
        attention={"latent": latent, "softmax_scale": scale},
    )


def _experts(config: HfConfig, routing: Routing, normalise: bool) -> list[MoeSpec | None]:
    """One a layer, None where it is dense."""
    ffn, shared = config.integer("moe_intermediate_size"), config.get("n_shared_experts", 0)
    if not isinstance(shared, int) or isinstance(shared, bool) or shared < 0:
        raise config.error("n_shared_experts", shared, "an integer of at least 0")
    first, step = config.get("first_k_dense_replace"), config.integer("moe_layer_freq", 1)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise config.error("first_k_dense_replace", first, "an integer of at least 0")
    moe = MoeSpec(
        **router_sizes(config, "n_routed_experts"),
        ffn=ffn,
        activation=config.choice("hidden_act", "silu", ACTIVATIONS),
        normalise=normalise,
        shared_ffn=shared * ffn or None,
        shared_gate=False,
        routing=routing,
    )
    return [moe if i >= first and i % step == 0 else None for i in range(config.integer("num_hidden_layers"))]
