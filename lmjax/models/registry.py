"""From a config.json to a spec. The one place that knows which families exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmjax.models import (
    bloom,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    llama,
    mistral,
    mixtral,
    mpt,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from lmjax.models.hf_config import HfConfig
from lmjax.models.layout import Layout
from lmjax.models.spec import DecoderSpec

LLAMA = Layout()  # the names of most families

FAMILIES = {
    "bloom": bloom,
    "cohere": cohere,
    "cohere2": cohere2,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "falcon": falcon,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "mpt": mpt,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}

# Fields that change what a model computes: refused unless neutral, or named in the family's ``APPLIES``.
REFUSED = (
    "quantization_config",
    "compression_config",
    "dual_chunk_attention_config",
    "use_mrope",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "no_rope_layers",
    "use_bidirectional_attention",
    "text_config",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "is_encoder_decoder",
    "vision_config",
    "audio_config",
)


def family_layout(spec: DecoderSpec) -> Layout:
    """How the family's checkpoints name and lay out their tensors: its ``LAYOUT``, or ``layout(spec)`` where it has
    several."""
    family = FAMILIES[spec.model_type]
    return family.layout(spec) if hasattr(family, "layout") else getattr(family, "LAYOUT", LLAMA)


def spec_from_hf(config: dict[str, Any], max_model_len: int | None) -> DecoderSpec:
    """The decoder that a Hugging Face config.json describes, for sequences of up to ``max_model_len`` tokens
    (None: the model's own length).

    ValueError names the field, its value and what is allowed where the config asks for something that is not built.
    """
    hf = HfConfig(config)
    family = hf.choice("model_type", None, FAMILIES)
    architectures = hf.get("architectures") or [family.ARCHITECTURE]
    if not {family.ARCHITECTURE, *getattr(family, "ALIASES", ())} & {*architectures} and not is_headless(config):
        known = ", ".join(module.ARCHITECTURE for module in FAMILIES.values())
        raise hf.error(
            "architectures", architectures, f"[{family.ARCHITECTURE!r}] for this model_type (known: {known})"
        )
    for name in REFUSED:
        if name not in getattr(family, "APPLIES", ()) and hf.get(name) not in (None, False, 0, "", [], {}):
            raise hf.error(name, config[name], "absent or null: not supported")
    if hf.get("is_causal") is False:
        raise hf.error("is_causal", False, "absent or true: attention in both directions is not supported")
    spec = family.spec_from_hf(hf, max_model_len)
    # without a head nothing reads it, and there is none to load
    return replace(spec, tie_embeddings=True, head_bias=False) if is_headless(config) else spec


def is_headless(config: dict[str, Any]) -> bool:
    """A known decoder saved without its head (``MistralModel``), as embedding models are."""
    family = FAMILIES.get(config.get("model_type", ""))
    bare = family.ARCHITECTURE.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model" if family else None
    return bare in (config.get("architectures") or [])


def dtype_from_hf(config: dict[str, Any]) -> str | None:
    """The type the checkpoint says it is in (``dtype``, formerly ``torch_dtype``), or None."""
    value = config.get("dtype") or config.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None
