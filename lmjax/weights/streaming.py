"""Stored numbers on their way into place: read, checked and converted a piece at a time, in the CPU's cache.

So neither the check nor the conversion walks over the memory again, and beside the parameters themselves a thread
needs the room of a few pieces.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lmjax.weights.errors import WeightError

PIECE = 1 << 19  # bytes; half of a server CPU's second cache, or less
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}

_LOCAL = threading.local()

ReadAt = Callable[[int, np.ndarray], None]  # (first value, bytes to fill, uint8 [n])


def all_finite(values: np.ndarray) -> bool:
    """Whether no value of a contiguous array is NaN or infinite."""
    values, work = values.reshape(-1), _work()
    count = PIECE // max(values.dtype.itemsize, 1)
    test = _finite_floats if values.dtype.name in ("float32", "float64") else _finite_halves
    if values.dtype.name not in ("float32", "float64", *_EXPONENT):
        return True
    return all(test(values[start : start + count], work) for start in range(0, values.size, count))


def _finite_floats(values: np.ndarray, work: np.ndarray) -> bool:
    return bool(np.isfinite(values, out=work[: values.size].view(bool)).all())


def _finite_halves(values: np.ndarray, work: np.ndarray) -> bool:
    """All bits of the exponent are set in what is not finite: eight times as fast as numpy's test of these types."""
    exponent = np.uint16(_EXPONENT[values.dtype.name])
    bits = np.bitwise_and(values.view(np.uint16), exponent, out=work.view(np.uint16)[: values.size])
    return bool(bits.max() < exponent)


def _work() -> np.ndarray:
    """``PIECE`` bytes of this thread: fresh memory for each piece would cost more than the check."""
    if not hasattr(_LOCAL, "work"):
        _LOCAL.work = np.empty(PIECE, np.uint8)
    return _LOCAL.work


def convert(values: np.ndarray, out: np.ndarray) -> None:
    """Fills ``out``, rounding to nearest even. ``FloatingPointError`` where a finite number becomes infinite (float16
    ends at 65504)."""
    with np.errstate(over="raise"):
        # bfloat16 -> float16 has no overflow check of its own: go through float32
        narrow = out.dtype == np.float16 and values.dtype.itemsize == 2
        out[...] = values.astype(np.float32) if narrow else values


def runs(out: np.ndarray) -> Iterator[np.ndarray]:
    """An array as vectors, in C order: its contiguous parts, and its rows where they are not contiguous."""
    if out.flags.c_contiguous:
        yield out.reshape(-1)
    elif out.ndim == 1:
        yield out
    else:
        for part in out:
            yield from runs(part)


def fill(out: np.ndarray, kind: np.dtype, read: ReadAt) -> bool:
    """Fills ``out``, of any strides, in C order with numbers that are stored as ``kind``. False: it ended at one that
    is not finite."""
    at = 0
    count = max(PIECE // kind.itemsize, 1)
    for run in runs(out):
        direct = kind == run.dtype and run.flags.c_contiguous
        scratch = None if direct else np.empty(min(count, run.size), kind)
        for start in range(0, run.size, count):
            part = run[start : start + count]
            values = part if scratch is None else scratch[: part.size]
            read(at, values.view(np.uint8))
            if not all_finite(values):
                return False
            if scratch is not None:
                convert(values, part)
            at += part.size
    return True


def pour(out: np.ndarray, parts: Iterable[np.ndarray]) -> None:
    """Fills ``out``, of any strides, in C order with the values of all ``parts``."""
    places = runs(out)
    place = np.empty(0, out.dtype)
    for part in parts:
        values = part.reshape(-1)
        while values.size:
            if not place.size:
                place = next(places)
            count = min(place.size, values.size)
            convert(values[:count], place[:count])
            place, values = place[count:], values[count:]


def read_exactly(descriptor: int, at: int, out: np.ndarray) -> bool:
    """The file's bytes from ``at`` on into ``out``, uint8 [n]; False: it ends before."""
    done = 0
    while done < len(out):
        found = os.preadv(descriptor, [out[done:].data], at + done)
        if found == 0:
            return False
        done += found
    return True


def not_finite(file: object, name: str) -> WeightError:
    return WeightError(str(file), f"tensor {name} has NaN or infinite values: the checkpoint is damaged or diverged")
