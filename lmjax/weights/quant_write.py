"""Writes a quantised copy of a Hugging Face directory in the layout of compressed-tensors (``scripts/quantize.py``)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lmjax.models.names import hf_names, with_prefix
from lmjax.models.registry import spec_from_hf
from lmjax.weights.codes import Codes, float32, pack_words
from lmjax.weights.errors import WeightError
from lmjax.weights.export import INDEX, MAX_SHARD_SIZE, split_files
from lmjax.weights.packing import is_matrix
from lmjax.weights.quant import layout_of
from lmjax.weights.quant_load import INT4_GROUP, quantize
from lmjax.weights.safetensors import TensorInfo, read_directory, read_tensor
from lmjax.weights.source import directory_source

FORMATS = {"int8": "int-quantized", "fp8": "float-quantized", "int4": "pack-quantized"}
FLOATS = ("F32", "F16", "BF16", "F64")


def write_quantized(
    model: Path, out: Path, kind: str, tell: Callable[[str], None], max_shard_size: int = MAX_SHARD_SIZE
) -> None:
    """``out``: a new or empty directory. The matrices of the layers (experts too) are quantised as by
    ``--quantization``; embedding, head, norms and routers are copied, and so are the small files.

    Host memory: one file's tensors. Raises ``WeightError``.
    """
    if not model.is_dir():
        raise WeightError(model, "is no directory; what is quantised is one with config.json and .safetensors files")
    source = directory_source(model)
    if layout_of(source.config) is not None:
        raise WeightError(model, "is quantised already")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightError(out, "must be a new or empty directory")
    found = with_prefix(read_directory(model), spec_from_hf(source.config, None))
    infos = {name: replace(info, name=name) for name, info in found.items()}
    chosen = _chosen(source.config, kind, infos)
    ignored = sorted(
        name.removesuffix(".weight")
        for name, info in infos.items()
        if len(info.shape) == 2 and name not in chosen and name.endswith(".weight") and "embed" not in name
    )
    out.mkdir(parents=True, exist_ok=True)
    sizes = {name: info.size if name not in chosen else _size(info, kind) for name, info in infos.items()}
    files = split_files(sizes, max_shard_size)
    weight_map: dict[str, str] = {}
    for file in dict.fromkeys(files.values()):
        tell(f"writing {file}")
        held: dict[str, np.ndarray] = {}
        for name in (name for name in infos if files[name] == file):
            held |= dict(_tensors(infos[name], kind if name in chosen else None))
        save_file(held, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(out / INDEX, index)
    _write_json(out / "config.json", source.config | {"quantization_config": quantization_config(kind, ignored)})
    for path in sorted(model.iterdir()):
        written = path.name == "config.json" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and path.suffix in (".json", ".model", ".txt", ".jinja") and not written:
            shutil.copyfile(path, out / path.name)


def quantization_config(kind: str, ignored: list[str]) -> dict[str, Any]:
    """As compressed-tensors has it in a config.json."""
    weights = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "group" if kind == "int4" else "channel",
        "group_size": INT4_GROUP if kind == "int4" else None,
        "dynamic": False,
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
    }


def _chosen(config: dict[str, Any], kind: str, infos: dict[str, TensorInfo]) -> set[str]:
    parts = [
        part
        for parameter, parts in hf_names(spec_from_hf(config, None)).items()
        if is_matrix(parameter)
        for part in parts
    ]
    if turned := next((part.name for part in parts if part.view.transposed), None):
        raise WeightError(config.get("model_type", "model"), f"tensor {turned} is stored [in, out]: not supported")
    chosen = {part.name for part in parts}
    for name in sorted(chosen):
        if name not in infos:
            raise WeightError(config.get("model_type", "model"), f"tensor {name} is missing")
        info = infos[name]
        if info.stored not in FLOATS:
            raise WeightError(info.file, f"tensor {name} is stored as {info.stored}, must be {', '.join(FLOATS)}")
        if kind == "int4" and info.shape[-1] % INT4_GROUP:
            raise WeightError(
                info.file, f"tensor {name} has {info.shape[-1]} input features, must be a multiple of {INT4_GROUP}"
            )
    return chosen


def _size(info: TensorInfo, kind: str) -> int:
    count = math.prod(info.shape)
    return count * 9 // 16 + 16 if kind == "int4" else count + 4 * info.shape[0]


def _tensors(info: TensorInfo, kind: str | None) -> Iterator[tuple[str, np.ndarray]]:
    if kind is None:
        yield info.name, read_tensor(info)
        return
    codes, module = quantize(float32(read_tensor(info)), kind), info.name.removesuffix(".weight")
    if kind == "int4":
        yield from _packed(module, codes)
    else:
        yield f"{module}.weight", codes.values
        yield f"{module}.weight_scale", codes.scale


def _packed(module: str, codes: Codes) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{module}.weight_packed", pack_words(codes.values, 4, 1)
    yield f"{module}.weight_scale", codes.scale.astype(ml_dtypes.bfloat16)
    yield f"{module}.weight_shape", np.array(codes.values.shape, np.int64)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
