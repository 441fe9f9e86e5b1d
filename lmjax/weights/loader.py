"""Fills a model's parameters from its files, tensor by tensor, each device's share from the slices that make it up."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from lmjax.models import names as naming
from lmjax.models.params import layer_of, map_named, named_leaves, param_specs, with_layer
from lmjax.models.spec import DecoderSpec
from lmjax.nn.packing import Packing
from lmjax.weights import packing
from lmjax.weights.buffers import DTYPES, aligned_empty
from lmjax.weights.checkpoint import Checkpoint, check, dummy_checkpoint, open_checkpoint, quantized
from lmjax.weights.errors import WeightError
from lmjax.weights.packed import read_packed
from lmjax.weights.safetensors import Range, TensorInfo
from lmjax.weights.shards import Piece, pieces
from lmjax.weights.source import ModelSource

MOST_THREADS = 8  # more do not read faster from memory or one disk
Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)
Put = Callable[[Piece, np.ndarray], None]  # the piece's values to their place


@dataclass(frozen=True, slots=True)
class Spread:
    """Parameters on a mesh. ``spec``: what all devices hold together (``parallel.split.spread``); ``placed``: its
    parameter tree of ``jax.ShapeDtypeStruct`` with shardings that cut at most one axis of each."""

    spec: DecoderSpec
    placed: Any


@dataclass(slots=True)
class _Share:
    """A distinct slice of a parameter that devices of this process hold."""

    shape: tuple[int, ...]
    pieces: list[Piece]
    whole: tuple[int, ...]  # the shape without the axis of stages, that pieces fill
    devices: list[jax.Device] = field(default_factory=list)


def load_params(
    source: ModelSource,
    spec: DecoderSpec,
    dtype: str,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    spread: Spread | None = None,
    quantization: str | None = None,
) -> Any:
    """The parameter tree of ``spec`` (see ``abstract_params``) as jax arrays on the default device; with ``spread`` on
    its devices: then only the slices that this process's devices hold are read, each once.

    ``dtype``: float32, bfloat16 or float16; stored values are converted on the host, rounded to nearest even.
    ``load_format``: auto, safetensors, gguf; or dummy: random weights from ``seed``, no file is read.
    ``quantization``: int8, fp8 or int4 (``quant_load``) of the layers' matrices, experts too. What of them stays packed
    is in ``spec`` (``LayerSpec.packing``); the rest becomes floats again.
    Names, shapes and types of all tensors are checked before the first is read, values (NaN, infinite) as they come;
    ``WeightError`` names file and tensor. Some threads read, a parameter each, straight into its buffer.
    Host memory: the parameters once (on a CPU the device's arrays are these very buffers) plus a few MB a thread; and
    plus a tensor as stored a thread where it is quantised, or holds its numbers in another order (``Piece.direct``).
    """
    if load_format == "dummy":
        checkpoint = dummy_checkpoint(spec, dtype, seed)
    else:
        checkpoint = open_checkpoint(source, spec, load_format)
    checkpoint = quantized(checkpoint, source, spec, load_format, quantization)
    if load_format != "dummy":
        check(checkpoint, source, spec)
    sizes = checkpoint.infos if load_format != "dummy" else None
    wanted, kept = _shares(spec, checkpoint.name, spread), packing.packings(spread.spec if spread else spec)

    amount = {
        name: sum(_stored_bytes(sizes, p) for share in shares for p in share.pieces) for name, shares in wanted.items()
    }
    total, done = sum(amount.values()), 0
    settings: Any = jax.config
    device = settings.jax_default_device  # of this thread's context, which the reading threads do not have

    def placed(leaf: Any, shares: list[_Share], arrays: list[np.ndarray]) -> jax.Array:
        if spread is None:
            with jax.default_device(device):
                return jax.block_until_ready(jax.device_put(arrays[0].reshape(leaf.shape)))
        shape = leaf.sharding.shard_shape(leaf.shape)
        parts = [
            jax.device_put(array.reshape(shape), device)
            for share, array in zip(shares, arrays, strict=True)
            for device in share.devices
        ]
        jax.block_until_ready(parts)  # else a card's copies would wait in host memory
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    def load(name: str, leaves: dict[str, Any]) -> dict[str, jax.Array]:
        shares = wanted[name]
        if name not in kept:
            kind = str(next(iter(leaves.values())).dtype or dtype)  # some parameters have a type of their own
            arrays = _arrays(shares, partial(_put, checkpoint), DTYPES[kind])
            return {own: placed(leaf, shares, arrays) for own, leaf in leaves.items()}
        experts = packing.of_experts(name)
        made = [read_packed(checkpoint, share.pieces, share.whole, kept[name], experts) for share in shares]
        return {
            own: placed(leaf, shares, [codes[own.rpartition(".")[2]] for codes in made]) for own, leaf in leaves.items()
        }

    def loaded(name: str) -> None:
        nonlocal done
        done += amount[name]
        if progress is not None and total:
            progress(done, total)

    tree = spread.placed if spread else param_specs(spec)
    threads = 1 if load_format == "dummy" else min(MOST_THREADS, len(os.sched_getaffinity(0)))
    arrays = _in_threads(load, _by_parameter(named_leaves(tree), kept), threads, loaded)
    return map_named(lambda name, leaf: arrays[name], tree)


def _by_parameter(leaves: dict[str, Any], kept: dict[str, Packing]) -> dict[str, dict[str, Any]]:
    """{parameter: its leaves by name}: a packed one has several."""
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        parameter = name.rpartition(".")[0]
        found.setdefault(parameter if parameter in kept else name, {})[name] = leaf
    return found


def _in_threads(
    load: Callable[[str, Any], dict[str, jax.Array]],
    parameters: dict[str, dict[str, Any]],
    threads: int,
    loaded: Callable[[str], None],
) -> dict[str, jax.Array]:
    """``loaded`` is called from this thread, in the order of ``parameters``. The first error in that order is
    raised."""
    with ThreadPoolExecutor(threads, "lmjax-weights") as pool:
        futures = {name: pool.submit(load, name, leaves) for name, leaves in parameters.items()}
        arrays: dict[str, jax.Array] = {}
        try:
            for name, future in futures.items():
                arrays |= future.result()
                loaded(name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return arrays


def _shares(
    spec: DecoderSpec, name: Callable[[DecoderSpec], naming.Names], spread: Spread | None
) -> dict[str, list[_Share]]:
    """By parameter: what this process holds of it. A packed one counts as the matrix [*out, in] that it stands for."""
    parts, out = name(spec), {}
    if spread is None:
        for parameter, param in named_leaves(param_specs(packing.plain(spec))).items():
            whole = tuple(slice(None) for _ in param.shape)
            made_of = pieces(parts[parameter], parts[parameter], param.shape, whole)
            out[parameter] = [_Share(param.shape, made_of, param.shape)]
        return out
    stages, count = spread.spec.stages, len(spread.spec.layers)
    wide = name(replace(spread.spec, stages=1))
    dense, kept = named_leaves(param_specs(packing.plain(spread.spec))), packing.packings(spread.spec)
    for leaf_name, leaf in named_leaves(spread.placed).items():
        found: dict[tuple[Range, ...], _Share] = {}
        parameter, _, part = leaf_name.rpartition(".")
        if parameter not in kept:
            parameter = leaf_name
        elif part != "values":
            continue
        full = dense[parameter].shape
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            if parameter in kept:
                lead = 1 if stages > 1 else 0
                at = lead + kept[parameter].input_axis(len(full) - lead, packing.of_experts(parameter))
                index = _of_matrix(index, leaf.shape, full, at)
            cut = tuple(entry.indices(n)[:2] for entry, n in zip(index, full, strict=True))
            if cut not in found:
                shape = tuple(stop - start for start, stop in cut)
                own, whole, rest = parameter, full, index
                if stages > 1 and (layer := layer_of(parameter)) is not None:
                    # [stages, ...], of which a device has one
                    own = with_layer(parameter, cut[0][0] * count + layer)
                    whole, rest = whole[1:], rest[1:]
                # a layer that only fills the last stage is in no file: zeros
                made_of = pieces(parts[own], wide[parameter], whole, rest) if own in parts else []
                found[cut] = _Share(shape, made_of, whole=shape[len(shape) - len(whole) :])
            found[cut].devices.append(device)
        out[parameter] = list(found.values())
    return out


def _of_matrix(index: tuple[slice, ...], shape: tuple[int, ...], full: tuple[int, ...], at: int) -> tuple[slice, ...]:
    """The index into [*out, in] that stands for one into packed values of ``shape``, whose axis ``at`` is in (/ 2)."""
    start, stop, _ = index[at].indices(shape[at])
    times = full[-1] // shape[at]
    return (*index[:at], *index[at + 1 :], slice(start * times, stop * times))


def _stored_bytes(infos: dict[str, TensorInfo] | None, piece: Piece) -> int:
    if infos is None:
        return 0
    info = infos[piece.name]
    return info.size * piece.size // max(math.prod(info.shape), 1)


def _arrays(shares: list[_Share], put: Put, dtype: np.dtype) -> list[np.ndarray]:
    """The shares of one parameter in fresh buffers. A slice that several hold (a repeated KV head) is read once."""
    seen: dict[tuple[str, Range | None, Range | None], np.ndarray] = {}
    out = []
    for share in shares:
        array = aligned_empty(share.whole, dtype)
        if not share.pieces:
            array[:] = 0
        for piece in share.pieces:
            key = piece.name, piece.rows, piece.columns
            if not piece.direct:
                if key not in seen:
                    seen[key] = aligned_empty(piece.shape, dtype)
                    put(piece, seen[key])
                piece.fill(array, seen[key])
                continue
            place = piece.place(array)
            if key in seen:
                place[...] = seen[key].reshape(place.shape)
            else:
                put(piece, place)
                seen[key] = place
        out.append(array.reshape(share.shape))
    return out


def _put(checkpoint: Checkpoint, piece: Piece, place: np.ndarray) -> None:
    info, name = checkpoint.infos[piece.name], piece.name
    try:
        checkpoint.read_into(info, place, piece.rows, piece.columns)
    except FloatingPointError as error:
        raise WeightError(
            info.file, f"tensor {name} has values beyond {place.dtype}: use --dtype bfloat16 or float32"
        ) from error
    except OSError as error:
        raise WeightError(info.file, f"tensor {name} cannot be read: {error.strerror}") from error
