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
from lmjax.weights.codes import FP4, Codes, Infos, Stored, within
from lmjax.weights.errors import WeightError
from lmjax.weights.quant_fields import check_fields, check_shape, check_stored, is_ignored, names
from lmjax.weights.safetensors import Range, TensorInfo, read_tensor
from lmjax.weights.streaming import not_finite

BLOCK = 32
NAN = 255  # among exponents
PACKING = Packing("mxfp4", BLOCK, scale_dtype="uint8")


@dataclass(frozen=True)
class Mxfp4:
    ignored: tuple[str, ...] = ()
    name: str = "mxfp4"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        return None  # a module of its own is not quantised

    def stack(self, tensor: str) -> Packing | None:
        return None if is_ignored(tensor, self.ignored) else PACKING

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
                found[stem] = Stored(
                    (experts, count * BLOCK, out), (blocks, scales), partial(_read, blocks, scales), PACKING
                )
        return found

    def harmless(self, name: str) -> bool:
        return False


def _read(blocks: TensorInfo, scales: TensorInfo, experts: Range | None) -> Codes:
    packed, exponents = read_tensor(blocks, experts), read_tensor(scales, experts)
    first, last = within(experts, blocks.shape[0])
    rows = (last - first) * blocks.shape[1]
    values = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)  # [E, out, blocks, 16, 2]
    if (exponents == NAN).any():
        raise not_finite(scales.file, scales.name)
    scale = np.ldexp(np.float32(1), exponents.reshape(rows, -1).astype(np.int32) - 127)
    return Codes(values.reshape(rows, -1).view(FP4), scale)


def layout(config: HfConfig) -> Mxfp4:
    check_fields(config, ("modules_to_not_convert",), ("dequantize", "swizzle"))
    return Mxfp4(names(config, "modules_to_not_convert"))
