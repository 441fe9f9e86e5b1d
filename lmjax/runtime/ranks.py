"""One engine in several processes: rank 0 sends each step's calls, the others run the same on their devices."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmjax.cluster.messages import Step, Stop
from lmjax.cluster.ranks import Ranks
from lmjax.config import ConfigError, EngineConfig
from lmjax.runtime.compiler import CompileMonitor
from lmjax.runtime.device import Call, Device, Outputs
from lmjax.runtime.identity import digest, identity
from lmjax.runtime.inputs import MAX_IN_FLIGHT, aligned_zeros
from lmjax.runtime.resolve import Resolved

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

    def close(self) -> None:
        """Waits for what runs, frees the memory and ends the other ranks. May be called twice."""
        self._device.close()
        self._ranks.leave()


class Follower:
    """A rank that does what rank 0 says."""

    def __init__(self, device: Device, ranks: Ranks, monitor: CompileMonitor):
        self._device, self._ranks, self._monitor = device, ranks, monitor
        self._codec = CallCodec(device.keys)
        self._running: deque[tuple[Outputs, list[Call]]] = deque()  # with their buffers, which must not change

    def run(self) -> None:
        """Until rank 0 says ``Stop``."""
        while isinstance(order := self._receive(), Step):
            calls = self._codec.decode(order)
            self._ranks.pulse.taken = order.number
            with self._monitor.watch():
                self._running.append((self._device.run(calls), calls))
            if len(self._running) == MAX_IN_FLIGHT:
                self._finish()

    def close(self) -> None:
        """Frees the memory, and ends together with the other ranks."""
        self._device.close()
        self._ranks.leave()

    def _receive(self) -> Step | Stop:
        """The next order, taken as soon as it comes; what has run by then is counted."""
        while self._running and not self._ranks.has_order(_LOOK):
            last: Any = self._running[0][0].last
            if last.is_ready():
                self._finish()
        return self._ranks.receive()

    def _finish(self) -> None:
        self._running.popleft()[0].last.block_until_ready()
        self._ranks.pulse.done += 1


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
    files = sorted(source.weights.glob("*.safetensors")) if source.kind == "hf" else [source.weights]
    sizes = [(path.name, path.stat().st_size) for path in files] if config.load_format != "dummy" else config.seed
    return {
        "--nnodes": str(config.nnodes),
        **identity(resolved, resolved.local_devices),
        "--load-format": config.load_format,
        "--model's files": digest(repr(sizes)),
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
