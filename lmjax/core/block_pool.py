"""The blocks of one KV group: reference counts, the free ones, and the cached ones that may be found again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container

import numpy as np


class BlockPool:
    """Block ids 1 .. num_blocks - 1; id 0 is the null block and never handed out.

    A block is used (references > 0), free, or cached-free: unused but still named by a digest. Cached-free blocks
    count as free and are evicted least recently released first. The LRU list is a queue of (stamp, ids) batches
    that is cleaned lazily: an id counts only while its block is unused and was not released again since. So taking and
    giving back n blocks are a few numpy calls and not n list operations. Ids are intp arrays: numpy converts any other
    index anew in each call.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a KV pool needs a null block and at least one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self.by_digest: dict[bytes, int] = {}
        self.digests = [b""] * num_blocks  # the other way round, where _named
        self._flags = bytearray(num_blocks)  # single blocks are set here, many are read as an array
        self._named = np.frombuffer(self._flags, bool)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.intp)
        self._num_stack = num_blocks - 1
        self._num_cached_free = 0
        self._num_extra = 0  # references beyond the first of all blocks
        self._lru: deque[tuple[int, np.ndarray]] = deque()
        self._num_entries = 0
        self._stamps = np.zeros(num_blocks, np.int64)
        self._clock = 0
        # told of named blocks (intp [n]) just before they lose their names; their content is still there
        self.on_evict: Callable[[np.ndarray], None] | None = None
        self.evict_batch = num_blocks // 64  # at least so many are evicted at once, which saves calls

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
        """``n`` block ids (intp [n]) with one reference each. The caller has checked ``num_free``."""
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
        used = int(np.count_nonzero(refs))
        self._num_cached_free -= len(refs) - used
        self._num_extra += used
        self.refs[ids] = refs + 1

    def release(self, ids: np.ndarray) -> None:
        """One reference less for each of the distinct ``ids``. Named blocks can be found still; the first of them is
        evicted first."""
        if self._num_extra:
            refs = self.refs[ids] - 1
            self.refs[ids] = refs
            ids = ids[refs == 0]
            self._num_extra -= len(refs) - len(ids)
        else:
            self.refs[ids] = 0
        named = self._named[ids]
        cached = ids[named]
        count = len(ids) - len(cached)
        if count:
            self._stack[self._num_stack : self._num_stack + count] = ids[~named]
            self._num_stack += count
        if len(cached):
            self._append_lru(cached)

    def register(self, ids: np.ndarray, digests: list[bytes]) -> None:
        """Names full blocks (int [n]; 0: none there). If another block has that name already, it keeps it."""
        by_digest, names, flags = self.by_digest, self.digests, self._flags
        for block, digest in zip(ids.tolist(), digests, strict=True):
            if block and digest not in by_digest:
                by_digest[digest] = block
                names[block] = digest
                flags[block] = True

    def name_of(self, block: int) -> bytes:
        """Empty: it has none."""
        return self.digests[block] if self._flags[block] else b""

    def forget(self, digest: bytes) -> None:
        """Takes a block's name away, if some block has it: nobody finds it any more."""
        block = self.by_digest.pop(digest, 0)
        if not block:
            return
        self._flags[block] = False
        self._stamps[block] = 0  # so its entry in the LRU list is dead
        if self.refs[block] == 0:
            self._num_cached_free -= 1
            self._stack[self._num_stack] = block
            self._num_stack += 1

    def forget_unused(self, kept: Container[bytes] = ()) -> None:
        """Takes the names of all unused blocks away, but for those in ``kept``. ``on_evict`` is not told."""
        ids = np.flatnonzero(self._named & (self.refs == 0))
        if kept:
            ids = ids[np.array([self.digests[block] not in kept for block in ids.tolist()], bool)]
        digests, by_digest = self.digests, self.by_digest
        for block in ids.tolist():
            del by_digest[digests[block]]
        self._named[ids] = False
        self._stamps[ids] = 0  # so their entries in the LRU list are dead
        self._num_cached_free -= len(ids)
        self._stack[self._num_stack : self._num_stack + len(ids)] = ids
        self._num_stack += len(ids)

    def num_cached_free_of(self, ids: np.ndarray) -> int:
        return len(ids) - int(np.count_nonzero(self.refs[ids]))

    def _append_lru(self, ids: np.ndarray) -> None:
        self._clock += 1
        self._stamps[ids] = self._clock
        self._lru.append((self._clock, ids))
        self._num_cached_free += len(ids)
        self._num_entries += len(ids)
        if self._num_entries > 2 * self.num_blocks:
            entries = [(stamp, batch[self._live(stamp, batch)]) for stamp, batch in self._lru]
            self._lru = deque(entry for entry in entries if len(entry[1]))
            self._num_entries = self._num_cached_free

    def _live(self, stamp: int, ids: np.ndarray) -> np.ndarray:
        return (self.refs[ids] == 0) & (self._stamps[ids] == stamp)

    def _evict(self, n: int) -> None:
        """Moves at least ``n`` cached-free blocks to the free ones, or ``evict_batch`` if there are so many."""
        missing = n = min(max(n, self.evict_batch), self._num_cached_free)
        found: list[np.ndarray] = []
        while missing:
            stamp, ids = self._lru.popleft()
            self._num_entries -= len(ids)
            ids = ids[self._live(stamp, ids)]
            if len(ids) > missing:
                self._lru.appendleft((stamp, ids[missing:]))
                self._num_entries += len(ids) - missing
                ids = ids[:missing]
            found.append(ids)
            missing -= len(ids)
        ids = found[0] if len(found) == 1 else np.concatenate(found)
        if self.on_evict is not None:
            self.on_evict(ids)
        digests, by_digest = self.digests, self.by_digest
        for block in ids.tolist():
            del by_digest[digests[block]]
        self._named[ids] = False
        self._stamps[ids] = 0
        self._num_cached_free -= n
        self._stack[self._num_stack : self._num_stack + n] = ids[::-1]
        self._num_stack += n

    def check_integrity(self) -> None:
        """free + cached-free + used = all, names both ways, LRU complete. Raises AssertionError."""
        stack = self._stack[: self._num_stack]
        live = [ids[self._live(stamp, ids)] for stamp, ids in self._lru]
        lru = np.concatenate(live) if live else np.zeros(0, np.intp)
        unused = np.flatnonzero(self.refs[1:] == 0) + 1
        assert (self.refs >= 0).all() and self.refs[0] == 0, "reference counts"
        assert self._num_extra == int(np.maximum(self.refs - 1, 0).sum()), "number of shared references"
        assert len(lru) == self._num_cached_free, "number of cached-free blocks"
        listed = np.sort(np.concatenate((stack, lru)))
        assert np.array_equal(listed, unused), "free and cached-free blocks are not the unused ones"
        assert not self._named[stack].any() and self._named[lru].all(), "a free block is named"
        assert np.array_equal(np.flatnonzero(self._named), sorted(self.by_digest.values())), "names of blocks"
        assert all(self.digests[block] == digest for digest, block in self.by_digest.items()), "digests of blocks"
