"""GPT-J: attention and MLP in parallel after one LayerNorm, a part of each head rotates in neighbouring pairs."""

from __future__ import annotations

from lmjax.models.common import Ropes, head_sizes, layer_norm, no_ropes, plain_mlp, uniform_decoder
from lmjax.models.gpt2 import NAMES
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, RopeSpec

ARCHITECTURE = "GPTJForCausalLM"
_LAYER = "transformer.h.{i}."
LAYOUT = Layout(
    {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "attn.norm": _LAYER + "ln_1",
        "q": _LAYER + "attn.q_proj",
        "k": _LAYER + "attn.k_proj",
        "v": _LAYER + "attn.v_proj",
        "o": _LAYER + "attn.out_proj",
        "up": _LAYER + "mlp.fc_in",
        "down": _LAYER + "mlp.fc_out",
    },
    interleaved=True,
    unused=(".attn.bias", ".attn.masked_bias"),
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    config = config.with_defaults(aliases=NAMES)
    none, head_dim = no_ropes(config, max_model_len, "max_position_embeddings"), head_sizes(config)[3]
    dim = config.integer("rotary_dim", 64)
    if dim > head_dim or dim % 2:
        raise config.error("rotary_dim", dim, f"even, and at most the features of a head ({head_dim})")
    tied = config.boolean("tie_word_embeddings", False)
    return uniform_decoder(
        config,
        max_model_len,
        norm=layer_norm(config, "layer_norm_epsilon"),
        mlp=plain_mlp(config, "n_inner", "gelu_new", True, "activation_function"),
        ropes=Ropes((RopeSpec(theta=10000.0, dim=dim),), [0] * len(none.of_layers), none.max_len),
        layer={"parallel": True, "shared_norm": True},
        tie_embeddings=tied,
        head_bias=True,
    )
