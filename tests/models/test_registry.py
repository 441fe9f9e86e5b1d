"""config.json -> spec: real configs by their known parameter counts, both spellings, and refusals by name."""

import re

import pytest

from lmjax.models.names import hf_names, num_values
from lmjax.models.registry import FAMILIES, dtype_from_hf, spec_from_hf
from lmjax.models.spec import MoeSpec
from tests import tiny

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN_OFF = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}


def config(model_type, hidden, ffn, layers, heads, kv_heads, vocab, length, **more):
    return {
        "model_type": model_type,
        "architectures": [tiny.ARCHITECTURES[model_type]],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "use_cache": True,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
    } | more


# the parameter counts are those on the models' pages
REAL = {
    "SmolLM2-135M": (config("llama", 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True), 134_515_008),
    "Llama-3.1-8B": (
        config("llama", 4096, 14336, 32, 32, 8, 128256, 131072, rope_theta=5e5, rope_scaling=LLAMA3_ROPE),
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (config("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096), 7_241_732_096),
    "Qwen2.5-7B": (config("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072, **QWEN_OFF), 7_615_616_512),
    "Qwen3-0.6B": (
        config("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, head_dim=128, tie_word_embeddings=True, **QWEN_OFF),
        596_049_920,
    ),
    "Qwen3-8B": (config("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128), 8_190_735_360),
    "Mixtral-8x7B": (
        config("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        config(
            "qwen2_moe",
            2048,
            5632,
            24,
            16,
            16,
            151936,
            8192,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        config(
            "qwen3_moe",
            2048,
            6144,
            48,
            32,
            4,
            151936,
            40960,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs(name):
    values, parameters = REAL[name]
    spec = spec_from_hf(values, None)
    assert num_values(hf_names(spec)) == parameters
    assert spec.max_len == values["max_position_embeddings"]
    window = values.get("sliding_window") if name.startswith("Mistral") else None
    assert {layer.attention.window for layer in spec.layers} == {window}
    assert hash(spec) == hash(spec_from_hf(values, None))


@pytest.mark.parametrize("name", ["llama_linear", "llama_yarn", "llama_llama3", "llama_longrope_above", "qwen2_window"])
def test_both_spellings(name):
    case = tiny.CASES[name]
    new = tiny._new_style(case.config)
    assert "rope_theta" not in new and "torch_dtype" not in new
    assert spec_from_hf(new, case.max_model_len) == spec_from_hf(case.config, case.max_model_len)
    assert dtype_from_hf(new) == dtype_from_hf(case.config) == "float32"


def test_su_is_longrope_and_a_top_level_original_length_wins():
    values = dict(tiny.CASES["llama_longrope_above"].config)
    scaling = dict(values["rope_scaling"])
    expected = spec_from_hf(values, 128)
    del scaling["rope_type"], scaling["original_max_position_embeddings"]
    values |= {"rope_scaling": scaling | {"type": "su"}, "original_max_position_embeddings": 32}
    assert spec_from_hf(values, 128) == expected


def test_factor_rule():
    """dynamic and longrope switch at the original length, by max_model_len alone."""
    dynamic, longrope = (tiny.CASES[f"llama_{kind}_above"].config for kind in ("dynamic", "longrope"))
    assert spec_from_hf(dynamic, 20).rope == spec_from_hf(dynamic, None).rope
    assert [spec_from_hf(dynamic, n).rope.seq_len for n in (31, 32, 33, 96)] == [32, 32, 33, 96]
    short, long = longrope["rope_scaling"]["short_factor"], longrope["rope_scaling"]["long_factor"]
    assert [spec_from_hf(longrope, n).rope.factors for n in (32, 33)] == [tuple(short), tuple(long)]
    assert spec_from_hf(longrope, None).rope.factors == tuple(long)


def test_qwen_windows():
    base = tiny.CASES["qwen2_window"].config

    def windows(**changes):
        return [layer.attention.window for layer in spec_from_hf(base | changes, None).layers]

    assert windows() == [None, 9, 9]
    assert windows(use_sliding_window=False) == [None, None, None]
    assert windows(max_window_layers=3) == [None, None, None]
    assert windows(sliding_window=None) == [None, None, None]
    assert windows(layer_types=["full_attention", "sliding_attention", "full_attention"]) == [None, 9, None]


def test_mistral_window_absent_is_transformers_default():
    values = dict(tiny.CASES["mistral_window"].config)
    del values["sliding_window"]
    assert spec_from_hf(values, None).layers[0].attention.window == 4096


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama_linear", {"model_type": "t5"}, "model_type: got 't5', must be one of bloom, cohere, .* starcoder2$"),
        ("llama_linear", {"model_type": None}, "model_type: got None"),
        ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "architectures: got .*LlamaForCausalLM, "),
        ("llama_linear", {"hidden_act": "tanh"}, "hidden_act: got 'tanh', must be one of silu, "),
        ("llama_linear", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: got .*not supported"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 4}}, "dual_chunk_attention_config"),
        ("llama_linear", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, must be 1.0"),
        ("llama_linear", {"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type: got 'mrope', .*longrope"),
        ("llama_linear", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ("llama_linear", {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor: got '2'"),
        ("llama_linear", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor: got 0.5, must be at least 1"),
        ("llama_linear", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast: unknown"),
        ("llama_linear", {"rope_scaling": "linear"}, "rope_scaling: got 'linear', must be a JSON object"),
        ("llama_longrope_above", {"head_dim": 12}, "short_factor: got '8 numbers', must be 6 numbers"),
        ("llama_linear", {"head_dim": 15}, "head_dim: got 15, must be even"),
        ("llama_linear", {"hidden_size": 47}, "hidden_size: got 47, must be a multiple of num_attention_heads"),
        ("llama_linear", {"num_key_value_heads": 2}, "num_key_value_heads: got 2, must be a divisor"),
        ("llama_linear", {"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, must be at most 10000"),
        ("deepseek_v3", {"n_routed_experts": 10**9}, "n_routed_experts: got 1000000000, must be at most 10000"),
        ("llama_linear", {"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, must be a finite number"),
        ("llama_linear", {"rope_theta": 10**400}, "rope_theta: got 10+, must be a finite number"),
        ("llama_linear", {"num_hidden_layers": 0}, "num_hidden_layers: got 0, must be an integer of at least 1"),
        ("llama_linear", {"vocab_size": True}, "vocab_size: got True"),
        ("llama_linear", {"vocab_size": None}, "vocab_size: missing"),
        ("llama_linear", {"attention_bias": "no"}, "attention_bias: got 'no', must be true or false"),
        ("llama_linear", {"layer_types": ["sliding_attention"] * 2}, "layer_types: got 'sliding_attention'"),
        ("mistral_window", {"layer_types": ["full_attention"] * 2}, "layer_types: .*sliding_attention in every layer"),
        ("qwen2_window", {"layer_types": ["chunked_attention"] * 3}, "layer_types: .*full_attention or sliding"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "layer_types: got '1 entries', must be 3 entries"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types: .*use_sliding_window is off"),
        ("llama_linear", {"num_local_experts": 4}, "num_local_experts: got 4, must be absent or null"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok: got 5, must be at most num_local_experts .4."),
        ("mixtral", {"num_local_experts": None}, "num_local_experts: missing"),
        ("qwen2_moe", {"mlp_only_layers": "2"}, "mlp_only_layers: got '2', must be a list of layer indices"),
        ("qwen2_moe", {"n_routed_experts": 4}, "n_routed_experts: got 4"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: got 0"),
        ("qwen3_moe", {"num_local_experts": 9}, "num_local_experts: got 9, must be num_experts .8."),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0, must be an integer of at least 1"),
    ],
)
def test_refusals(case, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        spec_from_hf(tiny.CASES[case].config | changes, None)
    assert "\n" not in str(caught.value)


def test_layers_with_experts():
    def sparse(name, **changes):
        spec = spec_from_hf(tiny.CASES[name].config | changes, None)
        return [isinstance(layer.mlp, MoeSpec) for layer in spec.layers]

    assert sparse("mixtral") == [True, True]
    assert sparse("qwen2_moe") == [True, True, False, True]
    assert sparse("qwen2_moe_step") == [False, True, False, True]
    assert sparse("qwen3_moe", mlp_only_layers=[0, 1]) == [False, False]


def test_qwen3_moe_as_transformers_5_saves_it():
    values = dict(tiny.CASES["qwen3_moe"].config)
    expected = spec_from_hf(values, None)
    values["num_local_experts"] = values.pop("num_experts")
    assert spec_from_hf(values, None) == expected


def test_mixtral_theta_absent_is_transformers_default():
    values = {k: v for k, v in tiny.CASES["mixtral"].config.items() if k != "rope_theta"}
    assert spec_from_hf(values, None).rope.theta == 1e6


@pytest.mark.parametrize(
    ("case", "longest"), [("qwen3", 128), ("llama_linear", 320), ("llama_dynamic_above", 96), ("llama_yarn", 128)]
)
def test_max_model_len(case, longest):
    values = tiny.CASES[case].config
    assert spec_from_hf(values, longest).max_len == longest
    with pytest.raises(ValueError, match=re.escape(f"max_model_len: got {longest + 1}, must be at most {longest}")):
        spec_from_hf(values, longest + 1)


def test_families_are_data():
    """The decoder names no family: only the registry and the family's own file know it."""
    import lmjax.models.decoder as decoder
    import lmjax.models.layer as layer
    import lmjax.models.params as params

    for module in (decoder, layer, params):
        with open(module.__file__, encoding="utf-8") as file:
            text = file.read()
        assert not [name for name in FAMILIES if re.search(rf"\b{name}\b", text.lower())]
