"""Trees as flax has them: each matrix does in the engine what flax's own module does with it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import linen, nnx

from lmjax.models.params import abstract_params
from lmjax.models.registry import spec_from_hf
from lmjax.runtime.adapt import Adapter
from lmjax.weights.errors import WeightError
from lmjax.weights.pytree import to_hf
from lmjax.weights.trees import read_tree
from tests import tiny

CONFIG = tiny._config("qwen2", heads=4, kv_heads=2, num_hidden_layers=2)
SPEC = spec_from_hf(CONFIG, None)
D, F, V, N, K, H = 64, 40, tiny.VOCAB, 4, 2, 16


def adapted(tree, names=None, spec=SPEC):
    """{name in the checkpoint: tensor} of the tree as the engine holds it."""
    adapter = Adapter(spec, spec, abstract_params(spec, "float32"), jax.devices()[0], names)
    return {name: np.asarray(x) for name, x in to_hf(adapter.adapt(tree).params, spec).items()}


class Layer(nnx.Module):
    def __init__(self, rngs):
        def linear(n_in, n_out, bias=False):
            init = nnx.initializers.normal(0.5)
            return nnx.Linear(n_in, n_out, use_bias=bias, bias_init=init, rngs=rngs)

        self.self_attn = nnx.Dict(
            q_proj=linear(D, N * H, True), k_proj=linear(D, K * H, True), v_proj=linear(D, K * H, True),
            o_proj=linear(N * H, D),
        )  # fmt: skip
        self.mlp = nnx.Dict(gate_proj=linear(D, F), up_proj=linear(D, F), down_proj=linear(F, D))
        self.input_layernorm = nnx.RMSNorm(D, scale_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(D, scale_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)  # has variables that are no parameters


class Model(nnx.Module):
    def __init__(self, rngs):
        self.model = nnx.Dict(
            embed_tokens=nnx.Embed(V, D, rngs=rngs),
            layers=nnx.List([Layer(rngs) for _ in range(2)]),
            norm=nnx.RMSNorm(D, scale_init=nnx.initializers.normal(1.0), rngs=rngs),
        )
        self.lm_head = nnx.Linear(D, V, use_bias=False, rngs=rngs)


def test_an_nnx_module_and_its_state():
    module, rng = Model(nnx.Rngs(0)), np.random.default_rng(0)
    found = adapted(module)

    def same(path, linear):
        x = rng.normal(size=(3, linear.in_features)).astype(np.float32)
        y = x @ found[f"{path}.weight"].T + found.get(f"{path}.bias", 0.0)
        np.testing.assert_allclose(y, linear(x), atol=1e-4, err_msg=path)

    same("lm_head", module.lm_head)
    for i, layer in enumerate(module.model.layers):
        for part in ("self_attn", "mlp"):
            for name, linear in getattr(layer, part).items():
                same(f"model.layers.{i}.{part}.{name}", linear)
        scale = layer.input_layernorm.scale.get_value()
        np.testing.assert_array_equal(found[f"model.layers.{i}.input_layernorm.weight"], scale)
    table = module.model.embed_tokens(np.arange(V))
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], table)
    for tree in (nnx.state(module), nnx.state(module, nnx.Param), nnx.to_pure_dict(nnx.state(module, nnx.Param))):
        again = adapted(tree)
        assert all((again[name] == found[name]).all() for name in found)


class LinenLayer(linen.Module):
    """Heads as axes of their own, as flax's attention has them; ``o_proj`` joins two."""

    def setup(self):
        normal = linen.initializers.normal(0.5)
        self.q_proj = linen.DenseGeneral((N, H), bias_init=normal)
        self.k_proj = linen.DenseGeneral((K, H), bias_init=normal)
        self.o_proj = linen.DenseGeneral(D, axis=(-2, -1), use_bias=False)

    def __call__(self, x, heads):
        return self.q_proj(x), self.k_proj(x), self.o_proj(heads)


def test_linen_variables_with_general_kernels():
    layer, rng = LinenLayer(), np.random.default_rng(0)
    x, heads = rng.normal(size=(3, D)).astype(np.float32), rng.normal(size=(3, N, H)).astype(np.float32)
    own = layer.init(jax.random.key(0), x, heads)["params"]
    q, k, o = layer.apply({"params": own}, x, heads)
    tree = _nested(tiny.tensors("qwen2", CONFIG))
    layers = tree["model"].pop("layers")
    attention = layers["0"]["self_attn"]
    for name in own:
        attention[name] = own[name]
    attention["v_proj"]["weight"] = linen.Partitioned(attention["v_proj"]["weight"], names=(None, None))
    tree["model"] |= {f"layers_{i}": layer for i, layer in layers.items()}  # as a list of modules is named
    found = adapted({"params": tree, "cache": {"index": np.zeros(())}})

    def product(name, x):
        at = f"model.layers.0.self_attn.{name}"
        return x @ found[f"{at}.weight"].T + found.get(f"{at}.bias", 0.0)

    np.testing.assert_allclose(product("q_proj", x), q.reshape(3, -1), atol=1e-4)
    np.testing.assert_allclose(product("k_proj", x), k.reshape(3, -1), atol=1e-4)
    np.testing.assert_allclose(product("o_proj", heads.reshape(3, -1)), o, atol=1e-4)


def _nested(tensors):
    tree: dict = {}
    for name, value in tensors.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def test_dicts_flat_and_nested():
    tensors = tiny.tensors("qwen2", CONFIG)
    for tree in (tensors, _nested(tensors), {"params": _nested(tensors)}):
        found = adapted(tree)
        assert all((found[name] == x).all() for name, x in tensors.items())


def test_other_names():
    tensors = tiny.tensors("qwen2", CONFIG)
    renamed = {name.replace("model.layers", "h").replace("_proj", ""): x for name, x in tensors.items()}
    renamed["step"] = np.zeros((), np.float32)

    def names(path):
        if path == "step":
            return None
        found = path.replace("h.", "model.layers.", 1) if path.startswith("h.") else path
        for part in ("q", "k", "v", "o", "gate", "up", "down"):
            found = found.replace(f".{part}.", f".{part}_proj.")
        return found

    table = {path: names(path) for path in renamed if path.startswith(("h.", "step"))}
    for given in (names, table):
        found = adapted(renamed, given)
        assert all((found[name] == x).all() for name, x in tensors.items())


@pytest.mark.parametrize("case", ["qwen2", "qwen3_moe"])
def test_stacked_layers_and_experts(case):
    """As nn.scan leaves them: one leaf for all layers, and for all experts of a layer."""
    config = tiny.CASES[case].config
    spec, tensors = spec_from_hf(config, None), tiny.tensors(case)
    stacks: dict[str, dict[tuple[int, ...], np.ndarray]] = {}
    for name, x in tensors.items():
        parts = name.split(".")
        path = ".".join("{i}" if parts[i - 1] == "layers" else "{e}" if parts[i - 1] == "experts" else part
                        for i, part in enumerate(parts))  # fmt: skip
        stacks.setdefault(path, {})[tuple(int(part) for part in parts if part.isdigit())] = x
    tree, names = {}, {}
    for path, entries in stacks.items():
        axes = path.count("{")
        shape = tuple(max(place[i] for place in entries) + 1 for i in range(axes))
        first = next(iter(entries.values()))
        matrix = first.ndim == 2 and "proj" in path
        stack = np.zeros((*shape, *(first.T if matrix else first).shape), np.float32)
        for place, x in entries.items():
            stack[place] = x.T if matrix else x
        tree[path.replace("{", "").replace("}", "")] = stack
        names[path.replace("{", "").replace("}", "")] = path.replace("weight", "kernel") if matrix else path
    found = adapted(tree, names, spec)
    assert all((found[name] == x).all() for name, x in tensors.items())


def test_kernels_of_a_checkpoint_that_stores_them():
    """GPT-2's matrices are [in, out] in files as in flax; two of them square."""
    tensors, spec = tiny.tensors("gpt2"), spec_from_hf(tiny.CASES["gpt2"].config, None)
    tree = {
        name.removesuffix("weight") + "kernel" if ".h." in name and x.ndim == 2 else name: x
        for name, x in tensors.items()
    }
    assert sum(name.endswith("kernel") for name in tree) == 8
    found = adapted(tree, spec=spec)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_what_cannot_be_read_is_named():
    tensors = tiny.tensors("qwen2", CONFIG)
    q = "model.layers.0.self_attn.q_proj"

    def fails(tree, *words, names=None):
        with pytest.raises(WeightError) as caught:
            read_tree(tree, SPEC, names)
        assert all(word in str(caught.value) for word in words), caught.value

    fails([1], "got list", "nnx module")
    fails({}, "got dict")
    fails(tensors | {"model.norm.weight": 1.0}, "model.norm.weight is a float, must be an array")
    fails(tensors | {"model.norm.weight": np.zeros(D, np.int32)}, "model.norm.weight is int32 of shape [64]")
    fails({k: v for k, v in tensors.items() if not k.startswith(q)}, f"{q}.weight", "missing")
    wrong = {k: v for k, v in tensors.items() if k != f"{q}.weight"} | {f"{q}.kernel": np.zeros((3, D), np.float32)}
    fails(wrong, f"{q}.weight (given as {q}.kernel) has shape [3, 64], the config asks for [64, 64]")
    fails(tensors | {f"{q}.kernel": tensors[f"{q}.weight"]}, "are both the tensor", q)
    fails(tensors | {"scale_factor": np.zeros(3, np.float32)}, "scale_factor", "unknown")
    fails(tensors, "axes more", names={"model.norm.weight": "model.layers.{i}.experts.{e}.x"})
    gone = jax.numpy.ones(D)
    gone.delete()
    fails(tensors | {"model.norm.weight": gone}, "model.norm.weight has been deleted")
