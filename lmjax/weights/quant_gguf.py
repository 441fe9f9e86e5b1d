"""GGUF's types that a weight type fits, as codes: blocks of 32 in a row with a float16 scale d.

Q4_0: d (q - 8); Q4_1: d q + m; Q8_0: d q. Of 4 bits byte i has element i in its low nibble, element i + 16 in its high
one. Source: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lmjax.nn.packing import Packing
from lmjax.weights.codes import Codes, Infos, Stored
from lmjax.weights.safetensors import Range, TensorInfo, read_bytes

BLOCK = 32
PACKINGS = {
    "Q4_0": Packing("int4", BLOCK, scale_dtype="float16"),
    "Q4_1": Packing("int4", BLOCK, zero=True),  # zeros are no integers, as -m / d has to be exact
    "Q8_0": Packing("int8", BLOCK, scale_dtype="float16"),
}


@dataclass(frozen=True)
class Gguf:
    """``types``: (weight, its type) of a file's tensors."""

    types: tuple[tuple[str, str], ...]
    name: str = "gguf"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        return PACKINGS.get(dict(self.types).get(f"{module}.weight", ""))

    def find(self, infos: Infos) -> dict[str, Stored]:
        return {
            name: Stored(info.shape, (info,), partial(_read, info), PACKINGS[info.stored])
            for name, info in infos.items()
            if info.stored in PACKINGS and len(info.shape) == 2
        }

    def harmless(self, name: str) -> bool:
        return False


def layout(infos: Infos) -> Gguf:
    return Gguf(tuple((name, info.stored) for name, info in infos.items()))


def _read(info: TensorInfo, rows: Range | None) -> Codes:
    rows = rows or (0, info.shape[0])
    each = info.size // info.shape[0]
    part = replace(info, offset=info.offset + rows[0] * each, size=(rows[1] - rows[0]) * each)
    raw = np.empty(part.size, np.uint8)
    read_bytes(part, raw)
    blocks = raw.reshape(rows[1] - rows[0], info.shape[1] // BLOCK, -1)
    scale = _float16(blocks[..., :2])
    if info.stored == "Q8_0":
        return Codes(blocks[..., 2:].view(np.int8).reshape(len(blocks), -1), scale)
    start = 2 if info.stored == "Q4_0" else 4
    packed = blocks[..., start:]
    values = np.concatenate([packed & 15, packed >> 4], axis=-1)
    if info.stored == "Q4_0":
        return Codes(values.reshape(len(blocks), -1), scale, np.full_like(scale, 8))
    low, flat = _float16(blocks[..., 2:4]), scale == 0
    # a block of equal numbers has no step: take 1, and zeros
    scale = np.where(flat, np.float32(1), scale)
    values = np.where(flat[..., None], np.uint8(0), values)
    return Codes(values.reshape(len(blocks), -1), scale, -low / scale)


def _float16(two_bytes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0].astype(np.float32)
