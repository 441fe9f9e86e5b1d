"""Shares of parameters from slices of tensors: what cutting the whole parameter gives, and no byte read twice."""

import os
import subprocess
import sys

import numpy as np
import pytest

from lmjax.models import names as naming
from lmjax.models.layout import stored_tensor
from lmjax.models.params import named_leaves, param_specs
from lmjax.parallel import split
from lmjax.parallel.rules import partition_specs
from lmjax.weights.shards import pieces
from tests.parallel import sharded_forward

CASES = [
    ("llama", 2, False),
    ("llama", 8, False),  # 2 KV heads: each on 4 devices
    ("smol", 3, False),
    ("mixtral", 4, True),
    ("mixtral", 8, False),
    ("qwen2_moe", 2, True),
    ("qwen2_moe", 4, False),
    # tensors of several parts, or in another order: read whole, then cut
    ("phi3", 2, False),
    ("falcon", 4, False),  # one KV head: on all devices
    ("falcon_new", 2, False),
    ("gpt2", 2, False),
    ("gptj", 2, False),
    ("cohere", 2, False),
    ("cohere2", 4, False),
    ("olmo2", 4, False),
    ("gpt_oss", 2, False),
    ("gpt_oss", 4, True),
    ("deepseek_v2", 2, False),
    ("deepseek_v3", 4, True),
    ("deepseek_v3_halves", 2, False),
]


def spread_by_hand(name: str, x: np.ndarray, spec, wide) -> np.ndarray:
    """KV heads repeated, the vocabulary padded with zeros: of the whole parameter."""
    a, heads = spec.layers[0].attention, wide.layers[0].attention.kv_heads
    if name.endswith(("attn.q_norm", "attn.k_norm")) and a.qk_norm_over != "head" and heads > a.kv_heads:
        repeated = np.repeat(x, heads // a.kv_heads, axis=0)
        return x.reshape(heads, -1, x.shape[-1]) if name.endswith("q_norm") else repeated
    if ".qkv." in name and heads > a.kv_heads:
        q = x[:, :-2].reshape(heads, -1, *x.shape[2:])
        return np.concatenate([q, np.repeat(x[:, -2:], heads // a.kv_heads, axis=0)], axis=1)
    if name in ("embed", "head", "head_bias"):
        return np.pad(x, ((0, wide.num_vocab_rows - len(x)), *[(0, 0)] * (x.ndim - 1)))
    return x


@pytest.mark.parametrize("case", [(naming.hf_names, *c) for c in CASES] + [(naming.gguf_names, *c) for c in CASES[:3]])
def test_shares_are_cuts_of_the_whole(case):
    named, model, tp, expert_parallel = case
    spec = sharded_forward.spec_of(model)
    wide = split.spread(spec, split.Degree(tp, 1, expert_parallel))
    rng = np.random.default_rng(0)
    params = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in named_leaves(param_specs(spec)).items()}
    tensors = {key: stored_tensor(parts, params[n]) for key, (n, parts) in naming.by_tensor(named(spec)).items()}
    cuts = named_leaves(partition_specs(wide, expert_parallel))
    shapes = {n: p.shape for n, p in named_leaves(param_specs(wide)).items()}
    num_cut = 0
    for name, parts in named(spec).items():
        whole, axes = spread_by_hand(name, params[name], spec, wide), list(cuts[name])
        assert whole.shape == shapes[name]
        axis = axes.index("tp") if "tp" in axes else None
        num_cut += axis is not None
        for j in range(tp):
            index = [slice(None)] * whole.ndim
            if axis is not None:
                size = whole.shape[axis] // tp
                index[axis] = slice(j * size, (j + 1) * size)
            share = np.full(whole[tuple(index)].shape, np.nan, np.float32)
            for piece in pieces(parts, named(wide)[name], whole.shape, tuple(index)):
                tensor = tensors[piece.name]
                if piece.rows:
                    tensor = tensor[slice(*piece.rows)]
                if piece.columns:
                    tensor = tensor[..., slice(*piece.columns)]
                assert tensor.shape == piece.shape
                piece.fill(share, tensor)
            np.testing.assert_array_equal(share, whole[tuple(index)], err_msg=f"{name} of device {j}")
    assert num_cut > len(spec.layers) * 3


def test_on_devices():
    """In a process with 8 CPU devices."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.sharded_loading"], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 6
