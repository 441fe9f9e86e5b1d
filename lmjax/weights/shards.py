"""Which slices of a checkpoint's tensors make up one device's share of a parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lmjax.models.layout import AS_IT_IS, Index, TensorPart, View
from lmjax.weights.safetensors import Range
from lmjax.weights.streaming import convert


@dataclass(frozen=True)
class Piece:
    """``share[index]`` holds the ``rows`` (of axis 0) and ``columns`` (of the last axis) of a tensor; None: all.

    ``heads``: of the rows, where the checkpoint stores them interleaved, and ``rotary`` (see ``TensorPart``). Of a
    tensor with a view all is read, and cut then: the part as ``whole``, of which ``cut`` of an axis.
    """

    name: str
    index: Index
    shape: tuple[int, ...]  # of the slice
    rows: Range | None = None
    columns: Range | None = None
    heads: int = 0
    rotary: int = 0
    view: View = AS_IT_IS
    whole: tuple[int, ...] = ()
    cut: tuple[int, Range] | None = None

    @property
    def size(self) -> int:
        """Values that are read."""
        return math.prod(self.shape)

    @property
    def direct(self) -> bool:
        """Whether ``place`` can tell where the values go. Others are read and then put in order."""
        halves = not self.heads or (not self.rotary and self.shape[0] != self.heads)
        return self.view == AS_IT_IS and halves

    def with_columns(self, columns: int) -> Piece:
        """The same rows of a matrix of as many columns."""
        return replace(self, shape=(*self.shape[:-1], columns), whole=(*self.whole[:-1], columns))

    def by_expert(self) -> Iterator[tuple[int, Piece]]:
        """Of a share [E, *out, in]: an expert's number in it, and the piece of that expert's codes [out, in] in a share
        of it alone. Of a tensor [E, in, out] of all experts ``rows`` is the expert; input features that are cut are
        ``columns``, and no more in ``cut``."""
        if len(self.shape) != 3:  # one expert's own
            assert self.index and isinstance(self.index[0], int)
            yield self.index[0], replace(self, index=(0, *self.index[1:]))
            return
        experts, depth, out = self.shape
        axis, cut = self.cut or (None, (0, 0))
        columns = axis == len(self.whole) - 1
        first, end = cut if axis == 0 else (0, experts)
        rows = (1, *self.view.rows[1:]) if self.view.rows else ()
        for e in range(first, end):
            part = replace(
                self,
                shape=(out, depth),
                rows=(e, e + 1),
                columns=cut if columns else None,
                view=replace(self.view, transposed=False, rows=rows),
                whole=(1, *self.whole[1:]) if self.whole else (),
                cut=None if columns or axis == 0 else self.cut,
            )
            yield e - first, part

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
        halves = target.reshape(*target.shape[:axis], 2, target.shape[axis] // 2, *target.shape[axis + 1 :])
        return halves.swapaxes(axis, axis + 1)  # still a view: cutting an axis copies nothing

    def fill(self, share: np.ndarray, values: np.ndarray) -> None:
        """values: of ``shape``, as the checkpoint has them."""
        if self.direct:
            place = self.place(share)
            convert(values.reshape(place.shape), place)
            return
        values = TensorPart(self.name, self.shape, (), self.heads, self.rotary, self.view).in_order(values)
        if self.cut:
            axis, (start, stop) = self.cut
            values = values.reshape(self.whole)[(slice(None),) * axis + (slice(start, stop),)]
        target = share[(*self.index, ...)]
        convert(values.reshape(target.shape), target)


def pieces(
    parts: tuple[TensorPart, ...], spread: tuple[TensorPart, ...], shape: tuple[int, ...], index: tuple[slice, ...]
) -> list[Piece]:
    """The pieces of ``parameter[index]``, where ``index`` cuts at most one axis.

    ``parts``: of the model's own parameter. ``spread``, ``shape``: of the parameter that all devices hold together,
    whose vocabulary may be padded and whose KV heads may be repeated (``parallel.split.spread``).
    """
    cut = [axis for axis, (entry, n) in enumerate(zip(index, shape, strict=True)) if entry.indices(n)[:2] != (0, n)]
    if not cut:
        return [
            Piece(p.name, w.index, p.shape, heads=p.interleaved_heads, rotary=p.rotary, view=p.view)
            for p, w in zip(parts, spread, strict=True)
        ]
    (axis,) = cut
    start, stop, _ = index[axis].indices(shape[axis])
    found = (_piece(p, w, axis, shape, (start, stop)) for p, w in zip(parts, spread, strict=True))
    return [piece for piece in found if piece is not None]


def _piece(part: TensorPart, wide: TensorPart, axis: int, shape: tuple[int, ...], cut: Range) -> Piece | None:
    if part.view != AS_IT_IS:
        return _viewed(part, wide, axis, shape, cut)
    start, stop = cut
    entry = wide.index[axis] if axis < len(wide.index) else slice(None)
    if isinstance(entry, int):  # the tensor is one entry of that axis, an expert say
        if not start <= entry < stop:
            return None
        local = (*wide.index[:axis], entry - start, *wide.index[axis + 1 :])
        return Piece(part.name, local, part.shape, heads=part.interleaved_heads, rotary=part.rotary)
    if axis == len(shape) - 1 and len(part.shape) > 1:
        return Piece(part.name, wide.index, (*part.shape[:-1], stop - start), columns=cut)
    rows = _rows(part.shape[0], wide.shape[0], shape[axis], cut)
    count = rows[1] - rows[0]
    heads = part.interleaved_heads * count // part.shape[0]
    return Piece(part.name, wide.index, (count, *part.shape[1:]), rows=rows, heads=heads, rotary=part.rotary)


def _viewed(part: TensorPart, wide: TensorPart, axis: int, shape: tuple[int, ...], cut: Range) -> Piece | None:
    """``_piece`` of a part that is not whole rows of its tensor."""
    start, stop = cut
    entries = [wide.index[i] if i < len(wide.index) else slice(None) for i in range(len(shape))]
    if isinstance(entry := entries[axis], int):
        if not start <= entry < stop:
            return None
        index: Index = (*wide.index[:axis], entry - start, *wide.index[axis + 1 :])
        return Piece(part.name, index, part.shape, heads=part.interleaved_heads, rotary=part.rotary, view=part.view)
    target = [
        len(range(*entry.indices(n))) for entry, n in zip(entries, shape, strict=True) if not isinstance(entry, int)
    ]
    at = axis - sum(isinstance(entry, int) for entry in entries[:axis])
    # heads that are repeated: the tensor has fewer, and a device has one of them
    times = math.prod(target) // math.prod(part.own_shape)
    if times > 1 and part.own_shape[0] == wide.own_shape[0]:
        raise ValueError(f"{part.name}: {part.own_shape} does not fit into {target}")
    target[at] //= times
    first = start // times
    return Piece(
        part.name,
        wide.index,
        part.shape,
        heads=part.interleaved_heads,
        rotary=part.rotary,
        view=part.view,
        whole=tuple(target),
        cut=(at, (first, first + stop - start)),
    )


def _rows(have: int, wide: int, entries: int, cut: Range) -> Range:
    """Rows of a tensor of ``have`` rows for the entries ``cut`` of an axis of ``entries``, which has ``wide`` rows."""
    unit = -(-wide // entries)  # 1 for a vocabulary, whose axis is padded beyond its rows
    if have == wide:
        return min(cut[0] * unit, have), min(cut[1] * unit, have)
    times = wide // have  # heads that are repeated: a device has one of them
    assert cut[1] - cut[0] == 1, (have, wide, cut)
    first = cut[0] // times * unit
    return first, first + unit
