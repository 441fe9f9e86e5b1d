"""Fills a model's parameters from its files, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lmjax.models import names as naming
from lmjax.models.params import init_params, map_named, param_specs
from lmjax.models.spec import DecoderSpec
from lmjax.weights import gguf, safetensors
from lmjax.weights.buffers import DTYPES, aligned_empty, cast
from lmjax.weights.errors import WeightError
from lmjax.weights.gguf_config import ROPE_FREQS
from lmjax.weights.safetensors import TensorInfo
from lmjax.weights.source import ModelSource

LOAD_FORMATS = {"auto": ("hf", "gguf"), "safetensors": ("hf",), "gguf": ("gguf",)}
FLOATS = ("F64", "F32", "F16", "BF16")
Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    infos: dict[str, TensorInfo]
    names: naming.Names
    read: Callable[[TensorInfo], np.ndarray]


def load_params(
    source: ModelSource,
    spec: DecoderSpec,
    dtype: str,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Any:
    """The parameter tree of ``spec`` (see ``abstract_params``) as jax arrays on the default device.

    ``dtype``: float32, bfloat16 or float16; stored values are converted on the host, rounded to nearest even.
    ``load_format``: auto, safetensors, gguf; or dummy: random weights from ``seed``, no file is read.
    Names, shapes and types of all tensors are checked before the first is read; ``WeightError`` names file and tensor.
    Host memory: the parameters once (on a CPU the device's arrays are these very buffers) plus one tensor as stored
    and one converted.
    """
    if load_format == "dummy":
        return init_params(spec, dtype, seed)
    checkpoint = _open(source, spec, load_format)
    _check(checkpoint, source, spec)
    total = sum(checkpoint.infos[part.name].size for parts in checkpoint.names.values() for part in parts)
    done = 0

    def load(name: str, param: Any) -> jax.Array:
        nonlocal done
        parts = checkpoint.names[name]
        array = _parameter(checkpoint, parts, param.shape, DTYPES[dtype])
        done += sum(checkpoint.infos[part.name].size for part in parts)
        if progress is not None:
            progress(done, total)
        return jax.device_put(array)

    return map_named(load, param_specs(spec))


def _open(source: ModelSource, spec: DecoderSpec, load_format: str) -> _Checkpoint:
    if load_format not in LOAD_FORMATS:
        raise WeightError("--load-format", f"got {load_format!r}, must be one of {', '.join([*LOAD_FORMATS, 'dummy'])}")
    if source.kind not in LOAD_FORMATS[load_format]:
        kind = {"hf": "a directory of .safetensors files", "gguf": "a .gguf file"}[source.kind]
        raise WeightError(source.weights, f"is {kind}; --load-format {load_format} cannot read it")
    if source.kind == "gguf":
        return _Checkpoint(gguf.read_gguf(source.weights).tensors, naming.gguf_names(spec), gguf.read_tensor)
    return _Checkpoint(safetensors.read_directory(source.weights), naming.hf_names(spec), safetensors.read_tensor)


def _check(checkpoint: _Checkpoint, source: ModelSource, spec: DecoderSpec) -> None:
    infos, wanted = checkpoint.infos, naming.by_tensor(checkpoint.names)
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


def _parameter(
    checkpoint: _Checkpoint, parts: tuple[naming.TensorPart, ...], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """One parameter in a fresh buffer, from the tensors that make it up."""
    whole = len(parts) == 1 and not parts[0].index and not parts[0].interleaved_heads
    if whole:
        return _read(checkpoint, parts[0].name, dtype).reshape(shape)
    out = aligned_empty(shape, dtype)
    for part in parts:
        part.fill(out, _read(checkpoint, part.name, dtype))
    return out


def _read(checkpoint: _Checkpoint, name: str, dtype: np.dtype) -> np.ndarray:
    info = checkpoint.infos[name]
    try:
        return cast(checkpoint.read(info), dtype)
    except FloatingPointError as error:
        raise WeightError(
            info.file, f"tensor {name} has values beyond {dtype}: use --dtype bfloat16 or float32"
        ) from error
    except OSError as error:
        raise WeightError(info.file, f"tensor {name} cannot be read: {error.strerror}") from error
