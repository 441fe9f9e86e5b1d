"""Reads .gguf files: metadata, tensor table, and tensors dequantised to float32.

The header is parsed here: the ``gguf`` package's own reader takes seconds for a vocabulary and turns a damaged file
into any exception there is. The dequantisation is that package's. Format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmjax.weights import safetensors
from lmjax.weights.buffers import aligned_empty
from lmjax.weights.errors import WeightError
from lmjax.weights.safetensors import Range, TensorInfo, check_not_lfs
from lmjax.weights.streaming import all_finite, not_finite, pour

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
CHUNK = 1 << 18  # elements dequantised at once: bounds the temporaries, and keeps them in the CPU cache


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """``metadata``: plain Python values (arrays are lists). ``tensors``: shapes are numpy's, rows first."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads little-endian values from the mapped header; beyond its end it raises ``struct.error``."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise struct.error(f"{size} bytes wanted at byte {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code)))

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        # a tokenizer's pieces need not be valid UTF-8
        return self.take(self.scalar("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in SCALARS:
                return (
                    list(map(_shortest, self.scalars("f", count)))
                    if inner == 6
                    else [*self.scalars(SCALARS[inner], count)]
                )
            if count > len(self.data):  # each element takes at least a byte
                raise struct.error(f"an array of {count} elements")
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise struct.error(f"unknown value type {kind}")
        value = self.scalar(SCALARS[kind])
        return _shortest(value) if kind == 6 else value


def _shortest(value: float) -> float:
    """1e-05 stored as a float32 reads as 1e-05, not as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def read_gguf(path: Path) -> GGUFFile:
    """Metadata and tensor table of a file, checked against its size. No tensor is read."""
    try:
        size = path.stat().st_size
        if size == 0:
            raise WeightError(path, "is empty (0 bytes)")
        check_not_lfs(path)
        with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != MAGIC:
                raise WeightError(path, f"starts with {data[:4]!r}, not {MAGIC!r}: not a GGUF file")
            return _parse(path, _Cursor(data), size)
    except OSError as error:
        raise WeightError(path, f"cannot be read: {error.strerror}") from error
    except (struct.error, OverflowError, MemoryError, RecursionError) as error:
        raise WeightError(path, f"the header is damaged, or the file is cut ({error})") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> GGUFFile:
    cursor.take(4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        endian = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise WeightError(path, f"GGUF version {version}{endian}; known: {', '.join(map(str, VERSIONS))}")
    num_tensors, num_values = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_values):
        key, kind = cursor.string(), cursor.scalar("I")
        metadata[key] = cursor.value(kind)
    if metadata.get("split.count", 1) > 1:
        raise WeightError(path, f"is one of {metadata['split.count']} parts: join them with llama-gguf-split --merge")
    table = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise WeightError(path, f"general.alignment is {alignment!r}, must be a power of two")
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(path, metadata, {entry[0]: _tensor(path, entry, start, size) for entry in table})


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = cursor.string(), cursor.scalar("I")
    if num_dims > 4:
        raise struct.error(f"tensor {name} has {num_dims} dimensions")
    return name, cursor.scalars("Q", num_dims)[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _tensor(path: Path, entry: tuple[str, tuple[int, ...], int, int], start: int, file_size: int) -> TensorInfo:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, code, offset = entry
    try:
        kind = GGMLQuantizationType(code)
    except ValueError as error:
        raise WeightError(path, f"tensor {name}: unknown ggml type {code}") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % block:
        raise WeightError(path, f"tensor {name}: rows of {shape[-1]} are no multiple of {kind.name}'s block of {block}")
    size = math.prod(shape) // block * block_bytes
    if start + offset + size > file_size:
        raise WeightError(
            path, f"tensor {name} ends at byte {start + offset + size}, the file has {file_size}: the file is cut"
        )
    return TensorInfo(name, path, kind.name, shape, start + offset, size)


def dequantisable() -> list[str]:
    """The types that the installed ``gguf`` package can turn into float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    known = []
    for kind in GGMLQuantizationType:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        known.append(kind.name)
    return known


def read_tensor(info: TensorInfo, rows: Range | None = None, columns: Range | None = None) -> np.ndarray:
    """float32 array of ``info.shape``, or the ``rows`` of its first axis or ``columns`` of its last."""
    shape = info.shape
    if rows is not None:
        shape = (rows[1] - rows[0], *shape[1:])
    if columns is not None:
        shape = (*shape[:-1], columns[1] - columns[0])
    out = aligned_empty(shape, np.dtype(np.float32))
    read_into(info, out, rows, columns)
    return out


def read_into(info: TensorInfo, out: np.ndarray, rows: Range | None = None, columns: Range | None = None) -> None:
    """As ``safetensors.read_into``; dequantised by chunks of rows. Columns may cut quantised blocks, so whole rows are
    read for them."""
    if rows is not None:
        each = info.size // max(info.shape[0], 1)
        info = replace(
            info,
            shape=(rows[1] - rows[0], *info.shape[1:]),
            offset=info.offset + rows[0] * each,
            size=(rows[1] - rows[0]) * each,
        )
    if info.stored == "F32" and columns is None:
        safetensors.read_into(info, out)
    else:
        parts = _dequantised(info)
        pour(out, parts if columns is None else (part[:, slice(*columns)] for part in parts))


def _dequantised(info: TensorInfo) -> Iterator[np.ndarray]:
    """float32 [rows, width], one after the other."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[info.stored]
    width, count = info.shape[-1] if info.shape else 1, math.prod(info.shape[:-1])
    each = info.size // max(count, 1)  # bytes of a row
    step = max(CHUNK // max(width, 1) // 16 * 16, 16)
    for at in range(0, count, step):
        raw = np.empty((min(step, count - at), each), np.uint8)
        safetensors.read_bytes(info, raw, at * each)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError as error:  # the loader asks dequantisable() first
            known = ", ".join(dequantisable())
            raise WeightError(
                info.file, f"tensor {info.name}: type {info.stored} is not supported; known: {known}"
            ) from error
        values = np.ascontiguousarray(values, np.float32)
        if not all_finite(values):
            raise not_finite(info.file, info.name)
        yield values
