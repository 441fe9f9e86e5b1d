"""Weight types. ``linear`` dispatches on them; no model mentions how a weight is stored."""

from __future__ import annotations

import jax
from flax import struct


@struct.dataclass
class Dense:
    """A plain matrix. The output axes may be several (heads, features); they are flattened in the product."""

    weight: jax.Array  # [*out, in]
    bias: jax.Array | None = None  # [*out]
