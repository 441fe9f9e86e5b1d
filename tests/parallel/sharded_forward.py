"""Runs on 8 CPU devices, in a process of its own: the sharded forward against one device. Prints the worst error."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lmjax.models import decoder
from lmjax.models.params import init_params, map_named
from lmjax.models.registry import spec_from_hf
from lmjax.parallel import split
from lmjax.parallel.placement import Placement, make_mesh
from lmjax.parallel.rules import LOGITS, POOL, REPLICATED
from pallas_kernels.platform import CPU
from tests import tiny
from tests.models.driver import COMPILER_OPTIONS, Driver, params_from

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 1e4,
}
LLAMA = {
    "model_type": "llama",
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "attention_bias": True,
    "mlp_bias": True,
}
SMOL = {**LLAMA, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 96}
MIXTRAL = {
    "model_type": "mixtral",
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN_MOE = {
    "model_type": "qwen2_moe",
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 98,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [0],
}
MODELS = {"llama": LLAMA, "smol": SMOL, "mixtral": MIXTRAL, "qwen2_moe": QWEN_MOE}


def spec_of(model: str):
    """Of ``MODELS`` or of tests/tiny.py."""
    return spec_from_hf({**COMMON, **MODELS[model]} if model in MODELS else tiny.CASES[model].config, None)


def spread_params(params, spec, wide, placement):
    """The parameters of one device laid out for many: KV heads repeated, the vocabulary padded with NaN."""
    tp = placement.size

    def one(name, leaf, pspec):
        x = np.asarray(leaf)
        if ".qkv." in name:
            kv_heads = spec.layers[0].attention.kv_heads
            if kv_heads < tp:
                times = tp // kv_heads
                q, kv = x[:, :-2], np.repeat(x[:, -2:], times, axis=0)
                x = np.concatenate([q.reshape(tp, -1, *q.shape[2:]), kv], axis=1)
        elif name.endswith(("attn.q_norm", "attn.k_norm")) and x.ndim > 1:  # by heads
            heads = wide.layers[0].attention.kv_heads
            x = np.repeat(x, heads // len(x), axis=0) if x.ndim == 2 else x.reshape(heads, -1, x.shape[-1])
        elif name in ("embed", "head", "head_bias"):
            pad = wide.num_vocab_rows - len(x)
            x = np.pad(x, ((0, pad), *[(0, 0)] * (x.ndim - 1)), constant_values=np.nan)
        return jax.device_put(x, NamedSharding(placement.mesh, pspec))

    specs = placement.params(wide)
    return map_named(lambda name, pair: one(name, *pair), jax.tree.map(_Pair, params, specs))


class _Pair(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class ShardedDriver(Driver):
    def __init__(self, params, spec, placement, **sizes):
        super().__init__(params, spec, **sizes)
        mesh, env, share = placement.mesh, placement.env(CPU), placement.share(spec)
        pools = (POOL,) * len(self.kv_specs)

        def step(params, pools, batch):
            hidden, pools = decoder.forward(params, share, pools, batch, env)
            return decoder.logits(params, share, hidden, env), pools

        self.pools = jax.device_put(self.pools, NamedSharding(mesh, POOL))
        self._step = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(placement.params(spec), pools, REPLICATED),
                out_specs=(LOGITS, pools),
                check_vma=False,
            ),
            donate_argnums=1,
            compiler_options=COMPILER_OPTIONS,
        )

    def _run(self, batch):
        return self._step(self.params, self.pools, jax.tree.map(jnp.asarray, batch))


def work(seed):
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(0, 96, n).tolist()  # noqa: E731
    yield {"a": ids(9), "b": ids(30)}
    yield {"a": ids(1), "b": ids(1), "c": ids(17)}
    yield {"c": ids(12), "a": ids(1)}


def worst_error(model: str, tp: int, expert_parallel: bool) -> float:
    spec = spec_of(model)
    params = init_params(spec, "float32", 1) if model in MODELS else params_from(tiny.tensors(model), spec)
    wide = split.spread(spec, split.Degree(tp, 1, expert_parallel))
    placement = Placement(make_mesh(jax.devices()[:tp]), expert_parallel)
    alone = Driver(params, spec)
    together = ShardedDriver(spread_params(params, spec, wide, placement), wide, placement)
    worst = 0.0
    for step in work(tp):
        wanted, found = alone.step(step), together.step(step)
        for key, logits in wanted.items():
            assert np.isneginf(found[key][:, spec.vocab :]).all()
            error = np.abs(found[key][:, : spec.vocab] - logits).max() / np.abs(logits).max()
            worst = max(worst, float(error))
    return worst


if __name__ == "__main__":
    for case in sys.argv[1:]:
        model, tp, how = case.split(":")
        print(f"{case} {worst_error(model, int(tp), how == 'ep'):.3g}", flush=True)
