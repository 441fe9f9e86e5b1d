"""Gemma 2: four norms a layer, every other layer slides, soft caps of the attention's and of the head's logits."""

from __future__ import annotations

from lmjax.models.common import ACTIVATIONS, alternating_types, windows_of
from lmjax.models.gemma import gemma_decoder
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec, MlpSpec

ARCHITECTURE = "Gemma2ForCausalLM"
APPLIES = ("attn_logit_softcapping", "final_logit_softcapping")
_LAYER = "model.layers.{i}."
LAYOUT = Layout(
    {
        "attn.post_norm": _LAYER + "post_attention_layernorm",
        "mlp.norm": _LAYER + "pre_feedforward_layernorm",
        "mlp.post_norm": _LAYER + "post_feedforward_layernorm",
    }
)


def spec_from_hf(config: HfConfig, max_model_len: int | None) -> DecoderSpec:
    windows = windows_of(config, alternating_types(config, 2), 4096)
    return four_norms(config, max_model_len, (50.0, 30.0), windows=windows)


def four_norms(
    config: HfConfig, max_model_len: int | None, caps: tuple[float | None, float | None], **fields: object
) -> DecoderSpec:
    """Gemma 2 and 3. caps: defaults of the attention's and the head's."""
    activation = config.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    return gemma_decoder(
        config,
        max_model_len,
        MlpSpec(ffn=config.integer("intermediate_size"), activation=activation),
        layer={"post_norm": True},
        attention={
            "softmax_scale": config.number("query_pre_attn_scalar", 256.0, low=1e-6) ** -0.5,
            "soft_cap": config.optional("attn_logit_softcapping", caps[0], low=1e-6),
        },
        logit_cap=config.optional("final_logit_softcapping", caps[1], low=1e-6),
        **fields,
    )
