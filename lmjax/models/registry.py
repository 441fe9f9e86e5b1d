"""From a config.json to a spec. The one place that knows which families exist."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmjax.models import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from lmjax.models.hf_config import HfConfig
from lmjax.models.spec import DecoderSpec

FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
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
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "is_encoder_decoder",
    "vision_config",
    "audio_config",
)


def spec_from_hf(config: dict[str, Any], max_model_len: int | None) -> DecoderSpec:
    """The decoder that a Hugging Face config.json describes, for sequences of up to ``max_model_len`` tokens
    (None: the model's own length).

    ValueError names the field, its value and what is allowed where the config asks for something that is not built.
    """
    hf = HfConfig(config)
    family = hf.choice("model_type", None, FAMILIES)
    architectures = hf.get("architectures") or [family.ARCHITECTURE]
    if family.ARCHITECTURE not in architectures and not is_headless(config):
        known = ", ".join(module.ARCHITECTURE for module in FAMILIES.values())
        raise hf.error(
            "architectures", architectures, f"[{family.ARCHITECTURE!r}] for this model_type (known: {known})"
        )
    for name in REFUSED:
        if name not in getattr(family, "APPLIES", ()) and hf.get(name) not in (None, False, 0, "", [], {}):
            raise hf.error(name, config[name], "absent or null: not supported")
    spec = family.spec_from_hf(hf, max_model_len)
    # without a head nothing reads it, and there is none to load
    return replace(spec, tie_embeddings=True) if is_headless(config) else spec


def is_headless(config: dict[str, Any]) -> bool:
    """A known decoder saved without its head (``MistralModel``), as embedding models are."""
    family = FAMILIES.get(config.get("model_type", ""))
    bare = family.ARCHITECTURE.removesuffix("ForCausalLM") + "Model" if family else None
    return bare in (config.get("architectures") or [])


def dtype_from_hf(config: dict[str, Any]) -> str | None:
    """The type the checkpoint says it is in (``dtype``, formerly ``torch_dtype``), or None."""
    value = config.get("dtype") or config.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None
