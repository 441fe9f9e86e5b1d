"""The blocks of one KV group: reference counts, the free ones, and the cached ones that may be found again."""

from __future__ import annotations

import numpy as np


class BlockPool:
    """Block ids 1 .. num_blocks - 1; id 0 is the null block and never handed out.

    A block is used (references > 0), free, or cached-free: unused but still named by a digest. Cached-free blocks
    count as free and are evicted least recently released first. The LRU list is a queue of (id, stamp) entries that
    is cleaned lazily: an entry counts only while the block is unused and was not released again since. So taking and
    giving back n blocks are a few numpy calls and not n list operations.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a KV pool needs a null block and at least one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self.by_digest: dict[bytes, int] = {}
        self.digests: list[bytes | None] = [None] * num_blocks
        self.named = np.zeros(num_blocks, bool)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_stack = num_blocks - 1
        self._num_cached_free = 0
        self._lru_ids = np.zeros(2 * num_blocks, np.int32)
        self._lru_stamps = np.zeros(2 * num_blocks, np.int64)
        self._head = self._tail = 0
        self._stamps = np.zeros(num_blocks, np.int64)
        self._clock = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return self._num_stack + self._num_cached_free

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def allocate(self, n: int) -> np.ndarray:
        """``n`` block ids (int32 [n]) with one reference each. The caller has checked ``num_free``."""
        if n > self.num_free:
            raise RuntimeError(f"{n} blocks wanted, {self.num_free} free")
        if n > self._num_stack:
            self._evict(n - self._num_stack)
        self._num_stack -= n
        ids = self._stack[self._num_stack : self._num_stack + n].copy()
        self.refs[ids] = 1
        return ids

    def share(self, ids: np.ndarray) -> None:
        """One more reference for each of the distinct ``ids`` (used or cached-free)."""
        refs = self.refs[ids]
        self._num_cached_free -= len(refs) - int(np.count_nonzero(refs))
        self.refs[ids] = refs + 1

    def release(self, ids: np.ndarray) -> None:
        """One reference less for each of the distinct ``ids``. Named blocks can be found still; the first of them is
        evicted first."""
        refs = self.refs[ids] - 1
        self.refs[ids] = refs
        gone = ids if not refs.any() else ids[refs == 0]
        if not len(gone):
            return
        named = self.named[gone]
        cached = gone[named]
        if len(cached) < len(gone):
            plain = gone[~named] if len(cached) else gone
            self._stack[self._num_stack : self._num_stack + len(plain)] = plain
            self._num_stack += len(plain)
        if len(cached):
            self._append_lru(cached)

    def register(self, blocks: list[int], digests: list[bytes]) -> None:
        """Names full blocks (0: none there). If another block has that name already, it keeps it."""
        by_digest, names = self.by_digest, self.digests
        new = []
        for block, digest in zip(blocks, digests, strict=True):
            if block and digest not in by_digest:
                by_digest[digest] = block
                names[block] = digest
                new.append(block)
        if new:
            self.named[new] = True

    def num_cached_free_of(self, ids: np.ndarray) -> int:
        return len(ids) - int(np.count_nonzero(self.refs[ids]))

    def _append_lru(self, ids: np.ndarray) -> None:
        n = len(ids)
        if self._tail + n > len(self._lru_ids):
            self._compact_lru()
        self._clock += 1
        at = slice(self._tail, self._tail + n)
        self._lru_ids[at] = ids
        self._lru_stamps[at] = self._clock
        self._stamps[ids] = self._clock
        self._tail += n
        self._num_cached_free += n

    def _compact_lru(self) -> None:
        # live entries are distinct unused blocks: at most num_usable of a buffer of twice that
        at = slice(self._head, self._tail)
        live = self._live(at)
        ids, stamps = self._lru_ids[at][live], self._lru_stamps[at][live]
        self._head, self._tail = 0, len(ids)
        self._lru_ids[: len(ids)] = ids
        self._lru_stamps[: len(ids)] = stamps

    def _live(self, at: slice) -> np.ndarray:
        ids = self._lru_ids[at]
        return (self.refs[ids] == 0) & (self._stamps[ids] == self._lru_stamps[at])

    def _evict(self, n: int) -> None:
        """Moves at least ``n`` cached-free blocks to the free ones; some more in a large pool, which saves calls."""
        missing = n = min(max(n, self.num_blocks // 64), self._num_cached_free)
        found: list[np.ndarray] = []
        while missing:
            if self._head == self._tail:
                raise RuntimeError("the LRU list lost a cached-free block")
            end = min(self._head + 2 * missing + 16, self._tail)
            at = np.flatnonzero(self._live(slice(self._head, end)))[:missing]
            if len(at):
                found.append(self._lru_ids[self._head + at])
                missing -= len(at)
            self._head = end if missing else self._head + int(at[-1]) + 1
        ids = found[0] if len(found) == 1 else np.concatenate(found)
        digests, by_digest = self.digests, self.by_digest
        for block in ids.tolist():
            del by_digest[digests[block]]  # type: ignore[arg-type]
            digests[block] = None
        self.named[ids] = False
        self._stamps[ids] = 0
        self._num_cached_free -= n
        self._stack[self._num_stack : self._num_stack + n] = ids[::-1]
        self._num_stack += n

    def check_integrity(self) -> None:
        """free + cached-free + used = all, names both ways, LRU complete. Raises AssertionError."""
        stack = self._stack[: self._num_stack]
        lru_at = slice(self._head, self._tail)
        lru = self._lru_ids[lru_at][self._live(lru_at)]
        unused = np.flatnonzero(self.refs[1:] == 0) + 1
        assert (self.refs >= 0).all() and self.refs[0] == 0, "reference counts"
        assert len(lru) == self._num_cached_free, "number of cached-free blocks"
        listed = np.sort(np.concatenate((stack, lru)))
        assert np.array_equal(listed, unused), "free and cached-free blocks are not the unused ones"
        assert not self.named[stack].any() and self.named[lru].all(), "a free block is named"
        assert np.array_equal(np.flatnonzero(self.named), sorted(self.by_digest.values())), "names of blocks"
        for digest, block in self.by_digest.items():
            assert self.digests[block] == digest, "digest of a named block"
