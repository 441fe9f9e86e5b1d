"""FP8 (e4m3) with a scale a tensor, a row, or a block of 128 x 128 (DeepSeek, Qwen3).

Of a linear: ``weight`` F8_E4M3 [out, in] and ``weight_scale`` (a number, [1], [out] or [out, 1]) or
``weight_scale_inv`` [out / 128, in / 128]; in spite of its name that multiplies, too. Activations are not quantised
here, so the scales of theirs (``activation_scheme``: static) are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lmjax.models.hf_config import HfConfig
from lmjax.nn.packing import Packing
from lmjax.weights.codes import Codes, Infos, Stored, float32, within
from lmjax.weights.errors import WeightError
from lmjax.weights.quant_fields import check_fields, is_ignored, modules, names
from lmjax.weights.safetensors import Range, TensorInfo, read_tensor

BLOCK = 128
APPLIED = ("activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers", "scale_fmt")
OF_QUANTISER = ("kv_cache_scheme",)  # its scales, see below
SCALES = ("weight_scale_inv", "weight_scale")
# scales of activations and of a KV cache: both are found anew here, where they are used
OTHER_SCALES = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale")


@dataclass(frozen=True)
class Fp8:
    block: bool
    ignored: tuple[str, ...] = ()
    name: str = "fp8"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        if is_ignored(module, self.ignored):
            return None
        if not self.block:
            return Packing("fp8")
        # bfloat16 has the exponents of the float32 scales; a row's own scale costs a 64th of its bytes
        return Packing("fp8", BLOCK, scale_dtype="float32") if columns % BLOCK == 0 else None

    def find(self, infos: Infos) -> dict[str, Stored]:
        found = {}
        for module, info in modules(infos, "weight").items():
            if info.stored == "F8_E4M3":
                found[f"{module}.weight"] = stored(infos, module, info, self.packing(module, *info.shape))
        return found

    def harmless(self, name: str) -> bool:
        return name.endswith(OTHER_SCALES)


def stored(infos: Infos, module: str, weight: TensorInfo, packing: Packing | None, block: int = BLOCK) -> Stored:
    scale = next((infos[f"{module}.{part}"] for part in SCALES if f"{module}.{part}" in infos), None)
    if scale is None:
        raise WeightError(weight.file, f"tensor {module}.{' or .'.join(SCALES)} is missing")
    rows, columns = weight.shape
    blocks = (-(-rows // block), -(-columns // block))
    if scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1), blocks):
        raise WeightError(
            scale.file,
            f"tensor {scale.name} has shape {list(scale.shape)}, must be [], [{rows}, 1] or {list(blocks)}",
        )
    return Stored(weight.shape, (weight, scale), partial(_read, weight, scale, block), packing)


def _read(weight: TensorInfo, scale: TensorInfo, block: int, rows: Range | None) -> Codes:
    first, last = within(rows, weight.shape[0])
    values, found = read_tensor(weight, rows), float32(read_tensor(scale))
    if found.size == 1:
        return Codes(values, np.full((last - first, 1), found.reshape(()), np.float32))
    if (found.size == weight.shape[0] and found.ndim < 2) or found.shape == (weight.shape[0], 1):
        return Codes(values, found.reshape(-1, 1)[first:last])
    groups = np.arange(weight.shape[1]) // block if weight.shape[1] % block else None
    return Codes(values, found[np.arange(first, last) // block], None, groups)


def layout(config: HfConfig) -> Fp8:
    check_fields(config, APPLIED, OF_QUANTISER)
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise config.error("fmt", config.get("fmt"), "e4m3")
    config.choice("activation_scheme", "dynamic", {"dynamic": None, "static": None})
    block: Any = config.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise config.error("weight_block_size", block, f"[{BLOCK}, {BLOCK}] or null")
    ignored = names(config, "modules_to_not_convert") + names(config, "ignored_layers")
    return Fp8(block is not None, ignored)
