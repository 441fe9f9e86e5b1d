"""Which logical axis of a parameter lies on which mesh axis. No other place decides how weights are spread."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from lmjax.models.params import ParamSpec, param_specs
from lmjax.models.spec import DecoderSpec

TP = "tp"
POOL = PartitionSpec(None, None, None, TP)  # [L, 2, blocks, K, B, H]: by KV head
LOGITS = PartitionSpec(TP)  # [V, S]: by vocabulary
REPLICATED = PartitionSpec()


def rules(expert_parallel: bool) -> dict[str, str | None]:
    """Logical axis (``ParamSpec.axes``) -> mesh axis; None: every device has all of it."""
    return {
        "vocab": TP,
        "kv_heads": TP,
        "heads": TP,
        "ffn": TP,
        "experts": TP if expert_parallel else None,
        "expert_ffn": None if expert_parallel else TP,
        "embed": None,
    }


def partition_specs(spec: DecoderSpec, expert_parallel: bool) -> Any:
    """The parameter tree with a ``PartitionSpec`` at every leaf."""
    table = rules(expert_parallel)

    def place(param: ParamSpec) -> PartitionSpec:
        return PartitionSpec(*(None if axis is None else table[axis] for axis in param.axes))

    return jax.tree.map(place, param_specs(spec))
