"""The table of quantised layouts: ``quantization_config`` of a config.json -> which tensors mean which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from lmjax.models.hf_config import HfConfig
from lmjax.nn.packing import Packing
from lmjax.weights import quant_awq, quant_bnb, quant_compressed, quant_fp8, quant_gptq, quant_mxfp4
from lmjax.weights.codes import Infos, Stored

FIELDS = ("quantization_config", "compression_config")  # of config.json


class Layout(Protocol):
    """``name``: for messages. ``find``: {name of the plain weight: how it is stored} of a checkpoint's tensors.
    ``packing``: of a module, from the config alone; None: no weight type fits it, or it is not quantised."""

    @property
    def name(self) -> str: ...

    def find(self, infos: Infos) -> dict[str, Stored]: ...

    def packing(self, module: str, rows: int, columns: int) -> Packing | None: ...

    def harmless(self, name: str) -> bool: ...


@runtime_checkable
class Stacks(Protocol):
    """A layout that also has tensors of all experts' matrices, [E, in, out]. ``stack``: the packing of one, by name."""

    def stack(self, tensor: str) -> Packing | None: ...


LAYOUTS: dict[str, Callable[[HfConfig], Layout]] = {
    "gptq": quant_gptq.layout,
    "awq": quant_awq.layout,
    "fp8": quant_fp8.layout,
    "compressed-tensors": quant_compressed.layout,
    "bitsandbytes": quant_bnb.layout,
    "mxfp4": quant_mxfp4.layout,
}


def layout_of(config: dict[str, Any]) -> Layout | None:
    """Of a config.json; None: its weights are plain. ValueError names the field, the value and what is allowed."""
    for name in FIELDS:
        if config.get(name) is not None:
            hf = HfConfig(config[name], f"{name}.")
            method = hf.get("quant_method")
            if method is None and hf.get("load_in_4bit") is not None:
                method = "bitsandbytes"  # its first versions do not say
            if not isinstance(method, str) or method not in LAYOUTS:
                raise hf.error("quant_method", method, f"one of {', '.join(LAYOUTS)}")
            return LAYOUTS[method](hf)
    return None


def without(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the same model with plain weights."""
    return {name: value for name, value in config.items() if name not in FIELDS}
