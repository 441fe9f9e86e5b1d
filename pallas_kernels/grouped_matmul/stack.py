"""Matrices of few bits, one a group of rows, whose input features come in runs that share a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax

from pallas_kernels.quant_matmul.weight import NIBBLES, Kind, QuantWeight

KINDS = ("int4", "mxfp4", "int8_group", "fp8_group")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantStack:
    """Stands for [G, N, K], or gate and up [G, 2, N, K]; every matrix is stored as ``QuantWeight`` has it.

    ``values`` [G, K (/ 2), N] or [G, K (/ 2), 2, N]; ``scale`` and ``zero`` [G, K / g, ...] likewise. ``kind`` (of
    ``KINDS``) is static.
    """

    values: Any
    scale: Any
    zero: Any = None
    kind: Kind = field(default="int4", metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it stands for."""
        count, stored, *out = self.values.shape
        return (count, *out, stored * (2 if self.kind in NIBBLES else 1))

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def run(self) -> int:
        """Input features that share a scale."""
        return self.shape[-1] // self.scale.shape[1]

    @property
    def form(self) -> str:
        """For the tables of tiles."""
        return f"{self.kind.removesuffix('_group')}-g{self.run}"

    def with_parts(self) -> QuantStack:
        """With the axis of gate and up, of 1 where there is none."""

        def seen(a: Any) -> Any:
            return a.reshape(*a.shape[:2], -1, a.shape[-1])

        return QuantStack(
            seen(self.values), seen(self.scale), None if self.zero is None else seen(self.zero), self.kind
        )

    def flat(self) -> QuantWeight:
        """Of a single matrix, G = 1: as [K, parts * N]."""

        def seen(a: Any) -> Any:
            return a.reshape(a.shape[1], math.prod(a.shape[2:]))

        return QuantWeight(
            seen(self.values), seen(self.scale), None if self.zero is None else seen(self.zero), self.kind
        )
