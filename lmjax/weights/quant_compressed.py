"""compressed-tensors (LLM Compressor): int8 and fp8 matrices, and 4 or 8 bit integers packed into words.

- ``int-quantized``, ``float-quantized``, ``naive-quantized``: ``weight`` I8 or F8_E4M3 [out, in], ``weight_scale``
  [1], [out, 1], [out, groups] or [out / block, in / block]; int8 may have ``weight_zero_point`` of the same shape.
- ``pack-quantized``: ``weight_packed`` int32 [out, in / p], p = 32 / bits, lowest bits first, integers plus
  2 ** (bits - 1); ``weight_shape``; ``weight_zero_point`` int32 [out / p, groups], packed along the output;
  ``weight_g_idx`` int32 [in] where groups are in the order of the activations.

Activations stay as they are, so W8A8 runs as W8A16. Source: the library compressed-tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from lmjax.models.hf_config import REQUIRED, HfConfig
from lmjax.nn.packing import Packing
from lmjax.weights import quant_fp8
from lmjax.weights.codes import Codes, Infos, Stored, float32, nibbles, within
from lmjax.weights.errors import WeightError
from lmjax.weights.quant_fields import check_fields, check_shape, check_stored, is_ignored, modules, names, tensor
from lmjax.weights.safetensors import Range, TensorInfo, read_tensor

APPLIED = ("config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "quantization_status")
OF_QUANTISER = ("global_compression_ratio", "version")
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "dense")
WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder", "dynamic")
WEIGHTS_OF_QUANTISER = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
OTHER = (*quant_fp8.OTHER_SCALES, ".input_zero_point", ".output_zero_point")


@dataclass(frozen=True)
class Scheme:
    """``group``: 0: a scale a row (or one for all)."""

    targets: tuple[str, ...]
    bits: int
    floats: bool
    symmetric: bool
    group: int
    block: int
    act_order: bool


@dataclass(frozen=True)
class Compressed:
    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]
    name: str = "compressed-tensors"

    def scheme(self, module: str) -> Scheme | None:
        """By the name of the module, then by its class: all that are asked for are linear."""
        if is_ignored(module, self.ignored):
            return None
        named = (s for s in self.schemes if is_ignored(module, [t for t in s.targets if t != "Linear"]))
        of_class = (s for s in self.schemes if "Linear" in s.targets)
        return next(named, None) or next(of_class, None)

    def packing(self, module: str, rows: int, columns: int) -> Packing | None:
        s = self.scheme(module)
        if s is None or (s.act_order and s.group):
            return None
        if s.floats:
            return Packing("fp8", s.block, scale_dtype="float32") if columns % (s.block or 1) == 0 else None
        if s.bits == 8:
            return Packing("int8", s.group) if s.symmetric else None
        # scales are of the model's type, or another: float32 holds all
        return Packing("int4", s.group or columns, zero=not s.symmetric)

    def find(self, infos: Infos) -> dict[str, Stored]:
        found = {}
        for module, info in modules(infos, "weight_packed").items():
            found[f"{module}.weight"] = self._packed(infos, module, info)
        for module, info in modules(infos, "weight").items():
            if info.stored == "F8_E4M3" and (scheme := self.scheme(module)) is not None:
                packing = self.packing(module, *info.shape)
                found[f"{module}.weight"] = quant_fp8.stored(infos, module, info, packing, scheme.block or 128)
            elif info.stored == "I8":
                found[f"{module}.weight"] = self._int8(infos, module, info)
        return found

    def _wanted(self, module: str, info: TensorInfo) -> Scheme:
        scheme = self.scheme(module)
        if scheme is None:
            raise WeightError(info.file, f"tensor {info.name} is quantised, but no group of the config has {module}")
        return scheme

    def _int8(self, infos: Infos, module: str, weight: TensorInfo) -> Stored:
        self._wanted(module, weight)
        scale, parts = tensor(infos, module, "weight_scale"), [weight]
        zero = infos.get(f"{module}.weight_zero_point")
        parts += [scale] if zero is None else [scale, zero]
        read = partial(_read_int8, weight, scale, zero)
        return Stored(weight.shape, tuple(parts), read, self.packing(module, *weight.shape))

    def _packed(self, infos: Infos, module: str, packed: TensorInfo) -> Stored:
        check_stored(packed, "I32")
        scheme = self._wanted(module, packed)
        per_word = 32 // scheme.bits
        shape = tensor(infos, module, "weight_shape")
        rows, columns = (int(n) for n in read_tensor(shape).reshape(-1))
        check_shape(packed, (rows, -(-columns // per_word)))
        scale = tensor(infos, module, "weight_scale")
        groups = -(-columns // scheme.group) if scheme.group else 1
        check_shape(scale, (rows, groups), (1,), (rows,)) if groups == 1 else check_shape(scale, (rows, groups))
        zero = tensor(infos, module, "weight_zero_point") if not scheme.symmetric else None
        order = infos.get(f"{module}.weight_g_idx")
        parts = [packed, shape, scale, *([zero] if zero else []), *([order] if order else [])]
        read = partial(_read_packed, scheme.bits, columns, packed, scale, zero, order)
        return Stored((rows, columns), tuple(parts), read, self.packing(module, rows, columns))

    def harmless(self, name: str) -> bool:
        return name.endswith(OTHER)


def _scales(info: TensorInfo, rows: int, cut: Range) -> np.ndarray:
    """float32 [rows, groups] of a scale a tensor, a row or a group."""
    found = float32(read_tensor(info)).reshape(-1, 1) if len(info.shape) < 2 else float32(read_tensor(info))
    return np.repeat(found, cut[1] - cut[0], 0) if found.shape[0] == 1 and rows > 1 else found[slice(*cut)]


def _read_int8(weight: TensorInfo, scale: TensorInfo, zero: TensorInfo | None, rows: Range | None) -> Codes:
    cut = within(rows, weight.shape[0])
    found = None if zero is None else _scales(zero, weight.shape[0], cut)
    if found is not None and not found.any():
        found = None
    return Codes(read_tensor(weight, rows), _scales(scale, weight.shape[0], cut), found)


def _read_packed(
    bits: int,
    columns: int,
    packed: TensorInfo,
    scale: TensorInfo,
    zero: TensorInfo | None,
    order: TensorInfo | None,
    rows: Range | None,
) -> Codes:
    first, last = cut = within(rows, packed.shape[0])
    values = nibbles(read_tensor(packed, rows), bits, 1)[:, :columns]
    scales = _scales(scale, packed.shape[0], cut)
    middle = 2 ** (bits - 1)
    zeros = np.full_like(scales, middle)
    if zero is not None:
        zeros = nibbles(read_tensor(zero), bits, 0)[first:last].astype(np.float32)
    groups = None if order is None else read_tensor(order)
    if groups is not None and (groups < 0).any():  # there, but not in use
        groups = None
    if bits == 8 and zero is None:
        return Codes((values ^ np.uint8(128)).view(np.int8), scales, None, groups)
    return Codes(values, scales, zeros, groups)


def layout(config: HfConfig) -> Compressed:
    check_fields(config, APPLIED, OF_QUANTISER)
    form = config.get("format", "dense")
    if form not in FORMATS:
        raise config.error("format", form, f"one of {', '.join(FORMATS)}")
    sparsity: Any = config.get("sparsity_config", {})
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise config.error("sparsity_config", sparsity, "absent, or of format dense")
    groups: Any = config.get("config_groups", {})
    if not isinstance(groups, dict):
        raise config.error("config_groups", groups, "a JSON object")
    schemes = tuple(_scheme(HfConfig(group, f"{config.prefix}config_groups.{name}.")) for name, group in groups.items())
    return Compressed(schemes, names(config, "ignore"))


def _scheme(group: HfConfig) -> Scheme:
    check_fields(group, ("targets", "weights", "input_activations", "output_activations", "format"), ())
    targets = names(group, "targets")
    for target in targets:
        if target != "Linear" and re.fullmatch(r"[A-Z]\w*", target):
            raise group.error("targets", list(targets), "Linear, or names of modules")
    if group.get("format") is not None and group.get("format") not in FORMATS:
        raise group.error("format", group.get("format"), f"one of {', '.join(FORMATS)}")
    w = HfConfig(group.get("weights"), f"{group.prefix}weights.")
    check_fields(w, WEIGHTS, WEIGHTS_OF_QUANTISER)
    floats = w.choice("type", "int", {"int": False, "float": True})
    bits = cast(int, w.integer("num_bits", REQUIRED))
    if bits not in ((8,) if floats else (4, 8)):
        raise w.error("num_bits", bits, "8" if floats else "4 or 8")
    strategies = dict.fromkeys(("tensor", "channel", "group", *(["block"] if floats else [])))
    w.choice("strategy", "tensor", strategies)
    strategy, size = w.get("strategy", "tensor"), 0
    if strategy == "group":
        size = cast(int, w.integer("group_size", REQUIRED))
    structure: Any = w.get("block_structure")
    if strategy == "block" and structure not in ([128, 128], "128x128"):
        raise w.error("block_structure", structure, "[128, 128]")
    if floats and strategy == "group":
        raise w.error("strategy", strategy, "tensor, channel or block for float weights")
    order: Any = w.get("actorder")
    if order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise w.error("actorder", order, "group, weight or null")
    return Scheme(
        targets=targets,
        bits=bits,
        floats=floats,
        symmetric=w.boolean("symmetric", True),
        group=size,
        block=128 if strategy == "block" else 0,
        act_order=order in (True, "group", "dynamic"),
    )
