"""Reads an encoder's weights from its .safetensors files."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np

from lmjax.models.encoder import abstract_params
from lmjax.models.encoder_spec import EncoderSpec, encoder_names, harmless
from lmjax.models.params import map_named, named_leaves
from lmjax.weights.buffers import DTYPES, aligned_empty, cast
from lmjax.weights.errors import WeightError
from lmjax.weights.safetensors import TensorInfo, read_directory, read_tensor
from lmjax.weights.source import ModelSource

PREFIXES = ("bert.", "roberta.")
OLD = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
FLOATS = ("F64", "F32", "F16", "BF16")


def load_encoder(source: ModelSource, spec: EncoderSpec, dtype: str, load_format: str = "auto", seed: int = 0) -> Any:
    """The tree of ``models.encoder.abstract_params`` as jax arrays on the default device. Names, shapes and types of
    all tensors are checked before the first is read; ``WeightError`` names file and tensor."""
    wanted = abstract_params(spec, dtype)
    if load_format == "dummy":
        return map_named(lambda name, leaf: jax.device_put(_dummy(name, leaf, seed)), wanted)
    infos = {_plain(name): info for name, info in read_directory(source.weights).items()}
    names = encoder_names(spec)
    _check(infos, names, named_leaves(wanted), source, spec)

    def load(name: str, leaf: Any) -> jax.Array:
        parts, out = names[name], aligned_empty(leaf.shape, DTYPES[dtype])
        for i, part in enumerate(parts):
            info = infos[part]
            try:
                out[i if len(parts) > 1 else ...] = cast(read_tensor(info), DTYPES[dtype])
            except FloatingPointError as error:
                raise WeightError(info.file, f"tensor {info.name} has values beyond {dtype}") from error
            except OSError as error:
                raise WeightError(info.file, f"tensor {info.name} cannot be read: {error.strerror}") from error
        return jax.device_put(out)

    return map_named(load, wanted)


def _plain(name: str) -> str:
    """The name in a checkpoint of the bare model, as it is written today."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in OLD:
        name = name.replace(old, new)
    return name


def _check(
    infos: dict[str, TensorInfo],
    names: dict[str, tuple[str, ...]],
    leaves: dict[str, Any],
    source: ModelSource,
    spec: EncoderSpec,
) -> None:
    needed = {part for parts in names.values() for part in parts}
    if missing := sorted(needed - infos.keys()):
        raise WeightError(source.weights, f"{len(missing)} tensors missing, the first is {missing[0]}")
    for name, info in infos.items():
        if name not in needed and not harmless(name, spec):
            raise WeightError(info.file, f"tensor {info.name} is unknown: the config has no place for it")
    for name, parts in names.items():
        shape = leaves[name].shape[1:] if len(parts) > 1 else leaves[name].shape
        for info in (infos[part] for part in parts):
            if info.shape != shape:
                raise WeightError(
                    info.file, f"tensor {info.name} has shape {list(info.shape)}, the config asks for {list(shape)}"
                )
            if info.stored not in FLOATS:
                raise WeightError(
                    info.file, f"tensor {info.name} is stored as {info.stored}; known: {', '.join(FLOATS)}"
                )


def _dummy(name: str, leaf: Any, seed: int) -> np.ndarray:
    if name.endswith(("bias", "scale")):
        return np.full(leaf.shape, name.endswith("scale"), leaf.dtype)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (rng.standard_normal(leaf.shape, np.float32) / np.sqrt(leaf.shape[-1])).astype(leaf.dtype)
