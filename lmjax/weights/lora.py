"""Reads a LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors) for a decoder.

The names of modules are those of the model's checkpoints (``models.names``), and so are the places of their rows: a
fused q, k and v becomes three pairs with the same A.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lmjax.models.layout import AS_IT_IS, TensorPart
from lmjax.models.lora import LayerAdapters, adapter_specs
from lmjax.models.names import hf_names
from lmjax.models.registry import family_layout
from lmjax.models.spec import DecoderSpec, MlpSpec
from lmjax.nn.lora import Lora
from lmjax.types import AdapterError
from lmjax.weights import safetensors
from lmjax.weights.buffers import DTYPES, aligned_empty
from lmjax.weights.errors import WeightError
from lmjax.weights.lora_config import LoraConfig, read_config
from lmjax.weights.safetensors import TensorInfo

WEIGHTS = "adapter_model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_PREFIX = "base_model.model."  # of PEFT's names; then comes the module's name in transformers' model
_TARGETS = ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")


@dataclass(frozen=True)
class HostAdapter:
    """``rank``: the highest of its modules. ``tree``: ``models.lora.LayerAdapters`` of one slot a layer, numpy."""

    rank: int
    tree: Any


@dataclass(frozen=True)
class _Place:
    """Where the pair of a module goes: parts ``first`` .. of a matrix, for which its rows are ``parts``."""

    layer: int
    matrix: str
    first: int
    parts: tuple[TensorPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the module."""
        part = self.parts[0]
        rows, columns = part.shape
        return (columns, rows) if part.view.transposed else (rows, columns)


def read_adapter(path: str | Path, spec: DecoderSpec, spread: DecoderSpec, dtype: str, max_rank: int) -> HostAdapter:
    """spec: the model's; spread: what all devices hold together (``parallel.split.spread``), whose shapes the tree has.

    Names, shapes and types of all tensors are checked before one is read, values (NaN, infinite) as they come. The
    scale is a factor of B; ranks below ``max_rank`` are filled up with zeros. Raises ``AdapterError``: one line with
    the file, and the field or the tensor at fault.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise AdapterError(f"{path}: is no directory")
    config = read_config(directory)
    places = _places(spec)
    _check_modules(config, places, spec)
    try:
        pairs = _pairs(directory / WEIGHTS, config, places, spec)
    except WeightError as error:
        raise AdapterError(str(error)) from None
    for module in pairs:
        if config.rank_of(module) > max_rank:
            raise AdapterError(
                f"{config.path}: r: got {config.rank_of(module)} (of {module}), must be at most {max_rank} "
                "(--max-lora-rank)"
            )
    tree = jax.tree.map(lambda p: np.zeros(p.shape, DTYPES[dtype]), adapter_specs(spread, 1, max_rank))
    for module, pair in pairs.items():
        _fill(tree, places[module], pair, config.scale_of(module))
    return HostAdapter(max(map(config.rank_of, pairs)), tree)


def _places(spec: DecoderSpec) -> dict[str, _Place]:
    """By the name of every module that an adapter may change."""
    found = {}
    for parameter, parts in hf_names(spec).items():
        scope, _, rest = parameter.partition(".")
        layer, _, matrix = rest.partition(".")
        target, _, kind = matrix.rpartition(".")
        if scope == "layers" and kind == "weight" and target in _TARGETS:
            first = 0
            for name, own in _by_name(parts):
                found[name] = _Place(int(layer), target, first, own)
                first += len(own)
    return found


def _by_name(parts: tuple[TensorPart, ...]) -> Iterator[tuple[str, tuple[TensorPart, ...]]]:
    for name in dict.fromkeys(part.name for part in parts):
        yield name.removesuffix(".weight"), tuple(part for part in parts if part.name == name)


def _check_modules(config: LoraConfig, places: dict[str, _Place], spec: DecoderSpec) -> None:
    for wanted in () if isinstance(config.modules, str) else config.modules:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in places):
            raise AdapterError(
                f"{config.path}: target_modules: got {wanted!r}, must be of {', '.join(_ends(places))}"
                f"{_experts_hint(spec)}"
            )


def _ends(places: dict[str, _Place]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in places})


def _experts_hint(spec: DecoderSpec) -> str:
    if all(isinstance(layer.mlp, MlpSpec) for layer in spec.layers):
        return ""
    return " (experts, routers and shared experts of MoE layers cannot have adapters)"


Pair = tuple[TensorInfo, TensorInfo]


def _pairs(path: Path, config: LoraConfig, places: dict[str, _Place], spec: DecoderSpec) -> dict[str, Pair]:
    """(A, B) of each module, checked."""
    if not path.exists():
        raise AdapterError(f"{path}: is missing (files of other formats, such as adapter_model.bin, are not read)")
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in safetensors.read_header(path).items():
        own, side = _split(name)
        module = _known(own, places, spec)
        if side is None or module not in places:
            raise AdapterError(
                f"{path}: tensor {name}: must be lora_A.weight or lora_B.weight of one of the layers' "
                f"{', '.join(_ends(places))}{_experts_hint(spec)}"
            )
        if (field := config.leaves_out(own)) is not None:
            raise AdapterError(f"{path}: tensor {name}: is of a module that {config.path.name} leaves out ({field})")
        if info.stored not in _FLOATS:
            raise AdapterError(f"{path}: tensor {name}: is stored as {info.stored}, must be {', '.join(_FLOATS)}")
        found.setdefault(module, {})[side] = info
    if not found:
        raise AdapterError(f"{path}: has no tensors")
    for module, sides in found.items():
        out, columns = places[module].shape
        rank = config.rank_of(module)
        for side, shape in (("A", (rank, columns)), ("B", (out, rank))):
            if side not in sides:
                raise AdapterError(f"{path}: lora_{side}.weight of {module} is missing")
            if sides[side].shape != shape:
                raise AdapterError(
                    f"{path}: tensor {sides[side].name}: has shape {list(sides[side].shape)}, must be {list(shape)} "
                    f"(r {rank}, and the model's {module})"
                )
    return {module: (found[module]["A"], found[module]["B"]) for module in found}


def _split(name: str) -> tuple[str, str | None]:
    """A tensor's module, and A, B or None."""
    for side in ("A", "B"):
        for end in (f".lora_{side}.weight", f".lora_{side}.default.weight"):
            if name.endswith(end):
                return name.removesuffix(end).removeprefix(_PREFIX), side
    return name, None


def _known(module: str, places: dict[str, _Place], spec: DecoderSpec) -> str:
    """The module's full name: an adapter of a model without its head lacks a prefix."""
    for prefix in ("", family_layout(spec).prefix, "model."):
        if prefix + module in places:
            return prefix + module
    return module


def _fill(tree: Any, place: _Place, pair: Pair, scale: float) -> None:
    layer: LayerAdapters = tree[place.layer]
    name = place.matrix.rpartition(".")[2]
    lora: Lora = getattr(layer, name)
    a, b = (_read(info) for info in pair)
    b *= np.float32(scale)
    rank = a.shape[0]
    at = place.first
    for part in place.parts:
        rows = _in_order(part, b)
        count = 2 if name == "gate_up" and part.index == () and len(lora.b) == 2 else 1  # one module, gate and up
        for own in rows.reshape(count, -1, rank):
            lora.a[at, :rank] = a
            target = lora.b[at][..., :rank]
            # with fewer KV heads than devices each is held by several
            own = own.reshape(-1, *target.shape[1:]) if name == "qkv" and at else own.reshape(target.shape)
            with np.errstate(over="ignore"):  # told below
                target[...] = np.repeat(own, target.shape[0] // own.shape[0], axis=0)
            if not np.isfinite(target.astype(np.float32)).all():
                raise AdapterError(f"{pair[1].file}: tensor {pair[1].name}: has values beyond {target.dtype}")
            at += 1


def _in_order(part: TensorPart, b: np.ndarray) -> np.ndarray:
    """B [out, r] with its rows in the parameter's order: it is [out, r] also where matrices are [in, out]."""
    view = replace(part.view, transposed=False)
    return replace(part, view=view if view.rows else AS_IT_IS).in_order(b)


def _read(info: TensorInfo) -> np.ndarray:
    out = aligned_empty(info.shape, np.dtype(np.float32))
    try:
        safetensors.read_into(info, out)
    except WeightError as error:
        raise AdapterError(str(error)) from None
    except FloatingPointError:
        raise AdapterError(f"{info.file}: tensor {info.name}: has values beyond float32") from None
    return out
