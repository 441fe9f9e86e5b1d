"""The engine's parameters from the tensors of a Hugging Face checkpoint and back: pure functions of arrays.

Both follow ``models.names``. They are made of slices, reshapes and concatenations alone, so they may be traced,
compiled and differentiated. With numpy arrays ``to_hf`` stays in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from lmjax.models.layout import AS_IT_IS, Take, TensorPart, as_index, as_take
from lmjax.models.names import harmless, hf_names
from lmjax.models.params import DecoderParams, layer_of, map_named, named_leaves, param_specs, with_layer
from lmjax.models.spec import DecoderSpec
from lmjax.weights.errors import WeightError

Array = Any


@dataclass(frozen=True)
class Part:
    """How one tensor lies in a parameter: ``parameter[index]`` has its values, each head ``times`` times in a row.

    A parameter may have more rows than the tensor (a padded vocabulary): zeros.
    """

    shape: tuple[int, ...]  # of the tensor
    index: Take
    times: int = 1
    head: int = 1  # rows of one head, where times > 1
    own: TensorPart | None = None  # where the tensor's numbers are in another order, or those of several parts


@dataclass(frozen=True)
class Made:
    """What a parameter is made of. ``shape``: without the axis of stages; ``stages``: the parts of each stage's, none
    for a layer that only fills the last stage (zeros)."""

    shape: tuple[int, ...]
    stages: tuple[tuple[Part, ...], ...]
    stacked: bool  # whether the parameter has the axis of stages

    @property
    def plain(self) -> bool:
        """The parameter is its one tensor as it is."""
        [*parts] = self.stages[0]
        return (
            not self.stacked
            and len(parts) == 1
            and not parts[0].index
            and parts[0].shape == self.shape
            and not parts[0].own
        )


def to_hf(params: DecoderParams, spec: DecoderSpec) -> dict[str, Array]:
    """{name in a Hugging Face checkpoint: tensor} of the engine's parameters.

    spec: of the model (``spec_from_hf``). ``params`` may be in its own layout or in one that is spread over a mesh (KV
    heads repeated, vocabulary padded, stages stacked): of repeated heads the first is taken. ``WeightError`` for a tree
    that is neither.
    """
    wide = layout_of(params, spec)
    leaves = named_leaves(params)
    out: dict[str, Array] = {}
    for parameter, (made, names) in making(spec, wide).items():
        for stage, tensors in enumerate(names):
            value = leaves[parameter][stage] if made.stacked else leaves[parameter]
            out |= extract(made.stages[stage], tensors, value)
    return {part.name: out[part.name] for parts in hf_names(spec).values() for part in parts}


def from_hf(tensors: Mapping[str, Array], spec: DecoderSpec, spread: DecoderSpec | None = None) -> DecoderParams:
    """The engine's parameters of the tensors of a Hugging Face checkpoint, the inverse of ``to_hf``.

    spread: the layout of a mesh (``lmjax.parallel.split.spread``), None: the model's own. Types stay. A tied head's
    copy is left out, as by the loader; other tensors that the model has no place for are refused, as are missing ones
    and wrong shapes: ``WeightError``.
    """
    check_tensors({name: tuple(x.shape) for name, x in tensors.items() if not harmless(name, spec)}, spec)
    table = making(spec, spread or spec)

    def make(parameter: str, _: Any) -> Array:
        made, names = table[parameter]
        return build(made, [[tensors[name] for name in stage] for stage in names])

    return map_named(make, param_specs(spread or spec))


def making(spec: DecoderSpec, wide: DecoderSpec) -> dict[str, tuple[Made, tuple[tuple[str, ...], ...]]]:
    """By parameter of ``wide``, a layout of ``spec``: what it is made of, and the names of each stage's tensors."""
    own, spread = hf_names(spec), hf_names(replace(wide, stages=1))
    count, out = len(wide.layers), {}
    for parameter, param in named_leaves(param_specs(wide)).items():
        layer = layer_of(parameter)
        stacked = wide.stages > 1 and layer is not None
        shape = param.shape[1:] if stacked else param.shape
        holders = [parameter]
        if stacked:
            assert layer is not None
            holders = [with_layer(parameter, stage * count + layer) for stage in range(wide.stages)]
        sources = [own.get(holder, ()) for holder in holders]
        stages = tuple(
            tuple(_part(p, w, shape) for p, w in zip(parts, spread[parameter], strict=True)) if parts else ()
            for parts in sources
        )
        names = tuple(tuple(part.name for part in parts) for parts in sources)
        out[parameter] = Made(shape, stages, stacked), names
    return out


def _part(own: TensorPart, wide: TensorPart, shape: tuple[int, ...]) -> Part:
    index = as_take(wide.index)
    # without its index, which has slices, and its name: layers alike are converted by one program
    turned = replace(own, name="", index=()) if own.view != AS_IT_IS or own.interleaved_heads else None
    if own.own_shape == wide.own_shape:
        return Part(own.shape, index, own=turned)
    times = wide.own_shape[0] // own.own_shape[0]
    return Part(own.shape, index, times, own.own_shape[0] * times // shape[0], turned)


def build(made: Made, tensors: list[list[Array]]) -> Array:
    """The parameter of its tensors, by stage."""
    if not made.stacked:
        return _join(made.stages[0], tensors[0], made.shape)
    found = [_join(parts, own, made.shape) for parts, own in zip(made.stages, tensors, strict=True) if parts]
    empty = len(made.stages) - len(found)  # at the end
    return jnp.stack(found + [jnp.zeros_like(found[0])] * empty)


def _join(parts: tuple[Part, ...], tensors: list[Array], shape: tuple[int, ...]) -> Array:
    entries = [(part.index, _repeat(part, tensor)) for part, tensor in zip(parts, tensors, strict=True)]
    return _concatenate(entries, shape)


def _repeat(part: Part, tensor: Array) -> Array:
    if part.own:
        tensor = part.own.in_order(tensor)
    if part.times == 1:
        return tensor
    heads = tensor.reshape(-1, part.head, *tensor.shape[1:])
    return jnp.repeat(heads, part.times, axis=0).reshape(-1, *tensor.shape[1:])


def _concatenate(entries: list[tuple[Take, Array]], shape: tuple[int, ...]) -> Array:
    """The array of ``shape`` in which each entry fills the place of its index. Together they fill it."""
    axis = next((i for i, entry in enumerate(entries[0][0]) if entry is not None), None)
    if axis is None:
        [(_, tensor)] = entries
        if tensor.size < math.prod(shape):
            return jnp.pad(tensor, [(0, shape[0] - tensor.shape[0]), *([(0, 0)] * (tensor.ndim - 1))])
        return tensor.reshape(shape)
    groups: dict[tuple[int, int], list[tuple[Take, Array]]] = {}
    for index, tensor in entries:
        entry = index[axis]
        assert entry is not None
        cut = (entry, entry + 1) if isinstance(entry, int) else entry
        groups.setdefault(cut, []).append(((*index[:axis], None, *index[axis + 1 :]), tensor))
    pieces = [
        _concatenate(group, (*shape[:axis], stop - start, *shape[axis + 1 :]))
        for (start, stop), group in sorted(groups.items(), key=lambda item: item[0])
    ]
    xp = np if isinstance(pieces[0], np.ndarray) else jnp
    return pieces[0] if len(pieces) == 1 else xp.concatenate(pieces, axis=axis)


def extract(parts: tuple[Part, ...], names: tuple[str, ...], parameter: Array) -> dict[str, Array]:
    """The tensors back from the parameter (of one stage; numpy or jax)."""
    found: dict[str, list[tuple[Part, Array]]] = {}
    for part, name in zip(parts, names, strict=True):
        found.setdefault(name, []).append((part, _extract(part, parameter)))
    return {name: _stored(entries) for name, entries in found.items()}


def _stored(entries: list[tuple[Part, Array]]) -> Array:
    """A tensor of the checkpoint from all of its parts."""
    part, value = entries[0]
    own = part.own
    if own is None or own.view == AS_IT_IS:
        return value
    view, stored = own.view, own.shape
    shape = (*stored[:-2], stored[-1], stored[-2]) if view.transposed else stored
    if view.rows:
        rest = shape[-1:] if math.prod(shape) > math.prod(view.rows) else ()
        taken = [(p.own.view.take, x) for p, x in entries if p.own]
        value = _concatenate(taken, (*view.rows, *rest))
    value = value.reshape(shape)
    return value.swapaxes(-1, -2) if view.transposed else value


def _extract(part: Part, parameter: Array) -> Array:
    value = parameter[as_index(part.index)]
    if part.times > 1:
        value = value[:: part.times]
    if part.own:
        return part.own.extract(value)
    if value.size > math.prod(part.shape):
        value = value[: part.shape[0]]
    return value.reshape(part.shape)


def layout_of(params: DecoderParams, spec: DecoderSpec) -> DecoderSpec:
    """The spec whose ``param_specs`` are the shapes of ``params``: ``spec`` or one spread over a mesh.

    ``WeightError`` names the first parameter that is missing, has no place or the wrong shape.
    """
    leaves = {name: tuple(x.shape) for name, x in named_leaves(params).items()}
    embed, stages = leaves.get("embed", ()), _num_stages(leaves)
    layers = []
    for i, layer in enumerate(spec.layers[: -(-len(spec.layers) // stages)]):
        a, qkv = layer.attention, leaves.get(f"layers.{i}.attn.qkv.weight", ())
        heads = qkv[-4] if len(qkv) >= 4 else a.kv_heads
        if heads != a.kv_heads and (heads % a.kv_heads or a.heads % heads):
            heads = a.kv_heads  # no layout: told below by its shape
        layers.append(replace(layer, attention=replace(a, kv_heads=heads)))
    rows = embed[0] if embed and embed[0] > spec.vocab else None
    wide = replace(spec, layers=tuple(layers), vocab_rows=rows, stages=stages)
    wanted = {name: p.shape for name, p in named_leaves(param_specs(wide)).items()}
    check_shapes(leaves, wanted, "parameter")
    return wide


def _num_stages(leaves: dict[str, tuple[int, ...]]) -> int:
    """By the shape of a matrix that all layers have: [D, in], or [stages, D, in]."""
    shape = leaves.get("layers.0.attn.o.weight", ())
    return shape[0] if len(shape) == 3 else 1


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Of every tensor in a Hugging Face checkpoint of the model."""
    return {part.name: part.shape for parts in hf_names(spec).values() for part in parts}


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], spec: DecoderSpec, describe: Callable[[str], str] = lambda name: name
) -> None:
    """Whether these are the tensors of a checkpoint of ``spec``: ``WeightError`` if not."""
    check_shapes(shapes, tensor_shapes(spec), "tensor", describe)


def check_shapes(
    have: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    kind: str,
    describe: Callable[[str], str] = lambda name: name,
) -> None:
    """describe: a name as the user knows it."""
    missing = [name for name in wanted if name not in have]
    extra = [describe(name) for name in have if name not in wanted]
    if missing:
        unknown = f"; without a place: {_some(extra)}" if extra else ""
        first = list(wanted[missing[0]])
        raise WeightError("params", f"{kind} {_some(missing)} missing (the first of shape {first}){unknown}")
    if extra:
        raise WeightError("params", f"{kind} {_some(extra)} unknown: the config has no place for it")
    for name, shape in wanted.items():
        if have[name] != shape:
            raise WeightError(
                "params", f"{kind} {describe(name)} has shape {list(have[name])}, the config asks for {list(shape)}"
            )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
