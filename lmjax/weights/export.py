"""A Hugging Face model directory from parameters in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lmjax.models.params import DecoderParams, named_leaves
from lmjax.models.registry import FAMILIES, spec_from_hf
from lmjax.weights.errors import WeightError
from lmjax.weights.pytree import extract, layout_of, making
from lmjax.weights.quant import without

MAX_SHARD_SIZE = 5 * 10**9  # bytes
INDEX = "model.safetensors.index.json"
Tensors = dict[str, np.ndarray]


def save_pretrained(
    params: DecoderParams,
    config: Mapping[str, Any],
    directory: str | Path,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Writes model.safetensors (or several with an index, each of at most ``max_shard_size`` bytes of tensors), then
    config.json with the weights' type, and generation_config.json where there is one.

    params: in the model's own layout or one that is spread over a mesh; tensors are as they are there, bit by bit.
    config: a config.json's content. Host memory: one file's tensors and one parameter. Raises ``WeightError`` for a
    tree that is not the config's, and where the directory has weights that would not be replaced.
    """
    config = without(dict(config))  # floats are what is written
    directory, spec = Path(directory), spec_from_hf(config, None)
    leaves = named_leaves(params)
    if any(name.endswith(".weight.values") for name in leaves):
        raise WeightError("params", "are kept quantised; floats are written with --quantized-weights dequantized")
    wide = layout_of(params, spec)
    dtypes = {str(leaf.dtype) for leaf in leaves.values()}
    if len(dtypes) > 1:
        raise WeightError("params", f"are of several types ({', '.join(sorted(dtypes))}), a model is of one")
    plan = making(spec, wide)
    itemsize = next(iter(leaves.values())).dtype.itemsize
    sizes = {
        name: int(np.prod(part.shape)) * itemsize
        for made, names in plan.values()
        for parts, tensors in zip(made.stages, names, strict=True)
        for part, name in zip(parts, tensors, strict=True)
    }
    files = split_files(sizes, max_shard_size)
    _check_directory(directory, set(files.values()))
    directory.mkdir(parents=True, exist_ok=True)
    held: Tensors = {}
    missing = {file: [name for name in files if files[name] == file] for file in dict.fromkeys(files.values())}
    for parameter, (made, names) in plan.items():
        value = np.asarray(leaves[parameter])
        for stage, (parts, tensors) in enumerate(zip(made.stages, names, strict=True)):
            found = extract(parts, tensors, value[stage] if made.stacked else value)
            held |= {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}
        for file in [file for file, wanted in missing.items() if all(name in held for name in wanted)]:
            save_file({name: held.pop(name) for name in missing.pop(file)}, directory / file, metadata={"format": "pt"})
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
        _write_json(directory / INDEX, index)
    field = "torch_dtype" if "torch_dtype" in config else "dtype"
    architecture = {"architectures": config.get("architectures") or [FAMILIES[config["model_type"]].ARCHITECTURE]}
    _write_json(directory / "config.json", {**config, **architecture, field: dtypes.pop()})
    if generation_config:
        _write_json(directory / "generation_config.json", dict(generation_config))


def split_files(sizes: dict[str, int], most: int) -> dict[str, str]:
    """{tensor: file}, in the order of ``sizes``. A tensor of more than ``most`` bytes has a file of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return dict.fromkeys(sizes, "model.safetensors")
    count = len(groups)
    return {name: f"model-{i:05d}-of-{count:05d}.safetensors" for i, group in enumerate(groups, 1) for name in group}


def _check_directory(directory: Path, files: set[str]) -> None:
    if directory.exists() and not directory.is_dir():
        raise WeightError(directory, "is a file, must be a directory")
    other = sorted(p.name for p in _weights(directory) if p.name not in files | ({INDEX} if len(files) > 1 else set()))
    if other:
        raise WeightError(directory, f"holds other weights ({', '.join(other[:3])}): give an empty directory")


def _weights(directory: Path) -> Iterator[Path]:
    yield from directory.glob("*.safetensors")
    yield from directory.glob("*.safetensors.index.json")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
