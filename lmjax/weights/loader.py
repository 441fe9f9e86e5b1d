"""Fills a model's parameters from its files, tensor by tensor, each device's share from the slices that make it up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from lmjax.models import names as naming
from lmjax.models.params import init_param, layer_of, map_named, named_leaves, param_specs, with_layer
from lmjax.models.spec import DecoderSpec
from lmjax.weights import gguf, safetensors
from lmjax.weights.buffers import DTYPES, aligned_empty, cast
from lmjax.weights.errors import WeightError
from lmjax.weights.gguf_config import ROPE_FREQS
from lmjax.weights.safetensors import Range, TensorInfo
from lmjax.weights.shards import Piece, pieces
from lmjax.weights.source import ModelSource

LOAD_FORMATS = {"auto": ("hf", "gguf"), "safetensors": ("hf",), "gguf": ("gguf",)}
FLOATS = ("F64", "F32", "F16", "BF16")
Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    infos: dict[str, TensorInfo]
    name: Callable[[DecoderSpec], naming.Names]
    read: Callable[[TensorInfo, Range | None, Range | None], np.ndarray]


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
) -> Any:
    """The parameter tree of ``spec`` (see ``abstract_params``) as jax arrays on the default device; with ``spread`` on
    its devices: then only the slices that this process's devices hold are read, each once.

    ``dtype``: float32, bfloat16 or float16; stored values are converted on the host, rounded to nearest even.
    ``load_format``: auto, safetensors, gguf; or dummy: random weights from ``seed``, no file is read.
    Names, shapes and types of all tensors are checked before the first is read; ``WeightError`` names file and tensor.
    Host memory: the parameters once (on a CPU the device's arrays are these very buffers) plus one tensor as stored
    and one converted.
    """
    if load_format == "dummy":
        read, wanted, sizes = _dummy(spec, dtype, seed), _shares(spec, naming.hf_names, spread), None
    else:
        checkpoint = _open(source, spec, load_format)
        _check(checkpoint, source, spec)
        wanted, sizes = _shares(spec, checkpoint.name, spread), checkpoint.infos

        def read(piece: Piece) -> np.ndarray:
            return _read(checkpoint, piece, DTYPES[dtype])

    amount = {
        name: sum(_stored_bytes(sizes, p) for share in shares for p in share.pieces) for name, shares in wanted.items()
    }
    total, done = sum(amount.values()), 0

    def load(name: str, leaf: Any) -> jax.Array:
        nonlocal done
        arrays = _arrays(wanted[name], read, DTYPES[dtype])
        done += amount[name]
        if progress is not None and total:
            progress(done, total)
        if spread is None:
            return jax.device_put(arrays[0])
        placed = [
            jax.device_put(array, device)
            for share, array in zip(wanted[name], arrays, strict=True)
            for device in share.devices
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)

    return map_named(load, spread.placed if spread else param_specs(spec))


def _shares(
    spec: DecoderSpec, name: Callable[[DecoderSpec], naming.Names], spread: Spread | None
) -> dict[str, list[_Share]]:
    """By parameter: what this process holds of it."""
    parts, out = name(spec), {}
    if spread is None:
        for parameter, param in named_leaves(param_specs(spec)).items():
            whole = tuple(slice(None) for _ in param.shape)
            made_of = pieces(parts[parameter], parts[parameter], param.shape, whole)
            out[parameter] = [_Share(param.shape, made_of, param.shape)]
        return out
    stages, count = spread.spec.stages, len(spread.spec.layers)
    wide = name(replace(spread.spec, stages=1))
    for parameter, leaf in named_leaves(spread.placed).items():
        found: dict[tuple[Range, ...], _Share] = {}
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            cut = tuple(entry.indices(n)[:2] for entry, n in zip(index, leaf.shape, strict=True))
            if cut not in found:
                shape = tuple(stop - start for start, stop in cut)
                own, whole, rest = parameter, leaf.shape, index
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


def _stored_bytes(infos: dict[str, TensorInfo] | None, piece: Piece) -> int:
    if infos is None:
        return 0
    info = infos[piece.name]
    return info.size * piece.size // max(math.prod(info.shape), 1)


def _dummy(spec: DecoderSpec, dtype: str, seed: int) -> Callable[[Piece], np.ndarray]:
    """Reads slices of the tensors that ``init_params`` would make."""
    owners, params = naming.by_tensor(naming.hf_names(spec)), named_leaves(param_specs(spec))
    latest: tuple[str, np.ndarray] | None = None

    def read(piece: Piece) -> np.ndarray:
        nonlocal latest
        name, part = owners[piece.name]
        if latest is None or latest[0] != name:
            latest = name, init_param(name, params[name], dtype, seed)
        tensor = part.extract(latest[1])
        if piece.rows:
            return tensor[slice(*piece.rows)]
        return tensor[..., slice(*piece.columns)] if piece.columns else tensor

    return read


def _open(source: ModelSource, spec: DecoderSpec, load_format: str) -> _Checkpoint:
    if load_format not in LOAD_FORMATS:
        raise WeightError("--load-format", f"got {load_format!r}, must be one of {', '.join([*LOAD_FORMATS, 'dummy'])}")
    if source.kind not in LOAD_FORMATS[load_format]:
        kind = {"hf": "a directory of .safetensors files", "gguf": "a .gguf file"}[source.kind]
        raise WeightError(source.weights, f"is {kind}; --load-format {load_format} cannot read it")
    if source.kind == "gguf":
        return _Checkpoint(gguf.read_gguf(source.weights).tensors, naming.gguf_names, gguf.read_tensor)
    infos = safetensors.read_directory(source.weights)
    if "embed_tokens.weight" in infos:  # of a decoder saved without its head
        infos = {f"model.{name}": info for name, info in infos.items()}
    return _Checkpoint(infos, naming.hf_names, safetensors.read_tensor)


def _check(checkpoint: _Checkpoint, source: ModelSource, spec: DecoderSpec) -> None:
    infos, wanted = checkpoint.infos, naming.by_tensor(checkpoint.name(spec))
    missing = [name for name in wanted if name not in infos]
    if missing:
        untied = any(name in ("lm_head.weight", "output.weight") for name in missing)
        hint = " (tie_word_embeddings is false, so the head must be there)" if untied else ""
        raise WeightError(source.weights, f"{_some(missing)} missing{hint}")
    extra = [name for name in infos if name not in wanted and name != ROPE_FREQS and not naming.harmless(name, spec)]
    if extra:
        raise WeightError(infos[extra[0]].file, f"{_some(extra)} unknown: the config has no place for them")
    supported = list(FLOATS) if source.kind == "hf" else gguf.dequantisable()
    for name, (_, part) in wanted.items():
        info = infos[name]
        if info.shape != part.shape:
            raise WeightError(
                info.file, f"tensor {name} has shape {list(info.shape)}, the config asks for {list(part.shape)}"
            )
        if info.stored not in supported:
            raise WeightError(
                info.file,
                f"tensor {name} is stored as {info.stored}, which is not supported; known: {', '.join(supported)}",
            )


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) are"


def _arrays(shares: list[_Share], read: Callable[[Piece], np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    """The shares of one parameter in fresh buffers. A slice that several hold (a repeated KV head) is read once."""
    seen: dict[tuple[str, Range | None, Range | None], np.ndarray] = {}

    def values(piece: Piece) -> np.ndarray:
        key = piece.name, piece.rows, piece.columns
        if len(shares) == 1:
            return read(piece)
        if key not in seen:
            seen[key] = read(piece)
        return seen[key]

    out = []
    for share in shares:
        only = share.pieces[0] if len(share.pieces) == 1 else None
        if only and not only.index and not only.heads and only.size == math.prod(share.shape):
            out.append(read(only).reshape(share.shape))
            continue
        array = aligned_empty(share.whole, dtype)
        if not share.pieces:
            array[:] = 0
        for piece in share.pieces:
            piece.fill(array, values(piece))
        out.append(array.reshape(share.shape))
    return out


def _read(checkpoint: _Checkpoint, piece: Piece, dtype: np.dtype) -> np.ndarray:
    info, name = checkpoint.infos[piece.name], piece.name
    try:
        return cast(checkpoint.read(info, piece.rows, piece.columns), dtype)
    except FloatingPointError as error:
        raise WeightError(
            info.file, f"tensor {name} has values beyond {dtype}: use --dtype bfloat16 or float32"
        ) from error
    except OSError as error:
        raise WeightError(info.file, f"tensor {name} cannot be read: {error.strerror}") from error
