"""Reads matrices that stay quantised: a checkpoint's codes into the leaves of a ``Quantized``."""

from __future__ import annotations

import numpy as np

from lmjax.models.layout import AS_IT_IS
from lmjax.nn.packing import Packing
from lmjax.weights import packing
from lmjax.weights.buffers import aligned_empty
from lmjax.weights.checkpoint import Checkpoint
from lmjax.weights.codes import Codes
from lmjax.weights.errors import WeightError
from lmjax.weights.shards import Piece
from lmjax.weights.streaming import all_finite, not_finite

Leaves = dict[str, np.ndarray]


def read_packed(
    checkpoint: Checkpoint, pieces: list[Piece], shape: tuple[int, ...], kept: Packing, experts: bool
) -> Leaves:
    """The leaves of one share of a matrix [*out, in], or of experts' [E, *out, in], that ``pieces`` make up; where
    there are none, zeros. ``WeightError``: what is stored does not fit ``kept``.

    Experts come one by one, so beside the leaves only one of them is in memory.
    """
    if not experts:
        return _matrix(checkpoint, pieces, shape, kept, experts)
    of_expert: dict[int, list[Piece]] = {}
    for piece in pieces:
        for e, part in piece.by_expert():
            of_expert.setdefault(e, []).append(part)
    out: Leaves = {}
    for e in range(shape[0]):
        made = _matrix(checkpoint, of_expert.get(e, []), (1, *shape[1:]), kept, experts)
        for name, leaf in made.items():
            if name not in out:
                out[name] = aligned_empty((shape[0], *leaf.shape[1:]), leaf.dtype)
            out[name][e] = leaf[0]
    return out


def _matrix(
    checkpoint: Checkpoint, pieces: list[Piece], shape: tuple[int, ...], kept: Packing, experts: bool
) -> Leaves:
    arrays, at = packing.empty(shape, kept), ""
    latest: tuple[str, Codes] | None = None  # a tensor that holds several parts is read once
    try:
        for piece in pieces:
            at = piece.name
            if latest is None or piece.view == AS_IT_IS or latest[0] != at:
                latest = at, _codes(checkpoint, piece, kept)
            codes = latest[1]
            for name, values in (("values", codes.values), ("scale", codes.scale), ("zero", codes.zero)):
                if values is not None:
                    piece.with_columns(values.shape[1]).fill(arrays[name], values)
        return packing.leaves(arrays, kept, experts)
    except (ValueError, FloatingPointError) as error:
        if isinstance(error, WeightError):
            raise
        info = checkpoint.infos[at]
        raise WeightError(info.file, f"tensor {at} cannot be kept as it is stored: {error}") from error


def _codes(checkpoint: Checkpoint, piece: Piece, kept: Packing) -> Codes:
    found = checkpoint.codes.get(piece.name)
    if found is None:
        raise ValueError("it is not quantised, the config says it is (modules_to_not_convert)")
    codes = found.read(piece.rows)
    assert isinstance(codes, Codes)
    if not all_finite(codes.scale):
        raise not_finite(checkpoint.infos[piece.name].file, piece.name)
    return packing.conform(codes, kept, piece.columns)
