"""bitsandbytes: nf4 and fp4 in blocks, and int8 (LLM.int8(), whose outliers are a matter of activations).

4 bits: ``weight`` uint8, two codes a byte, the first in the high nibble, of the matrix read row by row; ``absmax`` a
scale a block, itself quantised where there are ``nested_*``; ``quant_map`` the 16 values; ``quant_state.*`` JSON as
bytes. 8 bits: ``weight`` int8 [out, in], ``SCB`` float32 [out], w = q SCB / 127. Source: bitsandbytes,
``functional.QuantState``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lmjax.models.hf_config import HfConfig
from lmjax.nn.packing import Packing
from lmjax.weights.codes import Codes, Infos, Stored, float32, within
from lmjax.weights.errors import WeightError
from lmjax.weights.quant_fields import check_fields, check_shape, is_ignored, modules, names, tensor
from lmjax.weights.safetensors import Range, TensorInfo, read_tensor

STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
APPLIED = (
    *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_quant_type"),
    *("bnb_4bit_use_double_quant", "llm_int8_skip_modules", "bnb_4bit_quant_storage"),
)
OF_QUANTISER = ("bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload", "llm_int8_threshold")


@dataclass(frozen=True)
class Bnb:
    bits: int
    ignored: tuple[str, ...]
    name: str = "bitsandbytes"

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        """No weight type has values that are not evenly spaced."""
        if self.bits == 4 or is_ignored(module, self.ignored):
            return None
        return Packing("int8")

    def find(self, infos: Infos) -> dict[str, Stored]:
        found = {}
        for module, info in modules(infos, "weight").items():
            if self.bits == 4 and f"{module}.weight.absmax" in infos:
                found[f"{module}.weight"] = _four_bits(infos, module, info)
            elif self.bits == 8 and f"{module}.SCB" in infos:
                scale = tensor(infos, module, "SCB")
                check_shape(scale, (info.shape[0],))
                packing = self.packing(module, *info.shape)
                found[f"{module}.weight"] = Stored(info.shape, (info, scale), partial(_read_int8, info, scale), packing)
        return found

    def harmless(self, name: str) -> bool:
        return name.endswith(".weight_format")


def _read_int8(weight: TensorInfo, scale: TensorInfo, rows: Range | None) -> Codes:
    first, last = within(rows, weight.shape[0])
    scales = float32(read_tensor(scale))[first:last, None] / np.float32(127)
    return Codes(read_tensor(weight, rows), scales)


def _four_bits(infos: Infos, module: str, weight: TensorInfo) -> Stored:
    parts = {
        name.removeprefix(f"{module}.weight."): info
        for name, info in infos.items()
        if name.startswith(f"{module}.weight.")
    }
    state_of = next((parts[f"quant_state.{state}"] for state in STATES if f"quant_state.{state}" in parts), None)
    if state_of is None or "quant_map" not in parts:
        raise WeightError(weight.file, f"tensor {module}.weight.quant_state or .quant_map is missing")
    state = _state(state_of)
    size = math.prod(state["shape"])
    if weight.size * 2 != size + size % 2:
        raise WeightError(weight.file, f"tensor {weight.name} has {weight.size} bytes for a shape {state['shape']}")
    read = partial(_read_four_bits, weight, parts, state)
    return Stored(tuple(state["shape"]), (weight, *parts.values()), read)


def _state(info: TensorInfo) -> dict[str, Any]:
    try:
        state = json.loads(bytes(read_tensor(info)))
        shape, block = state["shape"], state["blocksize"]
        if len(shape) != 2 or any(not isinstance(n, int) or n < 1 for n in (*shape, block)):
            raise ValueError(f"shape {shape} in blocks of {block}")
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(info.file, f"tensor {info.name} is no state of a quantised matrix: {error}") from error
    return state


def _read_four_bits(
    weight: TensorInfo, parts: dict[str, TensorInfo], state: dict[str, Any], rows: Range | None
) -> np.ndarray:
    """float32 [rows, in]. Blocks run over the ends of rows."""
    out, columns = state["shape"]
    first, last = within(rows, out)
    begin, end = first * columns, last * columns
    packed = read_tensor(weight).reshape(-1)[begin // 2 : -(-end // 2)]
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[begin % 2 :][: end - begin]
    scales = _block_scales(parts, state)[np.arange(begin, end) // state["blocksize"]]
    return (float32(read_tensor(parts["quant_map"]))[codes] * scales).reshape(last - first, columns)


def _block_scales(parts: dict[str, TensorInfo], state: dict[str, Any]) -> np.ndarray:
    scales = read_tensor(parts["absmax"]).reshape(-1)
    if "nested_absmax" not in parts:
        return float32(scales)
    outer = float32(read_tensor(parts["nested_absmax"]))[np.arange(len(scales)) // state["nested_blocksize"]]
    return float32(read_tensor(parts["nested_quant_map"]))[scales] * outer + np.float32(state["nested_offset"])


def layout(config: HfConfig) -> Bnb:
    check_fields(config, APPLIED, OF_QUANTISER)
    four = config.boolean("load_in_4bit", False) or config.boolean("_load_in_4bit", False)
    eight = config.boolean("load_in_8bit", False) or config.boolean("_load_in_8bit", False)
    if four == eight:
        raise config.error("load_in_4bit", four, "true, or load_in_8bit must be: one of both")
    if four:
        config.choice("bnb_4bit_quant_type", "fp4", {"nf4": None, "fp4": None})
        if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
            raise config.error("bnb_4bit_quant_storage", config.get("bnb_4bit_quant_storage"), "uint8")
    return Bnb(4 if four else 8, names(config, "llm_int8_skip_modules"))
