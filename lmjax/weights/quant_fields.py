"""What the readers of quantised layouts share: fields of their configs, and which modules these leave alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from lmjax.models.hf_config import HfConfig
from lmjax.weights.codes import Infos
from lmjax.weights.errors import WeightError
from lmjax.weights.safetensors import TensorInfo


def check_fields(config: HfConfig, applied: Iterable[str], of_quantiser: Iterable[str]) -> None:
    """``of_quantiser``: fields that tell how the weights were made, or which code runs them, and not what they are."""
    known = {"quant_method", *applied, *of_quantiser}
    for name, value in config.values.items():
        if name not in known and value not in (None, False, [], {}, ""):
            raise config.error(name, value, f"absent: unknown here (known: {', '.join(sorted({*applied}))})")


def names(config: HfConfig, field: str) -> tuple[str, ...]:
    found: Any = config.get(field, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise config.error(field, found, "a list of module names")
    return tuple(found)


def is_ignored(module: str, ignored: Iterable[str]) -> bool:
    """Module names as transformers reads them: whole, a run of whole parts (``lm_head``, ``self_attn.q_proj``), or a
    regular expression after ``re:``."""
    for name in ignored:
        if name.startswith("re:"):
            if re.match(name[3:], module):
                return True
        elif f".{name}." in f".{module}.":
            return True
    return False


def modules(infos: Infos, suffix: str) -> dict[str, TensorInfo]:
    """{module: its tensor} of all tensors whose names end in ``.suffix``."""
    return {name[: -len(suffix) - 1]: info for name, info in infos.items() if name.endswith(f".{suffix}")}


def tensor(infos: Infos, module: str, part: str) -> TensorInfo:
    info = infos.get(f"{module}.{part}")
    if info is None:
        near = next((x for name, x in infos.items() if name.startswith(f"{module}.")), None)
        raise WeightError(near.file if near else module, f"tensor {module}.{part} is missing")
    return info


def check_shape(info: TensorInfo, *allowed: tuple[int, ...]) -> None:
    if info.shape not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise WeightError(info.file, f"tensor {info.name} has shape {list(info.shape)}, must be {wanted}")


def check_stored(info: TensorInfo, *allowed: str) -> None:
    if info.stored not in allowed:
        raise WeightError(info.file, f"tensor {info.name} is stored as {info.stored}, must be {' or '.join(allowed)}")
