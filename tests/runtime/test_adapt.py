"""A caller's weights for an engine: what equals is the caller's own array, the rest is converted on the devices."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lmjax.models.params import abstract_params, named_leaves
from lmjax.models.registry import spec_from_hf
from lmjax.runtime.adapt import Adapter
from lmjax.runtime.compiler import CompileMonitor
from lmjax.weights.errors import WeightError
from lmjax.weights.pytree import from_hf
from tests import tiny

NAME = "qwen2_moe"  # experts, a shared expert, biases, a layer without experts
SPEC = spec_from_hf(tiny.CASES[NAME].config, None)


def adapter(dtype="float32", spec=SPEC):
    return Adapter(spec, spec, abstract_params(spec, dtype), jax.devices()[0])


def pointers(tree):
    return {
        (name, shard.device.id): shard.data.unsafe_buffer_pointer()
        for name, x in named_leaves(tree).items()
        for shard in x.addressable_shards
    }


def test_the_same_layout_is_the_same_arrays():
    params = jax.device_put(from_hf(tiny.tensors(NAME), SPEC))
    monitor = CompileMonitor(require_warm=True)
    with monitor.watch():
        found = adapter().adapt(params)
    assert monitor.count == 0
    assert (found.kept, found.converted, found.converted_bytes) == (len(jax.tree.leaves(params)), 0, 0)
    assert all(a is b for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(params), strict=True))
    assert pointers(found.params) == pointers(params)
    assert adapter().missing_bytes(params) == 0


def test_of_a_checkpoints_arrays_those_that_are_parameters_stay():
    tensors = {name: jnp.asarray(x) for name, x in tiny.tensors(NAME).items()}
    one = adapter()
    found = one.adapt(tensors)
    assert found.params.embed is tensors["model.embed_tokens.weight"]
    assert found.params.layers[1].mlp.router is tensors["model.layers.1.mlp.gate.weight"]
    want = named_leaves(from_hf(tensors, SPEC))
    for name, x in named_leaves(found.params).items():
        np.testing.assert_array_equal(x, want[name], err_msg=name)
    # both norms and o; of the dense layer down, of the others router, shared gate and down; embed, norm, head
    assert found.kept == 3 * 4 + 1 + 3 * 3 + 3
    assert found.kept + found.converted == len(want)
    made = [x for name, x in named_leaves(found.params).items() if not any(x is t for t in tensors.values())]
    assert found.converted_bytes == sum(x.nbytes for x in made) == one.missing_bytes(tensors)
    assert all(not x.is_deleted() for x in tensors.values())
    # again: with what was compiled
    changed = {name: x + 1 if x.ndim == 1 else x for name, x in tensors.items()}
    with CompileMonitor(require_warm=True).watch():
        again = one.adapt(changed)
    assert again.converted == found.converted
    np.testing.assert_array_equal(again.params.layers[0].attn.qkv.bias, found.params.layers[0].attn.qkv.bias + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types_are_rounded_to_nearest_even(dtype):
    tensors = tiny.tensors(NAME)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    want = named_leaves(from_hf({name: x.astype(kind) for name, x in tensors.items()}, SPEC))
    for tree in (tensors, from_hf(tensors, SPEC)):
        for name, x in named_leaves(adapter(dtype).adapt(tree).params).items():
            assert x.dtype == kind
            np.testing.assert_array_equal(x, want[name], err_msg=name)


def test_layers_alike_share_a_program():
    one = adapter()
    one.adapt(tiny.tensors(NAME))
    # embedding, norm and head; layers with experts; the layer without
    assert len(one._programs) == 3


def test_a_wrong_tree_names_the_parameter():
    params = from_hf(tiny.tensors(NAME), SPEC)
    attn = params.layers[2].attn
    bad = attn.replace(qkv=attn.qkv.replace(weight=attn.qkv.weight[:, :1]))
    layers = (*params.layers[:2], params.layers[2].replace(attn=bad), params.layers[3])
    with pytest.raises(WeightError, match=r"layers\.2\.attn\.qkv\.weight has shape \[1, 1, 16, 48\], the config asks"):
        adapter().adapt(params.replace(layers=layers))
    with pytest.raises(WeightError, match="norm is int64"):
        adapter().adapt(params.replace(norm=params.norm.astype(int)))
    other = spec_from_hf(tiny.CASES["qwen3"].config, None)
    with pytest.raises(WeightError, match=r"layers\.0\.attn\.q_norm"):
        adapter(spec=other).adapt(params)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("part", "count"),
    [("weights", 5), ("engines replica", 1), pytest.param("engines stages device", 1, marks=pytest.mark.slow)],
)
def test_on_meshes(part, count):
    """In a process with 8 CPU devices."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.runtime.adapt_on_meshes", *part.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == count, done.stdout
