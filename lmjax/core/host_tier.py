"""The second tier of the KV cache: blocks in host memory, found by the same names as those on the device.

Blocks go there when the device pool evicts them, so what stays cached on the device is never moved. A preempted request
whose KV is kept *wants* its blocks by name; they are written whenever they are evicted and stay until it is back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from struct import pack

import numpy as np

from lmjax.core.block_hash import DIGEST_BYTES
from lmjax.core.block_pool import BlockPool
from lmjax.core.plan import HostTierInfo
from lmjax.core.stats import SchedulerStats
from lmjax.core.swap_cost import SwapCosts
from lmjax.types import KVSpec

Transfer = tuple[int, int, int]  # group, source block, target block
# reads of a written block that count before anything was seen: one for eight written
_READS, _WRITES, _MOST_WRITES = 1.0, 8.0, 4096.0


def own_name(handle: int, epoch: int, col: int) -> bytes:
    """The name of a block that is one request's alone: it is not full, or no block has a name. Longer than a digest."""
    return pack("<qqq", handle, epoch, col)


@dataclass(slots=True, eq=False)
class Saved:
    """What a preempted request wants to find again: its first ``num_tokens`` tokens in blocks of these ``names``."""

    num_tokens: int
    names: list[bytes]
    swapped: bool = field(default=False)  # some of it went to the host


class HostTier:
    """One block pool per KV group, as on the device; ids name places in host memory. ``take`` gives the transfers of a
    plan; what the plan reads or gives up keeps its place until then."""

    def __init__(
        self,
        info: HostTierInfo,
        device_pools: list[BlockPool],
        specs: tuple[KVSpec, ...],
        size: int,
        stats: SchedulerStats,
    ):
        """size: tokens of a block."""
        self.pools = [BlockPool(n) for n in info.num_blocks]
        self.costs = SwapCosts(info)
        self._device_pools, self._block_size, self._stats = device_pools, size, stats
        self._block_bytes = [spec.bytes_per_token() * size for spec in specs]
        for group, pool in enumerate(device_pools):
            pool.on_evict = partial(self._evicted, group)
        # (when nothing is written, when something is): a transfer costs the same for one block as for a batch
        sizes = [(pool.evict_batch, min(info.batch, pool.num_blocks // 16)) for pool in device_pools]
        self._evict_batches = [(small, max(small, large)) for small, large in sizes]
        self._swaps_out: list[Transfer] = []
        self._swaps_in: list[Transfer] = []
        self._wanted: dict[bytes, list[Saved]] = {}
        self._pins: list[tuple[int, np.ndarray]] = []  # references that end with the plan
        self._dropped: list[bytes] = []  # names that end with the plan
        self._reads, self._writes = _READS, _WRITES

    @property
    def usage(self) -> float:
        """Share of the places that hold something (0-1)."""
        return max(len(pool.by_digest) / pool.num_usable for pool in self.pools)

    def take(self) -> tuple[list[Transfer], list[Transfer]]:
        """The transfers since the last call, out and in."""
        taken = self._swaps_out, self._swaps_in
        self._stats.swapped_out_blocks += len(taken[0])
        self._stats.swapped_in_blocks += len(taken[1])
        for transfers in taken:
            self._stats.swapped_bytes += sum(self._block_bytes[group] for group, _, _ in transfers)
        self._swaps_out, self._swaps_in = [], []
        self._settle()
        return taken

    def _settle(self) -> None:
        for name in self._dropped:
            for pool in self.pools:
                pool.forget(name)
        for group, blocks in self._pins:
            self.pools[group].release(blocks)
        self._dropped, self._pins = [], []

    # out

    def _evicted(self, group: int, blocks: np.ndarray) -> None:
        """Keeps those of the device's blocks (intp [n]) that lose their names and are worth it."""
        device, host, wanted = self._device_pools[group], self.pools[group], self._wanted
        kept = self._worth_keeping()
        device.evict_batch = self._evict_batches[group][kept or bool(wanted)]
        found = [(block, device.digests[block]) for block in blocks.tolist()]
        found = [(b, name) for b, name in found if name not in host.by_digest and (kept or name in wanted)]
        if kept and wanted:
            found.sort(key=lambda pair: pair[1] not in wanted)
        del found[host.num_free :]
        if not found:
            return
        places = host.allocate(len(found))
        names = [name for _, name in found]
        host.register(places, names)
        self._swaps_out += [(group, block, place) for (block, _), place in zip(found, places.tolist(), strict=True)]
        unwanted = [name not in wanted for name in names]
        if any(unwanted):
            self._pins.append((group, places[unwanted]))
            self._note_writes(sum(unwanted))
        for name in names:
            for saved in wanted.get(name, ()):
                if not saved.swapped:
                    saved.swapped = True
                    self._stats.swaps_out += 1

    def _worth_keeping(self) -> bool:
        """Whether a block that nobody waits for costs less to keep than it saves, as often as such blocks are read."""
        costs, batch = self.costs, self.costs.batch
        there = costs.swap_out(batch) * self._writes / self._reads
        return (there + costs.swap_in(batch)) / batch < costs.recompute(0, self._block_size)

    def _note_writes(self, n: int) -> None:
        self._writes += n
        if self._writes > _MOST_WRITES:
            self._reads, self._writes = max(self._reads / 2, _READS), self._writes / 2

    # wanted blocks

    def worth_saving(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving so many blocks out and back takes less time than computing their tokens again."""
        there_and_back = self.costs.swap_out(num_blocks) + self.costs.swap_in(num_blocks)
        return there_and_back < self.costs.recompute(0, num_tokens)

    def want(self, saved: Saved) -> None:
        """Blocks of these names are kept from now on, whether they are there or come later."""
        new = [name for name in saved.names if name not in self._wanted]
        for name in saved.names:
            self._wanted.setdefault(name, []).append(saved)
        for device, batches in zip(self._device_pools, self._evict_batches, strict=True):
            device.evict_batch = batches[True]
        for pool in self.pools:
            there = _places(pool, new)
            if len(there):
                pool.share(there)

    def drop(self, saved: Saved) -> None:
        """The request is back or gone. Blocks that were its alone lose their names in both tiers."""
        over = []
        for name in saved.names:
            holders = self._wanted[name]
            holders.remove(saved)
            if not holders:
                del self._wanted[name]
                over.append(name)
        for group, pool in enumerate(self.pools):
            there = _places(pool, over)
            if len(there):
                self._pins.append((group, there))
        own = [name for name in over if len(name) != DIGEST_BYTES]
        for name in own:
            for device in self._device_pools:
                device.forget(name)
        self._dropped += own
        if not self._swaps_out and not self._swaps_in:
            self._settle()

    def clear(self) -> None:
        """Nothing is kept any more, nor on its way. Who wanted something has dropped it, who runs holds no blocks."""
        assert not self._wanted, "somebody wants blocks"
        self._swaps_out, self._swaps_in = [], []
        self._settle()
        for pool in self.pools:
            pool.forget_unused()

    # in

    def bring(self, group: int, places: np.ndarray, blocks: np.ndarray) -> None:
        """Plans a transfer to device blocks (intp [n] both) and names them. ``pin`` came before."""
        names = [self.pools[group].digests[place] for place in places.tolist()]
        self._device_pools[group].register(blocks, names)
        self._swaps_in += [(group, *pair) for pair in zip(places.tolist(), blocks.tolist(), strict=True)]
        self._reads += sum(name not in self._wanted for name in names)

    def pin(self, group: int, places: np.ndarray) -> None:
        """These distinct places (intp [n]) are not given to anything else before the plan is taken."""
        self.pools[group].share(places)
        self._pins.append((group, places))

    def check_integrity(self) -> None:
        """Every reference is that of a wanted name or of a plan to come. Raises AssertionError."""
        for group, pool in enumerate(self.pools):
            pool.check_integrity()
            wanted = _places(pool, self._wanted)
            pinned = [blocks for g, blocks in self._pins if g == group]
            counts = np.bincount(np.concatenate((wanted, *pinned)), minlength=pool.num_blocks)
            assert np.array_equal(counts, pool.refs), f"references of group {group} in the host tier"
        assert all(self._wanted.values()), "a name that nobody wants"
        own = {name for pool in self._device_pools for name in pool.by_digest if len(name) != DIGEST_BYTES}
        assert own <= self._wanted.keys(), "a block on the device that was one request's alone"


def _places(pool: BlockPool, names: Iterable[bytes]) -> np.ndarray:
    get = pool.by_digest.get
    return np.array([place for name in names if (place := get(name))], np.intp)
