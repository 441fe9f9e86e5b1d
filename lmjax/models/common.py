"""What the families' config readers share."""

from __future__ import annotations

from typing import Any

from lmjax.models.hf_config import HfConfig
from lmjax.models.rope import rope_from_hf
from lmjax.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, group_layers

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def uniform_decoder(
    config: HfConfig,
    max_model_len: int | None,
    *,
    head_dim: int | None = None,
    default_kv_heads: int | None = None,
    windows: list[int | None] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    mlp_bias: bool = False,
    experts: list[MoeSpec | None] | None = None,
) -> DecoderSpec:
    """A decoder whose layers differ at most in their window and their MLP. ``head_dim``: the family's fixed default, if
    it has one; ``windows``: one a layer, None = full attention everywhere; ``experts``: one a layer, None = dense."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", head_dim)
    if head_dim is None:
        if hidden % heads:
            raise config.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), or give head_dim")
        head_dim = hidden // heads
    num_layers = config.integer("num_hidden_layers")
    windows = windows or [None] * num_layers
    places = group_layers([(window, kv_heads, head_dim) for window in windows])
    ffn, activation = config.integer("intermediate_size"), config.choice("hidden_act", "silu", ACTIVATIONS)
    dense = MlpSpec(ffn=ffn, activation=activation, bias=mlp_bias)
    mlps = [moe or dense for moe in experts or [None] * num_layers]
    rope, max_len = rope_from_hf(config, head_dim, max_model_len)

    def attention(window: int | None, place: tuple[int, int]) -> AttentionSpec:
        return AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            group=place[0],
            index=place[1],
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            window=window,
        )

    return DecoderSpec(
        model_type=config.get("model_type"),
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        layers=tuple(
            LayerSpec(attention=attention(w, p), mlp=m) for w, p, m in zip(windows, places, mlps, strict=True)
        ),
        rope=rope,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        max_len=max_len,
    )


LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_types(config: HfConfig) -> list[str] | None:
    """The ``layer_types`` list of newer configs, checked, or None."""
    kinds: Any = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in LAYER_TYPES for kind in kinds):
        raise config.error("layer_types", kinds, f"a list of {' or '.join(LAYER_TYPES)}")
    if len(kinds) != config.integer("num_hidden_layers"):
        raise config.error("layer_types", f"{len(kinds)} entries", f"{config.integer('num_hidden_layers')} entries")
    return kinds


def qwen_windows(config: HfConfig) -> list[int | None]:
    """Qwen2 and Qwen3: ``use_sliding_window`` switches; layers from ``max_window_layers`` on (or ``layer_types``)
    slide."""
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        window = None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise config.error("max_window_layers", first, "an integer of at least 0")
    kinds = layer_types(config)
    if kinds is None:
        return [window if i >= first else None for i in range(num_layers)]
    if window is None and "sliding_attention" in kinds:
        raise config.error("layer_types", "sliding_attention", "full_attention where use_sliding_window is off")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def qwen_experts(config: HfConfig, count: str, shared_ffn: int | None = None) -> list[MoeSpec | None]:
    """Qwen2-MoE and Qwen3-MoE, one a layer: every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``
    has experts, the others are dense. ``count``: the field of their number; ``shared_ffn``: of the expert that every
    token passes."""
    num_layers = config.integer("num_hidden_layers")
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in dense):
        raise config.error("mlp_only_layers", dense, "a list of layer indices")
    moe = MoeSpec(
        **router_sizes(config, count),
        ffn=config.integer("moe_intermediate_size"),
        activation=config.choice("hidden_act", "silu", ACTIVATIONS),
        normalise=config.boolean("norm_topk_prob", False),
        shared_ffn=shared_ffn,
    )
    return [None if i in dense or (i + 1) % step else moe for i in range(num_layers)]


def router_sizes(config: HfConfig, field: str) -> dict[str, int]:
    """``experts`` and ``top_k`` of a MoeSpec; ``field``: the config's name for the number of experts."""
    experts, top_k = config.integer(field), config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.error("num_experts_per_tok", top_k, f"at most {field} ({experts})")
    return {"experts": experts, "top_k": top_k}
