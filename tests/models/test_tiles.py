"""A token's hidden state and its keys and values, to the bit, whatever step computes it: every kind of layer.

The control is the same work without tiles, whose bits depend on the width of the step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmjax.models import decoder
from lmjax.models.registry import spec_from_hf
from lmjax.nn.batch import Batch
from lmjax.nn.env import Env
from lmjax.nn.tiles import CPU_TILE, over_tiles
from tests.tiny import CASES

BLOCK, COLUMNS, BLOCKS = 8, 16, 48
LENGTH = 52
OWN, OTHERS = np.arange(1, 8), np.arange(10, 17)  # block tables
# hidden 576 and ffn 1536: a layer of SmolLM2's shapes, where XLA:CPU's products differ between widths
SMOLLM2 = CASES["llama_tied_gqa3"].config | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
CONFIGS = {"smollm2": SMOLLM2} | {
    name: CASES[name].config for name in ("qwen3_moe", "qwen2_moe_window", "mistral_window", "llama_gelu_tanh")
}
# several ropes and soft caps; learned positions and none; ALiBi; sinks and experts with biases
CONFIGS |= {name: CASES[name].config for name in ("gemma3", "gpt2", "bloom", "gpt_oss")}


@functools.partial(jax.jit, static_argnums=(1, 4), donate_argnums=2)
def forward(params, spec, pools, batch, env):
    return decoder.forward(params, spec, pools, batch, env)


def make_batch(tokens: int, rows: list[tuple[np.ndarray, int, np.ndarray]]) -> Batch:
    """rows: token ids, the position of the first one, block table. All are prefill rows but the first ones of one
    token."""
    ids, positions, token_rows = (np.zeros(tokens, np.int32) for _ in range(3))
    starts, lens, contexts, last = (np.zeros(tokens, np.int32) for _ in range(4))
    tables = np.zeros((1, tokens, COLUMNS), np.int32)
    at = 0
    for row, (some, start, table) in enumerate(rows):
        here = slice(at, at + len(some))
        ids[here], positions[here], token_rows[here] = some, np.arange(start, start + len(some)), row
        tables[0, row, : len(table)] = table
        starts[row], lens[row], contexts[row], last[row] = at, len(some), start + len(some), here.stop - 1
        at = here.stop
    decode = next((i for i, row in enumerate(rows) if len(row[0]) != 1), len(rows))
    counts = (np.int32(decode), np.int32(len(rows)), np.int32(at))
    return Batch(ids, positions, token_rows, tables, starts, lens, contexts, last, *counts)


class Model:
    def __init__(self, config, env):
        self.spec, self.env = spec_from_hf(config, min(128, config.get("n_positions", 128))), env
        self.params = decoder.init_params(self.spec, "float32")
        self.groups = decoder.kv_specs(self.spec, "float32")

    def bits(self, tokens: int, chunks: list[int], neighbour: int, seed: int = 0) -> bytes:
        """Of one prompt in ``chunks``, in steps of ``tokens``, each beside so many tokens of another prompt."""
        ids = np.random.default_rng(7).integers(0, 90, LENGTH).astype(np.int32)
        rng = np.random.default_rng(seed)
        pools = tuple(jnp.full(decoder.pool_shape(kv, BLOCKS, BLOCK), jnp.nan, jnp.float32) for kv in self.groups)
        hidden, at = [], 0
        for length in chunks:
            mine = (ids[at : at + length], at, OWN)
            other = (rng.integers(0, 90, neighbour).astype(np.int32), 0, OTHERS)
            rows = [mine] if not neighbour else [mine, other] if length == 1 else [other, mine]
            batch = make_batch(tokens, rows)
            batch = batch.replace(block_tables=np.repeat(batch.block_tables, len(self.groups), 0))
            first = neighbour if neighbour and length > 1 else 0
            out, pools = forward(self.params, self.spec, pools, batch, self.env)
            hidden.append(np.asarray(out)[:, first : first + length])
            at += length
        assert at == LENGTH
        own = [np.asarray(pool)[:, :, OWN].swapaxes(3, 4) for pool in pools]  # [L, 2, 7, B, K, H]
        kept = [x.reshape(*x.shape[:2], 7 * BLOCK, *x.shape[4:])[:, :, :LENGTH] for x in own]
        whole = np.concatenate(hidden, 1)
        assert np.isfinite(whole).all() and all(np.isfinite(x).all() for x in kept)
        return whole.tobytes() + b"".join(x.tobytes() for x in kept)


WORK = (
    (32, [32, 20], 0),
    (64, [52], 0),
    (64, [52], 5),
    (128, [52], 61),
    (64, [1, 2, 3, 17, 16, 13], 0),
    (32, [7, 20, 3, 12, 10], 9),
    (32, [20, *[1] * 32], 0),
    (32, [20, *[1] * 32], 11),
)


SLOW = ("qwen2_moe_window", "gpt2", "bloom", "gpt_oss")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CONFIGS]
)
def test_bits_do_not_depend_on_the_step(name):
    model = Model(CONFIGS[name], Env(tile=CPU_TILE))
    first, *rest = (model.bits(*work, seed=i) for i, work in enumerate(WORK))
    assert [i for i, bits in enumerate(rest, 1) if bits != first] == []


def test_without_tiles_they_do():
    model = Model(SMOLLM2, Env())
    assert len({model.bits(*work) for work in (WORK[1], WORK[4], WORK[6])}) > 1


def test_a_pool_is_updated_in_place():
    """Temporaries do not grow with it, though a loop carries it."""
    model, sizes = Model(SMOLLM2, Env(tile=CPU_TILE)), []
    batch = make_batch(64, [(np.zeros(3, np.int32), 0, OWN)])
    for blocks in (64, 1024):
        pools = tuple(jax.ShapeDtypeStruct(decoder.pool_shape(kv, blocks, BLOCK), jnp.float32) for kv in model.groups)
        lowered = forward.lower(model.params, model.spec, pools, batch, model.env)
        sizes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] - sizes[0] < 2**16, sizes


def test_a_width_that_is_no_multiple_is_a_mistake():
    with pytest.raises(AssertionError):
        over_tiles(CPU_TILE, 40, jnp.int32(3), lambda i, x: x, jnp.zeros(40))
    with pytest.raises(AssertionError):
        over_tiles(CPU_TILE, CPU_TILE, jnp.int32(3), lambda i, x: x, jnp.zeros(CPU_TILE))
