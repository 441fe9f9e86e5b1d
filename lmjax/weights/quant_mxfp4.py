"""MXFP4 as GPT-OSS keeps its experts.

Of a tensor X [E, in, out]: ``X_blocks`` uint8 [E, out, in / 32, 16], two e2m1 numbers a byte, the first in the low
nibble; ``X_scales`` uint8 [E, out, in / 32], exponents plus 127. Source: OCP Microscaling Formats (MX), version 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from lmjax.models.hf_config import HfConfig
from lmjax.nn.packing import Packing
from lmjax.weights.codes import Infos, Stored
from lmjax.weights.errors import WeightError
from lmjax.weights.quant_fields import check_fields, check_shape, check_stored, names
from lmjax.weights.safetensors import Range, TensorInfo, read_tensor

BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)


@dataclass(frozen=True)
class Mxfp4:
    name: str = "mxfp4"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        return None  # experts have no packed form

    def find(self, infos: Infos) -> dict[str, Stored]:
        found = {}
        for name, blocks in infos.items():
            if name.endswith("_blocks"):
                stem = name.removesuffix("_blocks")
                scales = infos.get(f"{stem}_scales")
                if scales is None:
                    raise WeightError(blocks.file, f"tensor {stem}_scales is missing")
                check_stored(blocks, "U8")
                check_stored(scales, "U8")
                if len(blocks.shape) != 4 or blocks.shape[3] != BLOCK // 2:
                    raise WeightError(
                        blocks.file, f"tensor {name} has shape {list(blocks.shape)}, must be [experts, out, blocks, 16]"
                    )
                check_shape(scales, blocks.shape[:3])
                experts, out, count, _ = blocks.shape
                found[stem] = Stored((experts, count * BLOCK, out), (blocks, scales), partial(_read, blocks, scales))
        return found

    def harmless(self, name: str) -> bool:
        return False


def _read(blocks: TensorInfo, scales: TensorInfo, rows: Range | None) -> np.ndarray:
    """float32 [experts, in, out]."""
    packed, exponents = read_tensor(blocks, rows), read_tensor(scales, rows)
    values = np.stack([VALUES[packed & 15], VALUES[packed >> 4]], axis=-1)  # [E, out, blocks, 16, 2]
    values = values.reshape(*packed.shape[:3], BLOCK)
    values = np.ldexp(values, exponents.astype(np.int32)[..., None] - 127)
    experts, out = packed.shape[:2]
    return np.ascontiguousarray(values.reshape(experts, out, -1).swapaxes(1, 2))


def layout(config: HfConfig) -> Mxfp4:
    check_fields(config, ("modules_to_not_convert",), ("dequantize", "swizzle"))
    names(config, "modules_to_not_convert")  # what is not quantised has no blocks
    return Mxfp4()
