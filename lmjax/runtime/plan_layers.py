"""A model cut to a few layers of each kind: programs of it compile in seconds, and its figures scale to the whole.

Temporaries and outputs do not grow with depth (buffers are used again layer by layer); launches grow by the same number
with every layer of a kind; arguments are exact arithmetic.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from lmjax.models import decoder
from lmjax.models.spec import DecoderSpec, LayerSpec
from lmjax.runtime.hlo import Collective, Launches, entry, launches, layer_launches
from lmjax.runtime.programs import Shapes

LAYERS_OF_ONE_KIND = 4  # the first and the last have other neighbours: two are left to be counted
LAYERS_OF_EACH_KIND = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """``kept``: of the whole model's layers, those that are left."""

    shapes: Shapes
    kept: tuple[int, ...]


def cut(shapes: Shapes) -> Cut:
    """The same programs for a few layers, with pools of the same size: kernels depend on it above 4 GiB."""
    kinds = [layer.kind for layer in shapes.spec.layers]
    most = LAYERS_OF_ONE_KIND if len(set(kinds)) == 1 else LAYERS_OF_EACH_KIND
    seen: Counter[LayerSpec] = Counter()
    kept = []
    for i, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= most:
            kept.append(i)
    spec = replace(shapes.spec, layers=_renumber([shapes.spec.layers[i] for i in kept]))
    kv_specs = decoder.kv_specs(spec, shapes.kv_specs[0].dtype)
    num_blocks = tuple(
        -(-blocks * len(whole.layers) // len(small.layers))
        for blocks, whole, small in zip(shapes.num_blocks, shapes.kv_specs, kv_specs, strict=True)
    )
    return Cut(replace(shapes, spec=spec, kv_specs=kv_specs, num_blocks=num_blocks), tuple(kept))


def _renumber(layers: list[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Indices within the KV groups, anew; every group has kept a layer, so groups keep their numbers."""
    counts: Counter[int] = Counter()
    out = []
    for layer in layers:
        group = layer.attention.group
        out.append(replace(layer, attention=replace(layer.attention, index=counts[group])))
        counts[group] += 1
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Launches of the whole model. ``kernels_per_layer``: the mean over its layers, None where it has too few."""

    whole: Launches
    kernels_per_layer: float | None


def scale(text: str, kept: tuple[int, ...], spec: DecoderSpec) -> Scaled:
    """text: the optimized HLO of a program for the layers ``kept`` of ``spec``."""
    instructions = entry(text)
    counted = launches(instructions)
    inner = layer_launches(instructions)
    by_kind: dict[LayerSpec, list[Launches]] = {}
    for i, found in inner.items():
        by_kind.setdefault(spec.layers[kept[i]].kind, []).append(found)
    left_out = [layer.kind for i, layer in enumerate(spec.layers) if i not in kept]
    if not by_kind or any(kind not in by_kind for kind in left_out):
        return Scaled(counted, None)
    kernels = sum(_mean_kernels(by_kind[kind]) for kind in left_out)
    collectives: tuple[Collective, ...] = sum((by_kind[kind][0].collectives for kind in left_out), ())
    whole = Launches(
        kernels=round(counted.kernels + kernels),
        collectives=counted.collectives + collectives,
        loops=counted.loops + sum(by_kind[kind][0].loops for kind in left_out),
    )
    mean = [_mean_kernels(by_kind[kind]) for kind in (layer.kind for layer in spec.layers) if kind in by_kind]
    return Scaled(whole, sum(mean) / len(mean))


def _mean_kernels(found: list[Launches]) -> float:
    return sum(f.kernels for f in found) / len(found)
