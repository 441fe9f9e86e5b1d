"""A caller's parameters in the layout, type and sharding of an engine, without a copy of what has them already."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lmjax.models.params import DecoderParams, layer_of, map_named, named_leaves
from lmjax.models.spec import DecoderSpec
from lmjax.runtime.platform import no_context_mesh
from lmjax.weights.pytree import Made, build, layout_of, making, to_hf
from lmjax.weights.trees import Leaf, Names, read_tree


@dataclass(frozen=True, slots=True)
class Adapted:
    """``params``: of the engine. ``kept``: its arrays that are the caller's own; ``converted``: those that were made,
    of ``converted_bytes`` on all devices. ``seconds``: until all are there."""

    params: DecoderParams
    kept: int
    converted: int
    converted_bytes: int
    seconds: float


class _Fetch(NamedTuple):
    """How a leaf becomes a tensor of the checkpoint."""

    slot: int
    shape: tuple[int, ...]
    num_taken: int
    kernel: bool


class _Recipe(NamedTuple):
    """One parameter from the leaves of a call. made: None where it is a leaf, but for type or sharding."""

    made: Made | None
    fetches: tuple[tuple[_Fetch, ...], ...]  # by stage
    dtype: Any


class Adapter:
    """Of one engine: ``adapt`` is the way in for weights from memory.

    spec: the model; wide: what all devices hold together; wanted: ``wide``'s tree of ``jax.ShapeDtypeStruct``, with
    shardings on a mesh, else for ``device``. A layer is converted at a time, by one program for all layers alike: it is
    compiled at the first call.
    """

    def __init__(
        self, spec: DecoderSpec, wide: DecoderSpec, wanted: Any, device: jax.Device, names: Names | None = None
    ):
        def placed(leaf: Any) -> Any:
            sharding = leaf.sharding or SingleDeviceSharding(device)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        self._spec, self._names = spec, names
        self._wanted = jax.tree.map(placed, wanted)
        self._by_name: dict[str, Any] = named_leaves(self._wanted)
        self._structure: Any = jax.tree.structure(self._wanted)
        self._wide = wide
        sharding = self._by_name["embed"].sharding
        self._devices = list(sharding.mesh.devices.flat) if isinstance(sharding, NamedSharding) else [device]
        # XLA:CPU's devices take the collectives of two programs that run at once for each other (runtime.device)
        self._one_at_a_time = len(self._devices) > 1 and device.platform == "cpu"
        self._programs: dict[Hashable, Any] = {}

    @cached_property
    def _making(self) -> dict[str, tuple[Made, tuple[tuple[str, ...], ...]]]:
        return making(self._spec, self._wide)  # many engines never need it

    def missing_bytes(self, tree: Any, names: Names | None = None) -> int:
        """What ``adapt`` would take on the device that gets the most."""
        _, missing = self._plan(tree, names)
        wanted = [self._by_name[name] for name in missing]
        return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in wanted)

    def adapt(self, tree: Any, names: Names | None = None) -> Adapted:
        """``tree``: whatever ``weights.trees.read_tree`` understands. It is not consumed, and it has to stay: arrays
        that equal the engine's in type, layout and sharding become the engine's themselves.

        Numbers are rounded to nearest even; what is beyond float16 becomes infinite. Raises ``WeightError``.
        """
        with no_context_mesh():
            return self._adapt(tree, names)

    def _adapt(self, tree: Any, names: Names | None) -> Adapted:
        begin = time.perf_counter()
        if (params := self._same(tree)) is not None:
            if self._one_at_a_time:
                jax.block_until_ready(params)
            return Adapted(params, len(self._by_name), 0, 0, time.perf_counter() - begin)
        kept, missing = self._plan(tree, names)
        groups: dict[int | None, list[str]] = {}
        for name in missing:
            groups.setdefault(layer_of(name), []).append(name)
        found = dict(kept)
        for group in groups.values():
            found |= self._convert({name: missing[name] for name in group})
        params = map_named(lambda name, _: found[name], self._wanted)
        jax.block_until_ready(params)
        made = [found[name] for name in missing]
        return Adapted(params, len(kept), len(made), sum(x.nbytes for x in made), time.perf_counter() - begin)

    def _same(self, tree: Any) -> DecoderParams | None:
        """A tree that is all as it should be, which a training loop gives after each of its steps: told without names,
        a millisecond for 30 layers."""
        if not isinstance(tree, DecoderParams):
            return None
        leaves, structure = jax.tree.flatten(tree)
        wanted = self._by_name.values()
        if structure != self._structure or not all(map(_equal, leaves, wanted)):
            return None
        return jax.tree.map(lambda leaf, wanted: _in_mesh(leaf, wanted.sharding), tree, self._wanted)

    def _plan(self, tree: Any, names: Names | None) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """By parameter: arrays to keep, and of the others the leaf, or the leaves of each stage's tensors."""
        given = read_tree(tree, self._spec, names or self._names)
        sources: dict[str, Any]
        if isinstance(given, DecoderParams):
            sources = self._own(given)
        else:
            sources = {name: self._of_tensors(name, given) for name in self._by_name}
        kept: dict[str, jax.Array] = {}
        missing: dict[str, Any] = {}
        for name, source in sources.items():
            wanted = self._by_name[name]
            if _equal(source, wanted):
                kept[name] = _in_mesh(source, wanted.sharding)
            else:
                missing[name] = source
        return kept, missing

    def _own(self, given: DecoderParams) -> dict[str, Any]:
        """A tree of the engine's kind, perhaps of another mesh."""
        layout_of(given, self._spec)
        leaves = named_leaves(given)
        same = {name: x for name, x in leaves.items() if name in self._by_name and x.shape == self._by_name[name].shape}
        if len(same) == len(self._by_name):
            return same
        tensors = jax.jit(partial(to_hf, spec=self._spec))(given)
        read = {name: Leaf(name, x) for name, x in tensors.items()}
        return {name: same[name] if self._keeps(name, same) else self._of_tensors(name, read) for name in self._by_name}

    def _keeps(self, name: str, leaves: dict[str, Any]) -> bool:
        return name in leaves and _equal(leaves[name], self._by_name[name])

    def _of_tensors(self, name: str, leaves: dict[str, Leaf]) -> Any:
        made, names = self._making[name]
        if made.plain and (leaf := leaves[names[0][0]]).array.shape == made.shape and not leaf.kernel:
            return leaf.array
        return [[leaves[tensor] for tensor in stage] for stage in names]

    def _convert(self, sources: dict[str, Any]) -> dict[str, jax.Array]:
        arrays: list[Any] = []
        taken: list[tuple[int, ...]] = []
        slots: dict[int, int] = {}

        def slot(array: Any) -> int:
            if id(array) not in slots:
                slots[id(array)] = len(arrays)
                arrays.append(self._on_devices(array))
            return slots[id(array)]

        def fetch(leaf: Leaf, shape: tuple[int, ...]) -> _Fetch:
            taken.append(leaf.take)
            return _Fetch(slot(leaf.array), shape, len(leaf.take), leaf.kernel)

        recipes = []
        for name, source in sources.items():
            dtype, made = self._by_name[name].dtype, self._making[name][0]
            if isinstance(source, list):
                fetches = tuple(
                    tuple(fetch(leaf, part.shape) for part, leaf in zip(parts, leaves, strict=True))
                    for parts, leaves in zip(made.stages, source, strict=True)
                )
                recipes.append(_Recipe(made, fetches, dtype))
            else:
                recipes.append(_Recipe(None, ((_Fetch(slot(source), source.shape, 0, False),),), dtype))
        shardings = tuple(self._by_name[name].sharding for name in sources)
        key = (tuple(recipes), shardings)
        if key not in self._programs:
            self._programs[key] = jax.jit(partial(_cook, tuple(recipes)), out_shardings=shardings)
        if self._one_at_a_time:
            jax.block_until_ready(arrays)
        done = self._programs[key](arrays, [np.asarray(take, np.int32) for take in taken])
        if self._one_at_a_time:
            jax.block_until_ready(done)
        return dict(zip(sources, done, strict=True))

    def _on_devices(self, array: Any) -> jax.Array:
        """On the engine's devices in their order, as a program's arguments must be. What comes from elsewhere is whole
        on each of them while its layer is converted."""
        if isinstance(array, jax.Array) and _devices(array) == self._devices:
            sharding = array.sharding
            if isinstance(sharding, NamedSharding):
                return _in_mesh(array, NamedSharding(_auto(sharding.mesh), sharding.spec))
            return array
        if not isinstance(array, jax.Array):
            array = np.asarray(array)
        if len(self._devices) == 1:
            return jax.device_put(array, self._devices[0])
        mesh = Mesh(np.array(self._devices), ("all",))
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))


def _cook(recipes: tuple[_Recipe, ...], arrays: list[jax.Array], taken: list[jax.Array]) -> tuple[jax.Array, ...]:
    """The parameters of the recipes. taken: of each fetch, int32 [num_taken]: where it lies in its leaf."""
    places = iter(taken)

    def fetch(f: _Fetch, dtype: Any) -> jax.Array:
        value, place = arrays[f.slot].astype(dtype), next(places)
        for i in range(f.num_taken):
            value = jax.lax.dynamic_index_in_dim(value, place[i], keepdims=False)
        return value.reshape(f.shape[::-1]).T if f.kernel and len(f.shape) == 2 else value.reshape(f.shape)

    out = []
    for made, fetches, dtype in recipes:
        if made is None:
            out.append(arrays[fetches[0][0].slot].astype(dtype))
        else:
            out.append(build(made, [[fetch(f, dtype) for f in stage] for stage in fetches]))
    return tuple(out)


def _equal(source: Any, wanted: Any) -> bool:
    """Type, shape, placement and the order in memory."""
    if not isinstance(source, jax.Array) or (source.shape, source.dtype) != (wanted.shape, wanted.dtype):
        return False
    if source.is_deleted():  # told by ``read_tree``
        return False
    if not source.sharding.is_equivalent_to(wanted.sharding, len(wanted.shape)):
        return False
    array: Any = source
    layout = array.format.layout
    return layout is None or tuple(layout.major_to_minor) == tuple(range(len(wanted.shape)))


def _devices(array: jax.Array) -> list[jax.Device]:
    """In their order; empty where there is no telling."""
    if isinstance(array.sharding, NamedSharding):
        return list(array.sharding.mesh.devices.flat)
    return list(array.sharding.device_set) if len(array.sharding.device_set) == 1 else []


def _auto(mesh: Any) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _in_mesh(array: jax.Array, sharding: Any) -> jax.Array:
    """The array itself; of a mesh whose axes are in types (``AxisType.Explicit``) its buffers under ``sharding``, which
    is equivalent: programs of one mesh take no arguments of such another."""
    mesh = getattr(array.sharding, "mesh", None)
    if mesh is None or all(kind == AxisType.Auto for kind in mesh.axis_types):
        return array
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
