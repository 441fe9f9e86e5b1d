"""How much memory there is and how many KV blocks are made of it. Sizes in bytes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmjax.config import ConfigError, EngineConfig
from lmjax.types import KVSpec

log = logging.getLogger(__name__)

GIB = 2**30
CPU_POOL_CAP = 4 * GIB
CPU_POOL_SHARE = 0.4  # of free memory: the process, its page cache and its neighbours need the rest
# Triton kernels index a pool by 32-bit element numbers up to 4 GiB: those of 1-byte elements overflow above 2 GiB
NARROW_POOL, WIDE_POOL = 2 * GIB, 4 * GIB
GPU_SLACK = 256 * 2**20  # fragmentation, and what the driver and NCCL take beside the allocator


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: free memory of the machine, and of every cgroup above the process."""
    return min([_machine_memory(root), *_cgroup_memory(root)])


def _machine_memory(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no /proc: take half as free


def _cgroup_memory(root: Path) -> list[int]:
    """Free bytes of the process's cgroups (version 2, then version 1). A limit may stand at any level."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    free = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        # inside a container the path may be the host's and not exist: the root is then the container's own group
        for folder in (group, *group.parents):
            most, used = _read_int(folder / limit), _read_int(folder / usage)
            if most is not None and used is not None:
                free.append(max(most - used + _reclaimable(folder), 0))
            if folder == base:
                break
    return free


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _reclaimable(folder: Path) -> int:
    """Page cache counts as used in a cgroup but goes when memory is needed."""
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


@dataclass(frozen=True)
class KVPlan:
    """``num_blocks``: per group, the null block included. ``num_tokens``: what the pool holds at full use."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    num_tokens: int
    num_bytes: int


def check_weights_fit(num_bytes: int, available: int) -> None:
    if num_bytes > available:
        raise ConfigError(
            f"--model: the weights need {gib(num_bytes)}, but only {gib(available)} of memory are free; "
            "take a smaller model or a smaller --dtype"
        )


def cpu_pool_budget(available: int) -> int:
    return min(CPU_POOL_CAP, int(CPU_POOL_SHARE * available))


def gpu_pool_budget(bytes_limit: int, bytes_in_use: int, program_bytes: int) -> int:
    """What the allocator has left besides the largest program's temporaries and outputs."""
    return max(bytes_limit - bytes_in_use - program_bytes - GPU_SLACK, 0)


def plan_kv(
    specs: tuple[KVSpec, ...],
    config: EngineConfig,
    *,
    model_max_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    budget: int,
    available: int,
    num_blocks: tuple[int, ...] | None = None,
) -> KVPlan:
    """Blocks of each KV group and the context length.

    budget: bytes that the pool may take if nothing is set; available: bytes that there are at all; num_blocks: is
    taken as it is (a bundle's). Raises ``ConfigError`` with the numbers where an explicit setting does not fit.
    """
    wanted_len = config.max_model_len or model_max_len
    if num_blocks is not None:
        counts, source = num_blocks, "--bundle"
    else:
        counts, source = _choose_blocks(specs, config, wanted_len, max_num_seqs, max_num_batched_tokens, budget)
    num_bytes = pool_bytes(specs, counts, config.block_size)
    if num_bytes > available:
        raise ConfigError(
            f"{source}: the KV pool would take {gib(num_bytes)}, but only {gib(available)} of memory are free"
        )
    limit = _longest_context(specs, counts, config.block_size, max_num_batched_tokens)
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len: got {config.max_model_len}, but the KV pool holds {limit} tokens ({gib(num_bytes)}); "
            "lower it, or give the pool more memory with --kv-cache-memory-bytes"
        )
    length = wanted_len if limit is None else min(wanted_len, limit)
    if length < wanted_len:
        log.warning("context cut from the model's %d to %d tokens: the KV pool holds no more", wanted_len, length)
    full = [n for n, spec in zip(counts, specs, strict=True) if spec.window is None]
    return KVPlan(counts, length, (min(full or counts) - 1) * config.block_size, num_bytes)


def pool_is_set(config: EngineConfig) -> bool:
    """Whether the settings say how large the pool is."""
    return config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None


def pool_bytes(specs: tuple[KVSpec, ...], num_blocks: tuple[int, ...], block_size: int) -> int:
    return sum(n * block_size * spec.bytes_per_token() for n, spec in zip(num_blocks, specs, strict=True))


def _choose_blocks(
    specs: tuple[KVSpec, ...], config: EngineConfig, length: int, num_seqs: int, num_batched: int, budget: int
) -> tuple[tuple[int, ...], str]:
    """Blocks per group (null block included), and the flag that the size can be changed with."""
    size = config.block_size
    if config.num_gpu_blocks_override is not None:
        counts = tuple(config.num_gpu_blocks_override + 1 for _ in specs)
        if any(_overflows(spec, n, size) for n, spec in zip(counts, specs, strict=True)):
            raise ConfigError(
                "--num-gpu-blocks-override: a pool of 1-byte elements must be below 2 or above 4 GiB on each device: "
                "kernels cannot index one between"
            )
        return counts, "--num-gpu-blocks-override"

    def blocks(full: int) -> tuple[int, ...]:
        """When full-attention groups have ``full`` usable blocks. Window groups never need more than all windows."""
        caps = (
            full if spec.window is None else num_seqs * (_ceil(spec.window, size) + 1) + _ceil(num_batched, size) + 1
            for spec in specs
        )
        return tuple(min(full, cap) + 1 for cap in caps)

    budget = config.kv_cache_memory_bytes or budget
    full = _largest(num_seqs * _ceil(length, size), lambda n: pool_bytes(specs, blocks(n), size) <= budget)
    full = _without_overflow(specs, blocks, full, size)
    if full == 0:
        raise ConfigError(
            f"--kv-cache-memory-bytes: no room for a single KV block: {gib(pool_bytes(specs, blocks(1), size))} are "
            f"needed and {gib(budget)} are there"
        )
    return blocks(full), "--kv-cache-memory-bytes"


def _overflows(spec: KVSpec, num_blocks: int, size: int) -> bool:
    num_bytes = num_blocks * size * spec.bytes_per_token(scales=False)
    return spec.item_bytes == 1 and NARROW_POOL < num_bytes <= WIDE_POOL


def _without_overflow(specs: tuple[KVSpec, ...], blocks: Callable[[int], tuple[int, ...]], full: int, size: int) -> int:
    """The most usable blocks up to ``full`` with which kernels can index every group's pool."""
    while full > 0:
        wrong = [s for n, s in zip(blocks(full), specs, strict=True) if _overflows(s, n, size)]
        if not wrong:
            return full
        full = min(full - 1, *(NARROW_POOL // (size * spec.bytes_per_token(scales=False)) - 1 for spec in wrong))
    return full


def _longest_context(specs: tuple[KVSpec, ...], counts: tuple[int, ...], size: int, num_batched: int) -> int | None:
    """Tokens of the longest sequence that the pool can hold alone; None: any (window groups with room for a window)."""
    limits = [
        (n - 1) * size
        for n, spec in zip(counts, specs, strict=True)
        if spec.window is None or n - 1 < _ceil(spec.window + num_batched, size) + 1
    ]
    return min(limits, default=None)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _largest(high: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 0 .. high for which ``fits(n)`` holds (it holds up to some n)."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.1f} MiB"
