"""What programs are traced for. A static argument of every op, so that one process can trace for several cards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax

Backend = Literal["auto", "xla", "triton", "mosaic"]

# bytes of shared memory that one block may use at most, by compute capability (CUDA programming guide, table 21)
_SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}


@dataclass(frozen=True, slots=True)
class Target:
    """``capability``: the card's compute capability; ``cores``: its multiprocessors.

    ``interpret``: the Pallas bodies chosen for the card run in the interpreter, on whatever platform traces them.
    """

    platform: Literal["cpu", "cuda"] = "cpu"
    capability: tuple[int, int] = (0, 0)
    cores: int = 1
    interpret: bool = False

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory a block may use; of an unknown newer card the least that any has."""
        return _SHARED_MEMORY.get(self.capability, 101_376)

    @property
    def has_fp8(self) -> bool:
        """Casts from float8_e4m3fn compile (they abort the process below 8.9, so this is asked first)."""
        return self.capability >= (8, 9)

    @property
    def runs_pallas(self) -> bool:
        return self.platform == "cuda" and self.capability >= (8, 0)


CPU = Target()


def device_target(device: jax.Device, interpret: bool = False) -> Target:
    """The target that a device is."""
    if device.platform not in ("gpu", "cuda"):
        return CPU
    major, minor = str(device.compute_capability).split(".")
    return Target("cuda", (int(major), int(minor)), int(getattr(device, "core_count", 0) or 1), interpret)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def tuned(op: str, target: Target, case: str) -> dict[str, Any] | None:
    """The tile that a card of this capability has shown fastest: ``tuned/sm_90.json``, written by benchmarks/gpu.py."""
    return _table(target.capability).get(op, {}).get(case)


@contextmanager
def trial(op: str, target: Target, case: str, tile: dict[str, Any]) -> Iterator[None]:
    """While open, ``tuned`` answers with this tile. What JAX has traced before keeps the tile it had."""
    cases = _table(target.capability).setdefault(op, {})
    before = cases.get(case)
    cases[case] = tile
    try:
        yield
    finally:
        if before is None:
            del cases[case]
        else:
            cases[case] = before


@cache
def _table(capability: tuple[int, int]) -> dict[str, Any]:
    path = Path(__file__).parent / "tuned" / f"sm_{capability[0]}{capability[1]}.json"
    return json.loads(path.read_text()) if path.exists() else {}
