"""Which matrices of a model are kept quantised, and how; and their arrays from a checkpoint's codes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from lmjax.models.layout import TensorPart
from lmjax.models.names import Names
from lmjax.models.params import ParamSpec, layer_of, named_leaves, param_specs
from lmjax.models.spec import DecoderSpec
from lmjax.nn.packing import Packing
from lmjax.weights.buffers import aligned_empty
from lmjax.weights.codes import FP4, Codes
from lmjax.weights.quant import Layout, Stacks

LEAST_GROUP = 32  # of the kernels: a smaller one is less than a tile of the tensor cores
MATRIX = re.compile(r"layers\.\d+\.(.+\.)?(qkv|o|gate_up|down|q_down|q_up|kv_down)\.weight")
FIELDS = ("values", "scale", "zero")
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "uint8": np.uint8,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def is_matrix(parameter: str) -> bool:
    """Whether it may be packed: those of layers, experts too; embedding, head and routers stay floats."""
    return MATRIX.fullmatch(parameter) is not None


def of_experts(parameter: str) -> bool:
    """Whether it is a stack of experts' matrices [E, *out, in]."""
    return ".experts." in parameter


def chosen(names: Names) -> frozenset[str]:
    """The checkpoint's tensors that make up such matrices."""
    return frozenset(part.name for parameter, parts in names.items() if is_matrix(parameter) for part in parts)


def plain(spec: DecoderSpec) -> DecoderSpec:
    """The model with nothing packed."""
    return replace(spec, layers=tuple(replace(layer, packing=()) for layer in spec.layers))


def packed(
    spec: DecoderSpec,
    names: Names,
    layout: Layout,
    shares: Callable[[ParamSpec], int],
    allowed: Callable[[ParamSpec, Packing], bool],
) -> DecoderSpec:
    """``spec`` with the packing of each matrix whose tensors (q, k and v) are all stored in one way that fits.

    shares: over how many devices its input features are spread. A group that is cut becomes several.
    """
    found: dict[int, list[tuple[str, Packing]]] = {}
    for parameter, p in named_leaves(param_specs(plain(spec))).items():
        if not is_matrix(parameter):
            continue
        kinds = {_stored(layout, part) for part in names[parameter]}
        packing = kinds.pop() if len(kinds) == 1 else None
        if packing is not None and allowed(p, packing):
            packing = fitted(packing, p.shape[-1], shares(p))
            layer = layer_of(parameter)
            if packing is not None and layer is not None:
                found.setdefault(layer, []).append((parameter.split(".", 2)[2], packing))
    layers = tuple(replace(layer, packing=tuple(found.get(i, ()))) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


def _stored(layout: Layout, part: TensorPart) -> Packing | None:
    """How a checkpoint keeps a tensor."""
    if len(part.shape) == 3:
        return layout.stack(part.name) if isinstance(layout, Stacks) else None
    if part.view.transposed:
        return None
    return layout.packing(part.name.removesuffix(".weight"), *part.shape)


def fitted(packing: Packing, columns: int, shares: int) -> Packing | None:
    """For one device's share of ``columns`` input features; None: it has no whole groups that kernels take."""
    if not packing.group:
        return packing
    if columns % shares or columns % packing.group:
        return None
    group = math.gcd(packing.group, columns // shares)
    return replace(packing, group=group) if group >= LEAST_GROUP and group % 2 == 0 else None


def packings(spec: DecoderSpec) -> dict[str, Packing]:
    """By parameter (``layers.0.attn.qkv.weight``)."""
    return {f"layers.{i}.{name}": p for i, layer in enumerate(spec.layers) for name, p in layer.packing}


def conform(codes: Codes, packing: Packing, columns: tuple[int, int] | None) -> Codes:
    """The columns of a matrix's codes with the groups of ``packing``. ValueError: why it cannot be."""
    if codes.groups is not None:
        raise ValueError("its groups are in the order of the activations (g_idx), the config says they are not")
    wanted = FP4 if packing.kind == "mxfp4" else np.dtype(DTYPES[packing.values_dtype])
    if codes.values.dtype != wanted:
        raise ValueError(f"it holds {codes.values.dtype}, the config says {wanted}")
    values = codes.values.view(np.uint8) if wanted == FP4 else codes.values
    zero = codes.zero
    if not packing.zero:
        middle = 8 if packing.kind == "int4" else 0
        if zero is not None and (zero != middle).any():
            raise ValueError("it has zeros, the config says it is symmetric")
        zero = None
    elif zero is None:
        raise ValueError("it has no zeros")
    width, scale = values.shape[1], codes.scale
    if packing.group:
        times, rest = divmod(width // packing.group, scale.shape[1])
        if rest or not times:
            raise ValueError(f"it has {scale.shape[1]} groups, the config gives {width // packing.group}")
        scale = np.repeat(scale, times, 1)
        zero = None if zero is None else np.repeat(zero, times, 1)
    elif scale.shape[1] != 1:
        raise ValueError(f"it has {scale.shape[1]} groups, the config gives one")
    if columns is None:
        return Codes(values, scale, zero)
    first, last = columns
    cut = slice(first // packing.group, last // packing.group) if packing.group else slice(None)
    return Codes(values[:, first:last], scale[:, cut], None if zero is None else zero[:, cut])


def empty(shape: tuple[int, ...], packing: Packing) -> dict[str, np.ndarray]:
    """Arrays for the codes of a share [*out, in], zeros."""
    *out, columns = shape
    groups = columns // packing.group if packing.group else 1
    arrays = {
        "values": np.zeros(shape, DTYPES[packing.values_dtype]),
        "scale": np.zeros((*out, groups), np.float32),
    }
    return arrays | ({"zero": np.zeros((*out, groups), np.float32)} if packing.zero else {})


def leaves(arrays: dict[str, np.ndarray], packing: Packing, experts: bool) -> dict[str, np.ndarray]:
    """``Quantized``'s leaves of such arrays. FloatingPointError: a scale beyond its type."""
    out = {}
    for name, array in arrays.items():
        at = packing.input_axis(array.ndim, experts)
        if name == "values":
            moved = np.moveaxis(_pack(array, packing.group) if packing.per_byte == 2 else array, -1, at)
        else:
            moved = _scales(np.moveaxis(array, -1, at) if packing.group else array[..., 0], packing)
        out[name] = aligned_empty(moved.shape, moved.dtype)
        out[name][...] = moved
    return out


def _scales(array: np.ndarray, packing: Packing) -> np.ndarray:
    if packing.kind == "mxfp4":
        return exponents(array)
    with np.errstate(over="raise"):
        return array.astype(DTYPES[packing.scale_dtype])


def exponents(scales: np.ndarray) -> np.ndarray:
    """uint8, plus 127, of powers of two; 0 for 0, the scale of what no tensor fills. ValueError: they are no such."""
    mantissa, exponent = np.frexp(scales)
    if not ((mantissa == 0.5) | (scales == 0)).all():
        raise ValueError("it has scales that are no powers of two")
    return np.where(scales == 0, 0, exponent + 126).astype(np.uint8)


def _pack(nibbles: np.ndarray, group: int) -> np.ndarray:
    """uint8 [*out, in] of 0 .. 15 -> [*out, in / 2], as ``quant_matmul`` reads it: of each group the first half in the
    low nibbles, the second in the high ones."""
    *out, columns = nibbles.shape
    halves = nibbles.reshape(*out, columns // group, 2, group // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)).reshape(*out, columns // 2)
