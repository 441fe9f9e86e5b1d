"""Block tables of the running requests over one pool per KV group."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmjax.core.block_pool import BlockPool
from lmjax.core.host_tier import HostTier
from lmjax.types import KVSpec


@dataclass(slots=True)
class PrefixHit:
    """``num_blocks`` leading blocks of a prompt whose first ``num_tokens`` tokens need not be computed.

    ``blocks``: their ids on the device per group, 0 where a window group does not need the block any more, or where it
    is in the host tier; ``places``: their ids there, 0 elsewhere (empty: none is).
    """

    num_blocks: int
    num_tokens: int
    blocks: list[list[int]]
    places: list[list[int]] = field(default_factory=list)

    @property
    def num_places(self) -> int:
        """Blocks to be brought from the host, of the group with the most."""
        return max((len(ids) - ids.count(0) for ids in self.places), default=0)


NO_HIT = PrefixHit(0, 0, [])


@dataclass(slots=True)
class _Either:
    """Names that are in one of two places."""

    here: Container[bytes]
    there: Container[bytes]

    def __contains__(self, name: object) -> bool:
        return name in self.here or name in self.there


class KVManager:
    """``tables`` [G, S, P]: the block of each column (position // block size) of each slot, 0 where there is none.

    All groups have the same columns. In a window group the columns that no later token sees are given back: the
    columns in use are ``first_col`` .. ``num_cols`` - 1. Changes go to ``patches`` for the device's copy.
    """

    def __init__(self, specs: tuple[KVSpec, ...], num_blocks: tuple[int, ...], block_size: int, slots: int, cols: int):
        self.block_size = block_size
        self.pools = [BlockPool(n) for n in num_blocks]
        self.tier: HostTier | None = None
        self.windows = [spec.window if spec.kind == "window" else None for spec in specs]
        self.window_groups = [g for g, window in enumerate(self.windows) if window is not None]
        self.full_groups = [g for g, window in enumerate(self.windows) if window is None]
        self.tables = np.zeros((len(specs), slots, cols), np.int32)
        self.num_cols = np.zeros(slots, np.intp)
        self.capacity = np.zeros(slots, np.int32)  # num_cols * block_size: tokens that have room
        self.first_col = np.zeros((len(specs), slots), np.int32)
        self._patches = np.empty((64, 4), np.int32)
        self._num_patches = 0
        self._patch_rows = np.zeros((len(specs), cols, 4), np.int32)
        self._patch_rows[:, :, 0] = np.arange(len(specs))[:, None]
        self._patch_rows[:, :, 2] = np.arange(cols)

    # room

    @property
    def num_free(self) -> int:
        """Columns that can still be added, over all requests."""
        if len(self.pools) == 1:
            return self.pools[0].num_free
        return min(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        return max(pool.num_used / pool.num_usable for pool in self.pools)

    def cols(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_visible_col(self, window: int, start: int) -> int:
        """First column that a row starting at position ``start`` reads."""
        return max(0, start - window + 1) // self.block_size

    def peak_cols(self, group: int, num_tokens: int, chunk: int) -> int:
        """Most blocks that a request of ``num_tokens`` holds at once if it is computed ``chunk`` tokens a step."""
        window = self.windows[group]
        cols = self.cols(num_tokens)
        if window is None:
            return cols
        return min(cols, self.cols(window - 1 + chunk) + 1)

    def ever_fits(self, num_tokens: int, chunk: int) -> bool:
        return all(self.peak_cols(g, num_tokens, chunk) <= pool.num_usable for g, pool in enumerate(self.pools))

    def longest_chunked(self) -> int:
        """The most tokens that ``ever_fits`` with chunks of one token."""
        fitting = bisect_left(
            range(self.tables.shape[2] * self.block_size + 1), True, key=lambda n: not self.ever_fits(n, 1)
        )
        return fitting - 1

    def fits_now(self, num_tokens: int, hit: PrefixHit, chunk: int) -> bool:
        """Whether a waiting request can be computed with what is free, without preempting others on the way."""
        for g, pool in enumerate(self.pools):
            need = self.peak_cols(g, num_tokens, chunk)
            if hit.num_blocks:
                used = np.array([block for block in hit.blocks[g] if block], np.intp)
                need = max(1, need - len(used)) + pool.num_cached_free_of(used)
            if need > pool.num_free:
                return False
        return True

    # prefix cache

    def lookup(self, digests: list[bytes], both: bool = True) -> PrefixHit:
        """The longest prefix of ``digests`` that is there: whole in full groups, the last window in window groups.

        both: look in the host tier, too, if there is one.
        """
        n = len(digests)
        names = self._names(both)
        if n and self.full_groups and digests[0] not in names[self.full_groups[0]]:
            return NO_HIT
        for g in self.full_groups:
            there = names[g]
            n = next((i for i in range(n) if digests[i] not in there), n)
        while True:
            fitting = n
            for g in self.window_groups:
                fitting = self._window_hit(g, digests, fitting, names[g])
            if fitting == n:
                break
            n = fitting
        if not n:
            return NO_HIT
        return self._hit(digests[:n], n * self.block_size)

    def resume(self, names: list[bytes], num_tokens: int) -> PrefixHit:
        """The blocks of ``names`` in either tier, as far as a row at position ``num_tokens`` reads them; ``NO_HIT`` if
        one is missing."""
        there = self._names(both=True)
        for g in range(len(self.pools)):
            if any(name not in there[g] for name in names[self._first_col(g, len(names), num_tokens) :]):
                return NO_HIT
        return self._hit(names, num_tokens)

    def _names(self, both: bool) -> Sequence[Container[bytes]]:
        """Per group: what can be found."""
        here = [pool.by_digest for pool in self.pools]
        if self.tier is None or not both:
            return here
        return [_Either(names, pool.by_digest) for names, pool in zip(here, self.tier.pools, strict=True)]

    def _first_col(self, group: int, n: int, start: int) -> int:
        """First of ``n`` columns that a row at position ``start`` reads."""
        window = self.windows[group]
        return 0 if window is None else min(n, self.first_visible_col(window, start))

    def _hit(self, names: list[bytes], num_tokens: int) -> PrefixHit:
        """All of ``names`` are there."""
        n = len(names)
        firsts = [self._first_col(g, n, num_tokens) for g in range(len(self.pools))]
        blocks = [
            [0] * first + [pool.by_digest.get(name, 0) for name in names[first:]]
            for pool, first in zip(self.pools, firsts, strict=True)
        ]
        hit = PrefixHit(n, num_tokens, blocks)
        if self.tier is not None and any(0 in ids[first:] for ids, first in zip(blocks, firsts, strict=True)):
            for pool, ids, first in zip(self.tier.pools, blocks, firsts, strict=True):
                pairs = zip(names[first:], ids[first:], strict=True)
                hit.places.append([0] * first + [0 if block else pool.by_digest[name] for name, block in pairs])
        return hit

    def _window_hit(self, group: int, digests: list[bytes], most: int, by_digest: Container[bytes]) -> int:
        """Largest n <= most whose last window is in ``by_digest``, which has the names of ``group``."""
        window = self.windows[group]
        assert window is not None
        n = col = most
        while col > self.first_visible_col(window, n * self.block_size):
            col -= 1
            if digests[col] not in by_digest:
                n = col
        return n

    def register(self, slot: int, digests: list[bytes], first: int, end: int) -> None:
        """Names the blocks of columns ``first`` .. ``end`` - 1 of one slot."""
        for g, pool in enumerate(self.pools):
            pool.register(self.tables[g, slot, first:end], digests[first:end])

    def register_each(self, slots: np.ndarray, cols: np.ndarray, digests: list[bytes]) -> None:
        """Names one block of each of ``slots``, that of column ``cols``."""
        for g, pool in enumerate(self.pools):
            pool.register(self.tables[g][slots, cols], digests)

    def name_own(self, slot: int, first: int, names: list[bytes]) -> list[bytes]:
        """Names a slot's blocks from column ``first`` on where they have no name yet. Returns the names they have."""
        found = []
        for col, name in enumerate(names, first):
            blocks = [int(group[slot, col]) for group in self.tables]
            shared = (p.name_of(block) for p, block in zip(self.pools, blocks, strict=True) if block)
            name = next(filter(None, shared), name)
            for pool, block in zip(self.pools, blocks, strict=True):
                if block and not pool.name_of(block):
                    pool.register(np.array([block], np.intp), [name])
            found.append(name)
        return found

    # blocks of a slot

    def open(self, slot: int, hit: PrefixHit) -> None:
        """Starts a slot's table with the blocks of a prefix hit."""
        n = hit.num_blocks
        if not n:
            return
        tables = [np.array(ids, np.intp) for ids in hit.blocks]
        for pool, blocks in zip(self.pools, tables, strict=True):
            pool.share(blocks[blocks > 0])
        if hit.places:
            self._bring(hit, tables)
        for g, blocks in enumerate(tables):
            self.first_col[g, slot] = n - int(np.count_nonzero(blocks))
            self._set(g, slot, 0, blocks)
        self._set_cols(slot, n)

    def _bring(self, hit: PrefixHit, tables: list[np.ndarray]) -> None:
        """Fills ``tables`` (intp [P] per group) with new blocks for what is in the host tier."""
        assert self.tier is not None
        places = [np.array(ids, np.intp) for ids in hit.places]
        for g, ids in enumerate(places):  # before allocating: that may evict, which needs places
            self.tier.pin(g, ids[ids > 0])
        for g, ids in enumerate(places):
            cols = ids.nonzero()[0]
            if len(cols):
                tables[g][cols] = self.pools[g].allocate(len(cols))
                self.tier.bring(g, ids[cols], tables[g][cols])

    def grow(self, slot: int, num_tokens: int) -> None:
        """Adds columns until there is room for ``num_tokens``. The caller has checked ``num_free``."""
        first = int(self.num_cols[slot])
        new = self.cols(num_tokens) - first
        if new > 0:
            for g, pool in enumerate(self.pools):
                self._set(g, slot, first, pool.allocate(new))
            self._set_cols(slot, first + new)

    def grow_each(self, slots: np.ndarray) -> None:
        """Adds one column to each of ``slots`` (int [n]). The caller has checked ``num_free``."""
        cols = self.num_cols[slots]
        for g, pool in enumerate(self.pools):
            ids = pool.allocate(len(slots))
            self.tables[g, slots, cols] = ids
            patches = self._more_patches(len(slots))
            self._patch_rows[g].take(cols, axis=0, out=patches, mode="clip")
            patches[:, 1] = slots
            patches[:, 3] = ids
        cols = cols + 1
        self.num_cols[slots] = cols
        self.capacity[slots] = cols * self.block_size

    def free_behind(self, slot: int, start: int) -> None:
        """Gives back what a row at position ``start``, and all later ones, cannot see in window groups."""
        for g in self.window_groups:
            window = self.windows[g]
            assert window is not None
            first = int(self.first_col[g, slot])
            end = min(self.first_visible_col(window, start), int(self.num_cols[slot]))
            if end > first:
                self.pools[g].release(self.tables[g, slot, first:end].astype(np.intp))
                self._set(g, slot, first, np.zeros(end - first, np.int32))
                self.first_col[g, slot] = end

    def can_fork(self, leader: int, start: int) -> bool:
        """Whether the leader still has all blocks that a row at position ``start`` reads."""
        for g in self.window_groups:
            window = self.windows[g]
            assert window is not None
            if self.first_col[g, leader] > self.first_visible_col(window, start):
                return False
        return True

    def fork(self, leader: int, slot: int, start: int) -> list[tuple[int, int, int]]:
        """Starts a slot's table so that position ``start`` can be computed: the leader's full blocks before it are
        shared, the block that ``start`` falls in is copied. Returns the copies (group, source, target)."""
        n = start // self.block_size
        copies = []
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            first = 0 if window is None else min(n, self.first_visible_col(window, start))
            blocks = self.tables[g, leader, :n].astype(np.intp)
            blocks[:first] = 0
            pool.share(blocks[first:])
            self.first_col[g, slot] = first
            target = pool.allocate(1)
            self._set(g, slot, 0, np.concatenate((blocks, target)))
            if start % self.block_size:
                copies.append((g, int(self.tables[g, leader, n]), int(target[0])))
        self._set_cols(slot, n + 1)
        return copies

    def close(self, slot: int) -> None:
        """Gives back all blocks of a slot. The end of the sequence is evicted before its beginning."""
        end = int(self.num_cols[slot])
        for g, pool in enumerate(self.pools):
            first = int(self.first_col[g, slot])
            if end > first:
                blocks = self.tables[g, slot, first:end]
                pool.release(blocks[::-1].astype(np.intp))
                blocks[:] = 0
        self._set_cols(slot, 0)
        if self.window_groups:
            self.first_col[:, slot] = 0

    # patches

    def take_patches(self) -> np.ndarray:
        """int32 [M, 4] (group, slot, column, block): what changed in the tables since the last call."""
        patches = self._patches[: self._num_patches].copy()
        self._num_patches = 0
        return patches

    def _more_patches(self, n: int) -> np.ndarray:
        """int32 [n, 4]: room for ``n`` more, to be filled."""
        first, end = self._num_patches, self._num_patches + n
        if end > len(self._patches):
            self._patches = np.concatenate((self._patches, np.empty((end, 4), np.int32)))
        self._num_patches = end
        return self._patches[first:end]

    def _set(self, group: int, slot: int, first: int, blocks: np.ndarray) -> None:
        n = len(blocks)
        if n:
            self.tables[group, slot, first : first + n] = blocks
            patches = self._more_patches(n)
            patches[:] = self._patch_rows[group, first : first + n]
            patches[:, 1] = slot
            patches[:, 3] = blocks

    def _set_cols(self, slot: int, cols: int) -> None:
        self.num_cols[slot] = cols
        self.capacity[slot] = cols * self.block_size

    def check_integrity(self) -> None:
        """Every reference of every pool is an entry of a table, and the other way round."""
        for g, pool in enumerate(self.pools):
            pool.check_integrity()
            used = self.tables[g][self.tables[g] > 0]
            counts = np.bincount(used, minlength=pool.num_blocks).astype(np.int32)
            assert np.array_equal(counts, pool.refs), f"reference counts of group {g}"
            cols = np.arange(self.tables.shape[2])[None, :]
            open_cols = (cols >= self.first_col[g][:, None]) & (cols < self.num_cols[:, None])
            assert np.array_equal(self.tables[g] > 0, open_cols), f"table of group {g}"
        if self.tier is not None:
            self.tier.check_integrity()
