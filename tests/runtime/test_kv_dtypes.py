"""A KV cache of 1-byte numbers: what a request gets is what attention over rounded keys and values gives."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lmjax.functional.dense import dense_attention
from lmjax.models import decoder
from lmjax.models.layer import Heads
from lmjax.models.registry import spec_from_hf
from lmjax.nn.env import Env, Forms
from lmjax.nn.moe import moe_mlp
from lmjax.runtime.memory import NARROW_POOL, WIDE_POOL, plan_kv, pool_bytes
from lmjax.types import KVSpec
from pallas_kernels.heads import apply_rope, rms_norm
from tests import tiny
from tests.fakes import run_requests
from tests.marks import slow
from tests.models.driver import Driver, params_from
from tests.runtime.requests import Limited, random_requests, scheduler_config
from tests.runtime.test_equality import check_equal
from tests.runtime.tiny import tiny_config, tiny_executor

KINDS = {"int8": "int8", "fp8": "float8_e4m3fn"}


def rounded(x, kind):
    """x float32 [..., H] to the nearest of the kind, with the head's largest at the end of its range."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127 if kind == "int8" else 448)
    steps = x / scale
    return (np.rint(steps) if kind == "int8" else steps.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)) * scale


def attend_over_rounded(kind, qkv, heads, a, pool, step, index, env):
    """Dense attention of one sequence whose normed and rotated keys, and values, numpy has rounded."""
    if a.latent:
        qkv = jnp.concatenate([qkv, qkv[:, -1:]], axis=1)  # the key is the value, too
        a = replace(a, latent=None, rope=None)
        o, pool = attend_over_rounded(kind, qkv, heads, a, pool, step, index, env)
        return o[..., :20], pool
    q, keys = qkv[:, :-2], qkv[:, -2]
    if heads.q_norm is not None:
        norm = a.qk_norm
        q, keys = (rms_norm(x, w, norm.eps, norm.plus_one) for x, w in ((q, heads.q_norm), (keys, heads.k_norm)))
    if a.rope is not None:
        q, keys = (apply_rope(x, *step.ropes[a.rope]) for x in (q, keys))
    shape = jax.ShapeDtypeStruct(keys.shape, jnp.float32)
    k, v = (
        jax.pure_callback(lambda x: rounded(x.swapaxes(1, 2), kind).swapaxes(1, 2).copy(), shape, x)
        for x in (keys, qkv[:, -1])
    )
    whole = jnp.concatenate([q, k[:, None], v[:, None]], axis=1)
    return dense_attention(whole, Heads(sinks=heads.sinks), None, 1, a, env), pool


CASES = [("llama_tied_gqa3", "int8"), ("gemma3", "fp8"), ("deepseek_v3", "int8")]
MORE = [*itertools.product(("llama_tied_gqa3", "gemma3", "mistral_window", "gpt_oss", "bloom"), KINDS)]
CASES += [slow(*case) for case in MORE if case not in CASES]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits(kind, name):
    case = tiny.CASES[name]
    spec = spec_from_hf(case.config, case.max_model_len)
    params = params_from(tiny.tensors(name), spec)
    prompt = tiny.prompts(name)[0][:29]
    driver = Driver(params, spec, dtype=KINDS[kind], tokens=len(prompt), rows=2)
    whole = driver.step({"a": prompt})["a"]
    chunks = [driver.step({"b": part})["b"] for part in (prompt[:11], prompt[11:12], prompt[12:])]
    plain = Driver(params, spec, tokens=len(prompt), rows=2)
    env = Env(forms=Forms(partial(attend_over_rounded, kind), moe_mlp))
    batch = jax.tree.map(jnp.asarray, plain.batch_of({"a": prompt}))
    hidden, _ = decoder.forward(params, spec, plain.pools, batch, env)
    want = np.asarray(decoder.logits(params, spec, hidden, env)).T
    rounding = np.linalg.norm(whole - plain.step({"c": prompt})["c"])
    assert rounding > 1e-3 * np.linalg.norm(whole), "nothing was rounded"
    # float noise sends a value in the middle between two steps to the other one: few are
    assert np.linalg.norm(np.concatenate(chunks) - whole) < 0.2 * rounding
    assert np.linalg.norm(whole - want) < 0.2 * rounding


def test_preempted_swapped_and_shared_as_alone():
    """Scales move with their blocks: prefix hits, copies for forks, to the host and back."""
    executor = tiny_executor(kv_cache_dtype="int8", swap_space=0.004)
    asked = random_requests(24, seed=8)
    arrivals = {r.handle: int(np.random.default_rng(r.handle).integers(0, 24)) for r in asked}

    def run(**limits):
        mode = {"preemption_mode": "swap"} if "num_blocks" in limits else {"enable_prefix_caching": False}
        limited = Limited(executor, host="num_blocks" in limits, mutate=True, **limits)
        return run_requests(asked, scheduler_config(**mode), executor.info, limited, arrivals=arrivals)

    alone, _ = run()
    swapped, scheduler = run(num_blocks=26)
    assert scheduler.stats().swaps_in > 0 and scheduler.stats().prefix_hits > 0
    check_equal(asked, alone, swapped)
    assert executor.stats()["compiles_total"] == 0


def test_bytes():
    """Elements of 1 byte and a float32 scale a token, head and side."""
    kv = KVSpec("full", (0, 1, 2), kv_heads=4, k_dim=64, v_dim=64, dtype="int8")
    assert kv.bytes_per_token() == 3 * 2 * 4 * (64 + 4)
    assert KVSpec("full", (0,), 1, 128, 128, "bfloat16").bytes_per_token() == 512
    pool = decoder.abstract_pool(kv, 7, 16)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool)) == 7 * 16 * kv.bytes_per_token()


def test_pools_that_kernels_cannot_index_are_not_planned():
    kv = KVSpec("full", tuple(range(32)), kv_heads=8, k_dim=128, v_dim=128, dtype="int8")
    sizes = {"model_max_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 2048, "available": 2**40}
    config = tiny_config(num_gpu_blocks_override=None, max_model_len=8192, block_size=16)
    for budget in (NARROW_POOL + 2**28, WIDE_POOL - 2**20, 2 * WIDE_POOL):
        plan = plan_kv((kv,), config, budget=budget, **sizes)
        elements = plan.num_blocks[0] * 16 * kv.bytes_per_token(scales=False)
        assert elements <= NARROW_POOL or elements > WIDE_POOL
        assert pool_bytes((kv,), plan.num_blocks, 16) <= budget
