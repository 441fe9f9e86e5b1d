"""Parameters from a checkpoint's tensors and back: the file loader is the oracle, and hand-made layouts of meshes."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from lmjax.models.params import layer_of, named_leaves, param_specs, with_layer
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.weights.errors import WeightError
from lmjax.weights.loader import load_params
from lmjax.weights.pytree import from_hf, layout_of, to_hf
from lmjax.weights.source import resolve_model
from tests import tiny
from tests.models.driver import params_from
from tests.parallel import sharded_forward
from tests.weights.test_shards import spread_by_hand

FAMILIES = (
    *("llama_tied_gqa3", "llama_mha_bias", "llama_gqa4_dim20", "mistral_window", "qwen2", "qwen3"),
    *("mixtral", "qwen2_moe", "qwen3_moe"),
)


def equal(got, want):
    got, want = named_leaves(got), named_leaves(want)
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(got[name], value, err_msg=name)


# tensors that hold several parts, in another order or transposed, and parameters that Llama has not
OTHER_LAYOUTS = (
    *("phi3", "gpt2", "falcon_new", "gptj", "cohere", "stablelm_parallel", "bloom", "gpt_oss", "gemma3"),
    "deepseek_v2",
)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHER_LAYOUTS])
def test_the_tensors_of_every_family(name, tmp_path):
    tensors, spec = tiny.tensors(name), spec_from_hf(tiny.CASES[name].config, None)
    loaded = load_params(resolve_model(str(tiny.write(name, tmp_path))), spec, "float32")
    params = from_hf(tensors, spec)
    equal(params, loaded)
    equal(params_from(tensors, spec), loaded)
    equal(jax.jit(lambda t: from_hf(t, spec))(tensors), loaded)
    for back in (to_hf(params, spec), jax.jit(lambda p: to_hf(p, spec))(params), to_hf(jax.device_get(params), spec)):
        equal(dict(sorted(back.items())), dict(sorted(tensors.items())))


@pytest.mark.parametrize("name", ["llama_mha_bias", "qwen2_moe"])
def test_gradients_pass(name):
    """Every number is moved, none changed: the gradient of <w, from_hf(t)> is w's own tensors."""
    tensors, spec = tiny.tensors(name), spec_from_hf(tiny.CASES[name].config, None)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), param_specs(spec))

    def dot(t):
        return sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), weights, from_hf(t, spec))))

    equal(jax.grad(dot)(tensors), {k: to_hf(weights, spec)[k] for k in sorted(tensors)})


SPREAD = [
    ("llama", split.Degree(2)),
    ("llama", split.Degree(8)),  # 2 KV heads: each on 4 devices
    ("llama", split.Degree(4, 2)),
    ("smol", split.Degree(3, 2)),
    ("mixtral", split.Degree(2, 2, expert_parallel=True)),
    ("qwen2_moe", split.Degree(4)),
]


@pytest.mark.parametrize(("model", "degree"), SPREAD)
def test_the_layout_of_a_mesh(model, degree):
    """Odd layers and an odd vocabulary; stages beyond the layers and rows beyond the vocabulary are zeros."""
    changes = {"vocab_size": 301, "num_hidden_layers": 3, "mlp_only_layers": []}
    spec = spec_from_hf({**sharded_forward.COMMON, **sharded_forward.MODELS[model], **changes}, None)
    wide = split.spread(spec, degree)
    rng = np.random.default_rng(0)
    plain = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), param_specs(spec))
    tensors, have = to_hf(plain, spec), named_leaves(plain)
    params = jax.jit(lambda t: from_hf(t, spec, wide))(tensors)
    assert layout_of(params, spec) == wide
    one = replace(wide, stages=1)
    for name, got in named_leaves(params).items():
        layer = layer_of(name)
        if layer is None or wide.stages == 1:
            np.testing.assert_array_equal(got, spread_by_hand(name, have[name], spec, one), err_msg=name)
            continue
        for stage in range(wide.stages):
            own = with_layer(name, stage * len(wide.layers) + layer)
            want = spread_by_hand(name, have[own], spec, one) if own in have else np.zeros_like(got[stage])
            np.testing.assert_array_equal(got[stage], want, err_msg=own)
    equal(dict(sorted(to_hf(params, spec).items())), dict(sorted(tensors.items())))


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("falcon", split.Degree(4)),  # one KV head on four devices
        ("cohere2", split.Degree(4)),  # rotary pairs turned, KV heads repeated
        ("olmo2", split.Degree(4)),  # and their norms with them
        ("phi3", split.Degree(2, 2)),
        ("bloom", split.Degree(2)),
    ],
)
def test_other_layouts_spread(name, degree):
    tensors, spec = tiny.tensors(name), spec_from_hf(tiny.CASES[name].config, None)
    wide = split.spread(spec, degree)
    params = jax.jit(lambda t: from_hf(t, spec, wide))(tensors)
    assert layout_of(params, spec) == wide
    equal(dict(sorted(to_hf(params, spec).items())), dict(sorted(tensors.items())))


def test_what_does_not_fit_is_named():
    name = "llama_mha_bias"
    spec, tensors = spec_from_hf(tiny.CASES[name].config, None), tiny.tensors(name)
    up = "model.layers.1.mlp.up_proj.weight"

    def fails(change, *words):
        given = dict(tensors)
        change(given)
        with pytest.raises(WeightError) as caught:
            from_hf(given, spec)
        assert all(word in str(caught.value) for word in words), caught.value

    fails(lambda t: t.pop(up), up, "missing", "[40, 64]")
    fails(lambda t: t.update(more=t[up]), "more", "unknown")
    fails(lambda t: t.update({up: t[up].T}), up, "[64, 40]", "[40, 64]")
    params = from_hf(tensors, spec)
    with pytest.raises(WeightError, match=r"norm has shape \[3\], the config asks for \[64\]"):
        to_hf(params.replace(norm=np.zeros(3, np.float32)), spec)
    with pytest.raises(WeightError, match=r"parameter head missing \(the first of shape \[96, 64\]\)"):
        to_hf(params.replace(head=None), spec)
    with pytest.raises(WeightError, match=r"layers\.1\.attn\.norm"):
        to_hf(params.replace(layers=params.layers[:1]), spec)


def test_a_tied_heads_copy_is_left_out():
    name = "llama_tied_gqa3"
    spec, tensors = spec_from_hf(tiny.CASES[name].config, None), tiny.tensors(name)
    equal(from_hf(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, spec), from_hf(tensors, spec))
