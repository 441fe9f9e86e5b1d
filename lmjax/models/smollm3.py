"""SmolLM3: Llama, of which one layer in four has no rotary embedding."""

from __future__ import annotations

from typing import Any

from lmjax.models.common import Ropes, head_sizes, layer_types, uniform_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.rope import rope_from_hf
from lmjax.models.spec import DecoderSpec

ARCHITECTURE = "SmolLM3ForCausalLM"
APPLIES = ("no_rope_layers",)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config = config.with_defaults({"rope_theta": 2e6, "num_key_value_heads": 4})
    rotated = _rotated(config)
    rope, max_len = rope_from_hf(config, head_sizes(config)[3], max_model_len)
    bias = config.boolean("attention_bias", False)
    return uniform_decoder(
        config,
        max_model_len,
        windows=_windows(config, rotated),
        ropes=Ropes((rope,), [0 if turns else None for turns in rotated], max_len),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        tie_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _rotated(config: HfConfig) -> list[bool]:
    """``no_rope_layers`` has 1 for a layer with rotary embedding, 0 for one without."""
    num_layers = config.integer("num_hidden_layers")
    given: Any = config.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or any(turns not in (0, 1) for turns in given):
        raise config.error("no_rope_layers", given, f"a list of {num_layers} zeros and ones")
    return [bool(turns) for turns in given]


def _windows(config: HfConfig, rotated: list[bool]) -> list[int | None]:
    """The layers without rotary embedding slide, where any do."""
    window = config.integer("sliding_window", None) if config.boolean("use_sliding_window", False) else None
    kinds = layer_types(config)
    slides = [not turns for turns in rotated] if kinds is None else [kind == "sliding_attention" for kind in kinds]
    if window is None and kinds is not None and any(slides):
        raise config.error("layer_types", "sliding_attention", "full_attention where use_sliding_window is off")
    return [window if slide else None for slide in slides]
