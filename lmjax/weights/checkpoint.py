"""A model's files as named tensors, whatever they store; names, shapes and types are checked before any is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from lmjax.models import names as naming
from lmjax.models.layout import stored_tensor
from lmjax.models.params import init_param, named_leaves, param_specs
from lmjax.models.registry import family_layout
from lmjax.models.spec import DecoderSpec
from lmjax.weights import gguf, packing, quant_gguf, safetensors
from lmjax.weights.buffers import aligned_empty
from lmjax.weights.codes import Infos, Stored
from lmjax.weights.errors import WeightError
from lmjax.weights.gguf_config import ROPE_FREQS
from lmjax.weights.quant import Layout, layout_of
from lmjax.weights.quant_load import AtLoad
from lmjax.weights.safetensors import Range, TensorInfo
from lmjax.weights.source import ModelSource
from lmjax.weights.streaming import all_finite, convert, not_finite

LOAD_FORMATS = {"auto": ("hf", "gguf"), "safetensors": ("hf",), "gguf": ("gguf",)}
FLOATS = ("F64", "F32", "F16", "BF16")
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``infos``: of plain weights, those too that ``codes`` has quantised. ``read_into``: floats to their place, as
    ``safetensors.read_into``."""

    infos: dict[str, TensorInfo]
    name: Callable[[DecoderSpec], naming.Names]
    read_into: Callable[[TensorInfo, np.ndarray, Range | None, Range | None], None]
    codes: dict[str, Stored] = field(default_factory=dict)
    harmless: Callable[[str], bool] = lambda name: False

    def read(self, info: TensorInfo, rows: Range | None, dtype: np.dtype) -> np.ndarray:
        """The rows of a tensor in a fresh buffer."""
        shape = info.shape if rows is None else (rows[1] - rows[0], *info.shape[1:])
        out = aligned_empty(shape, dtype)
        self.read_into(info, out, rows, None)
        return out


def dummy_checkpoint(spec: DecoderSpec, dtype: str, seed: int) -> Checkpoint:
    """The tensors that ``init_params`` would make."""
    parts, params = naming.hf_names(spec), named_leaves(param_specs(packing.plain(spec)))
    owners = naming.by_tensor(parts)
    latest: tuple[str, np.ndarray] | None = None

    def read_into(info: TensorInfo, out: np.ndarray, rows: Range | None, columns: Range | None) -> None:
        nonlocal latest
        name, held = owners[info.name]
        if latest is None or latest[0] != name:
            latest = name, init_param(name, params[name], dtype, seed)
        tensor = stored_tensor(held, latest[1])
        if rows:
            tensor = tensor[slice(*rows)]
        if columns:
            tensor = tensor[..., slice(*columns)]
        out[...] = tensor.reshape(out.shape)

    infos = {name: TensorInfo(name, Path("dummy"), "F32", part.shape, 0, 0) for name, (_, (part, *_)) in owners.items()}
    return Checkpoint(infos, naming.hf_names, read_into)


def quantized(
    checkpoint: Checkpoint, source: ModelSource, spec: DecoderSpec, load_format: str, quantization: str | None
) -> Checkpoint:
    """The checkpoint with its quantised weights as codes."""
    infos, stored = checkpoint.infos, None
    if load_format != "dummy":
        stored = quant_gguf.layout(infos) if source.kind == "gguf" else stored_layout(source)
    if family_layout(spec).transposed and (quantization or stored) and source.kind == "hf":
        how = f"--quantization {quantization}" if quantization else f"a checkpoint in {stored.name if stored else ''}"
        raise WeightError(source.weights, f"{how}: not supported for {spec.model_type}, whose matrices are [in, out]")
    if quantization is not None:
        if stored is not None and source.kind == "hf":
            raise WeightError("--quantization", f"got {quantization}, but the checkpoint is quantised ({stored.name})")
        names = packing.chosen(checkpoint.name(spec))
        at_load = AtLoad(quantization, names, lambda info, rows: checkpoint.read(info, rows, FLOAT32))
        return _with_codes(checkpoint, at_load.find(infos))
    if stored is None:
        return checkpoint
    codes = naming.with_prefix(stored.find(infos), spec)
    if source.kind == "gguf":
        return replace(checkpoint, codes=codes)
    used = {info.name for found in codes.values() for info in found.tensors}
    infos = {name: info for name, info in infos.items() if name not in used}
    for name, found in codes.items():
        infos[name] = TensorInfo(name, found.tensors[0].file, stored.name, found.shape, 0, found.size)

    return _with_codes(replace(checkpoint, infos=infos, harmless=stored.harmless), codes)


def _with_codes(checkpoint: Checkpoint, codes: dict[str, Stored]) -> Checkpoint:
    """``read_into`` gives what the codes stand for."""

    def read_into(info: TensorInfo, out: np.ndarray, rows: Range | None, columns: Range | None) -> None:
        if info.name not in codes:
            checkpoint.read_into(info, out, rows, columns)
            return
        floats = codes[info.name].dense(rows)
        if not all_finite(floats):
            raise not_finite(info.file, info.name)
        floats = floats if columns is None else floats[..., slice(*columns)]
        convert(floats.reshape(out.shape), out)

    return replace(checkpoint, read_into=read_into, codes=codes)


def stored_layout(source: ModelSource) -> Layout | None:
    """How the model's files keep quantised weights. ValueError for a config that asks for what is not built."""
    if source.kind == "gguf":
        return quant_gguf.layout(gguf.read_gguf(source.weights).tensors)
    return layout_of(source.config) if source.kind == "hf" else None


def open_checkpoint(source: ModelSource, spec: DecoderSpec, load_format: str) -> Checkpoint:
    if load_format not in LOAD_FORMATS:
        raise WeightError("--load-format", f"got {load_format!r}, must be one of {', '.join([*LOAD_FORMATS, 'dummy'])}")
    if source.kind not in LOAD_FORMATS[load_format]:
        kind = {"hf": "a directory of .safetensors files", "gguf": "a .gguf file"}[source.kind]
        raise WeightError(source.weights, f"is {kind}; --load-format {load_format} cannot read it")
    if source.kind == "gguf":
        read_into = _minus_one if spec.norm.plus_one else gguf.read_into
        return Checkpoint(gguf.read_gguf(source.weights).tensors, naming.gguf_names, read_into)
    infos: Infos = safetensors.read_directory(source.weights)
    if "embed_tokens.weight" in infos:  # of a decoder saved without its head
        infos = {f"model.{name}": info for name, info in infos.items()}
    infos = naming.with_prefix(infos, spec)
    return Checkpoint(infos, naming.hf_names, safetensors.read_into)


def _minus_one(info: TensorInfo, out: np.ndarray, rows: Range | None, columns: Range | None) -> None:
    """As ``gguf.read_into``, with norms as Hugging Face has them: a GGUF file holds 1 + w."""
    if not info.name.endswith("norm.weight"):
        gguf.read_into(info, out, rows, columns)
        return
    values = aligned_empty(out.shape, FLOAT32)
    gguf.read_into(info, values, rows, columns)
    convert(values - FLOAT32.type(1), out)


def check(checkpoint: Checkpoint, source: ModelSource, spec: DecoderSpec) -> None:
    infos, wanted = checkpoint.infos, naming.by_tensor(checkpoint.name(spec))
    missing = [name for name in wanted if name not in infos]
    if missing:
        untied = any(name in ("lm_head.weight", "output.weight") for name in missing)
        hint = " (tie_word_embeddings is false, so the head must be there)" if untied else ""
        raise WeightError(source.weights, f"{_some(missing)} missing{hint}")
    extra = [name for name in infos if name not in wanted and name != ROPE_FREQS and not naming.harmless(name, spec)]
    extra = [name for name in extra if not checkpoint.harmless(name)]
    if extra:
        raise WeightError(infos[extra[0]].file, f"{_some(extra)} unknown: the config has no place for them")
    supported = list(FLOATS) if source.kind == "hf" else gguf.dequantisable()
    for name, (_, (part, *_)) in wanted.items():
        info = infos[name]
        if info.shape != part.shape:
            raise WeightError(
                info.file, f"tensor {name} has shape {list(info.shape)}, the config asks for {list(part.shape)}"
            )
        if info.stored not in supported and name not in checkpoint.codes:
            raise WeightError(
                info.file,
                f"tensor {name} is stored as {info.stored}, which is not supported; known: {', '.join(supported)}",
            )


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) are"
