"""Triton bodies of routing: softmax, top-k, and the rows of each group, in one kernel, or in two for many tokens.

XLA would take about ten kernels, a sort among them. Here a token's row is the start of its group's block plus the
number of earlier tokens in the group: a running count over the tile's tokens, plus the counts of the tiles before.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.grouped_matmul.groups import Groups, max_blocks
from pallas_kernels.platform import Target, next_power_of_2

TILE_VALUES = 8192  # tokens x experts that a program holds in registers at once
CHUNK = 16  # tiles, or blocks, looked at together


class _Plan(NamedTuple):
    """What is known of a routing when it is traced."""

    tokens: int  # T
    top_k: int
    experts: int  # E; 0: the ids are given
    groups: int  # G
    block_rows: int  # BM
    normalise: bool
    tile: int  # tokens of a program, a power of two
    warps: int

    @property
    def tiles(self) -> int:
        return -(-self.tokens // self.tile)

    @property
    def blocks(self) -> int:
        return max_blocks(self.tokens, self.top_k, self.groups, self.block_rows)


def route_triton(
    logits: jax.Array,
    num_tokens: jax.Array,
    first: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    groups: int,
    block_rows: int,
    target: Target,
) -> tuple[jax.Array, Groups]:
    """Same arguments as ``pallas_kernels.grouped_matmul.route``; ``groups``: its count."""
    tokens, experts = logits.shape
    plan = _plan(tokens, top_k, experts, groups, block_rows, normalise)
    weights, found = _call(logits.astype(jnp.float32), num_tokens, first, plan=plan, target=target)
    assert weights is not None
    return weights, found


def group_rows_triton(ids: jax.Array, *, groups: int, block_rows: int, target: Target) -> Groups:
    """Same arguments as ``pallas_kernels.grouped_matmul.group_rows``."""
    tokens, top_k = ids.shape
    plan = _plan(tokens, top_k, 0, groups, block_rows, False)
    return _call(ids, jnp.int32(tokens), jnp.int32(0), plan=plan, target=target)[1]


def _plan(tokens: int, top_k: int, experts: int, groups: int, block_rows: int, normalise: bool) -> _Plan:
    widest = next_power_of_2(max(experts, groups, 16))
    tile = min(max(TILE_VALUES // widest, 16), max(next_power_of_2(tokens), 16), 128)
    return _Plan(tokens, top_k, experts, groups, block_rows, normalise, tile, 4 if tile * widest <= 2048 else 8)


@partial(jax.jit, static_argnames=("plan", "target"))  # equal layers lower once
def _call(
    source: jax.Array, num_tokens: jax.Array, first: jax.Array, *, plan: _Plan, target: Target
) -> tuple[jax.Array | None, Groups]:
    """source: logits [T, E], or ids [T, k]."""
    pair = (plan.tokens, plan.top_k)
    i32 = jnp.int32
    groups = [(pair, i32), ((plan.blocks * plan.block_rows,), i32), ((plan.blocks,), i32)]
    weights = [(pair, jnp.float32)] if plan.experts else []
    scalars = (num_tokens.reshape(1), first.reshape(1))

    def run(body: Any, name: str, outputs: list[Any], *operands: jax.Array) -> list[jax.Array]:
        return pl.pallas_call(
            partial(body, plan),
            grid=(plan.tiles,),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
            compiler_params=plt.CompilerParams(num_warps=plan.warps, num_stages=1),
            interpret=target.interpret,
            name=name,
        )(*operands)

    if plan.tiles == 1:
        out = run(_one_tile, "route", groups + weights, source, *scalars)
        return (out[3] if weights else None), Groups(*out[:3])
    counts = [((plan.tiles, plan.groups), i32)]
    picked = run(_select_tile, "route_select", [(pair, i32), *counts, *weights], source, *scalars)
    out = run(_place_tile, "route_place", groups, *picked[:2])
    return (picked[2] if weights else None), Groups(*out)


def _one_tile(
    plan: _Plan, source: Any, num_tokens: Any, first: Any, slots: Any, rows: Any, blocks: Any, *weights: Any
) -> None:
    ids = _select(plan, source, num_tokens, first, weights)
    members = _members(plan, ids)
    count = members.sum(0)
    _place(plan, ids, members, jnp.zeros_like(count), count, slots, rows, blocks)


def _select_tile(
    plan: _Plan, source: Any, num_tokens: Any, first: Any, ids_ref: Any, counts: Any, *weights: Any
) -> None:
    ids = _select(plan, source, num_tokens, first, weights)
    at, ok = _choices(plan)
    plt.store(ids_ref.at[at], ids, mask=ok)
    g = _arange(plan.groups)
    plt.store(counts.at[pl.program_id(0), g], _members(plan, ids).sum(0), mask=g < plan.groups)


def _place_tile(plan: _Plan, ids_ref: Any, counts: Any, slots: Any, rows: Any, blocks: Any) -> None:
    at, ok = _choices(plan)
    ids = plt.load(ids_ref.at[at], mask=ok, other=-1)
    g = _arange(plan.groups)
    tile = pl.program_id(0)  # the interpreter knows it outside of loops only

    def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = i * CHUNK + _arange(CHUNK)
        mask = (at < plan.tiles)[:, None] & (g < plan.groups)[None]
        part = plt.load(counts.at[at[:, None], g[None]], mask=mask, other=0)
        earlier = jnp.where((at < tile)[:, None], part, 0)
        return sums[0] + earlier.sum(0), sums[1] + part.sum(0)

    zero = jnp.zeros(g.shape, jnp.int32)
    before, count = lax.fori_loop(0, pl.cdiv(plan.tiles, CHUNK), add, (zero, zero))
    _place(plan, ids, _members(plan, ids), before, count, slots, rows, blocks)


def _arange(least: int) -> jax.Array:
    """0, 1, ... of a size that a tile can have: a power of two, here of at least 16."""
    return jnp.arange(next_power_of_2(max(least, 16)), dtype=jnp.int32)


def _tile_tokens(plan: _Plan) -> jax.Array:
    return pl.program_id(0) * plan.tile + _arange(plan.tile)


def _columns(plan: _Plan) -> jax.Array:
    return jnp.arange(next_power_of_2(plan.top_k), dtype=jnp.int32)


def _choices(plan: _Plan) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Where the tile's part of an array [T, k] is, and which of it exists."""
    t, j = _tile_tokens(plan)[:, None], _columns(plan)[None]
    return (t, j), (t < plan.tokens) & (j < plan.top_k)


def _select(plan: _Plan, source: Any, num_tokens: Any, first: Any, weights: tuple[Any, ...]) -> jax.Array:
    """int32 [tile, k]: the group of each choice of the tile's tokens, -1: not here. Stores the weights."""
    at, ok = _choices(plan)
    if plan.experts:
        ids, values = _top_k(plan, source)
        plt.store(weights[0].at[at], values, mask=ok)
    else:
        ids = plt.load(source.at[at], mask=ok, other=-1)
    local = ids - first[0]
    here = ok & (at[0] < num_tokens[0]) & (local >= 0) & (local < plan.groups)
    return jnp.where(here, local, -1)


def _top_k(plan: _Plan, logits_ref: Any) -> tuple[jax.Array, jax.Array]:
    t, e, column = _tile_tokens(plan)[:, None], _arange(plan.experts)[None], _columns(plan)[None]
    known = e < plan.experts
    logits = plt.load(logits_ref.at[t, e], mask=(t < plan.tokens) & known, other=0.0)
    logits = jnp.where(known, logits, -jnp.inf)
    exp = jnp.exp(logits - logits.max(1)[:, None])
    left = jnp.where(known, exp / exp.sum(1)[:, None], -1.0)

    def pick(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, ids, values = carry
        best, now = jnp.argmax(left, axis=1).astype(jnp.int32)[:, None], column == j
        return (
            jnp.where(e == best, -1.0, left),
            jnp.where(now, best, ids),
            jnp.where(now, left.max(1)[:, None], values),
        )

    shape = (plan.tile, column.shape[1])
    start = (left, jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
    _, ids, values = lax.fori_loop(0, plan.top_k, pick, start)
    return ids, values / values.sum(1)[:, None] if plan.normalise else values


def _members(plan: _Plan, ids: jax.Array) -> jax.Array:
    """int32 [tile, G]: 1 where the token takes part in the group."""
    g, column = _arange(plan.groups)[None], _columns(plan)[None]

    def add(j: jax.Array, members: jax.Array) -> jax.Array:
        return members + (_column(ids, column == j)[:, None] == g).astype(jnp.int32)

    return lax.fori_loop(0, plan.top_k, add, jnp.zeros((plan.tile, g.shape[1]), jnp.int32))


def _column(values: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.where(chosen, values, 0).sum(1)


def _place(
    plan: _Plan,
    ids: jax.Array,
    members: jax.Array,
    before: jax.Array,  # int32 [G]  members of each group in earlier tiles
    count: jax.Array,  # int32 [G]  and in all
    slots: Any,
    rows: Any,
    blocks: Any,
) -> None:
    size = plan.block_rows
    g, column = _arange(plan.groups), _columns(plan)[None]
    of_group = (count + (size - 1)) // size
    ends = jnp.cumsum(of_group)
    starts = (ends - of_group) * size
    place = jnp.cumsum(members, axis=0) - members + (starts + before)[None]

    def find(j: jax.Array, found: jax.Array) -> jax.Array:
        group = _column(ids, column == j)[:, None]
        return jnp.where(column == j, _column(place, group == g[None])[:, None], found)

    slot = lax.fori_loop(0, plan.top_k, find, jnp.zeros(ids.shape, jnp.int32))
    at, ok = _choices(plan)
    plt.store(slots.at[at], jnp.where(ids >= 0, slot, -1), mask=ok)
    # Masked lanes point at a row that is never used: in the interpreter they write back what was there, after others
    # may have changed it.
    unused = jnp.int32(plan.blocks * size - 1)
    token = jnp.broadcast_to(at[0], ids.shape)
    plt.store(rows.at[jnp.where(ids >= 0, slot, unused)], token, mask=ids >= 0)

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        pad = jnp.arange(size, dtype=jnp.int32)[None]
        free = pad < (of_group * size - count)[:, None]
        at = jnp.where(free, (starts + count)[:, None] + pad, unused)
        plt.store(rows.at[at], jnp.full(at.shape, plan.tokens, jnp.int32), mask=free)

        def name(i: jax.Array, carry: jax.Array) -> jax.Array:
            at = i * CHUNK + _arange(CHUNK)
            group = (ends[None] <= at[:, None]).astype(jnp.int32).sum(1)
            plt.store(blocks.at[at], jnp.where(group < plan.groups, group, -1), mask=at < plan.blocks)
            return carry

        lax.fori_loop(0, pl.cdiv(plan.blocks, CHUNK), name, jnp.int32(0))
