"""Quantised weight matrices as the kernels read them, and numpy code that makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["int4", "int8", "fp8", "int8_group", "fp8_group", "fp8_block", "mxfp4"]
NIBBLES = ("int4", "mxfp4")  # two numbers a byte
FP8_BLOCK = 128  # side of the square that shares a scale (DeepSeek's block format)
_FP8 = np.dtype(jnp.float8_e4m3fn)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantWeight:
    """A [K, N] matrix. ``kind`` is static; the arrays are a pytree's leaves. Scales may be of any float type, but for
    those of mxfp4.

    - int4: ``values`` uint8 [K / 2, N], two nibbles a byte: of each group of g rows the first half lies in the low
      nibbles, the second in the high ones, so that one tile of bytes gives two contiguous runs of K. ``scale``
      [K / g, N]. ``zero`` [K / g, N] in steps: w = (nibble - zero) * scale; None: symmetric, zero = 8.
    - mxfp4: nibbles in the same order, e2m1 numbers; ``scale`` uint8 [K / 32, N], exponents of two plus 127.
    - int8, fp8: ``values`` int8 or float8_e4m3fn [K, N], ``scale`` [N].
    - int8_group, fp8_group: the same values, ``scale`` [K / g, N].
    - fp8_block: ``values`` float8_e4m3fn [K, N], ``scale`` [ceil(K / 128), ceil(N / 128)].
    """

    values: Any
    scale: Any
    zero: Any = None
    kind: Kind = field(default="int4", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        k, n = self.values.shape
        return (2 * k if self.kind in NIBBLES else k), n

    @property
    def group(self) -> int:
        """Rows of K that share a scale (of int8 and fp8: all)."""
        k = self.shape[0]
        if self.kind == "fp8_block":
            return FP8_BLOCK
        return k // self.scale.shape[0] if self.kind in (*NIBBLES, "int8_group", "fp8_group") else k

    @property
    def num_bytes(self) -> int:
        """What a product has to read of it."""
        return sum(x.size * x.dtype.itemsize for x in (self.values, self.scale, self.zero) if x is not None)


def pack_int4(nibbles: np.ndarray, group: int) -> np.ndarray:
    """uint8 [K, N] of 0 .. 15 -> uint8 [K / 2, N]. ``ValueError`` where K is no multiple of an even group."""
    k, n = nibbles.shape
    if group % 2 or k % group:
        raise ValueError(f"K = {k} must be a multiple of the group ({group}), which must be even")
    low, high = np.moveaxis(nibbles.reshape(k // group, 2, group // 2, n), 1, 0)
    return (low | high << 4).astype(np.uint8).reshape(k // 2, n)


def unpack_int4(packed: np.ndarray, group: int) -> np.ndarray:
    """The inverse of ``pack_int4``."""
    half, n = packed.shape
    grouped = packed.reshape(2 * half // group, group // 2, n)
    return np.stack([grouped & 15, grouped >> 4], axis=1).reshape(2 * half, n)


def quantize_int4(w: np.ndarray, group: int, symmetric: bool) -> QuantWeight:
    """w float [K, N] -> nearest values in groups of ``group`` rows: no element is off by more than half a step.

    Asymmetric zeros are no integers, so that both ends of a group's range are met exactly.
    """
    k, n = w.shape
    if group % 2 or k % group:
        raise ValueError(f"K = {k} must be a multiple of the group ({group}), which must be even")
    grouped = np.asarray(w, np.float32).reshape(k // group, group, n)
    if symmetric:
        scale = _nonzero(np.abs(grouped).max(1) / np.float32(7))
        zero = np.full_like(scale, 8)
    else:
        low = grouped.min(1)
        scale = _nonzero((grouped.max(1) - low) / np.float32(15))
        zero = -low / scale
    nibbles = np.clip(np.rint(grouped / scale[:, None] + zero[:, None]), 0, 15).astype(np.uint8)
    return QuantWeight(pack_int4(nibbles.reshape(k, n), group), scale, None if symmetric else zero, "int4")


def quantize_int8(w: np.ndarray) -> QuantWeight:
    """w float [K, N] -> int8 with a scale per output channel; off by half a step at most."""
    w = np.asarray(w, np.float32)
    scale = _nonzero(np.abs(w).max(0) / np.float32(127))
    return QuantWeight(np.rint(w / scale).astype(np.int8), scale, None, "int8")


def quantize_fp8(w: np.ndarray, block: bool = False) -> QuantWeight:
    """w float [K, N] -> float8_e4m3fn, a scale per output channel or per 128 x 128 block. The largest becomes 448."""
    w = np.asarray(w, np.float32)
    if not block:
        scale = _nonzero(np.abs(w).max(0) / np.float32(448))
        return QuantWeight((w / scale).astype(_FP8), scale, None, "fp8")
    k, n = w.shape
    rows, columns = -(-k // FP8_BLOCK), -(-n // FP8_BLOCK)
    padded = np.pad(np.abs(w), ((0, rows * FP8_BLOCK - k), (0, columns * FP8_BLOCK - n)))
    scale = _nonzero(padded.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK).max((1, 3)) / np.float32(448))
    spread = np.repeat(np.repeat(scale, FP8_BLOCK, 0), FP8_BLOCK, 1)[:k, :n]
    return QuantWeight((w / spread).astype(_FP8), scale, None, "fp8_block")


def _nonzero(scale: np.ndarray) -> np.ndarray:
    """A group of zeros has no step: any will do."""
    return np.where(scale > 0, scale, 1).astype(np.float32)
