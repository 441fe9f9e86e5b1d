"""Quantisation while loading (``--quantization``): nearest values of plain weights, row by row.

int8 and fp8: a scale an output feature, of its largest magnitude (127, 448). int4: symmetric, in groups of 32 input
features whose largest magnitude is 7 steps; a step is rounded to bfloat16 before the values are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from lmjax.nn.packing import Packing
from lmjax.weights.codes import FP8, Codes, Infos, Stored, float32
from lmjax.weights.safetensors import Range, TensorInfo

INT4_GROUP = 32
KINDS = {
    "int8": Packing("int8"),
    "fp8": Packing("fp8"),
    "int4": Packing("int4", INT4_GROUP, scale_dtype="bfloat16"),
}
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}


@dataclass(frozen=True)
class AtLoad:
    """``chosen``: names of the weights to quantise, ``read_float`` reads their rows."""

    kind: str
    chosen: frozenset[str]
    read_float: Callable[[TensorInfo, Range | None], np.ndarray]

    @property
    def name(self) -> str:
        return f"--quantization {self.kind}"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        return KINDS[self.kind] if f"{module}.weight" in self.chosen else None

    def stack(self, tensor: str) -> Packing | None:
        return KINDS[self.kind] if tensor in self.chosen else None

    def find(self, infos: Infos) -> dict[str, Stored]:
        return {name: self._stored(infos[name]) for name in self.chosen if name in infos}

    def _stored(self, info: TensorInfo) -> Stored:
        def read(rows: Range | None) -> Codes:
            floats = float32(self.read_float(info, rows))
            if floats.ndim == 3:  # experts [E, in, out]
                floats = np.ascontiguousarray(floats.swapaxes(1, 2)).reshape(-1, info.shape[1])
            return quantize(floats, self.kind)

        return Stored(info.shape, (info,), read, KINDS[self.kind])

    def harmless(self, name: str) -> bool:
        return False


def quantize(rows: np.ndarray, kind: str) -> Codes:
    """float32 [rows, in]; int4: ``in`` a multiple of 32."""
    if kind == "int4":
        grouped = rows.reshape(len(rows), -1, INT4_GROUP)
        scale = _steps(grouped, kind).astype(ml_dtypes.bfloat16).astype(np.float32)
        nibbles = np.clip(np.rint(grouped / scale[..., None]) + np.float32(8), 0, 15).astype(np.uint8)
        return Codes(nibbles.reshape(rows.shape), scale, np.full_like(scale, 8))
    scale = _steps(rows, kind)[:, None]
    values = rows / scale
    return Codes(np.rint(values).astype(np.int8) if kind == "int8" else values.astype(FP8), scale)


def _steps(values: np.ndarray, kind: str) -> np.ndarray:
    """Of the last axis. Zeros have any step."""
    scale = np.abs(values).max(-1) / np.float32(LARGEST[kind])
    return np.where(scale > 0, scale, np.float32(1))
