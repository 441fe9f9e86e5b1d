"""How a matrix is kept that is not plain floats, as data: a part of a layer's spec, and no code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int4", "int8", "fp8", "mxfp4"]


@dataclass(frozen=True)
class Packing:
    """``group``: input features that share a scale; 0: all of them, so a scale per output feature.

    ``zero``: whether groups have a zero of their own (int4 only). ``scale_dtype``: of scales and zeros; of mxfp4 uint8,
    exponents of two plus 127.
    """

    kind: Kind
    group: int = 0
    zero: bool = False
    scale_dtype: str = "float32"

    @property
    def values_dtype(self) -> str:
        return {"int8": "int8", "fp8": "float8_e4m3fn"}.get(self.kind, "uint8")

    @property
    def per_byte(self) -> int:
        """Numbers in one stored value."""
        return 2 if self.values_dtype == "uint8" else 1

    def input_axis(self, num_axes: int, experts: bool) -> int:
        """Where the values of a weight of ``num_axes`` axes have the input features: first; of a stack of experts
        after the experts; and last, as in plain numbers, where such a stack has a scale an output feature."""
        if not experts:
            return 0
        return 1 if self.group else num_axes - 1
