"""Which logical axis of a parameter lies on which mesh axis. No other place decides how weights are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lmjax.models.params import ParamSpec, param_specs
from lmjax.models.spec import DecoderSpec

PP, TP = "pp", "tp"
ALL = (PP, TP)
POOL = PartitionSpec(PP, None, None, TP)  # [L, 2, blocks, K, B, H]: by stage and by KV head
LOGITS = PartitionSpec(ALL)  # [V, S]: by vocabulary
STAGES = PartitionSpec(PP)  # [stages, ...]: what each stage has of its own
REPLICATED = PartitionSpec()

MeshAxes = str | tuple[str, ...]


def rules(expert_parallel: bool) -> dict[str, MeshAxes | None]:
    """Logical axis (``ParamSpec.axes``) -> mesh axes; None: every device has all of it."""
    return {
        # over the stages too: else each would hold all of it, and a stage alone would do the head's work
        "vocab": ALL,
        "stages": PP,
        "kv_heads": TP,
        "heads": TP,
        "ffn": TP,
        "experts": TP if expert_parallel else None,
        "expert_ffn": None if expert_parallel else TP,
        "embed": None,
    }


def partition_specs(spec: DecoderSpec, expert_parallel: bool) -> Any:
    """The parameter tree with a ``PartitionSpec`` at every leaf."""
    return placed(param_specs(spec), expert_parallel)


def placed(tree: Any, expert_parallel: bool) -> Any:
    """A tree of ``ParamSpec`` with a ``PartitionSpec`` at every leaf."""
    table = rules(expert_parallel)

    def place(param: ParamSpec) -> PartitionSpec:
        return PartitionSpec(*(None if axis is None else table[axis] for axis in param.axes))

    return jax.tree.map(place, tree)


def num_shares(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Into how many parts ``spec`` cuts an array on a mesh with axes of these ``sizes``."""
    axes = (axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry))
    return math.prod(sizes[axis] for axis in axes)
