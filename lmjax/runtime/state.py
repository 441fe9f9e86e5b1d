"""Device state by request slot, and the small programs that change it between forwards.

Slot ``max_num_seqs`` is the dummy slot: padding rows read and write there, and its block table is all null block.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import struct

from lmjax.core.plan import SlotLoad
from lmjax.runtime.inputs import aligned_zeros
from lmjax.sampling.params import encode_state

COPY_BATCH = 16  # block copies of one call
SWAP_BATCH = 16  # blocks of each group that one call moves between the device and the host
# Such calls that may wait for their transfer, each way; one more waits itself. Their blocks lie beside the pools.
MOST_WAITING = 4


@struct.dataclass
class DeviceState:
    tokens: jax.Array  # int32 [slots + 1, max_model_len]  token ids by position
    tables: jax.Array  # int32 [G, slots + 1, P]  block ids
    sampling: jax.Array  # int32 [slots + 1, W]  what the feature level "full" needs of a request
    # With pipeline stages tables are [stages, G, slots + 1, P], and this is [stages, most tokens of a step, D]: the
    # hidden states that came from the stage before.
    hidden: jax.Array | None = None


def apply_patches(tables: jax.Array, patches: jax.Array) -> jax.Array:
    """tables: int32 [G, slots + 1, P]; patches: int32 [M, 4] of (group, slot, column, block), places distinct but for
    the padding, which writes the null block into the dummy slot."""
    group, slot, column, block = (patches[:, i] for i in range(4))
    return tables.at[group, slot, column].set(block, mode="promise_in_bounds")


def load_slot(tokens: jax.Array, sampling: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sets a slot's token history and sampling state. packed: int32 [1 + W + max_model_len], the slot first."""
    width = sampling.shape[1]
    slot, state, history = packed[0], packed[1 : 1 + width], packed[1 + width :]
    return tokens.at[slot].set(history), sampling.at[slot].set(state)


def pack_slot(load: SlotLoad, vocab_size: int, max_model_len: int) -> np.ndarray:
    """The ``packed`` argument of ``load_slot``."""
    state = encode_state(load, vocab_size)
    packed = aligned_zeros(1 + len(state) + max_model_len)
    packed[0] = load.slot
    packed[1 : 1 + len(state)] = state
    packed[1 + len(state) : 1 + len(state) + len(load.history)] = load.history
    return packed


def _each(function: Any, pools: tuple[Any, ...], *others: Any) -> tuple[Any, ...]:
    """``function`` of the arrays of each group's pool: its elements [L, 2, blocks, K, B, H], and [..., B] their scales
    if it has some. others: one a group; arrays like the pool's, or int32 [n, 2] for all of them."""
    out = []
    for pool, *rest in zip(pools, *others, strict=True):
        arrays, tree = jax.tree.flatten(pool)
        structure: Any = tree
        more = [jax.tree.leaves(x) if jax.tree.structure(x) == structure else [x] * len(arrays) for x in rest]
        out.append(jax.tree.unflatten(tree, [function(*parts) for parts in zip(arrays, *more, strict=True)]))
    return tuple(out)


def copy_blocks(pools: tuple[Any, ...], pairs: jax.Array) -> tuple[Any, ...]:
    """Copies whole blocks within each pool ([L, 2, blocks, K, B, H]).

    pairs: int32 [G, COPY_BATCH, 2] of (source, target); padding copies the null block onto itself.
    """

    def copy(pool: jax.Array, pair: jax.Array) -> jax.Array:
        return pool.at[:, :, pair[:, 1]].set(pool[:, :, pair[:, 0]], mode="promise_in_bounds")

    return _each(copy, pools, pairs)


def swap_out(pools: tuple[Any, ...], pairs: jax.Array) -> tuple[Any, ...]:
    """Blocks of each pool ([L, 2, blocks, K, B, H]) on their way to the host: [L, 2, SWAP_BATCH, K, B, H].

    pairs: int32 [G, SWAP_BATCH, 2] of (block, place in the host pool); padding reads the null block.
    """
    return _each(lambda pool, pair: pool.at[:, :, pair[:, 0]].get(mode="promise_in_bounds"), pools, pairs)


def swap_in(pools: tuple[Any, ...], blocks: tuple[Any, ...], pairs: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
    """Writes blocks from the host into each pool ([L, 2, blocks, K, B, H]).

    blocks: [L, 2, SWAP_BATCH, K, B, H] a pool; pairs: int32 [G, SWAP_BATCH, 2] of (place in the host pool, block);
    padding writes into the null block. Also returns an int32 [G] that is ready when ``blocks`` was read.
    """

    def put(pool: jax.Array, new: jax.Array, pair: jax.Array) -> jax.Array:
        return pool.at[:, :, pair[:, 1]].set(new, mode="promise_in_bounds")

    return _each(put, pools, blocks, pairs), pairs[:, 0, 1]


def pack_swaps(swaps: list[tuple[int, int, int]], num_groups: int) -> list[np.ndarray]:
    """The ``pairs`` arguments of the calls that carry out ``swaps`` (group, source, target); targets are distinct."""
    if not swaps:
        return []
    by_group = [[pair for g, *pair in swaps if g == group] for group in range(num_groups)]
    batches: list[np.ndarray] = []
    for first in range(0, max(map(len, by_group), default=0), SWAP_BATCH):
        pairs = aligned_zeros(num_groups * SWAP_BATCH * 2).reshape(num_groups, SWAP_BATCH, 2)
        for group, found in enumerate(by_group):
            some = found[first : first + SWAP_BATCH]
            if some:
                pairs[group, : len(some)] = some
        batches.append(pairs)
    return batches


def pack_copies(copies: list[tuple[int, int, int]], num_groups: int) -> list[np.ndarray]:
    """The ``pairs`` arguments of the ``copy_blocks`` calls that carry out ``copies`` in order.

    One call reads all its sources before it writes, so a copy that reads or writes an earlier one's target starts
    a new call.
    """
    batches: list[np.ndarray] = []
    used: dict[int, int] = {}
    targets: set[tuple[int, int]] = set()
    for group, source, target in copies:
        clash = (group, source) in targets or (group, target) in targets
        if not batches or clash or used.get(group, 0) == COPY_BATCH:
            batches.append(aligned_zeros(num_groups * COPY_BATCH * 2).reshape(num_groups, COPY_BATCH, 2))
            used, targets = {}, set()
        batches[-1][group, used.get(group, 0)] = source, target
        used[group] = used.get(group, 0) + 1
        targets.add((group, target))
    return batches
