"""config.json -> spec of the families that are not as Llama: parameter counts of real configs, and refusals."""

import pytest

from lmjax.models.names import by_tensor, gguf_names, harmless, hf_names, num_values, with_prefix
from lmjax.models.registry import spec_from_hf
from scripts import models_table
from tests import tiny

# the parameter counts are those on the models' pages
REAL = {
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "max_position_embeddings": 8192,
            "vocab_size": 256000,
            "head_dim": 256,
        },
        2_506_172_416,
    ),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "vocab_size": 256000,
            "head_dim": 256,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
        999_885_952,
    ),
    "phi-3-mini": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
        },
        3_821_079_552,
    ),
    "phi-4": (
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "max_position_embeddings": 16384,
        },
        14_659_507_200,
    ),
    "phi-4-mini": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 200064,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        3_836_021_760,
    ),
    "olmo-2-1b": (
        {
            "model_type": "olmo2",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
        },
        1_484_916_736,
    ),
    "olmo-2-7b": (
        {
            "model_type": "olmo2",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
        },
        7_298_617_344,
    ),
    "smollm3": (
        {
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "max_position_embeddings": 65536,
        },
        3_075_098_624,
    ),
    "granite-3.0-2b": (
        {
            "model_type": "granite",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49155,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
        2_533_531_648,
    ),
    "stablelm-2-1.6b": (
        {
            "model_type": "stablelm",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "use_qkv_bias": True,
        },
        1_644_515_328,
    ),
    "starcoder2-3b": (
        {
            "model_type": "starcoder2",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "vocab_size": 49152,
            "max_position_embeddings": 16384,
        },
        3_030_371_328,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "pythia-160m": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
        },
        162_322_944,
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "vocab_size": 65024,
        },
        6_921_720_704,
    ),
    "falcon-40b": (
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
        41_303_293_952,
    ),
    "falcon-rw-1b": (
        {
            "model_type": "falcon",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
            "vocab_size": 50304,
        },
        1_311_625_216,
    ),
    "command-r": (
        {
            "model_type": "cohere",
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        34_980_831_232,
    ),
    "command-r7b": (
        {
            "model_type": "cohere2",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        8_028_033_024,
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "vocab_size": 50400},
        6_050_882_784,
    ),
    "bloom-560m": (
        {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        559_214_592,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 2048, "vocab_size": 50432},
        6_649_286_656,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        20_914_757_184,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_real_configs(name):
    values, parameters = REAL[name]
    spec = spec_from_hf(values, None)
    assert num_values(hf_names(spec)) == parameters
    assert hash(spec) == hash(spec_from_hf(values, None))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
        ("gemma", {"is_causal": False}, "is_causal: got False, must be absent or true"),
        ("gemma2", {"hidden_activation": "mish"}, "hidden_activation: got 'mish', must be one of silu, "),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50.0, must be None: nothing else"),
        ("gemma3", {"rope_parameters": {"global": {}}}, "rope_parameters: .* full_attention and sliding_attention"),
        (
            "phi3",
            {"partial_rotary_factor": 0.3},
            "partial_rotary_factor: got 0.3, must be such that an even number of 12",
        ),
        ("phi3_longrope", {"partial_rotary_factor": 1.0}, "short_factor: got '4 numbers', must be 6 numbers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers: .*a list of 4 zeros and ones"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: got 0.0, must be above 0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: got True, must be False"),
        ("gpt2", {"n_embd": "48"}, "n_embd: got '48', must be an integer"),
        ("gpt2", {"n_head": 5}, "n_embd: got 48, must be a multiple of num_attention_heads .5."),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn: got 2, must be 1, or 2 with new_decoder"),
        ("gptj", {"rotary_dim": 16}, "rotary_dim: got 16, must be even, and at most the features of a head .12."),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm: got"),
        ("mpt", {"no_bias": False}, "no_bias: got False, must be True"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi: got False, must be True"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha: got 1.0, must be 1.702"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: got True, must be False: nothing else is supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: got 'noaux_tc', must be one of greedy, group_lim"),
        ("deepseek_v2", {"n_group": 3}, "n_group: got 3, must be a divisor of n_routed_experts .8., 1 or more in a gr"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads: got 2, must be 4, as num_attention_heads"),
        ("deepseek_v3", {"n_group": 8}, "n_group: got 8, must be a divisor of n_routed_experts .8., 2 or more in a gr"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group: got 5, must be at most n_group .4."),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok: got 3, must be at most the experts of topk_group"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: got 'softmax', must be 'sigmoid': nothing else"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts: got -1, must be an integer of at least 0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: got .*not supported"),
    ],
)
def test_refusals(case, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        spec_from_hf(tiny.CASES[case].config | changes, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("case", "longest"), [("gpt2", 64), ("bloom", 2048), ("mpt", 64), ("gptj", 64)])
def test_no_longer_than_trained(case, longest):
    assert spec_from_hf(tiny.CASES[case].config, longest).max_len == longest
    with pytest.raises(ValueError, match=f"max_model_len: got {longest + 1}, must be at most {longest}"):
        spec_from_hf(tiny.CASES[case].config, longest + 1)


def test_layers():
    """What differs between a model's layers."""

    def kinds(case):
        layers = [layer.attention for layer in spec_from_hf(tiny.CASES[case].config, None).layers]
        return [(a.window, a.rope) for a in layers]

    assert kinds("gemma2") == [(7, 0), (None, 0)] * 2
    assert kinds("gemma3") == [(7, 1), (7, 1), (None, 0), (7, 1)]
    assert kinds("olmo3") == [(7, 1)] * 3 + [(None, 0)]
    assert kinds("smollm3") == [(None, 0), (None, 0), (7, None), (None, 0)]
    assert kinds("cohere2") == [(7, 0), (7, 0), (None, None), (7, 0)]
    assert kinds("gpt_oss") == [(7, 0), (None, 0)]
    assert kinds("bloom") == [(None, None)] * 2


def test_names_without_their_prefix():
    """As the checkpoints of GPT-2 and BLOOM on the hub."""
    for case in ("gpt2", "bloom"):
        spec = spec_from_hf(tiny.CASES[case].config, None)
        names = by_tensor(hf_names(spec))
        short = {name.removeprefix("transformer."): name for name in names}
        assert with_prefix(short, spec) == {name: name for name in names}
        assert list(with_prefix(names, spec)) == list(names)
    assert harmless("h.0.attn.bias", spec_from_hf(tiny.CASES["gpt2"].config, None))
    assert not harmless("transformer.h.0.attn.c_attn.bias", spec_from_hf(tiny.CASES["gpt2"].config, None))


def test_other_spellings_of_the_same():
    mpt, gpt2 = tiny.CASES["mpt"].config, tiny.CASES["gpt2"].config
    assert spec_from_hf(mpt | {"architectures": ["MPTForCausalLM"]}, None) == spec_from_hf(mpt, None)
    assert spec_from_hf(gpt2 | {"activation_function": "gelu_fast"}, None) == spec_from_hf(gpt2, None)
    assert spec_from_hf(gpt2 | {"architectures": ["GPT2Model"]}, None) == spec_from_hf(gpt2, None)


def test_the_length_in_the_rope_scaling_wins():
    """As in transformers 5."""
    config = tiny.CASES["llama_llama3"].config
    assert spec_from_hf(config | {"original_max_position_embeddings": 7}, None) == spec_from_hf(config, None)


def test_gguf_of_other_families_is_refused():
    with pytest.raises(ValueError, match=r"gpt2: GGUF files are read of llama, mistral, .* only"):
        gguf_names(spec_from_hf(tiny.CASES["gpt2"].config, None))


def test_the_documented_tables_are_those_of_the_registry():
    text = models_table.DOCUMENT.read_text(encoding="utf-8")
    assert models_table.written(text) == text, "run: python -m scripts.models_table"
    for line in models_table.families().splitlines()[2:] + models_table.encoders().splitlines()[2:]:
        assert line.split("|")[-2].strip(), f"nothing is compared with transformers: {line}"
    assert text.count(models_table.BEGIN) == 1
