"""Reads .safetensors files and the index of a sharded model, tensor by tensor.

The header is checked here rather than by the ``safetensors`` package, so that every fault of a file is one line that
names it; and the bytes are read into a buffer of our own rather than mapped: a tensor is in memory once, and a file
that is replaced while the server runs changes nothing. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lmjax.weights.buffers import aligned_empty
from lmjax.weights.errors import WeightError
from lmjax.weights.streaming import fill, not_finite, read_exactly

Range = tuple[int, int]  # start, stop
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the format's own cap
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
LFS_CAUSE = "is a git-LFS pointer, not the file itself: run `git lfs pull` in the model's repository"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``offset`` and ``size`` in bytes, from the start of the file; ``stored`` is the file's
    name of the type (``BF16``, ``Q4_K``)."""

    name: str
    file: Path
    stored: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_bytes(info: TensorInfo, out: np.ndarray, start: int = 0) -> None:
    """Fill the contiguous array ``out`` with the tensor's bytes from ``start`` on."""
    with open(info.file, "rb", buffering=0) as f:
        _read(info, f.fileno(), info.offset + start, out.reshape(-1).view(np.uint8))


def read_into(info: TensorInfo, out: np.ndarray, rows: Range | None = None, columns: Range | None = None) -> None:
    """The tensor, or the ``rows`` of its first axis or ``columns`` of its last, straight to its place.

    out: as many values in the same order, of any shape, strides and float type; stored values are rounded to nearest
    even. Only what is asked for is read. Raises ``WeightError`` for NaN and infinite values, and
    ``FloatingPointError`` for those that become infinite.
    """
    kind, shape = np.dtype(DTYPES[info.stored]), info.shape
    start, width = (0, 1) if columns is None else (columns[0], columns[1] - columns[0])
    if rows is not None:
        start = rows[0] * math.prod(shape[1:])
    with open(info.file, "rb", buffering=0) as f:
        descriptor = f.fileno()

        def read(at: int, raw: np.ndarray) -> None:
            _read(info, descriptor, info.offset + (start + at) * kind.itemsize, raw)

        def read_columns(at: int, raw: np.ndarray) -> None:
            done = 0
            while done < len(raw):
                row, column = divmod(at + done // kind.itemsize, width)
                end = min(done + (width - column) * kind.itemsize, len(raw))
                place = row * shape[-1] + start + column
                _read(info, descriptor, info.offset + place * kind.itemsize, raw[done:end])
                done = end

        if not fill(out, kind, read if columns is None else read_columns):
            raise not_finite(info.file, info.name)


def read_tensor(info: TensorInfo, rows: Range | None = None, columns: Range | None = None) -> np.ndarray:
    """The tensor as stored, or the ``rows`` of its first axis or ``columns`` of its last, in a fresh buffer."""
    shape = info.shape
    if rows is not None:
        shape = (rows[1] - rows[0], *shape[1:])
    if columns is not None:
        shape = (*shape[:-1], columns[1] - columns[0])
    out = aligned_empty(shape, np.dtype(DTYPES[info.stored]))
    read_into(info, out, rows, columns)
    return out


def _read(info: TensorInfo, descriptor: int, at: int, raw: np.ndarray) -> None:
    if not read_exactly(descriptor, at, raw):
        raise WeightError(info.file, f"tensor {info.name}: the file was cut while it was being read")


def check_not_lfs(path: Path) -> None:
    with open(path, "rb") as f:
        if f.read(len(LFS_PREFIX)) == LFS_PREFIX:
            raise WeightError(path, LFS_CAUSE)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file by name, after checking that header and data fit the file exactly."""
    try:
        if not path.is_file() and path.exists():
            raise WeightError(path, "is no regular file")  # reading a pipe would wait for ever
        size = path.stat().st_size
        with open(path, "rb") as f:
            head = f.read(8)
            if size == 0:
                raise WeightError(path, "is empty (0 bytes)")
            check_not_lfs(path)
            if size < 8:
                raise WeightError(path, f"has {size} bytes, too few for a safetensors header")
            length = int.from_bytes(head, "little")
            if length > min(MAX_HEADER, size - 8):
                raise WeightError(
                    path, f"header length {length} exceeds the file ({size} bytes): not safetensors, or cut"
                )
            raw = f.read(length)
    except OSError as error:
        raise WeightError(path, f"cannot be read: {error.strerror}") from error
    return _tensors(path, _parse_json(path, raw), 8 + length, size)


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WeightError(path, f"the header is not JSON ({error}): the file is damaged") from error
    if not isinstance(header, dict):
        raise WeightError(path, "the header is not a JSON object: the file is damaged")
    header.pop("__metadata__", None)
    return header


def _tensors(path: Path, header: dict[str, Any], start: int, file_size: int) -> dict[str, TensorInfo]:
    found = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    end = start
    for info in sorted(found.values(), key=lambda t: (t.offset, t.size)):
        if info.offset != end:
            raise WeightError(path, f"tensor {info.name} starts at byte {info.offset}, expected {end}: damaged header")
        end += info.size
    if end != file_size:
        what = "the file is cut" if file_size < end else "the file has more than its header says"
        raise WeightError(path, f"has {file_size} bytes, its header describes {end}: {what}")
    return found


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    try:
        stored, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        integers = all(type(v) is int and v >= 0 for v in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        integers = False
    if not integers:
        raise WeightError(path, f"tensor {name}: the header entry is damaged")
    if not isinstance(stored, str) or stored not in DTYPES:
        raise WeightError(path, f"tensor {name}: unknown type {stored!r}; known: {', '.join(DTYPES)}")
    if end - begin != math.prod(shape) * np.dtype(DTYPES[stored]).itemsize:
        raise WeightError(path, f"tensor {name}: {end - begin} bytes do not hold {stored} {tuple(shape)}")
    return TensorInfo(name, path, stored, tuple(shape), start + begin, end - begin)


def read_directory(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a model directory by name.

    With an index only the files it names are read, so a stray older file beside the shards does not matter.
    """
    index = directory / INDEX
    if index.exists():
        return _read_shards(directory, index)
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1 and "-of-" not in files[0].name:
        return read_header(files[0])
    raise WeightError(directory, _why_none(directory, files))


def _why_none(directory: Path, files: list[Path]) -> str:
    if files:
        return f"has {len(files)} .safetensors files but no {INDEX}, which says what is in which"
    other = sorted(
        p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
    )
    if other:
        return f"only {other[0]} and the like, which can run code when read: convert the model to .safetensors"
    gguf = sorted(p.name for p in directory.glob("*.gguf"))
    if gguf:
        return f"no .safetensors file; to load {gguf[0]}, give its path as the model"
    return f"no weights: expected {SINGLE}, shards with {INDEX}, or the path of a .gguf file"


def _read_shards(directory: Path, index: Path) -> dict[str, TensorInfo]:
    check_not_lfs(index)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(index, "is not a JSON object with a weight_map: damaged") from error
    shards = {}
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightError(index, f"names {file!r}, which is not a file of this directory")
        if not (directory / file).exists():
            raise WeightError(directory / file, f"is missing; {INDEX} needs {len(files)} shards")
        shards[file] = read_header(directory / file)
    found = {}
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise WeightError(directory / file, f"tensor {name} is missing, though {INDEX} says it is here")
        found[name] = shards[file][name]
    return found
