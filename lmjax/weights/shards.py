"""Which slices of a checkpoint's tensors make up one device's share of a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmjax.models.names import Index, TensorPart
from lmjax.weights.safetensors import Range
from lmjax.weights.streaming import convert


@dataclass(frozen=True)
class Piece:
    """``share[index]`` holds the ``rows`` (of axis 0) and ``columns`` (of the last axis) of a tensor; None: all.

    ``heads``: of the rows, where the checkpoint stores them interleaved (see ``TensorPart``).
    """

    name: str
    index: Index
    shape: tuple[int, ...]  # of the slice
    rows: Range | None = None
    columns: Range | None = None
    heads: int = 0

    @property
    def size(self) -> int:
        """Values that are read."""
        return math.prod(self.shape)

    def place(self, share: np.ndarray) -> np.ndarray:
        """Where the values go: a view of ``share`` with as many, in the checkpoint's order. Rows of ``share`` that the
        tensor does not have (a padded vocabulary) are set to zero."""
        target = share[(*self.index, ...)]  # a view, even of a single number
        if target.size != self.size:
            target[self.shape[0] :] = 0
            return target[: self.shape[0]]
        if not self.heads:
            return target
        axis = target.ndim - len(self.shape)  # of a head's features, whose two halves are interleaved in the checkpoint
        halves = target.view()
        halves.shape = (*target.shape[:axis], 2, target.shape[axis] // 2, *target.shape[axis + 1 :])
        return halves.swapaxes(axis, axis + 1)

    def fill(self, share: np.ndarray, values: np.ndarray) -> None:
        """values: of ``shape``, as the checkpoint has them."""
        place = self.place(share)
        convert(values.reshape(place.shape), place)


def pieces(
    parts: tuple[TensorPart, ...], spread: tuple[TensorPart, ...], shape: tuple[int, ...], index: tuple[slice, ...]
) -> list[Piece]:
    """The pieces of ``parameter[index]``, where ``index`` cuts at most one axis.

    ``parts``: of the model's own parameter. ``spread``, ``shape``: of the parameter that all devices hold together,
    whose vocabulary may be padded and whose KV heads may be repeated (``parallel.split.spread``).
    """
    cut = [axis for axis, (entry, n) in enumerate(zip(index, shape, strict=True)) if entry.indices(n)[:2] != (0, n)]
    if not cut:
        return [Piece(p.name, w.index, p.shape, heads=p.interleaved_heads) for p, w in zip(parts, spread, strict=True)]
    (axis,) = cut
    start, stop, _ = index[axis].indices(shape[axis])
    found = (_piece(p, w, axis, shape, (start, stop)) for p, w in zip(parts, spread, strict=True))
    return [piece for piece in found if piece is not None]


def _piece(part: TensorPart, wide: TensorPart, axis: int, shape: tuple[int, ...], cut: Range) -> Piece | None:
    start, stop = cut
    entry = wide.index[axis] if axis < len(wide.index) else slice(None)
    if isinstance(entry, int):  # the tensor is one entry of that axis, an expert say
        if not start <= entry < stop:
            return None
        local = (*wide.index[:axis], entry - start, *wide.index[axis + 1 :])
        return Piece(part.name, local, part.shape, heads=part.interleaved_heads)
    if axis == len(shape) - 1 and len(part.shape) > 1:
        return Piece(part.name, wide.index, (*part.shape[:-1], stop - start), columns=cut)
    rows = _rows(part.shape[0], wide.shape[0], shape[axis], cut)
    count = rows[1] - rows[0]
    heads = part.interleaved_heads * count // part.shape[0]
    return Piece(part.name, wide.index, (count, *part.shape[1:]), rows=rows, heads=heads)


def _rows(have: int, wide: int, entries: int, cut: Range) -> Range:
    """Rows of a tensor of ``have`` rows for the entries ``cut`` of an axis of ``entries``, which has ``wide`` rows."""
    unit = -(-wide // entries)  # 1 for a vocabulary, whose axis is padded beyond its rows
    if have == wide:
        return min(cut[0] * unit, have), min(cut[1] * unit, have)
    times = wide // have  # heads that are repeated: a device has one of them
    assert cut[1] - cut[0] == 1, (have, wide, cut)
    first = cut[0] // times * unit
    return first, first + unit
