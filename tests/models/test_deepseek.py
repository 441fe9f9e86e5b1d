"""What DeepSeek's models have and no other: latent KV, routers over groups, FP8 weights in blocks, an extra layer."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lmjax.config import ConfigError, EngineConfig
from lmjax.models import decoder
from lmjax.models.names import harmless, hf_names, num_values
from lmjax.models.params import named_leaves
from lmjax.models.registry import spec_from_hf
from lmjax.models.spec import MoeSpec, Routing
from lmjax.nn.routing import pick
from lmjax.parallel.split import Degree, SplitError, share, spread
from lmjax.runtime.memory import pool_bytes
from lmjax.runtime.plan_costs import kv_bytes_read, weights_of
from lmjax.runtime.resolve import resolve
from lmjax.weights.packing import packings
from lmjax.weights.source import resolve_model
from tests import tiny
from tests.models.driver import Driver
from tests.weights.test_quantised_families import loaded

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
V2 = LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
}
V3 = V2 | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "vocab_size": 129280,
    "rope_scaling": YARN,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize(
    ("values", "parameters"),
    [(LITE, 15_706_484_224), (V2, 235_741_434_880), (V3, 671_026_404_352 + 58 * 256)],
    ids=["lite", "v2", "v3"],
)
def test_parameters_are_those_of_transformers_models(values, parameters):
    """And V3's biases of the choice, which are no parameters there."""
    spec = spec_from_hf(values, None)
    assert num_values(hf_names(spec)) == parameters == weights_of(spec, "bfloat16", Degree()).total


def test_layers_with_experts():
    def sparse(**changes):
        return [isinstance(x.mlp, MoeSpec) for x in spec_from_hf(V3 | {"num_hidden_layers": 8} | changes, None).layers]

    assert sparse() == [False] * 3 + [True] * 5
    assert sparse(moe_layer_freq=2) == [False] * 4 + [True, False, True, False]
    assert sparse(first_k_dense_replace=0) == [True] * 8


def test_scale_of_the_softmax_and_of_rope():
    """As the models' own code has them: mscale_all_dim scales queries and keys, its share in mscale cos and sin."""
    spec = spec_from_hf(V3, None)
    assert spec.layers[0].attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (spec.rope.dim, spec.rope.attention_factor, spec.max_len) == (64, 1.0, 163840)
    assert spec_from_hf(LITE, None).layers[0].attention.scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(("values", "layers"), [(LITE, 27), (V3, 61)], ids=["lite", "v3"])
@pytest.mark.parametrize("tp", [1, 8])
def test_one_vector_a_token_and_layer_on_each_device(values, layers, tp):
    """Of 512 numbers and 64 rotary ones, whatever the number of heads and of devices."""
    spec = share(spread(spec_from_hf(values, None), Degree(tp)), Degree(tp))
    [kv] = decoder.kv_specs(spec, "bfloat16")
    assert spec.layers[0].attention.heads == values["num_attention_heads"] // tp
    assert decoder.pool_shape(kv, 1000, 16) == (layers, 1, 1000, 1, 16, 576)
    assert kv.bytes_per_token() == layers * 576 * 2 == kv_bytes_read((kv,), 1)
    assert pool_bytes((kv,), (1000,), 16) == 1000 * 16 * layers * 576 * 2
    int8 = replace(kv, dtype="int8")
    pool = decoder.abstract_pool(int8, 10, 16)
    assert int8.bytes_per_token() * 10 * 16 == math.prod(pool.values.shape) + 4 * math.prod(pool.scales.shape)


def test_stages_of_different_layers_are_refused():
    with pytest.raises(SplitError, match="got 2, but layer 31 is of another kind than layer 0"):
        spread(spec_from_hf(V3, None), Degree(1, 2))
    with pytest.raises(SplitError, match=r"got 3, but the model has 16 query heads; degrees .*: 1, 2, 4, 8, 16$"):
        spread(spec_from_hf(LITE, None), Degree(3))


def test_adapters_are_refused(tmp_path):
    source = resolve_model(str(tiny.write("deepseek_v3", tmp_path)))
    with pytest.raises(ConfigError, match="--enable-lora: not built for latent attention, which a deepseek_v3"):
        resolve(EngineConfig(model=str(tmp_path), enable_lora=True), source, "cpu")


def test_deterministic_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LITE))
    source = resolve_model(str(tmp_path / "config.json"), config_only=True)
    config = EngineConfig(model=str(tmp_path), deterministic=True, max_model_len=64)
    with pytest.raises(ConfigError, match="--deterministic: a deepseek_v2 model's bits depend on the step: not supp"):
        resolve(config, source, "cpu")


def test_the_layer_behind_the_last_is_left_out():
    spec = spec_from_hf(tiny.CASES["deepseek_v3"].config, None)
    assert harmless("model.layers.2.eh_proj.weight", spec) and harmless("model.layers.2.mlp.gate.weight", spec)
    assert not harmless("model.layers.3.mlp.gate.weight", spec) and not harmless("model.layers.20.norm.weight", spec)
    assert not harmless("model.layers.2.mlp.gate.weight", spec_from_hf(tiny.CASES["deepseek_v2"].config, None))


def by_hand(logits, bias, rule, top_k, normalise):
    """Of one token, in plain Python: ({expert: weight})."""
    exp = np.exp(logits - logits.max())
    scores = exp / exp.sum() if rule.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    choice, size = scores + bias, len(logits) // rule.groups
    groups = [choice[i : i + size] for i in range(0, len(choice), size)]
    best = [sum(sorted(group)[-1 if rule.group_score == "best" else -2 :]) for group in groups]
    taken = sorted(range(rule.groups), key=lambda g: -best[g])[: rule.top_groups]
    known = [e for e in range(len(logits)) if e // size in taken]
    picked = sorted(known, key=lambda e: -choice[e])[:top_k]
    total = sum(scores[e] for e in picked) if normalise else 1.0
    return {e: scores[e] / total * rule.factor for e in picked}


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        Routing(groups=4, top_groups=2, factor=1.7),
        Routing(scoring="sigmoid", groups=4, top_groups=2, group_score="best_two", choice_bias=True, factor=2.5),
        Routing(scoring="sigmoid", choice_bias=True),
    ],
    ids=["v2", "v3", "one group"],
)
def test_routing_by_hand(rule, normalise):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(50, 16)), rng.normal(size=16) * 0.3 * rule.choice_bias
    given = jnp.asarray(bias, jnp.float32) if rule.choice_bias else None
    weights, experts = pick(jnp.asarray(logits, jnp.float32), given, rule, 5, normalise)
    plain = 0
    for i in range(50):
        want = by_hand(logits[i], bias, rule, 5, normalise)
        assert sorted(experts[i].tolist()) == sorted(want)
        np.testing.assert_allclose(weights[i], [want[e] for e in experts[i].tolist()], rtol=1e-5)
        plain += sorted(want) == sorted(np.argsort(-logits[i])[:5].tolist())
    assert plain < 40, "groups and bias decide nothing"


def in_blocks(x, block=128):
    """(float8 [out, in], scales [out / block, in / block], what they stand for), as DeepSeek-V3 is published."""
    rows, columns = (-(-n // block) for n in x.shape)
    scales = np.zeros((rows, columns), np.float32)
    values, floats = np.zeros(x.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(x)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = np.abs(x[at]).max() / 448
            values[at] = (x[at] / scales[i, j]).astype(values.dtype)
            floats[at] = values[at].astype(np.float32) * scales[i, j]
    return values, scales, floats


def test_fp8_in_blocks(tmp_path):
    """All matrices of the layers but the router's; what is kept packed gives what floats give."""
    config = tiny.CASES["deepseek_v3"].config | {"hidden_size": 256, "q_lora_rank": 128, "intermediate_size": 128}
    config |= {"moe_intermediate_size": 64, "kv_lora_rank": 136}
    plain, stored = {}, {}
    for name, x in tiny.tensors("deepseek_v3", config).items():
        plain[name] = stored[name] = x
        if "proj" in name and name.endswith(".weight"):
            stored[name], scales, plain[name] = in_blocks(x)
            stored[name.removesuffix(".weight") + ".weight_scale_inv"] = scales
    stored["model.layers.2.eh_proj.weight"] = np.zeros((4, 8), np.float32)
    fp8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    for kind, tensors, own in (("plain", plain, {}), ("fp8", stored, fp8)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config | own))
        save_file(tensors, tmp_path / kind / "model.safetensors")
    want, spec = loaded(tmp_path / "plain")
    got, _ = loaded(tmp_path / "fp8")
    for name, x in named_leaves(want).items():
        np.testing.assert_array_equal(named_leaves(got)[name], x, err_msg=name)
    packed, kept = loaded(tmp_path / "fp8", quantized_weights="packed")
    assert {name.split(".", 2)[2] for name in packings(kept)} == {
        *("attn.q_down.weight", "attn.q_up.weight", "attn.kv_down.weight"),
        *("mlp.gate_up.weight", "mlp.down.weight", "mlp.shared.gate_up.weight", "mlp.shared.down.weight"),
        "mlp.experts.gate_up.weight",  # the down ones are narrower than a block
    }
    prompt = tiny.prompts("deepseek_v3")[0][:20]
    floats, small = (Driver(p, s).step({"a": prompt})["a"] for p, s in ((want, spec), (packed, kept)))
    assert np.abs(small - floats).max() <= 1e-4 * np.abs(floats).max()
