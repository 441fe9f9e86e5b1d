"""Paged attention and the KV write against float64 numpy on ragged batches."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import choose as choose_write
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import choose, paged_attention
from pallas_kernels.platform import Target
from tests.marks import slow
from tests.pairs import all_pairs, every, name


def dense_attention(q, keys, values, positions, scale, window):
    """q [n, N, H], keys/values [c, K, H] of one sequence, float64."""
    group = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
    scores = np.einsum("qnh,cnh->nqc", q, keys) * scale
    at = np.arange(len(keys))
    seen = at[None] <= positions[:, None]
    if window:
        seen &= at[None] > positions[:, None] - window
    scores = np.where(seen[None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nqc,cnh->qnh", p / p.sum(-1, keepdims=True), values)


def make_case(rng, rows, heads, kv_heads, dim, block, tokens, max_rows, width):
    """rows: list of (tokens before this step, tokens in this step); one-token rows must come first."""
    layers, layer = 2, 1
    lengths = [before + new for before, new in rows]
    num_blocks = 1 + sum(-(-n // block) for n in lengths) + 3
    free = list(rng.permutation(num_blocks - 1) + 1)
    pool = np.full((layers, 2, num_blocks, kv_heads, block, dim), np.nan, np.float32)  # unwritten: must not leak
    tables = np.zeros((max_rows, width), np.int32)
    arrays = {k: np.zeros(max_rows, np.int32) for k in ("query_starts", "query_lens", "context_lens")}
    token_rows, positions, blocks, offsets = (np.zeros(tokens, np.int32) for _ in range(4))
    q = rng.normal(size=(tokens, heads, dim))
    k, v = rng.normal(size=(2, tokens, kv_heads, dim))
    parts, at = [], 0
    for r, (before, new) in enumerate(rows):
        total = before + new
        mine = [free.pop() for _ in range(-(-total // block))]
        tables[r, : len(mine)] = mine
        old = rng.normal(size=(2, before, kv_heads, dim))
        for p in range(before):
            pool[layer, :, mine[p // block], :, p % block] = old[:, p]
        arrays["query_starts"][r], arrays["query_lens"][r], arrays["context_lens"][r] = at, new, total
        span = slice(at, at + new)
        token_rows[span], positions[span] = r, np.arange(before, total)
        blocks[span] = [mine[p // block] for p in range(before, total)]
        offsets[span] = np.arange(before, total) % block
        keys, values = (np.concatenate([old[i], new_kv[span]]) for i, new_kv in enumerate((k, v)))
        parts.append((span, q[span], keys, values, positions[span]))
        at += new
    arrays["parts"] = parts
    return q, k, v, pool, tables, arrays, token_rows, positions, blocks, offsets, at, layer


CASES = {
    "decode": ([(5, 1), (0, 1), (47, 1), (16, 1)], 8, 8),
    "one": ([(40, 1)], 1, 1),
    "small prefill": ([(0, 7)], 8, 8),
    "prefill": ([(0, 100)], 128, 16),
    "chunk": ([(33, 90)], 128, 16),
    "mixed": ([(20, 1), (63, 1), (0, 30), (31, 65), (7, 2)], 128, 8),
    "many short": ([(0, 3)] * 10, 32, 32),
    "full bucket": ([(15, 1), (0, 127)], 128, 8),
}


HEADS = [(9, 3, 16), (4, 4, 20), (4, 1, 8)]
QUICK = all_pairs(name=list(CASES), heads=HEADS, window=[None, 21])
SLOW = [case for case in every(name=list(CASES), heads=HEADS, window=[None, 1, 21]) if case not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *map(slow, SLOW)], ids=name)
def test_matches_dense(case):
    check(case["name"], *case["heads"], case["window"])


@pytest.mark.parametrize("name", ["mixed", "small prefill"])
def test_keys_that_are_values(name):
    """As latent vectors are: a pool of keys alone, whose first numbers are the value."""
    check(name, 4, 1, 16, None, value_dim=12)


def test_no_kernel_serves_keys_that_are_values():
    q, pool = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 16, 576), (2, 1, 9, 1, 16, 576)))
    qkv = jax.ShapeDtypeStruct((1, 17, 576, 1), jnp.bfloat16)
    target = Target("cuda", (9, 0))
    assert choose(q, pool, target=target) == choose_write(qkv, pool, target=target) == "xla"
    for backend in ("triton", "mosaic"):
        with pytest.raises(NotImplementedError, match=f"{backend} body: .*latent vectors.* by the xla body alone"):
            choose(q, pool, target=target, backend=backend)
    with pytest.raises(NotImplementedError, match="the triton body writes keys and values, not latent vectors"):
        choose_write(qkv, pool, target=target, backend="triton")
    with pytest.raises(ValueError, match="value_dim None does not belong to a pool"):
        paged_attention(q, pool, **dict.fromkeys(ARGUMENTS))


ARGUMENTS = (
    *("layer", "block_tables", "token_rows", "positions", "query_starts", "query_lens", "context_lens"),
    *("num_decode", "num_rows", "num_tokens", "scale"),
)


def check(name, heads, kv_heads, dim, window, value_dim=None):
    rows, tokens, max_rows = CASES[name]
    rng = np.random.default_rng(3)
    q, k, v, pool, tables, arrays, token_rows, positions, blocks, offsets, used, layer = make_case(
        rng, rows, heads, kv_heads, dim, 16, tokens, max_rows, 11
    )
    if value_dim is not None:
        pool = pool[:, :1]
    scale = dim**-0.5
    num_decode = next((i for i, (_, new) in enumerate(rows) if new > 1), len(rows))

    @partial(jax.jit, donate_argnums=1)
    def run(q, pool, k, v):
        sides = [k[:, :, None]] if value_dim else [k[:, :, None], v[:, :, None]]
        by_head = jnp.concatenate([q.reshape(tokens, kv_heads, -1, dim), *sides], 2)
        targets = {"block_ids": jnp.asarray(blocks), "offsets": jnp.asarray(offsets)}
        q, pool, _ = kv_write(by_head.transpose(1, 2, 3, 0), pool, cos=None, sin=None, layer=layer, **targets)
        out = paged_attention(
            q,
            pool,
            layer=layer,
            block_tables=jnp.asarray(tables),
            token_rows=jnp.asarray(token_rows),
            positions=jnp.asarray(positions),
            query_starts=jnp.asarray(arrays["query_starts"]),
            query_lens=jnp.asarray(arrays["query_lens"]),
            context_lens=jnp.asarray(arrays["context_lens"]),
            num_decode=jnp.int32(num_decode),
            num_rows=jnp.int32(len(rows)),
            num_tokens=jnp.int32(used),
            scale=scale,
            window=window,
            value_dim=value_dim,
        )
        return out, pool

    out, pool_after = run(*(jnp.asarray(x, jnp.float32) for x in (q, pool, k, v)))
    assert np.isfinite(np.asarray(out)[:used]).all()
    for span, query, keys, values, at in arrays["parts"]:
        want = dense_attention(query, keys, keys[..., :value_dim] if value_dim else values, at, scale, window)
        np.testing.assert_allclose(np.asarray(out)[span], want, atol=2e-5)
    after = np.asarray(pool_after)
    for t in range(used):
        np.testing.assert_array_equal(after[layer, 0, blocks[t], :, offsets[t]], k[t].astype(np.float32))
    assert np.isnan(after[1 - layer]).all()  # the other layer is untouched
