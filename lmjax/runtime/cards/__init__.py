"""NVIDIA cards as data, one JSON file each: enough to compile for a card that isn't there, and for a roofline.

Chip geometry as the driver reports it and as openxla's target configurations have it; rates are the data sheets'
dense ones. Memory is what a process sees of an idle card (below the number on the box, which counts ECC and firmware).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax

from lmjax.config import ConfigError
from lmjax.runtime.cuda_plugin import cuda_topology
from pallas_kernels.platform import Target

DEVICES_PER_HOST = 8

_TARGET_CONFIG = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {shared_memory}
  core_count: {cores} fpus_per_core: {fpus_per_core} clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {memory_bandwidth:.0f} device_memory_size: {memory_bytes} l2_cache_size: {l2_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {cuda_features} }}
  driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  name: "{device_name}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device_name}"
"""


@dataclass(frozen=True, slots=True)
class Card:
    """Rates are per second and per card: bytes of memory, dense FLOP, bytes over the link to a neighbour, one way.

    ``fp8_flops`` is None where the card has no fp8 unit. ``cuda_features``: the compute capability's feature set in
    XLA's words (``ACCELERATED_FEATURES`` is the ``a`` of sm_90a).
    """

    name: str
    device_name: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: str
    link_bandwidth: float
    cuda_features: str
    clock_ghz: float
    l2_bytes: int
    shared_memory_per_core: int
    threads_per_core: int
    fpus_per_core: int

    def target(self, interpret: bool = False) -> Target:
        return Target("cuda", self.capability, self.cores, interpret)

    @property
    def arch(self) -> str:
        """As ptxas names it: ``sm_90a``."""
        suffix = "a" if self.cuda_features == "ACCELERATED_FEATURES" else ""
        return f"sm_{self.capability[0]}{self.capability[1]}{suffix}"

    @property
    def target_config(self) -> str:
        """Text of XLA's GpuTargetConfigProto."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        major, minor = self.capability
        return _TARGET_CONFIG.format(**values, major=major, minor=minor, shared_memory=self.target().shared_memory)


@cache
def cards() -> dict[str, Card]:
    """All known cards by name."""
    files = sorted(Path(__file__).parent.glob("*.json"))
    return {path.stem: _read(path) for path in files}


def _read(path: Path) -> Card:
    values = json.loads(path.read_text())
    return Card(**(values | {"capability": tuple(values["capability"])}))


def card(name: str) -> Card:
    """Raises ``ConfigError`` with the names that there are."""
    if name not in cards():
        raise ConfigError(f"--device: got {name!r}, must be one of {', '.join(cards())}")
    return cards()[name]


def card_of(device: jax.Device) -> Card | None:
    """The card that a device is, if it is known (the names of some have a variant's name behind ours)."""
    if device.platform not in ("gpu", "cuda"):
        return None
    facts = (str(device.compute_capability), int(getattr(device, "core_count", 0)))
    for known in cards().values():
        same = facts == (".".join(map(str, known.capability)), known.cores)
        if same and device.device_kind.startswith(known.device_name):
            return known
    return None


@cache  # devices of two topologies don't go together
def topology(card: Card, devices: int = 1) -> tuple[jax.Device, ...]:
    """Devices to compile for (they hold nothing and run nothing), ``DEVICES_PER_HOST`` to a host.

    Needs the CUDA plugin, see ``cuda_plugin``.
    """
    per_host = min(devices, DEVICES_PER_HOST)
    if devices % per_host:
        raise ConfigError(f"--device: {devices} cards do not fill hosts of {per_host}")
    return tuple(cuda_topology(card.target_config, f"1x{devices // per_host}x{per_host}").devices)
