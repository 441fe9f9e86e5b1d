"""One engine in several processes: rank 0 sends each step's calls, the others run the same on their devices."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmjax.cluster.messages import Load, Loaded, Order, Sleep, Step, Stop, Swap, Wake
from lmjax.cluster.ranks import Ranks
from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime.compiler import CompileMonitor
from lmjax.runtime.device import Call, Device, Outputs
from lmjax.runtime.identity import digest, identity
from lmjax.runtime.inputs import MAX_IN_FLIGHT, aligned_zeros
from lmjax.runtime.live import Load as LoadFiles
from lmjax.runtime.live import Loading, file_digest
from lmjax.runtime.resolve import Resolved
from lmjax.weights.errors import WeightError

_LOOK = 0.02  # seconds between looks at what runs, while no order comes


class CallCodec:
    """Calls as bytes. A program's key crosses as its number in the list of all keys, which all ranks have alike."""

    def __init__(self, keys: Sequence[Hashable]):
        self._keys = list(keys)
        self._numbers = {key: number for number, key in enumerate(self._keys)}

    def encode(self, number: int, calls: Sequence[Call]) -> Step:
        return Step(number, [(self._numbers[key], packed.shape, packed.tobytes()) for key, packed in calls])

    def decode(self, step: Step) -> list[Call]:
        calls = []
        for number, shape, data in step.calls:
            assert isinstance(number, int)
            packed = aligned_zeros(len(data) // 4)
            packed[:] = np.frombuffer(data, "<i4")
            calls.append(Call(self._keys[number], packed.reshape(shape)))
        return calls


class Leader:
    """Rank 0's ``Device``: what it runs, the others run."""

    def __init__(self, device: Device, ranks: Ranks):
        self._device, self._ranks = device, ranks
        self._codec = CallCodec(device.keys)
        self._steps = 0

    @property
    def keys(self) -> list[Hashable]:
        return self._device.keys

    @property
    def waited(self) -> float:
        return self._device.waited

    def run(self, calls: Sequence[Call]) -> Outputs:
        self._steps += 1
        self._ranks.send(self._codec.encode(self._steps, calls))
        return self._device.run(calls)

    # weights and sleep: the others do the same at the same place among the steps

    many_processes = True

    @property
    def params(self) -> Any:
        return self._device.params

    @property
    def layout(self) -> Any:
        return self._device.layout

    def start_loading(self, path: str | None) -> LoadingEverywhere:
        return LoadingEverywhere(path, self._device, self._ranks)

    def set_params(self, params: Any) -> None:
        """params: a ``LoadingEverywhere`` that has done well."""
        self._ranks.send(Swap(use=True))
        self._device.set_params(params)

    def sleep(self, level: int) -> None:
        self._ranks.send(Sleep(level))
        self._device.sleep(level)

    def wake(self) -> None:
        self._ranks.send(Wake())
        self._device.wake()

    def close(self) -> None:
        """Waits for what runs, frees the memory and ends the other ranks. May be called twice."""
        self._device.close()
        self._ranks.leave()


class LoadingEverywhere(Loading):
    """Every rank reads its share. It fails where one fails: then all forget what they have read."""

    _numbers = itertools.count(1)

    def __init__(self, path: str | None, device: Device, ranks: Ranks):
        assert device.load is not None
        self._ranks, self._number, self._forgotten = ranks, next(self._numbers), False
        ranks.send(Load(self._number, path))
        super().__init__(path, device.load)

    def done(self) -> bool:
        """From the loop's thread: it may tell the others."""
        if not super().done():
            return False
        said = self._ranks.pulse.loaded
        others = [said.get(rank) for rank in range(1, self._ranks.count)]
        if any(word is None or word.number != self._number for word in others):
            return False
        for rank, word in enumerate(others, 1):
            assert word is not None
            if self.error is not None:
                break
            if word.error is not None:
                self.error = WeightError(f"rank {rank}", word.error)
            elif self.loaded is not None and word.files != self.loaded.files:
                self.error = WeightError(repr(self.path), f"rank {rank} has other files there than rank 0")
        if self.error is not None and not self._forgotten:
            self._forgotten, self.loaded = True, None
            self._ranks.send(Swap(use=False))
        return True


class Follower:
    """A rank that does what rank 0 says."""

    def __init__(self, device: Device, ranks: Ranks, monitor: CompileMonitor):
        self._device, self._ranks, self._monitor = device, ranks, monitor
        self._codec = CallCodec(device.keys)
        self._running: deque[tuple[Outputs, list[Call]]] = deque()  # with their buffers, which must not change
        self._loading: Loading | None = None

    def run(self) -> None:
        """Until rank 0 says ``Stop``."""
        while not isinstance(order := self._receive(), Stop):
            with self._monitor.watch():
                self._do(order)

    def _do(self, order: Order) -> None:
        match order:
            case Step():
                calls = self._codec.decode(order)
                self._ranks.pulse.taken = order.number
                self._running.append((self._device.run(calls), calls))
                if len(self._running) == MAX_IN_FLIGHT:
                    self._finish()
            case Load(number=number, path=path):
                assert self._device.load is not None
                self._loading = _Reported(path, self._device.load, number, self._ranks)
            case Swap(use=use):
                if use:
                    self._device.set_params(self._loading)
                self._loading = None
            case Sleep(level=level):
                while self._running:
                    self._finish()
                self._device.sleep(level)
            case Wake():
                self._device.wake()

    def close(self) -> None:
        """Frees the memory, and ends together with the other ranks."""
        self._device.close()
        self._ranks.leave()

    def _receive(self) -> Order:
        """The next order, taken as soon as it comes; what has run by then is counted."""
        while self._running and not self._ranks.has_order(_LOOK):
            last: Any = self._running[0][0].last
            if last.is_ready():
                self._finish()
        return self._ranks.receive()

    def _finish(self) -> None:
        self._running.popleft()[0].last.block_until_ready()
        self._ranks.pulse.done += 1


class _Reported(Loading):
    """A follower's, of which it tells rank 0."""

    def __init__(self, path: str | None, load: LoadFiles, number: int, ranks: Ranks):
        self._number, self._ranks = number, ranks
        super().__init__(path, load)

    def _run(self, load: LoadFiles) -> None:
        super()._run(load)
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        if isinstance(self.error, ValueError | OSError):
            error = str(self.error)
        self._ranks.pulse.say(Loaded(self._number, error, self.loaded.files if self.loaded else ""))


def engine_devices(config: EngineConfig) -> list[jax.Device]:
    """The devices of the engine's mesh: equally many of each process, in JAX's order. Raises ``ConfigError``."""
    devices, wanted = jax.devices(), config.num_devices
    flags = " and ".join(
        f"--{name}-parallel-size: got {size}"
        for name, size in (("tensor", config.tensor_parallel_size), ("pipeline", config.pipeline_parallel_size))
        if size > 1
    )
    if config.nnodes == 1:
        if len(devices) < wanted:
            raise ConfigError(f"{flags}, but there are {len(devices)} devices")
        return devices[:wanted]
    each, found = wanted // config.nnodes, []
    for rank in range(config.nnodes):
        here = [device for device in devices if device.process_index == rank]
        if len(here) < each:
            raise ConfigError(
                f"{flags}, which is {each} devices on each of {config.nnodes} hosts, but rank {rank} has {len(here)}"
            )
        found += here[:each]
    return found


def rank_facts(resolved: Resolved) -> dict[str, str]:
    """What must be equal for the ranks to run the same programs on shares of the same weights."""
    config, source = resolved.config, resolved.source
    sizes = file_digest(source) if config.load_format != "dummy" else digest(repr(config.seed))
    return {
        "--nnodes": str(config.nnodes),
        **identity(resolved, resolved.local_devices),
        "--runner": config.runner,
        "--load-format": config.load_format,
        "--model's files": sizes,
        "--gpu-memory-utilization": str(config.gpu_memory_utilization),
        "--kv-cache-memory-bytes": str(config.kv_cache_memory_bytes),
        "--num-gpu-blocks-override": str(config.num_gpu_blocks_override),
        "--swap-space": str(config.swap_space),
    }


def check_equal(ranks: Ranks, facts: dict[str, str]) -> None:
    """Raises ``ConfigError``, the same on all ranks, with the first fact in which a rank differs from rank 0."""
    told = [json.loads(text) for text in ranks.exchange("settings", json.dumps(facts))]
    for rank, theirs in enumerate(told):
        for name in dict.fromkeys((*told[0], *theirs)):
            ours, other = told[0].get(name, "not there"), theirs.get(name, "not there")
            if ours != other:
                raise ConfigError(f"{name}: {ours or 'none'} on rank 0, {other or 'none'} on rank {rank}")


def first_collective(ranks: Ranks, mesh: Mesh) -> None:
    """Connects all devices, once every rank has compiled: what waits for it, XLA would end after less than a minute."""
    ranks.exchange("compiled", "")
    axes = mesh.axis_names
    count = jax.shard_map(lambda: jax.lax.psum(1, axes), mesh=mesh, in_specs=(), out_specs=PartitionSpec())
    total = int(np.asarray(jax.jit(count, out_shardings=NamedSharding(mesh, PartitionSpec()))()))
    assert total == mesh.devices.size, total


def sharing(resolved: Resolved, ranks: Ranks | None) -> int:
    """How many CPU devices of the engine share this host's memory."""
    return len(resolved.local_devices) * (ranks.on_this_host if ranks else 1)


def smallest(ranks: Ranks, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """Of each value the smallest that a rank has."""
    return tuple(map(min, zip(*map(json.loads, ranks.exchange(name, json.dumps(values))), strict=True)))
