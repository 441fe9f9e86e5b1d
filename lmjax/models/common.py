"""What the families' config readers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lmjax.models.hf_config import HfConfig
from lmjax.models.rope import rope_from_hf, ropes_by_kind
from lmjax.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec, group_layers

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
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
    mlp: MlpSpec | None = None,
    experts: list[MoeSpec | None] | None = None,
    norm: NormSpec | None = None,
    ropes: Ropes | None = None,
    partial: float | None = None,
    attention: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None,
    **decoder: Any,
) -> DecoderSpec:
    """A decoder whose layers differ at most in their window, their rope and their MLP.

    ``head_dim``: the family's fixed default, if it has one; ``windows``: one a layer, None = full attention everywhere;
    ``mlp``: None = gated; ``experts``: one a layer, None = dense; ``norm``: None = RMSNorm; ``ropes``: None = one for
    all, from the config; ``partial``: see ``rope_from_hf``. ``attention``, ``layer`` and the rest: further fields of
    ``AttentionSpec``, ``LayerSpec`` and ``DecoderSpec``.
    """
    hidden, heads, kv_heads, head_dim = head_sizes(config, head_dim, default_kv_heads)
    num_layers = config.integer("num_hidden_layers")
    windows = windows or [None] * num_layers
    places = group_layers([(window, kv_heads, head_dim) for window in windows])
    if mlp is None:
        ffn, activation = config.integer("intermediate_size"), config.choice("hidden_act", "silu", ACTIVATIONS)
        mlp = MlpSpec(ffn=ffn, activation=activation, bias=mlp_bias)
    norm = norm or NormSpec(eps=config.number("rms_norm_eps", 1e-6))
    if ropes is None:
        rope, max_len = rope_from_hf(config, head_dim, max_model_len, partial)
        ropes = Ropes((rope,), [0] * num_layers, max_len)

    def one(i: int) -> LayerSpec:
        spec = AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            group=places[i][0],
            index=places[i][1],
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            window=windows[i],
            rope=ropes.of_layers[i],
            **{"qk_norm": norm if qk_norm else None} | (attention or {}),
        )
        return LayerSpec(attention=spec, mlp=(experts or {i: None})[i] or mlp, norm=norm, **layer or {})

    fields: dict[str, Any] = {"tie_embeddings": config.boolean("tie_word_embeddings", False)} | decoder
    return DecoderSpec(
        model_type=config.get("model_type"),
        hidden=hidden,
        vocab=config.integer("vocab_size"),
        layers=tuple(one(i) for i in range(num_layers)),
        ropes=ropes.specs,
        norm=norm,
        max_len=ropes.max_len,
        **fields,
    )


@dataclass(frozen=True)
class Ropes:
    """``of_layers``: each layer's index in ``specs``, None without rotary embedding."""

    specs: tuple[RopeSpec, ...]
    of_layers: list[int | None]
    max_len: int


def no_ropes(config: HfConfig, max_model_len: int | None, field: str) -> Ropes:
    """Of a model without rotary embedding; ``field``: of the longest sequence."""
    longest = config.integer(field)
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(f"max_model_len: got {max_model_len}, must be at most {longest} ({config.named(field)})")
    return Ropes((), [None] * config.integer("num_hidden_layers"), max_model_len or longest)


def ropes_of_kinds(
    config: HfConfig, kinds: list[str], head_dim: int, max_model_len: int | None, thetas: dict[str, float]
) -> Ropes:
    """A rope for each kind of layer that the model has; those that are equal are one."""
    by_kind, max_len = ropes_by_kind(config, head_dim, max_model_len, thetas)
    specs = tuple(dict.fromkeys(by_kind[kind] for kind in thetas if kind in kinds))
    return Ropes(specs, [specs.index(by_kind[kind]) for kind in kinds], max_len)


def head_sizes(
    config: HfConfig, head_dim: int | None = None, default_kv_heads: int | None = None
) -> tuple[int, int, int, int]:
    """(hidden size, query heads, KV heads, features of a head)."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = config.integer("head_dim", head_dim)
    if head_dim is None:
        if hidden % heads:
            raise config.error("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), or give head_dim")
        head_dim = hidden // heads
    return hidden, heads, kv_heads, head_dim


def plain_mlp(config: HfConfig, field: str, activation: str, bias: bool, act_field: str = "hidden_act") -> MlpSpec:
    """An MLP without a gate, by default of four times the hidden size. activation: the family's default."""
    ffn = config.integer(field, 4 * config.integer("hidden_size"))
    return MlpSpec(ffn=ffn, activation=config.choice(act_field, activation, ACTIVATIONS), bias=bias, gated=False)


def layer_norm(config: HfConfig, field: str, bias: bool = True) -> NormSpec:
    return NormSpec(kind="layer", eps=config.number(field, 1e-5), bias=bias)


def alibi_slopes(heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Press et al. (2022), as in BLOOM and MPT: those of the next lower power of two, then every second one of the next
    higher."""
    most = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** -(bias_max * i / most) for i in range(1, most + 1)]
    return tuple(slopes if most == heads else (slopes[1::2] + slopes[::2])[:heads])


LAYER_TYPES = ("full_attention", "sliding_attention")


def alternating_types(config: HfConfig, pattern: int) -> list[str]:
    """``layer_types``, or without it every ``pattern``-th layer with full attention."""
    num_layers = config.integer("num_hidden_layers")
    return layer_types(config) or [LAYER_TYPES[(i + 1) % pattern != 0] for i in range(num_layers)]


def windows_of(config: HfConfig, kinds: list[str], window: int) -> list[int | None]:
    """Each layer's window; ``window``: the family's default of ``sliding_window``."""
    size = config.integer("sliding_window", window)
    return [size if kind == "sliding_attention" else None for kind in kinds]


def one_window(config: HfConfig) -> list[int | None]:
    """``sliding_window`` in all layers, or none."""
    window = config.integer("sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    if set(layer_types(config) or [kind]) != {kind}:
        raise config.error("layer_types", config.get("layer_types"), f"{kind} in every layer, as sliding_window says")
    return [window] * config.integer("num_hidden_layers")


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


def router_sizes(config: HfConfig, field: str) -> dict[str, Any]:
    """``experts`` and ``top_k`` of a MoeSpec; ``field``: the config's name for the number of experts."""
    experts, top_k = config.integer(field), config.integer("num_experts_per_tok")
    if top_k > experts:
        raise config.error("num_experts_per_tok", top_k, f"at most {field} ({experts})")
    return {"experts": experts, "top_k": top_k}
