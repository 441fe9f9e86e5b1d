"""Tiny configs of the families whose tensors are named by ``lmjax.models.names``; see tests/tiny.py.

transformers refuses a checkpoint with a missing, an unknown or a misshapen tensor when the goldens are made, and the
goldens keep a checksum of names and values: so the names are not only tested against themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_LLAMA = _COMMON | {
    "intermediate_size": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}
_GEMMA = _LLAMA | {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1000.0}
_FOUR = {"num_hidden_layers": 4, "sliding_window": 7}
_LONGROPE = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 6.0],
    },
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.7,
}
_TOKENS = {
    k: v
    for k, v in _COMMON.items()
    if k in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")
}
_GPT = _TOKENS | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
_FALCON = _COMMON | {"hidden_size": 64, "tie_word_embeddings": True, "rope_theta": 1000.0}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 16}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
_DEEPSEEK = _LLAMA | {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
_DEEPSEEK_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}


def _olmo3() -> dict[str, Any]:
    ropes = {"sliding_attention": {"rope_type": "default"}, "full_attention": {**_YARN, "truncate": True}}
    values = _LLAMA | _FOUR | {"rope_parameters": {k: v | {"rope_theta": 1000.0} for k, v in ropes.items()}}
    del values["rope_theta"]
    return values


# name -> (model_type, architecture, config, lengths of the prompts)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "gemma": ("gemma", "GemmaForCausalLM", _GEMMA | {"hidden_act": "gelu", "num_key_value_heads": 1}, (37, 5)),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        _GEMMA | _FOUR | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0},
        (41, 5),
    ),
    "gemma3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GEMMA
        | _FOUR
        | {"sliding_window_pattern": 3, "rope_local_base_freq": 100.0, "query_pre_attn_scalar": 20}
        | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        (41, 5),
    ),
    "phi3": ("phi3", "Phi3ForCausalLM", _LLAMA | {"sliding_window": 9}, (41,)),
    "phi3_longrope": ("phi3", "Phi3ForCausalLM", _LLAMA | _LONGROPE, (60,)),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", _LLAMA, (37, 5)),
    "olmo3": ("olmo3", "Olmo3ForCausalLM", _olmo3(), (61,)),
    "smollm3": (
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA | _FOUR | {"no_rope_layer_interval": 3, "use_sliding_window": True},
        (37,),
    ),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        _LLAMA
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.4}
        | {"logits_scaling": 2.5, "attention_bias": True},
        (37, 5),
    ),
    "stablelm": ("stablelm", "StableLmForCausalLM", _LLAMA | {"use_qkv_bias": True, "hidden_size": 64}, (37, 5)),
    "stablelm_parallel": (
        "stablelm",
        "StableLmForCausalLM",
        _LLAMA | {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5, "hidden_size": 64},
        (37,),
    ),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", _LLAMA | {"sliding_window": 9, "norm_epsilon": 1e-4}, (41,)),
    "gpt2": ("gpt2", "GPT2LMHeadModel", _GPT, (37, 5)),
    "gpt_neox": (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": None,
            "hidden_size": 64,
            "rotary_pct": 0.5,
            "rotary_emb_base": 1000,
            "rope_theta": None,
        },
        (37, 5),
    ),
    "gpt_neox_sequential": (
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _LLAMA
        | {
            "num_key_value_heads": None,
            "hidden_size": 64,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_theta": None,
        },
        (37,),
    ),
    "falcon": ("falcon", "FalconForCausalLM", _FALCON | {"multi_query": True}, (37, 5)),
    "falcon_new": (
        "falcon",
        "FalconForCausalLM",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 40},
        (37,),
    ),
    "falcon_one_norm": (
        "falcon",
        "FalconForCausalLM",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        (37,),
    ),
    "falcon_alibi": (
        "falcon",
        "FalconForCausalLM",
        _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        (37,),
    ),
    "cohere": ("cohere", "CohereForCausalLM", _LLAMA | {"use_qk_norm": True, "tie_word_embeddings": True}, (37, 5)),
    "cohere2": (
        "cohere2",
        "Cohere2ForCausalLM",
        _LLAMA | _FOUR | {"sliding_window_pattern": 3, "tie_word_embeddings": True, "logit_scale": 0.3},
        (41,),
    ),
    "gptj": ("gptj", "GPTJForCausalLM", _GPT | {"rotary_dim": 8, "tie_word_embeddings": False}, (37, 5)),
    "bloom": ("bloom", "BloomForCausalLM", _COMMON | {"num_attention_heads": 6}, (37, 5)),
    "mpt": (
        "mpt",
        "MptForCausalLM",
        _TOKENS
        | {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}
        | {"attn_config": {"clip_qkv": 1.2, "alibi": True}},
        (37,),
    ),
    "gpt_oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        _LLAMA | _MOE | {"sliding_window": 7, "swiglu_limit": 1.5, "rope_scaling": _YARN},
        (41, 5),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _DEEPSEEK
        | {"topk_method": "group_limited_greedy", "attention_bias": True}
        | {"rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.8, "mscale_all_dim": 0.6}},
        (41, 5),
    ),
    "deepseek_v2_lite": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None},
        (37,),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK
        | {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        (41, 5),
    ),
    "deepseek_v3_halves": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _DEEPSEEK
        | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 1}
        | {"first_k_dense_replace": 0},
        (37,),
    ),
}

# those whose greedy tokens are in the goldens
GREEDY = ("gemma3", "gpt2", "falcon_new", "bloom", "gpt_oss", "deepseek_v2", "deepseek_v3")


def config(name: str) -> dict[str, Any]:
    model_type, architecture, values, _ = FAMILIES[name]
    own = {key: value for key, value in values.items() if value is not None or key == "q_lora_rank"}  # null is a choice
    return own | {"architectures": [architecture], "model_type": model_type}


def tensors(values: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, float32. Scales are such that attention, MLP and logits all vary."""
    from lmjax.models.names import by_tensor, hf_names
    from lmjax.models.params import named_leaves, param_specs
    from lmjax.models.registry import spec_from_hf

    spec = spec_from_hf(values, None)
    params, out = named_leaves(param_specs(spec)), {}
    for name, (parameter, (part, *_)) in sorted(by_tensor(hf_names(spec)).items()):
        param = params[parameter]
        draws = rng.standard_normal(part.shape)
        if param.init == "ones":
            draws = 1.0 + 0.2 * draws
        elif param.init == "zeros":  # biases, and weights w of norms with 1 + w
            draws = 0.3 * draws
        elif parameter not in ("embed", "positions") and not parameter.endswith("sinks"):
            draws = draws * (2.0 if parameter in ("head", "layers.0.mlp.router") else 1.5) / param.fan_in**0.5
        out[name] = draws.astype(np.float32)
    return out
