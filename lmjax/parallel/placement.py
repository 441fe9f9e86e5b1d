"""Where the arrays and the code of a step go: one mesh of devices, one ``shard_map`` around a whole program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmjax.models.spec import DecoderSpec
from lmjax.nn.env import Env
from lmjax.parallel import split
from lmjax.parallel.rules import LOGITS, POOL, REPLICATED, TP, partition_specs
from pallas_kernels.platform import Backend, Target


@dataclass(frozen=True)
class Placement:
    """``mesh``: one axis, ``tp``. ``expert_parallel``: devices hold whole experts, not a share of each."""

    mesh: Mesh
    expert_parallel: bool = False

    @property
    def size(self) -> int:
        return self.mesh.devices.size

    def env(self, target: Target, attention: Backend = "auto") -> Env:
        spread = self.size > 1
        return Env(target, attention, TP if spread else None, spread and self.expert_parallel)

    def share(self, spec: DecoderSpec) -> DecoderSpec:
        """One device's share of a spec made by ``split.spread``."""
        return split.share(spec, self.size, self.expert_parallel)

    def params(self, spec: DecoderSpec) -> Any:
        return partition_specs(spec, self.expert_parallel)

    def place(self, tree: Any, specs: Any = REPLICATED) -> Any:
        """Abstract arrays with their shardings. ``specs``: a tree of PartitionSpecs, or one for all."""
        if isinstance(specs, PartitionSpec):
            specs = jax.tree.map(lambda _: specs, tree)

        def put(leaf: Any, spec: PartitionSpec) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(put, tree, specs)

    def wrap_forward(self, forward: Callable[..., Any], spec: DecoderSpec, num_groups: int) -> Callable[..., Any]:
        """``runtime.forward``'s function for one device's share -> the same for all of them."""
        if self.size == 1:
            return forward
        pools = (POOL,) * num_groups
        return jax.shard_map(
            forward,
            mesh=self.mesh,
            in_specs=(self.params(spec), pools, REPLICATED, REPLICATED, REPLICATED),
            out_specs=(LOGITS, pools, REPLICATED, REPLICATED, REPLICATED),
            check_vma=False,
        )

    def wrap_sample(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """``runtime.sample``'s function for one device's rows of the logits -> the same for all of them."""
        if self.size == 1:
            return sample
        return jax.shard_map(
            sample,
            mesh=self.mesh,
            in_specs=(LOGITS, REPLICATED, REPLICATED, REPLICATED),
            out_specs=(REPLICATED, REPLICATED),
            check_vma=False,
        )


def make_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh over all ``devices`` (real ones, or of a topology), in their order."""
    return Mesh(np.array(devices), (TP,), axis_types=(AxisType.Auto,))
