"""Weight types. ``linear`` dispatches on them; no model mentions how a weight is stored."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from lmjax.nn.lora import Lora
from lmjax.nn.packing import Packing


@struct.dataclass
class Quantized:
    """A matrix of few bits, input first: a share of its input or output axes is one of the matrix.

    As ``pallas_kernels.quant_matmul.QuantWeight`` has it, with several output axes. Of experts [E, ...]: with groups
    every matrix like that; else the values are [E, *out, in] and the scales [E, *out].
    """

    values: jax.Array  # [in, *out]; int4 and mxfp4: [in / 2, *out]
    scale: jax.Array  # [*out]; with groups: [in / group, *out]
    zero: jax.Array | None = None  # as scale
    packing: Packing = struct.field(pytree_node=False, default=Packing("int8"))


@struct.dataclass
class Dense:
    """A matrix and its bias. The output axes may be several (heads, features); they are flattened in the product."""

    weight: Any  # jax.Array [*out, in], or Quantized
    bias: jax.Array | None = None  # [*out]
    lora: Lora | None = None  # adapters; no part of a model's own parameters
