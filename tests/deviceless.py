"""Compiling for NVIDIA cards that aren't there: what a test can read of the result.

LMJAX_CUDA_PLUGIN names the folder that ``make test`` has put JAX's CUDA plugin (and ptxas) in.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmjax.runtime import cards
from lmjax.runtime.platform import no_compilation_cache

FOLDER = Path(os.environ.get("LMJAX_CUDA_PLUGIN") or "/nowhere")
# CUDA 12's last ptxas does not read the PTX that XLA writes from jax 0.11 on
_READABLE = jax.version.__version_info__ < (0, 11)
PTXAS = next(iter(FOLDER.glob("nvidia/*/bin/ptxas")), None) if _READABLE else None

skip = pytest.mark.skipif(not FOLDER.is_dir(), reason="LMJAX_CUDA_PLUGIN names no folder with JAX's CUDA plugin")
skip_ptxas = pytest.mark.skipif(PTXAS is None, reason="no ptxas that reads what this jaxlib writes")


@dataclass(frozen=True)
class Kernel:
    """One GPU kernel as ptxas sees it. ``name``: its entry point."""

    name: str
    ptx: str
    registers: int = 0
    spill_bytes: int = 0  # stored


@dataclass(frozen=True)
class Compiled:
    """text: the optimized HLO; memory: XLA's ``memory_analysis()``; kernels: those asked for with ``dump_ptx``.

    thunks: with ``dump_ptx``, what the host launches, in order: kernels, command buffers, collectives, loops.
    """

    text: str
    memory: Any
    executable: Any = None
    thunks: str = ""
    kernels: tuple[Kernel, ...] = field(default=())

    @property
    def ptx(self) -> str:
        return "\n".join(kernel.ptx for kernel in self.kernels)

    @property
    def registers(self) -> int:
        """The most that any kernel has."""
        return max(kernel.registers for kernel in self.kernels)

    @property
    def spill_bytes(self) -> int:
        return sum(kernel.spill_bytes for kernel in self.kernels)


def mesh(card: str = "h200", devices: int = 1, axis: str = "tp") -> Mesh:
    made = np.array(cards.topology(cards.card(card), devices))
    return Mesh(made, (axis,), axis_types=(AxisType.Auto,))


def compile(
    function: Callable[..., Any],
    *args: Any,
    card: str = "h200",
    devices: int = 1,
    donate: tuple[int, ...] = (),
    dump_ptx: bool = False,
    kernel: str = "",
    options: dict[str, Any] | None = None,
) -> Compiled:
    """args: trees of ShapeDtypeStruct; those without a sharding are replicated over the mesh of the others (if there is
    none, one axis, "tp").

    dump_ptx: fills ``kernels`` with those whose entry point contains ``kernel`` (all by default: XLA's fusions, too),
    with registers and spills where ptxas is there. Gate by the card's capability first: what a card cannot do may
    abort the process. options: more of XLA's, by name.
    """
    meshes = [leaf.sharding.mesh for leaf in jax.tree.leaves(args) if leaf.sharding]
    over = meshes[0] if meshes else mesh(card, devices)

    def placed(x: Any) -> Any:
        return x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    replicated = NamedSharding(over, PartitionSpec())
    args = jax.tree.map(placed, args)
    with tempfile.TemporaryDirectory() as folder, _serving_settings():
        # from jax 0.11 the abstract mesh tells Pallas-Triton the card; 0.12 dumps no PTX without the second option
        with jax.sharding.use_abstract_mesh(over.abstract_mesh):
            lowered = jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*args)
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": ".*"} if dump_ptx else {}
        executable = lowered.compile(compiler_options=dump | (options or {}))
        kernels = tuple(_kernels(Path(folder), kernel, cards.card(card).arch)) if dump_ptx else ()
        thunks = _thunks(Path(folder))
    return Compiled(executable.as_text(), executable.memory_analysis(), executable, thunks, kernels)


def _thunks(folder: Path) -> str:
    """XLA writes the second list only where a pass has changed the first."""
    for pattern in ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt"):
        for path in folder.glob(pattern):
            return path.read_text()
    return ""


def _kernels(folder: Path, wanted: str, arch: str) -> Iterator[Kernel]:
    for path in sorted(folder.glob("*.ptx")):
        ptx = path.read_text()
        names = re.findall(r"\.entry (\w+)", ptx)
        if not any(wanted in name for name in names):
            continue
        measured = _ptxas(path, arch) if PTXAS else {}
        for name in names:
            if wanted in name:
                yield Kernel(name, ptx, *measured.get(name, ()))


def _ptxas(path: Path, arch: str) -> dict[str, tuple[int, int]]:
    """{entry point: (registers, bytes of spill stores)}"""
    command = [str(PTXAS), "-v", f"-arch={arch}", "-o", os.devnull, str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", report, flags=re.DOTALL
    )
    return {name: (int(registers), int(spill)) for name, spill, registers in found}


@contextlib.contextmanager
def _serving_settings() -> Iterator[None]:
    """No rematerialization, as in serving."""
    before = jax.config.values["jax_compiler_enable_remat_pass"]
    jax.config.update("jax_compiler_enable_remat_pass", False)
    try:
        with no_compilation_cache():
            yield
    finally:
        jax.config.update("jax_compiler_enable_remat_pass", before)
