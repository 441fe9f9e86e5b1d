"""Host buffers and the conversion of stored numbers to the type that the model runs in."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from lmjax.weights.streaming import convert

ALIGNMENT = 64  # bytes; the CPU backend takes such arrays over without a copy
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like ``np.empty``, C-contiguous, starting at a multiple of ``ALIGNMENT`` bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``array`` in ``dtype``, rounded to nearest even, in a fresh aligned buffer unless it is one already.

    Raises ``FloatingPointError`` where a finite number becomes infinite (float16 ends at 65504).
    """
    if array.dtype == dtype and array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    out = aligned_empty(array.shape, dtype)
    convert(array, out)
    return out
