"""Where KV blocks are kept in host memory: each process has the shards of its own devices, so bytes never leave it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lmjax.runtime.inputs import ALIGN_BYTES
from lmjax.runtime.state import MOST_WAITING, SWAP_BATCH

if TYPE_CHECKING:
    from lmjax.runtime.device import Device


_TIMED = 4  # transfers each way at the start

Staging = list[dict[jax.Device, np.ndarray]]  # per array and local device: [L, 2, SWAP_BATCH, K, B, H]


class HostPool:
    """The places that ``swap_out`` and ``swap_in`` calls name. A place is one block of all layers, contiguous.

    What leaves the device is copied into its place when it has arrived: later, unless somebody needs it. What goes
    back is gathered in a staging buffer first, so a place may be written again at once.

    A group's pool is one array, or two: elements of 1 byte and their scales [L, 2, blocks, K, B].

    Of a pipeline, ``pairs`` have one more axis in front, [stages, G, SWAP_BATCH, 2]: a stage's devices have their own.
    """

    def __init__(self, pools: tuple[Any, ...], num_blocks: tuple[int, ...]) -> None:
        """pools: the device's, [L, 2, blocks, K, B, H]; num_blocks: places of each group, the null block included."""
        self._groups = [g for g, pool in enumerate(pools) for _ in jax.tree.leaves(pool)]  # of each array
        arrays, self._tree = jax.tree.flatten(pools)
        places = [num_blocks[g] for g in self._groups]
        self._shardings = [array.sharding for array in arrays]
        self._shapes = [(*array.shape[:2], SWAP_BATCH, *array.shape[3:]) for array in arrays]
        self._places: list[dict[jax.Device, np.ndarray]] = []  # per array and local device: [places, L, 2, K, B, H]
        for array, n in zip(arrays, places, strict=True):
            shapes = {shard.device: shard.data.shape for shard in array.addressable_shards}
            self._places.append({d: np.empty((n, *s[:2], *s[3:]), array.dtype) for d, s in shapes.items()})
        self._stages = {  # which part of the layers a device has
            shard.device: (shard.index[0].start or 0) // shard.data.shape[0] for shard in arrays[0].addressable_shards
        }
        self._arriving: list[tuple[list[Any], np.ndarray]] = []  # arrays, and the places they go to
        self._staged: list[tuple[Staging, Any]] = []  # and an array that is ready when it was read; None: not asked yet

    def keep(self, blocks: tuple[Any, ...], pairs: np.ndarray) -> None:
        """blocks: [L, 2, SWAP_BATCH, K, B, H] a group, on their way; pairs: int32 [G, SWAP_BATCH, 2] of (block, place),
        place 0: none."""
        arrays = jax.tree.leaves(blocks)
        for array in arrays:
            array.copy_to_host_async()
        self._arriving.append((arrays, _by_stage(pairs)[..., 1].copy()))
        while len(self._arriving) > MOST_WAITING:
            self._land()

    def land_ready(self) -> None:
        """Puts in place what has arrived."""
        while self._arriving and all(array.is_ready() for array in self._arriving[0][0]):
            self._land()

    def _land(self) -> None:
        """Waits for the transfer that was started first."""
        arrays, places = self._arriving.pop(0)
        for g, array, there in zip(self._groups, arrays, self._places, strict=True):
            for shard in array.addressable_shards:
                data, kept = np.asarray(shard.data), there[shard.device]
                for i, place in enumerate(places[self._stages[shard.device], g].tolist()):
                    if place:
                        kept[place] = data[:, :, i]

    def stage(self, pairs: np.ndarray) -> tuple[Any, ...]:
        """The places of ``pairs`` (int32 [G, SWAP_BATCH, 2] of (place, block)) as arrays for the device,
        [L, 2, SWAP_BATCH, K, B, H] a group; what is padding may hold anything. ``staged`` follows."""
        places = _by_stage(pairs)[..., 0]
        self._wait_for(places)
        staging = self._staging()
        found = []
        for n, g in enumerate(self._groups):
            for device, buffer in staging[n].items():
                kept = self._places[n][device]
                for i, place in enumerate(places[self._stages[device], g].tolist()):
                    if place:
                        buffer[:, :, i] = kept[place]
            arrays = [jax.device_put(buffer, device) for device, buffer in staging[n].items()]
            found.append(jax.make_array_from_single_device_arrays(self._shapes[n], self._shardings[n], arrays))
        self._staged.append((staging, None))
        return jax.tree.unflatten(self._tree, found)

    def staged(self, done: jax.Array) -> None:
        """done: ready when the program that reads what was staged last has run."""
        self._staged[-1] = (self._staged[-1][0], done)

    def land_all(self) -> None:
        """Waits for everything that is on its way here."""
        while self._arriving:
            self._land()

    def wait(self) -> None:
        """Waits for everything that is on its way to the device."""
        for _, done in self._staged:
            if done is not None:
                done.block_until_ready()

    def _wait_for(self, places: np.ndarray) -> None:
        while any(np.isin(places, arriving)[places > 0].any() for _, arriving in self._arriving):
            self._land()

    def _staging(self) -> Staging:
        """Buffers that no program reads any more."""
        if len(self._staged) >= MOST_WAITING:
            staging, done = self._staged.pop(0)
            assert done is not None
            done.block_until_ready()
            return staging
        if self._staged and self._staged[0][1] is not None and self._staged[0][1].is_ready():
            return self._staged.pop(0)[0]
        return [
            {d: _aligned((*kept.shape[1:3], SWAP_BATCH, *kept.shape[3:]), kept.dtype) for d, kept in there.items()}
            for there in self._places
        ]


def _by_stage(pairs: np.ndarray) -> np.ndarray:
    return pairs.reshape(-1, *pairs.shape[-3:])


def measure(device: Device, stages: int, num_groups: int) -> tuple[float, float]:
    """Seconds of a transfer out and one back, as they are with nothing else to do. What the places hold is lost."""
    pairs = np.zeros((stages, num_groups, SWAP_BATCH, 2), np.int32)
    pairs[..., 1] = 1
    if stages == 1:
        pairs = pairs[0]
    assert device.host is not None
    out, back = [], []
    for _ in range(_TIMED):
        began = time.perf_counter()
        device.swap_out(pairs)
        device.host.land_all()
        out.append(time.perf_counter() - began)
        began = time.perf_counter()
        device.swap_in(np.ascontiguousarray(pairs[..., ::-1]))
        device.host.wait()
        back.append(time.perf_counter() - began)
    return min(out), min(back)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that XLA:CPU takes as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
