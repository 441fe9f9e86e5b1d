"""How tensors of checkpoints lie in parameters, and how a family's checkpoints name them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Index = tuple[int | slice, ...]
Take = tuple[int | tuple[int, int] | None, ...]  # by axis: an entry, a range, all. Hashable, as slices are not


@dataclass(frozen=True)
class Layout:
    """The names of a family's tensors: part of a parameter -> name without ``.weight``; {i} is the layer, {e} the
    expert, {h} the head. ``lmjax.models.names`` has the parts and their usual names."""

    names: dict[str, str] = field(default_factory=dict)
    transposed: bool = False  # the layers' matrices are [in, out]
    interleaved: bool = False  # the rotary pairs of a head are neighbours, not in its two halves
    prefix: str = ""  # of names, which some checkpoints leave out
    unused: tuple[str, ...] = ()  # ends of names of tensors that hold nothing of the model
    extra_layer: str = ""  # start of the names of a layer behind the last that belongs to something else


@dataclass(frozen=True)
class View:
    """Which numbers of a stored tensor a part is: its last two axes swapped if ``transposed``, then its rows (all
    axes but the last of a matrix) seen as ``rows``, of which ``take``. Loaders read such a tensor whole."""

    transposed: bool = False
    rows: tuple[int, ...] = ()  # (): as they are
    take: Take = ()

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the part."""
        return self.read(np.broadcast_to(np.zeros((), bool), stored)).shape

    def read(self, stored: Any) -> Any:
        """The part of a tensor (numpy or jax); rows that were seen as several axes are one again."""
        if self.transposed:
            stored = stored.swapaxes(-1, -2)
        if not self.rows:
            return stored
        rest = stored.shape[-1:] if stored.size > math.prod(self.rows) else ()
        part = stored.reshape(*self.rows, *rest)[as_index(self.take)]
        return part.reshape(-1, *rest)

    def write(self, stored: np.ndarray, part: np.ndarray) -> None:
        """Put the part where ``read`` finds it, in numpy."""
        at = np.arange(stored.size).reshape(stored.shape)
        stored.reshape(-1)[self.read(at)] = part.reshape(self.shape(stored.shape))


AS_IT_IS = View()


def as_index(take: Take) -> Index:
    return tuple(entry if isinstance(entry, int) else slice(*(entry or (None,))) for entry in take)


def as_take(index: Index) -> Take:
    return tuple(
        entry if isinstance(entry, int) else None if entry == slice(None) else (entry.start, entry.stop)
        for entry in index
    )


@dataclass(frozen=True)
class TensorPart:
    """One tensor of a checkpoint, or what ``view`` shows of it: ``parameter[index]`` holds its values in the same order
    (reshaped)."""

    name: str
    shape: tuple[int, ...]  # of the tensor in the checkpoint
    index: Index = ()
    # the q and k rows of these many heads have the two rotary halves of each head interleaved
    interleaved_heads: int = 0
    rotary: int = 0  # rows of a head that rotate, its first ones; 0: all
    view: View = AS_IT_IS

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of the part."""
        return self.shape if self.view == AS_IT_IS else self.view.shape(self.shape)

    def fill(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        """Write the tensor into its part of the parameter. ValueError if the shape is not ``self.shape``."""
        if tensor.shape != self.shape:
            raise ValueError(f"{self.name}: has shape {list(tensor.shape)}, the config asks for {list(self.shape)}")
        target = parameter[self.index]
        parameter[self.index] = self.in_order(tensor).reshape(target.shape)

    def in_order(self, tensor: Any) -> Any:
        """The part of the tensor with its rows in the parameter's order."""
        part = tensor if self.view == AS_IT_IS else self.view.read(tensor)
        return swap_halves(part, self.interleaved_heads, self.rotary, (-1, 2)) if self.interleaved_heads else part

    def extract(self, parameter: Any) -> Any:
        """The part back from the parameter (numpy or jax), ``own_shape``: the inverse of ``fill`` but for ``view``."""
        part = parameter[self.index].reshape(self.own_shape)
        return swap_halves(part, self.interleaved_heads, self.rotary, (2, -1)) if self.interleaved_heads else part

    def suffixed(self, suffix: str, tail: tuple[int, ...]) -> TensorPart:
        """``name`` + suffix, with ``tail`` as the last axes; transposed, it is before the last of ``shape``."""
        if tail and self.view.transposed:
            return replace(self, name=self.name + suffix, shape=(*self.shape[:-1], *tail, self.shape[-1]))
        if self.view.transposed:  # a bias is no matrix
            return replace(self, name=self.name + suffix, view=replace(self.view, transposed=False))
        return replace(self, name=self.name + suffix, shape=self.shape + tail)


def stored_tensor(parts: tuple[TensorPart, ...], parameter: np.ndarray) -> np.ndarray:
    """A tensor of the checkpoint back from the parameter; ``parts``: all that are of that tensor."""
    first = parts[0]
    if first.view == AS_IT_IS:
        return first.extract(parameter)
    stored = np.empty(first.shape, parameter.dtype)
    for part in parts:
        part.view.write(stored, part.extract(parameter))
    return stored


def swap_halves(tensor: Any, heads: int, rotary: int, split: tuple[int, int]) -> Any:
    """Rows [heads * H, ...]: of each head the first ``rotary`` (0: all), seen as [a, b], in the order [b, a]. Rows may
    be two axes, [heads, H]."""
    rest = tensor.shape[2:] if tensor.shape[0] == heads and tensor.ndim > 1 else tensor.shape[1:]
    by_head = tensor.reshape(heads, -1, *rest)
    turned = by_head[:, : rotary or None]
    swapped = turned.reshape(heads, *split, *rest).swapaxes(1, 2).reshape(turned.shape)
    if not rotary:
        return swapped.reshape(tensor.shape)
    whole = np if isinstance(tensor, np.ndarray) else _jax_numpy()
    return whole.concatenate([swapped, by_head[:, rotary:]], axis=1).reshape(tensor.shape)


def _jax_numpy() -> Any:
    import jax.numpy as jnp

    return jnp
