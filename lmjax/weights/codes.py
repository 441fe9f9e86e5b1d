"""Weights as numbers of few bits with scales: what every quantised layout is read into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from lmjax.nn.packing import Packing
from lmjax.weights.safetensors import Range, TensorInfo

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP4 = np.dtype(ml_dtypes.float4_e2m1fn)  # a byte each
Infos = dict[str, TensorInfo]


@dataclass(frozen=True)
class Codes:
    """Rows of a matrix [out, in]: ``(values - zero) * scale``, each group of columns with its own scale and zero.

    ``values``: uint8, int8, float8_e4m3fn, float4_e2m1fn, or float32 where they are not evenly spaced. ``groups``: of
    each column, where they are no equal runs (GPTQ's act-order).
    """

    values: np.ndarray  # [rows, in]
    scale: np.ndarray  # float32 [rows, groups]; one group: a scale a row
    zero: np.ndarray | None = None  # float32 [rows, groups], in steps
    groups: np.ndarray | None = None  # int [in]

    def dense(self) -> np.ndarray:
        """float32 [rows, in]."""
        rows, columns = self.values.shape
        count = self.scale.shape[1]
        if self.groups is None and columns % count == 0:
            out = self.values.astype(np.float32).reshape(rows, count, columns // count)
            if self.zero is not None:
                out -= self.zero[:, :, None]
            out *= self.scale[:, :, None]
            return out.reshape(rows, columns)
        groups = np.arange(columns) // -(-columns // count) if self.groups is None else self.groups
        out = self.values.astype(np.float32)
        if self.zero is not None:
            out -= self.zero[:, groups]
        out *= self.scale[:, groups]
        return out


@dataclass(frozen=True)
class Stored:
    """A weight that a checkpoint keeps quantised. ``read(rows)``: those rows of its first axis, None: all; an array
    where it is no matrix of codes.

    The weight of all experts is a tensor [E, in, out]; its codes are those of the experts' matrices [out, in], one
    below the other.
    """

    shape: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    read: Callable[[Range | None], Codes | np.ndarray]
    packing: Packing | None = None  # as it is stored, where a weight type fits it

    @property
    def size(self) -> int:
        return sum(info.size for info in self.tensors)

    def dense(self, rows: Range | None = None) -> np.ndarray:
        read = self.read(rows)
        found = read.dense() if isinstance(read, Codes) else read
        if len(self.shape) == 3:
            return np.ascontiguousarray(found.reshape(-1, *self.shape[:0:-1]).swapaxes(1, 2))
        return found

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def nibbles(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unsigned integers of ``bits`` from int32 words that pack them along ``axis``, lowest bits first -> uint8."""
    per_word = 32 // bits
    axis %= words.ndim
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    shape = [1] * (words.ndim + 1)
    shape[axis + 1] = per_word
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    found = (np.expand_dims(unsigned, axis + 1) >> shifts.reshape(shape)) & np.uint32(2**bits - 1)
    return found.astype(np.uint8).reshape(*words.shape[:axis], words.shape[axis] * per_word, *words.shape[axis + 1 :])


def pack_words(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The inverse of ``nibbles``; the axis is padded with zeros to whole words. Returns int32."""
    per_word = 32 // bits
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    rest = -moved.shape[-1] % per_word
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, rest)])
    grouped = moved.reshape(*moved.shape[:-1], -1, per_word) << (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))
    words = np.bitwise_or.reduce(grouped, axis=-1)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def within(rows: Range | None, count: int) -> Range:
    return (0, count) if rows is None else rows


def float32(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
