"""Which of a model's matrices stay quantised in memory, from settings, config.json and card."""

from __future__ import annotations

import logging
import math

import numpy as np

from lmjax.config import ConfigError, EngineConfig
from lmjax.models.names import gguf_names, hf_names
from lmjax.models.params import ParamSpec, named_leaves, param_specs
from lmjax.models.registry import family_layout
from lmjax.models.spec import DecoderSpec
from lmjax.nn.packing import Packing
from lmjax.parallel.rules import TP, rules
from lmjax.parallel.split import Degree
from lmjax.weights.checkpoint import stored_layout
from lmjax.weights.errors import WeightError
from lmjax.weights.packing import chosen, fitted, is_matrix, packed, packings
from lmjax.weights.quant import Layout
from lmjax.weights.quant_load import KINDS, AtLoad
from lmjax.weights.safetensors import Range, TensorInfo
from lmjax.weights.source import ModelSource
from pallas_kernels.platform import Target

log = logging.getLogger(__name__)


def packed_spec(
    spec: DecoderSpec, config: EngineConfig, source: ModelSource, platform: str, target: Target, degree: Degree
) -> DecoderSpec:
    """The model's own spec (not spread) with the packing of its matrices. Raises ``ConfigError``, and
    ``WeightError`` where config.json is at fault."""
    kind = config.quantization
    keep = {"auto": platform == "gpu", "packed": True, "dequantized": False}[config.quantized_weights]
    layout = _stored(source) if keep or source.kind == "hf" else None  # a .gguf file's header takes a while
    if kind is not None:
        if layout is not None and source.kind == "hf":
            raise ConfigError(f"--quantization: got {kind}, but the checkpoint is quantised already ({layout.name})")
        _check_at_load(spec, kind, degree)
        if source.kind == "arrays":
            raise ConfigError(f"--quantization: got {kind}, but params are taken as they are; quantised are files")
    if not keep or source.kind == "arrays" or (kind is None and (layout is None or config.load_format == "dummy")):
        return spec
    no_fp8 = target.platform == "cuda" and not target.has_fp8
    if kind == "fp8" and no_fp8:
        raise ConfigError("--quantization: fp8 needs compute capability 8.9 or above; take int8 or int4 on this card")
    names = gguf_names(spec) if source.kind == "gguf" else hf_names(spec)
    if kind is not None:
        layout = AtLoad(kind, chosen(names), _nothing_is_read)
    assert layout is not None

    def allowed(p: ParamSpec, packing: Packing) -> bool:
        if target.platform == "cuda" and _beyond_offsets(p, packing, degree):
            if kind is None:
                return False
            raise ConfigError(
                f"--quantization: got {kind}, but the experts of a layer take between 2 and 4 GiB a device, which "
                "kernels do not index; spread them over more devices (--tensor-parallel-size)"
            )
        return not (no_fp8 and packing.kind == "fp8")

    spec = packed(spec, names, layout, lambda p: _shares(p, degree), allowed)
    matrices = [name for name in named_leaves(param_specs(spec)) if is_matrix(name)]
    if matrices:
        log.info("%d matrices of layers are kept quantised, %d are floats", len(packings(spec)), len(matrices))
    return spec


def _nothing_is_read(info: TensorInfo, rows: Range | None) -> np.ndarray:
    raise AssertionError(f"{info.name} is to be read, but only its packing was asked for")


def _stored(source: ModelSource) -> Layout | None:
    try:
        return stored_layout(source)
    except WeightError:
        raise
    except ValueError as error:
        raise WeightError(source.config_file, str(error)) from error


def _shares(p: ParamSpec, degree: Degree) -> int:
    """Over how many devices of a stage the input features are spread."""
    axis = p.axes[-1]
    return degree.tp if axis is not None and rules(degree.expert_parallel)[axis] == TP else 1


def _beyond_offsets(p: ParamSpec, packing: Packing, degree: Degree) -> bool:
    """Whether a device's share of a stack of experts has as many bytes as Pallas-Triton's offsets are wrong for."""
    if "experts" not in p.axes:
        return False
    table = rules(degree.expert_parallel)
    shares = degree.tp if any(axis is not None and table[axis] == TP for axis in p.axes) else 1
    return 2**31 <= math.prod(p.shape) // packing.per_byte // shares <= 2**32


def _check_at_load(spec: DecoderSpec, kind: str, degree: Degree) -> None:
    packing = KINDS[kind]
    if family_layout(spec).transposed:
        raise ConfigError(
            f"--quantization: got {kind}, but a {spec.model_type} model's matrices are [in, out] in files"
        )
    for name, p in named_leaves(param_specs(spec)).items():
        shares = _shares(p, degree)
        if is_matrix(name) and fitted(packing, p.shape[-1], shares) is None:
            over = f" on each of {shares} devices" if shares > 1 else ""
            raise ConfigError(
                f"--quantization: got {kind}, but {name} has {p.shape[-1] // shares} input features{over}, "
                f"must be a multiple of {packing.group}"
            )
