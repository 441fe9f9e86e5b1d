"""How a matrix is kept that is not plain floats, as data: a part of a layer's spec, and no code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int4", "int8", "fp8"]


@dataclass(frozen=True)
class Packing:
    """``group``: input features that share a scale; 0: all of them, so a scale per output feature.

    ``zero``: whether groups have a zero of their own (int4 only). ``scale_dtype``: of scales and zeros.
    """

    kind: Kind
    group: int = 0
    zero: bool = False
    scale_dtype: str = "float32"

    @property
    def values_dtype(self) -> str:
        return {"int4": "uint8", "int8": "int8", "fp8": "float8_e4m3fn"}[self.kind]
